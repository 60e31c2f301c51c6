"""Feature converters of encoders: rows with labels, with tags, with sets of texts, or masked."""

from collections.abc import Mapping
from typing import Any

from t5x_gpu.data import features
from t5x_gpu.data.features import LOSS_MASK
from t5x_gpu.data.tf_runtime import seqio, tf

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

  def __init__(self, *, label: str = 'label', types: bool = False, **options: Any):
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
