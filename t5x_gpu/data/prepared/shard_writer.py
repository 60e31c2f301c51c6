"""A shard of packed rows: the format of a row, statistics of rows, and writing the file.

A record holds the features of a row in the order of the names in `index.json`, each as

    1 byte    the type of its numbers: B, H, I for unsigned integers of 1, 2, 4 bytes, i for signed
              integers of 4 (labels may be negative); the smallest type that fits
    numbers   little-endian, one per position of the feature; one for a label

Segment ids and weights take one byte each, positions and most vocabularies two. ArrayRecord
compresses every record separately (zstd), so any record can be read alone. Input tokens, which
repeat the targets shifted by one, take almost no space after compression. Reading needs only numpy.

A shard appears only when it is complete.
"""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Optional

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from t5x_gpu.data import features
from t5x_gpu.data.features import is_token
from t5x_gpu.data.prepared.index import UNFINISHED, Shard, counted_features
from t5x_gpu.data.sources.corrupt_records import RecordCounts
from t5x_gpu.data.sources.discovery import sample_digest, sha256_of
from t5x_gpu.errors import DataError, first_line
from t5x_gpu.storage.files import free_bytes, write_atomically
from t5x_gpu.terminal.console import show


@dataclasses.dataclass(frozen=True)
class TokenSpan:
  """Consecutive tokens of one example in a row, all with or all without a loss.

  Attributes:
    feature: model feature of the tokens.
    example: number of the example in the row, from 1.
    has_loss: whether the loss counts there; True without loss weights.
    text: the decoded tokens.
    is_first: whether this piece begins the example.
  """

  feature: str
  example: int
  has_loss: bool
  text: str
  is_first: bool


def row_of(batch: Mapping[str, np.ndarray], row: int) -> dict[str, np.ndarray]:
  """Returns one row of a batch: feature -> [length] or a number."""
  return {name: np.asarray(x[row]) for name, x in batch.items()}


def pieces(
  row: Mapping[str, np.ndarray], *, decode: Callable[[Sequence[int]], str]
) -> Iterator[TokenSpan]:
  """Yields the pieces of a row.

  Args:
    row: result of `row_of`.
    decode: ids -> text.
  """
  for feature in counted_features(row):
    tokens, stack = row[feature], feature.split('_')[0]
    segments = row.get(f'{stack}_segment_ids')
    segments = is_token(row, feature).astype(np.int32) if segments is None else segments
    weights = row.get(f'{stack}_loss_weights')
    has_loss = np.ones(len(tokens), bool) if weights is None else weights > 0
    # The first token of a conversation is only an input; other texts begin with input 0.
    inputs = row.get('decoder_input_tokens') if feature == 'decoder_target_tokens' else None
    changes = np.flatnonzero((np.diff(segments) != 0) | np.diff(has_loss)) + 1
    last = 0
    for start, end in zip([0, *changes], [*changes, len(tokens)]):
      example = int(segments[start])
      if example:
        is_first = example != last
        before = inputs[start : start + 1] if is_first and inputs is not None else []
        ids = [int(i) for i in (*before, *tokens[start:end])]
        text = decode(ids[1:] if len(before) and not before[0] else ids)
        yield TokenSpan(feature, example, bool(has_loss[start]), text, is_first=is_first)
        last = example


def num_with_loss(row: Mapping[str, np.ndarray]) -> Optional[int]:
  """Returns the number of tokens with a loss in a row of a decoder-only model; else None."""
  weights = None if 'encoder_input_tokens' in row else row.get('decoder_loss_weights')
  return None if weights is None else int((weights > 0).sum())


def example_lengths(row: Mapping[str, np.ndarray]) -> list[int]:
  """Returns the number of tokens of each example: inputs and targets together, without padding.

  Segment ids separate packed examples; without segment ids, a row is one example.
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


@dataclasses.dataclass
class RowStats:
  """Sums over rows.

  Attributes:
    rows, tokens, positions: counts; positions are tokens and padding.
    lengths: exponent e -> number of examples with 2**(e-1) < length <= 2**e.
  """

  rows: int = 0
  tokens: int = 0
  positions: int = 0
  lengths: collections.Counter = dataclasses.field(default_factory=collections.Counter)

  @property
  def padding(self) -> float:
    return 1 - self.tokens / max(1, self.positions)

  def add(self, row: Mapping[str, np.ndarray]) -> None:
    """Counts a row, unless it is all padding, which only fills up a batch."""
    tokens = sum(int(is_token(row, name).sum()) for name in counted_features(row))
    if tokens:
      self.rows, self.tokens = self.rows + 1, self.tokens + tokens
      self.positions += sum(len(row[name]) for name in counted_features(row))
      self.lengths.update((length - 1).bit_length() for length in example_lengths(row))


def target_of(row: Mapping[str, np.ndarray], names: Sequence[str]) -> str:
  """Returns the class, classes, tags or number of a row as text; '' if it has none."""

  def named(number: int) -> str:
    return names[number] if 0 <= number < len(names) else str(number)

  if features.LABEL in row:
    return f'label: {named(int(row[features.LABEL]))}'
  if features.LABELS in row:
    found = [named(int(i) - 1) for i in row[features.LABELS] if i > 0]
    one_per_word = features.LABEL_WEIGHTS not in row
    return f'tags: {" ".join(found)}' if one_per_word else f'labels: {", ".join(found) or "none"}'
  if features.SCORES in row and (row[features.SCORES] or 'encoder_positions' not in row):
    return f'score: {row[features.SCORES] / features.SCORE_UNIT:.10g}'
  return ''


_KINDS = {kind: np.dtype(f'<{kind}') for kind in 'BHIi'}
# One record per compressed group, so that each can be read alone. Measured on rows of 1024 tokens
# (8 kB): zstd:1 takes 1.6 kB and reads in 19 us; no compression takes 8.3 kB and 13 us.
WRITER_OPTIONS = 'group_size:1,zstd:1'


def encode_row(row: Mapping[str, np.ndarray], *, names: Sequence[str]) -> bytes:
  """Returns the record of one row.

  Args:
    row: feature -> [length], or a number.
    names: features in the order of the record.
  Raises:
    DataError: a number needs more than 32 bits.
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
        f'{name!r} has numbers from {low:,} to {high:,}, which do not fit into 32 bits.',
        fix='Correct the task: token ids and labels are small whole numbers.',
      )
    parts += [kind.encode(), x.astype(_KINDS[kind]).tobytes()]
  return b''.join(parts)


