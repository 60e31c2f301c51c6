"""Times a call on an asynchronous device: warm-up left out, several samples, median and spread."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Timing:
  """Seconds of one call.

  Attributes:
    seconds: median of the samples.
    fastest, slowest: of the samples.
    samples: how many there are.
    calls: in each sample, started one after the other without waiting between them.
  """

  seconds: float
  fastest: float
  slowest: float
  samples: int
  calls: int

  def row(self) -> dict[str, Any]:
    """Returns the fields of a result."""
    return {
      'seconds': self.seconds,
      'fastest_seconds': self.fastest,
      'slowest_seconds': self.slowest,
      'samples': self.samples,
      'calls_per_sample': self.calls,
    }


def time_calls(
  call: Callable[[], Any],
  wait: Callable[[Any], Any],
  *,
  samples: int = 7,
  sample_seconds: float = 0.05,
  small: bool = False,
) -> Timing:
  """Returns the time of `call`.

  A sample starts as many calls as take `sample_seconds`, then waits for the last one, so that
  starting a call on the host is hidden behind the device's work, as it is in training.

  Args:
    call: starts the work and returns its result, without waiting for it.
    wait: waits for a result of `call`.
    samples: how often to measure.
    sample_seconds: how long one sample should take.
    small: two samples of one call each, to see that the code works.
  """
  samples, sample_seconds = (2, 0.0) if small else (samples, sample_seconds)
  for _ in range(1 if small else 3):
    wait(call())
  calls = 1
  if sample_seconds:
    begin = time.perf_counter()
    wait(call())
    calls = max(1, round(sample_seconds / max(time.perf_counter() - begin, 1e-6)))
  seconds = []
  for _ in range(samples):
    begin = time.perf_counter()
    for _ in range(calls):
      result = call()
    wait(result)
    seconds.append((time.perf_counter() - begin) / calls)
  return Timing(statistics.median(seconds), min(seconds), max(seconds), samples, calls)
