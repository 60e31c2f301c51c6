"""Labelled texts from .csv, .tsv, .jsonl and Parquet files with columns of any name. No TF.

classification:csv:reviews/*.csv                                  columns text, label
classification:jsonl:reviews.jsonl#text=body,label=stars
classification:parquet:nli/*.parquet#text=premise,text2=hypothesis,label=gold_label
multi_label:jsonl:topics.jsonl                                    columns text, labels (a list)
token_classification:jsonl:conll/*.jsonl                          columns tokens, tags (lists)
regression:csv:essays.csv#text=essay,label=grade                  columns text, label (a number)
sentence_pairs:csv:pairs.csv                        columns anchor, positive, negative or score

`parse` returns the reader of such a spelling; `labelled_texts` returns all rows by split. Labelled
data is small compared to pretraining text (IMDb: 66 MB), so it is read and checked in full at
startup: an invalid row is reported immediately, with file, line and column, not in the third epoch.
"""

import dataclasses
import functools
import hashlib
import io
import logging
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn, Optional, Union

import pyarrow as pa

from t5x_gpu.data.features import SCORE_UNIT
from t5x_gpu.data.sources.column_formats import PARQUET, parquet_records
from t5x_gpu.data.sources.discovery import VALIDATION_ONE_IN, unreadable
from t5x_gpu.data.sources.json_lines import json_object
from t5x_gpu.data.sources.line_formats import csv_records
from t5x_gpu.data.sources.rows import NAME, limited_lines, open_text, split_columns
from t5x_gpu.errors import DataError, did_you_mean, first_line, listed
from t5x_gpu.storage.files import is_missing
from t5x_gpu.storage.json_schema import Json

LARGEST_SCORE = 200_000  # in ten-thousandths, fits into 4 bytes
_SEPARATOR = ','  # between the labels in a field of .csv and .tsv


def _refuse_field(what: str, *, fix: str) -> NoReturn:
  raise DataError(what, fix=fix, parameters=NAME, docs='tasks.md#your-own-classification-data')


def cell_listed(value: object, column: str, where: str) -> list[object]:
  """Returns a list of labels: a list, or names separated by commas, as in .csv."""
  value = value.decode() if isinstance(value, bytes) else value
  if isinstance(value, str):
    return [name for name in value.split(_SEPARATOR) if name.strip()]
  if isinstance(value, list):
    return value
  _refuse_field(
    f'{where} has {str(value)[:40]} in {column!r}, which is not a list of labels.',
    fix='Write a list of names; in .csv and .tsv, names separated by commas. An empty list is a '
    'row without a label.',
  )


def cell_text(value: object, column: str, where: str) -> str:
  """Returns a non-empty text."""
  value = value.decode() if isinstance(value, bytes) else value
  if value is None or isinstance(value, str) and not value.strip():
    _refuse_field(f'{where} has no text in {column!r}.', fix='Fill it in, or remove the row.')
  if not isinstance(value, str):
    _refuse_field(
      f'{where} has {type(value).__name__} {str(value)[:40]!r} in {column!r}, not a text.',
      fix='Name the columns after the pattern: #text=COLUMN,label=COLUMN.',
    )
  return _checked(value, column, where)


def _checked(value: str, column: str, where: str) -> str:
  """Returns a text that UTF-8 can encode."""
  try:
    value.encode()
  except UnicodeEncodeError as e:
    _refuse_field(
      f'{where} has half of a surrogate pair in {column!r}, which is not a character: {e}.',
      fix='Correct or remove that row.',
    )
  return value


def cell_label(value: object, column: str, where: str) -> str:
  """Returns the name of a class: words unchanged, whole numbers as digits, true or false."""
  value = value.decode() if isinstance(value, bytes) else value
  if value is None or value != value or isinstance(value, str) and not value.strip():  # NaN
    _refuse_field(
      f'{where} has no label in {column!r}.',
      fix='Fill it in, or remove the row. Leave files without labels out of the pattern.',
    )
  if isinstance(value, str):
    return _checked(value.strip(), column, where)
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, int) or isinstance(value, float) and value.is_integer():
    return str(int(value))
  _refuse_field(
    f'{where} has {str(value)[:40]} in {column!r}; a class is a word or a whole number.',
    fix='Choose the column with the classes, or turn its values into classes.',
  )


