"""Which phase of a run this process is in, since when, and for how long it may stay there."""

import dataclasses
import statistics
import threading
from collections.abc import Callable

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

  def step_done(self, step: int, *, least_deadline: float, factor: float) -> None:
    """Starts the next step. Its deadline is `factor` median steps, at least `least_deadline`."""
    with self._lock:
      now = self._clock()
      if self._phase == 'step':
        self._step_seconds = [*self._step_seconds[1 - _STEPS_FOR_MEDIAN :], now - self._since]
      self._step, self._phase, self._since = step, 'step', now
      median = statistics.median(self._step_seconds or [0.0])
      self._deadline = max(least_deadline, factor * median)
