"""The token table: ids to vectors."""

from typing import Any, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from t5x_gpu.partitioning.axis_rules import shard, split_axes, split_axis, with_axes


class Embedding(nn.Module):
  """A table [vocab, embed].

  If the vocabulary is split, each device looks up the ids in its own rows and the vectors are
  summed over the devices, so no device holds the whole table.

  Attributes:
    vocab_size: rows, at least the largest id + 1.
    embed_dim: columns.
    dtype: of the result.
    stddev: of the initial values; 1 as in T5, whose residual stream starts at unit variance.
  """

  vocab_size: int
  embed_dim: int
  dtype: Any = jnp.float32
  stddev: float = 1.0

  def setup(self) -> None:
    init = with_axes(nn.initializers.normal(stddev=self.stddev), ('vocab', 'embed'))
    self.embedding = self.param('embedding', init, (self.vocab_size, self.embed_dim), jnp.float32)

  def __call__(self, ids: jax.Array) -> jax.Array:
    """Returns [batch, length, embed] from ids [batch, length]."""
    # Split over the vocabulary only: with other axes, XLA aborts on the lookup (jax 0.10, 0.11).
    table = shard(self.embedding, 'vocab', 'embed')
    out = _lookup(split_axis('vocab'), table, ids).astype(self.dtype)
    return shard(out, 'batch', 'residual_length', 'embed')


def _rows(axis: Optional[str], table: jax.Array, ids: jax.Array) -> jax.Array:
  """Returns the rows `ids` of a table whose rows may be split over the mesh axis `axis`."""

  def local(table: jax.Array, ids: jax.Array) -> jax.Array:
    here, mine = _own(axis, table, ids)
    rows = jnp.where(mine[..., None], jnp.take(table, here, axis=0, mode='clip'), 0)
    # In float32: XLA's CPU compiler aborts on a bfloat16 sum that is written out (jax 0.10, 0.11).
    rows = rows.astype(jnp.float32)
    if by_position:
      return jax.lax.psum_scatter(rows, axis, scatter_dimension=1, tiled=True)
    return jax.lax.psum(rows, axis)

  if axis is None:
    return jnp.take(table, ids, axis=0, mode='clip')
  by_position = split_axes('residual_length') == (axis,)  # each device needs its positions only
  return jax.shard_map(
    local,
    axis_names={axis},
    in_specs=(P(axis), P()),
    out_specs=P(None, axis) if by_position else P(),
  )(table, ids)


def _rows_forward(axis: Optional[str], table: jax.Array, ids: jax.Array) -> Any:
  return _rows(axis, table, ids), (table, ids)


def _rows_backward(axis: Optional[str], saved: Any, gradient: jax.Array) -> Any:
  """Returns the gradient of the table, summed in float32: a common token has thousands of terms."""

  def local(table: jax.Array, ids: jax.Array, gradient: jax.Array) -> jax.Array:
    here, mine = _own(axis, table, ids)
    here = jnp.where(mine, here, table.shape[0])  # out of bounds: dropped
    zeros = jnp.zeros_like(table, jnp.float32)
    return zeros.at[here].add(gradient.astype(jnp.float32), mode='drop').astype(table.dtype)

  if axis is not None:
    local = jax.shard_map(local, axis_names={axis}, in_specs=(P(axis), P(), P()), out_specs=P(axis))
  return local(*saved, gradient), None


def _own(axis: Optional[str], table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the row of each id in this device's part of the table, and whether it has that row."""
  first = 0 if axis is None else jax.lax.axis_index(axis) * table.shape[0]
  here = jnp.clip(ids, 0) - first
  return here, (here >= 0) & (here < table.shape[0])


# A custom gradient: JAX cannot differentiate through a shard_map inside a shard_map.
_lookup = jax.custom_vjp(_rows, nondiff_argnums=(0,))
_lookup.defvjp(_rows_forward, _rows_backward)
