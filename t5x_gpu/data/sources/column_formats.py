"""Rows of Parquet and Arrow files, which can be read from any row on. No TF."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import pyarrow as pa
from pyarrow import parquet

from t5x_gpu.data.sources.conversations import RecordForm
from t5x_gpu.data.sources.rows import FileForm, Row, checked_row, require_columns
from t5x_gpu.errors import DataError

_ROWS_AT_ONCE = 256
_ARROW_FILE = b'ARROW1'  # start of Arrow's file format; its stream format has no such mark


def _batch_rows(
  batch: pa.RecordBatch, columns: Sequence[str], *, path: str, first: int
) -> Iterator[Row]:
  texts = [_bytes(batch.column(name), name=name, path=path) for name in columns]
  for number, values in enumerate(zip(*texts, strict=True), first + 1):
    yield checked_row(values, columns=columns, where=f'{path}, row {number}')


def _record_rows(
  batch: pa.RecordBatch, columns: Sequence[str], *, path: str, first: int, records: RecordForm
) -> Iterator[Row]:
  """Yields (record as JSON, file and row); the first of `columns` is the key."""
  for number, record in enumerate(batch.to_pylist(), first + 1):
    yield records.row(record, key=columns[0], where=f'{path}, row {number}')


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
      fix='Choose a column of text after the pattern: #text=COLUMN.',
    )
  return column.cast(pa.large_binary()).to_pylist()


def _reading(
  columns: Sequence[str], names: Sequence[str], path: str, records: Optional[RecordForm]
) -> tuple[list[str], Callable[..., Iterator[Row]]]:
  """Returns the columns of the file `path` to read, of all its `names`, and how to read them."""
  optional, read = [], _batch_rows
  if records is not None:
    columns, optional = columns[:1], [name for name in records.optional if name in names]
    read = functools.partial(_record_rows, records=records)
  require_columns(names, columns, path)
  return list(dict.fromkeys([*columns, *optional])), read


def _parquet_columns(path: str) -> list[str]:
  return list(parquet.read_schema(path).names)


def _parquet_rows(
  path: str, columns: Sequence[str], skip: int, records: Optional[RecordForm] = None
) -> Iterator[Row]:
  with parquet.ParquetFile(path) as f:
    wanted_columns, read = _reading(columns, f.schema_arrow.names, path, records)
    first, groups = 0, list(range(f.num_row_groups))
    while groups and first + f.metadata.row_group(groups[0]).num_rows <= skip:
      first += f.metadata.row_group(groups.pop(0)).num_rows
    if not groups:
      return
    for batch in f.iter_batches(
      _ROWS_AT_ONCE, row_groups=groups, columns=wanted_columns, use_threads=False
    ):
      wanted = batch.slice(max(0, skip - first))
      yield from read(wanted, columns, path=path, first=first + len(batch) - len(wanted))
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


def _arrow_rows(
  path: str, columns: Sequence[str], skip: int, records: Optional[RecordForm] = None
) -> Iterator[Row]:
  first = 0
  for batch in _arrow_batches(path):
    names, read = _reading(columns, batch.schema.names, path, records)
    batch = batch.select(names)
    for begin in range(min(max(0, skip - first), len(batch)), len(batch), _ROWS_AT_ONCE):
      yield from read(batch.slice(begin, _ROWS_AT_ONCE), columns, path=path, first=first + begin)
    first += len(batch)


PARQUET = FileForm('parquet', _parquet_columns, _parquet_rows)
ARROW = FileForm('arrow', _arrow_columns, _arrow_rows)


def of_records(form: FileForm, records: RecordForm) -> FileForm:
  """Returns PARQUET or ARROW for tables of conversations or preferences."""
  return dataclasses.replace(form, rows=functools.partial(form.rows, records=records))
