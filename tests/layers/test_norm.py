"""Norms: their numbers and gradients, and the arrays that they store for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.layers.norm import HeadsNorm, LayerNorm, RMSNorm
from t5x_gpu.partitioning.parameters import keep_activations_only

EPSILON = 1e-6
BATCH, LENGTH, HEADS, FEATURES = 2, 4, 3, 64


@pytest.fixture
def rng():
  return np.random.default_rng(0)


def test_rms_norm_divides_by_the_root_mean_square(rng):
  x = rng.normal(size=(2, 3, 8)).astype(np.float32) * 7
  scale = rng.normal(size=8).astype(np.float32)
  got = RMSNorm().apply({'params': {'scale': scale}}, x)
  want = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_rms_norm_plus_one_rounds_its_result_alone(rng):
  x = jnp.asarray(rng.normal(size=(4, 256)), jnp.bfloat16)
  scale = jnp.asarray(rng.normal(0, 0.1, 256), jnp.bfloat16)
  exact, rounded = (
    RMSNorm(plus_one=True, dtype=dtype).apply({'params': {'scale': scale}}, x)
    for dtype in (jnp.float32, jnp.bfloat16)
  )
  np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16))


def test_rms_norm_of_bfloat16_keeps_its_statistics_in_float32():
  x = jnp.full((1, 1, 4096), 3.0, jnp.bfloat16).at[0, 0, 0].set(200.0)
  scale = jnp.ones(4096)
  got = RMSNorm(dtype=jnp.bfloat16).apply({'params': {'scale': scale}}, x)
  want = x.astype(jnp.float32) / np.sqrt((4095 * 9 + 40000) / 4096)
  np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=8e-3)


def plain(x, params, *, kind, dtype):
  """Returns a norm as autodiff sees it: one expression without a custom gradient."""
  wide, scale = x.astype(jnp.float32), params['scale']
  if kind == 'layer':
    wide = wide - wide.mean(-1, keepdims=True)
  axis = (-2, -1) if kind == 'heads' else -1
  y = wide * jax.lax.rsqrt(jnp.square(wide).mean(axis, keepdims=True) + EPSILON)
  if kind == 'rms_plus_one':
    return (y * (1.0 + scale)).astype(dtype)
  y = y.astype(dtype) * scale.astype(dtype)
  return y + params['bias'].astype(dtype) if kind == 'layer' else y


KINDS = {
  'rms': RMSNorm,
  'rms_plus_one': lambda **options: RMSNorm(plus_one=True, **options),
  'layer': LayerNorm,
  'heads': lambda **options: HeadsNorm(HEADS, **options),
}
each_kind = pytest.mark.parametrize('kind', KINDS)


def case(rng, kind, dtype, copies=()):
  """Returns (norm, input, parameters), with the parameters in `copies` copies."""
  x = jnp.asarray(rng.normal(size=(BATCH, LENGTH, HEADS, FEATURES)) * 3 + 1, dtype)
  shape = (*copies, HEADS, FEATURES) if kind == 'heads' else (*copies, FEATURES)
  names = ('scale', 'bias') if kind == 'layer' else ('scale',)
  params = {name: jnp.asarray(rng.normal(1, 0.1, shape), jnp.float32) for name in names}
  return KINDS[kind](epsilon=EPSILON, dtype=dtype), x, params


@each_kind
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_a_norm_and_its_gradients_equal_autodiff_of_its_formula(rng, kind, dtype):
  norm, x, params = case(rng, kind, dtype)
  pull = jnp.asarray(rng.normal(size=x.shape), dtype)

  def with_gradients(function):
    y, backward = jax.vjp(function, x, params)
    return y, *backward(pull)

  got = with_gradients(lambda x, params: norm.apply({'params': params}, x))
  want = with_gradients(lambda x, params: plain(x, params, kind=kind, dtype=dtype))
  # Operations run one by one, so bfloat16 rounds in the same places.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, want)


@pytest.mark.parametrize('kind', ['rms', 'rms_plus_one', 'layer'])
def test_copies_of_a_scale_get_the_gradients_of_their_positions(rng, kind):
  norm, x, params = case(rng, kind, jnp.float32)
  x, count = x[..., 0, :], 2
  copies = {name: jnp.stack([array] * count) for name, array in params.items()}

  def loss(params, x):
    return jnp.sum(norm.apply({'params': params}, x) ** 2)

  got = jax.grad(loss)(copies, x)
  for i, part in enumerate(jnp.split(x, count, axis=1)):
    want = jax.grad(loss)(params, part)
    for name in want:
      np.testing.assert_allclose(got[name][i], want[name], rtol=1e-5)


@each_kind
@pytest.mark.parametrize('policy', [None, keep_activations_only])
def test_a_norm_stores_its_arguments_and_nothing_else(rng, kind, policy):
  norm, x, params = case(rng, kind, jnp.bfloat16)

  def apply(x, params):
    return norm.apply({'params': params}, x)

  function = apply if policy is None else jax.checkpoint(apply, policy=policy)
  stored = [a for a in jax.tree.leaves(jax.vjp(function, x, params)[1]) if a.size >= x.size // 2]
  assert [(a.shape, a.dtype) for a in stored] == [(x.shape, x.dtype)]
