"""Pools token vectors into vectors of rows, or of the texts in a row."""

import jax
import jax.numpy as jnp

from t5x_gpu.layers.masks import TokenInfo
from t5x_gpu.partitioning.axis_rules import is_manual, shard

TEXTS_PER_ROW = 3  # in rows for embeddings: a text, its positive text, a hard negative
POOLINGS = ('first_token_tanh', 'first_token', 'mean')


def pool(x: jax.Array, info: TokenInfo, *, kind: str) -> jax.Array:
  """Returns [batch, embed], one vector per row.

  Args:
    x: [batch, length, embed] after the last norm.
    info: positions and segments of the tokens.
    kind: one of POOLINGS.
  """
  taken = info.segments > 0 if kind == 'mean' else info.positions == 0
  taken = jnp.broadcast_to(taken, info.segments.shape)[:, None]
  return shard(_mean(x, taken)[0][:, 0], 'batch', 'embed')


def pool_texts(
  x: jax.Array, segments: jax.Array, positions: jax.Array, *, kind: str
) -> tuple[jax.Array, jax.Array]:
  """Returns text vectors [batch, 3, embed] in float32, and whether each text exists.

  Args:
    x: [batch, length, embed] after the last norm.
    segments: [batch, length] number of the text, from 1; 0 for padding.
    positions: [length] or [batch, length] of tokens in their text.
    kind: 'mean' or 'first_token'.
  """
  taken = segments[:, None] == jnp.arange(1, TEXTS_PER_ROW + 1)[:, None]
  if kind == 'first_token':
    taken &= (jnp.broadcast_to(positions, segments.shape) == 0)[:, None]
  vectors, weights = _mean(x, taken)
  return vectors, weights > 0


def _mean(x: jax.Array, taken: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns means [batch, texts, embed] of the taken tokens, and their number.

  Args:
    x: [batch, length, embed].
    taken: bool [batch, texts, length].
  """
  x, weights = shard(x, 'batch', 'length', 'embed').astype(jnp.float32), taken.astype(jnp.float32)
  total, number = jnp.einsum('ble,bkl->bke', x, weights), weights.sum(-1, keepdims=True)
  if is_manual('context'):
    total, number = jax.lax.psum((total, number), 'context')
  return total / jnp.maximum(number, 1.0), number[..., 0]
