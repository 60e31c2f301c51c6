"""Accumulation that takes every microbatch through a layer before it goes on to the next layer.

The other way around, all layers for one microbatch after the other, parameters that are split
(ZeRO-3) are gathered and their gradients reduced for every microbatch. Here it is once per layer
and step, whatever the number of microbatches; what is stored is the input of every layer for all
rows, and the inside of a layer for one microbatch: layers are computed again in the backward pass.
Source: Lamy-Poirier 2023 (Breadth-First Pipeline Parallelism), section 4.2.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from t5x_gpu.models.losses import Sums
from t5x_gpu.partitioning import fsdp

Batch = Mapping[str, jax.Array]


def loss(model: Any, params: Any, batch: Batch, microbatches: Batch, same: Batch, *,
         dropout_key: jax.Array) -> Sums:
  """Returns the sums of `model.loss` over all microbatches.

  Args:
    model: has `embed`, `run_layers` and `head`, as models/decoder_only.py.
    params: as a model gets them in the region; leaves of 'layers' are stacked.
    batch: all local rows.
    microbatches: the same as arrays [num_microbatches, rows, ...].
    same: what all of them share.
    dropout_key: of the step.
  """
  def whole(tree: Any) -> Any:
    # In float32, so that the gradients of the microbatches add up in it.
    return jax.tree.map(lambda w: w.astype(jnp.float32),
                        fsdp.whole(tree, model.config.compute_dtype))
  rest = {name: whole(tree) for name, tree in params.items() if name != 'layers'}

  def layer(x: jax.Array, of_layer: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
    weights, number = whole(of_layer[0]), of_layer[1]
    one_layer = {**rest, 'layers': jax.tree.map(lambda w: w[None], weights)}

    def one(of_microbatch: tuple[jax.Array, Batch]) -> jax.Array:
      x, microbatch = of_microbatch
      return model.run_layers(one_layer, x, {**microbatch, **same}, dropout_key=dropout_key,
                              first_layer=number)
    return jax.lax.map(jax.checkpoint(one, prevent_cse=False), (x, microbatches)), None

  def head(of_microbatch: tuple[jax.Array, Batch]) -> Sums:
    x, microbatch = of_microbatch
    return model.head(rest, x, {**microbatch, **same}, dropout_key=dropout_key)

  x = model.embed(rest, batch, dropout_key=dropout_key)
  num_microbatches = jax.tree.leaves(microbatches)[0].shape[0]
  x = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), x)
  num_layers = jax.tree.leaves(params['layers'])[0].shape[0]
  x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x,
                      (params['layers'], jnp.arange(num_layers)))
  sums = jax.lax.map(jax.checkpoint(head, prevent_cse=False), (x, microbatches))
  return jax.tree.map(lambda s: s.sum(0), sums)
