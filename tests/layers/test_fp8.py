"""Products of 8-bit operands against float32, and their scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.layers import fp8
from t5x_gpu.layers.dense import contract
from t5x_gpu.layers.fp8 import E4M3, E5M2

# E4M3 rounds to 3 bits: a value moves by up to 2^-4, by 2.6% in the mean square; E5M2 twice that.
# Both operands of a product are rounded, and the errors of its terms are independent.
FORWARD, BACKWARD = 0.05, 0.08


def arrays(scale=1.0):
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(keys[0], (4, 16, 256))
  kernel = 0.01 * jax.random.normal(keys[1], (256, 6, 16))
  return x, kernel, scale * jax.random.normal(keys[2], (4, 16, 6, 16))


def in_8_bits(kernel):
  [[stacked]] = fp8.in_8_bits([[kernel[None]]])
  return jax.tree.map(lambda a: a[0], stacked).whole(jnp.float32)


def product(x, kernel):
  return contract(x, in_8_bits(kernel))


def error(got, want):
  return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize('scale', [1.0, 1e-12, 1e12])
def test_products_and_gradients_are_those_of_float32_up_to_rounding(scale):
  x, kernel, gradient = arrays(scale)
  y, transpose = jax.vjp(product, x, kernel)
  want, exact = jax.vjp(lambda x, k: jnp.tensordot(x, k, 1), x, kernel)
  assert 0.01 < error(y, want) < FORWARD
  for got, want in zip(transpose(gradient), exact(gradient), strict=True):
    assert 0.01 < error(got / scale, want / scale) < BACKWARD


def test_contracts_several_dimensions_as_the_projection_back_from_heads_does():
  x, kernel, gradient = arrays()
  y, transpose = jax.vjp(
    lambda g, k: contract(g, in_8_bits(k), 2), gradient, kernel.transpose(1, 2, 0)
  )
  want, exact = jax.vjp(lambda g, k: jnp.tensordot(g, k, 2), gradient, kernel.transpose(1, 2, 0))
  assert error(y, want) < FORWARD
  for got, want in zip(transpose(x), exact(x), strict=True):
    assert error(got, want) < BACKWARD


def test_rows_alone_round_as_in_the_batch():
  x, kernel, gradient = arrays()
  # Every row has another largest value, and so another scale.
  x = x * jnp.exp(jnp.arange(4.0))[:, None, None]
  y, transpose = jax.vjp(product, x, kernel)
  for i in range(4):
    alone, transpose_alone = jax.vjp(product, x[i : i + 1], kernel)
    # Only values 2^-14 below the largest of the batch round in another way.
    assert error(alone, y[i : i + 1]) < 1e-4
    dx = transpose_alone(gradient[i : i + 1])[0]
    assert error(dx, transpose(gradient)[0][i : i + 1]) < 1e-4


@pytest.mark.parametrize('dtype', [E4M3, E5M2])
def test_scales_are_powers_of_two_that_use_the_upper_half_of_the_range(dtype):
  largest = jnp.asarray([1.0, 3.3, 448.0, 57344.0, 1e-20, 1e20])
  scale = fp8.scale_of(largest, dtype)
  mantissa, _ = np.frexp(scale)
  np.testing.assert_array_equal(mantissa, 0.5)
  ratio = largest / scale / float(jnp.finfo(dtype).max)
  assert np.all((0.5 < ratio) & (ratio <= 1.0)), ratio


def test_zeros_stay_zeros_and_an_overflow_is_not_hidden():
  x, kernel, gradient = arrays()
  y, transpose = jax.vjp(product, 0 * x, kernel)
  assert not np.any(y) and not np.any(transpose(gradient)[1])
  assert np.all(np.isfinite(transpose(0 * gradient)[0]))
  for bad in (jnp.inf, jnp.nan):
    assert np.any(np.isnan(product(x.at[0, 0, 0].set(bad), kernel)))
    assert np.any(np.isnan(transpose(gradient.at[0, 0, 0, 0].set(bad))[0]))
