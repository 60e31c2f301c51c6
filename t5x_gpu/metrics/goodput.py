"""`MODEL_DIR/goodput.jsonl`: the wall time of a run by phase, across kills and restarts.

Process 0 appends lines of JSON and never changes existing lines. Each line has the seconds of every
phase since its process started, so later lines make up for a lost or damaged line:

    {"run": "9f3a61c2", "at": 1795399860.1, "first_step": 40, "step": 64, "phase": "productive",
     "seconds": {"init": 3.1, "compile": 20.2, "restore": 1.9, "productive": 50.3, "save": 0.4}}

A thread writes a line every 30 seconds; further lines are written at a save, an evaluation and the
end of a run. The loop itself only reads a clock. `metrics/goodput_accounts.py` adds up the lines.
"""

import contextlib
import json
import logging
import os
import pathlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Optional, Self

from t5x_gpu.config.atomic_write import append_line
from t5x_gpu.config.set_aside import set_aside_unless_file
from t5x_gpu.metrics import goodput_accounts
from t5x_gpu.runtime import process_exit

GOODPUT = 'goodput.jsonl'
SECONDS_BETWEEN_LINES = 30.0
# Name of a wait or pause of the step timer -> phase.
_PHASES = {
  'input_wait': 'input',
  'dispatch': 'productive',
  'device_wait': 'productive',
  'local_save': 'save',
}
_log = logging.getLogger(__name__)


class Goodput(contextlib.AbstractContextManager):
  """Tracks the time in each phase; starts writing when `open` names a folder.

      with Goodput(enabled=is_main_process()) as goodput:   # 'init'
        with goodput.phase('compile'): ...
        with goodput.phase('restore'): ...
        goodput.open(folder, first_step=40, facts={...})
        with goodput.phase('productive'):
          for step in ...:
            with goodput.phase('input'): ...
            goodput.step_done(step)
        goodput.ends('done')

  Args:
    enabled: True on the process that writes; other processes only measure.
    age_seconds: time before this object was created that counts as 'init', for example imports.
    clock: returns seconds that never decrease.
    now: returns seconds since 1970.
    period_seconds: seconds between two lines of the thread.
  """

  def __init__(
    self,
    *,
    enabled: bool,
    age_seconds: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time.time,
    period_seconds: float = SECONDS_BETWEEN_LINES,
  ):
    self._enabled, self._clock, self._now = enabled, clock, now
    self._period = period_seconds
    self._run = uuid.uuid4().hex[:8]
    self._lock = threading.Lock()  # held only for microseconds, because the loop takes it
    self._write_lock = threading.Lock()  # a separate lock, because a disk may hang
    self._phase, self._since = 'init', clock()
    self._seconds = {'init': age_seconds}
    self._first_step: Optional[int] = None
    self._step: Optional[int] = None
    self._end: Optional[str] = None
    self._path: Optional[pathlib.Path] = None
    self._has_failed = False
    self._closed = threading.Event()

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self,
    kind: Optional[type[BaseException]],
    error: Optional[BaseException],
    traceback: Optional[TracebackType],
  ) -> None:
    self._close(self._end or (kind.__name__ if kind else 'done'))

  @contextlib.contextmanager
  def phase(self, name: str, *, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Context whose seconds count as `name`.

    Args:
      name: 'productive', 'compile', ..., or the name of a pause in the step timer.
      unless: called at the end; if true, the seconds count as the enclosing phase.
    """
    name = _PHASES.get(name, name)
    before = self._enter(name if name in goodput_accounts.PHASES else goodput_accounts.OTHER)
    if name in ('save', 'eval'):
      self.write()  # at a save: a restart from the checkpoint loses only the steps after this line
    try:
      yield
    finally:
      self._enter(before, counted_as=before if unless() else None)

  def _enter(self, name: str, *, counted_as: Optional[str] = None) -> str:
    """Begins a phase; returns the phase that ends."""
    with self._lock:
      ending = self._phase
      self._count(counted_as or ending)
      self._phase = name
      return ending

  def _count(self, name: str) -> None:
    """Counts the time since the last count as `name`."""
    now = self._clock()
    self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
    self._since = now

  def _state(self) -> dict[str, Any]:
    with self._lock:
      self._count(self._phase)
      return {
        'run': self._run,
        'at': round(self._now(), 3),
        'first_step': self._first_step,
        'step': self._step,
        'phase': self._phase,
        'seconds': {name: round(value, 3) for name, value in self._seconds.items()},
      }

  def step_done(self, step: int) -> None:
    """Counts a step."""
    self._step = step

  def open(
    self,
    folder: str | os.PathLike,
    *,
    first_step: Optional[int] = None,
    facts: Optional[Mapping[str, Any]] = None,
  ) -> None:
    """Writes lines to `folder` from now on.

    Args:
      folder: MODEL_DIR, or the local folder that is copied to it. May change between calls.
      first_step: number of steps taken before the first state; None while unknown.
      facts: JSON-ready facts about this start: 'total_steps', 'devices', 'host', ...
    """
    self._first_step = self._step = first_step
    if not self._enabled:
      return
    first = self._path is None
    self._path = pathlib.Path(folder) / GOODPUT
    with contextlib.suppress(OSError):  # if renaming fails, the write below will warn
      set_aside_unless_file(self._path)
    self.write(facts=facts)
    if first:
      process_exit.before_exit(self._left_at_once)
      threading.Thread(target=self._keep_writing, name='goodput', daemon=True).start()

  def _keep_writing(self) -> None:
    while not self._closed.wait(self._period):
      self.write()

  def ends(self, reason: str) -> None:
    """Records how the run ends: 'done', 'SIGTERM', ...; called after the last step."""
    self._end = reason
    self._enter(goodput_accounts.OTHER)
    self.write()

  def _left_at_once(self) -> None:
    self._close(self._end or 'left at once')

  def _close(self, reason: str) -> None:
    if self._path is None or self._closed.is_set():
      return
    self._closed.set()
    self.ends(reason)
    with contextlib.suppress(ValueError):  # this may be the call that would be cancelled
      process_exit.cancel_before_exit(self._left_at_once)

  def write(self, *, facts: Optional[Mapping[str, Any]] = None) -> None:
    """Appends a line. If the disk is full or gone, warns once; the run continues without lines."""
    if self._path is None:
      return
    with self._write_lock:
      line = self._state()
      line |= {'end': self._end} if self._end else {}
      line |= {'facts': dict(facts)} if facts else {}
      try:
        append_line(self._path, json.dumps(line))
      except OSError as e:
        if not self._has_failed:
          _log.warning('%s cannot be written: %s. The run continues.', self._path, e.strerror or e)
        self._has_failed = True

  def summary(self) -> str:
    """Returns a line about all runs in the folder so far; '' on processes that do not write."""
    accounts = self._accounts()
    return f'goodput {goodput_accounts.summary(accounts)}' if accounts else ''

  def interruption(self) -> str:
    """Returns a line about the cost of the last interruption; '' if there was none."""
    accounts = self._accounts()
    return goodput_accounts.interruption(accounts) if accounts else ''

  def _accounts(self) -> Optional[goodput_accounts.Accounts]:
    if self._path is None:
      return None
    self.write()
    try:
      ledger = goodput_accounts.read_ledger(self._path)
    except (OSError, ValueError) as e:  # best effort: must not stop a run
      _log.warning('No goodput: %s cannot be read: %s.', self._path, e)
      return None
    return goodput_accounts.accounts_of(ledger) if ledger.runs else None
