"""Cross entropy against optax and against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t5x_gpu.errors import ModelError
from t5x_gpu.models.losses import averaged_per_sequence, checked_sums, cross_entropy
from tests.messages import raises


@pytest.fixture
def case():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(2, 6, 13)).astype(np.float32) * 3
  targets = rng.integers(0, 13, (2, 6)).astype(np.int32)
  weights = np.array([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]], np.int32)
  return logits, targets, weights


def test_loss_sums_the_negative_log_likelihood_of_weighted_tokens(case):
  logits, targets, weights = case
  per_token = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
  sums = cross_entropy(logits, targets, weights)
  np.testing.assert_allclose(sums['loss'][0], (per_token * weights).sum(), rtol=1e-6)
  assert float(sums['loss'][1]) == 8


def test_accuracy_counts_weighted_hits(case):
  logits, targets, weights = case
  hits = ((logits.argmax(-1) == targets) * weights).sum()
  assert float(cross_entropy(logits, targets, weights)['accuracy'][0]) == hits


def test_a_tie_is_not_a_hit():
  sums = cross_entropy(jnp.zeros((1, 2, 5)), jnp.array([[0, 3]]), jnp.ones((1, 2)))
  assert float(sums['accuracy'][0]) == 0.0


def test_z_loss_is_the_squared_log_partition_and_part_of_the_loss(case):
  logits, targets, weights = case
  sums = cross_entropy(logits, targets, weights, z_loss=0.1)
  log_z = np.asarray(jax.nn.logsumexp(logits, -1))
  np.testing.assert_allclose(sums['z_loss'][0], (0.1 * log_z**2 * weights).sum(), rtol=1e-6)
  np.testing.assert_allclose(
    sums['loss'][0], sums['cross_entropy'][0] + sums['z_loss'][0], rtol=1e-6
  )


def test_label_smoothing_is_the_divergence_from_the_smoothed_target(case):
  logits, targets, weights = case
  smooth = np.full((2, 6, 13), 0.1 / 12, np.float32)
  np.put_along_axis(smooth, targets[..., None], 0.9, -1)
  log_p = np.asarray(jax.nn.log_softmax(logits, -1))
  divergence = (smooth * (np.log(smooth) - log_p)).sum(-1)
  got = cross_entropy(logits, targets, weights, label_smoothing=0.1)['loss'][0]
  np.testing.assert_allclose(got, (divergence * weights).sum(), rtol=1e-5)


def test_a_batch_of_padding_has_no_loss_and_no_gradient(case):
  logits, targets, weights = case
  loss, grad = jax.value_and_grad(
    lambda x: cross_entropy(x, targets, weights * 0, z_loss=1e-4)['loss'][0]
  )(logits)
  assert loss == 0 and (np.asarray(grad) == 0).all()


def test_weights_averaged_per_sequence_add_up_to_one_in_each():
  weights = np.array([[1, 1, 1, 0], [2, 1, 1, 0], [0, 0, 0, 0]], np.int32)
  alone = averaged_per_sequence({'decoder_loss_weights': weights})['decoder_loss_weights']
  np.testing.assert_allclose(
    alone, [[1 / 3, 1 / 3, 1 / 3, 0], [0.5, 0.25, 0.25, 0], [0] * 4], rtol=1e-6
  )
  packed = averaged_per_sequence(
    {
      'decoder_loss_weights': np.array([[1, 0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]], np.int32),
      'decoder_segment_ids': np.array([[1, 1, 2, 2, 2, 3, 0], [1, 1, 2, 2, 2, 2, 2]], np.int32),
    }
  )
  third = 1 / 3
  np.testing.assert_allclose(
    packed['decoder_loss_weights'],
    [[1, 0, third, third, third, 0, 0], [0, 0, 0.2, 0.2, 0.2, 0.2, 0.2]],
    rtol=1e-6,
  )


@pytest.mark.parametrize(
  'sums',
  [
    jnp.zeros(()),
    {'cross_entropy': (jnp.zeros(()), jnp.ones(()))},
    {'loss': jnp.zeros(())},
    {'loss': (jnp.zeros((2, 6)), jnp.zeros((2, 6), jnp.int32))},
    (jnp.zeros(()), jnp.ones(())),
  ],
  ids=['mean', 'no loss', 'no weight', 'per token', 'pair'],
)
def test_a_loss_without_sums_and_weights_is_refused(sums):
  with raises(ModelError):
    checked_sums(sums, object())


def test_a_loss_may_return_lists_and_metrics_of_shape_1():
  sums = {'loss': [jnp.float32(3), 8], 'accuracy': (jnp.ones(1), jnp.ones(1))}
  assert checked_sums(sums, object()) is sums
