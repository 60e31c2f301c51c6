"""What files of any form are read as: rows of texts, blanks and damage, numbered from the start.

A form of file is a `FileForm`: the names of its columns, and an iterator of its rows from any row
on. Which column is which feature is judged by the names, or said behind the pattern:

    csv:data/*.csv                              columns text, or inputs and targets
    csv:data/*.csv#text=body                    the column body is the text
    parquet:qa/*.parquet#inputs=question,targets=answer
"""

import codecs
import dataclasses
import gzip
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO, Optional, Union

import pyarrow as pa

from t5x_gpu.errors import DataError, did_you_mean

NAME = ('DatasetConfig.mixture_or_task_name',)
COMPRESSED = ('.gz', '.zst')
_READ_AHEAD_BYTES = 1 << 20
# The longer marks come first: that of UTF-32 begins like that of UTF-16.
_OTHER_ENCODINGS = {
  codecs.BOM_UTF32_LE: 'UTF-32',
  codecs.BOM_UTF32_BE: 'UTF-32',
  codecs.BOM_UTF16_LE: 'UTF-16',
  codecs.BOM_UTF16_BE: 'UTF-16',
}

# The texts of the chosen columns as UTF-8; None for a blank row; what is wrong with a damaged one.
Row = Union[tuple[bytes, ...], None, DataError]


@dataclasses.dataclass(frozen=True)
class FileForm:
  """How files of one form are read.

  Attributes:
    name: 'csv', 'parquet', ...
    columns: path -> names of its columns.
    rows: (path, names of columns, rows to pass over) -> the rows after these.
    errors: 'replace' if bytes that are not UTF-8 become U+FFFD, as in `bytes.decode`.
  """

  name: str
  columns: Callable[[str], Sequence[str]]
  rows: Callable[[str, Sequence[str], int], Iterator[Row]]
  errors: str = 'strict'


def open_stream(path: str) -> BinaryIO:
  """Returns the bytes of a file, decompressed if its name ends in .gz or .zst."""
  if path.endswith('.gz'):
    return gzip.open(path, 'rb')
  if path.endswith('.zst'):
    return io.BufferedReader(pa.input_stream(path, compression='zstd'), _READ_AHEAD_BYTES)
  return open(path, 'rb', buffering=_READ_AHEAD_BYTES)


def open_text(path: str) -> BinaryIO:
  """Returns the bytes of a file of UTF-8 as `open_stream` does, from behind a byte order mark.

  Raises:
    DataError: it begins with the mark of another encoding.
  """
  f = open_stream(path)
  try:
    head = f.peek(4)
    for mark, encoding in _OTHER_ENCODINGS.items():
      if head.startswith(mark):
        raise DataError(
          f'{path} is {encoding} text, as its first bytes say; only UTF-8 is read.',
          fix=f'Convert it: iconv -f {encoding} -t UTF-8 FILE > NEW_FILE',
          parameters=NAME,
        )
    if head.startswith(codecs.BOM_UTF8):
      f.read(len(codecs.BOM_UTF8))
  except BaseException:
    f.close()
    raise
  return f


def head(path: str) -> tuple[bool, bool]:
  """Returns whether a file that is not compressed begins with UTF-8's byte order mark, and whether
  its first MiB has carriage returns.

  Raises:
    DataError: it begins with the mark of another encoding, or cannot be read.
  """
  with open_text(path) as f:
    return f.tell() > 0, b'\r' in f.peek()


def not_utf8(where: str, reason: UnicodeDecodeError) -> DataError:
  """Returns the error for text that is not UTF-8."""
  return DataError(
    f'{where} has bytes that are not UTF-8: {reason}.',
    fix='Convert the file (iconv -f LATIN1 -t UTF-8 FILE > NEW_FILE), or replace such bytes by '
    'U+FFFD: text_files:PATTERN#errors=replace, text_lines:PATTERN#errors=replace.',
    parameters=NAME,
    docs='tasks.md#damaged-input',
  )


def checked_row(values: Sequence[Optional[bytes]], *, columns: Sequence[str], where: str) -> Row:
  """Returns the row of `values`: None if all are blank, a DataError if some are or are no UTF-8."""
  empty = [name for name, value in zip(columns, values) if not value or not value.strip()]
  if len(empty) == len(values):
    return None
  if empty:
    return DataError(f'{where} has nothing in {empty[0]!r}.', fix='Fill it in or remove the row.')
  for name, value in zip(columns, values):
    try:
      value.decode()
    except UnicodeDecodeError as e:
      return DataError(
        f'{where} has bytes in {name!r} that are not UTF-8: {e}.', fix='Save the texts as UTF-8.'
      )
  return tuple(values)


def split_columns(spelled: str) -> tuple[str, Optional[list[tuple[str, str]]]]:
  """Returns the pattern, and the (name, column) pairs behind `#`; None without any."""
  pattern, mark, chosen = spelled.rpartition('#')
  if not mark or '=' not in chosen:
    return spelled, None
  return pattern, [tuple(part.partition('=')[::2]) for part in chosen.split(',')]


def pattern_and_columns(spelled: str) -> tuple[str, Optional[dict[str, str]]]:
  """Returns the pattern and, where columns are chosen behind `#`, feature -> column.

  Raises:
    DataError: chosen columns are neither `text` nor `inputs` and `targets`.
  """
  pattern, pairs = split_columns(spelled)
  if pairs is None:
    return spelled, None
  parts = dict(pairs)
  for ours in ({'text'}, {'targets'}, {'inputs', 'targets'}):
    if set(parts) == ours and all(parts.values()):
      return pattern, {
        'targets' if name == 'text' else name: column for name, column in parts.items()
      }
  chosen = ','.join(map('='.join, pairs))
  raise DataError(
    f'#{chosen} chooses columns for {", ".join(map(repr, parts))}.'
    + did_you_mean(next(iter(parts)), ('text', 'inputs', 'targets')),
    fix='Write #text=COLUMN, or #inputs=COLUMN,targets=COLUMN.',
    parameters=NAME,
  )


def feature_columns(
  names: Sequence[str], *, chosen: Optional[Mapping[str, str]], where: str
) -> dict[str, str]:
  """Returns feature -> column: those chosen, else by the names `inputs`, `targets` or `text`.

  Args:
    names: columns that there are.
    chosen: feature -> column, or None.
    where: the file, for errors.
  Raises:
    DataError: no such columns.
  """
  if chosen is None:
    if 'inputs' in names and 'targets' in names:
      return {'inputs': 'inputs', 'targets': 'targets'}
    for name in ('text', 'targets'):
      if name in names:
        return {'targets': name}
  missing = [column for column in (chosen or {'targets': 'text'}).values() if column not in names]
  if missing:
    first = names[0] if names else 'COLUMN'
    raise DataError(
      f'{where} has no column {missing[0]!r}: it has '
      + (', '.join(map(repr, names[:20])) or 'none')
      + '.'
      + did_you_mean(missing[0], names),
      fix=f'Choose behind the pattern: #text={first}, or #inputs=COLUMN,targets=COLUMN.',
      parameters=NAME,
    )
  return dict(chosen)
