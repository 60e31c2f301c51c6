"""Multi-head attention over named axes."""

from typing import Any, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_gpu.layers.attention_backends import Attention
from t5x_gpu.layers.dense import (
    DenseGeneral, Initializer, fan_in_init, project_together)
from t5x_gpu.layers.dropout import DropoutRng, dropout_positions
from t5x_gpu.partitioning.axis_rules import shard

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
  def __call__(self, x: jax.Array, attention: Attention, *, bias: Optional[jax.Array] = None,
               dropout_rng: Optional[DropoutRng] = None) -> jax.Array:
    """Returns self-attention of `x` [batch, length, embed], of the same shape.

    Args:
      x: input of the projections.
      attention: how heads attend, and to what.
      bias: from `attention.bias`.
      dropout_rng: None for no dropout.
    """
    def init(scale: float = 1.0) -> Initializer:
      return fan_in_init(num_in=1, distribution='normal', scale=scale)
    # Variance divided by head_dim: the 1/sqrt(kv) of the softmax, folded into the initializer.
    query, key, value = project_together(
        x, {'query': init(1.0 / self.head_dim), 'key': init(), 'value': init()},
        features=(self.num_heads, self.head_dim), axes=('embed', 'heads', 'kv'), dtype=self.dtype)
    # T5 drops an attention weight for all queries at once: the same as dropping a value.
    value = dropout_positions(value, self.dropout_rate, dropout_rng)
    out = attention(query, key, value, bias)
    out = shard(out, 'batch', 'length', 'heads', 'kv')
    out = DenseGeneral((x.shape[-1],), ('heads', 'kv', 'embed'), num_in=2,
                       kernel_init=fan_in_init(num_in=2, distribution='normal'),
                       dtype=self.dtype, name='out')(out)
    return shard(out, 'batch', 'residual_length', 'embed')
