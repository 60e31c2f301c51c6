"""Tasks of classification: a text, and which of a few classes it is.

  python_source_classification   which standard-library package a snippet is from: on every machine
  cola                           is an English sentence acceptable: GLUE's CoLA through TFDS
  cola_tsv:PATTERN               the same from CoLA's own .tsv files for train and dev
  imdb_csv:PATTERN               any .csv with the columns text,label

Their features are 'inputs' [length] and 'label' [], whose vocabulary knows the classes' names.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

from t5x_gpu.data import files as files_lib
from t5x_gpu.data import objectives, snippets, sources, tables
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies import ClassVocabulary, named_vocabulary
from t5x_gpu.errors import DataError

SHUFFLE_BUFFER = 1000


def frame_inputs(dataset: tf.data.Dataset, sequence_length: Optional[Mapping[str, int]],
                 output_features: Mapping[str, seqio.Feature]) -> tf.data.Dataset:
  """Yields {'inputs': [CLS] if there is one, the first tokens that fit, the end id, 'label'}."""
  feature = output_features['inputs']
  length = (sequence_length or {}).get('inputs')
  room = None if length is None else length - objectives.frame_size(feature)
  if room is not None and room < 1:
    raise DataError(
        f"'inputs' has length {length}; {objectives.frame_size(feature)} ids frame each text.",
        fix="Set TASK_FEATURE_LENGTHS = {'inputs': 128}.",
        parameters=('DatasetConfig.task_feature_lengths',))
  return dataset.map(lambda x: {'inputs': objectives.framed(x['inputs'][:room], feature),
                                'label': x['label']}, num_parallel_calls=tf.data.AUTOTUNE)


def features(class_names: Sequence[str]) -> dict[str, seqio.Feature]:
  """Returns the output features of a task with these classes; byte vocabulary."""
  return {'inputs': seqio.Feature(vocabulary=named_vocabulary('byte'), add_eos=True),
          'label': seqio.Feature(vocabulary=ClassVocabulary(class_names), add_eos=False, rank=0)}


PREPROCESSORS = (functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
                 frame_inputs)


def _from_files(name: str, pattern: str, *, form: str,
                class_names: Optional[Sequence[str]] = None) -> seqio.Task:
  files = files_lib.matching_files(pattern)
  found = tables.labelled_texts(files, form=form, class_names=class_names)
  source = sources.LabelledSource(lambda: found, splits=tuple(found.texts), files=files)
  return seqio.Task(name, source=source, preprocessors=PREPROCESSORS,
                    output_features=features(found.class_names),
                    shuffle_buffer_size=SHUFFLE_BUFFER)


def cola_tsv(pattern: str) -> seqio.Task:
  """Returns CoLA from its own files. Raises DataError (file:line) for any other form."""
  return _from_files('cola_tsv', pattern, form='cola', class_names=tables.COLA_CLASSES)


def imdb_csv(pattern: str) -> seqio.Task:
  """Returns classification of the texts of .csv files. Raises DataError (file:line)."""
  return _from_files('imdb_csv', pattern, form='csv')


def _cola_features(dataset: tf.data.Dataset) -> tf.data.Dataset:
  return dataset.map(lambda x: {'inputs': x['sentence'], 'label': tf.cast(x['label'], tf.int32)},
                     num_parallel_calls=tf.data.AUTOTUNE)


seqio.TaskRegistry.add(
    'python_source_classification',
    source=sources.LabelledSource(snippets.python_snippets, splits=('train', 'validation')),
    preprocessors=PREPROCESSORS, output_features=features(snippets.PACKAGES),
    shuffle_buffer_size=SHUFFLE_BUFFER)

# GLUE keeps the labels of its test split to itself (they are all -1), so it is no split here.
# `read_only`: a training run on many hosts must not start many downloads.
seqio.TaskRegistry.add(
    'cola',
    source=seqio.TfdsDataSource('glue/cola:2.0.0', splits=('train', 'validation'), read_only=True),
    preprocessors=(_cola_features, *PREPROCESSORS), output_features=features(tables.COLA_CLASSES),
    shuffle_buffer_size=SHUFFLE_BUFFER)

OWN_TASKS = ('python_source_classification', 'cola')
# Registered task -> what reads the same data from files, for those who cannot prepare TFDS.
FROM_FILES: Mapping[str, str] = {'cola': 'cola_tsv:FOLDER/*.tsv'}
PATTERN_TASKS: Mapping[str, Callable[[str], seqio.Task]] = {
    'cola_tsv': cola_tsv, 'imdb_csv': imdb_csv}
