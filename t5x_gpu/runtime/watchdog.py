"""Ends a run that hangs or loses a process, and names the process.

JAX waits forever for a rank that is alive but stuck. For a dead rank it waits until its heartbeats
time out, and does not name it (https://github.com/jax-ml/jax/issues/38503). So each process has two
threads that run while its main thread may be stuck in a collective. The talking thread posts a
heartbeat (`Beat`) to the coordination service in process 0 (`Noticeboard`) and reads verdicts; its
requests may never return if process 0 is gone. The watching thread ends this process when a phase
(`PhaseClock`) exceeds its deadline, when another process posts a verdict, or when process 0 is
silent. In process 0 the talking thread also declares ranks dead whose heartbeats have stopped.
See docs/watchdog.md.
"""

import contextlib
import dataclasses
import faulthandler
import json
import math
import os
import re
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Optional, Self

import jax
import jaxlib

from t5x_gpu.errors import ConfigError, UserError, first_line, listed
from t5x_gpu.runtime import process_exit
from t5x_gpu.runtime.cluster.coordination import Store, delay_aborts, within
from t5x_gpu.runtime.cluster.restarts import EXIT_ERROR, EXIT_RANK_DEAD, EXIT_STUCK
from t5x_gpu.terminal.streams import write_stderr

SHOWN_PROCESSES = 32  # processes in a report; in a run of thousands, every process prints a report
# Errors of a collective whose other end is gone, bare or wrapped, without names.
_BROKEN = re.compile(
  '(jax|xla)runtimeerror:.*(gloo|nccl|connection (closed|reset|refused)|broken pipe|'
  'socket closed|coordination|barrier|deadline_exceeded|unavailable)',
  re.IGNORECASE | re.DOTALL,
)
_LIBRARIES = tuple(os.path.dirname(module.__file__) + os.sep for module in (jax, jaxlib))


@dataclasses.dataclass(frozen=True)
class Beat:
  """One heartbeat.

  Attributes:
    rank: process index.
    host, pid: host and process id.
    count: number of this heartbeat.
    step: the last finished step.
    phase: the current phase, which began `seconds` ago.
    where: file, line and function of the main thread.
    waits: whether the main thread is inside JAX: it waits for devices, so for other processes.
    broken: whether one of its collectives failed because another process is gone.
    left: whether this is the process's last heartbeat.
  """

  rank: int
  host: str
  pid: int
  count: int
  step: int
  phase: str
  seconds: float
  where: str
  waits: bool
  broken: bool = False
  left: bool = False

  @classmethod
  def now(cls, *, thread: int, **values: object) -> Self:
    """Returns a heartbeat of this process, with the place of its `thread`."""
    where, waits = place_in_code(thread)
    return cls(host=socket.gethostname(), pid=os.getpid(), where=where, waits=waits, **values)

  @property
  def state(self) -> str:
    if self.broken:
      return 'has lost a connection to another process'
    return f'{"waits in" if self.waits else "in"} {self.where}'

  @classmethod
  def from_json(cls, text: str) -> Self:
    return cls(**json.loads(text))

  def to_json(self) -> str:
    return json.dumps(dataclasses.asdict(self))

  @property
  def name(self) -> str:
    return f'process {self.rank} on {self.host} (pid {self.pid})'

  @property
  def last_seen(self) -> str:
    return f'{self.name}, last seen at step {self.step} in phase {self.phase!r}'


def place_in_code(thread: int) -> tuple[str, bool]:
  """Returns a thread's place outside JAX, 'file.py:27 (function)', and whether it is inside JAX."""
  frame = sys._current_frames().get(thread)
  inside = bool(frame) and frame.f_code.co_filename.startswith(_LIBRARIES)
  while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
    frame = frame.f_back
  if frame is None:
    return 'nowhere', inside
  code = frame.f_code
  return f'{os.path.basename(code.co_filename)}:{frame.f_lineno} ({code.co_name})', inside


