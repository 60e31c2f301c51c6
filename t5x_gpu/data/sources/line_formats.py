"""Reads rows of sequential files: lines, JSON lines, .csv and .tsv. No TF.

Files may be compressed (.gz, .zst). To continue at a row, a file is read again up to that row.
"""

import csv
import functools
import io
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Optional, Union

from t5x_gpu.data.sources.conversations import RecordForm
from t5x_gpu.data.sources.json_lines import json_fields, json_object
from t5x_gpu.data.sources.rows import (
  FileForm,
  Row,
  checked_row,
  limited_lines,
  not_utf8,
  open_text,
  require_columns,
)
from t5x_gpu.errors import DataError

# Maximum length of a csv field. Python's default of 128 kB is too small for a book; without a
# limit, an unclosed quote would swallow the file.
_MAX_FIELD = 10_000_000
# Text files are read in spans of this many lines (about 2.5 kB of source code), to keep the state
# small.
LINES_PER_SPAN = 64
_NAMED_LINES = 3  # lines per file that the log names
log = logging.getLogger(__name__)


def _numbered(path: str, skip: int) -> Iterator[tuple[int, bytes]]:
  """Yields (number, line) of a file's lines after the first `skip`, from 1, without line ends."""
  with open_text(path) as f:
    lines = itertools.islice(limited_lines(f, path), skip, None)
    for number, line in enumerate(lines, skip + 1):
      yield number, line.rstrip(b'\r\n')


def _line_rows(
  path: str,
  columns: Sequence[str],
  skip: int,
  repaired: Optional[Callable[..., Iterator[bytes]]] = None,
) -> Iterator[Row]:
  with open_text(path) as f:
    lines: Iterator[bytes] = itertools.islice(limited_lines(f, path), skip, None)
    if repaired is not None:
      lines = repaired(lines, path=path, first=skip + 1)
    for number, line in enumerate(lines, skip + 1):
      yield checked_row([line.rstrip(b'\r\n')], columns=columns, where=f'{path}:{number}')


def _utf8_lines(lines: Iterable[bytes], *, path: str, first: int) -> Iterator[bytes]:
  for number, line in enumerate(lines, first):
    try:
      line.decode()
    except UnicodeDecodeError as e:
      raise not_utf8(f'{path}:{number}', e) from e
    yield line


class _Repaired:
  """Replaces bytes that are not UTF-8 by U+FFFD; logs their number once per file."""

  def __init__(self):
    self._named: set[tuple[str, int]] = set()
    self._finished: set[str] = set()

  def __call__(self, lines: Iterable[bytes], *, path: str, first: int) -> Iterator[bytes]:
    count = number = 0
    for number, line in enumerate(lines, first):
      try:
        line.decode()
      except UnicodeDecodeError as e:
        line = line.decode(errors='replace').encode()
        count += 1
        if count <= _NAMED_LINES and (path, number) not in self._named:
          self._named.add((path, number))
          log.warning(
            '%s:%d has bytes that are not UTF-8 (%s), replaced by U+FFFD', path, number, e.reason
          )
      yield line
    if count and path not in self._finished:
      self._finished.add(path)
      log.warning(
        '%s: %d of the lines %d to %d had bytes that are not UTF-8, replaced by U+FFFD',
        path,
        count,
        first,
        number,
      )


def _span_rows(
  path: str,
  columns: Sequence[str],
  skip: int,
  checked: Callable[..., Iterator[bytes]] = _utf8_lines,
) -> Iterator[Row]:
  """Yields (64 lines, mark); only the last span of the file has a non-empty mark."""
  first = skip * LINES_PER_SPAN
  with open_text(path) as f:
    lines = itertools.islice(limited_lines(f, path), first, None)
    lines = checked(lines, path=path, first=first + 1)
    span = b''.join(itertools.islice(lines, LINES_PER_SPAN))
    while span:
      following = b''.join(itertools.islice(lines, LINES_PER_SPAN))
      yield span, b'' if following else b'end'
      span = following


def _json_keys(path: str) -> list[str]:
  """Returns the keys of the first object; [] for a file of blank lines."""
  for number, line in _numbered(path, 0):
    if line.strip():
      return list(json_object(line, where=f'{path}:{number}', keys=['text']))
  return []


def _json_rows(path: str, columns: Sequence[str], skip: int) -> Iterator[Row]:
  for number, line in _numbered(path, skip):
    if not line.strip():
      yield None
      continue
    where = f'{path}:{number}'
    try:
      texts = tuple(json_fields(line, keys=columns, where=where))
    except DataError as e:
      yield e
      continue
    if len(texts) > 1:
      yield checked_row(texts, columns=columns, where=where)
    else:
      yield texts if texts[0] else None


def _record_rows(
  path: str, columns: Sequence[str], skip: int, *, records: RecordForm
) -> Iterator[Row]:
  """Yields (record as JSON, file:line); the first of `columns` is the key."""
  for number, line in _numbered(path, skip):
    row, where = None, f'{path}:{number}'
    if line.strip():
      try:
        record = json_object(line, where=where, keys=columns[:1])
        row = records.row(record, key=columns[0], where=where)
      except DataError as e:
        row = e
    yield row


