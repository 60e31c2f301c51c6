"""A plan's advice for a run that does not fit: settings that work, as a user writes them."""

import dataclasses

import jax
import pytest

from t5x_gpu.errors import ConfigError
from t5x_gpu.models.model import config_of
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.planning import remedies
from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.gpu_targets import find_target
from t5x_gpu.tools.planning.prediction import Planner
from t5x_gpu.tools.planning.remedies import Change
from tests.aot.cases import Case


@pytest.fixture
def planner():
  return Planner(find_target('h100'), Assumptions(), jax.devices())


OVERLAP = ('Partitioner.overlap_layers = True',)


def written(case, change):
  """Returns the run `case` with the settings of `change` in its gin file."""
  return dataclasses.replace(case, bindings=(*case.bindings, *change.settings)).config()


@pytest.mark.parametrize('layout', ['tp', 'pp', 'hsdp', 'zero1', 'cp', '3d', 'ep'])
def test_a_change_names_all_that_the_run_must_set(layout):
  bindings = ("Partitioner.gradient_dtype = 'bfloat16'",)
  case = Case(model='llama3_8b', layout=layout, batch=(64, 4096), bindings=bindings)
  found = list(remedies.single_changes(case.config(), Topology(2, 8)))
  assert sum('Partitioner' in change.kinds for change in found) >= 3
  for change in found:
    run = written(case, change)
    assert run.partitioner == change.config.partitioner, change.settings
    assert run.partitioner.gradient_dtype == 'bfloat16', 'it would change the numbers'
    run.partitioner.mesh_sizes(Topology(2, 8))


@pytest.mark.parametrize(
  'layout',
  [pytest.param('tp', marks=pytest.mark.slow), pytest.param('pp', marks=pytest.mark.slow), 'hsdp'],
)
def test_a_run_fits_with_any_of_its_remedies(planner, layout):
  case = Case(model='llama3_8b', layout=layout, batch=(128, 4096))
  topology = Topology(1, 8) if layout == 'tp' else Topology(2, 4)
  config = case.config()
  assert not planner.by_formula(config, topology).memory.fits
  found = remedies.remedies(config, topology, by_formula=planner.by_formula, compiled=None)
  assert len(found) == 3
  for remedy in found:
    again = planner.by_formula(written(case, remedy.change), topology)
    assert again.memory.fits and again.seconds_per_step == remedy.prediction.seconds_per_step


def test_overlap_layers_is_a_remedy_where_layers_without_a_loop_store_everything(planner):
  case = Case(
    model='llama3_2_1b',
    layout='fsdp',
    batch=(72, 4096),
    bindings=("REMAT_POLICY = 'none'", 'Partitioner.overlap_layers = False'),
  )
  config, topology = case.config(), Topology(1, 8)
  before = planner.by_formula(config, topology)
  assert not before.memory.fits
  [found, *_] = remedies.remedies(config, topology, by_formula=planner.by_formula, compiled=None)
  assert found.change.settings == OVERLAP and found.prediction.memory.fits
  assert found.prediction.seconds_per_step < before.seconds_per_step
  full = dataclasses.replace(
    case, batch=(880, 4096), bindings=("REMAT_POLICY = 'full'", case.bindings[1])
  ).config()
  assert not planner.by_formula(full, topology).memory.fits
  found = remedies.remedies(full, topology, by_formula=planner.by_formula, compiled=None)
  assert found and not any(OVERLAP[0] in remedy.change.settings for remedy in found)
  for more in ("REMAT_POLICY = 'dots'", 'TransformerConfig.scan_unroll = 1'):
    changed = dataclasses.replace(case, bindings=(*case.bindings, more)).config()
    partitioner = dataclasses.replace(changed.partitioner, overlap_layers=True)
    ahead = dataclasses.replace(changed, partitioner=partitioner)
    memory = [planner.by_formula(run, topology).memory.formula_bytes for run in (changed, ahead)]
    assert memory[0] == memory[1], f'{more}: nothing else is stored'


