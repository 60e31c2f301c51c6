"""The token table: ids to vectors, and vectors to logits when the two are tied."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_gpu.partitioning.axis_rules import is_split, shard, with_axes


class Embedding(nn.Module):
  """A table [vocab, embed].

  Rows are gathered, or, where the vocabulary is split, read by a one-hot matmul, which stays local
  to its part of the table. The matmul costs as much as the output projection: not for all.

  Attributes:
    vocab_size: rows, at least the largest id + 1.
    embed_dim: columns.
    dtype: of the vectors that come out.
  """
  vocab_size: int
  embed_dim: int
  dtype: Any = jnp.float32

  def setup(self) -> None:
    # Standard deviation 1, as T5: the residual stream starts at unit variance.
    init = with_axes(nn.initializers.normal(stddev=1.0), ('vocab', 'embed'))
    self.embedding = self.param('embedding', init, (self.vocab_size, self.embed_dim), jnp.float32)

  def __call__(self, ids: jax.Array) -> jax.Array:
    """Returns [batch, length, embed] from ids [batch, length]."""
    table = self.embedding.astype(self.dtype)
    if is_split('vocab'):
      vocab_iota = jax.lax.iota(jnp.int32, self.vocab_size)
      one_hot = (ids[..., None] == vocab_iota).astype(self.dtype)
      out = shard(one_hot, 'batch', 'length', 'vocab') @ table
    else:
      out = jnp.take(table, ids, axis=0, mode='clip')
    return shard(out, 'batch', 'length', 'embed')

  def attend(self, x: jax.Array) -> jax.Array:
    """Returns tied logits [batch, length, vocab] from [batch, length, embed]."""
    return jnp.einsum('ble,ve->blv', x.astype(self.dtype), self.embedding.astype(self.dtype))
