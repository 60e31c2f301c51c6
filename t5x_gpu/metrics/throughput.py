"""The speed of a run: step seconds, tokens per second, share of time waiting for input, ETA.

Pauses (save, evaluation) do not count as part of a step. They are reported by name.
"""

import collections
import contextlib
import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Optional

# Number of recent steps for the ETA: enough to smooth it, few enough to follow a slower machine.
_ETA_STEPS = 200
_INPUT_WAIT, _DISPATCH, _DEVICE_WAIT = 'input_wait', 'dispatch', 'device_wait'
# Pause between steps in profiles -> its name in texts.
PROFILED_PAUSES = {'save': 'save', 'eval': 'evaluation'}


@dataclasses.dataclass(frozen=True)
class StepTimes:
  """The numbers of one window. Seconds exclude pauses; without a step, numbers are None.

  Attributes:
    step_seconds: mean seconds per step.
    median_step_seconds: median seconds per step, which one slow step does not change.
    tokens_per_second: tokens per second of all devices together.
    input_wait_fraction: share of the step seconds spent waiting for the next batch.
    dispatch_seconds: mean seconds per step until the devices have their work.
    host_seconds: mean seconds per step in which the host does not wait for devices.
    eta_seconds: seconds until the last step, including pauses at their recent rate.
    pauses: seconds by name ('save', 'eval').
  """

  step_seconds: Optional[float]
  median_step_seconds: Optional[float]
  tokens_per_second: Optional[float]
  input_wait_fraction: Optional[float]
  eta_seconds: Optional[float]
  pauses: dict[str, float]
  dispatch_seconds: Optional[float] = None
  host_seconds: Optional[float] = None

  def metrics(self, *, prefix: str = 'train/') -> dict[str, float]:
    """Returns the known numbers by metric name."""
    values = {
      'step_seconds': self.step_seconds,
      'step_seconds_median': self.median_step_seconds,
      'tokens_per_second': self.tokens_per_second,
      'input_wait_fraction': self.input_wait_fraction,
      'dispatch_seconds': self.dispatch_seconds,
      'host_seconds': self.host_seconds,
      **{f'{name}_seconds': seconds for name, seconds in self.pauses.items()},
    }
    return {prefix + name: value for name, value in values.items() if value is not None}


