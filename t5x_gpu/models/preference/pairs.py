"""Sums over the texts of pairs, whose chosen and rejected texts alternate in a row."""

import jax
import jax.numpy as jnp

from t5x_gpu.partitioning.axis_rules import is_manual


def sums_of_pairs(values: jax.Array, segments: jax.Array) -> jax.Array:
  """Returns the sums of `values` over the two texts of each pair, float32 [batch, pairs, 2].

  The number of pairs is the maximum for the length, with a token per text; sums of absent pairs are
  0. If the length is split, the sums cover whole rows.

  Args:
    values: [batch, length].
    segments: [batch, length]: 1 and 2 in the first pair, 3 and 4 in the second; 0 for padding.
  """
  in_manual = is_manual('context')
  ways = jax.lax.axis_size('context') if in_manual else 1
  pairs = max(segments.shape[1] * ways // 2, 1)
  # XLA fuses this comparison and sum. A scatter could add in a varying order.
  is_in = segments[:, :, None] == jnp.arange(1, 2 * pairs + 1)
  sums = jnp.sum(jnp.where(is_in, values.astype(jnp.float32)[:, :, None], 0.0), axis=1)
  sums = jax.lax.psum(sums, 'context') if in_manual else sums
  return sums.reshape(*sums.shape[:-1], pairs, 2)
