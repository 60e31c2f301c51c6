"""Embeddings: a text's vector does not depend on its row; the loss covers the global batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.errors import ConfigError, ModelError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.encoder import EncoderModel, of_text_sets
from t5x_gpu.partitioning.axis_rules import split_names
from tests.helpers_parity import OPTIMIZER, assert_same_evaluation, assert_same_steps, recorded
from tests.helpers_programs import program_of
from tests.messages import raises

CONFIG = TransformerConfig(
  vocab_size=32, num_layers=1, embed_dim=8, num_heads=2, head_dim=4, mlp_dim=16, dropout_rate=0.0
)
MODEL = EncoderModel(CONFIG, head_type='embedding', pooling='mean')


def test_the_loss_is_infonce_with_hard_negatives():
  rng = np.random.default_rng(0)
  vectors = rng.normal(size=(4, 3, 5)).astype(np.float32)
  exists = np.ones((4, 3), bool)
  exists[1, 2] = False  # no hard negative
  weights, scores = np.array([1, 1, 2, 0]), np.array([7, 8, 9, 3])
  sums = of_text_sets(
    *map(jnp.asarray, (vectors, exists, np.arange(4), weights, scores)),
    temperature=0.5,
    with_pairs=True,
  )
  candidates = [vectors[i, k] for i in range(3) for k in (1, 2) if exists[i, k]]
  losses, right = [], []
  for i in range(3):
    own = vectors[i, 0] @ vectors[i, 1] / 0.5
    logits = np.array([vectors[i, 0] @ c / 0.5 for c in candidates])
    losses.append(np.log(np.exp(logits).sum()) - own)
    right.append(own >= logits.max())
  np.testing.assert_allclose(sums['loss'], (losses[0] + losses[1] + 2 * losses[2], 4), rtol=1e-5)
  np.testing.assert_array_equal(sums['accuracy'], (right[0] + right[1] + 2 * right[2], 4))
  pairs = np.asarray(sums['pairs'][0])
  np.testing.assert_array_equal(pairs[:, 2], weights)
  np.testing.assert_array_equal(pairs[:2, 1], scores[:2])
  np.testing.assert_allclose(pairs[0, 0], vectors[0, 0] @ vectors[0, 1], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('pooling', ['mean', 'first_token'])
def test_a_text_has_the_same_vector_packed_and_alone(pooling):
  model = dataclasses.replace(MODEL, pooling=pooling)
  params = split_names(model.init(jax.random.key(0), None))[0]
  rng = np.random.default_rng(1)
  texts = [rng.integers(1, 32, n) for n in (5, 3, 4)]
  row, segments, places = np.zeros((3, 1, 14), np.int32)
  start = 0
  for number, text in enumerate(texts, 1):
    part = slice(start, start + len(text))
    row[0, part], segments[0, part], places[0, part] = text, number, np.arange(len(text))
    start += len(text)
  alone = np.zeros((3, 14), np.int32)
  for number, text in enumerate(texts):
    alone[number, : len(text)] = text
  vectors = jax.jit(model.logits)
  together = vectors(
    params,
    {'encoder_input_tokens': row, 'encoder_segment_ids': segments, 'encoder_positions': places},
  )
  np.testing.assert_allclose(np.linalg.norm(together, axis=-1), np.ones((1, 3)), rtol=1e-5)
  want = vectors(params, {'encoder_input_tokens': alone})[:, 0]
  np.testing.assert_allclose(together[0], want, atol=1e-5)


@pytest.mark.parametrize(
  'mesh',
  [
    dict(data=2, fsdp=2),
    pytest.param(dict(data=2, context=2), marks=pytest.mark.slow),
    pytest.param(dict(fsdp=4, num_partitions=2), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_negatives_come_from_all_devices(mesh):
  alone, spread = (
    program_of(MODEL, {'inputs': 8}, optimizer=OPTIMIZER, **sizes) for sizes in ({}, mesh)
  )
  assert_same_steps(recorded(spread), recorded(alone))
  sums = assert_same_evaluation(spread, alone)
  assert sums['pairs'][0].shape == (8, 3)


def test_what_would_cut_the_batch_into_parts_is_refused():
  with raises(ConfigError):
    program_of(MODEL, {'inputs': 8}, num_microbatches=2)
  with raises(ModelError):
    EncoderModel(CONFIG, head_type='embedding')
  limited = dataclasses.replace(CONFIG, num_positions=8, relative_bias='none')
  model = dataclasses.replace(MODEL, config=limited)
  model.batch_spec({'inputs': 16}, batch_size=2, pack=False)  # two texts of 8
  with raises(ModelError):
    model.batch_spec({'inputs': 17}, batch_size=2, pack=False)
