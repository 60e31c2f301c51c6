"""Each place of dropout has its own rate; without one, dropout_rate counts there."""

import dataclasses

import jax
import numpy as np
import pytest

from t5x_gpu.errors import ModelError
from t5x_gpu.models.config import DROPOUT_PLACES, TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.encoder import EncoderModel
from t5x_gpu.partitioning.axis_rules import split_names
from tests.messages import raises

CONFIG = TransformerConfig(
  vocab_size=16, num_layers=1, embed_dim=8, num_heads=2, head_dim=4, mlp_dim=8, max_length=8
)
TOKENS = np.arange(1, 9, dtype=np.int32)[None].repeat(2, 0)
ROWS = {'rows': np.arange(2, dtype=np.int32)}
MODELS = {
  'decoder': (
    DecoderOnlyModel,
    {
      'decoder_target_tokens': TOKENS,
      'decoder_input_tokens': TOKENS - 1,
      'decoder_loss_weights': np.ones_like(TOKENS),
      **ROWS,
    },
  ),
  'classifier': (
    lambda c: EncoderModel(c, head_type='classification', num_classes=3),
    {
      'encoder_input_tokens': TOKENS,
      'label': np.array([0, 2], np.int32),
      'label_weights': np.ones(2, np.float32),
      **ROWS,
    },
  ),
}


def losses(name, *rates):
  """Returns the loss with dropout for each of these settings, with the same parameters."""
  make, batch = MODELS[name]
  params, _ = split_names(make(CONFIG).init(jax.random.key(0), None))
  key = jax.random.key(1)
  return [
    float(make(dataclasses.replace(CONFIG, **r)).loss(params, batch, dropout_key=key)['loss'][0])
    for r in rates
  ]


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, absent',
  [
    pytest.param('decoder', {'classifier_dropout'}, marks=pytest.mark.slow),
    ('classifier', {'output_dropout'}),
  ],
)
def test_each_place_has_its_own_rate(name, absent):
  everywhere = dict.fromkeys(DROPOUT_PLACES, 0.5)
  none, all_at_once, each, switched_off, *alone = losses(
    name,
    {},
    {'dropout_rate': 0.5},
    everywhere,
    {'dropout_rate': 0.5, **dict.fromkeys(DROPOUT_PLACES, 0.0)},
    *({place: 0.5} for place in DROPOUT_PLACES),
  )
  assert each == all_at_once != none == switched_off
  assert {place for place, loss in zip(DROPOUT_PLACES, alone) if loss == none} == absent
  present = [loss for loss in alone if loss != none]
  assert len(set(present)) == len(present)


def test_rates_out_of_range_are_named():
  with raises(ModelError):
    dataclasses.replace(CONFIG, mlp_dropout=1.0)
