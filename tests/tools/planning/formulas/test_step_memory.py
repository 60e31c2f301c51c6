"""Memory by formula, next to steps that were compiled for GPUs."""

import json

import jax
import pytest

from benchmarks import compiled_memory
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.formulas import step_memory
from t5x_gpu.tools.planning.formulas.step_shape import step_shape
from t5x_gpu.tools.planning.gpu_targets import find_target
from t5x_gpu.tools.planning.prediction import Planner
from tests.aot.cases import CASES, Case
from tests.aot.test_compiled_steps import OLDEST, recorded

COMPILED = json.loads(compiled_memory.OUT.read_text())['rows']
BY_LAYER = [case for case in compiled_memory.CASES if case.label.startswith('by layer')]
IN_PLACE = [c for c in CASES if c.layout == 'dp' and c.label == 'by microbatch']


@pytest.mark.parametrize(
  'layout, bindings, stores_all',
  [
    ('fsdp', ('Partitioner.overlap_layers = False',), True),
    ('fsdp', (), False),
    ('fsdp', ('Partitioner.overlap_layers = False', 'Partitioner.zero_stage = 2'), False),
    ('hsdp', ('Partitioner.overlap_layers = False',), True),
    ('dp', ('Partitioner.overlap_layers = False',), False),
    ('dp', ('NUM_MICROBATCHES = 2',), False),
    ('dp', ('NUM_MICROBATCHES = 2', 'TransformerConfig.scan_unroll = 1'), True),
    ('pp', ('Partitioner.fsdp = 4', 'TransformerConfig.scan_unroll = 12'), False),
    ('fsdp', ('TransformerConfig.scan_unroll = 1',), True),
  ],
)
def test_residuals_are_stored_in_a_loop_and_behind_a_barrier(layout, bindings, stores_all):
  case = Case(model='decoder_base', layout=layout, batch=(64, 512), bindings=bindings)
  config, gpu = case.config(), find_target('h100')
  planner = Planner(gpu, Assumptions(), jax.devices())
  program = planner.program(config, Topology(1, 8))
  shape = step_shape(program, config.model, num_microbatches=config.num_microbatches, gpu=gpu)
  assert [stack.stores_all for stack in shape.stacks] == [stores_all]


@pytest.mark.parametrize('case', BY_LAYER, ids=lambda case: case.name)
def test_accumulation_by_layer_takes_the_memory_of_the_compiled_step(case):
  planner = Planner(find_target(case.gpu), Assumptions(), devices=jax.devices())
  memory = planner.by_formula(case.config(), Topology(case.hosts, case.gpus_per_host)).memory
  compiled = COMPILED[case.name]
  total = sum(compiled[f'{part}_bytes'] for part in ('argument', 'temporary', 'output'))
  assert memory.formula_bytes == pytest.approx(total, rel=0.06)
  assert memory.components[step_memory.MICROBATCHES] > 0


@pytest.mark.parametrize('case', IN_PLACE, ids=lambda case: case.name)
def test_gradients_of_earlier_microbatches_are_in_memory_at_the_peak(case):
  planner = Planner(find_target(case.gpu), Assumptions(), devices=jax.devices())
  memory = planner.by_formula(case.config(), Topology(case.hosts, case.gpus_per_host)).memory
  compiled = recorded()[OLDEST][case.name]
  total = sum(compiled[f'{part}_bytes'] for part in ('argument', 'temporary', 'output'))
  assert memory.formula_bytes == pytest.approx(total, rel=0.1)


def test_without_overlap_a_loop_by_microbatch_holds_activations_twice():
  # Compiled for 8 H100 with jax 0.10.2: 31.56 and 17.96 GiB.
  found = {}
  for overlap in (False, True):
    bindings = (
      "REMAT_POLICY = 'dots'",
      'NUM_MICROBATCHES = 4',
      "Partitioner.accumulate_by = 'microbatch'",
      f'Partitioner.overlap_layers = {overlap}',
    )
    case = Case(model='llama3_2_1b', layout='fsdp', batch=(128, 4096), bindings=bindings)
    planner = Planner(find_target('h100'), Assumptions(), devices=jax.devices())
    found[overlap] = planner.by_formula(case.config(), Topology(1, 8)).memory.formula_bytes / 2**30
  assert found == {False: pytest.approx(31.56, rel=0.04), True: pytest.approx(17.96, rel=0.04)}
