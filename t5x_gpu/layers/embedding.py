"""The token table: ids to vectors.

Under ZeRO-3 each device has some features of every row. Gathering the table, and sending its
gradient back, would be among the largest transfers of a step, and the first layer would wait for
the gather. If that takes fewer bytes, devices exchange only the rows that their tokens need.
"""

from collections.abc import Sequence
from typing import Optional

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from t5x_gpu.partitioning.axis_rules import shard, split_axes, split_axis, splits_rows, with_axes
from t5x_gpu.partitioning.parameters import Dims, Split, is_parameter


class Embedding(nn.Module):
  """A table [vocab, embed].

  If the vocabulary is split, each device looks up the ids in its rows, and the vectors are summed
  over the devices, so no device holds the whole table.

  Attributes:
    vocab_size: number of rows, at least the largest id + 1.
    embed_dim: number of columns.
    dtype: dtype of the result.
    stddev: standard deviation of the initial values; 1 as in T5, whose residual stream starts at
      unit variance.
  """

  vocab_size: int
  embed_dim: int
  dtype: DTypeLike = jnp.float32
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


def is_gathered_by_embed(table: object) -> bool:
  """Returns whether the parts of `table` [vocab, embed] are gathered along `embed`."""
  return is_parameter(table) and table.split.is_gathered and table.split.dims.fsdp == -1


def is_looked_up_in_parts(table: object, ids: jax.Array, dtype: DTypeLike) -> bool:
  """Returns whether `rows_of_parts` can be used, and sends less than a gather of the table.

  Args:
    table: parameter [vocab, embed], an array or a `Split`.
    ids: [batch, length], ids on this device.
    dtype: dtype of the result.
  """
  if not isinstance(table, Split) or table.dims != Dims(fsdp=-1, reducer=table.dims.reducer):
    return False
  return table.is_gathered and sends_less_in_parts(
    ids.size, vocab_size=table.part.shape[0], dtype_bytes=jnp.dtype(dtype).itemsize
  )


def sends_less_in_parts(num_ids: int, *, vocab_size: int, dtype_bytes: int) -> bool:
  """Returns whether rows and their gradients are fewer bytes than the table and its gradient.

  Args:
    num_ids: number of ids that a device looks up at once.
    vocab_size: number of rows of the table.
    dtype_bytes: bytes of a value in a row. The gradient of the table is float32.
  """
  return 2 * num_ids * dtype_bytes < vocab_size * (dtype_bytes + 4)


def traffic_per_step(
  num_ids: Sequence[int], *, embed_dim: int, fsdp: int, dtype_bytes: int, trained: bool = True
) -> dict[str, float]:
  """Returns collective -> bytes that a device sends over `fsdp` to look rows up in parts.

  Args:
    num_ids: number of ids that a device looks up, for each use of the table.
    embed_dim: features of a row.
    fsdp: size of the axis.
    dtype_bytes: bytes of a value in a row.
    trained: whether gradients are sent, too.
  """
  rows = sum(num_ids) * embed_dim * dtype_bytes * (1 + trained)
  return {
    'all-gather': (fsdp - 1) * sum(num_ids) * 4,  # the ids
    'all-to-all': (fsdp - 1) / fsdp * rows,
  }


def rows_of_parts(table: Split, ids: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Returns the rows `ids` of a table whose features are split over `fsdp`, without gathering it.

  Each device looks up its features for the ids of all devices, and sends the rows to them. In the
  backward pass, gradients of rows are sent back, and added on the device that holds the features.

  Args:
    table: [vocab, embed] in parts.
    ids: [batch, length], ids on this device.
    dtype: dtype of the sent rows and of the result [batch, length, embed].
  """
  of_all = jax.lax.all_gather(ids, 'fsdp')
  rows = _lookup(None, table.part, of_all).astype(dtype)
  rows = jax.lax.all_to_all(rows, 'fsdp', split_axis=0, concat_axis=3, tiled=True)[0]
  return shard(rows, 'batch', 'residual_length', 'embed')


_Saved = tuple[jax.Array, jax.Array]  # table and ids


def _rows(axis: Optional[str], table: jax.Array, ids: jax.Array) -> jax.Array:
  """Returns the rows `ids` of a table whose rows may be split over the mesh axis `axis`."""

  def local(table: jax.Array, ids: jax.Array) -> jax.Array:
    here, mine = _own(axis, table, ids)
    rows = jnp.where(mine[..., None], jnp.take(table, here, axis=0, mode='clip'), 0)
    # In float32: XLA's CPU compiler aborts on an explicit bfloat16 sum (jax 0.10, 0.11).
    rows = rows.astype(jnp.float32)
    if not splits_residual:
      return jax.lax.psum(rows, axis)
    return jax.lax.psum_scatter(rows, axis, scatter_dimension=split_dim, tiled=True)

  if axis is None:
    return jnp.take(table, ids, axis=0, mode='clip')
  splits_residual = split_axes('residual_length') == (axis,)  # each device only needs its tokens
  split_dim = 0 if splits_rows(ids.shape) else 1
  of_residual = P(axis) if split_dim == 0 else P(None, axis)
  return jax.shard_map(
    local,
    axis_names={axis},
    in_specs=(P(axis), P()),
    out_specs=of_residual if splits_residual else P(),
  )(table, ids)


def _rows_forward(
  axis: Optional[str], table: jax.Array, ids: jax.Array
) -> tuple[jax.Array, _Saved]:
  return _rows(axis, table, ids), (table, ids)


def _rows_backward(
  axis: Optional[str], saved: _Saved, gradient: jax.Array
) -> tuple[jax.Array, None]:
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
  """Returns the local row index of each id, and whether this device has the row."""
  first = 0 if axis is None else jax.lax.axis_index(axis) * table.shape[0]
  here = jnp.clip(ids, 0) - first
  return here, (here >= 0) & (here < table.shape[0])


# A custom gradient: JAX cannot differentiate through a shard_map inside a shard_map.
_lookup = jax.custom_vjp(_rows, nondiff_argnums=(0,))
_lookup.defvjp(_rows_forward, _rows_backward)
