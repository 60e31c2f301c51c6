"""Files of any form as numbered rows: each row is a tuple of texts, blank, or damaged. No TF.

A `FileForm` lists the columns of a file, and iterates over its rows starting at any row. The
features come from columns with the usual names, or from columns that the user chooses:

    csv:data/*.csv                              columns text, or inputs and targets
    csv:data/*.csv#text=body                    column body is the text
    parquet:qa/*.parquet#inputs=question,targets=answer
"""

import codecs
import dataclasses
import gzip
import io
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, AnyStr, BinaryIO, Optional, Union

import pyarrow as pa

from t5x_gpu.errors import DataError, did_you_mean, task_error
from t5x_gpu.terminal.console import show

NAME = ('DatasetConfig.mixture_or_task_name',)
COMPRESSED = ('.gz', '.zst')
_READ_AHEAD_BYTES = 1 << 20
# Limit for a line, and for a text in a row. A tokenizer needs many times the size of its text: a
# row of 1.5 GB, from a .gz file of 1.4 MB, takes all memory of a host. text8 is one line of 100 MB.
MAX_TEXT_BYTES = 256 << 20
# Sets of features for which the user may choose columns.
_CHOICES = (
  {'text'},
  {'targets'},
  {'inputs', 'targets'},
  {'messages'},
  {'chosen', 'rejected'},
  {'chosen', 'rejected', 'prompt'},
)
# Longer marks come first: the mark of UTF-32 begins with the mark of UTF-16.
_OTHER_ENCODINGS = {
  codecs.BOM_UTF32_LE: 'UTF-32',
  codecs.BOM_UTF32_BE: 'UTF-32',
  codecs.BOM_UTF16_LE: 'UTF-16',
  codecs.BOM_UTF16_BE: 'UTF-16',
}

# The texts of the chosen columns as UTF-8; None for a blank row; the error of a damaged row.
Row = Union[tuple[bytes, ...], None, DataError]


@dataclasses.dataclass(frozen=True)
class FileForm:
  """How to read files of one form.

  Attributes:
    name: 'csv', 'parquet', ...
    columns: path -> names of its columns.
    rows: (path, names of columns, number of rows to skip) -> the remaining rows.
    errors: 'replace' if bytes that are not UTF-8 become U+FFFD, as in `bytes.decode`.
  """

  name: str
  columns: Callable[[str], Sequence[str]]
  rows: Callable[[str, Sequence[str], int], Iterator[Row]]
  errors: str = 'strict'


def open_stream(path: str) -> BinaryIO:
  """Returns the bytes of a file, decompressed if its name ends in .gz or .zst."""
  if path.lower().endswith('.gz'):
    return gzip.open(path, 'rb')
  if path.lower().endswith('.zst'):
    return io.BufferedReader(pa.input_stream(path, compression='zstd'), _READ_AHEAD_BYTES)
  return open(path, 'rb', buffering=_READ_AHEAD_BYTES)


def is_compressed(path: str) -> bool:
  return path.lower().endswith(COMPRESSED)


def open_text(path: str) -> BinaryIO:
  """Opens a UTF-8 file like `open_stream`, without its byte order mark.

  Raises:
    DataError: the file begins with the byte order mark of another encoding.
  """
  f = open_stream(path)
  try:
    head = f.peek(4)
    for mark, encoding in _OTHER_ENCODINGS.items():
      if head.startswith(mark):
        raise task_error(
          f'{path} is {encoding} text, judging by its first bytes; only UTF-8 is read.',
          fix=f'Convert it: iconv -f {encoding} -t UTF-8 FILE > NEW_FILE',
        )
    if head.startswith(codecs.BOM_UTF8):
      f.read(len(codecs.BOM_UTF8))
  except BaseException:
    f.close()
    raise
  return f


def limited_lines(f: IO[AnyStr], name: str) -> Iterator[AnyStr]:
  """Yields the lines of an open file, bytes or text, as iterating over it does.

  Args:
    f: the file, at its beginning.
    name: name of the file, for errors.
  Raises:
    DataError: a line is longer than `MAX_TEXT_BYTES`, which bounds the memory.
  """
  for number in itertools.count(1):
    line = f.readline(MAX_TEXT_BYTES + 1)
    if len(line) > MAX_TEXT_BYTES:
      raise too_long(f'{name}:{number}')
    if not line:
      return
    yield line


def too_long(where: str) -> DataError:
  """Returns the error for a line, or a text of a row, that is longer than `MAX_TEXT_BYTES`."""
  return DataError(
    f'{where} is longer than {show(MAX_TEXT_BYTES, MiB=".0f")}.',
    fix='Cut it into several rows, or remove it. A text in a single line: fold -s -w 100000 FILE > '
    'NEW_FILE',
    docs='tasks.md#damaged-input',
  )


def check_line_lengths(path: str) -> None:
  """Raises DataError if a line of a file that is not compressed exceeds `MAX_TEXT_BYTES`.

  Looks for the last line end in each stretch of that length, and so reads only one MiB of 256.
  """
  size, begin = os.path.getsize(path), 0
  with open(path, 'rb') as f:
    while size - begin > MAX_TEXT_BYTES:
      for at in range(begin + MAX_TEXT_BYTES - _READ_AHEAD_BYTES, begin - 1, -_READ_AHEAD_BYTES):
        f.seek(at)
        if (end := f.read(_READ_AHEAD_BYTES).rfind(b'\n')) >= 0:
          begin = at + end + 1
          break
      else:
        raise too_long(f'The line at byte {begin} of {path}')


