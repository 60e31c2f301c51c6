"""Who may attend to whom: causal, padding, packing, prefix and sliding-window masks."""

import functools
from collections.abc import Sequence
from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class TokenInfo:
  """What decides whether two positions may attend to each other; the last dimension is the length.

  Attributes:
    positions: [length] of each token in its row.
    segments: [batch, length] number of the example in a packed row; 0 is padding, which nothing
      attends to and from.
    prefix: [batch, length], non-zero on positions that see each other in both directions, or None.
    window: [length] how many positions back a query sees, itself included; 0 for all; or None.
  """

  positions: jax.Array
  segments: jax.Array
  prefix: Optional[jax.Array] = None
  window: Optional[jax.Array] = None

  def with_window(self, size: Optional[jax.Array]) -> 'TokenInfo':
    """Returns the same with one window size for all positions; unchanged for None."""
    return self if size is None else self.replace(window=jnp.full_like(self.positions, size))


def token_info(
  target_tokens: jax.Array,
  *,
  segment_ids: Optional[jax.Array] = None,
  prefix: Optional[jax.Array] = None,
  positions: Optional[jax.Array] = None,
  known: Sequence[Optional[jax.Array]] = (),
) -> TokenInfo:
  """Returns what is known of every token of a row.

  Args:
    target_tokens: [batch, length]; without segment ids, id 0 is padding but for what is `known`.
    segment_ids: [batch, length] of packed examples, 0 on padding; attention stays inside a segment.
    prefix: see TokenInfo.
    positions: [length], where a row is split or reordered; else 0, 1, 2, ...
    known: [batch, length] each, above 0 only on tokens, whatever their id: loss weights.
  """
  if positions is None:
    positions = jnp.arange(target_tokens.shape[-1])
  if segment_ids is None:
    told = [x > 0 for x in (target_tokens, *known) if x is not None]
    segment_ids = functools.reduce(jnp.logical_or, told).astype(jnp.int32)
  return TokenInfo(positions, segment_ids, prefix)


def decoder_mask(q: TokenInfo, kv: TokenInfo) -> jax.Array:
  """Returns a boolean mask [batch, 1, q_length, kv_length]; True where attention is allowed."""
  distance = q.positions[:, None] - kv.positions[None, :]
  allowed = (distance >= 0)[None]
  if q.prefix is not None:
    allowed = allowed | ((q.prefix > 0)[:, :, None] & (kv.prefix > 0)[:, None, :])
  return allowed[:, None] & encoder_mask(q, kv)


def encoder_mask(q: TokenInfo, kv: TokenInfo) -> jax.Array:
  """Returns the mask of attention both ways: inside a segment, off padding, in a window."""
  allowed = (q.segments[:, :, None] == kv.segments[:, None, :]) & (q.segments > 0)[:, :, None]
  if q.window is not None:
    distance = jnp.abs(q.positions[:, None] - kv.positions[None, :])
    allowed = allowed & ((distance < q.window[:, None]) | (q.window == 0)[:, None])
  return allowed[:, None]
