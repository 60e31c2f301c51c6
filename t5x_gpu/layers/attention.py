"""Multi-head attention over named axes."""

from typing import Any, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_gpu.layers.dense import (
    DenseGeneral, Initializer, fan_in_init, project_together)
from t5x_gpu.layers.dropout import DropoutRng, dropout_positions
from t5x_gpu.partitioning.axis_rules import shard

# Vanishes in a float32 softmax; finite, so that a row with nothing to attend to stays finite too.
MASKED = -1e10


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
  logits = jnp.einsum('bqhd,bkhd->bhqk', query, key, preferred_element_type=jnp.float32)
  if bias is not None:
    logits = logits + bias.astype(jnp.float32)
  if mask is not None:
    logits = jnp.where(mask, logits, MASKED)
  weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
  return jnp.einsum('bhqk,bkhd->bqhd', weights, value)


class MultiHeadAttention(nn.Module):
  """Projections to heads, attention, and the projection back.

  Attributes:
    num_heads, head_dim: their product need not be the model's embed_dim.
    dropout_rate: of attention weights.
    dtype: of the projections; logits and softmax are float32.
  """
  num_heads: int
  head_dim: int
  dropout_rate: float = 0.0
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array, *, mask: Optional[jax.Array] = None,
               bias: Optional[jax.Array] = None,
               dropout_rng: Optional[DropoutRng] = None) -> jax.Array:
    """Returns self-attention [batch, length, embed] of `x`, of the same shape.

    `mask` and `bias` as in `dot_product_attention`; no dropout without `dropout_rng`.
    """
    def init(scale: float = 1.0) -> Initializer:
      return fan_in_init(num_in=1, distribution='normal', scale=scale)
    # Variance divided by head_dim: the 1/sqrt(kv) of the softmax, folded into the initializer.
    query, key, value = project_together(
        x, {'query': init(1.0 / self.head_dim), 'key': init(), 'value': init()},
        features=(self.num_heads, self.head_dim), axes=('embed', 'heads', 'kv'), dtype=self.dtype)
    # T5 drops an attention weight for all queries at once: the same as dropping a value.
    value = dropout_positions(value, self.dropout_rate, dropout_rng)
    out = dot_product_attention(query, key, value, mask=mask, bias=bias)
    out = shard(out, 'batch', 'length', 'heads', 'kv')
    out = DenseGeneral((x.shape[-1],), ('heads', 'kv', 'embed'), num_in=2,
                       kernel_init=fan_in_init(num_in=2, distribution='normal'),
                       dtype=self.dtype, name='out')(out)
    return shard(out, 'batch', 'residual_length', 'embed')
