"""Who may attend to whom: causal, padding, packing and prefix masks."""

from typing import Optional

import jax
import jax.numpy as jnp


def decoder_mask(target_tokens: jax.Array, *, segment_ids: Optional[jax.Array] = None,
                 prefix: Optional[jax.Array] = None) -> jax.Array:
  """Returns a boolean mask [batch, 1, q_length, kv_length]; True where attention is allowed.

  Args:
    target_tokens: [batch, length]; id 0 is padding, which nothing attends to and from.
    segment_ids: [batch, length] of packed examples; attention stays inside a segment.
    prefix: [batch, length], non-zero on positions that see each other in both directions.
  """
  length = target_tokens.shape[-1]
  allowed = jnp.tril(jnp.ones((length, length), jnp.bool_))[None]
  if prefix is not None:
    in_prefix = prefix > 0
    allowed = allowed | (in_prefix[:, :, None] & in_prefix[:, None, :])
  real = target_tokens > 0
  allowed = allowed & real[:, :, None] & real[:, None, :]
  if segment_ids is not None:
    allowed = allowed & (segment_ids[:, :, None] == segment_ids[:, None, :])
  return allowed[:, None]
