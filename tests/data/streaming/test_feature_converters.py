"""The TF-free batch specs are what SeqIO emits, and SeqIO emits what T5X trained on."""

import numpy as np
import pytest

from t5x_gpu.data import features
from t5x_gpu.data.batches import batch_hash, row_masks
from t5x_gpu.data.streaming import feature_converters
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.errors import DataError
from tests.messages import raises

pytestmark = pytest.mark.tf
LENGTHS = {'inputs': 7, 'targets': 8}
EXAMPLES = [
  {
    'inputs': [7, 8, 5, 1],
    'targets': [3, 9, 1],
    'label': 2,
    'labels': [2, 0],
    'tags': [3, 0, 1, 0],
    'segments': [1, 1, 2, 2],
    'places': [0, 1, 0, 1],
    'score': 25,
  },
  {
    'inputs': [8, 4, 9, 3, 1],
    'targets': [4, 1],
    'label': 0,
    'labels': [],
    'tags': [1, 1, 0, 2, 0],
    'segments': [1, 1, 2, 2, 2],
    'places': [0, 1, 0, 1, 2],
    'score': 0,
  },
]
SHORT = {'inputs': [8, 4, 1], 'tags': [0, 2, 0]}
# Masked: hidden (9), replaced, unchanged but a target, untouched.
MASKED = [
  {'inputs': [8, 9, 5, 3, 4, 1], 'targets': [8, 7, 4, 3, 4, 1], 'loss_mask': [0, 1, 1, 1, 0, 0]},
  {'inputs': [8, 3, 9, 1], 'targets': [8, 3, 6, 1], 'loss_mask': [0, 0, 1, 0]},
]
# Prompt of one token, and answers of two and of one; then of one each, without a prompt.
PAIRS = [
  {
    'targets': [3, 4, 5, 3, 6],
    'decoder_inputs': [2, 3, 4, 2, 3],
    'loss_mask': [0, 1, 1, 0, 1],
    'pair_places': [1, 2, 3, 1, 2],
  },
  {'targets': [7, 8], 'decoder_inputs': [2, 2], 'loss_mask': [1, 1], 'pair_places': [1, 1]},
]


def convert(name, *, pack, examples=None, **kwargs):
  kind = features.layout(name)
  lengths = {part: LENGTHS[part] for part in kind.task_features}
  if kind.equal_lengths:
    examples, lengths = examples or MASKED, dict.fromkeys(lengths, 11)
  examples = examples or (PAIRS if name == 'preference' else EXAMPLES)
  spec = features.batch_spec(
    name,
    task_feature_lengths=lengths,
    batch_size=1,
    pack=pack,
    vocab_size=10,
    num_classes=3 if kind.label else None,
  )
  dataset = tf.data.Dataset.from_generator(
    lambda: iter(examples),
    output_signature={
      part: tf.TensorSpec([None] if isinstance(x, list) else [], tf.int32)
      for part, x in examples[0].items()
    },
  )
  numbers = seqio.Feature(seqio.PassThroughVocabulary(10))
  rows = feature_converters.model_rows(
    dataset,
    converter=feature_converters.feature_converter(name, pack=pack, **kwargs),
    name=name,
    task_feature_lengths=lengths,
    output_features=dict.fromkeys(examples[0], numbers),
    masks=row_masks(spec.shapes),
  )
  return spec, next(rows.batch(1).as_numpy_iterator())


@pytest.mark.quick_cases(
  'lm-*',
  'prefix_lm-True',
  'encoder_decoder-False',
  'encoder_classification-False',
  'encoder_mlm-False',
  'encoder_tags-False',
)
@pytest.mark.parametrize(
  'name, pack',
  [
    (name, pack)
    for name, kind in features.LAYOUTS.items()
    for pack in (True, False)
    if not pack or kind.packed is not None
  ],
)
def test_specs_written_without_tf_agree_with_seqio(name, pack):
  spec, batch = convert(name, pack=pack)
  spec.check(batch)


@pytest.mark.slow
def test_loss_on_inputs_too_is_a_parameter_of_prefix_lm():
  _, alone = convert('prefix_lm', pack=True)
  _, both = convert('prefix_lm', pack=True, loss_on_targets_only=False)
  assert alone['decoder_loss_weights'][0].tolist() == [0] * 4 + [1] * 3 + [0] * 5 + [1, 1, 0]
  assert both['decoder_loss_weights'][0].tolist() == [1] * 14 + [0]
  with raises(DataError):
    convert('lm', pack=True, loss_on_targets_only=False)
  with raises(DataError):
    feature_converters.feature_converter('encoder_mlm', pack=True, loss_on_targets_only=False)


