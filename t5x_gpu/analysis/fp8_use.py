"""Whether a compiled step multiplies in FP8."""

from typing import Any

import jax

from t5x_gpu.analysis.kernels import count_kernels
from t5x_gpu.errors import ModelError
from t5x_gpu.models.model import Model, config_of, uses_fp8


def fp8_lines(step: Any, model: Model, mesh: jax.sharding.Mesh) -> list[str]:
  """Returns a log line on how the step of a model in FP8 multiplies; [] for other models.

  All code that compiles a step in order to run it must call this function.

  Args:
    step: the compiled step.
    model: the step's model.
    mesh: the mesh that the step was compiled for.
  Raises:
    ModelError: on GPUs, if no matmul is in FP8.
  """
  if not uses_fp8(model):
    return []
  config = config_of(model)
  line = 'precision: fp8, emulated: this CPU rounds operands to 8 bits, which saves no time'
  if mesh.devices.flat[0].platform != 'cpu':
    line = check_fp8_gemms(step.as_text())
  experts = f'; experts are in {config.compute_dtype.__name__}' if config.num_experts else ''
  delayed = f'; scales from the last {config.fp8_history} steps'
  return [line + experts + (delayed if config.fp8_scaling == 'delayed' else '')]


def check_fp8_gemms(hlo: str) -> str:
  """Returns a log line with the number of FP8 matmuls in a program for a GPU.

  Raises:
    ModelError: there are none: the run would be as slow as without FP8, and less precise.
  """
  kernels = count_kernels(hlo)
  fp8, others = kernels['fp8_gemm'].runs, kernels['gemm'].runs
  if not fp8:
    raise ModelError(
      f"PRECISION = 'fp8', but none of the {others} matmuls of the compiled step is in FP8.",
      fix="Set PRECISION = 'bfloat16'. The layers of a custom model need kernels with the names of "
      'KERNELS in t5x_gpu/models/precision.py.',
      parameters=('TransformerConfig.dtype',),
      docs='precision.md#fp8',
    )
  return f'precision: fp8, in {fp8} of {fp8 + others} matmuls of a step'
