"""Writes one shard of rows: whole, with what there is to know of it, or not at all.

One row of a batch as the bytes of a record, and back. Reading needs numpy alone.

A record holds the features of a row in the order of the names in `index.json`, each as

    1 byte    the kind of its numbers: B, H, I for unsigned integers of 1, 2, 4 bytes, i for signed
              ones of 4 (labels may be negative); the smallest that holds them all
    numbers   little-endian, as many as the feature has positions; one for a label

Segment ids and weights take one byte each, positions and most vocabularies two. ArrayRecord
compresses every record for itself (zstd), so that any of them can be read without its neighbours:
input tokens, which repeat the targets one further on, then cost next to nothing.
"""

import collections
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from t5x_gpu.config.atomic_write import atomic_write
from t5x_gpu.data.features import is_token
from t5x_gpu.data.prepared.index import UNFINISHED, Shard, counted_features, file_digests
from t5x_gpu.data.sources.corrupt_records import Records
from t5x_gpu.errors import DataError

_KINDS = {kind: np.dtype(f'<{kind}') for kind in 'BHIi'}
# Options of ArrayRecord: a record per compressed group, to be read alone. Measured on rows of 1024
# tokens (8 kB): zstd:1 makes 1.6 kB and reads in 19 us, no compression 8.3 kB in 13 us.
WRITER_OPTIONS = 'group_size:1,zstd:1'
READER_OPTIONS = 'readahead_buffer_size:0'


def encode_row(row: Mapping[str, np.ndarray], *, names: Sequence[str]) -> bytes:
  """Returns the record of one row.

  Args:
    row: feature -> [length], or a number.
    names: features in the order of the record.
  Raises:
    DataError: a number that 32 bits do not hold.
  """
  parts = []
  for name in names:
    x = np.asarray(row[name])
    low, high = int(x.min()), int(x.max())
    kind = next(
      (
        k
        for k, dtype in _KINDS.items()
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max
      ),
      None,
    )
    if kind is None:
      raise DataError(
        f'{name!r} has numbers from {low:,} to {high:,}, which 32 bits do not hold.',
        fix='Mend the task: token ids and labels are small whole numbers.',
      )
    parts += [kind.encode(), x.astype(_KINDS[kind]).tobytes()]
  return b''.join(parts)


def decode_into(record: bytes, arrays: Mapping[str, np.ndarray], row: int) -> None:
  """Writes a record into row `row` of `arrays`, whose order is that of the record.

  Args:
    record: of `encode_row`.
    arrays: feature -> [batch, length] or [batch].
    row: which.
  Raises:
    ValueError: bytes that are no record of these features and lengths.
  """
  offset = 0
  for name, array in arrays.items():
    dtype = _KINDS.get(chr(record[offset])) if offset < len(record) else None
    if dtype is None:
      raise ValueError(f'feature {name!r} is missing, or of an unknown kind')
    count = array.shape[1] if array.ndim > 1 else 1
    numbers = np.frombuffer(record, dtype, count, offset + 1)
    array[row] = numbers if array.ndim > 1 else numbers[0]
    offset += 1 + count * dtype.itemsize
  if offset != len(record):
    raise ValueError(f'it has {len(record)} bytes, its features {offset}')


PARTIAL = '.partial'
_REPORT_ROWS = 100
_SAFE = frozenset('abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-')

# Called every now and then with the rows and tokens since the last call.
Report = Callable[[int, int], None]


def folder_name(task: str) -> str:
  """Returns the name of the folder of a task's shards."""
  return ''.join(c if c in _SAFE else '_' for c in task).lstrip('.') or '_'


def facts_path(split: pathlib.Path, task: str, part: int) -> pathlib.Path:
  """Returns where it is noted that a shard is finished, until index.json says so."""
  return split / UNFINISHED / folder_name(task) / f'{part:05d}.json'


