"""Dense attention: all logits of a layer at once. The reference that other backends must equal."""

from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.layers.backends.kinds import AttentionKind
from t5x_gpu.layers.masks import TokenInfo
from t5x_gpu.partitioning.ring_attention import MASKED


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
    return jnp.einsum('bhqk,bkhd->bqhd', weights, value)
  grouped = weights.reshape(batch, kv_heads, heads // kv_heads, q_length, -1)
  out = jnp.einsum('bhgqk,bkhd->bqhgd', grouped, value)
  return out.reshape(batch, q_length, heads, -1)


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
