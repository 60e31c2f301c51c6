"""Tables of text and labels: .csv and .tsv files into rows, flaws named by file and line; no TF.

A labelled data set is small next to the text that models are pretrained on (IMDb: 66 MB), so it is
read whole and checked whole when it is opened: a wrong row does not wait for the third epoch.
"""

import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, Optional

from t5x_gpu.data.sources.discovery import VALIDATION_ONE_IN
from t5x_gpu.errors import DataError, did_you_mean

_NAME = ('DatasetConfig.mixture_or_task_name',)
# Words in a file's name -> the split that it belongs to.
_SPLIT_WORDS = {
  'train': 'train',
  'training': 'train',
  'dev': 'validation',
  'val': 'validation',
  'valid': 'validation',
  'validation': 'validation',
  'test': 'test',
}
COLA_CLASSES = ('unacceptable', 'acceptable')


@dataclasses.dataclass(frozen=True)
class LabelledRow:
  """A text and its label as the file spells it; `where` is file:line; `text2` completes a pair."""

  text: str
  label: str
  where: str
  text2: Optional[str] = None


@dataclasses.dataclass(frozen=True)
class LabelledTexts:
  """Labelled texts by split.

  Attributes:
    class_names: names in the order of their numbers.
    texts: split -> texts.
    labels: split -> class numbers, as many.
    texts2: split -> the second texts of pairs, as many; None without pairs.
  """

  class_names: tuple[str, ...]
  texts: Mapping[str, Sequence[str]]
  labels: Mapping[str, Sequence[int]]
  texts2: Optional[Mapping[str, Sequence[str]]] = None


def _refuse(what: str, *, fix: str) -> NoReturn:
  raise DataError(what, fix=fix, parameters=_NAME)


def files_by_split(files: Sequence[str]) -> Optional[dict[str, list[str]]]:
  """Returns split -> files, by the words train, dev, valid, validation, test in the file names.

  None: no name has such a word, so that a hash of the text should deal the rows.

  Raises:
    DataError: some names have one and some have not.
  """
  by_split: dict[str, list[str]] = {}
  unnamed = []
  for path in files:
    words = re.split(r'[^a-z]+', os.path.basename(path).lower())
    split = next((_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS), None)
    if split is None:
      unnamed.append(path)
    else:
      by_split.setdefault(split, []).append(path)
  if by_split and unnamed:
    _refuse(
      f'The names of {len(files) - len(unnamed)} files say their split ('
      + ', '.join(os.path.basename(p) for p in sum(by_split.values(), [])[:4])
      + f'), those of {len(unnamed)} do not: '
      + ', '.join(os.path.basename(p) for p in unnamed[:4])
      + '.',
      fix='Narrow the pattern, or put train, dev or test into each name. Where no name has '
      f'such a word, 1 row in {VALIDATION_ONE_IN} goes to validation.',
    )
  return by_split or None


def _labelled(text: str, label: str, where: str) -> LabelledRow:
  if not text.strip() or not label:
    _refuse(
      f'{where} has no {"label" if text.strip() else "text"}.', fix='Fill it in, or remove the row.'
    )
  return LabelledRow(text, label, where)


