"""Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP: requests to stop after a step, not exceptions inside it.

Several processes must stop after the same step: a process that left earlier would leave the others
waiting in a collective. A scheduler may signal only one process, so they agree on the step through
JAX's preemption service. That service handles SIGTERM (a Python handler would silently disable it);
the other signals are forwarded to it as a SIGTERM.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Optional, Self

from jax.experimental import multihost_utils

from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster.restarts import EXIT_PREEMPTED
from t5x_gpu.runtime.process_exit import (
  PREEMPTION_SIGNALS,
  STOP_SIGNALS,
  SignalHandler,
  stops_on_interrupt,
)
from t5x_gpu.terminal.progress import Advance, Show, Total
from t5x_gpu.terminal.streams import write_stderr

_SAVING = 'finishing this step, then saving and exiting.'

_early: list[signal.Signals] = []
_job_end: list[float] = []  # seconds since 1970, if the scheduler reports it


def catch_early() -> None:
  """Remembers PREEMPTION_SIGNALS until a StopRequest takes over.

  During compilation these signals would end the process with an exit code that a scheduler reads as
  failure. A second signal still does, except SIGHUP, which both shell and kernel send. Once several
  processes have joined, JAX takes over SIGTERM.
  """
  _early.clear()
  for number in PREEMPTION_SIGNALS:
    if not _is_ignored_hangup(number):
      signal.signal(number, _remember)


def _is_ignored_hangup(number: int) -> bool:
  """Returns whether this process was started by nohup, which ignores SIGHUP."""
  return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def _remember(number: int, frame: Optional[FrameType]) -> None:
  del frame
  _early.append(signal.Signals(number))
  if number != signal.SIGHUP:
    signal.signal(number, signal.SIG_DFL)
  write_stderr(f'{signal.Signals(number).name}: exiting after the first step.\n')


def expect_end(end_time: Optional[float]) -> None:
  """Records when the scheduler will end the job, in seconds since 1970; None if unknown."""
  _job_end[:] = [] if end_time is None else [end_time]


def expected_end() -> Optional[float]:
  """Returns when the scheduler will end the job, in seconds since 1970; None if unknown."""
  return _job_end[0] if _job_end else None


class Stopped(Exception):
  """A stop signal has ended an evaluation, after the same batch on all processes."""


class StopRequest:
  """Remembers the first stop signal; a second Ctrl-C interrupts at once.

      with StopRequest() as stop:
        for step in ...:
          ...
          if stop.reached(): save and leave

  A second SIGTERM is ignored: at a time limit Slurm sends two, while the run is saving.

  Args:
    before_end_seconds: stop this long before the end time given to `expect_end`, because some
      schedulers (PBS) send no signal that leaves time to save.
    now: returns seconds since 1970.
  Attributes:
    signal: the first stop signal, or None.
    interrupted: whether it has ended an evaluation.
  """

  def __init__(
    self, *, before_end_seconds: float = 0.0, now: Callable[[], float] = time.time
  ) -> None:
    end = expected_end()
    self._stop_at = None if end is None else end - before_end_seconds
    self._now = now
    self.signal: Optional[signal.Signals] = None
    self.interrupted = False
    self._together = distributed.process_count() > 1
    self._reached, self._calls = False, 0
    self._previous: dict[signal.Signals, SignalHandler] = {}

  def __enter__(self) -> Self:
    handle = stops_on_interrupt(self._handle)
    for number in STOP_SIGNALS:
      if not (self._together and number == signal.SIGTERM or _is_ignored_hangup(number)):
        self._previous[number] = signal.signal(number, handle)
    # As `streams.outlive`, after the user's modules, which may have set it.
    self._previous[signal.SIGPIPE] = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if _early:
      self._request(_early.pop(), f'Asked to stop during set-up: {_SAVING}')
    return self

  def __exit__(self, *exc_info: object) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def reached(self) -> bool:
    """Returns whether to stop now; the same on all processes.

    Every process must call it at the same places: after each step, and between the batches of an
    evaluation. `signal` is set if it returns True.
    """
    self._calls += 1
    self._reached = self._reached or self._is_agreed()
    return self._reached

  def _is_agreed(self) -> bool:
    if self.signal is None and self._stop_at is not None and self._now() >= self._stop_at:
      self._request(signal.SIGTERM, f'The time limit of the job is near: {_SAVING}')
    if not self._together:
      return self.signal is not None
    if not multihost_utils.reached_preemption_sync_point(self._calls):
      return False
    received = [signal.Signals(number) for number in distributed.gather_json(self.signal) if number]
    # The user's Ctrl-C wins over a scheduler's signal and decides the exit code.
    self.signal = min(received, key=STOP_SIGNALS.index, default=signal.SIGTERM)
    return True

  def interrupt(self) -> None:
    """Raises Stopped if `reached` before or during an evaluation."""
    if self.reached():
      self.interrupted = True
      raise Stopped

  def interrupting(self, show: Show) -> Show:
    """Returns `show` for an evaluation; its `advance`, called after each batch, may interrupt.

    All processes must have the same number of batches.
    """

    @contextlib.contextmanager
    def interruptible(title: str, total: Total) -> Iterator[Advance]:
      with show(title, total) as advance:

        def advance_or_stop(number: int) -> None:
          advance(number)
          self.interrupt()

        yield advance_or_stop

    return interruptible

  @property
  def exit_code(self) -> int:
    """130 for Ctrl-C, as in shells; EXIT_PREEMPTED for other signals; 0 without a request."""
    if self.signal is None:
      return 0
    return EXIT_PREEMPTED if self.signal in PREEMPTION_SIGNALS else 128 + self.signal

  def request(self, text: str) -> None:
    """Asks all processes to stop after a step that they agree on, as a stop signal does.

    Args:
      text: message with the reason and what will be saved.
    """
    if self.signal is None:
      self._request(signal.SIGTERM, text)

  def _handle(self, number: int, frame: Optional[FrameType]) -> None:
    del frame
    if self.signal is not None:
      if number == signal.SIGINT:
        raise KeyboardInterrupt
      return
    again = ' Press Ctrl-C again to exit immediately.' if number == signal.SIGINT else ''
    self._request(signal.Signals(number), f'{signal.Signals(number).name}: {_SAVING}{again}')

  def _request(self, number: signal.Signals, text: str) -> None:
    self.signal = number
    if distributed.is_main_process():
      write_stderr(f'\n{text}\n')
    if self._together:
      os.kill(os.getpid(), signal.SIGTERM)  # JAX's preemption service informs the other processes
