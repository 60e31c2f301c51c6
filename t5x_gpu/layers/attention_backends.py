"""Two ways to compute attention, with the same result: dense, and over a split length.

A backend is created once per batch, from positions and segments of its tokens, and called in every
layer. The type of a bias depends on the backend; a bias shared between layers is computed once.
"""

import dataclasses
from typing import Any, Optional, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.layers.masks import TokenInfo, decoder_mask, encoder_mask
from t5x_gpu.layers.positions import RelativeBuckets
from t5x_gpu.partitioning.axis_rules import context_method
from t5x_gpu.partitioning.context_parallel import gathered_attention
from t5x_gpu.partitioning.ring_attention import MASKED, ring_attention


class Attention(Protocol):
  """Attends from queries [batch, q_length, heads, kv] to keys [batch, kv_length, kv_heads, kv].

  Query head h attends to key and value head h // (heads / kv_heads).
  """

  def bias(self, table: jax.Array) -> Any:
    """Returns the argument `bias` of a call, from a table [heads, relpos_buckets]."""

  def __call__(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: Any,
    window: Optional[jax.Array] = None,
  ) -> jax.Array:
    """Returns [batch, q_length, heads, kv]; `window` is the positions back that a query sees."""


@dataclasses.dataclass(frozen=True)
class AttentionKind:
  """The attention of a stack, the same for every batch.

  Attributes:
    causal: a query does not see later positions, except inside a prefix.
    softcap: cap on the logits, or None.
    buckets: buckets of the relative bias.
  """

  causal: bool = True
  softcap: Optional[float] = None
  buckets: RelativeBuckets = RelativeBuckets()

  def mask(self, q: TokenInfo, kv: TokenInfo) -> jax.Array:
    """Returns [batch, 1, q_length, kv_length], True where attention is allowed."""
    return decoder_mask(q, kv) if self.causal else encoder_mask(q, kv)


def make_attention(
  kind: AttentionKind, info: TokenInfo, kv_info: Optional[TokenInfo] = None
) -> Attention:
  """Returns the attention backend: dense, or over `context` if the active rules split the length.

  Args:
    kind: attention of the stack.
    info: positions and segments of the queries, and of the keys unless `kv_info` is given.
    kv_info: positions and segments of the encoder's tokens or of the slots of a cache.
  """
  if context_method() is None:
    return DenseAttention(
      info,
      info if kv_info is None else kv_info,
      kind.mask(info, info if kv_info is None else kv_info),
      kind,
      whole_rows=kv_info is None,
    )
  return ContextAttention(info, info if kv_info is None else kv_info, kind)


