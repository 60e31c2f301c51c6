"""Feature converters by name, from SeqIO and t5x_gpu, and the rows that they make (`model_rows`).

Here are converters of encoders (rows with labels, with tags, with sets of texts, or masked), of
conversations and of preferences. `t5x_gpu.data.features` describes their results without TF.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

from t5x_gpu.data import features
from t5x_gpu.data.batches import STACK_TOKENS
from t5x_gpu.data.features import DECODER_INPUTS, LOSS_MASK, PAIR_PLACES
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies.vocabularies import never_gives_zero, text_may_have_zero
from t5x_gpu.errors import DataError

TOKENS = seqio.FeatureConverter.FeatureSpec(dtype=tf.int32)
_NUMBER = seqio.FeatureConverter.FeatureSpec(dtype=tf.int32, rank=0)
# Task feature -> model feature.
_MODEL_LABELS = {'label': features.LABEL, 'labels': features.LABELS, 'score': features.SCORES}


class _EncoderConverter(seqio.FeatureConverter):
  """A converter whose sequences all have the length of the inputs."""

  def get_model_feature_lengths(self, task_feature_lengths: Mapping[str, int]) -> Mapping[str, int]:
    """Returns model feature -> length, 1 for numbers."""
    length = task_feature_lengths['inputs']
    lengths = {name: length if spec.rank else 1 for name, spec in self.MODEL_FEATURES.items()}
    return lengths | dict.fromkeys(self.PACKING_FEATURE_DTYPES if self.pack else (), length)


class EncoderClassificationConverter(_EncoderConverter):
  """{'inputs': tokens, 'label': class} -> a row per example, its class and a weight of 1.

  With 'labels', a list of classes, the row has 'encoder_labels', class numbers plus one, instead.
  With 'score', a number in ten-thousandths, the row has 'scores'.

  Args:
    label: the task feature: 'label', 'labels' or 'score'.
    types: whether rows have 'encoder_token_types', which are 0 if the task does not have
      'token_types'.
    **options: options of SeqIO's converter.
  """

  PACKING_FEATURE_DTYPES = None

  def __init__(self, *, label: str = 'label', types: bool = False, **options: object):
    self._label, self._types = label, types
    kind = TOKENS if label == 'labels' else _NUMBER
    self.TASK_FEATURES = {'inputs': TOKENS, label: kind}
    self.MODEL_FEATURES = {
      'encoder_input_tokens': TOKENS,
      _MODEL_LABELS[label]: kind,
      features.LABEL_WEIGHTS: _NUMBER,
      **({'encoder_token_types': TOKENS} if types else {}),
    }
    super().__init__(**options)

  def __call__(
    self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
  ) -> tf.data.Dataset:
    """Returns the converted dataset; users give only the length of the inputs."""
    length = task_feature_lengths['inputs'] if self._label == 'labels' else 1

    def checked(x: Mapping[str, tf.Tensor]) -> Mapping[str, tf.Tensor]:
      tf.debugging.assert_less_equal(
        tf.size(x[self._label]), length, message='A row has more labels than it may have tokens'
      )
      return x

    return super().__call__(ds.map(checked), {**task_feature_lengths, self._label: length})

  def _convert_features(
    self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
  ) -> tf.data.Dataset:
    length = task_feature_lengths['inputs']
    names = ['inputs', *(['labels'] if self._label == 'labels' else [])]
    names += [features.TOKEN_TYPES] if self._types else []

    def prepared(x: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
      more = {}
      if self._types:
        more[features.TOKEN_TYPES] = x.get(features.TOKEN_TYPES, tf.zeros_like(x['inputs']))
      if self._label == 'labels':
        more['labels'] = x['labels'] + 1
      return {**x, **more}

    return self._pack_or_pad(ds.map(prepared), dict.fromkeys(names, length)).map(self._row)

  def _row(self, x: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    row = {'encoder_input_tokens': x['inputs'], features.LABEL_WEIGHTS: tf.constant(1)}
    if self._types:
      row['encoder_token_types'] = tf.cast(x[features.TOKEN_TYPES], tf.int32)
    return {**row, _MODEL_LABELS[self._label]: x[self._label]}


class EncoderTagsConverter(_EncoderConverter):
  """{'inputs': tokens, 'tags': class numbers plus one, 0 except at the first token of a word}."""

  TASK_FEATURES = {'inputs': TOKENS, 'tags': TOKENS}
  MODEL_FEATURES = {'encoder_input_tokens': TOKENS, features.LABELS: TOKENS}
  PACKING_FEATURE_DTYPES = {'encoder_segment_ids': tf.int32, 'encoder_positions': tf.int32}

  def __call__(
    self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
  ) -> tf.data.Dataset:
    """Returns the converted dataset; users give only the length of the inputs."""
    length = task_feature_lengths['inputs']
    return super().__call__(ds, {**task_feature_lengths, 'tags': length})

  def _convert_features(
    self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
  ) -> tf.data.Dataset:
    def model_features(x: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
      row = {'encoder_input_tokens': x['inputs'], features.LABELS: tf.maximum(x['tags'] - 1, 0)}
      if self.pack:
        row['encoder_segment_ids'] = x['inputs_segment_ids']
        row['encoder_positions'] = x['inputs_positions']
      return row

    # Plus one, because packing treats zeros as padding and would cut them off.
    marked = ds.map(lambda x: {**x, 'tags': x['tags'] + 1})
    return self._pack_or_pad(marked, task_feature_lengths).map(model_features)


class EncoderTextSetsConverter(_EncoderConverter):
  """{'inputs': tokens of all texts, 'segments': text number of each token, 'places', 'score'}.

  Each example becomes a row.
  """

  TASK_FEATURES = {'inputs': TOKENS, 'segments': TOKENS, 'places': TOKENS, 'score': _NUMBER}
  MODEL_FEATURES = {
    'encoder_input_tokens': TOKENS,
    'encoder_segment_ids': TOKENS,
    'encoder_positions': TOKENS,
    features.LABEL_WEIGHTS: _NUMBER,
    features.SCORES: _NUMBER,
  }
  PACKING_FEATURE_DTYPES = None

  def __call__(
    self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
  ) -> tf.data.Dataset:
    """Returns the converted dataset; users give only the length of the inputs."""
    length = task_feature_lengths['inputs']
    return super().__call__(
      ds, {'segments': length, 'places': length, **task_feature_lengths, 'score': 1}
    )

  def _convert_features(
    self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
  ) -> tf.data.Dataset:
    names = ('inputs', 'segments', 'places')
    padded = self._pack_or_pad(ds, dict.fromkeys(names, task_feature_lengths['inputs']))
    return padded.map(
      lambda x: {
        'encoder_input_tokens': x['inputs'],
        'encoder_segment_ids': x['segments'],
        'encoder_positions': x['places'],
        features.LABEL_WEIGHTS: tf.constant(1),
        features.SCORES: x['score'],
      }
    )


class EncoderMlmConverter(_EncoderConverter):
  """{'inputs': tokens, some masked, 'targets': all tokens} -> rows of a masked language model.

  SeqIO's EncoderFeatureConverter computes the loss where the input is the mask token. BERT also
  predicts tokens that were replaced by another token or left unchanged, so the task marks all
  predicted positions in a feature 'loss_mask' of zeros and ones. Without 'loss_mask', the loss
  counts where inputs and targets differ, which equals SeqIO's if the task only masks tokens.
  """

  TASK_FEATURES = {'inputs': TOKENS, 'targets': TOKENS}
  MODEL_FEATURES = {
    'encoder_input_tokens': TOKENS,
    'encoder_target_tokens': TOKENS,
    'encoder_loss_weights': TOKENS,
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
      # The weight plus one, because packing treats zeros as padding and would cut them off.
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


class LmConverter(seqio.LMFeatureConverter):
  """SeqIO's converter, which also uses a task's 'decoder_inputs' and 'loss_mask' (conversations).

  Args:
    loss_on_targets_only: compute the loss where the mask is 1; otherwise on all tokens.
    **options: options of SeqIO's converter.
  """

  def __init__(self, *, loss_on_targets_only: bool = True, **options: object):
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


class PreferenceConverter(seqio.LMFeatureConverter):
  """Pairs of texts -> rows in which the two texts of each pair are consecutive segments.

  Segments 1 and 2 are the chosen and rejected texts of the first pair, 3 and 4 of the second pair.
  Without packing, a row has one pair.
  """

  MODEL_FEATURES = {
    **seqio.LMFeatureConverter.MODEL_FEATURES,
    'decoder_segment_ids': TOKENS,
    'decoder_positions': TOKENS,
  }
  PACKING_FEATURE_DTYPES = {}

  def get_model_feature_lengths(self, task_feature_lengths: Mapping[str, int]) -> Mapping[str, int]:
    """Returns model feature -> length."""
    return dict.fromkeys(self.MODEL_FEATURES, task_feature_lengths['targets'])

  def _convert_features(
    self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
  ) -> tf.data.Dataset:
    def model_features(x: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
      is_token = tf.cast(x[PAIR_PLACES] > 0, tf.int32)
      starts = tf.cast(tf.equal(x[PAIR_PLACES], 1), tf.int32)
      return {
        'decoder_target_tokens': x['targets'],
        'decoder_input_tokens': x[DECODER_INPUTS],
        'decoder_loss_weights': tf.maximum(x[LOSS_MASK] - 1, 0),
        'decoder_segment_ids': tf.cumsum(starts) * is_token,
        'decoder_positions': tf.maximum(x[PAIR_PLACES] - 1, 0),
      }

    names = ('targets', DECODER_INPUTS, LOSS_MASK, PAIR_PLACES)
    # The weight plus one: packing treats zeros as padding and would cut them off.
    marked = ds.map(lambda x: {**x, LOSS_MASK: x[LOSS_MASK] + 1})
    rows = self._pack_or_pad(marked, dict.fromkeys(names, task_feature_lengths['targets']))
    return rows.map(model_features)


CONVERTERS = {
  'lm': LmConverter,
  'preference': PreferenceConverter,
  'prefix_lm': seqio.PrefixLMFeatureConverter,
  'encoder_decoder': seqio.EncDecFeatureConverter,
  **{
    f'encoder_{kind}{"_with_types" * types}': functools.partial(
      EncoderClassificationConverter, label=label, types=types
    )
    for kind, label in (
      ('classification', 'label'),
      ('multi_label', 'labels'),
      ('regression', 'score'),
    )
    for types in (False, True)
  },
  'encoder_tags': EncoderTagsConverter,
  'encoder_text_sets': EncoderTextSetsConverter,
  'encoder_mlm': EncoderMlmConverter,
}
assert CONVERTERS.keys() == features.LAYOUTS.keys()


def feature_converter(
  name: str, *, pack: bool, loss_on_targets_only: bool = True
) -> seqio.FeatureConverter:
  """Returns the converter named `name`.

  Args:
    name: a key of `CONVERTERS`.
    pack: put several examples into one row.
    loss_on_targets_only: 'prefix_lm': weight 0 on the inputs. 'lm': weight 0 on all parts of a
      conversation except the assistant's messages.
  Raises:
    ConfigError: the converter is unknown.
    DataError: `loss_on_targets_only=False`, but the sequence of the targets has no inputs (raised
      during the conversion for 'lm'); `pack` with one label per row.
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
    parameters=('DatasetConfig.loss_on_targets_only',),
  )


