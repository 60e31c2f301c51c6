"""Caches keys and values of earlier tokens, so that decoding computes each token once."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.partitioning.axis_rules import shard


@flax.struct.dataclass
class KVCache:
  """Keys and values of all layers of a stack.

  All rows write to the same slot: prompts of different lengths are padded on the left. All layers
  are in one array, which a loop over layers updates in place.

  Attributes:
    key, value: [layers, batch, kv_heads, slots, kv], the order of attention's matmuls; with slots
      first, each token would transpose all of them.
    slot: scalar int32, slot of the next token.
  """

  key: jax.Array
  value: jax.Array
  slot: jax.Array

  def write(self, layer: Any, key: jax.Array, value: jax.Array) -> 'KVCache':
    """Returns the cache with new `key` and `value` [batch, new, kv_heads, kv] of `layer`."""

    def put(stack: jax.Array, x: jax.Array) -> jax.Array:
      x = jnp.swapaxes(x, 1, 2)[None].astype(stack.dtype)
      return _laid_out(jax.lax.dynamic_update_slice(stack, x, (layer, 0, 0, self.slot, 0)))

    return self.replace(key=put(self.key, key), value=put(self.value, value))

  def read(self, layer: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (key, value) [batch, slots, kv_heads, kv] of `layer`."""
    return tuple(
      jnp.swapaxes(jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), 1, 2)
      for x in (self.key, self.value)
    )

  def of_rows(self, function: Callable[[jax.Array], jax.Array]) -> 'KVCache':
    """Returns the cache with `function` applied to its arrays; `function` may only change rows."""
    return self.replace(key=_laid_out(function(self.key)), value=_laid_out(function(self.value)))

  @property
  def num_slots(self) -> int:
    """Number of tokens that the cache can hold."""
    return self.key.shape[3]


def empty_cache(
  *, num_layers: int, batch: int, slots: int, num_kv_heads: int, head_dim: int, dtype: Any
) -> KVCache:
  """Returns a cache of zeros, split over the mesh by the active rules."""
  zeros = _laid_out(jnp.zeros((num_layers, batch, num_kv_heads, slots, head_dim), dtype))
  return KVCache(zeros, zeros, jnp.int32(0))


def _laid_out(stack: jax.Array) -> jax.Array:
  return shard(stack, None, 'batch', 'kv_heads', None, 'kv')
