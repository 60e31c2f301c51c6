"""Model FLOPs of a step come from the lengths of all features of a batch."""

import dataclasses

import pytest

from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.models.flops import step_flops, step_tokens, transformer_flops_per_token
from t5x_gpu.models.lora import LoraModel
from t5x_gpu.models.model import Model

CONFIG = TransformerConfig(
  vocab_size=100, num_layers=2, embed_dim=32, num_heads=4, head_dim=8, mlp_dim=96, num_kv_heads=2
)
MODEL = EncoderDecoderModel(CONFIG, num_encoder_layers=3)
ROWS = 4


def shapes(model, inputs, targets):
  lengths = {'inputs': inputs, 'targets': targets}
  return model.batch_spec(lengths, batch_size=ROWS, pack=False).shapes


def test_inputs_and_targets_count_with_their_own_lengths():
  got = shapes(MODEL, 64, 16)
  queries, keys = 32 * 4 * 8, 32 * 2 * 8  # kernels, also of the other way round
  mlp = 32 * 96 * (len(CONFIG.mlp_activations) + 1)
  encoder = 3 * (2 * queries + 2 * keys + mlp)
  decoder = 2 * (2 * queries + 2 * keys + mlp + 2 * queries) + 32 * 100
  pairs = 3 * 64 * 64 + 2 * (16 * 16 + 16 * 64)
  weights = 64 * (encoder + 2 * 2 * keys) + 16 * decoder
  assert step_flops(MODEL, got) == ROWS * (6 * weights + 12 * 4 * 8 * pairs)
  assert step_tokens(MODEL, got) == ROWS * (64 + 16)


@pytest.mark.parametrize('model', [MODEL, LoraModel(MODEL, rank=2, also_train='.*/mlp/wo/kernel')])
def test_equal_lengths_have_the_flops_per_input_token(model):
  got = step_flops(model, shapes(model, 32, 32))
  assert got == pytest.approx(ROWS * 32 * model.flops_per_token(32), rel=1e-12)


def test_adapters_of_an_encoder_decoder_save_the_gradients_of_frozen_kernels():
  model = LoraModel(MODEL, rank=1, pattern='encoder/.*/query/kernel')
  spec = shapes(model, 64, 16)
  of_pairs = 12 * 4 * 8 * (3 * 64 * 64 + 2 * (16 * 16 + 16 * 64))
  weights = step_flops(MODEL, spec) / ROWS - of_pairs
  factors = 6 * 64 * 3 * (32 + 4 * 8)
  assert step_flops(model, spec) == pytest.approx(
    ROWS * (of_pairs + weights * 2 / 3 + factors), rel=1e-12
  )


def test_a_model_with_flops_per_token_alone_counts_its_first_feature():
  class Custom(Model):
    stacks = ('first', 'second')

    def flops_per_token(self, length):
      return 10.0 * length

  assert step_flops(Custom(), {'ids': (ROWS, 8), 'mask': (ROWS, 4)}) == ROWS * 8 * 80
  assert step_tokens(Custom(), {'ids': (ROWS, 8), 'mask': (ROWS, 4)}) == ROWS * 8
  assert step_tokens(Custom(), {'label': (ROWS,)}) == ROWS
  decoder = DecoderOnlyModel(CONFIG)
  spec = decoder.batch_spec({'targets': 8}, batch_size=ROWS, pack=True).shapes
  assert step_flops(decoder, spec) == ROWS * 8 * decoder.flops_per_token(8)


def with_windows(*windows, num_layers=CONFIG.num_layers):
  return dataclasses.replace(CONFIG, windows=windows, num_layers=num_layers)


def of_pairs(pairs):
  """Returns FLOPs of so many (query, key) pairs, in one layer or summed over layers."""
  return 12 * CONFIG.num_heads * CONFIG.head_dim * pairs


@pytest.mark.parametrize('num_layers', [1, 3, 5])
def test_a_layer_with_a_window_counts_the_keys_in_it(num_layers):
  length, windows = 64, (16, 4, 0)
  got, weights = (
    transformer_flops_per_token(with_windows(*windows, num_layers=num_layers), n)
    for n in (length, 0)
  )
  keys = sum((16, 4, length)[i % 3] for i in range(num_layers))
  assert got == weights + of_pairs(keys)
  assert weights == transformer_flops_per_token(with_windows(0, num_layers=num_layers), 0)


@pytest.mark.parametrize('windows', [(64,), (65, 1000), (0, 64)])
def test_a_window_as_long_as_the_row_changes_nothing(windows):
  assert transformer_flops_per_token(with_windows(*windows), 64) == (
    transformer_flops_per_token(CONFIG, 64)
  )


def test_windows_of_an_encoder_reach_both_ways_and_those_of_inputs_not_across():
  plain, windowed = (
    transformer_flops_per_token(with_windows(w), 64, causal=False) for w in (0, 16)
  )
  assert plain - windowed == of_pairs(2 * (64 - 31))
  got, want = (
    EncoderDecoderModel(with_windows(w), num_encoder_layers=3).flops_per_row(
      {'encoder': 64, 'decoder': 48}
    )
    for w in (16, 0)
  )
  assert want - got == of_pairs(3 * 64 * (64 - 31) + 2 * 48 * (48 - 16))


def test_adapters_save_the_same_gradients_with_and_without_windows():
  saved = []
  for windows in ((4, 0), (0,)):
    model = DecoderOnlyModel(with_windows(*windows))
    adapted = LoraModel(model, rank=1)
    saved.append(model.flops_per_token(64) - adapted.flops_per_token(64))
  assert saved[0] == pytest.approx(saved[1], rel=1e-12)