def cell_score(value: object, column: str, where: str, *, least: int = 0) -> str:
  """Returns a number from `least` to `LARGEST_SCORE`, in ten-thousandths."""
  value = value.decode() if isinstance(value, bytes) else value
  try:
    number = math.nan if isinstance(value, bool) else float(value)
  except (TypeError, ValueError, OverflowError):
    number = math.nan
  if not least <= number <= LARGEST_SCORE:  # NaN fails
    _refuse_field(
      f'{where} has {str(value)[:40]!r} in {column!r}, not a number from {least:,} to '
      f'{LARGEST_SCORE:,}.',
      fix='Correct it, or scale all numbers.'
      if least
      else 'Give a score that is higher for more similar texts.',
    )
  return str(round(number * SCORE_UNIT))


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
  texts: Mapping[str, Sequence[object]]
  labels: Mapping[str, Sequence[object]]
  texts2: Optional[Mapping[str, Sequence[str]]] = None


def _refuse(what: str, *, fix: str) -> NoReturn:
  raise DataError(what, fix=fix, parameters=NAME)


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
  label: Callable[[LabelledRow], object],
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

  def numbered(row: LabelledRow) -> int | list[int]:
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


@dataclasses.dataclass(frozen=True)
class _Kind:
  """The columns of one kind of rows.

  Attributes:
    usual: default names, matched in upper or lower case; also the names to use after `#`.
    more: further names after `#` -> field of `LabelColumns`.
    finds_more: whether the names in `more` are also found without `#`.
  """

  usual: tuple[tuple[str, str], ...]
  more: Mapping[str, str]
  finds_more: bool = False

  @property
  def how(self) -> str:
    """Returns how to choose columns."""
    first = ','.join(f'{name}=COLUMN' for name in self.usual[0])
    more = ''.join(f' (and optionally {name}=COLUMN)' for name in self.more)
    return f'Name the columns after the pattern: #{first}{more}.'


_PAIRS = {'text2': 'text2'}
KINDS = {
  'classification': _Kind((('text', 'label'), ('review', 'sentiment')), _PAIRS),
  'multi_label': _Kind((('text', 'labels'),), _PAIRS),
  'token_classification': _Kind(
    (('tokens', 'tags'), ('tokens', 'ner_tags'), ('words', 'tags')), {}
  ),
  'regression': _Kind((('text', 'label'), ('text', 'score')), _PAIRS),
  'sentence_pairs': _Kind(
    (('anchor', 'positive'), ('sentence1', 'sentence2')),
    {'negative': 'text2', 'score': 'score'},
    finds_more=True,
  ),
}

# Values of a row by column, and file and position of the row.
_Record = tuple[Json, str]


@dataclasses.dataclass(frozen=True)
class LabelColumns:
  """Names of columns.

  Attributes:
    text: column of the text, the words, or the first text of a sentence pair.
    label: column of the label, labels or tags, or the second text of a sentence pair.
    text2: column of the second text of a pair with a label, or of the hard negative; or None.
    score: column of the score of a sentence pair, or None.
  """

  text: str
  label: str
  text2: Optional[str] = None
  score: Optional[str] = None

  @property
  def names(self) -> tuple[str, ...]:
    names = (self.text, self.text2, self.label, self.score)
    return tuple(name for name in names if name is not None)


