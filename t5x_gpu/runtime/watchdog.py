"""A run that hangs or loses a process ends, and says who it was.

JAX itself waits for ever for a rank that is alive but stuck, and for one that is dead until its own
heartbeats time out, without a name (https://github.com/jax-ml/jax/issues/38503). Each process
therefore has two threads; the main thread may be stuck in a collective meanwhile. One talks: it
writes a heartbeat into the coordination service, which lives in process 0, and reads what others
have to say; a request to a process that is gone may never return. The other watches: a phase that
outlasts its deadline, a verdict of another process, and silence of process 0 end this process. In
process 0 the talking one also declares dead whose heartbeats have stopped. docs/watchdog.md.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import re
import socket
import statistics
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, Optional, Self

from t5x_gpu.errors import ConfigError, UserError
from t5x_gpu.runtime import heartbeats, process_exit
from t5x_gpu.runtime.cluster.coordination import Store, coordination_store, delay_aborts, within
from t5x_gpu.runtime.heartbeats import Beat

__all__ = ['Watchdog', 'WatchdogConfig', 'coordination_store']

EXIT_ERROR = 1  # another rank failed with an error of its own
EXIT_STUCK = 86  # this or another rank did not get on
EXIT_RANK_DEAD = 87  # another rank gave no sign of life
STUCK, DEAD, FAILED = 'stuck', 'dead', 'failed'
_BEATS = 't5x_gpu_watchdog/beats'
_MAIN = 't5x_gpu_watchdog/main'  # what everybody reads: process 0's heartbeat, and verdicts
_END = 't5x_gpu_watchdog/end'
_STEPS_FOR_MEDIAN = 20
# Without heartbeats, until a rank is declared dead when collectives have broken already: on CPU
# devices gloo aborts whole processes some time after that.
_BROKEN_PERIODS = 3
_ASK_SECONDS = 3  # for a request that a report can do without
# Errors of a collective whose other end has gone, as they are or wrapped: they name nobody.
_BROKEN = re.compile(
  '(jax|xla)runtimeerror:.*(gloo|nccl|connection (closed|reset|refused)|broken pipe|'
  'socket closed|coordination|barrier|deadline_exceeded|unavailable)',
  re.IGNORECASE | re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
  """Deadlines, in seconds; a phase that outlasts its own ends the run.

  Attributes:
    compile_seconds: set-up, first compile and restore.
    step_seconds: one step; raised to `step_factor` median steps where that is longer.
    step_factor: a step this many times slower than the median one is stuck.
    save_seconds, eval_seconds: one save, one evaluation.
    dead_seconds: without a heartbeat, until a rank is declared dead.
    period_seconds: between heartbeats.
  """

  compile_seconds: float = 3600
  step_seconds: float = 300
  step_factor: float = 20
  save_seconds: float = 1800
  eval_seconds: float = 3600
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


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Why all processes end.

  Attributes:
    kind: STUCK, DEAD or FAILED.
    text: for the report.
    code: to leave with.
  """

  kind: str
  text: str
  code: int


