"""Products of rows in groups on this device equal products row by row in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.layers.grouped_matmul import Groups, grouped_matmul
from tests.gpu.helpers_numerics import ON_GPU, assert_close

# Libraries may warn about the jax of a GPU machine, which does not affect numbers.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings('default')]

BLOCK, INPUTS, FEATURES = (128, 256, 512) if ON_GPU else (8, 64, 128)
BLOCKS = 7
BAND = 1e-2
# Blocks of each group; the rows after the last group belong to none.
CASES = {
  'all_rows_used': (2, 1, 3, 1),
  'empty_first': (0, 2, 1, 3),
  'empty_between': (2, 0, 0, 3),
  'empty_last': (1, 3, 2, 0),
  'one_group': (0, 4, 0, 0),
}


def results(blocks, product, dtype):
  """Returns the products, and the gradients of rows and kernels."""
  keys = jax.random.split(jax.random.key(0), 3)
  count = BLOCKS * BLOCK
  used = (np.arange(count) < sum(blocks) * BLOCK)[:, None]
  rows = jnp.where(used, jax.random.normal(keys[0], (count, INPUTS), jnp.bfloat16), 0)
  shape = (len(blocks), INPUTS, 2, FEATURES // 2)
  kernels = (jax.random.normal(keys[1], shape) * INPUTS**-0.5).astype(jnp.bfloat16)
  gradient = jax.random.normal(keys[2], (count, *shape[2:]), jnp.bfloat16)

  @jax.jit
  def both(rows, kernels, gradient, sizes):
    out, pullback = jax.vjp(lambda *args: product(*args, sizes), rows, kernels)
    return dict(zip(('out', 'rows', 'kernels'), (out, *pullback(gradient))))

  sizes = jnp.asarray(blocks, jnp.int32) * BLOCK
  return both(*(x.astype(dtype) for x in (rows, kernels, gradient)), sizes)


def by_group(blocks):
  def product(rows, kernels, sizes):
    return grouped_matmul(rows, kernels, Groups(sizes, BLOCK))

  return results(blocks, product, jnp.bfloat16)


def by_row(blocks):
  def product(rows, kernels, sizes):
    ends = jnp.cumsum(sizes)
    group = jnp.searchsorted(ends, jnp.arange(len(rows)), side='right')  # past the last: of none
    return jnp.einsum('rg,ri,giaf->raf', jax.nn.one_hot(group, len(sizes)), rows, kernels)

  with jax.default_matmul_precision('highest'):
    return results(blocks, product, jnp.float32)


@pytest.mark.parametrize('name', CASES)
def test_grouped_products_and_their_gradients(name):
  got, want = by_group(CASES[name]), by_row(CASES[name])
  assert_close(got, want, BAND)
  empty = np.array(CASES[name]) == 0
  assert not np.any(np.asarray(got['kernels'], np.float32)[empty]), 'the gradient of an empty group'