class StepTimer:
  """Measures steps from one `step_done` to the next.

      timer = StepTimer(total_steps=100, first_step=0, tokens_per_step=2048)
      for step in range(first_step, total_steps):
        with timer.input_wait():
          batch = next(batches)
        ...                                  # run the step and wait for it
        timer.step_done()
        with timer.pause('save'):
          checkpointer.save(...)
        if log: times = timer.window()

  Args:
    total_steps: last step of the run.
    first_step: step at which this process starts (0, or the checkpoint's).
    tokens_per_step: tokens of the global batch, including padding (batch x length).
    clock: returns seconds that never decrease.
    phase: a context around every wait and pause, called with its name ('input_wait', 'save').
  """

  def __init__(
    self,
    total_steps: int,
    *,
    tokens_per_step: int,
    first_step: int = 0,
    clock: Callable[[], float] = time.monotonic,
    phase: Callable[[str], AbstractContextManager[None]] = contextlib.nullcontext,
  ):
    self._clock = clock
    self._phase = phase
    self._tokens_per_step = tokens_per_step
    self._total_steps = total_steps
    self._step = first_step
    self._inside: Optional[str] = None  # name of the current wait or pause
    # Current step:
    self._started = clock()
    self._paused = 0.0
    self._waited = 0.0
    # Per window:
    self._seconds: list[float] = []
    self._wait_seconds = 0.0
    self._parts = dict.fromkeys((_DISPATCH, _DEVICE_WAIT), 0.0)
    self._pauses: dict[str, float] = {}
    # For the whole process:
    self.totals: collections.Counter[str] = collections.Counter()  # seconds by name
    # For the ETA: (step seconds, seconds of pauses in the step).
    self._recent: collections.deque[tuple[float, float]] = collections.deque(maxlen=_ETA_STEPS)

  def restart(self) -> None:
    """Restarts the current step, so that setup since the timer was created does not count."""
    self._started = self._clock()
    self._paused = self._waited = 0.0

  @contextlib.contextmanager
  def _measure(self, name: str) -> Iterator[None]:
    if self._inside is not None:
      raise ValueError(
        f'StepTimer: {name!r} began inside {self._inside!r}. They cannot nest: the same seconds '
        'would count twice.'
      )
    self._inside = name
    begin = self._clock()
    try:
      with self._phase(name):
        yield
    finally:
      self._inside = None
      seconds = self._clock() - begin
      self.totals[name] += seconds
      if name == _INPUT_WAIT:
        self._waited += seconds
      elif name in self._parts:
        self._parts[name] += seconds
      else:
        self._paused += seconds
        self._pauses[name] = self._pauses.get(name, 0.0) + seconds

  def input_wait(self) -> AbstractContextManager[None]:
    """Context that counts as waiting for input, which is part of the step."""
    return self._measure(_INPUT_WAIT)

  def dispatch(self) -> AbstractContextManager[None]:
    """Context that counts as handing work to the devices, which is part of the step."""
    return self._measure(_DISPATCH)

  def device_wait(self) -> AbstractContextManager[None]:
    """Context that counts as waiting for the devices, which is part of the step."""
    return self._measure(_DEVICE_WAIT)

  def pause(self, name: str) -> AbstractContextManager[None]:
    """Context that is not part of the step, and is reported as `name`."""
    return self._measure(name)

  def step_done(self) -> float:
    """Ends one step and begins the next; returns its seconds without pauses."""
    now = self._clock()
    seconds = now - self._started - self._paused
    self._step += 1
    self._seconds.append(seconds)
    self._wait_seconds += self._waited
    self._recent.append((seconds, self._paused))
    self._started, self._paused, self._waited = now, 0.0, 0.0
    return seconds

  def last_is_slow(self, factor: float) -> bool:
    """Returns whether the last step took more than `factor` times the median of the last 200."""
    recent = self.recent_seconds
    return len(recent) == _ETA_STEPS and recent[-1] > factor * statistics.median(recent)

  @property
  def recent_seconds(self) -> list[float]:
    """Seconds of the last 200 steps at most, without pauses."""
    return [seconds for seconds, _ in self._recent]

  def eta_seconds(self) -> Optional[float]:
    """Returns the seconds until `total_steps`; None before the first step."""
    remaining = max(0, self._total_steps - self._step)
    if not remaining:
      return 0.0
    if not self._recent:
      return None
    return remaining * sum(step + pause for step, pause in self._recent) / len(self._recent)

  def window(self) -> StepTimes:
    """Returns the numbers since the last call and starts a new window."""
    n, total = len(self._seconds), sum(self._seconds)
    timed = n > 0 and total > 0
    times = StepTimes(
      step_seconds=total / n if n else None,
      median_step_seconds=statistics.median(self._seconds) if n else None,
      tokens_per_second=self._tokens_per_step * n / total if timed else None,
      input_wait_fraction=min(1.0, self._wait_seconds / total) if timed else None,
      eta_seconds=self.eta_seconds(),
      pauses=self._pauses,
      dispatch_seconds=self._parts[_DISPATCH] / n if n else None,
      host_seconds=max(0.0, total - self._parts[_DEVICE_WAIT]) / n if n else None,
    )
    self._seconds, self._wait_seconds, self._pauses = [], 0.0, {}
    self._parts = dict.fromkeys(self._parts, 0.0)
    return times


def pauses_that_took_time(parts: Mapping[str, Optional[float]]) -> dict[str, float]:
  """Returns name in texts -> seconds per step, for each pause that is known and above 0.

  Args:
    parts: `parts` of an anatomy.json.
  """
  known = {text: parts.get(name) for name, text in PROFILED_PAUSES.items()}
  return {text: seconds for text, seconds in known.items() if seconds is not None and seconds > 0}


def mfu(
  model_flops_per_step: float, *, step_seconds: float, peak_flops: Optional[float]
) -> Optional[float]:
  """Returns the model FLOPs utilization, 0 to 1; None if unknown, or above 1, with a warning.

  Args:
    model_flops_per_step: FLOPs of the model on the global batch, without recomputation.
    step_seconds: seconds per step.
    peak_flops: dense FLOP/s of all devices together in the dtype of the matmuls; None if unknown.
  Source: Chowdhery et al. 2022 (PaLM), appendix B.
  """
  if not peak_flops:
    return None
  value = model_flops_per_step / step_seconds / peak_flops
  if value > 1:
    logging.getLogger(__name__).warning(
      'MFU unknown: %.4g FLOPs in %.4g s would be %.0f%% of the peak of %.4g FLOP/s. In long rows '
      'model FLOPs count pairs of causal attention that kernels skip; otherwise the peak is wrong, '
      'or the seconds are.',
      model_flops_per_step,
      step_seconds,
      100 * value,
      peak_flops,
    )
    return None
  return value