def error_text(error: Optional[BaseException]) -> str:
  """Returns 'ValueError: message'."""
  return f'{type(error).__name__}: {error}'.rstrip(': ')


def is_broken(error: Optional[BaseException]) -> bool:
  """Returns whether a collective failed because its other end is gone."""
  return bool(_BROKEN.search(error_text(error)))


def processes_behind(beats: Sequence[Beat]) -> list[Beat]:
  """Returns the processes that the others wait for; [] if unknown."""
  least = min((beat.step for beat in beats), default=0)
  late = [beat for beat in beats if beat.step == least]
  late = [beat for beat in late if not (beat.waits or beat.broken)] or late
  return late if len(late) < len(beats) else []


def heartbeats_table(beats: Mapping[int, Beat], *, process_count: int) -> str:
  """Returns a line per process, those behind first, then a list of the processes behind.

  Args:
    beats: the last heartbeat of each process.
    process_count: number of processes in the run.
  """
  late = processes_behind(list(beats.values()))
  order = late + [beat for _, beat in sorted(beats.items()) if beat not in late]
  text = '{0.name}: step {0.step}, phase {0.phase!r} for {0.seconds:.0f} s, {0.state}'
  lines = [f'  {line}' for line in listed([text.format(beat) for beat in order], SHOWN_PROCESSES)]
  if late:
    names = listed([beat.name for beat in late], SHOWN_PROCESSES)
    lines.append(f'Behind the others: {", ".join(names)}.')
  missing = [str(rank) for rank in range(process_count) if rank not in beats]
  if missing:
    lines.append(f'Never heard from: process {", ".join(listed(missing, SHOWN_PROCESSES))}.')
  return '\n'.join(['Heartbeats:', *lines])


STUCK, DEAD, FAILED = 'stuck', 'dead', 'failed'
_BEATS = 't5x_gpu_watchdog/beats'
_MAIN = 't5x_gpu_watchdog/main'  # read by every process: process 0's heartbeat, and verdicts
_END = 't5x_gpu_watchdog/end'


@dataclasses.dataclass(frozen=True)
class EndReason:
  """Why all processes end.

  Attributes:
    kind: STUCK, DEAD or FAILED.
    text: for the report.
    code: exit code.
  """

  kind: str
  text: str
  code: int


class Noticeboard:
  """The watchdogs' keys in the store. Any call may raise, or block while process 0 is unreachable.

  Args:
    store: key-value store that all processes share.
    rank: index of this process.
  """

  def __init__(self, store: Store, *, rank: int):
    self._store = store
    self._rank = rank

  def post_beat(self, beat: Beat) -> None:
    """Replaces this process's heartbeat."""
    self._store.key_value_set(f'{_BEATS}/{self._rank}', beat.to_json(), allow_overwrite=True)
    if self._rank == 0:
      self._store.key_value_set(f'{_MAIN}/beat', beat.to_json(), allow_overwrite=True)

  def post_verdict(self, verdict: EndReason) -> EndReason:
    """Posts a verdict for all to read, unless there is one; returns the first one."""
    text = json.dumps(dataclasses.asdict(verdict))
    with contextlib.suppress(Exception):  # another process was first, or the store is gone
      self._store.key_value_set(f'{_MAIN}/verdict', text)
    return self.news()[1] or verdict

  def beats(self) -> dict[int, Beat]:
    """Returns the last heartbeat of each rank."""
    beats = [Beat.from_json(text) for _, text in self._store.key_value_dir_get(_BEATS)]
    return {beat.rank: beat for beat in beats}

  def news(self) -> tuple[Optional[Beat], Optional[EndReason]]:
    """Returns process 0's heartbeat and the verdict; None if missing."""
    found = {key.rpartition('/')[2]: text for key, text in self._store.key_value_dir_get(_MAIN)}
    beat, verdict = found.get('beat'), found.get('verdict')
    return beat and Beat.from_json(beat), verdict and EndReason(**json.loads(verdict))

  def wait_for_end(self, *, seconds: float) -> None:
    """Returns once every process has reached the end of its block; raises if one does not."""
    self._store.wait_for_all(_END, seconds=seconds)

  def has_ended(self) -> bool:
    """Returns whether process 0, and the store with it, is known to be gone."""
    return self._store.has_ended()


