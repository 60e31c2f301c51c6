"""What a plan predicts for a measured step: seconds, and bytes by formula and as compiled."""

import pathlib
from typing import Any, Optional

from benchmarks.gpu.kernels import planned_by_kind
from benchmarks.gpu.parts import Row
from t5x_gpu.errors import ConfigError, first_line
from t5x_gpu.tools.planning import assumptions
from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.gpu_compile import CompiledStep, memory_of
from t5x_gpu.tools.planning.gpu_targets import DescribedGpus, GpuTarget, target_of_kind
from t5x_gpu.tools.planning.prediction import PlanConfig, predict
from t5x_gpu.training.program import Program


def planned(
  program: Program,
  run: PlanConfig,
  step: Any,
  *,
  device_kind: str,
  results: Optional[pathlib.Path] = None,
) -> Optional[Row]:
  """Returns the prediction of `python -m t5x_gpu.plan`, or the error of a plan that failed.

  None for a device that a plan does not know.

  Args:
    program, run: what is measured.
    step: as jax compiled it.
    device_kind: device kind of the card.
    results: file of earlier results, whose ceilings replace assumed ones in `calibrated_seconds`.
  """
  gpu = target_of_kind(device_kind)
  if gpu is None:
    return None
  try:
    return _planned(program, run, step, gpu, _calibration(results, gpu))
  except Exception as e:  # costs its own fields, not the measurement
    return {'error': f'{type(e).__name__}: {first_line(e)}'[:200]}


def _planned(
  program: Program, run: PlanConfig, step: Any, gpu: GpuTarget, measured: Optional[Assumptions]
) -> Row:
  hlo = step.as_text()
  compiled = CompiledStep(
    program=program,
    gpus=DescribedGpus(gpu, program.layout.topology, tuple(program.layout.mesh.devices.flat)),
    hlo=hlo,
    memory=memory_of(step, hlo),
    compile_options={},
    trace_seconds=0.0,
    compile_seconds=0.0,
  )
  by_formula = predict(program, run, gpu=gpu, assumed=Assumptions())
  as_compiled = predict(program, run, gpu=gpu, assumed=Assumptions(), compiled=compiled)
  calibrated = measured and predict(program, run, gpu=gpu, assumed=measured, compiled=compiled)
  return {
    'gpu': gpu.name,
    'attention': [choice.name for choice in by_formula.attention],
    'seconds': as_compiled.seconds_per_step,
    'calibrated_seconds': calibrated and calibrated.seconds_per_step,
    'seconds_by_kind': planned_by_kind(as_compiled.time),
    'formula_bytes': by_formula.memory.needed_bytes,
    'compiled_bytes': as_compiled.memory.needed_bytes,
  }


def _calibration(results: Optional[pathlib.Path], gpu: GpuTarget) -> Optional[Assumptions]:
  """Returns the assumptions with what `results` has measured on `gpu`; None if it has nothing."""
  if results is None:
    return None
  try:
    found = assumptions.read(results)
  except ConfigError:  # the first part of a run, or sizes for a CPU
    return None
  return found.applied(Assumptions()) if found.gpu == gpu else None
