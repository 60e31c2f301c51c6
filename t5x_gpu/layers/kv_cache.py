"""Keys and values of tokens that were already seen, so that decoding computes each token once."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.partitioning.axis_rules import shard


@flax.struct.dataclass
class KVCache:
  """What all layers of a stack remember.

  All rows write to the same slot: prompts of different lengths are padded on the left. Layers stay
  in one array, which a loop over layers updates in place.

  Attributes:
    key, value: [layers, batch, slots, kv_heads, kv].
    slot: scalar int32, the slot that the next token goes to.
  """
  key: jax.Array
  value: jax.Array
  slot: jax.Array

  def write(self, layer: Any, key: jax.Array, value: jax.Array) -> 'KVCache':
    """Returns the cache with `key` and `value` [batch, new, kv_heads, kv] of `layer` added."""
    def put(stack: jax.Array, x: jax.Array) -> jax.Array:
      stack = jax.lax.dynamic_update_slice(stack, x[None].astype(stack.dtype),
                                           (layer, 0, self.slot, 0, 0))
      return _laid_out(stack)
    return self.replace(key=put(self.key, key), value=put(self.value, value))

  def read(self, layer: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (key, value) [batch, slots, kv_heads, kv] of `layer`."""
    return tuple(jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
                 for x in (self.key, self.value))


def empty_cache(*, num_layers: int, batch: int, slots: int, num_kv_heads: int, head_dim: int,
                dtype: Any) -> KVCache:
  """Returns a cache of zeros, split over the mesh as the active rules say."""
  zeros = _laid_out(jnp.zeros((num_layers, batch, slots, num_kv_heads, head_dim), dtype))
  return KVCache(zeros, zeros, jnp.int32(0))


def _laid_out(stack: jax.Array) -> jax.Array:
  return shard(stack, None, 'batch', None, 'kv_heads', 'kv')
