"""Labelled texts from .csv, .tsv, .jsonl and Parquet files with columns of any name. No TF.

classification:csv:reviews/*.csv                                  columns text, label
classification:jsonl:reviews.jsonl#text=body,label=stars
classification:parquet:nli/*.parquet#text=premise,text2=hypothesis,label=gold_label
"""

import dataclasses
import functools
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Optional

import pyarrow as pa
from pyarrow import parquet

from t5x_gpu.data.sources.json_lines import json_object
from t5x_gpu.data.sources.labelled_tables import LabelledRow
from t5x_gpu.data.sources.line_formats import csv_records
from t5x_gpu.data.sources.rows import NAME, open_text, split_columns
from t5x_gpu.errors import DataError, did_you_mean, first_line, listed

# Columns that are found by their usual names, in upper or lower case.
_USUAL = (('text', 'label'), ('review', 'sentiment'))
_CHOOSE = (
  'Name the columns after the pattern: #text=COLUMN,label=COLUMN, and for text pairs '
  '#text=COLUMN,text2=COLUMN,label=COLUMN.'
)

# Values of a row by column, and the place of the row.
_Record = tuple[Mapping[str, Any], str]


@dataclasses.dataclass(frozen=True)
class LabelColumns:
  """Names of columns; `text2` is for the second text of a pair, or None."""

  text: str
  label: str
  text2: Optional[str] = None

  @property
  def names(self) -> tuple[str, ...]:
    return tuple(name for name in (self.text, self.text2, self.label) if name is not None)


@dataclasses.dataclass(frozen=True)
class LabelledReader:
  """Reads the rows of one file. Readers compare equal if they read the same columns.

  Attributes:
    form: a key of `FORMS`.
    columns: None for those with the usual names.
  """

  form: str
  columns: Optional[LabelColumns]

  def __call__(self, path: str) -> list[LabelledRow]:
    """Returns all rows. Raises DataError, naming the place, if any is bad."""
    try:
      rows = [
        _labelled_row(values, columns, where) for values, columns, where in self._records(path)
      ]
    except UnicodeDecodeError as e:
      _refuse(f'{path} is not UTF-8 text: {e}.', fix='Save it as UTF-8.')
    except (OSError, EOFError, pa.ArrowException) as e:
      _refuse(
        f'{path} cannot be read as {self.form}: {first_line(e)[:200]}.',
        fix='Get the file again, or leave it out of the pattern.',
      )
    if not rows:
      _refuse(f'{path} has no rows.', fix='Give files with one row per example.')
    return rows

  def _records(self, path: str) -> Iterator[tuple[Mapping[str, Any], LabelColumns, str]]:
    columns = None
    for values, where in FORMS[self.form](path, self.columns):
      # JSON objects may differ from line to line; tables have one header.
      if columns is None or self.form == 'jsonl':
        columns = _columns(list(values), self.columns, where)
      yield values, columns, where


def parse(spelled: str) -> tuple[LabelledReader, str]:
  """Returns reader and pattern of 'FORM:PATTERN' or 'FORM:PATTERN#text=COLUMN,label=COLUMN'.

  Raises:
    DataError: no such form, or the columns are not a text and a label.
  """
  form, _, rest = spelled.partition(':')
  if form not in FORMS or not rest:
    _refuse(
      f'classification:{spelled[:80]} does not name the form of the files.'
      + did_you_mean(form, FORMS),
      fix=f'Write classification:FORM:PATTERN, where FORM is {", ".join(FORMS)}.',
    )
  pattern, chosen = split_columns(rest)
  if chosen is None:
    return LabelledReader(form, None), pattern
  named = dict(chosen)
  if (
    len(named) != len(chosen)
    or not {'text', 'label'} <= set(named) <= {'text', 'text2', 'label'}
    or not all(named.values())
    or len(set(named.values())) != len(named)
  ):
    wrong = next((name for name in named if name not in ('text', 'text2', 'label')), '')
    _refuse(
      f'#{",".join(map("=".join, chosen))} does not choose a text and a label.'
      + (did_you_mean(wrong, ('text', 'text2', 'label')) if wrong else ''),
      fix=_CHOOSE,
    )
  return LabelledReader(form, LabelColumns(**named)), pattern


