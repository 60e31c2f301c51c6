"""Times dropless experts on the CPU, as grouped matmuls and with room for all tokens.

    python benchmarks/dropless.py [--rounds 5]        # writes dropless.json

Forward and backward pass of one MoeMlp in float32, 2048 tokens. `capacity` gives every expert room
for all tokens, which drops none either, at experts / k times the work. `xla` is XLA's own
ragged_dot in place of the first matmul of `grouped`, forward only. The ways take turns. The least
seconds and the least CPU seconds are written: the work of other programs is not in the latter.
"""

import argparse
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.layers.grouped_matmul import Groups, grouped_matmul
from t5x_gpu.layers.moe import MoeConfig, MoeMlp
from t5x_gpu.partitioning.axis_rules import split_names

OUT = pathlib.Path(__file__).parent / 'results' / 'dropless.json'
BATCH, LENGTH, EMBED, MLP = 4, 512, 256, 512


def layer(experts: int, k: int, factor: Any) -> Callable[[], Any]:
  """Returns a function that computes loss and gradients once."""
  config = MoeConfig(
    num_experts=experts, num_experts_per_token=k, expert_capacity_factor=factor, mlp_dim=MLP
  )
  module = MoeMlp(config)
  x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, EMBED))
  params = jax.jit(lambda: split_names(module.init(jax.random.key(0), x[:1, :1])['params'])[0])()
  step = jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(module.apply({'params': p}, x)[0] ** 2)))
  return lambda: jax.block_until_ready(step(params, x))


def matmul(experts: int, k: int, *, by_xla: bool) -> Callable[[], Any]:
  """Returns a function that multiplies sorted rows with the kernels of their experts."""
  num_rows = BATCH * LENGTH * k
  sizes = jnp.full(experts, num_rows // experts, jnp.int32)
  rows, kernels = jnp.ones((num_rows, EMBED)), jnp.ones((experts, EMBED, MLP))
  if by_xla:
    step = jax.jit(jax.lax.ragged_dot)
  else:
    step = jax.jit(lambda rows, kernels, sizes: grouped_matmul(rows, kernels, Groups(sizes, 64)))
  return lambda: jax.block_until_ready(step(rows, kernels, sizes))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rounds', type=int, default=5)
  args = parser.parse_args()
  results = []
  for experts, k in ((8, 2), (32, 2)):
    ways = {
      'layer, grouped': layer(experts, k, None),
      'layer, capacity': layer(experts, k, float(experts / k)),
      'matmul, grouped': matmul(experts, k, by_xla=False),
      'matmul, xla': matmul(experts, k, by_xla=True),
    }
    least = {name: [float('inf')] * 2 for name in ways}
    for i in range(args.rounds + 1):  # the first round compiles
      for name, run in ways.items():
        before = time.perf_counter(), time.process_time()
        run()
        after = time.perf_counter(), time.process_time()
        if i:
          least[name] = list(np.minimum(least[name], np.subtract(after, before)))
    for name, (seconds, cpu_seconds) in least.items():
      results.append(
        {
          'experts': experts,
          'k': k,
          'what': name,
          'seconds': round(float(seconds), 4),
          'cpu_seconds': round(float(cpu_seconds), 4),
        }
      )
      print(results[-1], flush=True)
  OUT.write_text(json.dumps({'jax': jax.__version__, 'results': results}, indent=1) + '\n')


if __name__ == '__main__':
  main()
