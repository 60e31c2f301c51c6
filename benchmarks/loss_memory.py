"""Shows what the loss without stored logits saves; writes results/loss_memory.json.

    python -m benchmarks.loss_memory        # with the extra [plan]; no GPU, a minute or two

Compiles the loss of `models/losses.py` with its gradients (by the last norm's output
and by the kernel) for one H100, with stored logits and in chunks, and reads XLA's account of memory
and the FLOPs of its matrix products. Nothing runs.
"""

import argparse
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.loss import chunked, stored
from t5x_gpu.compiled.collectives import flops_per_device
from t5x_gpu.models.losses import choose_num_chunks
from t5x_gpu.tools.planning.gpu_compile import memory_of
from t5x_gpu.tools.planning.gpu_targets import described_gpus, kernels_for

OUT = pathlib.Path(__file__).parent / 'results' / 'loss_memory.json'
# (tokens on the GPU, embed, vocabulary): multilingual T5's and Gemma's, a small one, Llama-3 8B's.
SIZES = ((8192, 1024, 262_144), (8192, 1024, 32_768), (32_768, 4096, 128_256))


def measure(tokens: int, embed: int, vocab: int, *, gpu: str) -> list[dict[str, Any]]:
  """Returns temporary bytes and FLOPs with stored logits and in chunks."""
  gpus = described_gpus(gpu, gpus_per_host=1)
  there = jax.sharding.SingleDeviceSharding(gpus.devices[0])

  def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=there)

  operands = (
    array(1, tokens, embed, dtype=jnp.bfloat16),
    array(embed, vocab),
    array(1, tokens, dtype=jnp.int32),
    array(1, tokens),
  )
  chunks = choose_num_chunks(1, tokens, vocab_size=vocab) or 2  # a small loss takes none by itself
  rows = []
  for num_chunks, loss in ((0, stored), (chunks, chunked(chunks))):
    with kernels_for(gpus.target):
      lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*operands)
      compiled = lowered.compile()
    rows.append(
      {
        'tokens': tokens,
        'embed_dim': embed,
        'vocab_size': vocab,
        'num_chunks': num_chunks,
        'temporary_bytes': memory_of(compiled, compiled.as_text()).temporary_bytes,
        'flops': flops_per_device(lowered.as_text('hlo')),
      }
    )
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--gpu', default='h100')
  parser.add_argument('--out', type=pathlib.Path, default=OUT)
  args = parser.parse_args()
  jax.config.update('jax_platforms', 'cpu')  # before jax starts its backend
  rows = [row for size in SIZES for row in measure(*size, gpu=args.gpu)]
  for row in rows:
    way = f'{row["num_chunks"]} chunks' if row['num_chunks'] else 'stored'
    print(
      f'{row["tokens"]:>6} x {row["vocab_size"]:>7,} (embed {row["embed_dim"]}): {way:>10} '
      f'{row["temporary_bytes"] / 2**30:6.2f} GiB, {row["flops"] / 1e12:.1f} TFLOP'
    )
  args.out.write_text(
    json.dumps(
      {
        'command': f'python -m benchmarks.loss_memory --gpu={args.gpu}',
        'gpu': args.gpu,
        'jax': jax.__version__,
        'rows': rows,
      },
      indent=2,
    )
    + '\n'
  )


if __name__ == '__main__':
  main()
