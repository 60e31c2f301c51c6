"""Who may attend to whom: causal, padding, packing, prefix and sliding-window masks."""

import functools
from collections.abc import Sequence
from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class TokenInfo:
  """Determines which positions may attend to each other; the last dimension is the length.

  Attributes:
    positions: [length], position of each token in its row.
    segments: [batch, length], number of the example in a packed row; 0 is padding, which neither
      attends nor is attended to.
    prefix: [batch, length], non-zero on positions that see each other in both directions, or None.
    window: [length], positions back that a query sees, including itself; 0 for all; or None.
  """

  positions: jax.Array
  segments: jax.Array
  prefix: Optional[jax.Array] = None
  window: Optional[jax.Array] = None

  def with_window(self, size: Optional[jax.Array]) -> 'TokenInfo':
    """Returns the info with one window size for all positions; unchanged for None."""
    return self if size is None else self.replace(window=jnp.full_like(self.positions, size))


def token_info(
  target_tokens: jax.Array,
  *,
  segment_ids: Optional[jax.Array] = None,
  prefix: Optional[jax.Array] = None,
  positions: Optional[jax.Array] = None,
  known: Sequence[Optional[jax.Array]] = (),
) -> TokenInfo:
  """Returns positions and segments of all tokens.

  Args:
    target_tokens: [batch, length]; without segment ids, id 0 is padding, except where `known`.
    segment_ids: [batch, length] of packed examples, 0 on padding; attention stays inside a segment.
    prefix: see TokenInfo.
    positions: [length], if rows are split or reordered; otherwise 0, 1, 2, ...
    known: arrays [batch, length] that are above 0 only on tokens, such as loss weights.
  """
  if positions is None:
    positions = jnp.arange(target_tokens.shape[-1])
  if segment_ids is None:
    is_token = [x > 0 for x in (target_tokens, *known) if x is not None]
    segment_ids = functools.reduce(jnp.logical_or, is_token).astype(jnp.int32)
  return TokenInfo(positions, segment_ids, prefix)


def decoder_mask(q: TokenInfo, kv: TokenInfo) -> jax.Array:
  """Returns a boolean mask [batch, 1, q_length, kv_length]; True where attention is allowed."""
  distance = q.positions[:, None] - kv.positions[None, :]
  allowed = (distance >= 0)[None]
  if q.prefix is not None:
    allowed = allowed | ((q.prefix > 0)[:, :, None] & (kv.prefix > 0)[:, None, :])
  return allowed[:, None] & encoder_mask(q, kv)


def encoder_mask(q: TokenInfo, kv: TokenInfo) -> jax.Array:
  """Returns a mask [batch, 1, q_length, kv_length] for both directions."""
  allowed = (q.segments[:, :, None] == kv.segments[:, None, :]) & (q.segments > 0)[:, :, None]
  if q.window is not None:
    distance = jnp.abs(q.positions[:, None] - kv.positions[None, :])
    allowed = allowed & ((distance < q.window[:, None]) | (q.window == 0)[:, None])
  return allowed[:, None]
