"""A run that hangs ends, and says who was missing.

JAX itself waits for ever for a rank that is alive but stuck, and about 100 seconds for one that is
dead, without a name (https://github.com/jax-ml/jax/issues/38503). Each process therefore runs a
thread that (1) writes a heartbeat with its phase and step into the coordination service's key-value
store, (2) ends the process when its phase outlasts its deadline, with all Python stacks and the
table of heartbeats, so that the late rank has a name, and (3) follows process 0, which watches all
heartbeats, when it declares a rank dead. The main thread may be stuck in a collective meanwhile:
Python threads run on.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import socket
import statistics
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, Optional, Protocol, Self

import jax
from jax._src import distributed as jax_distributed  # no public way to the key-value store

from t5x_gpu.errors import ConfigError

EXIT_STUCK = 86      # this or another rank did not get on
EXIT_RANK_DEAD = 87  # another rank gave no sign of life
_PREFIX = 't5x_gpu/watchdog/'
_VERDICT = 't5x_gpu/watchdog_verdict'
_STEPS_FOR_MEDIAN = 20


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
      raise ConfigError(', '.join(f'WatchdogConfig.{n} = {getattr(self, n)}' for n in wrong)
                        + ': must be more than 0.', fix='Give a number of seconds.',
                        parameters=[f'WatchdogConfig.{n}' for n in wrong])


class Store(Protocol):
  """What the watchdog needs of the coordination service."""
  def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
  def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


@dataclasses.dataclass
class _Seen:
  """What process 0 last heard of a rank, and when that was news."""
  beat: int
  at: float


class Watchdog:
  """Watches this process, and in a run of several the others.

      with Watchdog(config, process_index=0, process_count=1) as watchdog:
        with watchdog.phase('compile'): ...
        for step in ...:
          watchdog.step_done(step)

  Args:
    config: deadlines.
    process_index, process_count: of this process.
    store: key-value store that all processes share; None for a single process.
    leave: called with the exit code after the report.
    clock: seconds that never go back.
  """

  def __init__(self, config: WatchdogConfig, *, process_index: int, process_count: int,
               store: Optional[Store] = None, leave: Callable[[int], Any] = os._exit,
               clock: Callable[[], float] = time.monotonic):
    self._config = config
    self._index = process_index
    self._count = process_count
    self._store = store
    self._leave = leave
    self._clock = clock
    self._lock = threading.Lock()
    self._phase, self._since, self._deadline = 'set-up', clock(), config.compile_seconds
    self._step = 0
    self._seconds: list[float] = []
    self._beat = 0
    self._seen: dict[int, _Seen] = {}
    self._store_fails_since: Optional[float] = None
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._run, name='watchdog', daemon=True)

  def __enter__(self) -> Self:
    self._thread.start()
    return self

  def __exit__(self, kind: Optional[type[BaseException]], error: Optional[BaseException],
               trace: Optional[types.TracebackType]) -> None:
    """Says goodbye to the others, or tells them why this process fails, before it goes."""
    if self._store is not None and self._count > 1:
      if error is None:
        self._tell_phase('left')
      elif isinstance(error, Exception):
        self._explain(error)
    self._stop.set()
    self._thread.join()

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
        self._seconds = [*self._seconds[1 - _STEPS_FOR_MEDIAN:], now - self._since]
      self._step, self._phase, self._since = step, 'step', now
      self._deadline = max(self._config.step_seconds, self._config.step_factor * statistics.median(
          self._seconds or [0.0]))

  def _run(self) -> None:
    while not self._stop.wait(self._config.period_seconds):
      self._poll()

  def _poll(self) -> None:
    """One round: tell, look at the own deadline, look at the others."""
    with self._lock:
      phase, since, deadline, step = self._phase, self._since, self._deadline, self._step
    now = self._clock()
    if now - since > deadline:
      self._report(f'{self._me()} has been in phase {phase!r} for {now - since:.0f} s; its '
                   f'deadline is {deadline:.0f} s (WatchdogConfig).', EXIT_STUCK, stacks=True)
    if self._store is None:
      return
    try:
      self._tell(phase, step)
      verdicts = self._store.key_value_dir_get(_VERDICT)
      table = self._table() if self._index == 0 else {}
    except Exception as e:  # The service lives in process 0: it is gone or out of reach.
      if self._store_fails_since is None:
        self._store_fails_since = now
      if now - self._store_fails_since > self._config.dead_seconds:
        self._report(f'{self._me()} has not reached process 0 for '
                     f'{now - self._store_fails_since:.0f} s: {e}', EXIT_RANK_DEAD)
      return
    self._store_fails_since = None
    if verdicts:
      if self._index == 0:
        time.sleep(2 * self._config.period_seconds)  # the others read it from this process
      self._report(verdicts[0][1], EXIT_RANK_DEAD)
    if self._index == 0:
      self._judge(table, now)

  def _tell(self, phase: str, step: int) -> None:
    self._beat += 1
    self._store.key_value_set(f'{_PREFIX}{self._index}', json.dumps({
        'beat': self._beat, 'step': step, 'phase': phase, 'host': socket.gethostname(),
        'pid': os.getpid()}), allow_overwrite=True)

  def _judge(self, table: dict[int, dict[str, Any]], now: float) -> None:
    """On process 0: declares ranks dead whose heartbeat has not changed for `dead_seconds`."""
    for rank, beat in table.items():
      if rank not in self._seen or self._seen[rank].beat != beat['beat']:
        self._seen[rank] = _Seen(beat['beat'], now)
    dead = [rank for rank, seen in self._seen.items()
            if now - seen.at > self._config.dead_seconds and table[rank]['phase'] != 'left']
    if dead:
      words = '; '.join(
          f'{_name(rank, table[rank])}, last seen at step {table[rank]["step"]} in phase '
          f'{table[rank]["phase"]!r}' for rank in dead)
      text = f'No sign of life for {self._config.dead_seconds:.0f} s from {words}.'
      self._store.key_value_set(f'{_VERDICT}/0', text, allow_overwrite=True)
      time.sleep(2 * self._config.period_seconds)  # the others read it from this process
      self._report(text, EXIT_RANK_DEAD)

  def _tell_phase(self, phase: str) -> None:
    """Leaves a last heartbeat, so that the silence after it is understood."""
    with self._lock:
      self._phase = phase
    with contextlib.suppress(Exception):  # the service may be gone: then nobody asks
      self._tell(phase, self._step)

  def _explain(self, error: Exception) -> None:
    """Names the culprit of a failure: this process, or a dead one that the heartbeats name.

    A collective that breaks ("Connection closed by peer") names nobody; then the verdict of process
    0 is waited for, which ends this process with the name in it.
    """
    text = str(error)
    if isinstance(error, jax.errors.JaxRuntimeError) and 'RESOURCE_EXHAUSTED' not in text:
      self._stop.wait(self._config.dead_seconds + 4 * self._config.period_seconds)
      return
    # With an error of its own it leaves with that one, not with what another process failed of.
    self._stop.set()
    first_line = text.splitlines()[0] if text else ''
    self._tell_phase('left')
    with contextlib.suppress(Exception):
      self._store.key_value_set(
          f'{_VERDICT}/{self._index}', f'{self._me()} failed at step {self._step}: '
          f'{type(error).__name__}: {first_line}', allow_overwrite=True)
    if self._index == 0:
      time.sleep(2 * self._config.period_seconds)  # the store ends with this process

  def _table(self) -> dict[int, dict[str, Any]]:
    return {int(key.rpartition('/')[2]): json.loads(value)
            for key, value in self._store.key_value_dir_get(_PREFIX)}

  def _me(self) -> str:
    return f'Process {self._index} on {socket.gethostname()} (pid {os.getpid()})'

  def _late(self) -> str:
    """Returns which ranks are behind the others, from the table of heartbeats."""
    if self._store is None:
      return ''
    try:
      table = self._table()
    except Exception as e:
      return f'The table of heartbeats cannot be read: {e}'
    lines = [f'  {_name(rank, beat)}: step {beat["step"]}, phase {beat["phase"]!r}'
             for rank, beat in sorted(table.items())]
    where = {(beat['step'], beat['phase']) for beat in table.values()}
    behind = min(where, default=(0, ''))
    if len(where) > 1:
      names = ', '.join(_name(r, b) for r, b in sorted(table.items())
                        if (b['step'], b['phase']) == behind)
      lines.append(f'Behind the others: {names}.')
    missing = sorted(set(range(self._count)) - table.keys())
    if missing:
      lines.append(f'Never heard of: process {", ".join(map(str, missing))}.')
    return 'Heartbeats:\n' + '\n'.join(lines)

  def _report(self, text: str, code: int, *, stacks: bool = False) -> None:
    """Prints why the run ends, to stderr and past every lock, then leaves."""
    report = f'\nWATCHDOG: {text}\n'
    if stacks:
      report += self._late() + '\n'
    os.write(2, report.encode())
    if stacks:
      faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
    os.write(2, f'WATCHDOG: process {self._index} leaves with exit code {code}.\n'.encode())
    self._leave(code)


def _name(rank: int, beat: dict[str, Any]) -> str:
  return f'process {rank} on {beat["host"]} (pid {beat["pid"]})'


def coordination_store() -> Optional[Store]:
  """Returns the key-value store of `jax.distributed`, or None for a single process."""
  return jax_distributed.global_state.client
