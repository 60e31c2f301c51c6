"""Rows of files that can be entered anywhere: Parquet, Arrow, HDF5, ArrayRecord."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import h5py
import pyarrow as pa
from array_record.python.array_record_module import ArrayRecordReader
from pyarrow import parquet

from t5x_gpu.data.sources.line_formats import example_columns, example_row
from t5x_gpu.data.sources.rows import FileForm, Row, checked_row
from t5x_gpu.errors import DataError

_ROWS_AT_ONCE = 256
_ARROW_FILE = b'ARROW1'  # Arrow's file format begins so, its stream format does not


def _batch_rows(
  batch: pa.RecordBatch, columns: Sequence[str], *, path: str, first: int
) -> Iterator[Row]:
  texts = [_bytes(batch.column(name), name=name, path=path) for name in columns]
  for number, values in enumerate(zip(*texts, strict=True), first + 1):
    yield checked_row(values, columns=columns, where=f'{path}, row {number}')


def _bytes(column: Any, *, name: str, path: str) -> list[Any]:
  if pa.types.is_dictionary(column.type):
    column = column.dictionary_decode()
  if not (
    pa.types.is_string(column.type)
    or pa.types.is_large_string(column.type)
    or pa.types.is_binary(column.type)
    or pa.types.is_large_binary(column.type)
  ):
    raise DataError(
      f'{path}: the column {name!r} holds {column.type}, not text.',
      fix='Choose a column of text behind the pattern: #text=COLUMN.',
    )
  return column.cast(pa.large_binary()).to_pylist()


def _require(names: Sequence[str], columns: Sequence[str], path: str) -> None:
  if missing := [name for name in columns if name not in names]:
    raise DataError(
      f'{path} has no column {missing[0]!r}: it has {", ".join(names)}.',
      fix='Give all files that the pattern matches the same columns.',
    )


def _parquet_columns(path: str) -> list[str]:
  return list(parquet.read_schema(path).names)


def _parquet_rows(path: str, columns: Sequence[str], skip: int) -> Iterator[Row]:
  with parquet.ParquetFile(path) as f:
    _require(f.schema_arrow.names, columns, path)
    first, groups = 0, list(range(f.num_row_groups))
    while groups and first + f.metadata.row_group(groups[0]).num_rows <= skip:
      first += f.metadata.row_group(groups.pop(0)).num_rows
    if not groups:
      return
    for batch in f.iter_batches(
      _ROWS_AT_ONCE, row_groups=groups, columns=list(set(columns)), use_threads=False
    ):
      wanted = batch.slice(max(0, skip - first))
      yield from _batch_rows(wanted, columns, path=path, first=first + len(batch) - len(wanted))
      first += len(batch)


@contextlib.contextmanager
def _arrow_reader(path: str) -> Iterator[pa.RecordBatchFileReader | pa.RecordBatchStreamReader]:
  with pa.memory_map(path) as source:
    is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
    source.seek(0)
    yield pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)


def _arrow_batches(path: str) -> Iterator[pa.RecordBatch]:
  with _arrow_reader(path) as reader:
    if isinstance(reader, pa.RecordBatchFileReader):
      yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
      yield from reader


def _arrow_columns(path: str) -> list[str]:
  with _arrow_reader(path) as reader:
    return list(reader.schema.names)


def _arrow_rows(path: str, columns: Sequence[str], skip: int) -> Iterator[Row]:
  first = 0
  for batch in _arrow_batches(path):
    _require(batch.schema.names, columns, path)
    for begin in range(min(max(0, skip - first), len(batch)), len(batch), _ROWS_AT_ONCE):
      yield from _batch_rows(
        batch.slice(begin, _ROWS_AT_ONCE), columns, path=path, first=first + begin
      )
    first += len(batch)


def _hdf5_columns(path: str) -> list[str]:
  names: list[str] = []
  with h5py.File(path, 'r') as f:
    f.visititems(
      lambda name, found: (
        names.append(name)
        if isinstance(found, h5py.Dataset)
        and found.ndim == 1
        and (found.dtype.kind == 'S' or h5py.check_string_dtype(found.dtype))
        else None
      )
    )
  return names


def _hdf5_rows(path: str, columns: Sequence[str], skip: int) -> Iterator[Row]:
  _require(_hdf5_columns(path), columns, path)
  with h5py.File(path, 'r') as f:
    lengths = [len(f[name]) for name in columns]
    if len(set(lengths)) > 1:
      raise DataError(
        f'{path} has '
        + ' and '.join(f'{length} rows in {name!r}' for name, length in zip(columns, lengths))
        + '.',
        fix='Write as many inputs as targets.',
      )
    for first in range(skip, lengths[0], _ROWS_AT_ONCE):
      texts = [f[name][first : first + _ROWS_AT_ONCE] for name in columns]
      for number, values in enumerate(zip(*texts, strict=True), first + 1):
        yield checked_row(
          [bytes(value) for value in values], columns=columns, where=f'{path}, row {number}'
        )


# An ArrayRecord holds tf.train.Examples, or texts; the first record tells which.
_WHOLE_RECORD = 'text'


def _is_example(record: bytes) -> bool:
  try:
    return bool(example_columns(record))
  except ValueError:
    return False


def _arrayrecord_columns(path: str) -> list[str]:
  reader = ArrayRecordReader(path)
  try:
    if not reader.num_records():
      return []
    record = reader.read([0])[0]
    return example_columns(record) if _is_example(record) else [_WHOLE_RECORD]
  finally:
    reader.close()


def _arrayrecord_rows(path: str, columns: Sequence[str], skip: int) -> Iterator[Row]:
  reader = ArrayRecordReader(path)
  try:
    count = reader.num_records()
    are_examples = count and _is_example(reader.read([0])[0])
    for first in range(skip, count, _ROWS_AT_ONCE):
      records = reader.read(first, min(count, first + _ROWS_AT_ONCE))
      for number, record in enumerate(records, first + 1):
        where = f'{path}, record {number}'
        yield (
          example_row(record, columns=columns, where=where)
          if are_examples
          else checked_row([record], columns=columns, where=where)
        )
  finally:
    reader.close()


PARQUET = FileForm('parquet', _parquet_columns, _parquet_rows)
ARROW = FileForm('arrow', _arrow_columns, _arrow_rows)
HDF5 = FileForm('hdf5', _hdf5_columns, _hdf5_rows)
ARRAYRECORD = FileForm('arrayrecord', _arrayrecord_columns, _arrayrecord_rows)
