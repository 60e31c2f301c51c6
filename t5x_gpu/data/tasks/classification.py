"""Classification tasks: a text, and which of a few classes it is.

  python_source_classification   which standard-library package a snippet is from: on every machine
  cola                           is an English sentence acceptable: GLUE's CoLA through TFDS
  cola_tsv:PATTERN               the same from CoLA's own .tsv files for train and dev
  classification:FORM:PATTERN    .csv, .tsv, .jsonl or Parquet files with any columns, pairs too
  imdb_csv:PATTERN               classification:csv:PATTERN

Their features are 'inputs' [length] and 'label' [], whose vocabulary has the class names. Pairs of
texts also have 'token_types' [length]: 0 for the first text, 1 for the second.

python_source_classification is real text that is on every machine: names, idioms and comments
reveal the package, and training never sees the files of validation.
"""

import functools
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.data import features as features_lib
from t5x_gpu.data.sources import discovery, labelled_files, labelled_tables, seqio_sources
from t5x_gpu.data.sources.discovery import standard_library_files
from t5x_gpu.data.sources.labelled_tables import LabelledTexts
from t5x_gpu.data.tasks import builtin, objectives
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies.vocabularies import ClassVocabulary, end_id
from t5x_gpu.errors import DataError, task_error

# The 16 largest packages with several files, in Python 3.11 and later, on every distribution
# (Debian has separate packages for tkinter, lib2to3 and distutils). Sorted by class number.
PACKAGES = (
  'asyncio',
  'concurrent',
  'ctypes',
  'email',
  'html',
  'http',
  'importlib',
  'json',
  'logging',
  'multiprocessing',
  're',
  'unittest',
  'urllib',
  'wsgiref',
  'xml',
  'xmlrpc',
)
# With its end of sequence a snippet fills at most 256 byte tokens.
MAX_BYTES = 255
# The rest of a file is dropped if it is shorter.
MIN_BYTES = 32
# Files go to validation, in the order of a hash, until it has the first share of a package's bytes.
# A file that would exceed the second share stays in training.
VALIDATION_SHARE, MAX_VALIDATION_SHARE = 0.15, 0.45


def snippets_of(text: bytes) -> Iterator[bytes]:
  """Yields `text` in pieces of at most `MAX_BYTES`, cut at line ends; cuts longer lines anywhere.

  Pieces with fewer than `MIN_BYTES`, after stripping white space, are skipped.
  """
  piece = b''
  for line in text.splitlines(keepends=True):
    if piece and len(piece) + len(line) > MAX_BYTES:
      yield from _long_enough(piece)
      piece = b''
    piece += line
    while len(piece) > MAX_BYTES:
      yield from _long_enough(piece[:MAX_BYTES])
      piece = piece[MAX_BYTES:]
  yield from _long_enough(piece)


def _long_enough(piece: bytes) -> Iterator[bytes]:
  if len(piece.strip()) >= MIN_BYTES:
    yield piece


def split_files(sizes: dict[str, int]) -> set[str]:
  """Returns the validation files of a package, at least one, given file -> bytes."""
  total, taken = sum(sizes.values()), 0
  chosen: set[str] = set()
  for path in sorted(sizes, key=lambda path: hashlib.sha256(path.encode()).digest()):
    if taken >= VALIDATION_SHARE * total:
      break
    if taken + sizes[path] <= MAX_VALIDATION_SHARE * total:
      chosen.add(path)
      taken += sizes[path]
  return chosen or {min(sizes, key=lambda path: (sizes[path], path))}


def package_files() -> dict[str, list[str]]:
  """Returns package -> its .py files, sorted. Raises DataError if a package has fewer than two."""
  root = sysconfig.get_paths()['stdlib']
  found: dict[str, list[str]] = {package: [] for package in PACKAGES}
  for path in sorted(sum(standard_library_files().values(), [])):
    package = os.path.relpath(path, root).split(os.sep)[0]
    if package in found:
      found[package].append(path)
  if short := [package for package, files in found.items() if len(files) < 2]:
    raise task_error(
      f'python_source_classification reads {len(PACKAGES)} packages of the standard library; '
      f'{root} has fewer than two source files of: {", ".join(short)}.',
      fix='Use a Python with its whole library in source form, or your own data: '
      "MIXTURE_OR_TASK_NAME = 'classification:csv:FOLDER/*.csv'.",
    )
  return found


@functools.cache
def python_snippets() -> LabelledTexts:
  """Returns snippets of `PACKAGES` by split; each file is in one split.

  Raises:
    DataError: the interpreter does not have these packages in source form.
  """
  root = sysconfig.get_paths()['stdlib']
  texts: dict[str, list[str]] = {'train': [], 'validation': []}
  labels: dict[str, list[int]] = {'train': [], 'validation': []}
  for number, (_, files) in enumerate(package_files().items()):
    names = {os.path.relpath(path, root).replace(os.sep, '/'): path for path in files}
    held_back = split_files({name: os.path.getsize(path) for name, path in names.items()})
    for name, path in names.items():
      split = 'validation' if name in held_back else 'train'
      pieces = _texts(path)
      texts[split] += pieces
      labels[split] += [number] * len(pieces)
  return LabelledTexts(class_names=PACKAGES, texts=texts, labels=labels)


