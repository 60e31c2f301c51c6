"""Rows of files that are read from the front: lines, JSON lines, .csv, .tsv, TFRecord.

All may be compressed (.gz, .zst). To continue at a row they are read again up to it.
"""

import csv
import functools
import io
import itertools
import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Optional

from t5x_gpu.data.sources import discovery, labelled_tables
from t5x_gpu.data.sources.rows import (
  COMPRESSED,
  FileForm,
  Row,
  checked_row,
  not_utf8,
  open_stream,
  open_text,
)
from t5x_gpu.data.tf_runtime import tf
from t5x_gpu.errors import DataError

_MAX_FIELD = 10_000_000  # of csv; Python's own limit is 128 kB
# A file is read in spans of this many lines (about 2.5 kB of source code): streaming, little state.
LINES_PER_SPAN = 64
_NAMED_LINES = 3  # of a file
log = logging.getLogger(__name__)


def _line_rows(
  path: str,
  columns: Sequence[str],
  skip: int,
  repaired: Optional[Callable[..., Iterator[bytes]]] = None,
) -> Iterator[Row]:
  with open_text(path) as f:
    lines: Iterator[bytes] = itertools.islice(f, skip, None)
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
  """Lines with U+FFFD in place of bytes that are not UTF-8; the log counts them, once per file."""

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
  """Yields (64 lines, b'' or what marks the last span of the file)."""
  first = skip * LINES_PER_SPAN
  with open_text(path) as f:
    lines = checked(itertools.islice(f, first, None), path=path, first=first + 1)
    span = b''.join(itertools.islice(lines, LINES_PER_SPAN))
    while span:
      following = b''.join(itertools.islice(lines, LINES_PER_SPAN))
      yield span, b'' if following else b'end'
      span = following


def _json_rows(path: str, columns: Sequence[str], skip: int) -> Iterator[Row]:
  with open_text(path) as f:
    for number, line in enumerate(itertools.islice(f, skip, None), skip + 1):
      if not line.strip():
        yield None
        continue
      try:
        texts = tuple(
          discovery.json_fields(line.rstrip(b'\r\n'), keys=columns, where=f'{path}:{number}')
        )
      except DataError as e:
        yield e
        continue
      yield texts if texts[0] else None


def _pair_rows(path: str, columns: Sequence[str], skip: int) -> Iterator[Row]:
  """Yields (inputs, targets) of lines without a header."""
  with open_text(path) as f:
    for number, line in enumerate(itertools.islice(f, skip, None), skip + 1):
      try:
        where = f'{path}:{number}'
        yield (
          None
          if not line.strip()
          else checked_row(
            labelled_tables.pair_fields(line.rstrip(b'\r\n'), where=where),
            columns=columns,
            where=where,
          )
        )
      except DataError as e:
        yield e


def _reader(f: io.TextIOBase, form: str) -> Iterator[list[str]]:
  csv.field_size_limit(_MAX_FIELD)
  if form == 'tsv':  # tabs between columns and no quoting
    return csv.reader(f, delimiter='\t', quoting=csv.QUOTE_NONE, strict=True)
  return csv.reader(f, strict=True)


def _text(path: str) -> io.TextIOWrapper:
  # Bytes that are not UTF-8 pass through, and are found in the one row that has them.
  return io.TextIOWrapper(open_text(path), encoding='utf-8', errors='surrogateescape', newline='')


def _header(path: str, *, form: str) -> list[str]:
  with _text(path) as f:
    return [name.strip() for name in next(_reader(f, form), [])]


def _csv_rows(path: str, columns: Sequence[str], skip: int, *, form: str) -> Iterator[Row]:
  with _text(path) as f:
    reader = _reader(f, form)
    names = [name.strip() for name in next(reader, [])]
    if missing := [name for name in columns if name not in names]:
      raise DataError(
        f'{path} has no column {missing[0]!r}: it has {", ".join(names)}.',
        fix='Give all files that the pattern matches the same header.',
      )
    at = [names.index(name) for name in columns]
    number = 0
    while True:
      begins, num_rows = reader.line_num + 1, 1
      where = f'{path}:{begins}'
      try:
        fields = next(reader, None)
      except csv.Error as e:
        row: Row = DataError(
          f'{where} is not {form.upper()}: {e}.',
          fix=('Close every quote; write "" for a quote inside a quoted text.'),
        )
        num_rows = max(1, reader.line_num + 1 - begins)  # an open quote swallows lines
      else:
        if fields is None:
          return
        if fields and len(fields) != len(names):
          row = DataError(
            f'{where} has {len(fields)} columns; the header has {len(names)}.',
            fix=(
              'Put a text with commas or line breaks into double quotes.'
              if form == 'csv'
              else 'Separate columns by single tabs; texts hold no tab and no line break.'
            ),
          )
        else:
          row = checked_row(
            [fields[i].encode('utf-8', 'surrogateescape') for i in at] if fields else [b''],
            columns=columns,
            where=where,
          )
      for _ in range(num_rows):
        if number >= skip:
          yield row
        number += 1


