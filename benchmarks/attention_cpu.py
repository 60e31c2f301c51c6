"""CPU time and memory of attention backends on this machine's CPU, forward and backward.

python benchmarks/attention_cpu.py [LENGTH ...]     # writes benchmarks/results/attention_cpu.json
"""

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.layers.backends.choose import attention_by
from t5x_gpu.layers.backends.kinds import AttentionKind
from t5x_gpu.layers.backends.plain import ChunkedAttention
from t5x_gpu.layers.masks import TokenInfo

TOKENS, HEADS, HEAD_DIM = 4096, 8, 64
REPEATS = 5
RESULTS = pathlib.Path(__file__).parent / 'results' / 'attention_cpu.json'
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


def step_of(make: Callable[[TokenInfo], Any], length: int) -> tuple[Any, Any]:
  """Returns a compiled forward and backward pass, and its arguments."""
  rows = max(1, TOKENS // length)
  info = TokenInfo(jnp.arange(length), jnp.ones((rows, length), jnp.int32))
  keys = jax.random.split(jax.random.key(0), 3)
  args = [jax.random.normal(key, (rows, length, HEADS, HEAD_DIM)) for key in keys]

  def total(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return make(info)(query * HEAD_DIM**-0.5, key, value, None).sum()

  return jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*args).compile(), args


def measure(length: int) -> dict[str, dict[str, float]]:
  """Returns backend -> median CPU and wall milliseconds of one pass, and MiB of temporaries.

  The backends take turns, so that other load on the machine meets all of them.
  """
  steps = {name: step_of(make, length) for name, make in backends().items()}
  for step, args in steps.values():
    jax.block_until_ready(step(*args))
  times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
  for _ in range(REPEATS):
    for name, (step, args) in steps.items():
      start = time.process_time(), time.perf_counter()
      jax.block_until_ready(step(*args))
      times[name].append((time.process_time() - start[0], time.perf_counter() - start[1]))
  result = {}
  for name, (step, _) in steps.items():
    cpu, wall = 1e3 * np.median(times[name], axis=0)
    mib = step.memory_analysis().temp_size_in_bytes / 2**20
    result[name] = {'cpu_ms': round(cpu), 'wall_ms': round(wall), 'temporary_mib': round(mib)}
  return result


def main() -> None:
  lengths = [int(text) for text in sys.argv[1:]] or [64, 128, 256, 512, 1024, 2048]
  sizes = dict(tokens=TOKENS, heads=HEADS, head_dim=HEAD_DIM, repeats=REPEATS, cores=os.cpu_count())
  results = {}
  print('| length | ' + ' | '.join(backends()) + ' |')
  print('|---' * (1 + len(backends())) + '|')
  for length in lengths:
    results[length] = measure(length)
    cells = ['{cpu_ms} ms, {temporary_mib} MiB'.format(**row) for row in results[length].values()]
    print(f'| {length} | ' + ' | '.join(cells) + ' |', flush=True)
    found = {**sizes, 'jax': jax.__version__, 'by_length': results}
    RESULTS.write_text(json.dumps(found, indent=1) + '\n')


if __name__ == '__main__':
  main()