def _pair_rows(path: str, columns: Sequence[str], skip: int) -> Iterator[Row]:
  """Yields (inputs, targets) of lines with one tab, without a header."""
  for number, line in _numbered(path, skip):
    where, fields = f'{path}:{number}', line.split(b'\t')
    if not line.strip():
      yield None
    elif len(fields) == 2 and all(field.strip() for field in fields):
      yield checked_row(fields, columns=columns, where=where)
    else:
      yield DataError(
        f'{where} has {len(fields)} columns'
        + (', one of them empty' if len(fields) == 2 else '')
        + f'; a pair is inputs, one tab, targets. It begins {line[:60]!r}.',
        fix='Correct or remove that line. The texts must not contain tabs or line breaks (write '
        '.jsonl with "inputs" and "targets" for such texts).',
      )


def csv_records(
  path: str, form: str, *, errors: str = 'strict'
) -> Iterator[tuple[Union[list[str], DataError], str, int]]:
  """Yields (fields or an error, file:line, number of lost lines) of each row.

  The first row that is not blank is the header. Blank rows have no fields. Lines swallowed by an
  unclosed quote are lost.

  Args:
    path: path of the file.
    form: 'csv', or 'tsv', which has tabs between columns and no quoting.
    errors: error handling of the decoding, as for `bytes.decode`.
  """
  csv.field_size_limit(_MAX_FIELD)
  header: list[str] = []
  with io.TextIOWrapper(open_text(path), encoding='utf-8', errors=errors, newline='') as f:
    lines = limited_lines(f, path)
    reader = (
      csv.reader(lines, delimiter='\t', quoting=csv.QUOTE_NONE, strict=True)
      if form == 'tsv'
      else csv.reader(lines, strict=True)
    )
    while True:
      begins, num_lost = reader.line_num + 1, 0
      where = f'{path}:{begins}'
      try:
        fields = next(reader, None)
      except csv.Error as e:
        fields = DataError(
          f'{where} is not {form.upper()}: {e}.',
          fix='Close every quote; write "" for a quote inside a quoted text.',
        )
        num_lost = max(1, reader.line_num + 1 - begins)
      if fields is None:
        return
      if fields and not header and not num_lost:
        header = fields = [name.strip() for name in fields]
      elif fields and not num_lost and len(fields) != len(header):
        fields = DataError(
          f'{where} has {len(fields)} columns; the header has {len(header)}.',
          fix='Separate columns by single tabs; texts must not contain tabs or line breaks.'
          if form == 'tsv'
          else 'Put a text with commas or line breaks into double quotes; write "" for a quote in '
          'it.',
        )
      yield fields, where, num_lost


def _csv_header(path: str, *, form: str) -> list[str]:
  for fields, _, _ in csv_records(path, form, errors='surrogateescape'):
    if isinstance(fields, DataError):
      raise fields
    if fields:
      return fields
  return []


def _csv_rows(path: str, columns: Sequence[str], skip: int, *, form: str) -> Iterator[Row]:
  names = _csv_header(path, form=form)
  require_columns(names, columns, path)
  at = [names.index(name) for name in columns]
  number, in_header = 0, True
  # Bytes that are not UTF-8 pass through, so that only their row is damaged.
  for fields, where, num_lost in csv_records(path, form, errors='surrogateescape'):
    if in_header:
      in_header = not fields
      continue
    row: Row = None
    if isinstance(fields, DataError):
      row = fields
    elif fields:
      texts = [fields[i].encode('utf-8', 'surrogateescape') for i in at]
      row = checked_row(texts, columns=columns, where=where)
    for _ in range(max(1, num_lost)):
      if number >= skip:
        yield row
      number += 1


LINES = FileForm('text_lines', lambda path: ['text'], _line_rows)
SPANS = FileForm('text_files', lambda path: ['text'], _span_rows)
REPAIRED_LINES, REPAIRED_SPANS = (
  FileForm(
    'text_lines',
    lambda path: ['text'],
    functools.partial(_line_rows, repaired=_Repaired()),
    errors='replace',
  ),
  FileForm(
    'text_files',
    lambda path: ['text'],
    functools.partial(_span_rows, checked=_Repaired()),
    errors='replace',
  ),
)
PAIRS = FileForm('text_pairs', lambda path: ['inputs', 'targets'], _pair_rows)
JSON_LINES = FileForm('jsonl', _json_keys, _json_rows)


def record_lines(records: RecordForm) -> FileForm:
  """Returns the form of JSON lines with conversations or preferences."""
  return FileForm('jsonl', _json_keys, functools.partial(_record_rows, records=records))


CSV, TSV = (
  FileForm(form, functools.partial(_csv_header, form=form), functools.partial(_csv_rows, form=form))
  for form in ('csv', 'tsv')
)