def head(path: str) -> tuple[bool, bool]:
  """Returns (has a UTF-8 byte order mark, has carriage returns in its first or last MiB).

  Args:
    path: path of an uncompressed file.
  Raises:
    DataError: the file begins with the byte order mark of another encoding.
  """
  with open_text(path) as f:
    has_mark, has_returns = f.tell() > 0, b'\r' in f.peek()
    f.seek(max(0, os.fstat(f.fileno()).st_size - _READ_AHEAD_BYTES))
    return has_mark, has_returns or b'\r' in f.read()


def not_utf8(where: str, reason: UnicodeDecodeError) -> DataError:
  """Returns the error for text that is not UTF-8."""
  return task_error(
    f'{where} has bytes that are not UTF-8: {reason}.',
    fix='Convert the file (iconv -f LATIN1 -t UTF-8 FILE > NEW_FILE), or replace such bytes by '
    'U+FFFD: text_files:PATTERN#errors=replace, text_lines:PATTERN#errors=replace.',
    docs='tasks.md#damaged-input',
  )


def checked_row(
  values: Sequence[Union[bytes, str, None]], *, columns: Sequence[str], where: str
) -> Row:
  """Returns the row of `values`; None if all are blank; a DataError if some are, or not UTF-8."""
  values = [v.encode('utf-8', 'surrogatepass') if isinstance(v, str) else v for v in values]
  empty = [name for name, value in zip(columns, values) if not value or not value.strip()]
  if len(empty) == len(values):
    return None
  if empty:
    return DataError(f'{where} has nothing in {empty[0]!r}.', fix='Fill it in or remove the row.')
  for name, value in zip(columns, values):
    if len(value) > MAX_TEXT_BYTES:
      return too_long(f'The text in {name!r} of {where}')
    try:
      value.decode()
    except UnicodeDecodeError as e:
      return DataError(
        f'{where} has bytes in {name!r} that are not UTF-8: {e}.', fix='Save the texts as UTF-8.'
      )
  return tuple(values)


def split_columns(spelled: str) -> tuple[str, Optional[list[tuple[str, str]]]]:
  """Returns the pattern, and the (name, column) pairs after `#`, or None.

  Columns may contain commas, # and =: a pair begins with a word and =.
  """
  pattern, *chosen = re.split(r'#(?=\w*=)', spelled, maxsplit=1)
  if not chosen:
    return spelled, None
  return pattern, [tuple(part.partition('=')[::2]) for part in re.split(r',(?=\w*=)', chosen[0])]


def pattern_and_columns(spelled: str) -> tuple[str, Optional[dict[str, str]]]:
  """Returns the pattern, and feature -> column for columns chosen after `#`, or None.

  Raises:
    DataError: the features are not in `_CHOICES`.
  """
  pattern, pairs = split_columns(spelled)
  if pairs is None:
    return spelled, None
  parts = dict(pairs)
  for ours in _CHOICES:
    if set(parts) == ours and all(parts.values()):
      return pattern, {
        'targets' if name == 'text' else name: column for name, column in parts.items()
      }
  chosen = ','.join(map('='.join, pairs))
  raise task_error(
    f'#{chosen} chooses columns for {", ".join(map(repr, parts))}.'
    + did_you_mean(next(iter(parts)), sorted(set().union(*_CHOICES))),
    fix='Write #text=COLUMN, #inputs=COLUMN,targets=COLUMN, for conversations #messages=COLUMN, or '
    'for preferences #chosen=COLUMN,rejected=COLUMN (with prompt=COLUMN if there is one).',
  )


def feature_columns(
  names: Sequence[str], *, chosen: Optional[Mapping[str, str]], where: str
) -> dict[str, str]:
  """Returns feature -> column: chosen columns, else columns `inputs` and `targets`, or `text`.

  Args:
    names: columns of the file.
    chosen: feature -> column, or None.
    where: the file, for errors.
  Raises:
    DataError: the file lacks a column, or has several with the same name.
  """
  if chosen is None:
    if 'inputs' in names and 'targets' in names:
      chosen = {'inputs': 'inputs', 'targets': 'targets'}
    else:
      chosen = {'targets': next((name for name in ('text', 'targets') if name in names), 'text')}
  missing = [column for column in chosen.values() if column not in names]
  if missing:
    first = names[0] if names else 'COLUMN'
    raise task_error(
      f'{where} has no column {missing[0]!r}: it has '
      + (', '.join(map(repr, names[:20])) or 'none')
      + '.'
      + did_you_mean(missing[0], names),
      fix=f'Choose after the pattern: #text={first}, or #inputs=COLUMN,targets=COLUMN.',
    )
  _check_unique(names, list(chosen.values()), where)
  return dict(chosen)


def require_columns(names: Sequence[str], columns: Sequence[str], path: str) -> None:
  """Raises DataError unless the file `path`, whose columns are `names`, has all `columns` once."""
  if missing := [name for name in columns if name not in names]:
    raise DataError(
      f'{path} has no column {missing[0]!r}: it has {", ".join(names)}.',
      fix='Give all files that the pattern matches the same columns.',
    )
  _check_unique(names, columns, path)


def _check_unique(names: Sequence[str], columns: Sequence[str], where: str) -> None:
  """Raises DataError if `where`, whose columns are `names`, has one of `columns` several times."""
  if repeated := [name for name in columns if list(names).count(name) > 1]:
    raise task_error(
      f'{where} has {list(names).count(repeated[0])} columns {repeated[0]!r}.',
      fix='Rename or remove all but one, or choose another column after the pattern.',
    )
