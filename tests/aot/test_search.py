"""`plan --search` compiled for GPUs that are absent: no neighbour of the best is faster."""

import functools
import random

import pytest

from t5x_gpu.planning.assumptions import Assumptions
from t5x_gpu.planning.devices import simulated_devices, topology_of
from t5x_gpu.planning.planner import Planner
from t5x_gpu.planning.prediction import PlanConfig
from t5x_gpu.planning.search.search import EQUAL, SearchState, search
from t5x_gpu.planning.search.variants import Variant
from t5x_gpu.planning.search.workers import SearchTask
from t5x_gpu.runtime.xla.gpu_targets import find_target
from tests.aot.cases import Case
from tests.aot.marks import MARKS

pytestmark = MARKS
SAMPLED = 4


def configured(case: Case) -> tuple[PlanConfig, Assumptions]:
  return case.config(), Assumptions()


def settings(variant: Variant) -> dict:
  return dict(
    variant.layout, microbatches=variant.num_microbatches, remat_policy=variant.remat_policy
  )


def are_neighbours(a: Variant, b: Variant) -> bool:
  """Whether one setting differs, or the sizes of two mesh axes."""
  a, b = settings(a), settings(b)
  return 1 <= sum(a.get(name) != b.get(name) for name in {*a, *b}) <= 2


@pytest.mark.parametrize(
  'case',
  [Case(model='decoder_base', layout='dp', batch=(64, 1024), gpu='h200')],
  ids=lambda case: case.name,
)
def test_no_sampled_neighbour_of_the_best_is_faster(case):
  topology = topology_of(gpus=case.hosts * case.gpus_per_host, gpus_per_host=case.gpus_per_host)
  devices = simulated_devices(topology.num_devices)
  config, found = case.config(), SearchState()
  task = SearchTask(functools.partial(configured, case), case.gpu, topology, Assumptions())
  search(found, config, task, num_processes=2, compiles=True)
  best = found.best('bfloat16')
  assert best.variant in found.compiled and found.best('fp8').variant in found.compiled
  near = [
    score
    for score in found.scores
    if score.variant.dtype == 'bfloat16'
    and are_neighbours(score.variant, best.variant)
    and score.variant not in found.compiled
    and score.needed_bytes <= score.pool_bytes
  ]
  assert found.given in found.compiled.values(), 'the run as it is'
  works = [p for p in found.compiled.values() if p.dtype == 'bfloat16' and p.memory.fits]
  fastest = min(p.seconds_per_step for p in works)
  assert found.estimate(best) <= EQUAL * fastest
  planner = Planner(find_target(case.gpu), Assumptions(), devices)
  for score in random.Random(0).sample(near, min(SAMPLED, len(near))):
    p = planner.silently(score.variant.applied(config), topology)
    print(f'{score.variant}: {p.seconds_per_step:.5g} s, the best {fastest:.5g} s')
    assert p.seconds_per_step * EQUAL >= fastest or not p.memory.fits
