"""Output projections on top of a stack."""

import functools
from typing import Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_gpu.layers.dense import DenseGeneral
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.partitioning.axis_rules import shard


class TokenLogits(nn.Module):
  """Logits over the vocabulary, from the token table or from a kernel of their own."""
  config: TransformerConfig

  @nn.compact
  def __call__(self, x: jax.Array, table: Optional[jax.Array]) -> jax.Array:
    """Returns [batch, length, vocab] in float32 from [batch, length, embed].

    Args:
      x: what the last norm returned.
      table: [vocab, embed] token table, for tied logits only.
    """
    x = shard(x, 'batch', 'length', 'embed')
    if self.config.logits_via_embedding:
      # The table has unit variance, so the product grows with sqrt(embed_dim).
      x = x / jnp.sqrt(jnp.asarray(x.shape[-1], x.dtype))
      logits = jnp.einsum('ble,ve->blv', x, table.astype(x.dtype))
    else:
      # Accumulated and kept in float32: the softmax over the vocabulary needs the digits.
      dot_general = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
      logits = DenseGeneral((self.config.vocab_size,), ('embed', 'vocab'), name='projection',
                            dtype=self.config.compute_dtype, dot_general=dot_general)(x)
    return shard(logits.astype(jnp.float32), 'batch', 'length', 'vocab')