def dot_product_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  mask: Optional[jax.Array] = None,
  bias: Optional[jax.Array] = None,
  softcap: Optional[float] = None,
) -> jax.Array:
  """Returns attention output [batch, q_length, heads, kv], with the softmax in float32.

  Args:
    query: [batch, q_length, heads, kv].
    key, value: [batch, kv_length, kv_heads, kv].
    mask: boolean, broadcastable to [batch, heads, q_length, kv_length]; True may attend.
    bias: broadcastable to the same shape; added to the logits.
    softcap: caps the logits: softcap * tanh(logits / softcap).
  Source: Vaswani et al. 2017, eq. 1; Ainslie et al. 2023 (grouped queries); Gemma Team 2024 (cap).
  """
  logits = _logits(query, key, mask, bias, softcap)
  weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
  batch, heads, q_length, _ = weights.shape
  kv_heads = value.shape[2]
  if heads == kv_heads:
    return jnp.einsum('bhqk,bkhd->bqhd', weights, value)
  grouped = weights.reshape(batch, kv_heads, heads // kv_heads, q_length, -1)
  out = jnp.einsum('bhgqk,bkhd->bqhgd', grouped, value)
  return out.reshape(batch, q_length, heads, -1)


def _logits(
  query: jax.Array,
  key: jax.Array,
  mask: Optional[jax.Array],
  bias: Optional[jax.Array],
  softcap: Optional[float],
) -> jax.Array:
  """Returns float32 [batch, heads, q_length, kv_length]."""
  batch, q_length, heads, kv = query.shape
  kv_heads = key.shape[2]
  if heads == kv_heads:
    logits = jnp.einsum('bqhd,bkhd->bhqk', query, key, preferred_element_type=jnp.float32)
  else:
    grouped = query.reshape(batch, q_length, kv_heads, heads // kv_heads, kv)
    logits = jnp.einsum('bqhgd,bkhd->bhgqk', grouped, key, preferred_element_type=jnp.float32)
    logits = logits.reshape(batch, heads, q_length, -1)
  if softcap is not None:
    logits = softcap * jnp.tanh(logits / softcap)
  if bias is not None:
    logits = logits + bias.astype(jnp.float32)
  return logits if mask is None else jnp.where(mask, logits, MASKED)


@flax.struct.dataclass
class DenseAttention:
  """Attention over whole rows at once.

  Attributes:
    q, kv: positions and segments of queries and keys.
    mask: as in `dot_product_attention`, without a window.
    kind: attention of the stack.
    whole_rows: queries and keys have the same positions 0, 1, 2, ...
  """

  q: TokenInfo
  kv: TokenInfo
  mask: jax.Array
  kind: AttentionKind = flax.struct.field(pytree_node=False)
  whole_rows: bool = flax.struct.field(pytree_node=False)

  def bias(self, table: jax.Array) -> jax.Array:
    length = self.mask.shape[-1]
    if self.whole_rows:
      return self.kind.buckets.bias(table, length)
    return self.kind.buckets.bias_between(table, self.q.positions, self.kv.positions, length=length)

  def __call__(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: Optional[jax.Array],
    window: Optional[jax.Array] = None,
  ) -> jax.Array:
    mask = self.mask if window is None else self.kind.mask(self.q.with_window(window), self.kv)
    return dot_product_attention(query, key, value, mask=mask, bias=bias, softcap=self.kind.softcap)


@flax.struct.dataclass
class ContextAttention:
  """Attention over rows that are split over the mesh axis `context`.

  Attributes:
    q, kv: positions and segments of the local queries and keys.
    kind: attention of the stack.
  """

  q: TokenInfo
  kv: TokenInfo
  kind: AttentionKind = flax.struct.field(pytree_node=False)

  def bias(self, table: jax.Array) -> jax.Array:
    return table

  def __call__(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: Optional[jax.Array],
    window: Optional[jax.Array] = None,
  ) -> jax.Array:
    length = key.shape[1] * jax.lax.axis_size('context')
    options = dict(
      logits_fn=_BlockLogits(self.kind, length),
      logits_params=bias,
      q_info=self.q.with_window(window),
      kv_info=self.kv,
    )
    if context_method() == 'gather':
      return gathered_attention(query, key, value, **options)
    return ring_attention(query, key, value, may_attend=_MayAttend(self.kind), **options)


@dataclasses.dataclass(frozen=True)
class _BlockLogits:
  """Computes logits of blocks of queries and keys in rows of `length` tokens."""

  kind: AttentionKind
  length: int

  def __call__(
    self, table: Optional[jax.Array], query: jax.Array, key: jax.Array, q: TokenInfo, kv: TokenInfo
  ) -> jax.Array:
    bias = (
      None
      if table is None
      else self.kind.buckets.bias_between(table, q.positions, kv.positions, length=self.length)
    )
    return _logits(query, key, self.kind.mask(q, kv), bias, self.kind.softcap)


@dataclasses.dataclass(frozen=True)
class _MayAttend:
  """Computes whether any query of a block may attend to any of its keys."""

  kind: AttentionKind

  def __call__(self, q: TokenInfo, kv: TokenInfo) -> jax.Array:
    return self.kind.mask(q, kv).any()
