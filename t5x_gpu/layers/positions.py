"""What attention knows of positions: T5's bucketed relative bias."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.partitioning.axis_rules import shard, with_axes


def relative_position_buckets(q_length: int, kv_length: int, *, bidirectional: bool,
                              num_buckets: int, max_distance: int) -> np.ndarray:
  """Returns int32 bucket numbers [q_length, kv_length] of key position minus query position.

  Half of the buckets are exact distances, the other half grow logarithmically up to
  `max_distance`, beyond which all share the last one. Without `bidirectional`, keys after the
  query share bucket 0.
  Source: Raffel et al. 2020, section 2.1.
  """
  distance = np.arange(q_length)[:, None] - np.arange(kv_length)[None, :]  # > 0: key before query
  buckets = np.zeros_like(distance)
  if bidirectional:
    num_buckets //= 2
    buckets += (distance < 0) * num_buckets
    distance = np.abs(distance)
  else:
    distance = np.maximum(distance, 0)
  num_exact = num_buckets // 2
  # float32 as in T5X: the boundaries of the logarithmic buckets fall the same way.
  log_ratio = (np.log(distance.astype(np.float32) / num_exact + np.finfo(np.float32).eps)
               / np.log(max_distance / num_exact))
  logarithmic = num_exact + (log_ratio * (num_buckets - num_exact)).astype(np.int32)
  logarithmic = np.minimum(logarithmic, num_buckets - 1)
  return (buckets + np.where(distance < num_exact, distance, logarithmic)).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class RelativeBuckets:
  """How distances become buckets.

  Attributes:
    num_buckets, max_distance, bidirectional: as in `relative_position_buckets`.
  """
  num_buckets: int = 32
  max_distance: int = 128
  bidirectional: bool = False

  def bias(self, table: jax.Array, length: int) -> jax.Array:
    """Returns [1, heads, length, length] from `table` [heads, relpos_buckets], for whole rows."""
    return self._look_up(table, self._buckets(length))

  def bias_between(self, table: jax.Array, q_positions: jax.Array, kv_positions: jax.Array, *,
                   length: int) -> jax.Array:
    """Returns [1, heads, q_length, kv_length] for any positions in a row of `length`."""
    whole = self._buckets(length)
    by_distance = np.concatenate([whole[0, :0:-1], whole[:, 0]])  # key after, then before query
    distance = q_positions[:, None] - kv_positions[None, :]
    return self._look_up(table, jnp.asarray(by_distance)[distance + length - 1])

  def _buckets(self, length: int) -> np.ndarray:
    return relative_position_buckets(length, length, bidirectional=self.bidirectional,
                                     num_buckets=self.num_buckets, max_distance=self.max_distance)

  def _look_up(self, table: jax.Array, buckets: Any) -> jax.Array:
    # A one-hot matmul: its gradient is a matmul too, where a gather's is a slow scatter.
    one_hot = jax.nn.one_hot(buckets, self.num_buckets, dtype=table.dtype)
    return shard(jnp.einsum('hb,qkb->hqk', table, one_hot)[None], None, 'heads', None, None)


class RelativePositionTable(nn.Module):
  """A learned bias per head and bucket of relative distance.

  Attributes:
    num_heads: heads, each with its own row.
    num_buckets: columns.
    dtype: of the table that comes out.
  """
  num_heads: int
  num_buckets: int = 32
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self) -> jax.Array:
    """Returns [heads, relpos_buckets]."""
    init = with_axes(nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform'),
                     ('heads', 'relpos_buckets'))
    table = self.param('rel_embedding', init, (self.num_heads, self.num_buckets), jnp.float32)
    return table.astype(self.dtype)
