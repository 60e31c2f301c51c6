"""Speed per device: tokens/s, TFLOP/s and MFU of a model on its mesh; and peak memory."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import jax

from t5x_gpu.metrics.throughput import mfu
from t5x_gpu.models.flops import step_flops, step_tokens
from t5x_gpu.models.model import Model, config_of
from t5x_gpu.runtime import hardware
from t5x_gpu.runtime.cluster.topology import Device


@dataclasses.dataclass(frozen=True)
class ModelSpeed:
  """The cost of a step on each device.

  Attributes:
    tokens: tokens of a step, per device; padding included.
    flops: model FLOPs of a step, per device, without recomputation.
    peak_flops: dense peak of the device in FLOP/s for the model's dtype; None if unknown.
    dtype: dtype of the matmuls.
  Source: Chowdhery et al. 2022 (PaLM), appendix B; models/flops.py.
  """

  tokens: float
  flops: float
  peak_flops: Optional[float]
  dtype: str

  def mfu(self, step_seconds: float) -> Optional[float]:
    """Returns the model FLOPs utilization, 0 to 1; None if the peak is unknown."""
    return mfu(self.flops, step_seconds=step_seconds, peak_flops=self.peak_flops)

  def tflops_per_second(self, step_seconds: float) -> float:
    """Returns model TFLOP/s per device."""
    return self.flops / step_seconds / 1e12

  def metrics(self, step_seconds: Optional[float]) -> dict[str, float]:
    """Returns the known numbers by metric name; {} without a step."""
    if not step_seconds:
      return {}
    values = {
      'tokens_per_second_per_device': self.tokens / step_seconds,
      'tflops_per_second_per_device': self.tflops_per_second(step_seconds),
      'mfu': self.mfu(step_seconds),
    }
    return {name: value for name, value in values.items() if value is not None}


def model_speed(
  model: Model, shapes: Mapping[str, Sequence[int]], devices: Sequence[Device]
) -> ModelSpeed:
  """Returns the costs of a step.

  Args:
    model: the model, for its FLOPs and dtype.
    shapes: feature -> [batch, length] of the global batch.
    devices: all devices of the run.
  """
  tokens, flops = (of(model, shapes) / len(devices) for of in (step_tokens, step_flops))
  config, kind = config_of(model), devices[0].device_kind
  dtype = 'float32' if config is None else config.dtype
  # By default JAX multiplies float32 matrices in TF32 on GPUs that support it.
  tf32 = dtype == 'float32' and jax.config.jax_default_matmul_precision is None
  peak = (hardware.peak_flops(kind, 'tf32') if tf32 else None) or hardware.peak_flops(kind, dtype)
  return ModelSpeed(tokens, flops, peak, dtype)


def peak_memory_bytes(devices: Sequence[Any]) -> Optional[int]:
  """Returns the peak memory in use on any of `devices`; None if they do not report it."""
  peaks = [(device.memory_stats() or {}).get('peak_bytes_in_use') for device in devices]
  return max((peak for peak in peaks if peak is not None), default=None)
