"""How fast a run is: step seconds, tokens per second, share of time spent waiting for input, ETA.

The loop tells the timer what happens; the timer only reads the clock. Pauses (save, evaluation)
and the first step, which compiles, count for no step: they are reported under their own names.
"""

import collections
import contextlib
import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Optional

# Steps that the ETA looks back on: long enough to smooth, short enough to follow a slower machine.
_ETA_STEPS = 200


@dataclasses.dataclass(frozen=True)
class StepTimes:
  """What happened since the last window was taken. Seconds exclude pauses and warm-up steps.

  Attributes:
    num_steps: timed steps; 0 if there was nothing but warm-up. The numbers below are then None.
    step_seconds: mean seconds per step.
    median_step_seconds: their median, which one slow step does not move.
    tokens_per_second: tokens of the timed steps by their seconds, all devices together.
    input_wait_fraction: share of the step seconds in which the loop waited for its next batch.
    eta_seconds: until the last step, pauses included at their present rate; None before any step.
    pauses: seconds by name ('save', 'eval') in this window.
    first_step_seconds: of the warm-up step (compilation included), in the window that holds it.
  """

  num_steps: int
  step_seconds: Optional[float]
  median_step_seconds: Optional[float]
  tokens_per_second: Optional[float]
  input_wait_fraction: Optional[float]
  eta_seconds: Optional[float]
  pauses: dict[str, float]
  first_step_seconds: Optional[float]

  def metrics(self, *, prefix: str = 'train/') -> dict[str, float]:
    """Returns the known numbers by metric name; what is None is left out."""
    values = {
      'step_seconds': self.step_seconds,
      'step_seconds_median': self.median_step_seconds,
      'tokens_per_second': self.tokens_per_second,
      'input_wait_fraction': self.input_wait_fraction,
      'first_step_seconds': self.first_step_seconds,
      **{f'{name}_seconds': seconds for name, seconds in self.pauses.items()},
    }
    return {prefix + name: value for name, value in values.items() if value is not None}


class StepTimer:
  """Measures steps from one `step_done` to the next.

      timer = StepTimer(total_steps=100, first_step=0, tokens_per_step=2048)
      for step in range(first_step, total_steps):
        with timer.input_wait():
          batch = next(batches)
        ...                                  # run the step, wait until it is really done
        timer.step_done()
        with timer.pause('save'):
          checkpointer.save(...)
        if log: times = timer.window()

  Args:
    total_steps: step at which the run ends.
    first_step: step at which this process starts (0, or the checkpoint's).
    tokens_per_step: tokens of the global batch, padding included (batch x length).
    warmup_steps: steps at the start that are not timed, as they compile.
    clock: seconds that never go back; tests give their own.
  """

  def __init__(
    self,
    total_steps: int,
    *,
    tokens_per_step: int,
    first_step: int = 0,
    warmup_steps: int = 1,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._clock = clock
    self._tokens_per_step = tokens_per_step
    self._total_steps = total_steps
    self._step = first_step
    self._warmup_left = warmup_steps
    self._inside: Optional[str] = None  # name of the wait or pause that is open
    # Of the step under way:
    self._started = clock()
    self._paused = 0.0
    self._waited = 0.0
    # Of the window:
    self._seconds: list[float] = []
    self._wait_seconds = 0.0
    self._pauses: dict[str, float] = {}
    self._first_step_seconds: Optional[float] = None
    # Of the run: (step seconds, pause seconds that came before it), for the ETA.
    self._recent: collections.deque[tuple[float, float]] = collections.deque(maxlen=_ETA_STEPS)

  def restart(self) -> None:
    """Starts the step under way anew, when set-up took place after the timer was made."""
    self._started = self._clock()
    self._paused = self._waited = 0.0

  @contextlib.contextmanager
  def _measure(self, name: str) -> Iterator[list[float]]:
    if self._inside is not None:
      raise ValueError(
        f'StepTimer: {name!r} began inside {self._inside!r}; they cannot nest, '
        'as the same seconds would count twice.'
      )
    self._inside = name
    seconds: list[float] = []
    begin = self._clock()
    try:
      yield seconds
    finally:
      self._inside = None
      seconds.append(self._clock() - begin)

  @contextlib.contextmanager
  def input_wait(self) -> Iterator[None]:
    """Counts the seconds inside as waiting for input. They remain part of the step."""
    seconds: list[float] = []
    try:
      with self._measure('input_wait') as seconds:
        yield
    finally:
      self._waited += sum(seconds)

  @contextlib.contextmanager
  def pause(self, name: str) -> Iterator[None]:
    """Takes the seconds inside out of the step and reports them as `name`."""
    seconds: list[float] = []
    try:
      with self._measure(name) as seconds:
        yield
    finally:
      self._paused += sum(seconds)
      if seconds:
        self._pauses[name] = self._pauses.get(name, 0.0) + sum(seconds)

  def step_done(self) -> float:
    """Ends one step and begins the next; returns its seconds, pauses excluded."""
    now = self._clock()
    seconds = now - self._started - self._paused
    self._step += 1
    if self._warmup_left > 0:
      self._warmup_left -= 1
      self._first_step_seconds = (self._first_step_seconds or 0.0) + seconds
    else:
      self._seconds.append(seconds)
      self._wait_seconds += self._waited
      self._recent.append((seconds, self._paused))
    self._started, self._paused, self._waited = now, 0.0, 0.0
    return seconds

  def eta_seconds(self) -> Optional[float]:
    """Returns seconds until `total_steps`, or None before the first timed step."""
    remaining = max(0, self._total_steps - self._step)
    if not remaining:
      return 0.0
    if not self._recent:
      return None
    return remaining * sum(step + pause for step, pause in self._recent) / len(self._recent)

  def window(self) -> StepTimes:
    """Returns the numbers since the last call and begins a new window."""
    n, total = len(self._seconds), sum(self._seconds)
    timed = n > 0 and total > 0
    times = StepTimes(
      num_steps=n,
      step_seconds=total / n if n else None,
      median_step_seconds=statistics.median(self._seconds) if n else None,
      tokens_per_second=self._tokens_per_step * n / total if timed else None,
      input_wait_fraction=min(1.0, self._wait_seconds / total) if timed else None,
      eta_seconds=self.eta_seconds(),
      pauses=self._pauses,
      first_step_seconds=self._first_step_seconds,
    )
    self._seconds, self._wait_seconds, self._pauses = [], 0.0, {}
    self._first_step_seconds = None
    return times


def mfu(
  model_flops_per_step: float, *, step_seconds: Optional[float], peak_flops: Optional[float]
) -> Optional[float]:
  """Returns the model FLOPs utilisation (0 to 1), or None where it is unknown.

  Args:
    model_flops_per_step: of the model's mathematics on the global batch, recomputation excluded.
    step_seconds: mean seconds per step; None before any step.
    peak_flops: dense FLOP/s of all devices together in the dtype of the matmuls; None if unknown.
  Source: Chowdhery et al. 2022 (PaLM), appendix B.
  """
  if not step_seconds or not peak_flops:
    return None
  value = model_flops_per_step / step_seconds / peak_flops
  if value > 1:
    # Faster than the hardware can be: a sparse or a wrong dtype's peak, or steps not waited for.
    logging.getLogger(__name__).warning(
      'MFU unknown: %.4g FLOPs in %.4g s would be %.0f%% of the peak of %.4g FLOP/s.',
      model_flops_per_step,
      step_seconds,
      100 * value,
      peak_flops,
    )
    return None
  return value
