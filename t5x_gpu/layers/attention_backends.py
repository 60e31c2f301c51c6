"""Ways to compute attention, all with the same result: dense, and over a split length.

A backend is made once per batch from what is known of its tokens, and called in every layer. What
`bias` returns is the backend's own: computed once where a bias is shared between layers.
"""

import dataclasses
from typing import Any, Optional, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.layers.masks import TokenInfo, decoder_mask
from t5x_gpu.layers.positions import RelativeBuckets
from t5x_gpu.partitioning.axis_rules import context_method
from t5x_gpu.partitioning.context_parallel import gathered_attention
from t5x_gpu.partitioning.ring_attention import MASKED, ring_attention


class Attention(Protocol):
  """How queries, keys and values [batch, length, heads, kv] become outputs of that shape."""

  def bias(self, table: jax.Array) -> Any:
    """Returns what a call takes as `bias`, from a table [heads, relpos_buckets]."""

  def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array, bias: Any) -> jax.Array:
    """Returns the outputs; `bias` may be None."""


def decoder_attention(info: TokenInfo, buckets: RelativeBuckets) -> Attention:
  """Returns causal self-attention: dense, or over `context` where the active rules split it."""
  if context_method() is None:
    return DenseAttention(decoder_mask(info, info), buckets)
  return ContextAttention(info, buckets)


def dot_product_attention(query: jax.Array, key: jax.Array, value: jax.Array, *,
                          mask: Optional[jax.Array] = None,
                          bias: Optional[jax.Array] = None) -> jax.Array:
  """Returns attention output [batch, q_length, heads, kv], with the softmax in float32.

  Args:
    query: [batch, q_length, heads, kv].
    key, value: [batch, kv_length, heads, kv].
    mask: boolean, broadcastable to [batch, heads, q_length, kv_length]; True may attend.
    bias: of the same shape; added to the logits.
  Source: Vaswani et al. 2017, eq. 1. T5 folds 1/sqrt(kv) into the query's initializer.
  """
  weights = jax.nn.softmax(_logits(query, key, mask, bias), axis=-1).astype(value.dtype)
  return jnp.einsum('bhqk,bkhd->bqhd', weights, value)


def _logits(query: jax.Array, key: jax.Array, mask: Optional[jax.Array],
            bias: Optional[jax.Array]) -> jax.Array:
  logits = jnp.einsum('bqhd,bkhd->bhqk', query, key, preferred_element_type=jnp.float32)
  if bias is not None:
    logits = logits + bias.astype(jnp.float32)
  return logits if mask is None else jnp.where(mask, logits, MASKED)


@flax.struct.dataclass
class DenseAttention:
  """Logits of whole rows at once.

  Attributes:
    mask: as in `dot_product_attention`.
    buckets: of the relative bias.
  """
  mask: jax.Array
  buckets: RelativeBuckets = flax.struct.field(pytree_node=False)

  def bias(self, table: jax.Array) -> jax.Array:
    return self.buckets.bias(table, self.mask.shape[-1])

  def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array,
               bias: Optional[jax.Array]) -> jax.Array:
    return dot_product_attention(query, key, value, mask=self.mask, bias=bias)


@flax.struct.dataclass
class ContextAttention:
  """Attention over rows that are split over the mesh axis `context`.

  Attributes:
    info: of the local tokens.
    buckets: of the relative bias.
  """
  info: TokenInfo
  buckets: RelativeBuckets = flax.struct.field(pytree_node=False)

  def bias(self, table: jax.Array) -> jax.Array:
    return table

  def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array,
               bias: Optional[jax.Array]) -> jax.Array:
    length = query.shape[1] * jax.lax.axis_size('context')
    options = dict(logits_fn=_BlockLogits(self.buckets, length), logits_params=bias,
                   q_info=self.info, kv_info=self.info)
    if context_method() == 'gather':
      return gathered_attention(query, key, value, **options)
    return ring_attention(query, key, value, may_attend=_may_attend, **options)


@dataclasses.dataclass(frozen=True)
class _BlockLogits:
  """Logits of any queries and keys of rows of `length`."""
  buckets: RelativeBuckets
  length: int

  def __call__(self, table: Optional[jax.Array], query: jax.Array, key: jax.Array, q: TokenInfo,
               kv: TokenInfo) -> jax.Array:
    bias = None if table is None else self.buckets.bias_between(
        table, q.positions, kv.positions, length=self.length)
    return _logits(query, key, decoder_mask(q, kv), bias)


def _may_attend(q: TokenInfo, kv: TokenInfo) -> jax.Array:
  return decoder_mask(q, kv).any()
