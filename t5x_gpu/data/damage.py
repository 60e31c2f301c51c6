"""Records that cannot be parsed: counted once each, reported with their first reasons, bounded."""

import logging
from collections.abc import Sequence
from typing import Optional

from t5x_gpu.errors import DataError

# Below this many records a share means little: the bound is then on this many.
_FEWEST_JUDGED = 1000
_REASONS_SHOWN = 3
log = logging.getLogger(__name__)


class Damage:
  """What a process has met of damage in the files of one source.

  Args:
    num_files: of the source.

  Attributes:
    max_fraction: share of the records that may be damaged. It is judged on the records that this
      process has read, on 1000 of them at least until all files are read.
    num_records, num_damaged: read so far, each counted once however often it is read.
  """

  def __init__(self, num_files: int):
    self._num_files = num_files
    self.max_fraction = 0.0
    self.num_records = 0
    self.num_damaged = 0
    self._counted: dict[str, int] = {}  # path -> records up to which it is counted
    self._in_file: dict[str, int] = {}
    self._finished: set[str] = set()
    self._empty = 0
    self._over: Optional[DataError] = None

  def count(self, path: str, *, first: int, num_records: int, damaged: Sequence[DataError]) -> None:
    """Counts records `first` to `first + num_records` of a file, unless they are counted.

    Raises:
      DataError: more damage than `max_fraction`.
    """
    if self._over is not None:  # a reading ahead that nobody waited for may have met it first
      raise self._over
    if first < self._counted.get(path, 0):
      return
    self._counted[path] = first + num_records
    self.num_records += num_records
    self.num_damaged += len(damaged)
    for problem in damaged:
      self._in_file[path] = self._in_file.get(path, 0) + 1
      if self.max_fraction and self._in_file[path] <= _REASONS_SHOWN:
        log.warning('record left out: %s', problem.what)
    if damaged:
      self._judge(damaged[-1] if self.max_fraction else damaged[0],
                  fewest=_FEWEST_JUDGED if self.max_fraction else 0)

  def end_of_file(self, path: str) -> None:
    """Reports a file that is read to its end. Raises DataError as `count` does."""
    if path in self._finished:
      return
    self._finished.add(path)
    if not self._counted.get(path):
      self._empty += 1
      log.warning('%s holds no record and is skipped (%d such files so far)', path, self._empty)
    if path in self._in_file:
      log.warning('%s: %d of %d records are damaged and left out', path, self._in_file[path],
                  self._counted[path])
    if len(self._finished) == self._num_files and self.num_damaged:
      self._judge(None, fewest=0)

  def _judge(self, last: Optional[DataError], *, fewest: int) -> None:
    allowed = self.max_fraction * max(self.num_records, fewest)
    if self.num_damaged <= allowed:
      return
    share = self.num_damaged / self.num_records
    if not self.max_fraction and last is not None:
      self._over = DataError(
          last.what, fix=f'{last.fix}\nOr leave such records out: '
          'DatasetConfig.max_corrupt_fraction = 0.001 allows 1 in 1000.',
          parameters=('DatasetConfig.max_corrupt_fraction',))
      raise self._over
    self._over = DataError(
        f'{self.num_damaged} of the {self.num_records} records read are damaged ({share:.2%}); '
        f'DatasetConfig.max_corrupt_fraction = {self.max_fraction:g} allows {int(allowed)}.'
        + (f' The last one: {last.what}' if last else ''),
        fix='Mend the files, or allow more: DatasetConfig.max_corrupt_fraction = '
            f'{min(1.0, share * 1.2):.2g}', parameters=('DatasetConfig.max_corrupt_fraction',))
    raise self._over
