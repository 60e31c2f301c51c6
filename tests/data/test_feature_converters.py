"""The TF-free batch specs are what SeqIO emits, and SeqIO emits what T5X trained on."""

import numpy as np
import pytest

from t5x_gpu.data import feature_converters, features
from t5x_gpu.data.tf_runtime import tf
from t5x_gpu.errors import DataError

pytestmark = pytest.mark.tf
LENGTHS = {'inputs': 7, 'targets': 8}


def convert(name, *, pack, **kwargs):
  lengths = {part: LENGTHS[part] for part in features.layout(name).task_features}
  spec = features.batch_spec(name, task_feature_lengths=lengths, batch_size=1, pack=pack,
                             vocab_size=10)
  examples = [{'inputs': [7, 8, 5, 1], 'targets': [3, 9, 1]},
              {'inputs': [8, 4, 9, 3, 1], 'targets': [4, 1]}]
  dataset = tf.data.Dataset.from_generator(
      lambda: iter(examples),
      output_signature={part: tf.TensorSpec([None], tf.int32) for part in LENGTHS})
  converter = feature_converters.feature_converter(name, pack=pack, **kwargs)
  return spec, next(converter(dataset, task_feature_lengths=lengths).batch(1).as_numpy_iterator())


@pytest.mark.parametrize('name', list(features.LAYOUTS))
@pytest.mark.parametrize('pack', [True, False])
def test_specs_written_without_tf_agree_with_seqio(name, pack):
  spec, batch = convert(name, pack=pack)
  spec.check(batch)


def test_loss_on_inputs_too_is_a_parameter_of_prefix_lm():
  _, alone = convert('prefix_lm', pack=True)
  _, both = convert('prefix_lm', pack=True, loss_on_targets_only=False)
  assert alone['decoder_loss_weights'][0].tolist() == [0] * 4 + [1] * 3 + [0] * 5 + [1, 1, 0]
  assert both['decoder_loss_weights'][0].tolist() == [1] * 14 + [0]
  with pytest.raises(DataError, match='loss_on_targets_only = False'):
    feature_converters.feature_converter('lm', pack=True, loss_on_targets_only=False)


def test_unpacked_batches_have_neither_positions_nor_segments():
  _, batch = convert('lm', pack=False)
  assert set(batch) == {'decoder_target_tokens', 'decoder_input_tokens', 'decoder_loss_weights'}
  np.testing.assert_array_equal(batch['decoder_loss_weights'], batch['decoder_target_tokens'] > 0)
