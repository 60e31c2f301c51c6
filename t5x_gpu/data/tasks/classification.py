"""Tasks of classification: a text, and which of a few classes it is.

  python_source_classification   which standard-library package a snippet is from: on every machine
  cola                           is an English sentence acceptable: GLUE's CoLA through TFDS
  cola_tsv:PATTERN               the same from CoLA's own .tsv files for train and dev
  classification:FORM:PATTERN    .csv, .tsv, .jsonl or Parquet files with any columns, pairs too
  imdb_csv:PATTERN               classification:csv:PATTERN

Their features are 'inputs' [length] and 'label' [], whose vocabulary has the classes' names. Pairs
of texts have 'token_types' [length] as well: 0 for the first text, 1 for the second.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.data import features as features_lib
from t5x_gpu.data.sources import discovery, labelled_files, labelled_tables, seqio_sources
from t5x_gpu.data.tasks import objectives, snippets
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies.vocabularies import ClassVocabulary, end_id, named_vocabulary
from t5x_gpu.errors import DataError

SHUFFLE_BUFFER = 1000


def frame_inputs(dataset: tf.data.Dataset, sequence_length: Optional[Mapping[str, int]],
                 output_features: Mapping[str, seqio.Feature]) -> tf.data.Dataset:
  """Yields {'inputs': [CLS] if there is one, the first tokens that fit, the end id, 'label'}."""
  feature = output_features['inputs']
  room = _room(sequence_length, taken=objectives.frame_size(feature))
  return dataset.map(lambda x: {'inputs': objectives.framed(x['inputs'][:room], feature),
                                'label': x['label']}, num_parallel_calls=tf.data.AUTOTUNE)


def frame_pairs(dataset: tf.data.Dataset, sequence_length: Optional[Mapping[str, int]],
                output_features: Mapping[str, seqio.Feature]) -> tf.data.Dataset:
  """Yields {'inputs': [CLS] if there is one, text, end id, second text, end id, 'token_types'}.

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
    return {'inputs': inputs, 'label': x['label'], features_lib.TOKEN_TYPES: tf.concat(
        [tf.zeros([tf.size(inputs) - num_second], tf.int32), tf.ones([num_second], tf.int32)], 0)}
  return dataset.map(framed, num_parallel_calls=tf.data.AUTOTUNE)


def pair_lengths(first: Any, second: Any, room: int) -> tuple[Any, Any]:
  """Returns how many of `first` and `second` tokens, numbers or scalars, stay if `room` fit."""
  at_most = tf.maximum if tf.is_tensor(first) else max
  at_least = tf.minimum if tf.is_tensor(first) else min
  first = at_least(first, at_most(room - second, (room + 1) // 2))
  return first, at_least(second, room - first)


def _room(sequence_length: Optional[Mapping[str, int]], *, taken: int) -> Optional[int]:
  """Returns how many tokens of text fit beside `taken` ids of the frame; None for any number."""
  length = (sequence_length or {}).get('inputs')
  room = None if length is None else length - taken
  if room is not None and room < 1:
    raise DataError(
        f"'inputs' has length {length}; {taken} ids frame each text.",
        fix="Set TASK_FEATURE_LENGTHS = {'inputs': 128}.",
        parameters=('DatasetConfig.task_feature_lengths',))
  return room


def features(class_names: Sequence[str]) -> dict[str, seqio.Feature]:
  """Returns the output features of a task with these classes; byte vocabulary."""
  return {'inputs': seqio.Feature(vocabulary=named_vocabulary('byte'), add_eos=True),
          'label': seqio.Feature(vocabulary=ClassVocabulary(class_names), add_eos=False, rank=0)}


_TOKENIZE = functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False)
PREPROCESSORS = (_TOKENIZE, frame_inputs)


def _from_files(name: str, pattern: str, *, read: labelled_tables.Reader,
                class_names: Optional[Sequence[str]] = None) -> seqio.Task:
  files = discovery.matching_files(pattern)
  found = labelled_tables.labelled_texts(files, read=read, class_names=class_names)
  source = seqio_sources.LabelledSource(lambda: found, splits=tuple(found.texts), files=files)
  frame = frame_inputs if found.texts2 is None else frame_pairs
  return seqio.Task(name, source=source, preprocessors=(_TOKENIZE, frame),
                    output_features=features(found.class_names),
                    shuffle_buffer_size=SHUFFLE_BUFFER)


def cola_tsv(pattern: str) -> seqio.Task:
  """Returns CoLA from its own files. Raises DataError (file:line) for any other form."""
  return _from_files('cola_tsv', pattern, read=labelled_tables.read_cola, class_names=labelled_tables.COLA_CLASSES)


def classification(spelled: str, *, name: str = 'classification') -> seqio.Task:
  """Returns classification of the texts, or pairs of texts, of files of any form and columns.

  Args:
    spelled: 'FORM:PATTERN', with '#text=COLUMN,label=COLUMN' behind it, or 'text2=COLUMN' as well.
    name: of the task; checkpoints record it.
  Raises:
    DataError: no such form, file or column, or a flaw in any row (named by file and place).
  """
  reader, pattern = labelled_files.parse(spelled)
  return _from_files(name, pattern, read=reader)


def imdb_csv(pattern: str) -> seqio.Task:
  """Returns `classification` of .csv files."""
  return classification(f'csv:{pattern}', name='imdb_csv')


def _cola_features(dataset: tf.data.Dataset) -> tf.data.Dataset:
  return dataset.map(lambda x: {'inputs': x['sentence'], 'label': tf.cast(x['label'], tf.int32)},
                     num_parallel_calls=tf.data.AUTOTUNE)


seqio.TaskRegistry.add(
    'python_source_classification',
    source=seqio_sources.LabelledSource(snippets.python_snippets, splits=('train', 'validation')),
    preprocessors=PREPROCESSORS, output_features=features(snippets.PACKAGES),
    shuffle_buffer_size=SHUFFLE_BUFFER)

# GLUE keeps the labels of its test split to itself (they are all -1), so it is no split here.
# `read_only`: a training run on many hosts must not start many downloads.
seqio.TaskRegistry.add(
    'cola',
    source=seqio.TfdsDataSource('glue/cola:2.0.0', splits=('train', 'validation'), read_only=True),
    preprocessors=(_cola_features, *PREPROCESSORS), output_features=features(labelled_tables.COLA_CLASSES),
    shuffle_buffer_size=SHUFFLE_BUFFER)

OWN_TASKS = ('python_source_classification', 'cola')
# Registered task -> what reads the same data from files, for those who cannot prepare TFDS.
FROM_FILES: Mapping[str, str] = {'cola': 'cola_tsv:FOLDER/*.tsv'}
PATTERN_TASKS: Mapping[str, Callable[[str], seqio.Task]] = {
    'cola_tsv': cola_tsv, 'classification': classification, 'imdb_csv': imdb_csv}
