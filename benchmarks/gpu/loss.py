"""The loss alone, forward and backward, from the last norm: with stored logits, and in chunks."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.parts import Row
from benchmarks.gpu.timing import time_calls
from t5x_gpu.models.losses import TokenLoss, choose_num_chunks, cross_entropy, linear_cross_entropy

VOCABULARIES = (32768, 131072, 262144)
TOKENS, EMBED = 8192, 2048

Loss = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def stored(x: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns the summed loss, through logits [batch, length, vocab] in float32."""
  logits = jnp.einsum('ble,ev->blv', x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
  return cross_entropy(logits, targets, weights, z_loss=1e-4, label_smoothing=0.0)['loss'][0]


def chunked(num_chunks: int) -> Loss:
  """Returns the same loss in `num_chunks` parts of the length."""

  def loss(x: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    options: dict[str, Any] = dict(token_loss=TokenLoss(z_loss=1e-4), num_chunks=num_chunks)
    return linear_cross_entropy([(x, kernel)], None, targets, weights, **options)['loss']

  return loss


def measure(*, small: bool = False) -> Iterator[Row]:
  """Yields the time and the temporaries of each vocabulary and way."""
  tokens, embed = (32, 32) if small else (TOKENS, EMBED)
  for vocab in (64,) if small else VOCABULARIES:
    auto = choose_num_chunks(1, tokens, vocab_size=vocab) or 2
    numbers = dict.fromkeys((auto, 2 * auto, *(max(auto // n, 1) for n in (2, 4))))
    ways = [('stored', 0, stored), *(('chunked', n, chunked(n)) for n in numbers)]
    for what, chunks, loss in ways:
      row = {'what': what, 'vocab_size': vocab, 'tokens': tokens, 'embed_dim': embed}
      row |= {'chunks': chunks, 'auto': chunks == auto}
      try:
        yield row | _time(loss, row, small)
      except jax.errors.JaxRuntimeError as e:
        if 'RESOURCE_EXHAUSTED' not in str(e):
          raise
        yield row | {'error': 'out of memory'}


def _time(loss: Loss, row: Row, small: bool) -> Row:
  tokens, embed, vocab = row['tokens'], row['embed_dim'], row['vocab_size']
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(keys[0], (1, tokens, embed), jnp.bfloat16)
  kernel = jax.random.normal(keys[1], (embed, vocab), jnp.float32) * embed**-0.5
  targets = jax.random.randint(keys[2], (1, tokens), 0, vocab, jnp.int32)
  operands = (x, kernel, targets, jnp.ones((1, tokens), jnp.float32))
  compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*operands).compile()
  memory = compiled.memory_analysis()
  timing = time_calls(lambda: compiled(*operands), jax.block_until_ready, small=small)
  return {
    **timing.row(),
    'tflops': 6 * tokens * embed * vocab / timing.seconds / 1e12,
    'temporary_bytes': memory.temp_size_in_bytes if memory else None,
    'loss': float(compiled(*operands)[0]) / tokens,
  }
