"""Heads of encoders: where features are dropped, which features rows have."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.errors import ModelError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.encoder import EncoderModel, of_label_sets
from t5x_gpu.partitioning.axis_rules import split_names
from tests.messages import raises

CONFIG = TransformerConfig(
  vocab_size=32,
  num_layers=1,
  embed_dim=16,
  num_heads=2,
  head_dim=8,
  mlp_dim=16,
  mlp_activations=('gelu',),
  norm='layer',
  dropout_rate=0.5,
)


def head_logits(model, change, *, dropout_key):
  """Returns the logits of `model` from what its last layer might have returned."""
  params = change(split_names(model.init(jax.random.key(0), None))[0])
  x = jax.random.normal(jax.random.key(1), (3, 4, CONFIG.embed_dim))
  batch = {'encoder_input_tokens': jnp.ones((3, 4), jnp.int32), 'rows': jnp.arange(3)}
  return np.asarray(model._logits(params, x, batch, dropout_key))


@pytest.mark.slow
@pytest.mark.parametrize('pooling', ['first_token_tanh', 'mean'])
def test_what_the_pooler_returns_is_dropped_before_the_classes(pooling):
  model = EncoderModel(CONFIG, num_classes=CONFIG.embed_dim, pooling=pooling)

  def change(params):  # a pooler that returns tanh(1), and classes that are its features
    params['classifier']['kernel'] = jnp.eye(CONFIG.embed_dim)
    if 'pooler' in params:
      params['pooler'] = jax.tree.map(jnp.ones_like, params['pooler'])
      params['pooler']['kernel'] *= 0.0
    return params

  whole = head_logits(model, change, dropout_key=None)
  if pooling == 'first_token_tanh':
    np.testing.assert_allclose(whole, np.tanh(1.0), rtol=1e-6)
  some = head_logits(model, change, dropout_key=jax.random.key(2))
  kept = some != 0
  assert 0.2 < kept.mean() < 0.8
  np.testing.assert_allclose(some[kept], 2.0 * whole[kept], rtol=1e-6)


@pytest.mark.slow
def test_nothing_is_dropped_between_the_layers_and_masked_tokens():
  model = EncoderModel(CONFIG, head_type='mlm')
  np.testing.assert_array_equal(
    *(
      head_logits(model, lambda params: params, dropout_key=key)
      for key in (None, jax.random.key(2))
    )
  )


def test_rows_of_a_classifier_carry_token_types_if_the_model_has_several_or_is_set_to():
  typed = dataclasses.replace(CONFIG, num_token_types=2)

  def features(config, **options):
    spec = EncoderModel(config, **options).batch_spec({'inputs': 8}, batch_size=2, pack=False)
    return {name for name in spec.shapes if 'type' in name}

  assert features(CONFIG) == set()
  assert len(features(typed)) == 1
  assert features(typed, token_types=False) == set()  # a run from before rows carried them
  with raises(ModelError):
    EncoderModel(CONFIG, token_types=True)


def test_several_labels_are_independent_choices():
  logits = jnp.array([[2.0, -1.0, 0.5], [-1.0, -1.0, 3.0], [9.0, 9.0, 9.0]])
  labels = jnp.array([[3, 0, 1, 0], [2, 0, 0, 0], [0, 0, 0, 0]])  # {0, 2}, {1}, padding
  sums = of_label_sets(logits, labels, jnp.array([1, 2, 0]), with_hits=True)
  true = np.array([[1, 0, 1], [0, 1, 0]])
  p = 1 / (1 + np.exp(-np.asarray(logits[:2])))
  rows = -(true * np.log(p) + (1 - true) * np.log(1 - p)).mean(-1)
  np.testing.assert_allclose(sums['loss'], (rows[0] + 2 * rows[1], 3), rtol=1e-6)
  np.testing.assert_array_equal(sums['subset_accuracy'], (1, 3))
  np.testing.assert_array_equal(sums['hits'][0], [[1, 1, 1], [0, 0, 2], [1, 3, 1]])


def test_a_model_of_several_labels_names_what_does_not_fit():
  several = dict(problem_type='multi_label_classification', num_classes=3)
  assert EncoderModel(CONFIG, **several).num_outcomes == 2
  with raises(ModelError):
    EncoderModel(CONFIG, **several, label_smoothing=0.1)
  with raises(ModelError):
    EncoderModel(CONFIG, problem_type='multilabel_classification')
  with raises(ModelError):
    EncoderModel(CONFIG, num_classes=3, class_names=('a', 'b', 'a'))


FLAT = EncoderModel(
  dataclasses.replace(CONFIG, relative_bias='none', max_length=4, dropout_rate=0.0),
  pooling='flatten',
  head_mlp_dim=8,
)


def rows_of(*rows, length=4):
  """Returns a batch of rows, padded to `length`."""
  tokens = np.array([[*row, *[0] * (length - len(row))] for row in rows])
  return {
    'encoder_input_tokens': jnp.asarray(tokens),
    'encoder_segment_ids': jnp.asarray(tokens > 0, jnp.int32),
    'label': jnp.arange(len(rows)) % 2,
    'label_weights': jnp.ones(len(rows), jnp.int32),
    'rows': jnp.arange(len(rows)),
  }


def test_a_flat_head_learns_the_order_of_tokens_that_a_mean_cannot_see():
  batch = rows_of([3, 5, 7, 9], [9, 7, 5, 3])

  @functools.partial(jax.jit, static_argnums=0)
  def step(model, params):
    def loss(params):
      total, weight = model.loss(params, batch)['loss']
      return total / weight

    value, gradient = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

  found = {}
  for model in (FLAT, dataclasses.replace(FLAT, pooling='mean')):
    assert model.sees_order == (model is FLAT)
    params = split_names(model.init(jax.random.key(0), None))[0]
    for _ in range(60):
      found[model.pooling], params = step(model, params)
  assert found['flatten'] < 0.05 and found['mean'] > np.log(2) - 1e-3


def test_padding_does_not_change_the_logits_of_a_flat_head():
  params = split_names(FLAT.init(jax.random.key(0), None))[0]
  tight, padded = (FLAT.logits(params, rows_of([3, 5], length=n)) for n in (2, 4))
  np.testing.assert_allclose(tight, padded, rtol=1e-5)
  # Whatever stands in the padding.
  other = rows_of([3, 5]) | {'encoder_input_tokens': jnp.asarray([[3, 5, 8, 9]])}
  np.testing.assert_allclose(FLAT.logits(params, other), padded, rtol=1e-5)


@pytest.mark.parametrize(
  'options',
  [
    {'head_mlp_dim': 0},
    {'config': dataclasses.replace(FLAT.config, max_length=0)},
    {'head_mlp_activation': 'gelo'},
  ],
  ids=lambda options: next(iter(options)),
)
def test_a_flat_head_needs_an_mlp_and_a_longest_row(options):
  with raises(ModelError):
    dataclasses.replace(FLAT, **options)