def write_shard(
  rows: Iterable[Mapping[str, np.ndarray]],
  *,
  split: pathlib.Path,
  task: str,
  part: int,
  num_parts: int,
  names: Sequence[str],
  report: Report,
  records: Callable[[], Records] = Records,
) -> Shard:
  """Returns what was written.

  Args:
    rows: feature -> [length] or a number.
    split: folder of the split.
    task: name of the task.
    part, num_parts: which shard, of how many.
    names: features in the order of the record.
    report: told of progress.
    records: asked when all rows are read: how many records of the source they were made of.
  Raises:
    DataError: the disk is full, or does not keep what is written to it.
  """
  file = f'{folder_name(task)}/{part:05d}-of-{num_parts:05d}.arrayrecord'
  path = split / file
  partial = path.with_name(path.name + PARTIAL)
  facts = facts_path(split, task, part)
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    facts.parent.mkdir(parents=True, exist_ok=True)
    try:
      shard = _write(rows, partial, names=names, report=report)
      if shard.rows:
        os.replace(partial, path)
        shard = dataclasses.replace(shard, file=file)
    finally:
      partial.unlink(missing_ok=True)
    counted = records()
    shard = dataclasses.replace(shard, records=counted.read, damaged=counted.damaged)
    with atomic_write(facts, suffix=PARTIAL) as new:
      new.write_text(json.dumps(dataclasses.asdict(shard)), 'utf-8')
  except OSError as e:
    raise _disk_error(path, e) from e
  return shard


def _write(
  rows: Iterable[Mapping[str, np.ndarray]],
  path: pathlib.Path,
  *,
  names: Sequence[str],
  report: Report,
) -> Shard:
  counted = counted_features(names)
  largest = dict.fromkeys(names, 0)
  lengths: collections.Counter[str] = collections.Counter()
  num_rows = num_tokens = unreported_tokens = 0
  try:
    writer = ArrayRecordWriter(str(path), WRITER_OPTIONS)
  except (RuntimeError, ValueError) as e:
    raise OSError(str(e)) from e
  for row in rows:
    try:
      writer.write(encode_row(row, names=names))
    except (RuntimeError, ValueError) as e:
      raise OSError(str(e)) from e
    num_rows += 1
    tokens = sum(int(is_token(row, name).sum()) for name in counted)
    num_tokens, unreported_tokens = num_tokens + tokens, unreported_tokens + tokens
    for name in names:
      largest[name] = max(largest[name], int(np.max(row[name])))
    for length in example_lengths(row):
      lengths[str((length - 1).bit_length())] += 1
    if num_rows % _REPORT_ROWS == 0:
      report(_REPORT_ROWS, unreported_tokens)
      unreported_tokens = 0
  try:
    writer.close()
  except (RuntimeError, ValueError) as e:
    raise OSError(str(e)) from e
  report(num_rows % _REPORT_ROWS, unreported_tokens)
  with open(path, 'rb') as f:
    os.fsync(f.fileno())
  size = path.stat().st_size
  reader = ArrayRecordReader(str(path))
  try:
    if reader.num_records() != num_rows:
      raise OSError(f'{reader.num_records()} of {num_rows} rows arrived')
  finally:
    reader.close()
  sha256, sample = file_digests(path)
  return Shard(
    file='',
    rows=num_rows,
    tokens=num_tokens,
    bytes=size,
    sha256=sha256,
    sample=sample,
    largest=largest,
    lengths=dict(sorted(lengths.items(), key=lambda x: int(x[0]))),
  )


def example_lengths(row: Mapping[str, np.ndarray]) -> list[int]:
  """Returns the tokens of each example in a row: of inputs and targets together, padding left out.

  Packed examples are told apart by segment ids; without, a row is one example.
  """
  total = np.zeros(1, np.int64)
  for name in counted_features(row):
    segments = row.get(f'{name.split("_")[0]}_segment_ids')
    counts = (
      np.bincount(segments) if segments is not None else np.asarray([0, is_token(row, name).sum()])
    )
    longer, shorter = sorted((total, counts), key=len, reverse=True)
    total = longer + np.pad(shorter, (0, len(longer) - len(shorter)))
  return [int(length) for length in total[1:] if length]


def _disk_error(path: pathlib.Path, error: OSError) -> DataError:
  free = shutil.disk_usage(path.parent if path.parent.exists() else path.parent.parent).free
  reason = error.strerror or str(error).splitlines()[0][:300]
  return DataError(
    f'{path} could not be written: {reason} ({free / 1e6:,.0f} MB are free there). The shards '
    'that are finished stay.',
    fix='Make room, or take a larger disk, and run the same command again: it goes on.',
    docs='data.md',
  )
