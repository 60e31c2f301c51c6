"""Labelled texts from .csv, .tsv, .jsonl and Parquet files with columns of any name. No TF.

classification:csv:reviews/*.csv                                  columns text, label
classification:jsonl:reviews.jsonl#text=body,label=stars
classification:parquet:nli/*.parquet#text=premise,text2=hypothesis,label=gold_label
multi_label:jsonl:topics.jsonl                                    columns text, labels (a list)
token_classification:jsonl:conll/*.jsonl                          columns tokens, tags (lists)
regression:csv:essays.csv#text=essay,label=grade                  columns text, label (a number)
sentence_pairs:csv:pairs.csv                        columns anchor, positive, negative or score
"""

import dataclasses
import functools
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional

import pyarrow as pa

from t5x_gpu.config.set_aside import is_missing
from t5x_gpu.data.sources.column_formats import PARQUET, parquet_records
from t5x_gpu.data.sources.file_patterns import unreadable
from t5x_gpu.data.sources.json_lines import json_object
from t5x_gpu.data.sources.labelled.cells import (
  LARGEST_SCORE,
  cell_label,
  cell_listed,
  cell_score,
  cell_text,
  refuse,
)
from t5x_gpu.data.sources.labelled.tables import LabelledRow
from t5x_gpu.data.sources.line_formats import csv_records
from t5x_gpu.data.sources.rows import limited_lines, open_text, split_columns
from t5x_gpu.errors import DataError, did_you_mean, first_line, listed


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
_Record = tuple[Mapping[str, Any], str]


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
      refuse(f'{path} is not UTF-8 text: {e}.', fix='Save it as UTF-8.')
    except (OSError, EOFError, pa.ArrowException) as e:
      if isinstance(e, OSError) and not is_missing(e):
        raise unreadable(path, e) from e
      refuse(
        f'{path} cannot be read as {self.form}: {first_line(e)[:200]}.',
        fix='Get the file again, or leave it out of the pattern.',
      )
    if not rows:
      refuse(f'{path} has no rows.', fix='Give files with one row per example.')
    return rows

  def _records(self, path: str) -> Iterator[tuple[Mapping[str, Any], LabelColumns, str]]:
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
    refuse(
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
    refuse(
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
      refuse(
        f'{where} has '
        + (f'no column {name!r}' if not count else f'{count} columns {name!r}')
        + f': it has {have or "none"}.'
        + ('' if count else did_you_mean(name, names)),
        fix=KINDS[kind].how,
      )
  return chosen


def _labelled_row(
  values: Mapping[str, Any], columns: LabelColumns, where: str, *, kind: str
) -> LabelledRow:
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


def _tagged_words(values: Mapping[str, Any], columns: LabelColumns, where: str) -> LabelledRow:
  words, tags = values[columns.text], values[columns.label]
  for found, column in ((words, columns.text), (tags, columns.label)):
    if not isinstance(found, list) or not found:
      refuse(
        f'{where} has {str(found)[:40]!r} in {column!r}, not a list with an item per word.',
        fix='Write {"tokens": ["Ada", "wrote"], "tags": ["B-PER", "O"]}, as jsonl or Parquet.',
      )
  if len(words) != len(tags):
    refuse(
      f'{where} has {len(words)} words in {columns.text!r} and {len(tags)} tags in '
      f'{columns.label!r}.',
      fix='Give each word one tag.',
    )
  return LabelledRow(
    tuple(cell_text(word, columns.text, where) for word in words),
    tuple(cell_label(tag, columns.label, where) for tag in tags),
    where,
  )


def _scored_texts(values: Mapping[str, Any], columns: LabelColumns, where: str) -> LabelledRow:
  """Returns two or three texts; their one label is the score in ten-thousandths."""
  names = (columns.text, columns.label, *([columns.text2] if columns.text2 else []))
  texts = tuple(cell_text(values[name], name, where) for name in names)
  score = cell_score(values[columns.score], columns.score, where) if columns.score else '0'
  return LabelledRow(texts, (score,), where)


def _csv(path: str, columns: Optional[LabelColumns], kind: str, *, form: str) -> Iterator[_Record]:
  names: list[str] = []
  for fields, where, _ in csv_records(path, form):
    if isinstance(fields, DataError):
      refuse(fields.what, fix=fields.fix)
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
          refuse(e.what, fix=e.fix)
        yield record, where


def _parquet(path: str, columns: Optional[LabelColumns], kind: str) -> Iterator[_Record]:
  chosen = _columns(PARQUET.columns(path), columns, kind, path)
  for record, where in parquet_records(path, chosen.names):
    if isinstance(record, DataError):
      refuse(record.what, fix=record.fix)
    yield record, where


FORMS: Mapping[str, Callable[[str, Optional[LabelColumns], str], Iterator[_Record]]] = {
  'csv': functools.partial(_csv, form='csv'),
  'tsv': functools.partial(_csv, form='tsv'),
  'jsonl': _jsonl,
  'parquet': _parquet,
}
