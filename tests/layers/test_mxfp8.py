"""MXFP8 against its definition in numpy, and its products against float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.precision_curves import Run, averages, curve
from t5x_gpu.layers import mxfp8
from t5x_gpu.layers.dense import contract
from t5x_gpu.layers.fp8 import E4M3
from t5x_gpu.layers.mxfp8 import BLOCK, BlockKernel

# As tests/layers/test_fp8.py; gradients are in E4M3, too.
ROUNDING = 0.05


def in_mx(x):
  """Returns `x` [rows, columns] rounded to MXFP8 along columns, in float64; NumPy alone."""
  found = np.zeros(x.shape)
  for row in range(x.shape[0]):
    for start in range(0, x.shape[1], BLOCK):
      block = np.asarray(x[row, start : start + BLOCK], np.float64)
      largest = np.abs(block).max()
      # The smallest power of two under which no value exceeds 448, the largest number of E4M3.
      scale = 2.0 ** np.ceil(np.log2(largest / 448)) if largest else 1.0
      found[row, start : start + BLOCK] = (block / scale).astype(E4M3).astype(np.float64) * scale
  return found


def arrays(columns=96):
  random = np.random.default_rng(0)
  x = random.normal(size=(40, columns)) * np.exp(2 * random.normal(size=(40, columns)))
  kernel, gradient = random.normal(size=(columns, 72)), random.normal(size=(40, 72))
  return [np.asarray(a, np.float32) for a in (x, kernel, gradient)]


def product(x, kernel, num_in=1):
  return contract(x, BlockKernel(kernel), num_in)


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(function, x, kernel, gradient):
  """Returns (function(x, kernel), gradient of x, gradient of kernel) for the result's gradient."""
  y, transpose = jax.vjp(function, x, kernel)
  return y, *transpose(gradient)


@pytest.mark.parametrize('columns', [96, 33, 8])
def test_products_are_those_of_operands_rounded_along_the_contracted_dimension(columns):
  x, kernel, gradient = arrays(columns)
  y, dx, dw = with_gradients(product, x, kernel, gradient)
  for got, a, b in ((y, x, kernel.T), (dx, gradient, kernel), (dw, x.T, gradient.T)):
    np.testing.assert_allclose(got, in_mx(a) @ in_mx(b).T, rtol=1e-5, atol=1e-4)


def test_products_are_those_of_the_operation_of_jax_that_kernels_implement():
  x, kernel, _ = arrays()
  (a, a_scale), (b, b_scale) = mxfp8.in_blocks(x), mxfp8.in_blocks(kernel.T)
  scales = (jax.lax.bitcast_convert_type(s, jnp.float8_e8m0fnu)[None] for s in (a_scale, b_scale))
  names = ('lhs_scale', 'rhs_scale')
  want = jax.lax.scaled_dot(
    *(a[None], b[None]),
    **dict(zip(names, scales, strict=True)),
    dimension_numbers=(((2,), (2,)), ((0,), (0,))),
    preferred_element_type=jnp.float32,
  )
  np.testing.assert_allclose(product(x, kernel), want[0], rtol=1e-5, atol=1e-4)


def test_products_and_gradients_are_those_of_float32_up_to_rounding():
  x, kernel, gradient = arrays()
  found, exact = (with_gradients(f, x, kernel, gradient) for f in (product, jnp.matmul))
  for got, want in zip(found, exact, strict=True):
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert 0.01 < error < ROUNDING


def test_contracts_several_dimensions_as_the_projection_back_from_heads_does():
  x, kernel, gradient = arrays()
  of_heads = x.reshape(-1, 6, 16), kernel.reshape(6, 16, -1)
  several = with_gradients(functools.partial(product, num_in=2), *of_heads, gradient)
  one = with_gradients(product, x, kernel, gradient)
  for got, want in zip(several, one, strict=True):
    np.testing.assert_array_equal(got.reshape(want.shape), want)


def test_a_large_value_costs_precision_only_in_its_block():
  x, *_ = arrays()
  x[0, 0] = 1e9
  rounded = np.asarray(product(x, np.eye(96, dtype=np.float32)))
  assert not np.any(rounded[0, 1:BLOCK])
  assert np.linalg.norm(rounded[0, BLOCK:] - x[0, BLOCK:]) < ROUNDING * np.linalg.norm(x[0, BLOCK:])


def test_zeros_stay_zeros_and_an_overflow_is_not_hidden():
  x, kernel, gradient = arrays()
  y, _, dw = with_gradients(product, 0 * x, kernel, gradient)
  assert not np.any(y) and not np.any(dw)
  _, dx, _ = with_gradients(product, 0 * x, kernel, 0 * gradient)
  assert np.all(np.isfinite(dx))
  for bad in (np.inf, np.nan):
    x[3, 5] = bad
    y = np.asarray(product(x, kernel))
    assert np.all(np.isnan(y[3])) and np.all(np.isfinite(np.delete(y, 3, axis=0)))


@pytest.mark.slow
def test_loss_curve_is_that_of_a_scale_per_tensor():
  tensor, blocks = (
    averages(curve(Run('fp8'), 60, fp8_scaling=scaling)) for scaling in ('current', 'mxfp8')
  )
  assert tensor[-1] < 0.85 * tensor[0]
  np.testing.assert_allclose(blocks, tensor, rtol=0.02)