def _refuse(what: str, *, fix: str) -> NoReturn:
  raise DataError(what, fix=fix, parameters=NAME, docs='tasks.md#your-own-classification-data')


def _columns(names: Sequence[str], chosen: Optional[LabelColumns], where: str) -> LabelColumns:
  """Returns the columns to read, out of `names`."""
  if chosen is None:
    lower = [name.lower() for name in names]
    for usual in _USUAL:
      if all(lower.count(name) == 1 for name in usual):
        return LabelColumns(*(names[lower.index(name)] for name in usual))
    chosen = LabelColumns(*_USUAL[0])
  for name in chosen.names:
    if (count := list(names).count(name)) != 1:
      have = ', '.join(listed(list(map(repr, names)), 20))
      _refuse(
        f'{where} has '
        + (f'no column {name!r}' if not count else f'{count} columns {name!r}')
        + f': it has {have or "none"}.'
        + ('' if count else did_you_mean(name, names)),
        fix=_CHOOSE,
      )
  return chosen


def _labelled_row(values: Mapping[str, Any], columns: LabelColumns, where: str) -> LabelledRow:
  text = _text(values[columns.text], columns.text, where)
  text2 = None if columns.text2 is None else _text(values[columns.text2], columns.text2, where)
  return LabelledRow(text, _label(values[columns.label], columns.label, where), where, text2)


def _text(value: Any, column: str, where: str) -> str:
  value = value.decode() if isinstance(value, bytes) else value
  if value is None or isinstance(value, str) and not value.strip():
    _refuse(f'{where} has no text in {column!r}.', fix='Fill it in, or remove the row.')
  if not isinstance(value, str):
    _refuse(
      f'{where} has {type(value).__name__} {str(value)[:40]!r} in {column!r}, not a text.',
      fix=_CHOOSE,
    )
  try:
    value.encode()
  except UnicodeEncodeError as e:
    _refuse(
      f'{where} has half of a surrogate pair in {column!r}, which is not a character: {e}.',
      fix='Correct or remove that row.',
    )
  return value


def _label(value: Any, column: str, where: str) -> str:
  """Returns the name of a class: words unchanged, whole numbers as digits, true or false."""
  value = value.decode() if isinstance(value, bytes) else value
  if value is None or value != value or isinstance(value, str) and not value.strip():  # NaN
    _refuse(
      f'{where} has no label in {column!r}.',
      fix='Fill it in, or remove the row. Leave files without labels out of the pattern.',
    )
  if isinstance(value, str):
    return value.strip()
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, int) or isinstance(value, float) and value.is_integer():
    return str(int(value))
  _refuse(
    f'{where} has {str(value)[:40]} in {column!r}; a class is a word or a whole number.',
    fix='Choose the column with the classes, or turn its values into classes.',
  )


def _csv(path: str, columns: Optional[LabelColumns], *, form: str) -> Iterator[_Record]:
  names: list[str] = []
  for fields, where, _ in csv_records(path, form):
    if isinstance(fields, DataError):
      _refuse(fields.what, fix=fields.fix)
    if names and fields:
      yield dict(zip(names, fields)), where
    elif fields:
      names = fields
      _columns(names, columns, where)


def _jsonl(path: str, columns: Optional[LabelColumns]) -> Iterator[_Record]:
  del columns
  with io.TextIOWrapper(open_text(path), encoding='utf-8', newline='') as f:
    for number, line in enumerate(f, 1):
      if line.strip():
        where = f'{path}:{number}'
        try:
          record = json_object(line, where=where)
        except DataError as e:
          _refuse(e.what, fix=e.fix)
        yield record, where


def _parquet(path: str, columns: Optional[LabelColumns]) -> Iterator[_Record]:
  chosen = _columns(list(parquet.read_schema(path).names), columns, path)
  with parquet.ParquetFile(path) as f:
    batches = f.iter_batches(columns=list(chosen.names), use_threads=False)
    rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
    for number, values in enumerate(rows, 1):
      yield values, f'{path}, row {number}'


FORMS: Mapping[str, Callable[[str, Optional[LabelColumns]], Iterator[_Record]]] = {
  'csv': functools.partial(_csv, form='csv'),
  'tsv': functools.partial(_csv, form='tsv'),
  'jsonl': _jsonl,
  'parquet': _parquet,
}