def _texts(path: str) -> Sequence[str]:
  with open(path, 'rb') as f:
    # A line that is longer than a snippet may be cut inside a character.
    return [piece.decode(errors='replace') for piece in snippets_of(f.read())]


def frame_inputs(
  dataset: tf.data.Dataset,
  sequence_length: Optional[Mapping[str, int]],
  output_features: Mapping[str, seqio.Feature],
) -> tf.data.Dataset:
  """Yields {'inputs': [CLS] if there is one, the first tokens that fit, the end id, 'label'}."""
  feature = output_features['inputs']
  room = _room(sequence_length, taken=objectives.frame_size(feature))
  return dataset.map(
    lambda x: {'inputs': objectives.framed(x['inputs'][:room], feature), 'label': x['label']},
    num_parallel_calls=tf.data.AUTOTUNE,
  )


def frame_pairs(
  dataset: tf.data.Dataset,
  sequence_length: Optional[Mapping[str, int]],
  output_features: Mapping[str, seqio.Feature],
) -> tf.data.Dataset:
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
    return {
      'inputs': inputs,
      'label': x['label'],
      features_lib.TOKEN_TYPES: tf.concat(
        [tf.zeros([tf.size(inputs) - num_second], tf.int32), tf.ones([num_second], tf.int32)], 0
      ),
    }

  return dataset.map(framed, num_parallel_calls=tf.data.AUTOTUNE)


def pair_lengths(first: Any, second: Any, room: int) -> tuple[Any, Any]:
  """Returns how many of `first` and `second` tokens (ints or scalar tensors) to keep in `room`."""
  at_most = tf.maximum if tf.is_tensor(first) else max
  at_least = tf.minimum if tf.is_tensor(first) else min
  first = at_least(first, at_most(room - second, (room + 1) // 2))
  return first, at_least(second, room - first)


def _room(sequence_length: Optional[Mapping[str, int]], *, taken: int) -> Optional[int]:
  """Returns how many tokens of text fit, given `taken` special ids; None for any number."""
  length = (sequence_length or {}).get('inputs')
  room = None if length is None else length - taken
  if room is not None and room < 1:
    raise DataError(
      f"'inputs' has length {length}; each text also needs {taken} special ids.",
      fix="Set TASK_FEATURE_LENGTHS = {'inputs': 128}.",
      parameters=('DatasetConfig.task_feature_lengths',),
    )
  return room


def features(class_names: Sequence[str]) -> dict[str, seqio.Feature]:
  """Returns the output features of a task with these classes; byte vocabulary."""
  label = seqio.Feature(vocabulary=ClassVocabulary(class_names), add_eos=False, rank=0)
  return {**builtin.features('inputs'), 'label': label}


PREPROCESSORS = (builtin.TOKENIZE, frame_inputs)


def _from_files(
  name: str,
  pattern: str,
  *,
  read: labelled_tables.Reader,
  class_names: Optional[Sequence[str]] = None,
) -> seqio.Task:
  files = discovery.matching_files(pattern)
  found = labelled_tables.labelled_texts(files, read=read, class_names=class_names)
  source = seqio_sources.LabelledSource(lambda: found, splits=tuple(found.texts), files=files)
  frame = frame_inputs if found.texts2 is None else frame_pairs
  return builtin.make_task(
    name,
    source=source,
    preprocessors=(builtin.TOKENIZE, frame),
    output_features=features(found.class_names),
  )


def cola_tsv(pattern: str) -> seqio.Task:
  """Returns CoLA from its own files. Raises DataError (file:line) for other files."""
  return _from_files(
    'cola_tsv', pattern, read=labelled_tables.read_cola, class_names=labelled_tables.COLA_CLASSES
  )


def classification(spelled: str, *, name: str = 'classification') -> seqio.Task:
  """Returns a classification task over texts, or pairs of texts, in files with any columns.

  Args:
    spelled: 'FORM:PATTERN', maybe followed by '#text=COLUMN,label=COLUMN', for pairs also
      'text2=COLUMN'.
    name: of the task; checkpoints record it.
  Raises:
    DataError: no such form, file or column, or a bad row (named by file and place).
  """
  reader, pattern = labelled_files.parse(spelled)
  return _from_files(name, pattern, read=reader)


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

OWN_TASKS = ('python_source_classification', 'cola')
# Registered task -> source of the same data in files, for those who cannot prepare TFDS.
FROM_FILES: Mapping[str, str] = {'cola': 'cola_tsv:FOLDER/*.tsv'}
PATTERN_TASKS: Mapping[str, Callable[[str], seqio.Task]] = {
  'cola_tsv': cola_tsv,
  'classification': classification,
  'imdb_csv': imdb_csv,
}
