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
'token_types' [length]: 0 for the first text, 1 for the second. The preprocessors `frame_*` make
these features of texts, pairs of texts and words; `python_snippets` cuts the standard library.
"""

import dataclasses
import functools
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Optional, TypeVar

from t5x_gpu.data.features import SCORE_UNIT, TOKEN_TYPES
from t5x_gpu.data.sources import discovery, labelled, seqio_sources
from t5x_gpu.data.sources.discovery import standard_library_files
from t5x_gpu.data.sources.labelled import LabelledTexts
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
# With its end-of-sequence token, a snippet has at most 256 byte tokens.
MAX_BYTES = 255
# The rest of a file is dropped if it is shorter.
MIN_BYTES = 32
# Files go to validation, in the order of a hash, until validation has the first share of a
# package's bytes. A file that would exceed the second share stays in training.
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

  Names, idioms and comments reveal the package.

  Raises:
    DataError: the interpreter's packages are not in source form.
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
      TOKEN_TYPES: tf.concat(
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


_Length = TypeVar('_Length', int, tf.Tensor)


def pair_lengths(first: _Length, second: _Length, room: int) -> tuple[_Length, _Length]:
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
  read: labelled.Reader,
  class_names: Optional[Sequence[str]] = None,
  label: str = 'label',
) -> seqio.Task:
  files = discovery.matching_files(pattern)
  found = labelled.labelled_texts(
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
    'cola_tsv', pattern, read=labelled.read_cola, class_names=labelled.COLA_CLASSES
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
  reader, pattern = labelled.parse(spelled)
  return _from_files(name, pattern, read=reader)


def multi_label(spelled: str) -> seqio.Task:
  """Returns a task of texts, or pairs of texts, with any number of labels; see `classification`.

  Args:
    spelled: 'FORM:PATTERN', optionally followed by '#text=COLUMN,labels=COLUMN'.
  Raises:
    DataError: as for `classification`.
  """
  reader, pattern = labelled.parse(spelled, kind='multi_label')
  return _from_files('multi_label', pattern, read=reader, label='labels')


def token_classification(spelled: str) -> seqio.Task:
  """Returns a task of words with tags.

  Args:
    spelled: 'FORM:PATTERN', optionally followed by '#tokens=COLUMN,tags=COLUMN'.
  Raises:
    DataError: as for `classification`.
  """
  reader, pattern = labelled.parse(spelled, kind='token_classification')
  return _from_files('token_classification', pattern, read=reader, label=TAGS)


def regression(spelled: str) -> seqio.Task:
  """Returns a task of texts, or pairs of texts, with a number each; see `classification`.

  Raises:
    DataError: as for `classification`; or the numbers of the training rows hardly differ.
  """
  reader, pattern = labelled.parse(spelled, kind='regression')
  files = discovery.matching_files(pattern)
  found = labelled.scored_texts(files, read=reader)
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
  reader, pattern = labelled.parse(spelled, kind='sentence_pairs')
  files = discovery.matching_files(pattern)
  found = labelled.scored_texts(files, read=reader)
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
    output_features=features(labelled.COLA_CLASSES),
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
