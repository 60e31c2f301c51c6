"""Name -> feature converter: those of SeqIO, and ours.

`t5x_gpu.data.features` describes, without TF, what each of them returns.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.data import features
from t5x_gpu.data.features import DECODER_INPUTS, LOSS_MASK
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies.vocabularies import moved_zero_id, vocabulary_name
from t5x_gpu.errors import DataError

_TOKENS = seqio.FeatureConverter.FeatureSpec(dtype=tf.int32)
_NUMBER = seqio.FeatureConverter.FeatureSpec(dtype=tf.int32, rank=0)


class LmConverter(seqio.LMFeatureConverter):
  """SeqIO's; a task with 'decoder_inputs' and 'loss_mask' (a conversation) has its own of both.

  Args:
    loss_on_targets_only: take the loss where the mask is 1; otherwise on all tokens.
    **options: SeqIO's.
  """

  def __init__(self, *, loss_on_targets_only: bool = True, **options: Any):
    super().__init__(**options)
    self._masked = loss_on_targets_only

  def _convert_features(
    self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
  ) -> tf.data.Dataset:
    if DECODER_INPUTS not in ds.element_spec:
      if not self._masked:
        raise _no_mask('lm')
      return super()._convert_features(ds, task_feature_lengths)

    def model_features(x: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
      weights = tf.maximum(x[LOSS_MASK] - 1, 0) if self._masked else tf.minimum(x[LOSS_MASK], 1)
      row = {
        'decoder_target_tokens': x['targets'],
        'decoder_input_tokens': x[DECODER_INPUTS],
        'decoder_loss_weights': weights,
      }
      if self.pack:
        row['decoder_segment_ids'] = x['targets_segment_ids']
        row['decoder_positions'] = x['targets_positions']
      return row

    names = ('targets', DECODER_INPUTS, LOSS_MASK)
    # The weight plus one: packing treats zeros as padding and would cut them off.
    marked = ds.map(lambda x: {**x, LOSS_MASK: x[LOSS_MASK] + 1})
    rows = self._pack_or_pad(marked, dict.fromkeys(names, task_feature_lengths['targets']))
    return rows.map(model_features)


class _EncoderConverter(seqio.FeatureConverter):
  """A converter whose sequences are all as long as the inputs."""

  def get_model_feature_lengths(self, task_feature_lengths: Mapping[str, int]) -> Mapping[str, int]:
    """Returns model feature -> length, 1 for numbers."""
    length = task_feature_lengths['inputs']
    lengths = {name: length if spec.rank else 1 for name, spec in self.MODEL_FEATURES.items()}
    return lengths | dict.fromkeys(self.PACKING_FEATURE_DTYPES if self.pack else (), length)


class EncoderClassificationConverter(_EncoderConverter):
  """{'inputs': tokens, 'label': class} -> a row per example, its class and a weight of 1."""

  TASK_FEATURES = {'inputs': _TOKENS, 'label': _NUMBER}
  MODEL_FEATURES = {
    'encoder_input_tokens': _TOKENS,
    features.LABEL: _NUMBER,
    features.LABEL_WEIGHTS: _NUMBER,
  }
  PACKING_FEATURE_DTYPES = None

  def __call__(
    self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
  ) -> tf.data.Dataset:
    """Returns the converted dataset; users give only the length of the inputs."""
    return super().__call__(ds, {**task_feature_lengths, 'label': 1})

  def _convert_features(
    self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
  ) -> tf.data.Dataset:
    padded = self._pack_or_pad(ds, {'inputs': task_feature_lengths['inputs']})
    return padded.map(self._row)

  def _row(self, x: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {
      'encoder_input_tokens': x['inputs'],
      features.LABEL: x['label'],
      features.LABEL_WEIGHTS: tf.ones_like(x['label']),
    }


class EncoderTypedClassificationConverter(EncoderClassificationConverter):
  """The same with 'encoder_token_types', which are 0 if the task does not have 'token_types'."""

  MODEL_FEATURES = {**EncoderClassificationConverter.MODEL_FEATURES, 'encoder_token_types': _TOKENS}

  def _convert_features(
    self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
  ) -> tf.data.Dataset:
    length = task_feature_lengths['inputs']
    typed = ds.map(
      lambda x: {**x, features.TOKEN_TYPES: x.get(features.TOKEN_TYPES, tf.zeros_like(x['inputs']))}
    )
    padded = self._pack_or_pad(typed, {'inputs': length, features.TOKEN_TYPES: length})
    return padded.map(
      lambda x: {**self._row(x), 'encoder_token_types': tf.cast(x[features.TOKEN_TYPES], tf.int32)}
    )


class EncoderMlmConverter(_EncoderConverter):
  """{'inputs': tokens, some masked, 'targets': all tokens} -> rows of a masked language model.

  SeqIO's EncoderFeatureConverter takes the loss where the input is the mask token. BERT also takes
  it where a token was replaced by another or left unchanged, so the task marks these places by a
  feature 'loss_mask' of zeros and ones. Without it, the loss is taken where inputs and targets
  differ, which is the same as SeqIO's if the task only masks tokens.
  """

  TASK_FEATURES = {'inputs': _TOKENS, 'targets': _TOKENS}
  MODEL_FEATURES = {
    'encoder_input_tokens': _TOKENS,
    'encoder_target_tokens': _TOKENS,
    'encoder_loss_weights': _TOKENS,
  }
  PACKING_FEATURE_DTYPES = {'encoder_segment_ids': tf.int32, 'encoder_positions': tf.int32}

  def _convert_features(
    self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
  ) -> tf.data.Dataset:
    length = task_feature_lengths['inputs']

    def with_mask(x: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
      tf.debugging.assert_equal(
        tf.size(x['inputs']),
        tf.size(x['targets']),
        message=("'inputs' and 'targets' of a masked language model have different lengths"),
      )
      taken = x.get(LOSS_MASK, tf.not_equal(x['inputs'], x['targets']))
      # The weight plus one: packing treats zeros as padding and would cut them off.
      return {**x, LOSS_MASK: 1 + tf.cast(taken, tf.int32)}

    def model_features(x: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
      row = {
        'encoder_input_tokens': x['inputs'],
        'encoder_target_tokens': x['targets'],
        'encoder_loss_weights': tf.maximum(x[LOSS_MASK] - 1, 0),
      }
      if self.pack:
        row['encoder_segment_ids'] = x['inputs_segment_ids']
        row['encoder_positions'] = x['inputs_positions']
      return row

    rows = self._pack_or_pad(ds.map(with_mask), {**task_feature_lengths, LOSS_MASK: length})
    return rows.map(model_features)


CONVERTERS = {
  'lm': LmConverter,
  'prefix_lm': seqio.PrefixLMFeatureConverter,
  'encoder_decoder': seqio.EncDecFeatureConverter,
  'encoder_classification': EncoderClassificationConverter,
  'encoder_classification_with_types': EncoderTypedClassificationConverter,
  'encoder_mlm': EncoderMlmConverter,
}
assert CONVERTERS.keys() == features.LAYOUTS.keys()


def feature_converter(
  name: str, *, pack: bool, loss_on_targets_only: bool = True
) -> seqio.FeatureConverter:
  """Returns the converter called `name`.

  Args:
    name: a key of `CONVERTERS`.
    pack: put several examples into one row.
    loss_on_targets_only: 'prefix_lm': weight 0 on the inputs. 'lm': on what a conversation has
      besides the assistant's messages.
  Raises:
    ConfigError: no such converter.
    DataError: `loss_on_targets_only=False` without inputs in the sequence of the targets (with
      'lm': in the conversion); `pack` with one label per row.
  """
  features.check_pack(name, pack=pack)
  if name in ('lm', 'prefix_lm'):
    return CONVERTERS[name](pack=pack, loss_on_targets_only=loss_on_targets_only)
  if not loss_on_targets_only:
    raise _no_mask(name)
  return CONVERTERS[name](pack=pack)


def _no_mask(name: str) -> DataError:
  return DataError(
    f'loss_on_targets_only = False does not apply to feature converter {name!r}: its inputs '
    'are not in the sequence of its targets.',
    fix="Leave DatasetConfig.loss_on_targets_only at True, or use feature converter 'prefix_lm', "
    'or train on conversations (jsonl with messages).',
  )


def model_rows(
  examples: tf.data.Dataset,
  *,
  converter: seqio.FeatureConverter,
  name: str,
  task_feature_lengths: Mapping[str, int],
  output_features: Mapping[str, seqio.Feature],
) -> tf.data.Dataset:
  """Returns rows of model features, with the ids of the model.

  Args:
    examples: of the task.
    converter: `feature_converter(name, ...)`.
    name: of the converter.
    task_feature_lengths: task feature -> tokens.
    output_features: of the task.
  Raises:
    DataError: two vocabularies use the same id for different words of one sequence; or padding
      and a word of id 0 look the same.
  """
  rows = converter(examples, task_feature_lengths=dict(task_feature_lengths))
  moved = {
    feature: _moved_zero_id([output_features[part] for part in parts], name)
    for feature, parts in features.layout(name).tokens.items()
  }
  if not any(moved.values()):
    return rows
  if DECODER_INPUTS in output_features and not converter.pack:
    raise DataError(
      'Id 0 is a word of the tokenizer, and conversations have tokens without a loss. So without '
      'packing, this word and the padding look the same.',
      fix='Set PACK = True.',
      parameters=('DatasetConfig.pack', 'DatasetConfig.vocabulary'),
    )
  return rows.map(
    lambda row: {
      feature: tf.where(x == moved[feature], 0, x) if moved.get(feature) else x
      for feature, x in row.items()
    }
  )


def _moved_zero_id(parts: Sequence[seqio.Feature], name: str) -> Optional[int]:
  """Returns SeqIO's id of the word that has id 0 in the model, in the sequence of `parts`."""
  found = [moved_zero_id(part.vocabulary, feature_converter=name) for part in parts]
  moved = next((i for i in found if i is not None), None)
  if moved is not None and any(
    i != moved and part.vocabulary.vocab_size > moved for part, i in zip(parts, found)
  ):
    raise DataError(
      'Inputs and targets are one sequence here, but have different vocabularies: '
      + ', '.join(vocabulary_name(part.vocabulary) for part in parts)
      + f'. Id {moved} is a word in both.',
      fix='Set DatasetConfig.vocabulary, which gives all features the same vocabulary.',
      parameters=('DatasetConfig.vocabulary', 'DatasetConfig.mixture_or_task_name'),
    )
  return moved
