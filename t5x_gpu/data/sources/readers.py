"""Readers of files for tf.data, whose position can be saved.

`BlockReader` reads rows of any `FileForm`; `TFRECORD` and `ARRAYRECORD` are the forms with
tf.train.Examples, or a text per ArrayRecord. `Utf8Reader` reads plain text by `read_spans` or
`read_lines`, and refuses text that is not UTF-8.
"""

import collections
import itertools
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Optional

import numpy as np
import pyarrow as pa
from array_record.python.array_record_module import ArrayRecordReader

from t5x_gpu.data.sources.corrupt_records import Damage
from t5x_gpu.data.sources.discovery import unreadable
from t5x_gpu.data.sources.line_formats import LINES_PER_SPAN
from t5x_gpu.data.sources.rows import (
  MAX_TEXT_BYTES,
  FileForm,
  Row,
  checked_row,
  is_compressed,
  not_utf8,
  open_stream,
)
from t5x_gpu.data.tf_runtime import tf
from t5x_gpu.errors import DataError
from t5x_gpu.storage.files import is_missing

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
  """Yields (record, whether its checksum matches) from number `skip` on.

  TensorFlow compares checksums at 100 to 170 MB/s but cannot continue after a wrong checksum. This
  reader can, at 4 MB/s. For compressed files only the codec's checksum is compared.
  """
  if not is_compressed(path):
    options = tf.data.Options()
    options.autotune.enabled = False  # autotune's thread would outlive an open file at exit
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
        raise EOFError('the length of a record does not match its checksum')
      if length > MAX_TEXT_BYTES:
        raise ValueError(f'the next one has {length:,} bytes, and {MAX_TEXT_BYTES:,} is the limit')
      record = f.read(length + _TAIL_BYTES)
      if len(record) < length + _TAIL_BYTES:
        raise EOFError('it ends inside a record')
      if number >= skip:
        data, checksum = record[:length], record[length:]
        yield (
          data,
          is_compressed(path) or (_masked_crc32c(data) == int.from_bytes(checksum, 'little')),
        )


def _example(record: bytes) -> tf.train.Features:
  """Returns the features of a tf.train.Example. Raises ValueError if the record is not one."""
  try:
    return tf.train.Example.FromString(record).features.feature
  except Exception as e:  # protobuf's DecodeError, whose module is not public
    raise ValueError(str(e) or type(e).__name__) from e


def _example_columns(record: bytes) -> list[str]:
  """Returns the names of the text features in a tf.train.Example."""
  features = _example(record)
  return sorted(name for name in features if features[name].bytes_list.value)


def _example_row(record: bytes, *, columns: Sequence[str], where: str) -> Row:
  """Returns the texts `columns` of a tf.train.Example, or an error."""
  try:
    features = _example(record)
  except ValueError as e:
    return DataError(f'{where} is not a tf.train.Example: {e}.', fix='Write the file again.')
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


def _tfrecord_columns(path: str) -> list[str]:
  record, _ = next(_tfrecords(path, 0), (None, True))
  return [] if record is None else _example_columns(record)


def _tfrecord_rows(path: str, columns: Sequence[str], skip: int) -> Iterator[Row]:
  for number, (record, is_whole) in enumerate(_tfrecords(path, skip), skip + 1):
    where = f'{path}, record {number}'
    yield (
      _example_row(record, columns=columns, where=where)
      if is_whole
      else DataError(
        f'{where} has changed: its checksum does not match.', fix='Get the file again.'
      )
    )


# An ArrayRecord holds tf.train.Examples or texts; the first record decides.
_WHOLE_RECORD = 'text'
_ROWS_AT_ONCE = 256


def _array_records(path: str, skip: int) -> Iterator[tuple[int, bytes]]:
  """Yields (number, record) after the first `skip`, from 1."""
  reader = ArrayRecordReader(path)
  try:
    count = reader.num_records()
    for first in range(skip, count, _ROWS_AT_ONCE):
      yield from enumerate(reader.read(first, min(count, first + _ROWS_AT_ONCE)), first + 1)
  finally:
    reader.close()


def _first_example(path: str) -> list[str]:
  """Returns the columns of the first record; [] if it is not a tf.train.Example."""
  for _, record in _array_records(path, 0):
    try:
      return _example_columns(record)
    except ValueError:
      return []
  return []


def _arrayrecord_columns(path: str) -> list[str]:
  is_empty = next(_array_records(path, 0), None) is None
  return [] if is_empty else _first_example(path) or [_WHOLE_RECORD]


def _arrayrecord_rows(path: str, columns: Sequence[str], skip: int) -> Iterator[Row]:
  are_examples = bool(_first_example(path))
  for number, record in _array_records(path, skip):
    where = f'{path}, record {number}'
    yield (
      _example_row(record, columns=columns, where=where)
      if are_examples
      else checked_row([record], columns=columns, where=where)
    )