def model_rows(
  examples: tf.data.Dataset,
  *,
  converter: seqio.FeatureConverter,
  name: str,
  task_feature_lengths: Mapping[str, int],
  output_features: Mapping[str, seqio.Feature],
  class_numbers: Optional[Sequence[int]] = None,
  masks: Mapping[str, str],
) -> tf.data.Dataset:
  """Returns rows of model features, without `masks` if id 0 is certainly padding.

  Without masks, the operations are the same as in version 0.2, whose buffers can be continued;
  `batches.with_masks` adds the masks.

  Args:
    examples: examples of the task.
    converter: `feature_converter(name, ...)`.
    name: name of the converter.
    task_feature_lengths: task feature -> tokens.
    output_features: output features of the task.
    class_numbers: class number in the task -> class number in the model; None if they are equal.
    masks: `row_masks` of the rows.
  """
  tokens, vocabularies = features.layout(name).tokens, _vocabularies(name, output_features)
  added = gets_ids_plus_one(name, output_features)
  if added:
    examples = examples.map(
      lambda x: {**x, **{part: _above_zero(x[part], v) for part, v in vocabularies.items()}}
    )
  rows = converter(examples, task_feature_lengths=dict(task_feature_lengths))
  if class_numbers is not None:
    rows = rows.map(_renumber(features.layout(name).classes, class_numbers))
  if not added:
    return rows

  def finished(row: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    of_tokens = {
      mask: tf.cast(row[STACK_TOKENS[stack]] > 0, tf.int32) for mask, stack in masks.items()
    }
    ids = {feature: tf.maximum(row[feature] - 1, 0) for feature in tokens}
    return {**row, **of_tokens, **ids}

  return rows.map(finished)


def gets_ids_plus_one(name: str, output_features: Mapping[str, seqio.Feature]) -> bool:
  """Returns whether SeqIO gets ids plus one, because it takes id 0 for padding."""
  return not all(map(never_gives_zero, _vocabularies(name, output_features).values()))


def _vocabularies(
  name: str, output_features: Mapping[str, seqio.Feature]
) -> dict[str, seqio.Vocabulary]:
  """Returns task feature -> vocabulary, for the features with tokens."""
  parts = {part for parts in features.layout(name).tokens.values() for part in parts}
  parts |= {DECODER_INPUTS} & output_features.keys()
  return {part: output_features[part].vocabulary for part in sorted(parts)}


def _above_zero(ids: tf.Tensor, vocabulary: seqio.Vocabulary) -> tf.Tensor:
  """Returns `ids` plus one, without zeros that a preprocessor has added at the end."""
  if not text_may_have_zero(vocabulary):
    places = tf.where(ids != 0, tf.range(1, tf.size(ids) + 1), 0)
    ids = ids[: tf.reduce_max(tf.concat([[0], places], 0))]
  return ids + 1


def _renumber(
  feature: str, numbers: Sequence[int]
) -> Callable[[Mapping[str, tf.Tensor]], dict[str, tf.Tensor]]:
  """Returns a function that maps the classes of a row to the model's numbers; see `model_rows`."""
  # In `encoder_labels`, class numbers are one higher and 0 means no label.
  table = [0, *(n + 1 for n in numbers)] if feature == features.LABELS else list(numbers)
  return lambda row: {**row, feature: tf.gather(tf.constant(table, tf.int32), row[feature])}
