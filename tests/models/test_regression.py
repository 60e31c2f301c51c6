"""Regression: the squared error of numbers, and their correlation on any mesh."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.errors import ModelError
from t5x_gpu.evaluation.evaluator import values_of
from t5x_gpu.metrics import reduce
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.dpo import DpoModel
from t5x_gpu.models.encoder import HEADS, EncoderModel, of_numbers
from t5x_gpu.models.lora import LoraModel
from t5x_gpu.models.model import encodes_texts
from tests.helpers_parity import OPTIMIZER, assert_same_evaluation, assert_same_steps, recorded
from tests.helpers_programs import program_of
from tests.messages import raises

CONFIG = TransformerConfig(
  vocab_size=32, num_layers=2, embed_dim=8, num_heads=2, head_dim=4, mlp_dim=16, dropout_rate=0.0
)
MODEL = EncoderModel(CONFIG, head_type='regression', pooling='mean')


def test_sums_are_squared_and_absolute_errors_of_counted_rows():
  predicted = np.float32([0.5, -1.0, 2.0, 9.0])
  scores, weights = np.int32([15_000, -20_000, 0, 0]), np.int32([1, 2, 1, 0])
  given = map(jnp.asarray, (predicted, scores, np.arange(4), weights))
  sums = of_numbers(*given, with_pairs=True)
  np.testing.assert_allclose(sums['loss'], (1.0 + 2 * 1.0 + 4.0, 4), rtol=1e-6)
  np.testing.assert_allclose(sums['absolute_error'], (1.0 + 2 * 1.0 + 2.0, 4), rtol=1e-6)
  metrics = values_of(reduce.to_host(sums), prefix='eval/')
  assert metrics['eval/pearson'] == pytest.approx(np.corrcoef([0.5, -2, 2], [1.5, -4, 0])[0, 1])
  assert metrics['eval/spearman'] == pytest.approx(0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
  'mesh',
  [
    dict(context=2, fsdp=2),
    pytest.param(dict(data=2, num_partitions=2), marks=pytest.mark.slow),
    pytest.param(dict(data=2, stage=2), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_a_mesh_finds_what_one_device_finds(mesh):
  alone, spread = (
    program_of(MODEL, {'inputs': 8}, optimizer=OPTIMIZER, **sizes) for sizes in ({}, mesh)
  )
  assert_same_steps(recorded(spread), recorded(alone))
  # A stage has the rows of a microbatch, so it has no pairs of rows.
  assert_same_evaluation(spread, alone, but=('pairs',) if 'stage' in mesh else ())


def test_infer_takes_every_encoder_but_that_of_masked_tokens():
  names = ('O', 'B-PER')
  for head in HEADS:
    options = dict(class_names=names) if head == 'token_classification' else {}
    model = EncoderModel(CONFIG, head_type=head, pooling='mean', **options)
    assert encodes_texts(model) == (head != 'mlm'), head


def test_the_loss_of_guessing():
  plain = DecoderOnlyModel(CONFIG)
  for model in (plain, LoraModel(plain)):
    assert model.guess_loss == pytest.approx(math.log(32))
  assert MODEL.guess_loss is None
  assert DpoModel(plain).guess_loss == pytest.approx(math.log(2))
  ipo = DpoModel(plain, loss_type='ipo', beta=0.1)
  assert ipo.guess_loss == pytest.approx(25.0)


def test_options_of_cross_entropy_are_refused():
  with raises(ModelError):
    EncoderModel(CONFIG, head_type='regression', label_smoothing=0.1)
