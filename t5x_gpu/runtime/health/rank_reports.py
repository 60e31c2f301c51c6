"""What each process reports about its steps, so that process 0 can name the slowest.

In a synchronous step all processes take the same time: those that are early wait in a collective.
So they report the seconds that their hosts work and do not wait for devices. For the devices, a
profile compares them (docs/monitor.md).
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
    host: its name.
    step: last step of the window.
    host_seconds: seconds per step in which its host works: input, dispatch, logging.
    input_seconds: the part of them that waits for input.
    peak_memory_bytes: most memory in use on one of its devices; None if unknown.
    sm_mhz_min: lowest clock of its GPUs; None if unknown.
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
  """The process whose host works longest, and by how many seconds per step more than the median."""

  report: RankReport
  seconds_behind: float


def slowest(reports: Sequence[RankReport]) -> Optional[Slowest]:
  """Returns the slowest of several processes; None for fewer than two."""
  if len(reports) < 2:
    return None
  last = max(reports, key=lambda r: r.host_seconds)
  return Slowest(last, last.host_seconds - statistics.median(r.host_seconds for r in reports))


class RankReports:
  """Publishes this process's report, and on process 0 reads all. Never raises, never blocks long.

  Args:
    store: that all processes share; None for a single process.
    rank: of this process.
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
      with contextlib.suppress(ValueError, TypeError):  # of another version of this code
        reports.append(RankReport(**json.loads(text)))
    return sorted(reports, key=lambda r: r.rank)