def read_cola(path: str) -> list[LabelledRow]:
  """Returns the rows of a .tsv as CoLA has it: source, label 0 or 1, author's mark, sentence.

  Raises:
    DataError: naming file:line: another number of columns, another label, no sentence, no rows.
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
        fix="Separate the columns with single tabs; the mark is '*' or empty. GLUE's test "
        'file has no labels: give those for train and dev alone.',
      )
    if fields[1] not in ('0', '1'):
      _refuse(
        f'{where} has the label {fields[1]!r}; CoLA has 0 (unacceptable) and 1 (acceptable).',
        fix='Mend or remove that line.',
      )
    rows.append(_labelled(fields[3], COLA_CLASSES[int(fields[1])], where))
  if not rows:
    _refuse(
      f'{path} has no rows: it is empty.', fix="Give CoLA's file for training, or one of its form."
    )
  return rows


# Path -> rows.
Reader = Callable[[str], Sequence[LabelledRow]]


@functools.lru_cache(maxsize=8)  # of what training, evaluation and class names all open
def _read(read: Reader, path: str, size: int, modified_ns: int) -> tuple[LabelledRow, ...]:
  del size, modified_ns  # tell a changed file from the one that was read
  return tuple(read(path))


def labelled_texts(
  files: Sequence[str], *, read: Reader, class_names: Optional[Sequence[str]] = None
) -> LabelledTexts:
  """Returns all rows of `files` by split.

  The file names say the split (`files_by_split`). Without a file for validation, a hash of the text
  puts about 1 row in 20 there.

  Args:
    files: paths.
    read: reads a file; equal ones share what they read.
    class_names: in order. None: the labels of the rows for training; whole numbers in their order,
      words in the alphabet's.
  Raises:
    DataError: a flaw in a file; fewer than two classes; a label that training does not have.
  """
  by_split = files_by_split(files) or {'train': list(files)}
  if 'train' not in by_split:
    _refuse(
      f'No file is for training: {", ".join(os.path.basename(f) for f in files[:6])}.',
      fix='Widen the pattern so that it takes a file with train in its name.',
    )
  rows = {}
  for split, paths in by_split.items():
    rows[split] = [
      row
      for path in paths
      for row in _read(read, path, os.path.getsize(path), os.stat(path).st_mtime_ns)
    ]
  names = tuple(class_names or _classes(rows['train']))
  if (found := len({row.label for row in rows['train']})) < 2:
    only = rows['train'][0]
    _refuse(
      f'All {len(rows["train"])} rows for training have the label {only.label!r} '
      f'(from {only.where}): {found} class leaves nothing to learn.',
      fix='Give files with rows of at least two classes.',
    )
  if 'validation' not in rows:
    rows |= {
      'train': [r for r in rows['train'] if not _is_validation(r.text)],
      'validation': [r for r in rows['train'] if _is_validation(r.text)],
    }
  numbers = {name: i for i, name in enumerate(names)}
  for row in (row for split in rows.values() for row in split):
    if row.label not in numbers:
      _refuse(
        f'{row.where} has the label {row.label!r}, which no row for training has; they have '
        + ', '.join(map(repr, names[:12]))
        + ('' if len(names) <= 12 else ', ...')
        + '.'
        + did_you_mean(row.label, names),
        fix='Mend the label, or give rows of that class for training too.',
      )
  is_pair = rows['train'][0].text2 is not None
  return LabelledTexts(
    class_names=names,
    texts2={split: [r.text2 for r in some] for split, some in rows.items()} if is_pair else None,
    texts={split: [r.text for r in some] for split, some in rows.items()},
    labels={split: [numbers[r.label] for r in some] for split, some in rows.items()},
  )


def _classes(rows: Sequence[LabelledRow]) -> list[str]:
  labels = {row.label for row in rows}
  if all(re.fullmatch(r'-?\d+', label) for label in labels):
    return sorted(labels, key=lambda label: (int(label), label))
  return sorted(labels)


def _is_validation(text: str) -> bool:
  number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], 'big')
  return number % VALIDATION_ONE_IN == 0


def pair_fields(line: bytes, *, where: str) -> list[bytes]:
  """Returns [inputs, targets] of a line with one tab. Raises DataError naming `where`."""
  fields = line.rstrip(b'\r').split(b'\t')
  if len(fields) != 2 or not all(field.strip() for field in fields):
    _refuse(
      f'{where} has {len(fields)} columns'
      + (', one of them empty' if len(fields) == 2 else '')
      + f'; a pair is inputs, one tab, targets. It begins {line[:60]!r}.',
      fix='Mend or remove that line; the texts themselves hold no tab and no line break '
      '(write .jsonl with "inputs" and "targets" for such).',
    )
  return fields