TFRECORD = FileForm('tfrecord', _tfrecord_columns, _tfrecord_rows)
ARRAYRECORD = FileForm('arrayrecord', _arrayrecord_columns, _arrayrecord_rows)


ROWS_PER_BLOCK = 256
# Several iterators (a check, training, evaluation) may read a source concurrently, 32 files each.
_MAX_OPEN = 128
# Errors of libraries for a file that is truncated or has another format.
_BROKEN = (
  OSError,
  EOFError,
  zlib.error,
  pa.ArrowException,
  RuntimeError,
  ValueError,
  KeyError,
  IndexError,
)
_Block = Optional[list[tuple[bytes, ...]]]  # None: the end of the file
DOCUMENT_END = 'document_end'


class BlockReader:
  """A reader for `DocumentSource`: {feature: text, 'document_end': True} of each row.

  A Python call per row is slow, and a Python generator cannot be saved. So Python reads a block of
  256 rows by its number and keeps the file open for the next block; TensorFlow saves the number.

  Args:
    form: form of the files.
    columns: feature -> column. Any text in the column of `document_end` marks an end.
    num_files: number of files of the source.
    chosen: whether the user chose the columns; then they are part of the fingerprint.
    Attributes:
    form: form of the files.
    damage: counts damaged records.
    problem: the DataError that stopped the reader. TensorFlow passes only text out of its threads,
      so the iterator reads the error from here when tf.data fails.
  """

  def __init__(
    self, form: FileForm, *, columns: Mapping[str, str], num_files: int, chosen: bool = False
  ):
    self.form = form
    self.columns = dict(columns)
    self.chosen = chosen
    self.damage = Damage(num_files)
    self.problem: Optional[DataError] = None
    self._lock = threading.Lock()
    # (path, number) -> (the block if it has been read, iterator over the following blocks).
    self._open: collections.OrderedDict[tuple[str, int], tuple[list[_Block], Iterator[_Block]]] = (
      collections.OrderedDict()
    )

  def __call__(self, path: tf.Tensor, file_number: tf.Tensor) -> tf.data.Dataset:
    del file_number
    names = list(self.columns)

    def has_block(number: tf.Tensor) -> tf.Tensor:
      # Stateless for TensorFlow: a block is a pure function of path and number.
      there = tf.numpy_function(self._has, [path, number], tf.bool, stateful=False)
      return tf.ensure_shape(there, [])

    def rows(number: tf.Tensor) -> tf.data.Dataset:
      columns = tf.numpy_function(
        self._read, [path, number], [tf.string] * len(names), stateful=False
      )
      return tf.data.Dataset.from_tensor_slices(
        {name: tf.ensure_shape(texts, [None]) for name, texts in zip(names, columns)}
      )

    def example(row: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
      is_end = tf.strings.length(row[DOCUMENT_END]) > 0 if DOCUMENT_END in row else True
      return {**row, DOCUMENT_END: tf.convert_to_tensor(is_end)}

    numbers = tf.data.Dataset.range(np.iinfo(np.int64).max)
    return numbers.take_while(has_block).flat_map(rows).map(example)

  def _has(self, path: bytes, number: np.int64) -> np.bool_:
    key = (path.decode('utf-8', 'surrogateescape'), int(number))
    block, rest = self._take(key)
    if block is None:
      return np.bool_(False)
    self._keep(key, [block], rest)
    return np.bool_(True)

  def _read(self, path: bytes, number: np.int64) -> list[np.ndarray]:
    file = path.decode('utf-8', 'surrogateescape')
    block, rest = self._take((file, int(number)))
    self._keep((file, int(number) + 1), [], rest)
    return [
      np.array([row[i] for row in block or ()], dtype=object).astype(object)
      for i in range(len(self.columns))
    ]

  def _take(self, key: tuple[str, int]) -> tuple[_Block, Iterator[_Block]]:
    with self._lock:
      read, rest = self._open.pop(key, (None, None))
    if rest is None:
      read, rest = [], self._blocks(*key)
    try:
      return (read[0] if read else next(rest, None)), rest
    except DataError as e:
      self.problem = self.problem or e
      raise

  def _keep(self, key: tuple[str, int], read: list[_Block], rest: Iterator[_Block]) -> None:
    with self._lock:
      self._open[key] = (read, rest)
      while len(self._open) > _MAX_OPEN:
        self._open.popitem(last=False)

  def _blocks(self, path: str, number: int) -> Iterator[_Block]:
    """Yields the blocks of a file from `number` on."""
    at = number * ROWS_PER_BLOCK
    rows = self.form.rows(path, list(self.columns.values()), at)
    while True:
      good: list[tuple[bytes, ...]] = []
      damaged: list[DataError] = []
      first = at
      for at in range(first, first + ROWS_PER_BLOCK + 1):
        if at == first + ROWS_PER_BLOCK:
          break
        try:
          row = next(rows, rows)
        except _BROKEN as e:
          if isinstance(e, OSError) and not is_missing(e):
            raise unreadable(path, e) from e
          raise DataError(
            f'{path} cannot be read as {self.form.name} after record {at}: {e}.',
            fix='The amount lost is unknown, so max_corrupt_fraction does not apply: get the '
            'file again, or leave it out of the pattern.',
          ) from e
        except DataError:
          raise
        except Exception as e:  # a custom form may raise anything
          raise DataError(
            f'`rows` of {self.form.name} failed after record {at} of {path}: '
            f'{type(e).__name__}: {e}.',
            fix='Correct `rows`, or the file.',
            docs='add_a_data_source.md',
          ) from e
        if row is rows:
          break
        if isinstance(row, DataError):
          damaged.append(row)
        elif isinstance(row, tuple) and len(row) == len(self.columns):
          good.append(row)
        elif row is not None:
          what = f'{len(row)} texts' if isinstance(row, tuple) else f'a {type(row).__name__}'
          raise DataError(
            f'`rows` of {self.form.name} yielded {what} for record {at + 1} of {path}, '
            f'and not a tuple of the texts in {len(self.columns)} columns.',
            fix='Let `rows` yield checked_row(values, columns=columns, where=...).',
            docs='add_a_data_source.md',
          )
      if at > first:
        self.damage.count(path, first=first, num_records=at - first, damaged=damaged)
        yield good
      if at < first + ROWS_PER_BLOCK:
        self.damage.end_of_file(path, num_records=at)
        return


# Matches exactly the bytes that `bytes.decode` accepts: RE2 rejects surrogates and overlong forms.
_UTF8 = r'[\x{0}-\x{d7ff}\x{e000}-\x{10ffff}]*'


class Utf8Reader:
  """A reader for `DocumentSource` that refuses text that is not UTF-8.

  A tokenizer would silently turn such bytes into U+FFFD.

  Args:
    read: `read_spans` or `read_lines`.
  Attributes:
    problem: the DataError that stopped the reader; see `BlockReader`.
  """

  def __init__(self, read: Callable[..., tf.data.Dataset]):
    self._read = read
    self.problem: Optional[DataError] = None

  def __call__(self, path: tf.Tensor, file_number: tf.Tensor) -> tf.data.Dataset:
    def checked(text: tf.Tensor) -> tf.Tensor:
      return tf.cond(tf.strings.regex_full_match(text, _UTF8), lambda: text, refuse)

    def refuse() -> tf.Tensor:
      never = tf.numpy_function(self._refuse, [path], tf.string, stateful=False)
      return tf.ensure_shape(never, [])

    return self._read(path, file_number, checked=checked)

  def _refuse(self, path: bytes) -> bytes:
    """Raises DataError for the first line of the file that is not UTF-8."""
    name = path.decode('utf-8', 'surrogateescape')
    with open(name, 'rb') as f:
      for number, line in enumerate(f, 1):
        try:
          line.decode()
        except UnicodeDecodeError as e:
          self.problem = not_utf8(f'{name}:{number}', e)
          raise self.problem from e
    raise DataError(f'{name} changed while it was read.', fix='Start again.')


def _unchecked(text: tf.Tensor) -> tf.Tensor:
  return text


def read_spans(
  path: tf.Tensor, file_number: tf.Tensor, checked: Callable[[tf.Tensor], tf.Tensor] = _unchecked
) -> tf.data.Dataset:
  """Yields {'targets': up to 64 lines of the file, 'document_end': whether they are its last}."""
  del file_number
  lines = tf.data.TextLineDataset(path).map(lambda line: line + '\n')
  spans = lines.batch(LINES_PER_SPAN).map(lambda some: checked(tf.strings.reduce_join(some)))
  nothing = tf.constant('')
  # Delayed by one: a span is the last if no span follows it.
  return (
    spans.concatenate(tf.data.Dataset.from_tensors(nothing))
    .scan(
      nothing,
      lambda span, following: (
        following,
        {'targets': span, 'document_end': tf.strings.length(following) == 0},
      ),
    )
    .skip(1)
  )


def read_lines(
  path: tf.Tensor, file_number: tf.Tensor, checked: Callable[[tf.Tensor], tf.Tensor] = _unchecked
) -> tf.data.Dataset:
  """Yields {'targets': line, 'document_end': True} for each line that is not blank."""
  del file_number
  lines = tf.data.TextLineDataset(path).filter(
    lambda line: tf.strings.length(tf.strings.strip(line)) > 0
  )
  return lines.map(lambda line: {'targets': checked(line), 'document_end': True})
