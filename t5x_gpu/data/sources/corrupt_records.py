"""Counts records that cannot be parsed, logs the first few, and stops if there are too many."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Optional

from t5x_gpu.errors import DataError

# A share of fewer records would mean little, so the denominator is at least this.
_FEWEST_JUDGED = 1000
_REASONS_SHOWN = 3
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RecordCounts:
  """Number of records read, including blank records, and number of damaged records."""

  read: int = 0
  damaged: int = 0


def check_share(
  records: RecordCounts,
  *,
  max_fraction: float,
  fewest: int = 0,
  of: str = '',
  last: Optional[DataError] = None,
) -> None:
  """Raises DataError if more of `records` are damaged than `max_fraction` allows.

  Args:
    records: counts of the records read.
    max_fraction: DatasetConfig.max_corrupt_fraction.
    fewest: minimum denominator of the share.
    of: source of the records, for the message.
    last: error of the last damaged record.
  """
  allowed = max_fraction * max(records.read, fewest)
  if records.damaged <= allowed:
    return
  share = records.damaged / records.read
  raise DataError(
    f'{records.damaged} of the {records.read} records read{of} are damaged ({share:.2%}); '
    f'DatasetConfig.max_corrupt_fraction = {max_fraction:g} allows {int(allowed)}.'
    + (f' The last one: {last.what}' if last else ''),
    fix='Correct the files, or allow more: DatasetConfig.max_corrupt_fraction = '
    f'{min(1.0, share * 1.2):.2g}',
    parameters=('DatasetConfig.max_corrupt_fraction',),
  )


class Damage:
  """Damaged records that this process has found in the files of one source.

  Args:
    num_files: number of files of the source.
  Attributes:
    max_fraction: largest share of damaged records among the records that this process has read;
      until all files are read, the denominator is at least 1000.
    records: counts so far; each record counts once, even if it is read again.
  """

  def __init__(self, num_files: int):
    self._num_files = num_files
    self.max_fraction = 0.0
    self.records = RecordCounts()
    self._in_parts = False
    self._counted: dict[str, int] = {}  # path -> number of counted records
    self._in_file: dict[str, int] = {}
    self._finished: set[str] = set()
    self._refused: set[str] = set()
    self._empty = 0
    self._over: Optional[DataError] = None

  def begin_part(self) -> None:
    """Starts a new count for one part of the files. `check_share` checks all parts together."""
    self._in_parts = True
    self.records = RecordCounts()
    self._counted.clear()
    self._in_file.clear()
    self._refused.clear()

  def count(self, path: str, *, first: int, num_records: int, damaged: Sequence[DataError]) -> None:
    """Counts records `first` to `first + num_records` of a file, unless already counted.

    Raises:
      DataError: the share of damaged records exceeds `max_fraction`.
    """
    self._raise_again()
    if first < self._counted.get(path, 0):
      return
    self._counted[path] = first + num_records
    self.records = RecordCounts(
      self.records.read + num_records, self.records.damaged + len(damaged)
    )
    for problem in damaged:
      self._in_file[path] = self._in_file.get(path, 0) + 1
      if self.max_fraction and self._in_file[path] <= _REASONS_SHOWN and path not in self._finished:
        log.warning('record skipped: %s', problem.what)
    self._judge_new(damaged)

  def refuse(self, where: str, problem: DataError) -> None:
    """Counts a record, already counted as read, that a later step refuses. Counts it only once.

    Args:
      where: file and position of the record.
      problem: the reason.
    Raises:
      DataError: as `count` does.
    """
    self._raise_again()
    if where in self._refused:
      return
    self._refused.add(where)
    self.records = RecordCounts(self.records.read, self.records.damaged + 1)
    if self.max_fraction and len(self._refused) <= _REASONS_SHOWN:
      log.warning('record skipped: %s', problem.what)
    elif self.max_fraction and len(str(len(self._refused))) > len(str(len(self._refused) - 1)):
      log.warning('skipped %d unusable records so far', len(self._refused))  # 10, 100
    self._judge_new([problem])

  def _judge_new(self, damaged: Sequence[DataError]) -> None:
    if damaged and not self.max_fraction:
      self._over = DataError(
        damaged[0].what,
        fix=f'{damaged[0].fix}\nOr skip such records: '
        'DatasetConfig.max_corrupt_fraction = 0.001 allows 1 in 1000.',
        parameters=('DatasetConfig.max_corrupt_fraction',),
      )
      self._over.docs = damaged[0].docs
      raise self._over
    if damaged:
      all_read = len(self._finished) == self._num_files
      self._judge(damaged[-1], fewest=0 if all_read else _FEWEST_JUDGED)

  def end_of_file(self, path: str, *, num_records: int) -> None:
    """Records that a file has been read to its end. Raises DataError as `count` does.

    Args:
      path: path of the file.
      num_records: number of records in the file; an earlier process may have counted some of them.
    """
    self._raise_again()
    if path in self._finished:
      return
    self._finished.add(path)
    if not num_records:
      self._empty += 1
      log.warning('%s has 0 records and is skipped (%d such files so far)', path, self._empty)
    if path in self._in_file:
      log.warning('%s: skipped %d damaged records of %d', path, self._in_file[path], num_records)
    if len(self._finished) == self._num_files:
      self._judge(None, fewest=0)

  def _raise_again(self) -> None:
    """Raises the error again if there was too much damage: read-ahead may have found it first.

    tf.data retries for each row of a batch and formats the traceback every time, so the traceback
    must not grow.
    """
    if self._over is not None:
      raise self._over.with_traceback(None)

  def _judge(self, last: Optional[DataError], *, fewest: int) -> None:
    if self._in_parts:
      return
    try:
      check_share(self.records, max_fraction=self.max_fraction, fewest=fewest, last=last)
    except DataError as e:
      self._over = e
      raise