@dataclasses.dataclass(frozen=True)
class LabelledReader:
  """Reads the rows of one file. Readers compare equal if they read the same columns.

  Attributes:
    form: a key of `FORMS`.
    columns: None to find columns by their usual names.
    kind: 'classification', one label per row; 'multi_label', any number of labels;
      'token_classification', a list of words and a list of their tags; 'regression', a number per
      row; or 'sentence_pairs', two texts, optionally with a third (a hard negative) or a score.
  """

  form: str
  columns: Optional[LabelColumns]
  kind: str = 'classification'

  def __call__(self, path: str) -> list[LabelledRow]:
    """Returns all rows. Raises DataError, naming file and row, if a row is invalid."""
    try:
      rows = [
        _labelled_row(values, columns, where, kind=self.kind)
        for values, columns, where in self._records(path)
      ]
    except UnicodeDecodeError as e:
      _refuse_field(f'{path} is not UTF-8 text: {e}.', fix='Save it as UTF-8.')
    except (OSError, EOFError, zlib.error, pa.ArrowException) as e:
      if isinstance(e, OSError) and not is_missing(e):
        raise unreadable(path, e) from e
      _refuse_field(
        f'{path} cannot be read as {self.form}: {first_line(e)[:200]}.',
        fix='Get the file again, or leave it out of the pattern.',
      )
    if not rows:
      _refuse_field(f'{path} has no rows.', fix='Give files with one row per example.')
    return rows

  def _records(self, path: str) -> Iterator[tuple[Json, LabelColumns, str]]:
    columns = None
    for values, where in FORMS[self.form](path, self.columns, self.kind):
      # JSON objects may differ from line to line; tables have one header.
      if columns is None or self.form == 'jsonl':
        columns = _columns(list(values), self.columns, self.kind, where)
      yield values, columns, where


def parse(spelled: str, *, kind: str = 'classification') -> tuple[LabelledReader, str]:
  """Returns reader and pattern of 'FORM:PATTERN' or 'FORM:PATTERN#text=COLUMN,label=COLUMN'.

  Args:
    spelled: the part after the name of the task.
    kind: see `LabelledReader`.
  Raises:
    DataError: the form is unknown, or the columns are not a text and a label.
  """
  (text, label), more = KINDS[kind].usual[0], KINDS[kind].more
  form, _, rest = spelled.partition(':')
  if form not in FORMS or not rest:
    _refuse_field(
      f'{kind}:{spelled[:80]} does not name the form of the files.' + did_you_mean(form, FORMS),
      fix=f'Write {kind}:FORM:PATTERN, where FORM is {", ".join(FORMS)}.',
    )
  pattern, chosen = split_columns(rest)
  if chosen is None:
    return LabelledReader(form, None, kind), pattern
  named, names = dict(chosen), (text, *more, label)
  if (
    len(named) != len(chosen)
    or not {text, label} <= set(named) <= set(names)
    or not all(named.values())
    or len(set(named.values())) != len(named)
  ):
    wrong = next((name for name in named if name not in names), '')
    _refuse_field(
      f'#{",".join(map("=".join, chosen))}'
      + f' does not choose a {text} and a {label}.'.replace(' a a', ' an a')
      + (did_you_mean(wrong, names) if wrong else ''),
      fix=KINDS[kind].how,
    )
  others = {field: named[name] for name, field in more.items() if name in named}
  return LabelledReader(form, LabelColumns(named[text], named[label], **others), kind), pattern


def _columns(
  names: Sequence[str], chosen: Optional[LabelColumns], kind: str, where: str
) -> LabelColumns:
  """Returns the columns to read among `names`."""
  if chosen is None:
    lower = [name.lower() for name in names]
    found = {name: names[i] for i, name in enumerate(lower) if lower.count(name) == 1}
    for usual in KINDS[kind].usual:
      if set(usual) <= found.keys():
        more = KINDS[kind].more if KINDS[kind].finds_more else {}
        others = {field: found[name] for name, field in more.items() if name in found}
        return LabelColumns(*(found[name] for name in usual), **others)
    chosen = LabelColumns(*KINDS[kind].usual[0])
  for name in chosen.names:
    if (count := list(names).count(name)) != 1:
      have = ', '.join(listed(list(map(repr, names)), 20))
      _refuse_field(
        f'{where} has '
        + (f'no column {name!r}' if not count else f'{count} columns {name!r}')
        + f': it has {have or "none"}.'
        + ('' if count else did_you_mean(name, names)),
        fix=KINDS[kind].how,
      )
  return chosen


