"""Tasks of encoders: texts with classes, tags or numbers, and texts that belong together.

  python_source_classification   the standard-library package of a snippet: on every machine
  cola                           acceptability of an English sentence: GLUE's CoLA through TFDS
  cola_tsv:PATTERN               the same from CoLA's own .tsv files for train and dev
  classification:FORM:PATTERN    .csv, .tsv, .jsonl or Parquet files with any columns, pairs too
  imdb_csv:PATTERN               classification:csv:PATTERN
  multi_label:FORM:PATTERN       the same files with any number of labels per row
  regression:FORM:PATTERN        the same files with a number per row
  stsb                           similarity of two sentences, 0 to 5: GLUE's STS-B through TFDS
  token_classification:FORM:...  words, and a tag for each: .jsonl or Parquet
  sentence_pairs:FORM:PATTERN    two texts that belong together, for sentence embeddings

Their features are 'inputs' [length] and 'label' [], whose vocabulary has the class names, or
'labels' [number of labels], or 'score' [] in ten-thousandths. Pairs of texts also have
'token_types' [length]: 0 for the first text, 1 for the second.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

from t5x_gpu.data.features import SCORE_UNIT
from t5x_gpu.data.sources import discovery, seqio_sources
from t5x_gpu.data.sources.labelled import files as labelled_files
from t5x_gpu.data.sources.labelled import tables as labelled_tables
from t5x_gpu.data.sources.labelled.python_snippets import PACKAGES, python_snippets
from t5x_gpu.data.tasks import builtin
from t5x_gpu.data.tasks.framing import TAGS, frame_inputs, frame_pairs, frame_text_sets, frame_words
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies.vocabularies import ClassVocabulary
from t5x_gpu.errors import task_error

_NUMBERS = seqio.Feature(seqio.PassThroughVocabulary(2**31 - 1), add_eos=False)
_SCORE = dataclasses.replace(_NUMBERS, rank=0)
# Minimum number of steps of 1 / SCORE_UNIT between the lowest and highest number of a regression.
_LEAST_STEPS = 100


def features(class_names: Sequence[str], *, label: str = 'label') -> dict[str, seqio.Feature]:
  """Returns the output features of a task with these classes; byte vocabulary.

  Args:
    class_names: class names in the order of their numbers.
    label: 'label', a number; 'labels', a list; or 'tags', one per word.
  """
  vocabulary = ClassVocabulary(class_names)
  rank = 0 if label == 'label' else 1
  return {
    **builtin.features('inputs'),
    label: seqio.Feature(vocabulary=vocabulary, add_eos=False, rank=rank),
  }


PREPROCESSORS = (builtin.TOKENIZE, frame_inputs)


def _from_files(
  name: str,
  pattern: str,
  *,
  read: labelled_tables.Reader,
  class_names: Optional[Sequence[str]] = None,
  label: str = 'label',
) -> seqio.Task:
  files = discovery.matching_files(pattern)
  found = labelled_tables.labelled_texts(
    files, read=read, class_names=class_names, several=label != 'label'
  )
  source = seqio_sources.LabelledSource(
    lambda: found, splits=tuple(found.texts), files=files, label=label
  )
  frame = frame_inputs if found.texts2 is None else frame_pairs
  return builtin.make_task(
    name,
    source=source,
    preprocessors=(frame_words,) if label == TAGS else (builtin.TOKENIZE, frame),
    output_features=features(found.class_names, label=label),
  )


def cola_tsv(pattern: str) -> seqio.Task:
  """Returns CoLA from its original files. Raises DataError (file:line) for other files."""
  return _from_files(
    'cola_tsv', pattern, read=labelled_tables.read_cola, class_names=labelled_tables.COLA_CLASSES
  )


def classification(spelled: str, *, name: str = 'classification') -> seqio.Task:
  """Returns a classification task over texts, or pairs of texts, in files with any columns.

  Args:
    spelled: 'FORM:PATTERN', optionally followed by '#text=COLUMN,label=COLUMN', for pairs also
      'text2=COLUMN'.
    name: name of the task; checkpoints record it.
  Raises:
    DataError: the form, file or column does not exist, or a row is invalid (named by file and row).
  """
  reader, pattern = labelled_files.parse(spelled)
  return _from_files(name, pattern, read=reader)


def multi_label(spelled: str) -> seqio.Task:
  """Returns a task of texts, or pairs of texts, with any number of labels; see `classification`.

  Args:
    spelled: 'FORM:PATTERN', optionally followed by '#text=COLUMN,labels=COLUMN'.
  Raises:
    DataError: as for `classification`.
  """
  reader, pattern = labelled_files.parse(spelled, kind='multi_label')
  return _from_files('multi_label', pattern, read=reader, label='labels')


def token_classification(spelled: str) -> seqio.Task:
  """Returns a task of words with tags.

  Args:
    spelled: 'FORM:PATTERN', optionally followed by '#tokens=COLUMN,tags=COLUMN'.
  Raises:
    DataError: as for `classification`.
  """
  reader, pattern = labelled_files.parse(spelled, kind='token_classification')
  return _from_files('token_classification', pattern, read=reader, label=TAGS)


def regression(spelled: str) -> seqio.Task:
  """Returns a task of texts, or pairs of texts, with a number each; see `classification`.

  Raises:
    DataError: as for `classification`; or the numbers of the training rows hardly differ.
  """
  reader, pattern = labelled_files.parse(spelled, kind='regression')
  files = discovery.matching_files(pattern)
  found = labelled_tables.scored_texts(files, read=reader)
  least, most = min(found.labels['train']), max(found.labels['train'])
  if most - least < _LEAST_STEPS:
    raise task_error(
      f'The numbers of the training rows are from {least / SCORE_UNIT} to {most / SCORE_UNIT}, and '
      f'regression keeps steps of {1 / SCORE_UNIT}.',
      fix='Scale them, such as to a range from 0 to 1.',
    )
  return builtin.make_task(
    'regression',
    source=seqio_sources.LabelledSource(
      lambda: found, splits=tuple(found.texts), files=files, label='score'
    ),
    preprocessors=(builtin.TOKENIZE, frame_inputs if found.texts2 is None else frame_pairs),
    output_features={**builtin.features('inputs'), 'score': _SCORE},
  )


def sentence_pairs(spelled: str) -> seqio.Task:
  """Returns a task of texts that belong together, optionally with a hard negative or a score.

  Args:
    spelled: 'FORM:PATTERN', optionally with '#anchor=COLUMN,positive=COLUMN,negative=COLUMN'.
  Raises:
    DataError: as for `classification`.
  """
  reader, pattern = labelled_files.parse(spelled, kind='sentence_pairs')
  files = discovery.matching_files(pattern)
  found = labelled_tables.scored_texts(files, read=reader)
  return builtin.make_task(
    'sentence_pairs',
    source=seqio_sources.LabelledSource(
      lambda: found, splits=tuple(found.texts), files=files, label='score'
    ),
    preprocessors=(frame_text_sets,),
    output_features={
      **builtin.features('inputs'),
      'segments': _NUMBERS,
      'places': _NUMBERS,
      'score': _SCORE,
    },
  )


def imdb_csv(pattern: str) -> seqio.Task:
  """Returns `classification` of .csv files."""
  return classification(f'csv:{pattern}', name='imdb_csv')


def _cola_features(dataset: tf.data.Dataset) -> tf.data.Dataset:
  return dataset.map(
    lambda x: {'inputs': x['sentence'], 'label': tf.cast(x['label'], tf.int32)},
    num_parallel_calls=tf.data.AUTOTUNE,
  )


builtin.register(
  builtin.make_task(
    'python_source_classification',
    source=seqio_sources.LabelledSource(python_snippets, splits=('train', 'validation')),
    preprocessors=PREPROCESSORS,
    output_features=features(PACKAGES),
  )
)

# GLUE does not publish the labels of its test split (they are all -1), so it is left out here.
# `read_only`: a training run on many hosts must not start many downloads.
builtin.register(
  builtin.make_task(
    'cola',
    source=seqio.TfdsDataSource('glue/cola:2.0.0', splits=('train', 'validation'), read_only=True),
    preprocessors=(_cola_features, *PREPROCESSORS),
    output_features=features(labelled_tables.COLA_CLASSES),
  )
)


def _stsb_features(dataset: tf.data.Dataset) -> tf.data.Dataset:
  return dataset.map(
    lambda x: {
      'inputs': x['sentence1'],
      'text2': x['sentence2'],
      'score': tf.cast(tf.round(x['label'] * SCORE_UNIT), tf.int32),
    },
    num_parallel_calls=tf.data.AUTOTUNE,
  )


builtin.register(
  builtin.make_task(
    'stsb',
    source=seqio.TfdsDataSource('glue/stsb:2.0.0', splits=('train', 'validation'), read_only=True),
    preprocessors=(_stsb_features, builtin.TOKENIZE, frame_pairs),
    output_features={**builtin.features('inputs'), 'score': _SCORE},
  )
)

OWN_TASKS = ('python_source_classification', 'cola', 'stsb')
# Registered task -> source of the same data in files, for users who cannot prepare TFDS.
FROM_FILES: Mapping[str, str] = {
  'cola': 'cola_tsv:FOLDER/*.tsv',
  'stsb': 'regression:tsv:FOLDER/*.tsv#text=sentence1,text2=sentence2,label=score',
}
PATTERN_TASKS: Mapping[str, Callable[[str], seqio.Task]] = {
  'cola_tsv': cola_tsv,
  'classification': classification,
  'imdb_csv': imdb_csv,
  'multi_label': multi_label,
  'token_classification': token_classification,
  'regression': regression,
  'sentence_pairs': sentence_pairs,
}
