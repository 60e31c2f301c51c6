"""A run that does not fit is refused before it starts, with what makes it smaller."""

import dataclasses
import re
import types

import jax
import pytest

from t5x_gpu.errors import OutOfMemoryError
from t5x_gpu.runtime.hardware import Limit, RunLimits
from t5x_gpu.training.memory import RunMemory, estimate
from t5x_gpu.training.program import bytes_per_device
from tests import helpers_layouts
from tests.helpers_layouts import CASES, QUICK, Case
from tests.helpers_train import Project
from tests.messages import raises

FULL_REMAT = Case(config=dict(remat_policy='full'), num_devices=1, num_microbatches=8)
SMALL_BATCH = dict(batch_size=8)
# Every parallelism, experts, accumulation by layer, and another dtype.
OTHERS = ('fsdp_4_microbatches', 'fsdp_bfloat16', 'tp_sp', 'cp', 'pp_circular', '3d', 'ep_fsdp')


def memory_of(case: Case, limit: int = 2**50, host: int = 2**50, **sizes) -> RunMemory:
  program = helpers_layouts.build(case, **sizes)
  limits = RunLimits(Limit(limit, 'a test'), Limit(host, 'a test'), num_machines=1)
  return RunMemory(estimate(program), limits, program)


def compiled(memory: RunMemory):
  program = memory.program
  return program.train_step.lower(program.abstract_state, program.abstract_batch).compile(QUICK)


@pytest.mark.parametrize(
  'case',
  [
    pytest.param(CASES['zero1'], id='zero1'),
    pytest.param(FULL_REMAT, id='full_remat', marks=pytest.mark.slow),
    *(pytest.param(CASES[name], id=name, marks=pytest.mark.slow) for name in OTHERS),
  ],
)
def test_the_estimate_is_a_lower_bound_of_what_xla_gives(case):
  memory = memory_of(case)
  exact = memory.compiled(compiled(memory))
  assert 0 < memory.need.activations and memory.need.total <= exact.need.total
  assert 'at least' in memory.line() and 'at least' not in exact.line()


def refusal(memory: RunMemory) -> OutOfMemoryError:
  with raises(OutOfMemoryError) as error:
    memory.check()
  return error.value


def test_what_fits_is_accepted_and_one_byte_less_is_not():
  total = memory_of(CASES['dp']).need.total
  memory_of(CASES['dp'], limit=total).check()
  error = refusal(memory_of(CASES['dp'], limit=total - 1))
  assert error.docs == 'parallelism.md#memory'


def test_a_state_that_is_too_large_must_be_split_over_more_devices():
  need = memory_of(CASES['dp'], **SMALL_BATCH).need
  limit = need.total * 3 // 10
  refusal(memory_of(CASES['dp'], limit, **SMALL_BATCH))
  memory_of(CASES['fsdp'], limit, **SMALL_BATCH).check()


def test_too_many_activations_must_be_split_into_microbatches():
  need = memory_of(CASES['dp']).need
  limit = need.total - need.activations * 5 // 8
  rows = helpers_layouts.BATCH // 8
  fix = refusal(memory_of(CASES['dp'], limit)).fix
  assert f'train.num_microbatches (now 1) to a larger number that divides {rows}' in fix
  memory_of(dataclasses.replace(CASES['dp'], num_microbatches=rows), limit).check()
  one_row = dataclasses.replace(CASES['dp'], num_microbatches=rows)
  refusal(memory_of(one_row, memory_of(one_row).need.total - 1))


def test_a_compiled_step_is_held_against_the_memory_too():
  case = dataclasses.replace(FULL_REMAT, config={}, num_microbatches=1)
  free = memory_of(case)
  step = compiled(free)
  total = free.compiled(step).need.total
  memory_of(case, total).compiled(step)
  memory = memory_of(case, total - 1)
  memory.check()  # the lower bound fits
  with raises(OutOfMemoryError):
    memory.compiled(step)


def test_a_host_without_room_for_the_copy_of_a_save_is_refused(monkeypatch):
  """Devices with separate memory: CPU devices already hold the state in host memory."""
  memory = memory_of(CASES['fsdp'], host=1000)
  memory.check()
  monkeypatch.setattr(RunMemory, 'on_cpu', False)
  refusal(memory)
  # A rack of machines is one host of the topology, but each machine has its own memory.
  whole = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(memory.program.abstract_state))
  limits = RunLimits(memory.limits.device, Limit(whole // 4, 'a test'), num_machines=4)
  dataclasses.replace(memory, limits=limits).check()


def test_a_padded_state_that_cannot_be_saved_is_refused():
  """7 divides nothing, so each device holds the whole state while it is saved."""
  case = Case(dict(fsdp=7), num_devices=7)
  memory = memory_of(case, batch_size=7)
  stored, saved = map(
    bytes_per_device, (memory.program.abstract_state, memory.program.abstract_saved)
  )
  assert stored + saved > 7 * stored > memory.need.total
  memory_of(case, limit=stored + saved, batch_size=7).check()
  refusal(memory_of(case, limit=stored + saved - 1, batch_size=7))


def test_logits_and_gradients_share_memory_in_the_lower_bound():
  small, large = (memory_of(CASES['dp'], batch_size=n).need for n in (8, 64))
  assert small.activations * 8 == large.activations < large.gradients


def test_a_classifier_has_logits_for_each_row_alone():
  program = helpers_layouts.build(CASES['dp'])
  model = types.SimpleNamespace(
    logical_sizes=dict, num_outcomes=10**6, classifies=True, is_trained=None
  )
  config = dataclasses.replace(program.config, model=model)
  need = estimate(dataclasses.replace(program, config=config))
  assert need.activations == 4 * helpers_layouts.BATCH // 8 * 10**6 - need.gradients


def test_a_model_larger_than_this_machine_is_refused_by_a_dry_run_and_a_run(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  project = Project(tmp_path)
  for flags in ((), ('--dry_run',)):
    result = project.run(*flags, **{'TransformerConfig.mlp_dim': 2**36})
    assert result.code == 1 and 'Traceback' not in result.err
    assert 'OutOfMemoryError: A step on 8 CPU devices needs ' in result.err
    assert 'shared by 8 CPU devices' in result.err and 'Partitioner.fsdp above ' in result.err
    assert not project.model_dir.exists()
  fits = project.run('--dry_run')
  assert fits.code == 0 and re.search(r'memory: at least .* on each device of ', fits.out)
