"""Collectives along a manual axis, for arrays that may also be split over `model`.

`model` is automatic in the region (partitioning/manual_region.py). For an array that is split over
an automatic axis, XLA would first gather all parts on every device; here each part is sent alone.
Call these only where they are not differentiated: in the two functions of a `jax.custom_vjp`.
"""

from collections.abc import Callable
from typing import Optional

import jax
from jax.sharding import PartitionSpec


def all_gather(x: jax.Array, axis: str, *, dim: int, model_dim: Optional[int] = None) -> jax.Array:
  """Returns the parts of all devices of `axis`, concatenated along a dimension.

  Args:
    x: this device's part.
    axis: a manual mesh axis.
    dim: the dimension, counted from the last one (-1).
    model_dim: the dimension that `model` splits, counted the same way; None for none.
  """
  return _on_each_part(
    lambda part: jax.lax.all_gather(part, axis, axis=part.ndim + dim, tiled=True), x, model_dim
  )


def psum_scatter(
  x: jax.Array, axis: str, *, dim: int, model_dim: Optional[int] = None
) -> jax.Array:
  """Returns this device's part of the sum of `x` over `axis`; arguments as in `all_gather`."""
  return _on_each_part(
    lambda part: jax.lax.psum_scatter(part, axis, scatter_dimension=part.ndim + dim, tiled=True),
    x,
    model_dim,
  )


def _on_each_part(
  collective: Callable[[jax.Array], jax.Array], x: jax.Array, model_dim: Optional[int]
) -> jax.Array:
  if model_dim is None:
    return collective(x)
  spec = PartitionSpec(*('model' if i == x.ndim + model_dim else None for i in range(x.ndim)))
  return jax.shard_map(collective, in_specs=spec, out_specs=spec, axis_names={'model'})(x)
