"""Attention in blocks of queries and keys, in plain JAX: memory linear in the length.

`ChunkedAttention` has whole rows on a device, `ContextAttention` a part of each row. Both compute
the logits of one block at a time, forward and backward, and skip blocks that are fully masked.
The relative bias is looked up per block, so its gradient goes to the table without an array
[q_length, kv_length].
"""

import dataclasses
from typing import Any, Optional

import flax.struct
import jax

from t5x_gpu.layers.backends.dense import attention_logits
from t5x_gpu.layers.backends.kinds import AttentionKind
from t5x_gpu.layers.masks import TokenInfo, longer, padded
from t5x_gpu.partitioning.axis_rules import context_method
from t5x_gpu.partitioning.context_parallel import gathered_attention
from t5x_gpu.partitioning.ring_attention import largest_block, ring_attention

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
    bias: Any = None
    if table is not None:
      bias = self.kind.buckets.bias_between(table, q.positions, kv.positions, length=self.length)
    return attention_logits(query, key, self.kind.mask(q, kv), bias, self.kind.softcap)


@dataclasses.dataclass(frozen=True)
class _MayAttend:
  """Computes whether any query of a block may attend to any of its keys."""

  kind: AttentionKind

  def __call__(self, q: TokenInfo, kv: TokenInfo) -> jax.Array:
    return self.kind.mask(q, kv).any()