def test_fsdp_takes_the_place_of_data_next_to_the_axes_that_are_in_use():
  planner = Planner(find_target('h200'), Assumptions(), jax.devices())
  config = Case(model='llama3_8b', layout='cp', batch=(8, 77824)).config()
  found = remedies.remedies(config, Topology(2, 8), by_formula=planner.by_formula, compiled=None)
  first, second = found[:2]
  assert set(first.change.settings) == {
    "TransformerConfig.remat_policy = 'attention'",
    'Partitioner.data = 1',
    'Partitioner.fsdp = 8',
  }
  # As fast, but less precise.
  assert second.change.kinds == {'TransformerConfig', 'AdamW'}
  ratio = first.prediction.seconds_per_step / second.prediction.seconds_per_step
  assert 1 / remedies.EQUAL < ratio < remedies.EQUAL


@pytest.mark.parametrize(
  'bindings, kept',
  [
    (dict(context=2, data=4), {'context': 2, 'fsdp': 8}),  # of eight GPUs, now there are sixteen
    (
      dict(data=-1, context=1, ici_mesh_shape={'context': 4, 'fsdp': -1}, dcn_mesh_shape=None),
      {'context': 4, 'fsdp': 4},
    ),
    (dict(context=1, stage=2, expert=2), {'stage': 2, 'expert': 2, 'fsdp': 4}),
  ],
)
def test_all_axes_but_data_are_kept_in_one_of_the_layouts(bindings, kept):
  bindings = tuple(f'Partitioner.{name} = {value!r}' for name, value in bindings.items())
  case = Case(model='llama3_8b', layout='cp', batch=(64, 4096), bindings=bindings)
  sizes = [
    change.config.partitioner.mesh_sizes(Topology(2, 8)).total
    for change in remedies.single_changes(case.config(), Topology(2, 8))
    if 'Partitioner' in change.kinds and change.settings != OVERLAP
  ]
  assert dict.fromkeys(sizes[0], 1) | kept in sizes


def test_a_candidate_that_does_not_compile_is_skipped(planner):
  config = Case(model='llama3_8b', layout='hsdp', batch=(128, 4096)).config()

  def compiled(changed, topology):
    if changed.model != config.model:
      raise ConfigError('This one does not compile.', fix='Take another one.')
    return planner.by_formula(changed, topology)

  of_run = dict(by_formula=planner.by_formula, number=1)
  [found] = remedies.remedies(config, Topology(2, 4), compiled=None, **of_run)
  assert found.change.kinds == {'TransformerConfig'}
  [found] = remedies.remedies(config, Topology(2, 4), compiled=compiled, **of_run)
  assert found.is_compiled and found.change.kinds == {'train'}


@pytest.mark.slow
def test_the_least_number_of_gpus_does_not_depend_on_how_many_were_asked():
  planner = Planner(find_target('a100-40'), Assumptions(), jax.devices())
  config = Case(model='t5_11b', layout='fsdp', batch=(64, 512)).config()
  found = [
    remedies.least_gpus(config, Topology(1, gpus), by_formula=planner.by_formula)[0].prediction
    for gpus in (1, 4)
  ]
  assert [(p.num_hosts, p.num_gpus) for p in found] == [(1, 5), (1, 5)]


def test_the_least_number_of_gpus_names_hosts_where_there_are_several(planner):
  config = Case(model='llama3_70b', layout='fsdp', batch=(8, 4096)).config()
  text = remedies.nothing_fits(config, Topology(1, 2), by_formula=planner.by_formula)
  assert 'fits on 2 GPUs' in text and 'The least number of GPUs is 16 (2 hosts x 8), with' in text


