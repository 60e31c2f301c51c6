"""Labelled texts by split, from rows of files; errors name file and line. No TF.

A labelled data set is small compared to pretraining text (IMDb: 66 MB), so it is read and checked
in full at startup: an invalid row is reported immediately, not in the third epoch.
"""

import dataclasses
import functools
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Optional, Union

from t5x_gpu.data.sources.discovery import VALIDATION_ONE_IN
from t5x_gpu.errors import DataError, did_you_mean, listed

_NAME = ('DatasetConfig.mixture_or_task_name',)
# Word in a file name -> split of the file.
_SPLIT_WORDS = {
  'train': 'train',
  'training': 'train',
  'dev': 'validation',
  'val': 'validation',
  'valid': 'validation',
  'validation': 'validation',
  'test': 'test',
}
log = logging.getLogger(__name__)
COLA_CLASSES = ('unacceptable', 'acceptable')


@dataclasses.dataclass(frozen=True)
class LabelledRow:
  """A text and its labels as spelled in the file.

  Attributes:
    text: the text, or its words.
    labels: the class, all classes, or a tag for each word.
    where: file:line.
    text2: the second text of a pair.
  """

  text: Union[str, tuple[str, ...]]
  labels: tuple[str, ...]
  where: str
  text2: Optional[str] = None


@dataclasses.dataclass(frozen=True)
class LabelledTexts:
  """Labelled texts by split.

  Attributes:
    class_names: names in the order of the class numbers.
    texts: split -> texts; a text may be a tuple of words.
    labels: split -> class number, or list of class numbers, of each text.
    texts2: split -> the second texts of pairs; None without pairs.
  """

  class_names: tuple[str, ...]
  texts: Mapping[str, Sequence[Any]]
  labels: Mapping[str, Sequence[Any]]
  texts2: Optional[Mapping[str, Sequence[str]]] = None


def _refuse(what: str, *, fix: str) -> NoReturn:
  raise DataError(what, fix=fix, parameters=_NAME)


def files_by_split(files: Sequence[str]) -> Optional[dict[str, list[str]]]:
  """Returns split -> files, by the words train, dev, valid, validation, test in the file names.

  Returns None if no name has such a word; a hash of the text then assigns the split.

  Raises:
    DataError: only some names have such a word.
  """
  by_split: dict[str, list[str]] = {}
  unnamed = []
  for path in files:
    split = _split_of(path)
    if split is None:
      unnamed.append(path)
    else:
      by_split.setdefault(split, []).append(path)
  if by_split and unnamed:
    _refuse(
      f'The names of {len(files) - len(unnamed)} files give their split ('
      + ', '.join(os.path.basename(p) for p in sum(by_split.values(), [])[:4])
      + f'), the names of {len(unnamed)} do not: '
      + ', '.join(os.path.basename(p) for p in unnamed[:4])
      + '.',
      fix='Narrow the pattern, or put train, dev or test into each name. If no name has such a '
      f'word, 1 row in {VALIDATION_ONE_IN} goes to validation.',
    )
  return by_split or None


def clear_splits(files: Sequence[str]) -> Optional[dict[str, list[str]]]:
  """Returns split -> files if all names contain a split and some files are for training.

  Returns None otherwise; a hash then assigns the split.
  """
  splits = [_split_of(path) for path in files]
  if None not in splits and 'train' in splits:
    return files_by_split(files)
  warn_of_splits(files)
  return None


def warn_of_splits(files: Sequence[str]) -> None:
  """Warns that a hash assigns the split, if the names of files say train and validation or test."""
  splits = [_split_of(path) for path in files]
  held_out = [path for path, split in zip(files, splits) if split not in (None, 'train')]
  if held_out and 'train' in splits:
    log.warning(
      'a hash assigns the texts to splits, so training also reads %d of the %d files that have '
      'validation or test in their names; narrow the pattern to leave them out: %s',
      len(held_out),
      len(files),
      ', '.join(listed(held_out, 3)),
    )


def _split_of(path: str) -> Optional[str]:
  words = re.split(r'[^a-z]+', os.path.basename(path).lower())
  return next((_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS), None)


def read_cola(path: str) -> list[LabelledRow]:
  """Returns the rows of a .tsv file of CoLA: source, label 0 or 1, author's mark, sentence.

  Raises:
    DataError, with file:line: a wrong number of columns, an unknown label, no sentence, or no rows.
  """
  rows = []
  try:
    with open(path, encoding='utf-8') as f:
      lines = f.read().split('\n')
  except UnicodeDecodeError as e:
    _refuse(f'{path} is not UTF-8 text: {e}.', fix='Save it as UTF-8.')
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    where, fields = f'{path}:{number}', line.rstrip('\r').split('\t')
    if len(fields) != 4:
      _refuse(
        f'{where} has {len(fields)} columns; CoLA has 4: source, label, mark, sentence. It '
        f'begins {line[:60]!r}.',
        fix="Separate the columns by single tabs; the mark is '*' or empty. GLUE's test file has "
        'no labels: give only the files for train and dev.',
      )
    if fields[1] not in ('0', '1'):
      _refuse(
        f'{where} has the label {fields[1]!r}; CoLA has 0 (unacceptable) and 1 (acceptable).',
        fix='Correct or remove that line.',
      )
    if not fields[3].strip():
      _refuse(f'{where} has no text.', fix='Fill it in, or remove the row.')
    rows.append(LabelledRow(fields[3], (COLA_CLASSES[int(fields[1])],), where))
  if not rows:
    _refuse(
      f'{path} has no rows: it is empty.',
      fix="Give CoLA's training file, or one of the same format.",
    )
  return rows


