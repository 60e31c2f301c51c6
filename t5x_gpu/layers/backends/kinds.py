"""The interface of attention backends, and the facts about a stack that they need."""

import dataclasses
from typing import Any, Optional, Protocol

import jax

from t5x_gpu.layers.masks import TokenInfo, decoder_mask, encoder_mask
from t5x_gpu.layers.positions import RelativeBuckets

# A relative bias in the form of a backend: an array, or the arguments that make one.
Bias = Any


class Attention(Protocol):
  """Attends from queries [batch, q_length, heads, kv] to keys [batch, kv_length, kv_heads, kv].

  Query head h attends to key and value head h // (heads / kv_heads). Created once per batch, from
  positions and segments of its tokens, and called in every layer. A bias
  shared between layers is computed once.
  """

  def bias(self, table: jax.Array) -> Bias:
    """Returns the argument `bias` of a call, from a table [heads, relpos_buckets]."""

  def __call__(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: Optional[Bias],
    window: Optional[jax.Array] = None,
  ) -> jax.Array:
    """Returns [batch, q_length, heads, kv]; `window` is the number of positions to attend to."""


@dataclasses.dataclass(frozen=True)
class AttentionKind:
  """The attention of a stack, the same for every batch.

  Attributes:
    causal: a query does not attend to later positions, except inside a prefix.
    softcap: cap on the logits, or None.
    buckets: buckets of the relative bias.
  """

  causal: bool = True
  softcap: Optional[float] = None
  buckets: RelativeBuckets = RelativeBuckets()

  def mask(self, q: TokenInfo, kv: TokenInfo) -> jax.Array:
    """Returns [batch, 1, q_length, kv_length], True where attention is allowed."""
    return decoder_mask(q, kv) if self.causal else encoder_mask(q, kv)

  def bias(self, table: jax.Array, q: TokenInfo, kv: TokenInfo, *, whole_rows: bool) -> jax.Array:
    """Returns the relative bias [1, heads, q_length, kv_length].

    Args:
      table: [heads, relpos_buckets].
      q, kv: positions of queries and keys.
      whole_rows: queries and keys have the same positions 0, 1, 2, ...
    """
    length = kv.segments.shape[-1]
    if whole_rows:
      return self.buckets.bias(table, length)
    return self.buckets.bias_between(table, q.positions, kv.positions, length=length)
