"""Comparisons of lowered steps cover numbers and operations, nothing process-specific."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.run.live import comparable_text


def text(f) -> str:
  return comparable_text(jax.jit(f).lower(jnp.zeros(64)))


def test_python_callbacks_of_two_processes_are_the_same():
  def f(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

  one, two = text(f), text(f)
  raw = [jax.jit(lambda x: f(x)).lower(jnp.zeros(64)).as_text() for _ in range(2)]
  assert 'callback' in one and one == two
  assert raw[0] != one  # something was left out


@pytest.mark.parametrize(
  'first, second',
  [
    (lambda x: 0.01 * x, lambda x: 0.02 * x),
    (lambda x: x + np.arange(64.0), lambda x: x + np.arange(64.0)[::-1]),
    (jnp.sin, jnp.cos),
  ],
)
def test_what_computes_something_else_differs(first, second):
  def between(f):  # strings on both sides, far apart
    return lambda x: jax.named_call(f, name='a_name')(x * 2) + 1

  assert text(between(first)) != text(between(second))
  assert text(between(first)) == text(between(first))


def test_a_large_constant_is_compared_to_the_last_number():
  def f(last):
    constant = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    constant[-1, -1] = last
    return lambda x: x @ constant

  assert text(f(1.0)) == text(f(1.0)) != text(f(1.0000001))
