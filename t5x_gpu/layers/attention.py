"""Multi-head attention over named axes."""

from typing import Any, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_gpu.layers.dense import DenseGeneral, fan_in_init
from t5x_gpu.partitioning.axis_rules import shard

# Vanishes in a float32 softmax; finite, so that a row with nothing to attend to stays finite too.
MASKED = -1e10


def dot_product_attention(query: jax.Array, key: jax.Array, value: jax.Array, *,
                          mask: Optional[jax.Array] = None, bias: Optional[jax.Array] = None,
                          dropout_rate: float = 0.0,
                          dropout_rng: Optional[jax.Array] = None) -> jax.Array:
  """Returns attention output [batch, q_length, heads, kv], with the softmax in float32.

  Args:
    query: [batch, q_length, heads, kv].
    key, value: [batch, kv_length, heads, kv].
    mask: boolean, broadcastable to [batch, heads, q_length, kv_length]; True may attend.
    bias: of the same shape; added to the logits.
    dropout_rate: of attention weights; one mask [batch, heads, kv_length] for all queries, as T5.
    dropout_rng: key of the mask; None for no dropout.
  Source: Vaswani et al. 2017, eq. 1. T5 folds 1/sqrt(kv) into the query's initializer.
  """
  logits = jnp.einsum('bqhd,bkhd->bhqk', query, key, preferred_element_type=jnp.float32)
  if bias is not None:
    logits = logits + bias.astype(jnp.float32)
  if mask is not None:
    logits = jnp.where(mask, logits, MASKED)
  weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
  if dropout_rng is not None and dropout_rate > 0.0:
    keep = 1.0 - dropout_rate
    mask_shape = weights.shape[:-2] + (1, weights.shape[-1])
    mask = jax.random.bernoulli(dropout_rng, keep, mask_shape)
    weights = weights * (mask / jnp.asarray(keep, weights.dtype)).astype(weights.dtype)
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
  def __call__(self, x: jax.Array, kv: jax.Array, *, mask: Optional[jax.Array] = None,
               bias: Optional[jax.Array] = None, deterministic: bool) -> jax.Array:
    """Returns [batch, q_length, embed]; queries from `x`, keys and values from `kv`.

    `mask` and `bias` as in `dot_product_attention`.
    """
    heads = (self.num_heads, self.head_dim)

    def project(name: str, inputs: jax.Array, scale: float = 1.0) -> jax.Array:
      init = fan_in_init(num_in=1, distribution='normal', scale=scale)
      out = DenseGeneral(heads, ('embed', 'heads', 'kv'), kernel_init=init, dtype=self.dtype,
                         name=name)(inputs)
      return shard(out, 'batch', 'length', 'heads', 'kv')

    # Variance divided by head_dim: the 1/sqrt(kv) of the softmax, folded into the initializer.
    query = project('query', x, scale=1.0 / self.head_dim)
    key, value = project('key', kv), project('value', kv)
    use_dropout = self.dropout_rate > 0.0 and not deterministic
    out = dot_product_attention(query, key, value, mask=mask, bias=bias,
                                dropout_rate=self.dropout_rate,
                                dropout_rng=self.make_rng('dropout') if use_dropout else None)
    out = shard(out, 'batch', 'length', 'heads', 'kv')
    init = fan_in_init(num_in=2, distribution='normal')
    out = DenseGeneral((x.shape[-1],), ('heads', 'kv', 'embed'), num_in=2, kernel_init=init,
                       dtype=self.dtype, name='out')(out)
    return shard(out, 'batch', 'length', 'embed')