_STEPS_FOR_MEDIAN = 20


@dataclasses.dataclass(frozen=True)
class PhaseState:
  """A snapshot.

  Attributes:
    step: the last finished step.
    phase: 'set-up', 'compile', 'step', ...
    seconds: time in this phase so far.
    deadline: seconds after which the process counts as stuck.
  """

  step: int
  phase: str
  seconds: float
  deadline: float


class PhaseClock:
  """Keeps the current phase; safe to read from other threads.

  Args:
    phase, deadline: the first phase.
    clock: returns seconds from a monotonic clock.
  """

  def __init__(self, phase: str, deadline: float, *, clock: Callable[[], float]):
    self._clock = clock
    self._lock = threading.Lock()
    self._phase, self._deadline, self._since = phase, deadline, clock()
    self._step = 0
    self._step_seconds: list[float] = []  # recent steps

  def state(self) -> PhaseState:
    """Returns the current phase."""
    with self._lock:
      return PhaseState(self._step, self._phase, self._clock() - self._since, self._deadline)

  def enter(self, phase: str, deadline: float) -> tuple[str, float]:
    """Starts a phase; returns the previous one and its deadline."""
    with self._lock:
      before = self._phase, self._deadline
      self._phase, self._deadline, self._since = phase, deadline, self._clock()
      return before

  def progress(self) -> None:
    """Gives the phase its whole deadline again."""
    with self._lock:
      self._since = self._clock()

  def leave_out(self, seconds: float) -> None:
    """Does not count `seconds` of the time in this phase, or all of it if that is less."""
    with self._lock:
      self._since = min(self._since + seconds, self._clock())

  def step_done(self, step: int, *, least_deadline: float, factor: float) -> None:
    """Starts the next step. Its deadline is `factor` median steps, at least `least_deadline`."""
    with self._lock:
      now = self._clock()
      if self._phase == 'step':
        self._step_seconds = [*self._step_seconds[1 - _STEPS_FOR_MEDIAN :], now - self._since]
      self._step, self._phase, self._since = step, 'step', now
      median = statistics.median(self._step_seconds or [0.0])
      self._deadline = max(least_deadline, factor * median)


# Periods without a heartbeat until a rank is dead, once collectives have failed: on CPU devices
# gloo then aborts whole processes after some time.
_BROKEN_PERIODS = 3
_BEATS_PER_PERIOD = 512  # larger runs beat less often: process 0 answers all
_ASK_SECONDS = 3  # for a request whose answer is optional


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
  """Deadlines in seconds; the run ends when a phase exceeds its deadline.

  Attributes:
    compile_seconds: set-up, first compile and restore.
    step_seconds: one step; `step_factor` median steps if that is longer.
    step_factor: a step this many times slower than the median step is stuck.
    save_seconds, eval_seconds: one save, one evaluation.
    convert_seconds: conversion of a T5X checkpoint at the start, without progress for this long.
    dead_seconds: a rank without a heartbeat for this long is dead.
    period_seconds: time between heartbeats.
  """

  compile_seconds: float = 3600
  step_seconds: float = 300
  step_factor: float = 20
  save_seconds: float = 1800
  eval_seconds: float = 3600
  convert_seconds: float = 1800
  dead_seconds: float = 15
  period_seconds: float = 1

  def __post_init__(self) -> None:
    wrong = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) <= 0]
    if wrong:
      raise ConfigError(
        ', '.join(f'WatchdogConfig.{n} = {getattr(self, n)}' for n in wrong)
        + ': must be more than 0.',
        fix='Give a number of seconds.',
        parameters=[f'WatchdogConfig.{n}' for n in wrong],
      )


