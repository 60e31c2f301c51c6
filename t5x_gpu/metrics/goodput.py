"""`MODEL_DIR/goodput.jsonl`: the wall time of a run by phase, across kills and restarts.

Process 0 appends lines of JSON and never changes existing lines (`Goodput`). Each line has the
seconds of every phase since its process started, so later lines make up for a lost or damaged line:

    {"run": "9f3a61c2", "at": 1795399860.1, "first_step": 40, "step": 64, "phase": "productive",
     "seconds": {"init": 3.1, "compile": 20.2, "restore": 1.9, "productive": 50.3, "save": 0.4}}

A thread writes a line every 30 seconds; further lines are written at a save, an evaluation and the
end of a run. The loop itself only reads a clock. `read_ledger` and `accounts_of` add up the lines.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
import pathlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Annotated, Optional, Self

from t5x_gpu.errors import first_line
from t5x_gpu.runtime import process_exit
from t5x_gpu.runtime.cluster.interruptions import Interruption, history_of
from t5x_gpu.storage.files import append_line, set_aside_unless_file
from t5x_gpu.storage.json_schema import Number, parse_json, read_bytes, schema_of
from t5x_gpu.terminal.progress import format_seconds

_log = logging.getLogger(__name__)

PRODUCTIVE, LOST, DOWNTIME, OTHER = 'productive', 'lost', 'downtime', 'other'
DONE = 'done'  # the end of a run that has taken all its steps
# Phases that a process measures; further categories follow from several processes.
PHASES = (PRODUCTIVE, 'init', 'compile', 'restore', 'input', 'save', 'eval', OTHER)
CATEGORIES = (*PHASES, LOST, DOWNTIME)
MEANING = {
  PRODUCTIVE: 'training steps that count',
  'init': 'imports, checks, joining the other processes, opening the data',
  'compile': 'XLA compiles, or reads the compiled step from its cache',
  'restore': 'the first state: a checkpoint, or initial values',
  'input': 'the devices had nothing to do, because the next batch was not ready',
  'save': 'the loop waits for a save',
  'eval': 'evaluations; the sample and the report at the end',
  OTHER: 'other pauses of the loop, and the end of the process',
  LOST: 'steps that were trained again after a restart',
  DOWNTIME: 'between the last sign of one process and the start of the next',
}

Seconds = Annotated[float, Number(0, 1e10)]
Facts = Mapping[str, object]  # JSON values


@dataclasses.dataclass(frozen=True)
class Line:
  """One line of the ledger.

  Attributes:
    run: identifier of the process.
    at: time of writing, in seconds since 1970.
    seconds: phase -> seconds since the process started.
    first_step: step that the process started from; None before its first state.
    step: the last finished step; None before the first state.
    phase: current phase of the process.
    end: 'done', 'SIGTERM', 'TrainingError', ...
    facts: facts about the start of the process, in one of its lines.
  """

  run: str
  at: Seconds
  seconds: Mapping[str, Seconds]
  first_step: Optional[int] = None
  step: Optional[int] = None
  phase: str = OTHER
  end: Optional[str] = None
  facts: Optional[Facts] = None

  @property
  def total(self) -> float:
    return math.fsum(self.seconds.values())


_FIELDS = [field.name for field in dataclasses.fields(Line)]
_SCHEMA = dataclasses.replace(schema_of(Line), others=True)  # a later version may add keys


@dataclasses.dataclass(frozen=True)
class ProcessLines:
  """The lines of one process, from its start to its end or kill.

  Attributes:
    lines: lines ordered by time, at least one.
    first_step: step that it started from; None if it never had a state.
    end: 'done', 'SIGTERM', 'TrainingError', ...; None if it was killed or still runs.
    facts: facts about its start.
  """

  lines: Sequence[Line]
  first_step: Optional[int]
  end: Optional[str]
  facts: Facts

  @property
  def start(self) -> float:
    """When the process started, in seconds since 1970."""
    return self.last.at - self.last.total

  @property
  def last(self) -> Line:
    return self.lines[-1]


@dataclasses.dataclass(frozen=True)
class Ledger:
  """The content of a ledger.

  Attributes:
    runs: processes ordered by start time.
    damaged: numbers of unreadable lines, from 1.
  """

  runs: Sequence[ProcessLines]
  damaged: Sequence[int]


def read_ledger(path: str | os.PathLike) -> Ledger:
  """Returns the content of a ledger; skips and counts damaged lines.

  Raises:
    OSError, ValueError: the file cannot be read.
  """
  found: dict[str, list[Line]] = {}
  damaged = []
  for number, text in enumerate(read_bytes(path).split(b'\n'), 1):
    if not text.strip():
      continue
    try:
      record = parse_json(text, _SCHEMA)
    except ValueError:
      damaged.append(number)
      continue
    record['seconds'] = _known(record['seconds'])
    line = Line(**{name: record[name] for name in _FIELDS if name in record})
    found.setdefault(line.run, []).append(line)
  runs = sorted(map(_process, found.values()), key=lambda run: run.start)
  return Ledger(runs, damaged)


def _process(lines: list[Line]) -> ProcessLines:
  first = [line.first_step for line in lines if line.first_step is not None]
  ends = [line.end for line in lines if line.end]
  facts = dict(item for line in lines for item in (line.facts or {}).items())
  return ProcessLines(lines, first[-1] if first else None, ends[-1] if ends else None, facts)


def _known(seconds: Mapping[str, float]) -> dict[str, float]:
  """Returns seconds by phase; phases of a later version count as other."""
  known: dict[str, float] = {}
  for name, value in seconds.items():
    name = name if name in PHASES else OTHER
    known[name] = known.get(name, 0.0) + value
  return known


@dataclasses.dataclass(frozen=True)
class ProcessAccount:
  """The time of one process by category.

  Attributes:
    process: the lines of the process.
    seconds: category -> seconds; downtime is the time before its start.
    lost_steps: number of steps that a later process trained again.
    interruptions: what interrupted the run before this process, as far as `launch` knows it.
  """

  process: ProcessLines
  seconds: Mapping[str, float]
  lost_steps: int
  interruptions: Sequence[Interruption] = ()


@dataclasses.dataclass(frozen=True)
class Accounts:
  """The wall time of a run by category, over all its processes.

  Attributes:
    processes: processes ordered by start time.
    seconds: category -> seconds, in the order of `CATEGORIES`.
    wall_seconds: time from the start of the first process to the last line, without the time
      between the end of a finished run and the start that extends it.
  """

  processes: Sequence[ProcessAccount]
  seconds: Mapping[str, float]
  wall_seconds: float

  @property
  def goodput(self) -> float:
    """Share of the wall time spent on steps that count, from 0 to 1."""
    return self.seconds[PRODUCTIVE] / max(math.fsum(self.seconds.values()), 1e-9)

  @property
  def lost_steps(self) -> int:
    return sum(p.lost_steps for p in self.processes)


def accounts_of(ledger: Ledger) -> Accounts:
  """Returns the time by category; `ledger` has at least one process."""
  processes, between = [], 0.0
  runs = _without_late_lines(ledger.runs)
  before_start = _interruptions(runs)
  runs = [
    _with_last_step(run, known, until=after.start)
    for run, known, after in zip(runs, before_start[1:], runs[1:])
  ] + runs[-1:]
  for i, run in enumerate(runs):
    # Steps after the earliest later start were trained again.
    kept = min((r.first_step for r in runs[i + 1 :] if r.first_step is not None), default=None)
    seconds = dict.fromkeys(CATEGORIES, 0.0) | run.last.seconds
    lost_steps = 0
    if kept is not None:
      seconds[LOST] = _productive_after(run, kept)
      seconds[PRODUCTIVE] -= seconds[LOST]
      if run.last.step is not None:
        lost_steps = max(0, run.last.step - max(kept, run.first_step or 0))
    if i:
      before = max(runs[:i], key=lambda r: r.last.at)
      away = max(0.0, run.start - before.last.at)
      seconds[DOWNTIME] = 0.0 if before.end == DONE else away
      between += away - seconds[DOWNTIME]
    processes.append(ProcessAccount(run, seconds, lost_steps, before_start[i]))
  totals = {name: math.fsum(p.seconds[name] for p in processes) for name in CATEGORIES}
  wall = max(run.last.at for run in runs) - runs[0].start - between
  return Accounts(processes, totals, wall)


def _without_late_lines(runs: Sequence[ProcessLines]) -> list[ProcessLines]:
  """Returns the processes without lines that are later than the next start by the same `launch`.

  If a stopped host continues, its process may write a line before it is ended. Until that line, it
  counts the time in which it was stopped; the next start counts this time, too.

  Args:
    runs: processes ordered by start time.
  """
  found: list[ProcessLines] = []
  next_start: dict[str, float] = {}  # identifier of a launch -> start of its next process
  for run in reversed(runs):
    lines = run.lines
    if history := history_of(run.facts):
      until = next_start.get(history.run, math.inf)
      next_start[history.run] = run.start
      lines = [line for line in lines if line.at <= until]
    if lines:  # otherwise a start that failed before its first line
      found.append(run if len(lines) == len(run.lines) else _process(lines))
  return found[::-1]


def _interruptions(runs: Sequence[ProcessLines]) -> list[Sequence[Interruption]]:
  """Returns, for each process, the interruptions that no process before it has recorded."""
  seen: set[tuple[str, int]] = set()
  found = []
  for run in runs:
    history = history_of(run.facts)
    known = history.interruptions if history else ()
    new = {(history.run, each.number): each for each in known if history}
    found.append([each for key, each in new.items() if key not in seen])
    seen.update(new)
  return found


def _with_last_step(
  run: ProcessLines, known: Sequence[Interruption], *, until: float
) -> ProcessLines:
  """Returns `run` with the steps that it took after its last line, as `launch` saw them.

  A process that was killed has not written up to 30 seconds of its steps.

  Args:
    known: the interruptions between `run` and the next process, which started at `until`.
  """
  step, at = (known[0].step, known[0].stepped_at) if known else (None, None)
  last = run.last
  if step is None or at is None or run.first_step is None or run.end is not None:
    return run
  if step <= (last.step or 0) or not last.at < at <= until:
    return run
  seconds = dict(last.seconds)
  seconds[PRODUCTIVE] = seconds.get(PRODUCTIVE, 0.0) + at - last.at
  line = dataclasses.replace(last, at=at, step=step, seconds=seconds)
  return dataclasses.replace(run, lines=[*run.lines, line])


def _productive_after(run: ProcessLines, step: int) -> float:
  """Returns the seconds of training steps after `step`; interpolates within a line."""
  lost = 0.0
  known = [line for line in run.lines if line.step is not None]
  for a, b in itertools.pairwise(known):
    seconds = max(0.0, b.seconds.get(PRODUCTIVE, 0.0) - a.seconds.get(PRODUCTIVE, 0.0))
    if a.step >= step:
      lost += seconds
    elif b.step > step:
      lost += seconds * (b.step - step) / (b.step - a.step)
  return min(lost, run.last.seconds.get(PRODUCTIVE, 0.0))


def summary(accounts: Accounts) -> str:
  """Returns `93% of 0:12:10: compile 3%, input 2%, save 1%`."""
  total = max(math.fsum(accounts.seconds.values()), 1e-9)
  shares = {name: accounts.seconds[name] / total for name in CATEGORIES if name != PRODUCTIVE}
  parts = [
    f'{name} {_percent(share)}'
    for name, share in sorted(shares.items(), key=lambda item: -item[1])
    if share >= 0.005
  ]
  starts = len(accounts.processes)
  over = f' ({starts} starts)' if starts > 1 else ''
  rest = ': ' + ', '.join(parts) if parts else ''
  return f'{_percent(accounts.goodput)} of {format_seconds(total)}{over}{rest}'


def _percent(share: float) -> str:
  return f'{100 * share:.0f}%'


def interruption(accounts: Accounts) -> str:
  """Returns a sentence about the cost of the last interruption; '' if there was none."""
  if len(accounts.processes) < 2:
    return ''
  before, now = accounts.processes[-2:]
  if before.process.end == DONE:
    return ''
  lost, down = before.seconds[LOST], now.seconds[DOWNTIME]
  again = math.fsum(now.seconds[name] for name in ('init', 'compile', 'restore'))
  parts = [
    f'{format_seconds(down)} between the two processes',
    f'{format_seconds(again)} to start again',
  ]
  if before.lost_steps or lost >= 1:  # or a step that hung
    parts.insert(0, f'{format_seconds(lost)} of training after step {now.process.first_step}')
  how = now.interruptions[-1].cause if now.interruptions else before.process.end or 'killed'
  return (
    f'The last interruption ({how}) cost {format_seconds(lost + down + again)}: '
    + ', '.join(parts)
    + '.'
  )


GOODPUT = 'goodput.jsonl'
SECONDS_BETWEEN_LINES = 30.0
# Name of a wait or pause of the step timer -> phase.
_PHASES = {
  'input_wait': 'input',
  'dispatch': 'productive',
  'device_wait': 'productive',
  'local_save': 'save',
}


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
    facts = None if error is None else {'error': f'{kind.__name__}: {first_line(error)}'}
    self._close(self._end or (kind.__name__ if kind else 'done'), facts=facts)

  @contextlib.contextmanager
  def phase(self, name: str, *, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Context whose seconds count as `name`.

    Args:
      name: 'productive', 'compile', ..., or the name of a pause in the step timer.
      unless: called at the end; if true, the seconds count as the enclosing phase.
    """
    name = _PHASES.get(name, name)
    before = self._enter(name if name in PHASES else OTHER)
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

  def _line(self, facts: Optional[Facts]) -> Line:
    with self._lock:
      self._count(self._phase)
      return Line(
        self._run,
        round(self._now(), 3),
        {name: round(value, 3) for name, value in self._seconds.items()},
        self._first_step,
        self._step,
        self._phase,
        self._end,
        facts,
      )

  def step_done(self, step: int) -> None:
    """Counts a step."""
    self._step = step

  def open(
    self,
    folder: str | os.PathLike,
    *,
    first_step: Optional[int] = None,
    facts: Optional[Facts] = None,
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

  def ends(self, reason: str, *, facts: Optional[Facts] = None) -> None:
    """Records how the run ends: 'done', 'SIGTERM', ...; called after the last step."""
    self._end = reason
    self._enter(OTHER)
    self.write(facts=facts)

  def _left_at_once(self) -> None:
    self._close(self._end or 'left at once')

  def _close(self, reason: str, *, facts: Optional[Facts] = None) -> None:
    if self._path is None or self._closed.is_set():
      return
    self._closed.set()
    self.ends(reason, facts=facts)
    with contextlib.suppress(ValueError):  # this may be the call that would be cancelled
      process_exit.cancel_before_exit(self._left_at_once)

  def write(self, *, facts: Optional[Facts] = None) -> None:
    """Appends a line. If the disk is full or gone, warns once; the run continues without lines."""
    if self._path is None:
      return
    with self._write_lock:
      record = vars(self._line(facts))
      known = {k: v for k, v in record.items() if v or k not in ('end', 'facts')}
      try:
        append_line(self._path, json.dumps(known))
      except OSError as e:
        if not self._has_failed:
          _log.warning('%s cannot be written: %s. The run continues.', self._path, e.strerror or e)
        self._has_failed = True

  def summary(self) -> str:
    """Returns a line about all runs in the folder so far; '' on processes that do not write."""
    accounts = self._accounts()
    return f'goodput {summary(accounts)}' if accounts else ''

  def interruption(self) -> str:
    """Returns a line about the cost of the last interruption; '' if there was none."""
    accounts = self._accounts()
    return interruption(accounts) if accounts else ''

  def _accounts(self) -> Optional[Accounts]:
    if self._path is None:
      return None
    self.write()
    try:
      ledger = read_ledger(self._path)
    except (OSError, ValueError) as e:  # best effort: must not stop a run
      _log.warning('Goodput is not shown: %s cannot be read: %s.', self._path, e)
      return None
    return accounts_of(ledger) if ledger.runs else None