def _labelled_row(values: Json, columns: LabelColumns, where: str, *, kind: str) -> LabelledRow:
  if kind == 'token_classification':
    return _tagged_words(values, columns, where)
  if kind == 'sentence_pairs':
    return _scored_texts(values, columns, where)
  text = cell_text(values[columns.text], columns.text, where)
  text2 = None if columns.text2 is None else cell_text(values[columns.text2], columns.text2, where)
  found, column = values[columns.label], columns.label
  if kind == 'classification':
    labels = (cell_label(found, column, where),)
  elif kind == 'regression':
    labels = (cell_score(found, column, where, least=-LARGEST_SCORE),)
  else:
    labels = tuple(
      dict.fromkeys(cell_label(x, column, where) for x in cell_listed(found, column, where))
    )
  return LabelledRow(text, labels, where, text2)


def _tagged_words(values: Json, columns: LabelColumns, where: str) -> LabelledRow:
  words, tags = values[columns.text], values[columns.label]
  for found, column in ((words, columns.text), (tags, columns.label)):
    if not isinstance(found, list) or not found:
      _refuse_field(
        f'{where} has {str(found)[:40]!r} in {column!r}, not a list with an item per word.',
        fix='Write {"tokens": ["Ada", "wrote"], "tags": ["B-PER", "O"]}, as jsonl or Parquet.',
      )
  if len(words) != len(tags):
    _refuse_field(
      f'{where} has {len(words)} words in {columns.text!r} and {len(tags)} tags in '
      f'{columns.label!r}.',
      fix='Give each word one tag.',
    )
  return LabelledRow(
    tuple(cell_text(word, columns.text, where) for word in words),
    tuple(cell_label(tag, columns.label, where) for tag in tags),
    where,
  )


def _scored_texts(values: Json, columns: LabelColumns, where: str) -> LabelledRow:
  """Returns two or three texts; their one label is the score in ten-thousandths."""
  names = (columns.text, columns.label, *([columns.text2] if columns.text2 else []))
  texts = tuple(cell_text(values[name], name, where) for name in names)
  score = cell_score(values[columns.score], columns.score, where) if columns.score else '0'
  return LabelledRow(texts, (score,), where)


def _csv(path: str, columns: Optional[LabelColumns], kind: str, *, form: str) -> Iterator[_Record]:
  names: list[str] = []
  for fields, where, _ in csv_records(path, form):
    if isinstance(fields, DataError):
      _refuse_field(fields.what, fix=fields.fix)
    if names and fields:
      yield dict(zip(names, fields)), where
    elif fields:
      names = fields
      _columns(names, columns, kind, where)


def _jsonl(path: str, columns: Optional[LabelColumns], kind: str) -> Iterator[_Record]:
  del columns, kind
  with io.TextIOWrapper(open_text(path), encoding='utf-8', newline='') as f:
    for number, line in enumerate(limited_lines(f, path), 1):
      if line.strip():
        where = f'{path}:{number}'
        try:
          record = json_object(line, where=where)
        except DataError as e:
          _refuse_field(e.what, fix=e.fix)
        yield record, where


def _parquet(path: str, columns: Optional[LabelColumns], kind: str) -> Iterator[_Record]:
  chosen = _columns(PARQUET.columns(path), columns, kind, path)
  for record, where in parquet_records(path, chosen.names):
    if isinstance(record, DataError):
      _refuse_field(record.what, fix=record.fix)
    yield record, where


FORMS: Mapping[str, Callable[[str, Optional[LabelColumns], str], Iterator[_Record]]] = {
  'csv': functools.partial(_csv, form='csv'),
  'tsv': functools.partial(_csv, form='tsv'),
  'jsonl': _jsonl,
  'parquet': _parquet,
}
