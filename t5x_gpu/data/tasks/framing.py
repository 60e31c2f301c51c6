"""Preprocessors that make rows of an encoder from texts, pairs of texts and words."""

from collections.abc import Mapping
from typing import Any, Optional

from t5x_gpu.data import features as features_lib
from t5x_gpu.data.tasks import objectives
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies.vocabularies import end_id
from t5x_gpu.errors import DataError

TAGS = 'tags'  # feature of token classification


def frame_inputs(
  dataset: tf.data.Dataset,
  sequence_length: Optional[Mapping[str, int]],
  output_features: Mapping[str, seqio.Feature],
) -> tf.data.Dataset:
  """Yields {'inputs': [CLS] if it exists, as many tokens as fit, end id, 'label'}."""
  feature = output_features['inputs']
  room = _room(sequence_length, taken=objectives.frame_size(feature))
  return dataset.map(
    lambda x: {'inputs': objectives.framed(x['inputs'][:room], feature), **_labels(x)},
    num_parallel_calls=tf.data.AUTOTUNE,
  )


def frame_pairs(
  dataset: tf.data.Dataset,
  sequence_length: Optional[Mapping[str, int]],
  output_features: Mapping[str, seqio.Feature],
) -> tf.data.Dataset:
  """Yields {'inputs': [CLS] if it exists, text, end id, second text, end id, 'token_types'}.

  A pair that is too long loses tokens from the end of its longer text (Devlin et al. 2019, A.2).
  """
  feature = output_features['inputs']
  end = end_id(feature.vocabulary)
  room = _room(sequence_length, taken=objectives.frame_size(feature) + 1)

  def framed(x: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    first, second = x['inputs'], feature.vocabulary.encode_tf(x['text2'])
    if room is not None:
      num_first, num_second = pair_lengths(tf.size(first), tf.size(second), room)
      first, second = first[:num_first], second[:num_second]
    inputs = objectives.framed(tf.concat([first, [end], second], axis=0), feature)
    num_second = tf.size(second) + 1
    return {
      'inputs': inputs,
      **_labels(x),
      features_lib.TOKEN_TYPES: tf.concat(
        [tf.zeros([tf.size(inputs) - num_second], tf.int32), tf.ones([num_second], tf.int32)], 0
      ),
    }

  return dataset.map(framed, num_parallel_calls=tf.data.AUTOTUNE)


def frame_words(
  dataset: tf.data.Dataset,
  sequence_length: Optional[Mapping[str, int]],
  output_features: Mapping[str, seqio.Feature],
) -> tf.data.Dataset:
  """Yields {'inputs': [CLS] if it exists, the words' tokens, end id, 'tags', 'words': text}.

  Each word is encoded separately (`is_split_into_words` in transformers). At the first token of a
  word, 'tags' has the class number plus one; elsewhere 0. Words that do not fit are left out.
  """
  feature = output_features['inputs']
  room = _room(sequence_length, taken=objectives.frame_size(feature))

  def framed(x: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    pieces = tf.map_fn(
      feature.vocabulary.encode_tf,
      x['inputs'],
      fn_output_signature=tf.RaggedTensorSpec([None], tf.int32, ragged_rank=0),
    )
    word = pieces.value_rowids()
    is_first = tf.concat([[True], word[1:] != word[:-1]], 0)[: tf.size(word)]
    tags = tf.where(is_first, tf.gather(x[TAGS], word) + 1, 0)
    end = [0] if feature.add_eos else []
    start = [0] * (objectives.frame_size(feature) - len(end))
    return {
      'inputs': objectives.framed(pieces.flat_values[:room], feature),
      TAGS: tf.concat([tf.constant(start, tf.int32), tags[:room], tf.constant(end, tf.int32)], 0),
      'words': tf.strings.reduce_join(x['inputs'], separator=' '),
    }

  return dataset.map(framed, num_parallel_calls=tf.data.AUTOTUNE)


def frame_text_sets(
  dataset: tf.data.Dataset,
  sequence_length: Optional[Mapping[str, int]],
  output_features: Mapping[str, seqio.Feature],
) -> tf.data.Dataset:
  """Yields {'inputs': the texts one after the other, 'segments', 'places', 'score'}.

  Each text has [CLS], if it exists, and the end id, and is cut to its share of the row: a half for
  two texts, a third for three. 'segments' numbers the texts from 1; 'places' numbers the tokens of
  each text from 0.
  """
  feature = output_features['inputs']
  taken = objectives.frame_size(feature)
  row = _room(sequence_length, taken=3 * taken + 2)
  row = None if row is None else row + 3 * taken + 2

  def framed(x: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    count = tf.size(x['inputs'])
    texts = tf.map_fn(
      feature.vocabulary.encode_tf,
      x['inputs'],
      fn_output_signature=tf.RaggedTensorSpec([None], tf.int32, ragged_rank=0),
    )
    if row is not None:
      texts = texts[:, : row // count - taken]
    texts = tf.map_fn(
      lambda text: objectives.framed(text, feature),
      texts,
      fn_output_signature=tf.RaggedTensorSpec([None], tf.int32, ragged_rank=0),
    )
    return {
      'inputs': texts.flat_values,
      'segments': tf.cast(texts.value_rowids(), tf.int32) + 1,
      'places': tf.cast(tf.ragged.range(texts.row_lengths()).flat_values, tf.int32),
      'score': x['score'],
    }

  return dataset.map(framed, num_parallel_calls=tf.data.AUTOTUNE)


def _labels(x: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
  return {name: x[name] for name in ('label', 'labels', 'score') if name in x}


def pair_lengths(first: Any, second: Any, room: int) -> tuple[Any, Any]:
  """Returns how many of `first` and `second` tokens to keep in `room`; ints or scalar tensors."""
  at_most = tf.maximum if tf.is_tensor(first) else max
  at_least = tf.minimum if tf.is_tensor(first) else min
  first = at_least(first, at_most(room - second, (room + 1) // 2))
  return first, at_least(second, room - first)


def _room(sequence_length: Optional[Mapping[str, int]], *, taken: int) -> Optional[int]:
  """Returns how many tokens of text fit in addition to `taken` special ids; None if unlimited."""
  length = (sequence_length or {}).get('inputs')
  room = None if length is None else length - taken
  if room is not None and room < 1:
    raise DataError(
      f"'inputs' has length {length}; each text also needs {taken} special ids.",
      fix="Set TASK_FEATURE_LENGTHS = {'inputs': 128}.",
      parameters=('DatasetConfig.task_feature_lengths',),
    )
  return room
