"""From (sum, weight) pairs to numbers: added over steps first, divided once at the end.

A mean of means weighs a step with ten target tokens like one with ten thousand. Steps therefore
return sums and weights of the global batch, and only `Accumulator.means` divides.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

# Metric name -> (sum, weight) as Python floats; a sum may be an array of counts, which has no mean.
Sums = dict[str, tuple[Any, float]]

# The metric that is an array: [true class, predicted class].
COUNTS = 'confusion'

# Pending steps above which the older half is fetched: bounds what is alive on the device, and the
# older half has long been computed, so that fetching it does not drain the dispatch queue.
_MAX_PENDING = 256


@dataclasses.dataclass(frozen=True)
class Means:
  """Divided sums.

  Attributes:
    values: name -> sum / weight. NaN or infinite only if the sums are: a diverged loss is seen.
    empty: names whose total weight is 0 (say, an evaluation split with no target token). They have
      no value, rather than a 0 or NaN that would look like one.
  """

  values: dict[str, float]
  empty: tuple[str, ...] = ()


def to_host(sums: Mapping[str, Any]) -> Sums:
  """Returns `sums` as Python floats; waits for the device.

  Args:
    sums: name -> (sum, weight); each a scalar of jax (replicated, if on several hosts), numpy or
      Python. 'confusion' has a matrix of counts for a sum.
  Raises:
    ValueError: a value that is not such a pair.
  """
  host = {}
  for name, pair in jax.device_get(dict(sums)).items():
    pair = tuple(pair)
    if len(pair) != 2 or np.size(pair[1]) != 1 or (np.size(pair[0]) != 1 and name != COUNTS):
      raise ValueError(f'{name}: a metric is a pair of scalars (sum, weight), got {pair!r}.')
    host[name] = _on_host(pair[0]), float(np.asarray(pair[1]).item())
  return host


def _on_host(x: Any) -> Any:
  return float(np.asarray(x).item()) if np.size(x) == 1 else np.asarray(x, np.float64)


def add(left: Mapping[str, tuple[float, float]], right: Mapping[str, tuple[float, float]]) -> Sums:
  """Returns the pairwise total of two host-side `Sums`; a name in only one of them is kept."""
  total = {name: (_on_host(s), float(w)) for name, (s, w) in left.items()}
  for name, (s, w) in right.items():
    old_sum, old_weight = total.get(name, (0.0, 0.0))
    total[name] = (old_sum + _on_host(s), old_weight + float(w))
  return total


def means(sums: Mapping[str, tuple[float, float]], *, prefix: str = '') -> Means:
  """Returns sum / weight of each pair, named `prefix + name`.

  A weight of 0 gives no value but an entry in `Means.empty`, unless the sum is not finite: NaN
  times a weight of 0 is a fault in the model, and must not pass as "no data".
  """
  values, empty = {}, []
  for name, (s, w) in sums.items():
    if name == COUNTS:
      continue
    if w == 0:
      if math.isfinite(s):
        empty.append(prefix + name)
      else:
        values[prefix + name] = s
    else:
      values[prefix + name] = s / w
  return Means(values=values, empty=tuple(empty))


class Accumulator:
  """Adds the sums of many steps, in float64 on the host, without waiting for each step.

  float32 totals on the device would lose single tokens beyond 2**24 = 16.8 million.
  """

  def __init__(self):
    self._pending: list[Mapping[str, Any]] = []
    self._total: Sums = {}
    self._steps = 0

  @property
  def steps(self) -> int:
    """Steps added since the last reset."""
    return self._steps

  def add(self, sums: Mapping[str, Any]) -> None:
    """Takes the sums of one step; jax arrays are kept as they are until a value is asked for."""
    self._pending.append(sums)
    self._steps += 1
    if len(self._pending) > _MAX_PENDING:
      self._fetch(_MAX_PENDING // 2)

  def _fetch(self, count: int) -> None:
    # One device_get for all: the copies start together instead of one round trip per scalar.
    for sums in jax.device_get(self._pending[:count]):
      self._total = add(self._total, to_host(sums))
    del self._pending[:count]

  def sums(self) -> Sums:
    """Returns the total so far; waits for the device."""
    self._fetch(len(self._pending))
    return dict(self._total)

  def means(self, *, prefix: str = '') -> Means:
    """Returns the means so far, named `prefix + name`; waits for the device."""
    return means(self.sums(), prefix=prefix)

  def reset(self) -> None:
    """Forgets everything, for the next log window."""
    self._pending, self._total, self._steps = [], {}, 0
