"""Gradient accumulation that takes all microbatches through a layer before the next layer.

If each microbatch went through all layers first, split parameters (ZeRO-3) would be gathered, and
their gradients reduced, for every microbatch. Here both happen once per layer and step, for any
number of microbatches. Memory holds every layer's input for all rows, and one layer's activations
for one microbatch: the backward pass recomputes layers.
Source: Lamy-Poirier 2023 (Breadth-First Pipeline Parallelism), section 4.2.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from t5x_gpu.models.losses import Sums
from t5x_gpu.models.model import LayeredModel, OptionalMembers, compute_dtype, uses_fp8
from t5x_gpu.models.precision import in_8_bits
from t5x_gpu.partitioning import quantized
from t5x_gpu.partitioning.layer_stacks import (
  layers_of,
  num_layers,
  part_of,
  run_layers,
  with_layers,
  with_part,
  without_layers,
)
from t5x_gpu.partitioning.quantized import is_quantized

Batch = Mapping[str, jax.Array]


def loss(
  model: LayeredModel,
  params: Any,
  batch: Batch,
  microbatches: Batch,
  same: Batch,
  *,
  dropout_key: jax.Array,
) -> Sums:
  """Returns the sums of `model.loss` over all microbatches.

  Args:
    model: the model; parameters are gathered in its `compute_dtype`.
    params: parameters in the region; leaves of 'layers' are stacked.
    batch: all local rows.
    microbatches: the same rows as arrays [num_microbatches, rows, ...].
    same: features without rows, shared by all microbatches.
    dropout_key: key of the step.
  """

  def whole(tree: Any) -> Any:
    # In float32, so that the gradients of the microbatches add up in float32.
    weights = quantized.whole(tree, compute_dtype(model))
    return jax.tree.map(_in_float32, weights, is_leaf=is_quantized)

  stacks = tuple(OptionalMembers(model).stacks)
  rest = whole(without_layers(params, stacks))

  # The scan carries, and so stores for each layer, only the stack's own part of the activation.
  def layer(stack: str, x: Any, part: Any, of_layer: tuple[Any, jax.Array]) -> tuple[Any, None]:
    weights, number = whole(of_layer[0]), of_layer[1]
    stacked = jax.tree.map(lambda w: w[None], weights)
    amaxes = [quantized.copies(a, num_microbatches) for a in quantized.amaxes_of(stacked)]

    def one(of_microbatch: tuple[Any, Batch, list[jax.Array]]) -> Any:
      x, microbatch, amaxes = of_microbatch
      y = run_layers(
        model,
        with_layers(rest, stack, quantized.with_amaxes(stacked, amaxes)),
        x,
        {**microbatch, **same},
        stack=stack,
        dropout_key=dropout_key,
        first_layer=number,
      )
      return part_of(y, stacks, stack)

    x = with_part(x, stacks, stack, part)
    return jax.lax.map(jax.checkpoint(one, prevent_cse=False), (x, microbatches, amaxes)), None

  def head(of_microbatch: tuple[Any, Batch]) -> Sums:
    x, microbatch = of_microbatch
    return model.head(rest, x, {**microbatch, **same}, dropout_key=dropout_key)

  x = model.embed(rest, batch, dropout_key=dropout_key)
  num_microbatches = jax.tree.leaves(microbatches)[0].shape[0]
  x = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), x)
  for stack in stacks:
    body = jax.checkpoint(functools.partial(layer, stack, x), prevent_cse=False)
    layers, count = layers_of(params, stack), num_layers(params, stack)
    if uses_fp8(model):
      layers = in_8_bits(layers)
    part, _ = jax.lax.scan(body, part_of(x, stacks, stack), (layers, jnp.arange(count)))
    x = with_part(x, stacks, stack, part)
  sums = jax.lax.map(jax.checkpoint(head, prevent_cse=False), (x, microbatches))
  return jax.tree.map(lambda s: s.sum(0), sums)


def _in_float32(x: Any) -> Any:
  if is_quantized(x):
    return x.replace(port=x.port.astype(jnp.float32))
  return x.astype(jnp.float32)
