"""Token classification: entities are counted inside the step as outside, on any mesh."""

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.data.entities import entities_of, entity_kinds
from t5x_gpu.errors import ModelError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.encoder import EncoderModel, entity_hits
from tests.helpers_parity import assert_same_evaluation
from tests.helpers_programs import program_of
from tests.messages import raises

NAMES = ('O', 'B-PER', 'I-PER', 'I-LOC', 'B-LOC', 'S-LOC', 'E-PER')
CONFIG = TransformerConfig(
  vocab_size=32, num_layers=1, embed_dim=8, num_heads=2, head_dim=4, mlp_dim=16, dropout_rate=0.0
)
TAGS = dict(head_type='token_classification', num_classes=len(NAMES), class_names=NAMES)
SEVERAL = dict(problem_type='multi_label_classification', num_classes=5, pooling='mean')


def by_hand(predicted, labels, segments):
  """Returns the hits of each type, from the lists of entities."""
  kinds, hits = entity_kinds(NAMES), np.zeros((2, 3))
  for row in range(len(labels)):
    for segment in set(segments[row]) - {0}:
      places = [i for i in range(labels.shape[1]) if labels[row, i] and segments[row, i] == segment]
      ours = set(map(str, entities_of([NAMES[predicted[row, i]] for i in places])))
      theirs = set(map(str, entities_of([NAMES[labels[row, i] - 1] for i in places])))
      for number, kind in enumerate(kinds):
        sets = (ours & theirs, ours, theirs)
        hits[number] += [sum(f"kind='{kind}'" in e for e in found) for found in sets]
  return hits


def test_entities_in_the_step_are_those_of_the_sentences():
  rng = np.random.default_rng(0)
  shape = (16, 40)
  labels = rng.integers(1, len(NAMES) + 1, shape) * (rng.random(shape) < 0.6)
  wrong = rng.random(shape) < 0.2
  predicted = np.where(wrong | (labels == 0), rng.integers(0, len(NAMES), shape), labels - 1)
  segments = np.cumsum(rng.random(shape) < 0.1, axis=1)
  labels *= segments > 0
  got = entity_hits(
    *map(jnp.asarray, (predicted, labels, segments)), jnp.arange(shape[1]), names=NAMES
  )
  want = by_hand(predicted, labels, segments)
  assert (want > 10).all()
  np.testing.assert_array_equal(got, want)


def test_tags_need_names():
  with raises(ModelError):
    EncoderModel(CONFIG, head_type='token_classification', num_classes=3)


@pytest.mark.slow
@pytest.mark.parametrize('options', [TAGS, SEVERAL], ids=['tags', 'several labels'])
@pytest.mark.parametrize(
  'mesh',
  [
    dict(context=2, fsdp=2),
    pytest.param(dict(context=4, num_partitions=2), marks=pytest.mark.slow),
    pytest.param(dict(data=4), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_counts_and_losses_on_a_mesh_are_those_of_one_device(options, mesh):
  model = EncoderModel(CONFIG, **options)
  alone = program_of(model, {'inputs': 8})
  spread = program_of(model, {'inputs': 8}, **mesh)
  want = assert_same_evaluation(spread, alone)
  assert want['hits'][0][:, 1:].sum() > 4
