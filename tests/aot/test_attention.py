"""Attention kernels alone, forward and backward, compiled for GPUs that are absent."""

import concurrent.futures
import multiprocessing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_gpu.layers.backends.choose import BACKENDS, AttentionNeed, attention_by, choose, hardware
from t5x_gpu.layers.backends.kinds import AttentionKind
from t5x_gpu.layers.masks import TokenInfo
from t5x_gpu.tools.planning.gpu_targets import described_gpus, kernels_for
from tests.aot.marks import MARKS

pytestmark = MARKS
LENGTH, HEADS = 512, 4


def compiled_kernel(gpu: str, head_dim: int, relative_bias: bool) -> str:
  """Compiles one attention and its gradients; returns the backend that `auto` chose."""
  gpus = described_gpus(gpu, num_hosts=1, gpus_per_host=1)
  sharding = NamedSharding(Mesh(np.array(gpus.devices), ('x',)), PartitionSpec())

  def array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  need = AttentionNeed(
    'bfloat16',
    head_dim,
    relative_bias=relative_bias,
    q_length=LENGTH,
    kv_length=LENGTH,
    rows=1,
    rows_and_heads=HEADS,
  )
  kind = AttentionKind()
  heads = [array(1, LENGTH, HEADS, head_dim)] * 3
  with kernels_for(gpus.target):
    name = choose('auto', need, hardware()).name

    def total(q, k, v, table, segments):
      attention = attention_by(name, kind, TokenInfo(jnp.arange(LENGTH), segments))
      bias = attention.bias(table) if relative_bias else None
      return attention(q, k, v, bias).astype(jnp.float32).sum()

    gradients = jax.grad(total, (0, 1, 2, 3) if relative_bias else (0, 1, 2))
    segments = array(1, LENGTH, dtype=jnp.int32)
    jax.jit(gradients).lower(*heads, array(HEADS, 32), segments).compile()
  return name


@pytest.mark.parametrize(
  ('gpu', 'relative_bias', 'kernel'),
  [
    ('h100', True, 'tokamax mosaic_gpu'),
    ('a100-80', True, 'tokamax triton'),
    ('b200', False, 'tokamax mosaic_gpu sm100'),
  ],
)
def test_the_largest_heads_of_the_table_compile(gpu, relative_bias, kernel):
  args = gpu, BACKENDS[kernel].head_dims[1], relative_bias
  if gpu != 'b200':
    assert compiled_kernel(*args) == kernel
    return
  # A process that compiled a Mosaic kernel for Hopper does not compile one for Blackwell.
  spawn = multiprocessing.get_context('spawn')
  with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
    assert pool.submit(compiled_kernel, *args).result() == kernel