# TFRecord: length (8 bytes), its checksum (4), the record, its checksum (4).
# https://www.tensorflow.org/tutorials/load_data/tfrecord
_HEAD = struct.Struct('<QI')
_TAIL_BYTES = 4
_RECORDS_AT_ONCE = 64


def _crc32c_table() -> tuple[int, ...]:
  table = []
  for byte in range(256):
    for _ in range(8):
      byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    table.append(byte)
  return tuple(table)


_CRC32C = _crc32c_table()


def _masked_crc32c(data: bytes) -> int:
  crc = 0xFFFFFFFF
  for byte in data:
    crc = crc >> 8 ^ _CRC32C[(crc ^ byte) & 0xFF]
  crc ^= 0xFFFFFFFF
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _tfrecords(path: str, skip: int) -> Iterator[tuple[bytes, bool]]:
  """Yields (record, whether it is as it was written) from number `skip` on.

  TensorFlow compares checksums at 100 to 170 MB/s and cannot read on behind a wrong one; this can,
  at 4 MB/s. Compressed files are compared as such.
  """
  if not path.endswith(COMPRESSED):
    options = tf.data.Options()
    options.autotune.enabled = False  # no thread that an open file would keep at exit
    records = tf.data.TFRecordDataset(path).skip(skip).batch(_RECORDS_AT_ONCE).with_options(options)
    try:
      for batch in records.as_numpy_iterator():
        skip += len(batch)
        yield from ((record, True) for record in batch)
      return
    except tf.errors.DataLossError:
      pass
  with open_stream(path) as f:
    for number in itertools.count():
      head = f.read(_HEAD.size)
      if not head:
        return
      if len(head) < _HEAD.size:
        raise EOFError('it ends inside a record')
      length, checksum = _HEAD.unpack(head)
      if checksum != _masked_crc32c(head[:8]):
        raise EOFError('the length of a record does not fit its checksum')
      record = f.read(length + _TAIL_BYTES)
      if len(record) < length + _TAIL_BYTES:
        raise EOFError('it ends inside a record')
      if number >= skip:
        data, checksum = record[:length], record[length:]
        yield (
          data,
          path.endswith(COMPRESSED) or (_masked_crc32c(data) == int.from_bytes(checksum, 'little')),
        )


def example_columns(record: bytes) -> list[str]:
  """Returns the names of the texts in a tf.train.Example. Raises ValueError if it is none."""
  features = _parsed(record)
  return sorted(name for name in features if features[name].bytes_list.value)


def example_row(record: bytes, *, columns: Sequence[str], where: str) -> Row:
  """Returns the texts `columns` of a tf.train.Example, or what is wrong with it."""
  try:
    features = _parsed(record)
  except ValueError as e:
    return DataError(f'{where} is not a tf.train.Example: {e}.', fix='Write the file anew.')
  values: list[Optional[bytes]] = []
  for name in columns:
    given = features[name].bytes_list.value if name in features else ()
    if len(given) != 1:
      return DataError(
        f'{where} has {len(given)} texts in {name!r}; there should be one.',
        fix='Write one text per feature and record.',
      )
    values.append(given[0])
  return checked_row(values, columns=columns, where=where)


def _parsed(record: bytes) -> tf.train.Features:
  try:
    return tf.train.Example.FromString(record).features.feature
  except Exception as e:  # protobuf's DecodeError, whose module is not ours to name
    raise ValueError(str(e) or type(e).__name__) from e


def _tfrecord_columns(path: str) -> list[str]:
  record, _ = next(_tfrecords(path, 0), (None, True))
  return [] if record is None else example_columns(record)


def _tfrecord_rows(path: str, columns: Sequence[str], skip: int) -> Iterator[Row]:
  for number, (record, is_whole) in enumerate(_tfrecords(path, skip), skip + 1):
    where = f'{path}, record {number}'
    yield (
      example_row(record, columns=columns, where=where)
      if is_whole
      else DataError(
        f'{where} has changed: it does not fit its checksum.', fix='Get the file anew.'
      )
    )


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
JSON_LINES = FileForm('jsonl', discovery.json_keys, _json_rows)
CSV, TSV = (
  FileForm(form, functools.partial(_header, form=form), functools.partial(_csv_rows, form=form))
  for form in ('csv', 'tsv')
)
TFRECORD = FileForm('tfrecord', _tfrecord_columns, _tfrecord_rows)
