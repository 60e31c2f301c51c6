"""Dropout whose masks depend on the example, never on the topology.

A mask is a function of (seed, step, layer, site, index of the example in the global batch), so the
number of devices and of microbatches does not change the dropped features.

Its bits are one call of Threefry per site, with the example's index and the feature's as counters.
XLA expands each call to over a hundred instructions, in every layer that runs without a loop.
Source: Salmon et al. 2011 (Random123), whose streams with different keys or counters are
independent.
"""

import math
import zlib
from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jax.typing import ArrayLike


@flax.struct.dataclass
class DropoutRng:
  """Random keys for the dropout masks of one layer.

  Attributes:
    key: key of this step and layer.
    rows: [batch], index of each example in the global batch.
    positions: [length], position of each token in its row if rows are split; None for 0, 1, 2, ...
  """

  key: jax.Array
  rows: jax.Array
  positions: Optional[jax.Array] = None

  def fold(self, number: ArrayLike) -> 'DropoutRng':
    """Returns the keys for layer `number`."""
    return self.replace(key=jax.random.fold_in(self.key, number))

  def at(self, site: str) -> 'DropoutRng':
    """Returns the keys for the place `site` in a layer or model."""
    words = jax.random.key_data(self.key)
    own = np.zeros(words.shape, np.uint32)
    own[1] = zlib.crc32(site.encode())
    return self.replace(
      key=jax.random.wrap_key_data(words ^ own, impl=jax.random.key_impl(self.key))
    )

  def keeps(self, rate: float, numbers: jax.Array) -> jax.Array:
    """Returns [batch, ...], whether to keep each value: True with the probability 1 - `rate`.

    Args:
      rate: share of values to drop.
      numbers: uint32 [1, ...], a different number for each value of a row.
    """
    rows = jnp.expand_dims(self.rows.astype(jnp.uint32), tuple(range(1, numbers.ndim)))
    first, second = jax.random.key_data(self.key)[:2]  # the other half of an 'rbg' key is similar
    bits, _ = threefry2x32_p.bind(first, second, *jnp.broadcast_arrays(rows, numbers))
    return bits < jnp.uint32(min(round((1.0 - rate) * 2**32), 2**32 - 1))


def dropout(x: jax.Array, rate: float, rng: Optional[DropoutRng]) -> jax.Array:
  """Returns `x` with features dropped; all positions of a row share a mask, as in T5.

  Args:
    x: [batch, length, features...].
    rate: share of features to drop; the rest is scaled up.
    rng: None for no dropout.
  """
  if rng is None or rate == 0.0:
    return x
  features = x.shape[2:]
  numbers = jnp.arange(math.prod(features), dtype=jnp.uint32).reshape(1, 1, *features)
  return _masked(x, rng.keeps(rate, numbers), rate)


def dropout_positions(
  x: jax.Array, rate: float, rng: Optional[DropoutRng], *, num_heads: Optional[int] = None
) -> jax.Array:
  """Returns `x` with vectors [kv] dropped, by position and head.

  Args:
    x: [batch, length, heads, kv], values.
    rate, rng: as in `dropout`.
    num_heads: number of heads of the model, if `x` has several copies of each head; copies share a
      mask. None for the heads of `x`.
  """
  if rng is None or rate == 0.0:
    return x
  num_heads = num_heads or x.shape[2]
  positions = jnp.arange(x.shape[1]) if rng.positions is None else rng.positions
  heads = jnp.arange(num_heads, dtype=jnp.uint32)
  numbers = positions.astype(jnp.uint32)[:, None] * num_heads + heads
  mask = rng.keeps(rate, numbers[None, :, :, None])
  if num_heads < x.shape[2]:
    mask = jnp.repeat(mask, x.shape[2] // num_heads, axis=2)
  return _masked(x, mask, rate)


def _masked(x: jax.Array, mask: jax.Array, rate: float) -> jax.Array:
  return x * (mask / jnp.asarray(1.0 - rate, x.dtype)).astype(x.dtype)