@pytest.mark.parametrize(
  'layout, rows, length, gpus, batch',
  [
    ('fsdp', 8, 4096, 16, 8),
    # Three groups of eight GPUs cannot share 64 rows.
    pytest.param('tp', 64, 4096, 24, 66, marks=pytest.mark.slow),
  ],
)
def test_the_run_fits_on_the_least_number_of_gpus(planner, layout, rows, length, gpus, batch):
  case = Case(model='llama3_70b', layout=layout, batch=(rows, length))
  config = case.config()
  found, smallest = remedies.least_gpus(config, Topology(1, 8), by_formula=planner.by_formula)
  assert not smallest.memory.fits and smallest.num_gpus == 8
  *settings, last = found.change.settings
  assert (last == f'BATCH_SIZE = {batch}') == (batch != rows)
  settings += [last] * (batch == rows)
  run = written(dataclasses.replace(case, batch=(batch, length)), Change(tuple(settings), config))
  again = planner.by_formula(run, Topology(gpus // 8, 8))
  assert again.memory.fits and again.num_gpus == found.prediction.num_gpus
  fewer = Topology(gpus // 8 - 1, 8)
  for change in remedies.on_all_of(config, fewer) if fewer.num_hosts > 1 else ():
    assert not planner.by_formula(change.config, fewer).memory.fits


RECORD = dict(
  model='llama3_8b',
  layout='fsdp',
  batch=(128, 8192),
  bindings=(
    'NUM_MICROBATCHES = 16',
    "PRECISION = 'fp8'",
    "TransformerConfig.remat_policy = 'minimal'",
  ),
)


def test_what_accumulating_by_layer_costs_is_said_with_a_faster_setting(planner):
  case, topology = Case(**RECORD), Topology(1, 8)
  config = case.config()
  before = planner.by_formula(config, topology)
  of_run = dict(by_formula=planner.by_formula, compiled=None)
  [found], text = remedies.faster_accumulation(config, topology, before, **of_run)
  assert 'computes each layer again' in text and '1. Partitioner.acc' in text
  run = written(case, found.change)
  assert run.partitioner.accumulate_by == 'microbatch' and run.num_microbatches == 16
  after = planner.by_formula(run, topology)
  assert after.memory.fits and after.tokens_per_second > 1.05 * before.tokens_per_second
  assert remedies.faster_accumulation(run, topology, after, **of_run) == ([], '')


@pytest.mark.parametrize(
  'changed, said',
  [
    (dict(), "'minimal' has no effect: Partitioner.accumulate_by = 'layer'"),
    (dict(bindings=("REMAT_POLICY = 'minimal'",)), None),
    (dict(bindings=('NUM_MICROBATCHES = 16', "REMAT_POLICY = 'full'")), None),
    (dict(layout='3d', bindings=("REMAT_POLICY = 'full'",)), "'full' computes each layer twice"),
    (dict(layout='3d', bindings=("REMAT_POLICY = 'minimal'",)), None),
  ],
)
def test_a_remat_policy_without_effect_or_at_twice_the_work_is_noted(planner, changed, said):
  config = Case(**RECORD | changed).config()
  notes = [n for n in planner.program(config, Topology(2, 4)).layout.notes if 'remat_policy' in n]
  assert [said in n for n in notes] == [True] * bool(said)


def test_a_faster_setting_must_fit_as_compiled(planner):
  config, topology = Case(**RECORD).config(), Topology(1, 8)
  before = planner.by_formula(config, topology)

  def compiled(changed, topology):
    found = planner.by_formula(changed, topology)
    stores_more = config_of(changed.model).remat_policy != 'full'
    pool_bytes = 0 if stores_more else found.memory.pool_bytes
    return dataclasses.replace(
      found, memory=dataclasses.replace(found.memory, pool_bytes=pool_bytes)
    )

  found, text = remedies.faster_accumulation(
    config, topology, before, by_formula=planner.by_formula, compiled=compiled
  )
  assert all(config_of(r.change.config.model).remat_policy == 'full' for r in found)
  assert ('Faster' in text) == bool(found)
