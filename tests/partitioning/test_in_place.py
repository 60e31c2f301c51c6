"""The loop that adds a block's gradients to earlier ones: the gradients of a plain loop, added."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.layers.dense import contract
from t5x_gpu.layers.rounded import RoundedOnce
from t5x_gpu.models.remat import remat_of
from t5x_gpu.partitioning.in_place import InPlace
from t5x_gpu.partitioning.parameters import Remat, Split, num_layers, over_layers

LAYERS, START, SIZE, EMBED = 6, 2, 3, 8
POLICIES = {'full': jax.checkpoint_policies.nothing_saveable, 'none': None}


def draw(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def layer(weights, x, shared, number):
  h = jnp.tanh(contract(x, weights['kernel']) + (weights['frozen'] * number).astype(x.dtype))
  return x + h * shared['scale'].astype(x.dtype)


PARAMS = {'kernel': draw(0, LAYERS, EMBED, EMBED), 'frozen': draw(1, LAYERS, EMBED)}
EARLIER, X = draw(2, LAYERS, EMBED, EMBED), draw(3, 4, EMBED)
SHARED = {'scale': draw(4, EMBED), 'unused': draw(5, EMBED)}


def run(params, x, shared, *, policy, first=0):
  return over_layers(
    layer,
    params,
    x,
    shared,
    dtype=x.dtype,
    first_layer=7,
    remat=Remat(policy, first, POLICIES['full']),
  )


def in_place(kernel, x, shared, start, earlier, make=lambda split: split, **options):
  params = {
    'kernel': InPlace(make(Split(kernel, earlier=earlier)), start, SIZE),
    'frozen': InPlace(Split(PARAMS['frozen']), start, SIZE),
  }
  return jnp.sum(run(params, x, shared, **options).astype(jnp.float32) ** 2)


def plain(kernel, x, shared, **options):
  block = {**PARAMS, 'kernel': kernel}
  block = jax.tree.map(lambda w: w[START : START + SIZE], block)
  return jnp.sum(run(block, x, shared, **options).astype(jnp.float32) ** 2)


@pytest.mark.parametrize('policy, first', [('full', 0), ('none', 0), ('none', 2)])
def test_a_block_adds_its_gradients_at_their_place_in_the_stack(policy, first):
  options = dict(policy=POLICIES[policy], first=first)
  value, grads = jax.jit(
    lambda start: jax.value_and_grad(in_place, (0, 1, 2))(
      PARAMS['kernel'], X, SHARED, start, EARLIER, **options
    )
  )(START)
  expected, (kernel, *others) = jax.value_and_grad(plain, (0, 1, 2))(
    PARAMS['kernel'], X, SHARED, policy=None
  )
  assert jnp.abs(kernel[START : START + SIZE]).min() > 0 and jnp.abs(others[0]).max() > 0
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5),
    (value, grads),
    (expected, (EARLIER + kernel, *others)),
  )


def test_without_earlier_gradients_other_blocks_get_zeros():
  grads = jax.grad(in_place)(PARAMS['kernel'], X, SHARED, START, None, policy=None)
  expected = jax.grad(plain)(PARAMS['kernel'], X, SHARED, policy=None)
  np.testing.assert_allclose(grads, expected, rtol=2e-5, atol=1e-5)


def test_kernels_rounded_once_give_the_numbers_of_kernels_rounded_at_each_use():
  x = X.astype(jnp.bfloat16)
  values = PARAMS['kernel'].astype(jnp.bfloat16)
  once = jax.value_and_grad(in_place)(
    PARAMS['kernel'], x, SHARED, START, EARLIER, lambda s: RoundedOnce(s, values), policy=None
  )
  each = jax.value_and_grad(in_place)(PARAMS['kernel'], x, SHARED, START, EARLIER, policy=None)
  jax.tree.map(np.testing.assert_array_equal, once, each)


def test_a_layer_without_a_loop_is_computed_again():
  """XLA would merge the recomputation with the forward pass."""

  def times(first):
    options = dict(policy=None, first=first)
    grad = jax.jit(jax.grad(lambda k: in_place(k, X, SHARED, START, EARLIER, **options)))
    return grad.lower(PARAMS['kernel']).compile().as_text().count(' tanh(')

  assert times(first=1) == times(first=0) + 2  # forward and backward, in addition to the loop


def test_a_block_has_its_share_of_the_layers_under_full():
  """Of a stage with several blocks, the stack has more layers than the loop."""
  block = {'kernel': InPlace(Split(PARAMS['kernel']), START, SIZE)}
  assert num_layers(block) == SIZE and num_layers(PARAMS) == LAYERS
  of_block = [remat_of('dots', n, num_layers=3, of_stack=12).first_layers for n in (0, 3, 4, 8, 99)]
  assert of_block == [0, 0, 1, 2, 3]
