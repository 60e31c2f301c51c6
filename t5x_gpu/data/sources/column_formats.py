"""Reads rows of Parquet and Arrow files, starting at any row. No TF."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Optional, Union

import pyarrow as pa
from pyarrow import compute, parquet

from t5x_gpu.data.sources.conversations import RecordForm
from t5x_gpu.data.sources.json_lines import json_value
from t5x_gpu.data.sources.rows import FileForm, Row, checked_row, require_columns
from t5x_gpu.errors import DataError
from t5x_gpu.storage.json_schema import JsonObject, JsonValue

_ROWS_AT_ONCE = 256
_JSON_TYPE = 'arrow.json'  # https://arrow.apache.org/docs/format/CanonicalExtensions.html#json
_TEXT_TYPES = (
  pa.types.is_string,
  pa.types.is_large_string,
  pa.types.is_string_view,
  pa.types.is_binary,
  pa.types.is_large_binary,
  pa.types.is_binary_view,
  pa.types.is_fixed_size_binary,
  pa.types.is_null,
)
_ARROW_FILE = b'ARROW1'  # start of Arrow's file format; its stream format has no such mark


def _batch_rows(
  batch: pa.RecordBatch, columns: Sequence[str], *, path: str, first: int
) -> Iterator[Row]:
  texts = [_bytes(batch.column(name), name=name, path=path) for name in columns]
  for number, values in enumerate(zip(*texts, strict=True), first + 1):
    where = f'{path}, row {number}'
    if wrong := [value for value in values if isinstance(value, DataError)]:
      yield DataError(f'{where}{wrong[0].what}', fix=wrong[0].fix)
    else:
      yield checked_row(values, columns=columns, where=where)


def _record_rows(
  batch: pa.RecordBatch, columns: Sequence[str], *, path: str, first: int, records: RecordForm
) -> Iterator[Row]:
  """Yields (record as JSON, file and row); the first of `columns` is the key."""
  for record, where in _plain_records(batch, path=path, first=first):
    if isinstance(record, DataError):
      yield record
    elif all(value is None for value in record.values()):
      yield None
    else:
      yield records.row(record, key=columns[0], where=where)


def _plain_records(
  batch: pa.RecordBatch, *, path: str, first: int
) -> Iterator[tuple[Union[JsonObject, DataError], str]]:
  """Yields (column -> value, or an error; file and row) of each row."""
  kinds = {field.name: field.type for field in batch.schema}
  for number, record in enumerate(batch.to_pylist(), first + 1):
    where = f'{path}, row {number}'
    try:
      yield {name: _plain(value, kinds[name]) for name, value in record.items()}, where
    except ValueError as e:
      yield DataError(f'{where} cannot be read: {e}.', fix='Correct or remove that row.'), where


def _plain(value: object, kind: pa.DataType) -> JsonValue:
  """Returns a value of a table in the form it would have in JSON lines.

  All structs of a column have the same fields, so fields that a row lacks are null. They are left
  out, because chat templates write all fields. Nulls in the JSON of `arrow.json` stay.

  Raises:
    ValueError: text in a column of `arrow.json` is not JSON, or bytes are not UTF-8.
  """
  if value is None:
    return None
  if isinstance(kind, pa.BaseExtensionType):
    if kind.extension_name == _JSON_TYPE:
      return json_value(value)
    return _plain(value, kind.storage_type)
  if pa.types.is_struct(kind):
    return {
      field.name: _plain(value[field.name], field.type)
      for field in kind
      if value[field.name] is not None
    }
  if pa.types.is_map(kind):
    return {key: _plain(item, kind.item_type) for key, item in value}
  if isinstance(value, list):
    return [_plain(item, kind.value_type) for item in value]
  return value.decode() if isinstance(value, bytes) else value


def _bytes(column: pa.Array, *, name: str, path: str) -> list[Optional[bytes] | DataError]:
  """Returns the texts of a column as UTF-8, None for nulls, a DataError for other values."""
  kind = column.type
  if isinstance(kind, pa.BaseExtensionType):
    if kind.extension_name == _JSON_TYPE:
      return [None if text is None else _json_text(text, name) for text in column.to_pylist()]
    column, kind = column.storage, kind.storage_type
  if pa.types.is_dictionary(kind):
    column = column.dictionary_decode()
  elif pa.types.is_run_end_encoded(kind):
    column = compute.run_end_decode(column)
  if not any(is_text(column.type) for is_text in _TEXT_TYPES):
    raise DataError(
      f'{path}: the column {name!r} holds {column.type}, not text.',
      fix='Choose a column of text after the pattern: #text=COLUMN.',
    )
  return column.cast(pa.large_binary()).to_pylist()


def _json_text(text: str, name: str) -> Union[bytes, DataError]:
  try:
    value = json_value(text)
    return value.encode()
  except (ValueError, AttributeError):
    return DataError(
      f' has {text[:60]} in {name!r}, not a text.', fix='Correct or remove that row.'
    )


def _reading(
  columns: Sequence[str], names: Sequence[str], path: str, records: Optional[RecordForm]
) -> tuple[list[str], Callable[..., Iterator[Row]]]:
  """Returns the columns to read among `names`, and the function that reads their rows."""
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


def parquet_records(
  path: str, columns: Sequence[str]
) -> Iterator[tuple[Union[JsonObject, DataError], str]]:
  """Yields (column -> value, or an error; file and row) of each row of a Parquet file."""
  first = 0
  with parquet.ParquetFile(path) as f:
    for batch in f.iter_batches(_ROWS_AT_ONCE, columns=list(columns), use_threads=False):
      yield from _plain_records(batch, path=path, first=first)
      first += len(batch)


def of_records(form: FileForm, records: RecordForm) -> FileForm:
  """Returns PARQUET or ARROW for tables of conversations or preferences."""
  return dataclasses.replace(form, rows=functools.partial(form.rows, records=records))
