"""Rotary positions whose frequencies depend on the length of an example, and layers that differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from t5x_gpu.layers.masks import TokenInfo
from t5x_gpu.layers.positions import RotaryEmbedding, example_lengths, rotations
from t5x_gpu.partitioning.axis_rules import use_rules
from t5x_gpu.partitioning.context_parallel import length_order, rules

# Packed: examples of 5 and 3 tokens, and one of 6; padded: rows of 7 and 2.
PACKED = (
  np.array([[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0, 0]]),
  np.array([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0, 0]]),
  np.array([[5, 5, 5, 5, 5, 3, 3, 3], [6, 6, 6, 6, 6, 6, 0, 0]]),
)
PADDED = (
  np.array([[1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0, 0, 0]]),
  np.arange(8),
  np.array([[7, 7, 7, 7, 7, 7, 7, 0], [2, 2, 0, 0, 0, 0, 0, 0]]),
)


@pytest.mark.parametrize('segments, positions, want', [PACKED, PADDED], ids=['packed', 'padded'])
def test_every_token_knows_the_length_of_its_example(segments, positions, want):
  got = example_lengths(TokenInfo(jnp.arange(8), jnp.asarray(segments)), jnp.asarray(positions))
  np.testing.assert_array_equal(got, want)
  order, tokens = length_order(8, 2), P(None, 'context')
  of_positions = tokens if positions.ndim == 2 else P('context')

  def region(places, segments, positions):
    with use_rules(rules(), {'context': 2}, manual_axes=('context',)):
      return example_lengths(TokenInfo(places, segments), positions)

  split = jax.jit(
    jax.shard_map(
      region,
      mesh=Mesh(np.array(jax.devices()[:2]), ('context',), axis_types=(AxisType.Auto,)),
      in_specs=(P('context'), tokens, of_positions),
      out_specs=tokens,
      axis_names={'context'},
    )
  )(jnp.asarray(order), segments[:, order], positions[..., order])
  np.testing.assert_array_equal(split, want[:, order])


def test_layers_keep_their_own_frequencies_and_amplitude():
  longrope = RotaryEmbedding(
    100.0,
    scaling='longrope',
    original_length=3,
    factor=4.0,
    short_factors=(1.0, 2.0),
    long_factors=(3.0, 5.0),
  )
  yarn = RotaryEmbedding(scaling='yarn', factor=4.0, original_length=64)
  lengths = jnp.asarray([[3], [4]])
  turn = rotations((longrope, None, yarn), jnp.arange(4), 4, lengths=lengths)
  first, second, third = (turn.of_layer(number) for number in range(3))
  angles = np.arange(4)[:, None] * [[[1.0, 0.05]], [[1 / 3, 0.02]]]
  amplitude = (1 + np.log(4) / np.log(3)) ** 0.5
  np.testing.assert_allclose(first.cos[:, :, 0], amplitude * np.cos(angles), rtol=1e-5)
  np.testing.assert_allclose(first.sin[:, :, 0], amplitude * np.sin(angles), rtol=1e-5, atol=1e-7)
  assert (second.cos == 1.0).all() and (second.sin == 0.0).all()
  np.testing.assert_allclose(third.cos[:, 0], 0.1 * np.log(4) + 1, rtol=1e-6)


@pytest.mark.parametrize('after_norm', [False, True], ids=['concatenation', 'flip'])
@pytest.mark.parametrize('rotated', [8, 4], ids=['all features', 'half of them'])
def test_a_rotation_multiplies_complex_numbers_and_its_gradient_turns_back(rotated, after_norm):
  x, gradient = np.random.default_rng(0).normal(size=(2, 2, 5, 3, 8)).astype(np.float32)
  turn = RotaryEmbedding(fraction=rotated / 8).rotation(jnp.arange(5), 8)
  y, pull = jax.vjp(lambda x: turn(x, after_norm=after_norm), jnp.asarray(x))

  def turned(x, sign):
    half = rotated // 2
    angle = np.arange(5)[:, None, None] * 10000.0 ** -(np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:rotated]) * np.exp(sign * 1j * angle)
    return np.concatenate([z.real, z.imag, x[..., rotated:]], -1)

  close = {'rtol': 1e-5, 'atol': 1e-6}
  np.testing.assert_allclose(y, turned(x, 1), **close)
  np.testing.assert_allclose(pull(jnp.asarray(gradient))[0], turned(gradient, -1), **close)


def test_both_forms_of_a_rotation_give_the_same_numbers():
  x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 4, 64)), jnp.bfloat16)
  turn = RotaryEmbedding().rotation(jnp.arange(16), 64)
  (joined, pull_joined), (flipped, pull_flipped) = (
    jax.vjp(lambda x, flip=flip: turn(x, after_norm=flip), x) for flip in (False, True)
  )
  np.testing.assert_array_equal(joined, flipped)
  np.testing.assert_array_equal(pull_joined(x)[0], pull_flipped(x)[0])
