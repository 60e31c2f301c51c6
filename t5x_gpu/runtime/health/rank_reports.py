"""Reports of all processes about their steps, so that process 0 can name the slowest process.

In a synchronous step all processes take equally long: the fast ones wait in a collective. So they
report the seconds in which their hosts work rather than wait for devices. A profile compares the
devices (docs/monitor.md).
"""

import contextlib
import dataclasses
import json
import socket
import statistics
from collections.abc import Sequence
from typing import Optional

from t5x_gpu.runtime.cluster.coordination import Store, within

_KEY = 't5x_gpu_monitor/ranks'
_ASK_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class RankReport:
  """Means of one process over its last window of steps.

  Attributes:
    rank: process index.
    host: name of the host.
    step: last step of the window.
    host_seconds: seconds per step in which the host works: input, dispatch, logging.
    input_seconds: the part of `host_seconds` spent waiting for input.
    peak_memory_bytes: largest memory in use on one of the process's devices; None if unknown.
    sm_mhz_min: lowest clock of the process's GPUs; None if unknown.
  """

  rank: int
  host: str
  step: int
  host_seconds: float
  input_seconds: float
  peak_memory_bytes: Optional[int] = None
  sm_mhz_min: Optional[float] = None

  @property
  def name(self) -> str:
    return f'process {self.rank} on {self.host}'


@dataclasses.dataclass(frozen=True)
class Slowest:
  """The process whose host works longest, and its seconds per step above the median."""

  report: RankReport
  seconds_behind: float


def slowest(reports: Sequence[RankReport]) -> Optional[Slowest]:
  """Returns the slowest of several processes; None for fewer than two."""
  if len(reports) < 2:
    return None
  last = max(reports, key=lambda r: r.host_seconds)
  return Slowest(last, last.host_seconds - statistics.median(r.host_seconds for r in reports))


class RankReports:
  """Publishes this process's report; process 0 reads all. Never raises, never blocks for long.

  Args:
    store: store that all processes share; None for a single process.
    rank: index of this process.
  """

  def __init__(self, store: Optional[Store], *, rank: int):
    self._store, self._rank = store, rank

  def post(self, **values: float | int | None) -> RankReport:
    """Publishes and returns the report with these `values`."""
    report = RankReport(rank=self._rank, host=socket.gethostname(), **values)
    if self._store is not None:
      text = json.dumps(dataclasses.asdict(report))
      key = f'{_KEY}/{self._rank}'
      within(_ASK_SECONDS, lambda: self._store.key_value_set(key, text, allow_overwrite=True))
    return report

  def read(self) -> list[RankReport]:
    """Returns the last report of each process; [] except on process 0 of several."""
    if self._store is None or self._rank != 0:
      return []
    found = within(_ASK_SECONDS, lambda: self._store.key_value_dir_get(_KEY)) or []
    reports = []
    for _, text in found:
      with contextlib.suppress(ValueError, TypeError):  # written by another version of this code
        reports.append(RankReport(**json.loads(text)))
    return sorted(reports, key=lambda r: r.rank)