# Path -> rows.
Reader = Callable[[str], Sequence[LabelledRow]]


@functools.lru_cache(maxsize=8)  # training, evaluation and class names open the same files
def _read(read: Reader, path: str, size: int, modified_ns: int) -> tuple[LabelledRow, ...]:
  del size, modified_ns  # keys of the cache: a changed file is read again
  return tuple(read(path))


def _rows_by_split(files: Sequence[str], read: Reader) -> dict[str, list[LabelledRow]]:
  """Returns split -> rows by file names; does not split off a validation set yet."""
  by_split = files_by_split(files) or {'train': list(files)}
  if 'train' not in by_split:
    _refuse(
      f'There is no file for training: {", ".join(os.path.basename(f) for f in files[:6])}.',
      fix='Widen the pattern so that it matches a file with train in its name.',
    )
  return {
    split: [
      row
      for path in paths
      for row in _read(read, path, os.path.getsize(path), os.stat(path).st_mtime_ns)
    ]
    for split, paths in by_split.items()
  }


def _with_validation(rows: dict[str, list[LabelledRow]]) -> dict[str, list[LabelledRow]]:
  if 'validation' in rows:
    return rows
  train = rows['train']
  return rows | {
    'train': [r for r in train if not _is_validation(r.text)],
    'validation': [r for r in train if _is_validation(r.text)],
  }


def scored_texts(files: Sequence[str], *, read: Reader) -> LabelledTexts:
  """Returns texts, or tuples of texts, by split, as `labelled_texts`; labels are scores."""
  return _by_split(
    _with_validation(_rows_by_split(files, read)), label=lambda row: int(row.labels[0])
  )


def _by_split(
  rows: Mapping[str, Sequence[LabelledRow]],
  *,
  label: Callable[[LabelledRow], Any],
  class_names: tuple[str, ...] = (),
) -> LabelledTexts:
  if not rows['train']:
    _refuse(
      'All rows were held out for validation: there are too few.',
      fix='Give more rows, or put train and dev into the names of the files.',
    )
  is_pair = rows['train'][0].text2 is not None
  return LabelledTexts(
    class_names=class_names,
    texts={split: [r.text for r in some] for split, some in rows.items()},
    labels={split: [label(r) for r in some] for split, some in rows.items()},
    texts2={split: [r.text2 for r in some] for split, some in rows.items()} if is_pair else None,
  )


def labelled_texts(
  files: Sequence[str],
  *,
  read: Reader,
  class_names: Optional[Sequence[str]] = None,
  several: bool = False,
) -> LabelledTexts:
  """Returns all rows of `files` by split.

  The file names determine the split (`files_by_split`). Without a validation file, a hash of the
  text assigns about 1 row in 20 to validation.

  Args:
    files: paths.
    read: reads a file; equal readers share a cache.
    class_names: class names in order. None to use the labels of the training rows; numbers in
      numerical order, words in alphabetical order.
    several: whether rows have any number of labels.
  Raises:
    DataError: an invalid row; fewer than two classes; a label that is not in the training rows.
  """
  rows = _rows_by_split(files, read)
  used = {label: row for row in reversed(rows['train']) for label in row.labels}
  names = tuple(class_names or _sorted(used))
  if len(used) < 2:
    only = next((f'the label {label!r} (first in {row.where})' for label, row in used.items()), '')
    _refuse(
      f'All {len(rows["train"])} training rows have {only or "no label"}; a classifier needs at '
      'least two classes.',
      fix='Give files with rows of at least two classes.',
    )
  rows = _with_validation(rows)
  numbers = {name: i for i, name in enumerate(names)}
  for row in (row for split in rows.values() for row in split):
    if unknown := [label for label in row.labels if label not in numbers]:
      _refuse(
        f'{row.where} has the label {unknown[0]!r}, which no training row has; they have '
        + ', '.join(map(repr, names[:12]))
        + ('' if len(names) <= 12 else ', ...')
        + '.'
        + did_you_mean(unknown[0], names),
        fix='Correct the label, or add training rows of that class.',
      )

  def numbered(row: LabelledRow) -> Any:
    found = [numbers[label] for label in row.labels]
    return found if several else found[0]

  return _by_split(rows, label=numbered, class_names=names)


def _sorted(labels: Iterable[str]) -> list[str]:
  if all(re.fullmatch(r'-?\d+', label) for label in labels):
    return sorted(labels, key=lambda label: (int(label), label))
  if all(re.fullmatch(r'[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?', label) for label in labels):
    return sorted(labels, key=lambda label: (float(label), label))
  return sorted(labels)


def _is_validation(text: Union[str, tuple[str, ...]]) -> bool:
  text = text if isinstance(text, str) else ' '.join(text)
  number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], 'big')
  return number % VALIDATION_ONE_IN == 0
