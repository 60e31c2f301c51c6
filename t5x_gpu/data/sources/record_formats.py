"""Reads rows of TFRecord and ArrayRecord files: tf.train.Examples, or a text per ArrayRecord."""

import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Optional

from array_record.python.array_record_module import ArrayRecordReader

from t5x_gpu.data.sources.rows import (
  MAX_TEXT_BYTES,
  FileForm,
  Row,
  checked_row,
  is_compressed,
  open_stream,
)
from t5x_gpu.data.tf_runtime import tf
from t5x_gpu.errors import DataError

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
