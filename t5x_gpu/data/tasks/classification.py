"""Classification tasks: a text, and which of a few classes it is.

  python_source_classification   which standard-library package a snippet is from: on every machine
  cola                           is an English sentence acceptable: GLUE's CoLA through TFDS
  cola_tsv:PATTERN               the same from CoLA's own .tsv files for train and dev
  classification:FORM:PATTERN    .csv, .tsv, .jsonl or Parquet files with any columns, pairs too
  imdb_csv:PATTERN               classification:csv:PATTERN
  multi_label:FORM:PATTERN       the same files with any number of labels per row
  token_classification:FORM:...  words, and a tag for each: .jsonl or Parquet
  sentence_pairs:FORM:PATTERN    two texts that belong together, for sentence embeddings

Their features are 'inputs' [length] and 'label' [], whose vocabulary has the class names, or
'labels' [number of labels]. Pairs of texts also have 'token_types' [length]: 0 for the first text,
1 for the second.

python_source_classification is real text that is on every machine: names, idioms and comments
reveal the package, and training never sees the files of validation.
"""

import dataclasses
import functools
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Optional

from t5x_gpu.data.sources import discovery, labelled_files, labelled_tables, seqio_sources
from t5x_gpu.data.sources.discovery import standard_library_files
from t5x_gpu.data.sources.labelled_tables import LabelledTexts
from t5x_gpu.data.tasks import builtin
from t5x_gpu.data.tasks.framing import TAGS, frame_inputs, frame_pairs, frame_text_sets, frame_words
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies.vocabularies import ClassVocabulary
from t5x_gpu.errors import task_error

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


def features(class_names: Sequence[str], *, label: str = 'label') -> dict[str, seqio.Feature]:
  """Returns the output features of a task with these classes; byte vocabulary.

  Args:
    class_names: in the order of their numbers.
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


def multi_label(spelled: str) -> seqio.Task:
  """Returns a task of texts, or pairs of texts, with any number of labels; see `classification`.

  Args:
    spelled: 'FORM:PATTERN', maybe followed by '#text=COLUMN,labels=COLUMN'.
  Raises:
    DataError: as for `classification`.
  """
  reader, pattern = labelled_files.parse(spelled, kind='multi_label')
  return _from_files('multi_label', pattern, read=reader, label='labels')


def token_classification(spelled: str) -> seqio.Task:
  """Returns a task of words with tags.

  Args:
    spelled: 'FORM:PATTERN', maybe followed by '#tokens=COLUMN,tags=COLUMN'.
  Raises:
    DataError: as for `classification`.
  """
  reader, pattern = labelled_files.parse(spelled, kind='token_classification')
  return _from_files('token_classification', pattern, read=reader, label=TAGS)


def sentence_pairs(spelled: str) -> seqio.Task:
  """Returns a task of texts that belong together, maybe with a hard negative or a score.

  Args:
    spelled: 'FORM:PATTERN', maybe followed by '#anchor=COLUMN,positive=COLUMN,negative=COLUMN'.
  Raises:
    DataError: as for `classification`.
  """
  reader, pattern = labelled_files.parse(spelled, kind='sentence_pairs')
  files = discovery.matching_files(pattern)
  found = labelled_tables.text_sets(files, read=reader)
  numbers = seqio.Feature(seqio.PassThroughVocabulary(2**31 - 1), add_eos=False)
  return builtin.make_task(
    'sentence_pairs',
    source=seqio_sources.LabelledSource(
      lambda: found, splits=tuple(found.texts), files=files, label='score'
    ),
    preprocessors=(frame_text_sets,),
    output_features={
      **builtin.features('inputs'),
      'segments': numbers,
      'places': numbers,
      'score': dataclasses.replace(numbers, rank=0),
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

OWN_TASKS = ('python_source_classification', 'cola')
# Registered task -> source of the same data in files, for those who cannot prepare TFDS.
FROM_FILES: Mapping[str, str] = {'cola': 'cola_tsv:FOLDER/*.tsv'}
PATTERN_TASKS: Mapping[str, Callable[[str], seqio.Task]] = {
  'cola_tsv': cola_tsv,
  'classification': classification,
  'imdb_csv': imdb_csv,
  'multi_label': multi_label,
  'token_classification': token_classification,
  'sentence_pairs': sentence_pairs,
}
