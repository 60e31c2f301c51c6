"""Delayed scaling: FP8 scales from the largest values of earlier steps.

Every matmul in FP8 has a history. It is part of the state but not of the parameters, so the
optimizer, clipping, weight decay and the averaging of checkpoints ignore it. In a step the model
gets one number per operand (`Quantized.amax`), and the "gradient" of this number is the largest
value of the step: the maximum, not the sum, over microbatches and devices.
Source: Micikevicius et al. 2022 (FP8 formats for deep learning); NVIDIA Transformer Engine,
`recipe.DelayedScaling` with amax_compute_algo='max'.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, Optional

import jax
import jax.numpy as jnp

from t5x_gpu.errors import ModelError
from t5x_gpu.models.model import Model, OptionalMembers, config_of
from t5x_gpu.models.precision import amaxes_like
from t5x_gpu.partitioning.axis_rules import AxisNames
from t5x_gpu.partitioning.layer_stacks import ONLY, layers_of
from t5x_gpu.partitioning.manual_region import Region
from t5x_gpu.partitioning.quantized import Operand

# Largest values of activations, kernels and gradients in the first step. A guess that is 2^10 times
# too large costs no precision, because 8-bit values have exponents; a guess too small clips.
_FIRST = (32.0, 4.0, 64.0)


@dataclasses.dataclass(frozen=True)
class Fp8History:
  """The largest values of recent steps, [layers, Operand, length] for each kernel.

  They are stored in a tree as 'layers/mlp/wo/amax', like the kernel's path. 0 stands for a step
  without a value.

  Attributes:
    length: number of steps.
    margin: scales leave room for values 2^margin times as large.
    stacks: names of the model's stacks.
  """

  length: int
  margin: int = 0
  stacks: tuple[str, ...] = (ONLY,)

  def new(self, params: Any) -> Any:
    """Returns the history before the first step."""

    def zeros(kernel: jax.Array) -> jax.Array:
      return jnp.zeros((kernel.shape[0], len(Operand), self.length), jnp.float32)

    history: dict[str, Any] = {}
    for stack in self.stacks:
      layers = {'layers': amaxes_like(layers_of(params, stack), zeros)}
      history |= layers if stack == ONLY else {stack: layers}
    return history

  def amaxes(self, history: Any) -> Any:
    """Returns the values that set the scales of this step, [layers, Operand] for each kernel."""

    def amax(values: jax.Array) -> jax.Array:
      largest = jnp.max(values, axis=-1)
      return jnp.where(largest == 0, jnp.asarray(_FIRST), largest) * 2.0**self.margin

    return jax.tree.map(amax, history)

  def after(self, history: Any, seen: Any) -> Any:
    """Returns the history with this step's largest values in place of the oldest ones."""
    return jax.tree.map(
      lambda values, new: jnp.concatenate([new[..., None], values[..., :-1]], axis=-1),
      history,
      seen,
    )


def history_names(history: Any) -> Any:
  """Returns a tree of AxisNames; every device has the whole history."""
  return jax.tree.map(lambda _: AxisNames((None, None, None)), history)


def history_of(model: Model, region: Optional[Region] = None) -> Optional[Fp8History]:
  """Returns the history of a model with delayed scaling; None for others.

  Raises:
    ModelError: `region`, the step's region, is a pipeline.
  """
  config = config_of(model)
  if config is None or not config.fp8 or config.fp8_scaling != 'delayed':
    return None
  if region is not None and region.pipeline is not None:
    raise ModelError(
      "TransformerConfig.fp8_scaling = 'delayed' does not work in a pipeline: its backward pass "
      'sums over microbatches, but delayed scaling needs their maximum.',
      fix="Set TransformerConfig.fp8_scaling = 'current', or Partitioner.stage = 1.",
      parameters=('TransformerConfig.fp8_scaling', 'Partitioner.stage'),
      docs='precision.md#delayed-scaling',
    )
  return Fp8History(config.fp8_history, config.fp8_margin, tuple(OptionalMembers(model).stacks))


def with_amaxes(params: Any, amaxes: Any) -> Any:
  """Returns `params` with the arrays of `amaxes` next to the kernels."""
  result = copy.copy(params)
  for name, inner in amaxes.items():
    result[name] = with_amaxes(params[name], inner) if isinstance(inner, Mapping) else inner
  return result
