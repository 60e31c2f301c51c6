"""`plan --search` compiled for GPUs that are absent: no neighbor of the best is much faster."""

import functools
import random

import pytest

from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.devices import simulated_devices, topology_of
from t5x_gpu.tools.planning.gpu_targets import find_target
from t5x_gpu.tools.planning.prediction import PlanConfig, Planner
from t5x_gpu.tools.planning.remedies import EQUAL
from t5x_gpu.tools.planning.search.search import WORTH, SearchState, search, search_text
from t5x_gpu.tools.planning.search.variants import Variant
from t5x_gpu.tools.planning.search.workers import SearchTask, Worker
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


def are_neighbors(a: Variant, b: Variant) -> bool:
  """Whether one setting differs, or the sizes of two mesh axes."""
  a, b = settings(a), settings(b)
  return 1 <= sum(a.get(name) != b.get(name) for name in {*a, *b}) <= 2


def _case(model: str, gpus: int, rows_per_gpu: int, length: int, layout: str = 'hsdp') -> Case:
  case = Case(
    model=model, layout=layout, batch=(gpus * rows_per_gpu, length), gpu='h200', hosts=gpus // 8
  )
  marks = () if (model, gpus) == ('decoder_base', 8) else pytest.mark.all_searches
  return pytest.param(case, id=f'{model}-{gpus}', marks=marks)


@pytest.mark.parametrize(
  'case',
  [
    _case('decoder_base', 8, 8, 1024, layout='dp'),
    *[
      _case(model, gpus, rows, length)
      for model, rows, length in (
        ('decoder_base', 8, 1024),
        ('llama3_2_1b', 4, 4096),
        ('llama3_8b', 3, 4096),
        ('llama3_70b', 1, 4096),
        ('t5_11b', 8, 512),
      )
      for gpus in (8, 64, 192)
    ][1:],
  ],
)
def test_no_sampled_neighbor_of_the_best_is_much_faster(case):
  topology = topology_of(gpus=case.hosts * case.gpus_per_host, gpus_per_host=case.gpus_per_host)
  devices = simulated_devices(topology.num_devices)
  config, found = case.config(), SearchState()
  task = SearchTask(functools.partial(configured, case), case.gpu, topology, Assumptions())
  search(found, config, task, num_processes=2, compiles=True)
  print(search_text(found, f'{topology.num_devices} x {case.gpu}'))
  best = found.best('bfloat16')
  assert best.variant in found.compiled and found.best('fp8').variant in found.compiled
  near = [
    score
    for score in found.scores
    if score.variant.dtype == 'bfloat16'
    and are_neighbors(score.variant, best.variant)
    and score.variant not in found.compiled
    and score.needed_bytes <= score.pool_bytes
  ]
  assert found.given in found.compiled.values(), 'the current run'
  fastest = min(p.seconds for v, p in found.compiled.items() if v.dtype == 'bfloat16' and p.fits)
  assert found.estimate(best) <= EQUAL * fastest
  assert near
  planner = Planner(find_target(case.gpu), Assumptions(), devices)
  for score in random.Random(0).sample(near, min(SAMPLED, len(near))):
    p = planner.silently(score.variant.applied(config), topology)
    print(f'{score.variant}: {p.seconds_per_step:.5g} s, the best {fastest:.5g} s')
    gain = EQUAL if score.mesh == best.mesh else WORTH
    assert p.seconds_per_step * gain >= fastest or not p.memory.fits


def test_a_step_without_a_loop_is_as_fast_and_large_as_few_of_its_layers_say():
  case = Case(
    model='llama3_2_1b',
    layout='fsdp',
    batch=(64, 2048),
    bindings=(
      "REMAT_POLICY = 'none'",
      'TransformerConfig.num_layers = 24',
      'TransformerConfig.embed_dim = 512',
      'TransformerConfig.mlp_dim = 2048',
    ),
  )
  task = SearchTask(
    functools.partial(configured, case),
    case.gpu,
    topology_of(gpus=8, gpus_per_host=8),
    Assumptions(),
  )
  worker = Worker(task)
  few, all_layers = worker.given(), worker.planner.silently(worker.config, task.topology)
  assert few.layers == (2, 4)
  assert few.seconds == pytest.approx(all_layers.seconds_per_step, rel=0.02)
  assert few.needed_bytes == pytest.approx(all_layers.memory.needed_bytes, rel=0.1)
  assert few.pool_bytes == all_layers.memory.pool_bytes