class Watchdog:
  """Watches this process and, in a run of several processes, the others.

      with Watchdog(config, process_index=0, process_count=1) as watchdog:
        with watchdog.phase('compile'): ...
        for step in ...:
          watchdog.step_done(step)

  The block ends on all processes together: a finished process waits for those still saving.

  Args:
    config: deadlines.
    process_index, process_count: index of this process and number of processes in the run.
    store: key-value store that all processes share; None for a single process.
    leave: called with the exit code after the report.
    clock: returns seconds from a monotonic clock.
  """

  def __init__(
    self,
    config: WatchdogConfig,
    *,
    process_index: int,
    process_count: int,
    store: Optional[Store] = None,
    leave: Callable[[int], object] = process_exit.leave_at_once,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._config = config
    self._index = process_index
    self._count = process_count
    self._store = store if process_count > 1 else None
    self._board = self._store and Noticeboard(self._store, rank=process_index)
    self._leave = leave
    self._clock = clock
    # At most so many heartbeats reach process 0 per second.
    self._period = config.period_seconds * max(1.0, process_count / _BEATS_PER_PERIOD)
    self._dead_seconds = max(config.dead_seconds, _BROKEN_PERIODS * self._period)
    self._phases = PhaseClock('set-up', config.compile_seconds, clock=clock)
    self._num_beats = 0
    self._last_beats: dict[
      int, tuple[int, float]
    ] = {}  # rank -> count of its last heartbeat, and when it arrived
    self._dead: set[int] = set()
    self._contact, self._trouble = clock(), 'no answer'  # last contact with process 0; its failure
    self._process_zero: Optional[Beat] = None
    self._verdict: Optional[EndReason] = None
    self._main_thread = threading.main_thread().ident
    self._stop = threading.Event()
    self._leaving = threading.RLock()
    self._looked = clock()
    rounds = [('watchdog', self._look, config.period_seconds)]
    rounds += [('heartbeats', self._talk, self._period)] * (self._store is not None)
    self._threads = [
      threading.Thread(target=self._repeat, args=(f, seconds), name=name, daemon=True)
      for name, f, seconds in rounds
    ]

  def __enter__(self) -> Self:
    self._main_thread = threading.get_ident()
    self._looked = self._clock()
    if self._store is not None:
      delay_aborts()
    for thread in self._threads:
      thread.start()
    return self

  def __exit__(self, kind: object, error: Optional[BaseException], trace: object) -> None:
    """Waits until all processes reach the end of the block, or posts why this process fails."""
    clean = error is None or isinstance(error, SystemExit) and not error.code
    if self._store is not None:
      if not clean:
        self._explain(error)
      else:
        self._phases.enter('end', self._config.save_seconds)
        try:
          self._board.wait_for_end(seconds=self._config.save_seconds)
        except Exception:  # A process is gone. The verdict names it and ends this process.
          self._wait_for_verdict()
    self._stop.set()
    for thread in self._threads:
      thread.join(_ASK_SECONDS)

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """Applies the deadline of `name` ('compile', 'save', 'eval' or 'convert') to the block.

    Only process 0 converts, so only its deadline counts: the others wait however long it works.
    """
    seconds = getattr(self._config, f'{name}_seconds')
    before = self._phases.enter(name, math.inf if name == 'convert' and self._index else seconds)
    try:
      yield
    finally:
      self._phases.enter(*before)

  def progress(self) -> None:
    """Records progress inside a phase: its deadline starts again now."""
    self._phases.progress()

  def step_done(self, step: int) -> None:
    """Records progress: the deadline of the next step starts now."""
    self._phases.step_done(
      step, least_deadline=self._config.step_seconds, factor=self._config.step_factor
    )

  # ---- The two threads --------------------------------------------------------------------------
  def _repeat(self, round_: Callable[[], None], seconds: float) -> None:
    while not self._stop.wait(seconds):
      round_()

  def _talk(self) -> None:
    """Makes one exchange with process 0; may block as long as process 0 is unreachable."""
    try:
      self._post_beat()
      process_zero, verdict = self._board.news()
      beats = self._board.beats() if self._index == 0 else {}
    except Exception as e:
      self._trouble = first_line(e)
      return
    self._contact, self._trouble = self._clock(), 'no answer'
    self._process_zero = process_zero or self._process_zero
    self._verdict = self._verdict or verdict
    if self._index == 0 and self._verdict is None:
      self._judge(beats)

  def _judge(self, beats: dict[int, Beat]) -> None:
    """In process 0: declares ranks dead whose heartbeat has not changed for `dead_seconds`."""
    now, limit = self._clock(), self._dead_seconds
    if any(beat.broken for beat in beats.values()):
      limit = min(limit, _BROKEN_PERIODS * self._period)
    for rank, beat in beats.items():
      if self._last_beats.get(rank, (None,))[0] != beat.count:
        self._last_beats[rank] = beat.count, now
    dead = [
      beat
      for rank, beat in sorted(beats.items())
      if now - self._last_beats[rank][1] > limit and not beat.left
    ]
    if dead:
      self._dead = {beat.rank for beat in dead}
      silent = min(now - self._last_beats[beat.rank][1] for beat in dead)
      self._verdict = EndReason(
        DEAD,
        f'No sign of life for {silent:.0f} s from '
        f'{"; ".join(beat.last_seen for beat in dead[:SHOWN_PROCESSES])}.',
        EXIT_RANK_DEAD,
      )
      with contextlib.suppress(Exception):
        self._board.post_verdict(self._verdict)

  def _look(self) -> None:
    """Watches, and leaves out the time in which this process was suspended."""
    late = self._clock() - self._looked - self._config.period_seconds
    # Below, the machine is only busy. Several processes do not wait for a suspended one.
    if self._store is None and late > self._config.period_seconds:
      self._phases.leave_out(late)
    self._watch()
    self._looked = self._clock()

  def _watch(self) -> None:
    """Checks this process's deadline, verdicts, and how long process 0 has been silent."""
    state = self._phases.state()
    if state.seconds > state.deadline:
      verdict = EndReason(
        STUCK,
        f'{self._me()} has been in phase {state.phase!r} for {state.seconds:.0f} s; its deadline '
        f'is {state.deadline:.0f} s (WatchdogConfig).',
        EXIT_STUCK,
      )
      if self._store is not None:
        verdict = within(_ASK_SECONDS, lambda: self._board.post_verdict(verdict)) or verdict
      self._report(verdict)
    elif self._verdict is not None:
      self._follow(self._verdict)
    elif self._store is not None and self._index != 0:
      self._check_process_zero(silent=self._clock() - self._contact)

  def _check_process_zero(self, *, silent: float) -> None:
    """Ends this process once process 0, and the store with it, is gone."""
    if silent < 2 * self._period:
      return
    zero = self._process_zero.last_seen if self._process_zero else 'process 0'
    if self._board.has_ended():
      text = f'Lost {zero}: nothing listens on its port any longer.'
    elif silent > self._dead_seconds:
      text = f'{self._me()} has not reached {zero} for {silent:.0f} s: {self._trouble}.'
    else:
      return
    self._report(EndReason(DEAD, text, EXIT_RANK_DEAD))

  def _follow(self, verdict: EndReason) -> None:
    """Leaves because of another process's verdict, unless this process is leaving with an error.

    A user's mistake raises on all processes at slightly different times.
    """
    started = time.monotonic()
    while True:
      patience = self._period * (2 if verdict.kind == FAILED else 0)
      if isinstance(self._own_error(), UserError):
        patience = (  # commits a save in progress, unless a process that the save needs is gone
          self._dead_seconds if verdict.kind == FAILED else 5 * self._period
        )
      if time.monotonic() - started >= patience:
        break
      if self._stop.wait(min(0.05, self._period)):
        return
    self._report(verdict)

  def _own_error(self) -> Optional[BaseException]:
    """Returns the exception that is ending the main thread."""
    error = sys._current_exceptions().get(self._main_thread)
    return error[1] if isinstance(error, tuple) else error  # a tuple in Python 3.11

  # ---- Messages ---------------------------------------------------------------------------------
  def _post_beat(self, *, left: bool = False) -> None:
    state = self._phases.state()
    self._num_beats += 1
    beat = Beat.now(
      thread=self._main_thread,
      rank=self._index,
      count=self._num_beats,
      step=state.step,
      phase=state.phase,
      seconds=state.seconds,
      left=left,
      broken=is_broken(self._own_error()),
    )
    self._board.post_beat(beat)

  def _wait_for_verdict(self) -> None:
    """Returns only if no rank is declared dead; otherwise the watching thread ends this process."""
    self._stop.wait(self._dead_seconds + 4 * self._period)

  def _explain(self, error: BaseException) -> None:
    """Posts why this process fails.

    The error of a collective does not name the process that is gone. So this waits for the verdict
    of process 0, which names it and ends this process.
    """
    if is_broken(error):
      self._wait_for_verdict()
    with self._leaving:  # Either a report is being written and ends this process, or none comes.
      self._stop.set()
    step = self._phases.state().step
    text = error_text(error).splitlines()[0]
    verdict = EndReason(FAILED, f'{self._me()} failed after step {step}: {text}', EXIT_ERROR)
    within(_ASK_SECONDS, lambda: (self._board.post_verdict(verdict), self._post_beat(left=True)))
    self._let_others_read()

  def _let_others_read(self) -> None:
    """In process 0, which holds the store: waits until all living processes have left."""
    if self._store is None or self._index != 0:
      return
    deadline = time.monotonic() + 3 * self._period
    while time.monotonic() < deadline:
      beats = within(_ASK_SECONDS, self._board.beats) or {}
      if all(beat.left for rank, beat in beats.items() if rank not in self._dead | {0}):
        return
      time.sleep(self._period / 10)

  def _heartbeats(self) -> str:
    """Returns the heartbeats of all processes in process 0, the only one that reads them all.

    If each of 4,096 processes read them, process 0 would send 3.5 GB.
    """
    if self._index != 0:
      return 'The output of process 0 has the heartbeats of all processes.'
    beats = within(_ASK_SECONDS, self._board.beats)
    if beats is None:
      return 'The heartbeats cannot be read.'
    return heartbeats_table(beats, process_count=self._count)

  def _me(self) -> str:
    return f'Process {self._index} on {socket.gethostname()} (pid {os.getpid()})'

  def _report(self, verdict: EndReason) -> None:
    """Prints why the run ends, to stderr and without any lock, then leaves."""
    with self._leaving:
      if self._stop.is_set():  # this process is already leaving with an error
        return
      lines = [f'\nWATCHDOG: {verdict.text}']
      if verdict.kind == STUCK and self._store is not None:
        lines.append(self._heartbeats())
      write_stderr('\n'.join([*lines, '']))
      if verdict.kind == STUCK:
        write_stderr(_stack_of_main_thread())
        faulthandler.dump_traceback(file=2, all_threads=True)
      write_stderr(f'WATCHDOG: process {self._index} exits with code {verdict.code}.\n')
      if self._store is not None:
        within(1, lambda: self._post_beat(left=True))
      self._let_others_read()
      self._leave(verdict.code)


def _stack_of_main_thread() -> str:
  """Returns the main thread's stack if `faulthandler` would leave it out, else ''.

  `faulthandler` prints 100 threads, the oldest last. This reads no source: file systems may hang.
  """
  frames = sys._current_frames()
  if len(frames) <= 100:
    return ''
  lines, frame = ['Main thread (most recent call first):'], frames[threading.main_thread().ident]
  while frame is not None:
    code = frame.f_code
    lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
    frame = frame.f_back
  return '\n'.join([*lines, '', ''])