def decode_into(record: bytes, arrays: Mapping[str, np.ndarray], row: int) -> None:
  """Decodes a record into row `row` of `arrays`, which have the order of the record.

  Args:
    record: result of `encode_row`.
    arrays: feature -> [batch, length] or [batch].
    row: index of the row.
  Raises:
    ValueError: the record does not have these features and lengths.
  """
  offset = 0
  for name, array in arrays.items():
    dtype = _KINDS.get(chr(record[offset])) if offset < len(record) else None
    if dtype is None:
      raise ValueError(f'feature {name!r} is missing, or has an unknown type')
    count = array.shape[1] if array.ndim > 1 else 1
    numbers = np.frombuffer(record, dtype, count, offset + 1)
    array[row] = numbers if array.ndim > 1 else numbers[0]
    offset += 1 + count * dtype.itemsize
  if offset != len(record):
    raise ValueError(f'it has {len(record)} bytes, its features {offset}')


PARTIAL = '.partial'
_REPORT_ROWS = 100
_SAFE = frozenset('abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-')

# Takes the number of rows and tokens written since the last call.
Report = Callable[[int, int], None]


def folder_name(task: str) -> str:
  """Returns the name of the folder for a task's shards."""
  return ''.join(c if c in _SAFE else '_' for c in task).lstrip('.') or '_'


def facts_path(split: pathlib.Path, task: str, part: int) -> pathlib.Path:
  """Returns the file that records a finished shard until index.json exists."""
  return split / UNFINISHED / folder_name(task) / f'{part:05d}.json'


def write_whole(path: pathlib.Path, text: str) -> None:
  """Writes a file that appears only when it is complete and on the disk."""
  write_atomically(path, text, sync=True, suffix=PARTIAL)


def write_shard(
  rows: Iterable[Mapping[str, np.ndarray]],
  *,
  split: pathlib.Path,
  task: str,
  part: int,
  num_parts: int,
  names: Sequence[str],
  report: Report,
  records: Callable[[], RecordCounts] = RecordCounts,
) -> Shard:
  """Writes one shard, and returns its entry in the index.

  Args:
    rows: feature -> [length] or a number.
    split: folder of the split.
    task: name of the task.
    part, num_parts: index of the shard, number of shards.
    names: features in the order of the record.
    report: called with the progress.
    records: called after all rows; returns the number of source records behind them.
  Raises:
    DataError: the disk is full, or loses written data.
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
    write_whole(facts, json.dumps(dataclasses.asdict(shard)))
  except OSError as e:
    raise _disk_error(path, e) from e
  return shard


@contextlib.contextmanager
def _library_errors() -> Iterator[None]:
  """Turns ArrayRecord's errors into OSError."""
  try:
    yield
  except (RuntimeError, ValueError) as e:
    raise OSError(str(e)) from e


def _write(
  rows: Iterable[Mapping[str, np.ndarray]],
  path: pathlib.Path,
  *,
  names: Sequence[str],
  report: Report,
) -> Shard:
  largest, stats = dict.fromkeys(names, 0), RowStats()
  num_rows = reported_tokens = 0
  with _library_errors():
    writer = ArrayRecordWriter(str(path), WRITER_OPTIONS)
  for num_rows, row in enumerate(rows, 1):
    with _library_errors():
      writer.write(encode_row(row, names=names))
    stats.add(row)
    for name in names:
      largest[name] = max(largest[name], int(np.max(row[name])))
    if num_rows % _REPORT_ROWS == 0:
      report(_REPORT_ROWS, stats.tokens - reported_tokens)
      reported_tokens = stats.tokens
  with _library_errors():
    writer.close()
  report(num_rows % _REPORT_ROWS, stats.tokens - reported_tokens)
  with open(path, 'rb') as f:
    os.fsync(f.fileno())
  reader = ArrayRecordReader(str(path))
  try:
    if reader.num_records() != num_rows:
      raise OSError(f'{reader.num_records()} of {num_rows} rows arrived')
  finally:
    reader.close()
  return Shard(
    file='',
    rows=num_rows,
    tokens=stats.tokens,
    bytes=path.stat().st_size,
    sha256=sha256_of(path),
    sample=sample_digest(path),
    largest=largest,
    lengths={str(e): number for e, number in sorted(stats.lengths.items())},
  )


def _disk_error(path: pathlib.Path, error: OSError) -> DataError:
  free = free_bytes(path.parent)
  room = '' if free is None else f' ({show(free, MB=",.0f")} are free there)'
  reason = error.strerror or first_line(error)[:300]
  return DataError(
    f'{path} could not be written: {reason}{room}. Finished shards are kept.',
    fix='Free some space, or use a larger disk, and run the same command again: it continues.',
    docs='data.md',
  )
