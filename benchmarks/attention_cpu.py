"""Times attention backends on this machine's CPU, forward and backward, and their memory.

python benchmarks/attention_cpu.py [LENGTH ...]
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.layers.backends.choose import attention_by
from t5x_gpu.layers.backends.chunked import ChunkedAttention
from t5x_gpu.layers.backends.kinds import AttentionKind
from t5x_gpu.layers.masks import TokenInfo

TOKENS, HEADS, HEAD_DIM = 4096, 8, 64
REPEATS = 5
KIND = AttentionKind()


def backends() -> dict[str, Callable[[TokenInfo], Any]]:
  return {
    'dense': lambda info: attention_by('dense', KIND, info),
    **{
      f'chunked, blocks of {block}': lambda info, block=block: ChunkedAttention(
        info, info, KIND, block_length=block
      )
      for block in (64, 128, 256, 512)
    },
  }


def measure(make: Callable[[TokenInfo], Any], length: int) -> tuple[float, float]:
  """Returns (best milliseconds, MiB of temporaries) of one forward and backward pass."""
  rows = max(1, TOKENS // length)
  info = TokenInfo(jnp.arange(length), jnp.ones((rows, length), jnp.int32))
  keys = jax.random.split(jax.random.key(0), 3)
  args = [jax.random.normal(key, (rows, length, HEADS, HEAD_DIM)) for key in keys]

  def total(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return make(info)(query * HEAD_DIM**-0.5, key, value, None).sum()

  step = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*args).compile()
  jax.block_until_ready(step(*args))
  seconds = []
  for _ in range(REPEATS):
    start = time.perf_counter()
    jax.block_until_ready(step(*args))
    seconds.append(time.perf_counter() - start)
  return 1e3 * float(np.min(seconds)), step.memory_analysis().temp_size_in_bytes / 2**20


if __name__ == '__main__':
  lengths = [int(text) for text in sys.argv[1:]] or [64, 128, 256, 512, 1024, 2048, 4096]
  print('| length | ' + ' | '.join(backends()) + ' |')
  print('|---' * (1 + len(backends())) + '|')
  for length in lengths:
    cells = ['{:.0f} ms, {:.0f} MiB'.format(*measure(make, length)) for make in backends().values()]
    print(f'| {length} | ' + ' | '.join(cells) + ' |', flush=True)