class Watchdog:
  """Watches this process, and in a run of several the others.

      with Watchdog(config, process_index=0, process_count=1) as watchdog:
        with watchdog.phase('compile'): ...
        for step in ...:
          watchdog.step_done(step)

  The block ends together on all processes: one that is done waits for those that still save.

  Args:
    config: deadlines.
    process_index, process_count: of this process.
    store: key-value store that all processes share; None for a single process.
    leave: called with the exit code after the report.
    clock: seconds that never go back.
  """

  def __init__(
    self,
    config: WatchdogConfig,
    *,
    process_index: int,
    process_count: int,
    store: Optional[Store] = None,
    leave: Callable[[int], Any] = process_exit.leave_at_once,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._config = config
    self._index = process_index
    self._count = process_count
    self._store = store if process_count > 1 else None
    self._leave = leave
    self._clock = clock
    self._lock = threading.Lock()
    self._phase, self._since, self._deadline = 'set-up', clock(), config.compile_seconds
    self._step = 0
    self._seconds: list[float] = []
    self._beats_told = 0
    self._news: dict[int, tuple[int, float]] = {}  # rank -> count of its last heartbeat, since when
    self._dead: set[int] = set()
    self._contact, self._trouble = clock(), 'no answer'  # with process 0
    self._process_zero: Optional[Beat] = None
    self._verdict: Optional[Verdict] = None
    self._main_thread = threading.main_thread().ident
    self._stop = threading.Event()
    self._leaving = threading.RLock()
    rounds = [('watchdog', self._watch)] + [('heartbeats', self._talk)] * (self._store is not None)
    self._threads = [
      threading.Thread(target=self._every_period, args=(f,), name=name, daemon=True)
      for name, f in rounds
    ]

  def __enter__(self) -> Self:
    self._main_thread = threading.get_ident()
    if self._store is not None:
      delay_aborts()
    for thread in self._threads:
      thread.start()
    return self

  def __exit__(
    self,
    kind: Optional[type[BaseException]],
    error: Optional[BaseException],
    trace: Optional[types.TracebackType],
  ) -> None:
    """Waits for the others to come as far, or tells them why this process fails."""
    clean = error is None or isinstance(error, SystemExit) and not error.code
    if self._store is not None:
      if not clean:
        self._explain(error)
      else:
        self._enter('end', self._config.save_seconds)
        try:
          self._store.wait_for_all(_END, seconds=self._config.save_seconds)
        except Exception:  # one of them is gone: the verdict says which, and ends this process
          self._wait_for_verdict()
    self._stop.set()
    for thread in self._threads:
      thread.join(_ASK_SECONDS)

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """Holds what happens inside to the deadline of `name`: 'compile', 'save' or 'eval'."""
    with self._lock:
      before = self._phase, self._deadline
    self._enter(name, getattr(self._config, f'{name}_seconds'))
    try:
      yield
    finally:
      self._enter(*before)

  def _enter(self, name: str, deadline: float) -> None:
    with self._lock:
      self._phase, self._deadline, self._since = name, deadline, self._clock()

  def step_done(self, step: int) -> None:
    """Notes progress: the next step has its deadline from now on."""
    with self._lock:
      now = self._clock()
      if self._phase == 'step':
        self._seconds = [*self._seconds[1 - _STEPS_FOR_MEDIAN :], now - self._since]
      self._step, self._phase, self._since = step, 'step', now
      self._deadline = max(
        self._config.step_seconds,
        self._config.step_factor * statistics.median(self._seconds or [0.0]),
      )

  # ---- What the two threads do ------------------------------------------------------------------
  def _every_period(self, round_: Callable[[], None]) -> None:
    while not self._stop.wait(self._config.period_seconds):
      round_()

  def _talk(self) -> None:
    """One exchange with process 0; may block for as long as it is out of reach."""
    try:
      self._tell()
      said = dict(self._store.key_value_dir_get(_MAIN))
      beats = self._beats() if self._index == 0 else {}
    except Exception as e:
      self._trouble = str(e).partition('\n')[0]
      return
    self._contact, self._trouble = self._clock(), 'no answer'
    for key, text in sorted(said.items()):
      if key.endswith('/beat'):
        self._process_zero = Beat.from_json(text)
      elif self._verdict is None:
        self._verdict = Verdict(**json.loads(text))
    if self._index == 0 and self._verdict is None:
      self._judge(beats)

  def _judge(self, beats: dict[int, Beat]) -> None:
    """In process 0: declares those dead whose heartbeat has been the same for `dead_seconds`."""
    now, limit = self._clock(), self._config.dead_seconds
    if any(beat.broken for beat in beats.values()):
      limit = min(limit, _BROKEN_PERIODS * self._config.period_seconds)
    for rank, beat in beats.items():
      if self._news.get(rank, (None,))[0] != beat.count:
        self._news[rank] = beat.count, now
    dead = [
      beat
      for rank, beat in sorted(beats.items())
      if now - self._news[rank][1] > limit and not beat.left
    ]
    if dead:
      self._dead = {beat.rank for beat in dead}
      silent = min(now - self._news[beat.rank][1] for beat in dead)
      self._verdict = Verdict(
        DEAD,
        f'No sign of life for {silent:.0f} s from '
        f'{"; ".join(beat.last_seen for beat in dead[: heartbeats.SHOWN])}.',
        EXIT_RANK_DEAD,
      )
      with contextlib.suppress(Exception):
        self._publish(self._verdict)

  def _watch(self) -> None:
    """One look at the own deadline, at verdicts, and at how long process 0 has been silent."""
    with self._lock:
      phase, seconds, deadline = self._phase, self._clock() - self._since, self._deadline
    if seconds > deadline:
      verdict = Verdict(
        STUCK,
        f'{self._me()} has been in phase {phase!r} for {seconds:.0f} s; its deadline is '
        f'{deadline:.0f} s (WatchdogConfig).',
        EXIT_STUCK,
      )
      if self._store is not None:
        within(_ASK_SECONDS, lambda: self._publish(verdict))
      self._report(verdict)
    elif self._verdict is not None:
      self._follow(self._verdict)
    elif self._store is not None and self._index != 0:
      self._listen_for_process_zero(self._clock() - self._contact)

  def _listen_for_process_zero(self, silent: float) -> None:
    """Ends this process once process 0, and with it the store, is gone."""
    if silent < 2 * self._config.period_seconds:
      return
    zero = self._process_zero.last_seen if self._process_zero else 'process 0'
    if self._store.has_ended():
      self._report(
        Verdict(DEAD, f'The end of {zero}: nothing listens on its port any more.', EXIT_RANK_DEAD)
      )
    elif silent > self._config.dead_seconds:
      self._report(
        Verdict(
          DEAD,
          f'{self._me()} has not reached {zero}, for {silent:.0f} s: {self._trouble}.',
          EXIT_RANK_DEAD,
        )
      )

  def _follow(self, verdict: Verdict) -> None:
    """Leaves because of what another process said, unless this one has an error of its own.

    Mistakes of the user are found by all processes, one a moment after the other.
    """
    started = time.monotonic()
    while True:
      patience = self._config.period_seconds * (2 if verdict.kind == FAILED else 0)
      if isinstance(self._own_error(), UserError):
        # A save under way is committed on the way out, unless a process it needs is gone.
        patience = (
          self._config.dead_seconds if verdict.kind == FAILED else 5 * self._config.period_seconds
        )
      if time.monotonic() - started >= patience:
        break
      if self._stop.wait(min(0.05, self._config.period_seconds)):
        return
    self._report(verdict)

  def _own_error(self) -> Optional[BaseException]:
    """Returns what the main thread has raised and is on its way out with."""
    error: Any = sys._current_exceptions().get(self._main_thread)
    return error[1] if isinstance(error, tuple) else error  # a tuple in Python 3.11

  # ---- What is said -----------------------------------------------------------------------------
  def _tell(self, *, left: bool = False) -> None:
    with self._lock:
      values = {'step': self._step, 'phase': self._phase, 'seconds': self._clock() - self._since}
    self._beats_told += 1
    beat = Beat.now(
      thread=self._main_thread,
      rank=self._index,
      count=self._beats_told,
      left=left,
      broken=_is_broken(self._own_error()),
      **values,
    )
    self._store.key_value_set(f'{_BEATS}/{self._index}', beat.to_json(), allow_overwrite=True)
    if self._index == 0:
      self._store.key_value_set(f'{_MAIN}/beat', beat.to_json(), allow_overwrite=True)

  def _publish(self, verdict: Verdict) -> None:
    self._store.key_value_set(
      f'{_MAIN}/verdict_{self._index}',
      json.dumps(dataclasses.asdict(verdict)),
      allow_overwrite=True,
    )

  def _beats(self) -> dict[int, Beat]:
    beats = [Beat.from_json(text) for _, text in self._store.key_value_dir_get(_BEATS)]
    return {beat.rank: beat for beat in beats}

  def _wait_for_verdict(self) -> None:
    """Returns only if nobody is declared dead; else the watching thread ends this process."""
    self._stop.wait(self._config.dead_seconds + 4 * self._config.period_seconds)

  def _explain(self, error: BaseException) -> None:
    """Tells the others why this process fails.

    An error of a collective whose other end is gone names nobody. Then the verdict of process 0 is
    waited for, which ends this process with the name in it.
    """
    if _is_broken(error):
      self._wait_for_verdict()
    with self._leaving:  # either a report is on its way and ends this process, or none comes now
      self._stop.set()
    verdict = Verdict(
      FAILED,
      f'{self._me()} failed after step {self._step}: {_words(error).splitlines()[0]}',
      EXIT_ERROR,
    )
    within(_ASK_SECONDS, lambda: (self._publish(verdict), self._tell(left=True)))
    self._let_others_read()

  def _let_others_read(self) -> None:
    """In process 0, with which the store ends: waits until all that live have left."""
    if self._store is None or self._index != 0:
      return
    deadline = time.monotonic() + 3 * self._config.period_seconds
    while time.monotonic() < deadline:
      beats = within(_ASK_SECONDS, self._beats) or {}
      if all(beat.left for rank, beat in beats.items() if rank not in self._dead | {0}):
        return
      time.sleep(self._config.period_seconds / 10)

  def _me(self) -> str:
    return f'Process {self._index} on {socket.gethostname()} (pid {os.getpid()})'

  def _report(self, verdict: Verdict) -> None:
    """Prints why the run ends, to stderr and past every lock, then leaves."""
    with self._leaving:
      if self._stop.is_set():  # on its way out with an error of its own
        return
      lines = [f'\nWATCHDOG: {verdict.text}']
      if verdict.kind == STUCK and self._store is not None:
        beats = within(_ASK_SECONDS, self._beats)
        lines.append(
          'The heartbeats cannot be read.'
          if beats is None
          else heartbeats.table(beats, process_count=self._count)
        )
      os.write(2, '\n'.join([*lines, '']).encode())
      if verdict.kind == STUCK:
        faulthandler.dump_traceback(file=2, all_threads=True)
      last = f'WATCHDOG: process {self._index} leaves with exit code {verdict.code}.\n'
      os.write(2, last.encode())
      if self._store is not None:
        within(1, lambda: self._tell(left=True))
      self._let_others_read()
      self._leave(verdict.code)


def _words(error: Optional[BaseException]) -> str:
  return f'{type(error).__name__}: {error}'.rstrip(': ')


def _is_broken(error: Optional[BaseException]) -> bool:
  """Returns whether it is an error of a collective whose other end has gone."""
  return bool(_BROKEN.search(_words(error)))
