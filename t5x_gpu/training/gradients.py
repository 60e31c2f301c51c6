"""Gradients of the summed loss over the global batch, and the loss alone.

Losses are sums over target tokens: neither accumulation nor any kind of parallelism nor padding can
change them. Gradients are accumulated where they are made and reduced once per step.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from t5x_gpu.models.losses import Sums
from t5x_gpu.partitioning.region import Region

Batch = Mapping[str, jax.Array]
# (params, batch, dropout key) -> (gradients of the summed loss, sums).
GradientsFn = Callable[[Any, Batch, jax.Array], tuple[Any, Sums]]


def make_gradients(*, model: Any, region: Region, names: Any,
                   num_microbatches: int = 1) -> GradientsFn:
  """Returns the function (params, batch, dropout_key) -> (gradients, sums) of global arrays.

  Args:
    model: has `loss(params, batch, dropout_key=...) -> Sums`.
    region: how the step is split.
    names: tree of AxisNames of the parameters.
    num_microbatches: parts of each device's rows computed one after the other, to save memory.
  """
  def gradients(params: Any, batch: Batch, dropout_key: jax.Array) -> tuple[Any, Sums]:
    batch = with_rows(batch)

    def local(parts: Any, params: Any, batch: Batch, dropout_key: jax.Array) -> tuple[Any, Sums]:
      def loss_sum(parts: Any, batch: Batch) -> tuple[jax.Array, Sums]:
        sums = model.loss(region.parameters(parts, params, names), batch, dropout_key=dropout_key)
        sums = jax.tree.map(region.varying, sums)
        return sums['loss'][0], sums
      grad_fn = jax.grad(loss_sum, has_aux=True)
      grads, sums = _accumulate(grad_fn, parts, batch, num_microbatches, region)
      return region.reduce_gradients(grads, names), region.total(sums)
    parts = region.part_specs(names)
    kept = jax.tree.map(lambda n: region.spec(n.names, region.rules.parameters), names)
    out_specs = (region.gradient_specs(names), jax.sharding.PartitionSpec())
    in_specs = (parts, kept, region.batch_specs(batch), jax.sharding.PartitionSpec())
    return region.map(local, in_specs=in_specs, out_specs=out_specs)(
        params, params, batch, dropout_key)
  return gradients


def make_eval_step(*, model: Any, region: Region, names: Any) -> Callable[[Any, Batch], Sums]:
  """Returns the function (params, batch) -> sums, without dropout."""
  def eval_step(params: Any, batch: Batch) -> Sums:
    def local(parts: Any, params: Any, batch: Batch) -> Sums:
      return region.total(model.loss(region.parameters(parts, params, names), batch))
    kept = jax.tree.map(lambda n: region.spec(n.names, region.rules.parameters), names)
    return region.map(local, out_specs=jax.sharding.PartitionSpec(),
                      in_specs=(region.part_specs(names), kept, region.batch_specs(batch))
                      )(params, params, batch)
  return eval_step


def with_rows(batch: Batch) -> Batch:
  """Returns `batch` with 'rows' [batch], the number of each example: what dropout depends on."""
  return {**batch, 'rows': jnp.arange(next(iter(batch.values())).shape[0])}


def _accumulate(grad_fn: Callable[..., Any], parts: Any, batch: Batch, num_microbatches: int,
                region: Region) -> tuple[Any, Sums]:
  """Returns (gradients, sums) over all microbatches of local rows."""
  if num_microbatches == 1:
    return grad_fn(parts, batch)

  def split(x: jax.Array) -> jax.Array:
    return x.reshape(num_microbatches, x.shape[0] // num_microbatches, *x.shape[1:])

  def body(carry: Any, microbatch: Batch) -> tuple[Any, None]:
    return jax.tree.map(jnp.add, carry, grad_fn(parts, microbatch)), None
  microbatches = jax.tree.map(split, batch)
  first = jax.tree.map(lambda x: x[0], microbatches)
  zeros = jax.tree.map(lambda x: region.varying(jnp.zeros(x.shape, x.dtype)),
                       jax.eval_shape(grad_fn, parts, first))
  return jax.lax.scan(body, zeros, microbatches)[0]
