"""Bad lengths, and what a batch holds, are known without TensorFlow."""

import re
import subprocess
import sys

import pytest

from t5x_gpu.data import features
from t5x_gpu.errors import ConfigError, DataError


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
  with pytest.raises(DataError, match='batch_size'):
    spec(batch_size=batch_size)


@pytest.mark.parametrize(
  'lengths, says',
  [
    ({'targets': 0}, "'targets' has length 0"),
    ({'targets': 16, 'inputs': 8}, "'inputs' is not one of its features.*prefix_lm"),
    ({'target': 16}, "'targets' has no length. Did you mean 'target'"),
  ],
)
def test_wrong_lengths_name_the_feature_and_the_fix(lengths, says):
  with pytest.raises(DataError) as e:
    spec(lengths=lengths)
  text = str(e.value).replace('\n', ' ')
  assert re.search(says, text), text
  assert 'Set TASK_FEATURE_LENGTHS' in text


def test_labels_and_their_weights_have_one_number_per_row():
  got = spec('encoder_classification', {'inputs': 8}, pack=False, num_classes=3)
  tokens = dict.fromkeys(('encoder_input_tokens', 'encoder_segment_ids'), (4, 8))
  assert got.shapes == {**tokens, 'label': (4,), 'label_weights': (4,)}
  assert got.vocab_sizes == {'encoder_input_tokens': 384, 'label': 3}


def test_rows_with_one_label_are_not_packed():
  with pytest.raises(DataError) as e:
    spec('encoder_classification', {'inputs': 8}, num_classes=3)
  assert 'one label per row' in e.value.what and e.value.fix == 'Set PACK = False.'


@pytest.mark.parametrize('num_classes', [None, 1])
def test_one_class_is_none(num_classes):
  with pytest.raises(DataError, match=f'num_classes = {num_classes};'):
    spec('encoder_classification', {'inputs': 8}, pack=False, num_classes=num_classes)


def test_hidden_and_full_text_have_one_length():
  with pytest.raises(DataError, match='must be equal') as e:
    spec('encoder_mlm', {'inputs': 8, 'targets': 4})
  assert "{'inputs': 8, 'targets': 8}" in e.value.fix
  assert set(spec('encoder_mlm', {'inputs': 8, 'targets': 8}).shapes.values()) == {(4, 8)}


def test_unknown_converter_is_refused_with_a_suggestion():
  with pytest.raises(ConfigError, match="Did you mean 'prefix_lm'"):
    spec('prefixlm')


def test_specs_and_synthetic_batches_import_no_tensorflow():
  code = (
    'import sys, t5x_gpu.data.synthetic, t5x_gpu.data.features\n'
    'import t5x_gpu.data.sources.discovery, t5x_gpu.data.sources.labelled\n'
    'assert not {"tensorflow", "seqio", "jax"} & set(sys.modules)'
  )
  subprocess.run([sys.executable, '-c', code], check=True)