def test_segments_of_unpacked_rows_mask_the_padding():
  _, batch = convert('lm', pack=False)
  names = ('target_tokens', 'input_tokens', 'loss_weights', 'segment_ids')
  assert set(batch) == {f'decoder_{name}' for name in names}
  is_token = batch['decoder_target_tokens'] > 0
  np.testing.assert_array_equal(batch['decoder_loss_weights'], is_token)
  np.testing.assert_array_equal(batch['decoder_segment_ids'], is_token)
  # The hash in checkpoints of versions without masks.
  assert batch_hash(batch) == batch_hash(
    {name: x for name, x in batch.items() if name != 'decoder_segment_ids'}
  )
  with_zero = {**batch, 'decoder_segment_ids': np.ones_like(batch['decoder_segment_ids'])}
  assert batch_hash(batch) != batch_hash(with_zero)


def test_texts_of_pairs_are_segments_in_turn():
  _, batch = convert('preference', pack=True)
  packed = {name: row[0].tolist() for name, row in batch.items()}
  assert packed == {
    'decoder_target_tokens': [3, 4, 5, 3, 6, 7, 8, 0],
    'decoder_input_tokens': [2, 3, 4, 2, 3, 2, 2, 0],
    'decoder_loss_weights': [0, 1, 1, 0, 1, 1, 1, 0],
    'decoder_segment_ids': [1, 1, 1, 2, 2, 3, 4, 0],
    'decoder_positions': [0, 1, 2, 0, 1, 0, 0, 0],
  }
  _, batch = convert('preference', pack=False)
  for name, row in batch.items():
    assert row[0].tolist() == packed[name][:5] + [0] * 3


def test_classification_has_a_row_per_example_with_its_class_and_weight_1():
  _, batch = convert('encoder_classification', pack=False)
  assert batch['encoder_input_tokens'].tolist() == [[7, 8, 5, 1, 0, 0, 0]]
  assert batch['label'].tolist() == [2] and batch['label_weights'].tolist() == [1]


def test_several_labels_of_a_row_are_class_numbers_plus_one():
  _, batch = convert('encoder_multi_label_with_types', pack=False)
  assert batch['encoder_labels'].tolist() == [[3, 1, 0, 0, 0, 0, 0]]
  assert batch['label_weights'].tolist() == [1] and not batch['encoder_token_types'].any()
  with pytest.raises(tf.errors.InvalidArgumentError, match='more labels than it may have tokens'):
    convert('encoder_multi_label', pack=False, examples=[{'inputs': [1], 'labels': [0, 1] * 4}])


def test_tags_stay_at_their_tokens_when_packed():
  _, batch = convert('encoder_tags', pack=False)
  assert batch['encoder_labels'].tolist() == [[3, 0, 1, 0, 0, 0, 0]]
  _, batch = convert('encoder_tags', pack=True, examples=[EXAMPLES[0], {**EXAMPLES[1], **SHORT}])
  assert batch['encoder_labels'].tolist() == [[3, 0, 1, 0, 0, 2, 0]]
  assert batch['encoder_segment_ids'].tolist() == [[1, 1, 1, 1, 2, 2, 2]]


def test_masked_loss_is_where_the_task_says_replaced_and_kept_tokens_included():
  _, batch = convert('encoder_mlm', pack=True)
  assert {name: row[0].tolist() for name, row in batch.items()} == {
    'encoder_input_tokens': [8, 9, 5, 3, 4, 1, 8, 3, 9, 1, 0],
    'encoder_target_tokens': [8, 7, 4, 3, 4, 1, 8, 3, 6, 1, 0],
    'encoder_segment_ids': [1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0],
    'encoder_positions': [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0],
    'encoder_loss_weights': [0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0],
  }


def test_masked_loss_without_positions_is_where_inputs_and_targets_differ():
  plain = [{name: x for name, x in example.items() if name != 'loss_mask'} for example in MASKED]
  for pack, want in (
    (True, [0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0]),
    (False, [0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]),
  ):
    _, batch = convert('encoder_mlm', pack=pack, examples=plain)
    assert batch['encoder_loss_weights'][0].tolist() == want


@pytest.mark.slow
def test_seqio_agrees_on_masked_rows_where_it_can():
  # With mask id 9 alone, the loss of SeqIO's own converter is where tokens were hidden.
  hidden = [
    {'inputs': [8, 9, 9, 3, 4, 1], 'targets': [8, 7, 4, 3, 4, 1]},
    {'inputs': [8, 3, 9, 1], 'targets': [8, 3, 6, 1]},
  ]
  dataset = tf.data.Dataset.from_generator(
    lambda: iter(hidden),
    output_signature={name: tf.TensorSpec([None], tf.int32) for name in hidden[0]},
  )
  for pack in (True, False):
    want = next(
      seqio.EncoderFeatureConverter(mask_id=9, pack=pack)(dataset, {'inputs': 11, 'targets': 11})
      .batch(1)
      .as_numpy_iterator()
    )
    _, got = convert('encoder_mlm', pack=pack, examples=hidden)
    # Unpacked rows have segments, too: they tell padding from tokens.
    assert got.keys() == want.keys() | {'encoder_segment_ids'}
    assert all((got[name] == want[name]).all() for name in want)
