"""Dropout whose masks depend on the example, never on the topology.

A mask is a function of (seed, step, layer, site, index of the example in the global batch), so the
number of devices and of microbatches does not change the dropped features.
"""

import zlib
from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp
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
    """Returns the keys for the place `name` in a layer."""
    return self.fold(zlib.crc32(site.encode()))

  def row_keys(self) -> jax.Array:
    """Returns [batch] keys, one per example."""
    return jax.vmap(jax.random.fold_in, (None, 0))(self.key, self.rows)


def dropout(x: jax.Array, rate: float, rng: Optional[DropoutRng]) -> jax.Array:
  """Returns `x` with features dropped; all positions of a row share a mask, as in T5.

  Args:
    x: [batch, length, features...].
    rate: share of features to drop; the rest is scaled up.
    rng: None for no dropout.
  """
  if rng is None or rate == 0.0:
    return x
  shape = (1,) + x.shape[2:]
  mask = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, shape))(rng.row_keys())
  return _masked(x, mask, rate)


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

  def of_row(key: jax.Array) -> jax.Array:
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, positions)
    return jax.vmap(lambda k: jax.random.bernoulli(k, 1.0 - rate, (num_heads, 1)))(keys)

  mask = jax.vmap(of_row)(rng.row_keys())
  if num_heads < x.shape[2]:
    mask = jnp.repeat(mask, x.shape[2] // num_heads, axis=2)
  return _masked(x, mask, rate)


def _masked(x: jax.Array, mask: jax.Array, rate: float) -> jax.Array:
  return x * (mask / jnp.asarray(1.0 - rate, x.dtype)).astype(x.dtype)
