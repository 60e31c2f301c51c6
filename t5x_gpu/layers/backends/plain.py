"""Attention in plain JAX: dense, or in blocks of queries and keys with memory linear in the length.

`dot_product_attention` computes all logits of a layer at once: the reference that other backends
must equal. `ChunkedAttention` (whole rows on a device) and `ContextAttention` (a part of each row)
compute the logits of one block at a time, forward and backward, and skip blocks that are fully
masked. They look up the relative bias per block, so its gradient goes to the table without an array
[q_length, kv_length].
"""

import dataclasses
from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from t5x_gpu.layers.backends.kinds import AttentionKind
from t5x_gpu.layers.masks import TokenInfo, longer, padded
from t5x_gpu.partitioning.axis_rules import context_method
from t5x_gpu.partitioning.context_parallel import gathered_attention
from t5x_gpu.partitioning.ring_attention import MASKED, RESULTS, largest_block, ring_attention


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
  weights = jax.nn.softmax(attention_logits(query, key, mask, bias, softcap), axis=-1)
  weights = weights.astype(value.dtype)
  batch, heads, q_length, _ = weights.shape
  kv_heads = value.shape[2]
  if heads == kv_heads:
    return checkpoint_name(jnp.einsum('bhqk,bkhd->bqhd', weights, value), RESULTS)
  grouped = weights.reshape(batch, kv_heads, heads // kv_heads, q_length, -1)
  out = jnp.einsum('bhgqk,bkhd->bqhgd', grouped, value)
  return checkpoint_name(out.reshape(batch, q_length, heads, -1), RESULTS)


def attention_logits(
  query: jax.Array,
  key: jax.Array,
  mask: Optional[jax.Array],
  bias: Optional[jax.Array],
  softcap: Optional[float],
) -> jax.Array:
  """Returns float32 [batch, heads, q_length, kv_length]; arguments of `dot_product_attention`."""
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
    return self.kind.bias(table, self.q, self.kv, whole_rows=self.whole_rows)

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


# Largest block, in positions; shorter blocks skip more, longer blocks make larger matmuls.
BLOCK_LENGTH = 128


@flax.struct.dataclass
class ChunkedAttention:
  """Attention over whole rows, block by block.

  Attributes:
    q, kv: positions and segments of queries and keys.
    kind: attention of the stack.
    block_length: largest block, in positions.
  """

  q: TokenInfo
  kv: TokenInfo
  kind: AttentionKind = flax.struct.field(pytree_node=False)
  block_length: int = flax.struct.field(pytree_node=False, default=BLOCK_LENGTH)

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
    q_length, kv_length = (_with_blocks(x.shape[1], self.block_length) for x in (query, key))
    out = ring_attention(
      longer(query, q_length),
      longer(key, kv_length),
      longer(value, kv_length),
      logits_fn=_BlockLogits(self.kind, max(q_length, kv_length)),
      logits_params=bias,
      q_info=padded(self.q, q_length).with_window(window),
      kv_info=padded(self.kv, kv_length),
      axis=None,
      may_attend=_MayAttend(self.kind),
      block_length=self.block_length,
    )
    return out[:, : query.shape[1]]


def _with_blocks(length: int, block: int) -> int:
  """Returns `length`, or more if `length` only divides into small blocks (a prime number)."""
  if length <= block or 2 * largest_block(length, block) > block:
    return length
  return -(-length // block) * block


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
    bias: Optional[jax.Array] = None
    if table is not None:
      bias = self.kind.buckets.bias_between(table, q.positions, kv.positions, length=self.length)
    return attention_logits(query, key, self.kind.mask(q, kv), bias, self.kind.softcap)


@dataclasses.dataclass(frozen=True)
class _MayAttend:
  """Computes whether any query of a block may attend to any of its keys."""

  kind: AttentionKind

  def __call__(self, q: TokenInfo, kv: TokenInfo) -> jax.Array:
    return self.kind.mask(q, kv).any()
