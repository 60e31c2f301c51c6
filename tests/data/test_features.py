"""Bad lengths, and what a batch holds, are known without TensorFlow."""

import subprocess
import sys

import pytest

from t5x_gpu.data import features
from t5x_gpu.errors import ConfigError, DataError
from tests.messages import raises


def spec(converter='lm', lengths=None, **kwargs):
  return features.batch_spec(
    converter,
    task_feature_lengths=lengths or {'targets': 16},
    **{'batch_size': 4, 'pack': True, 'vocab_size': 384, **kwargs},
  )


def test_prefix_lm_joins_inputs_and_targets():
  got = spec('prefix_lm', {'inputs': 7, 'targets': 8}, pack=False)
  assert set(got.shapes.values()) == {(4, 15)}
  assert 'decoder_causal_attention' in got.shapes and 'decoder_positions' not in got.shapes


def test_only_token_features_have_a_vocabulary():
  assert spec('encoder_decoder', {'inputs': 8, 'targets': 4}).vocab_sizes == {
    'encoder_input_tokens': 384,
    'decoder_target_tokens': 384,
    'decoder_input_tokens': 384,
  }


@pytest.mark.parametrize('batch_size', [0, -8, 2.5, True])
def test_batch_size_below_one_is_refused(batch_size):
  with raises(DataError):
    spec(batch_size=batch_size)


@pytest.mark.parametrize('lengths', [{'targets': 0}, {'targets': 16, 'inputs': 8}, {'target': 16}])
def test_wrong_lengths_name_the_feature_and_the_fix(lengths):
  with raises(DataError):
    spec(lengths=lengths)


def test_labels_and_their_weights_have_one_number_per_row():
  got = spec('encoder_classification', {'inputs': 8}, pack=False, num_classes=3)
  tokens = dict.fromkeys(('encoder_input_tokens', 'encoder_segment_ids'), (4, 8))
  assert got.shapes == {**tokens, 'label': (4,), 'label_weights': (4,)}
  assert got.vocab_sizes == {'encoder_input_tokens': 384, 'label': 3}


def test_rows_with_one_label_are_not_packed():
  with raises(DataError):
    spec('encoder_classification', {'inputs': 8}, num_classes=3)


@pytest.mark.parametrize('num_classes', [None, 1])
def test_one_class_is_none(num_classes):
  with raises(DataError):
    spec('encoder_classification', {'inputs': 8}, pack=False, num_classes=num_classes)


def test_hidden_and_full_text_have_one_length():
  with raises(DataError):
    spec('encoder_mlm', {'inputs': 8, 'targets': 4})
  assert set(spec('encoder_mlm', {'inputs': 8, 'targets': 8}).shapes.values()) == {(4, 8)}


def test_unknown_converter_is_refused_with_a_suggestion():
  with raises(ConfigError):
    spec('prefixlm')


def test_specs_and_synthetic_batches_import_no_tensorflow():
  code = (
    'import sys, t5x_gpu.data.synthetic, t5x_gpu.data.features\n'
    'import t5x_gpu.data.sources.discovery, t5x_gpu.data.sources.labelled\n'
    'assert not {"tensorflow", "seqio", "jax"} & set(sys.modules)'
  )
  subprocess.run([sys.executable, '-c', code], check=True)
