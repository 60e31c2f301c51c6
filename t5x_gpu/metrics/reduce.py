"""Metrics from (sum, weight) pairs: added over steps first, divided once at the end.

A mean of means gives a step with ten target tokens the same weight as one with ten thousand. So
steps return sums and weights of the global batch, and only `means` divides.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import numpy as np

# Metric name -> (sum, weight) as Python floats. The sums of ARRAYS are arrays, without a mean.
Sums = dict[str, tuple[float | np.ndarray, float]]
DeviceSums = Mapping[str, tuple[jax.Array, jax.Array]]  # the same on devices

# The confusion matrix [true class, predicted class].
COUNTS = 'confusion'
# Counts [class, (right, predicted, true)].
HITS = 'hits'
# A row per example: [examples, (cosine, score, weight)]. Batches are joined, not added.
PAIRS = 'pairs'
ARRAYS = (COUNTS, HITS, PAIRS)

# With more pending steps, the older half is fetched. This bounds the memory on the device, and does
# not drain the dispatch queue, because the older half was computed long ago.
_MAX_PENDING = 32


@dataclasses.dataclass(frozen=True)
class Means:
  """Sums divided by their weights.

  Attributes:
    values: name -> sum / weight. NaN or infinite only if the sum is, so a diverged loss shows.
    empty: names with a total weight of 0 (for example an evaluation split without target tokens).
      They have no value, because 0 or NaN would look like a result.
  """

  values: dict[str, float]
  empty: tuple[str, ...] = ()


def to_host(sums: DeviceSums) -> Sums:
  """Returns `sums` as Python floats; waits for the device.

  Args:
    sums: name -> (sum, weight); scalars of jax (replicated, with several hosts), numpy or Python.
      Sums of `ARRAYS` are matrices.
  Raises:
    ValueError: a value is not such a pair.
  """
  host = {}
  for name, pair in jax.device_get(dict(sums)).items():
    pair = tuple(pair)
    if len(pair) != 2 or np.size(pair[1]) != 1 or (np.size(pair[0]) != 1 and name not in ARRAYS):
      raise ValueError(f'{name}: a metric is a pair of scalars (sum, weight), got {pair!r}.')
    host[name] = _on_host(pair[0]), float(np.asarray(pair[1]).item())
  return host


def _on_host(x: jax.Array) -> float | np.ndarray:
  return float(np.asarray(x).item()) if np.size(x) == 1 else np.asarray(x, np.float64)


def add(left: Mapping[str, tuple[float, float]], right: Mapping[str, tuple[float, float]]) -> Sums:
  """Returns the pairwise total of two host-side `Sums`; keeps names that only one of them has.

  The rows of `PAIRS` are concatenated.
  """
  total = {name: (_on_host(s), float(w)) for name, (s, w) in left.items()}
  for name, (s, w) in right.items():
    old_sum, old_weight = total.get(name, (0.0, 0.0))
    new = _on_host(s)
    if name == PAIRS and name in left:
      new = np.concatenate([old_sum, new])
    else:
      new = old_sum + new
    total[name] = (new, old_weight + float(w))
  return total


def means(sums: Mapping[str, tuple[float, float]], *, prefix: str = '') -> Means:
  """Returns sum / weight of each pair, named `prefix + name`.

  A name with weight 0 goes to `Means.empty`, unless its sum is not finite: NaN times a weight of 0
  is an error in the model and must not look like missing data.
  """
  values, empty = {}, []
  for name, (s, w) in sums.items():
    if name in ARRAYS:
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
  """Adds the sums of many steps, in float64 on the host.

  Sums on devices are fetched later, so an evaluation does not wait for each of its steps.
  float32 totals on the device would lose single tokens beyond 2**24 = 16.8 million.
  """

  def __init__(self):
    self._pending: list[DeviceSums] = []
    self._total: Sums = {}

  def add(self, sums: DeviceSums) -> None:
    """Adds the sums of one step; jax arrays stay on the device until a value is needed."""
    self._pending.append(sums)
    if len(self._pending) > _MAX_PENDING:
      self._fetch(_MAX_PENDING // 2)

  def _fetch(self, count: int) -> None:
    # One device_get for all sums: copies run in parallel instead of one round trip per scalar.
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
    """Starts a new window."""
    self._pending, self._total = [], {}
