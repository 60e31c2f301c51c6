"""A tf.data reader for any form of file, with a position that can be saved.

Reads blocks of rows by number.

A Python call per row is slow, and a Python generator cannot be saved. So Python reads a block of
256 rows by its number and keeps the file open for the next block; TensorFlow saves the number.
"""

import collections
import threading
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Optional

import numpy as np
import pyarrow as pa

from t5x_gpu.config.set_aside import is_missing
from t5x_gpu.data.sources.corrupt_records import Damage
from t5x_gpu.data.sources.file_patterns import unreadable
from t5x_gpu.data.sources.rows import FileForm
from t5x_gpu.data.tf_runtime import tf
from t5x_gpu.errors import DataError

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

  def _has(self, path: bytes, number: Any) -> np.bool_:
    key = (path.decode('utf-8', 'surrogateescape'), int(number))
    block, rest = self._take(key)
    if block is None:
      return np.bool_(False)
    self._keep(key, [block], rest)
    return np.bool_(True)

  def _read(self, path: bytes, number: Any) -> list[np.ndarray]:
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
        if row is rows:
          break
        if isinstance(row, DataError):
          damaged.append(row)
        elif row is not None:
          good.append(row)
      if at > first:
        self.damage.count(path, first=first, num_records=at - first, damaged=damaged)
        yield good
      if at < first + ROWS_PER_BLOCK:
        self.damage.end_of_file(path, num_records=at)
        return
