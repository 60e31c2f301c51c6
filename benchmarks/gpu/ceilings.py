"""What the card can reach: matrix products in bfloat16 and FP8, and copies in its memory.

Random operands: products of zeros use less power and run faster.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.gpu.parts import Row
from benchmarks.gpu.timing import Timing, time_calls
from t5x_gpu.compiled.kernels import count_kernels

SIZES = (4096, 8192, 16384)
COPY_BYTES = 2 * 2**30


def measure(*, small: bool = False) -> Iterator[Row]:
  """Yields GB/s of a copy, and TFLOP/s of square products of each size and dtype."""
  yield _copy(2**20 if small else COPY_BYTES, small)
  for n in (64,) if small else SIZES:
    for dtype in ('bfloat16', 'fp8'):
      yield _matmul(n, dtype, small)


def _matmul(n: int, dtype: str, small: bool) -> Row:
  keys = jax.random.split(jax.random.key(0))
  a, b = (jax.random.normal(key, (n, n), jnp.bfloat16) for key in keys)
  if dtype == 'fp8':
    a, b = (x.astype(jnp.float8_e4m3fn) for x in (a, b))
  scale = jnp.float32(0.5)
  compiled = jax.jit(matmul).lower(a, b, scale).compile()
  is_fp8_gemm = count_kernels(compiled.as_text())['fp8_gemm'].runs > 0
  timing = time_calls(lambda: compiled(a, b, scale), jax.block_until_ready, small=small)
  return {
    'what': 'matmul',
    'precision': dtype,
    'size': n,
    **timing.row(),
    'tflops': 2 * n**3 / timing.seconds / 1e12,
    **({'is_fp8_gemm': is_fp8_gemm} if dtype == 'fp8' else {}),
  }


def matmul(a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
  """Returns scale * a @ b.T in bfloat16, accumulated in float32."""
  product = jnp.einsum('mk,nk->mn', a, b, preferred_element_type=jnp.float32)
  return (product * scale).astype(jnp.bfloat16)


def _copy(num_bytes: int, small: bool) -> Row:
  x = jax.random.normal(jax.random.key(0), (num_bytes // 4,), jnp.float32)
  compiled = jax.jit(lambda x: x + 1.0).lower(x).compile()
  timing: Timing = time_calls(lambda: compiled(x), jax.block_until_ready, small=small)
  return {
    'what': 'copy',
    'bytes': 2 * x.nbytes,  # read and written
    **timing.row(),
    'gigabytes_per_second': 2 * x.nbytes / timing.seconds / 1e9,
  }
