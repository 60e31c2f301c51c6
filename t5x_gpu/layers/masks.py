"""Attention masks: causal, padding, packing, prefix and sliding window.

A kernel reads one range of keys per query instead of a mask array: see `key_ranges`.
"""

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
    prefix: [batch, length], non-zero on positions with bidirectional attention, or None.
    window: [length], number of positions back that a query attends to, including its own; 0 for
      all; or None.
  """

  positions: jax.Array
  segments: jax.Array
  prefix: Optional[jax.Array] = None
  window: Optional[jax.Array] = None

  def with_window(self, size: Optional[jax.Array]) -> 'TokenInfo':
    """Returns the info with one window size for all positions; unchanged for None."""
    return self if size is None else self.replace(window=jnp.full_like(self.positions, size))


def longer(x: jax.Array, length: int, *, dimension: int = 1) -> jax.Array:
  """Returns `x` padded with zeros at the end, up to `length` along `dimension`."""
  widths = [(0, 0)] * x.ndim
  widths[dimension] = (0, length - x.shape[dimension])
  return x if x.shape[dimension] == length else jnp.pad(x, widths)


def padded(info: TokenInfo, length: int) -> TokenInfo:
  """Returns `info` padded to `length` after its tokens, whose positions are 0, 1, 2, ..."""
  if length == info.segments.shape[-1]:
    return info
  return jax.tree.map(lambda x: longer(x, length, dimension=x.ndim - 1), info).replace(
    positions=jnp.arange(length)
  )


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
    segment_ids: [batch, length], number of the packed example, 0 on padding; attention stays inside
      a segment.
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


@flax.struct.dataclass
class KeyRanges:
  """The keys that each query attends to, as one range.

  Attributes:
    start, end: int32 [batch, q_length]; a query attends to keys start, ..., end - 1, at least one.
    scale: float32 [batch, q_length], factor for queries: 1; 0 for a query without keys; NaN in a
      row with a query whose keys are not one range.
    places: int32 [q_length], the position of each query.
  """

  start: jax.Array
  end: jax.Array
  scale: jax.Array
  places: jax.Array

  def in_window(self, size: jax.Array) -> 'KeyRanges':
    """Returns the ranges limited to `size` positions back (0 for all).

    Only for keys with the positions 0, 1, 2, ...
    """
    size = jnp.where(size > 0, size, jnp.iinfo(jnp.int32).max // 2).astype(jnp.int32)
    return self.replace(
      start=jnp.maximum(self.start, self.places - size + 1),
      end=jnp.minimum(self.end, self.places + size),
    )


def key_ranges(
  mask: jax.Array, *, num_others: Optional[int] = None, places: Optional[jax.Array] = None
) -> KeyRanges:
  """Returns the ranges of `mask` [batch, 1, q_length, kv_length]; XLA never stores such a mask.

  A query without keys is scaled to 0. Padding gets the key at its own position, so that its softmax
  is finite; neither its output nor its gradient affects a token. In cross attention, the segment of
  a query may have no keys: as in dense attention, the query gets the mean of all values.

  Args:
    mask: True where attention is allowed.
    num_others: number of keys in cross attention; None for self-attention.
    places: [q_length], the position of each query; 0, 1, 2, ... by default.
  """
  mask = mask[:, 0]
  _, q_length, kv_length = mask.shape
  key = jnp.arange(kv_length, dtype=jnp.int32)
  start = jnp.where(mask, key, kv_length).min(-1)
  end = jnp.where(mask, key + 1, 0).max(-1)
  count = mask.sum(-1, dtype=jnp.int32)
  none = count == 0
  place = jnp.arange(q_length, dtype=jnp.int32) if places is None else places
  first, after = (place, place + 1) if num_others is None else (0, num_others)
  are_ranges = (none | (count == end - start)).all(-1, keepdims=True)
  return KeyRanges(
    jnp.where(none, first, start),
    jnp.where(none, after, end),
    jnp.where(are_ranges, jnp.where(none, 0.0, 1.0), jnp.nan),
    place,
  )
