"""Memory by formula, next to steps that were compiled for GPUs."""

import json

import jax
import pytest

from benchmarks import compiled_memory
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.formulas import step_memory
from t5x_gpu.tools.planning.gpu_targets import find_target
from t5x_gpu.tools.planning.prediction import Planner

COMPILED = json.loads(compiled_memory.OUT.read_text())['rows']
BY_LAYER = [case for case in compiled_memory.CASES if case.label.startswith('by layer')]


@pytest.mark.parametrize('case', BY_LAYER, ids=lambda case: case.name)
def test_accumulation_by_layer_takes_the_memory_of_the_compiled_step(case):
  planner = Planner(find_target(case.gpu), Assumptions(), devices=jax.devices())
  memory = planner.by_formula(case.config(), Topology(case.hosts, case.gpus_per_host)).memory
  compiled = COMPILED[case.name]
  total = sum(compiled[f'{part}_bytes'] for part in ('argument', 'temporary', 'output'))
  assert memory.formula_bytes == pytest.approx(total, rel=0.06)
  assert memory.components[step_memory.MICROBATCHES] > 0
