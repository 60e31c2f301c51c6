"""Dropout masks depend on the example, not on where it is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.layers.dropout import DropoutRng, dropout, dropout_positions

RATE = 0.25
X = jnp.ones((6, 16, 4, 8))


def rng(rows, **more):
  return DropoutRng(jax.random.key(3), jnp.asarray(rows), **more)


def test_dropout_scales_what_it_keeps_and_shares_a_mask_between_positions():
  out = np.asarray(dropout(jnp.ones((64, 5, 32)), RATE, rng(np.arange(64))))
  assert (out == out[:, :1]).all()
  assert set(np.unique(out)) == {0.0, np.float32(1 / (1 - RATE))}
  assert abs(out.mean() - 1) < 0.1


def test_dropped_values_differ_by_position_and_head_and_are_whole_vectors():
  out = np.asarray(dropout_positions(X, RATE, rng(np.arange(6))))
  assert (out == out[..., :1]).all()
  masks = out[..., 0].transpose(1, 2, 0).reshape(16 * 4, 6)
  assert len(np.unique(masks, axis=0)) > 16


def test_masks_of_some_rows_are_those_of_the_whole_batch():
  for drop in (dropout, dropout_positions):
    whole = drop(X, RATE, rng(np.arange(6)))
    np.testing.assert_array_equal(drop(X[:2], RATE, rng([4, 1])), whole[np.array([4, 1])])


def test_masks_of_some_positions_are_those_of_the_whole_row():
  whole = dropout_positions(X, RATE, rng(np.arange(6)))
  some = np.array([9, 2, 3])
  got = dropout_positions(X[:, :3], RATE, rng(np.arange(6), positions=jnp.asarray(some)))
  np.testing.assert_array_equal(got, whole[:, some])


def test_layers_and_sites_have_separate_masks():
  base = rng(np.arange(6))
  masks = [
    np.asarray(dropout(X, RATE, r))
    for r in (base.fold(0).at('a'), base.fold(1).at('a'), base.fold(0).at('b'))
  ]
  assert all((a != b).any() for i, a in enumerate(masks) for b in masks[:i])


def test_masks_of_sites_layers_rows_and_features_are_independent():
  def mask(rng):
    return np.asarray(dropout(jnp.ones((256, 1, 1024)), RATE, rng)) > 0

  base = rng(np.arange(256))
  masks = [mask(r) for r in (base.fold(0).at('a'), base.fold(1).at('a'), base.fold(0).at('b'))]
  first = masks[0]
  pairs = [(a, b) for i, a in enumerate(masks) for b in masks[:i]]
  pairs += [(first[1:], first[:-1]), (first[..., 1:], first[..., :-1])]
  pairs += [(first, mask(rng(np.arange(256) + 1).fold(0).at('a')))]
  agree = [(a == b).mean() for a, b in pairs]
  # The standard error is 0.001.
  np.testing.assert_allclose(agree, RATE**2 + (1 - RATE) ** 2, atol=5e-3)


@pytest.mark.parametrize('impl', ['rbg', 'unsafe_rbg'])
def test_keys_of_other_generators_serve(impl):
  # JAX_DEFAULT_PRNG_IMPL, which users of TPUs set.
  keys = DropoutRng(jax.random.key(3, impl=impl), jnp.arange(64)).fold(1).at('a')
  out = np.asarray(dropout(jnp.ones((64, 5, 32)), RATE, keys))
  assert abs(out.mean() - 1) < 0.1


def test_a_rate_that_drops_nothing_in_practice_is_valid():
  np.testing.assert_allclose(dropout(X, 1e-12, rng(np.arange(6))), X)


def test_without_a_key_or_a_rate_nothing_is_dropped():
  assert dropout(X, RATE, None) is X
  assert dropout_positions(X, 0.0, rng(np.arange(6))) is X
