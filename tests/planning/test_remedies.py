"""What a plan advises for a run that does not fit: settings that work, as a user writes them."""

import dataclasses

import jax
import pytest

from t5x_gpu.planning import changes, remedies
from t5x_gpu.planning.assumptions import Assumptions
from t5x_gpu.planning.planner import Planner
from t5x_gpu.runtime.cluster.topology import Topology
from t5x_gpu.runtime.xla.gpu_targets import find_target
from tests.aot.cases import Case


@pytest.fixture
def planner():
  return Planner(find_target('h100'), Assumptions(), jax.devices())


def written(case, change):
  """Returns the run `case` with the settings of `change` in its gin file."""
  return dataclasses.replace(case, bindings=(*case.bindings, *change.settings)).config()


@pytest.mark.parametrize('layout', ['tp', 'pp', 'hsdp', 'zero1'])
def test_a_change_names_all_that_the_run_must_set(layout):
  bindings = ("Partitioner.gradient_dtype = 'bfloat16'",)
  case = Case(model='llama3_8b', layout=layout, batch=(64, 4096), bindings=bindings)
  found = list(changes.single_changes(case.config(), Topology(2, 8)))
  assert sum('Partitioner' in change.kinds for change in found) >= 3
  for change in found:
    run = written(case, change)
    assert run.partitioner == change.config.partitioner, change.settings
    assert run.partitioner.gradient_dtype == 'bfloat16', 'memory is no reason to change it'
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
