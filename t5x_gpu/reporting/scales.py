"""The position of numbers on an axis, its ticks, and fewer points of a long curve."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Optional

Points = list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Scale:
  """Maps `low` to 0 and `high` to 1, linearly or by logarithms."""

  low: float
  high: float
  is_log: bool = False

  def __call__(self, value: float) -> float:
    if self.is_log:
      return math.log(value / self.low) / math.log(self.high / self.low)
    return (value - self.low) / (self.high - self.low)

  def shows(self, value: float) -> bool:
    """Returns whether a value has a position on the axis."""
    return math.isfinite(value) and (value > 0 or not self.is_log)


def scale_of(
  values: Iterable[float], *, is_log: bool = False, low: Optional[float] = None, margin: float = 0.0
) -> Scale:
  """Returns an axis that shows all finite `values` (the positive ones, if logarithmic).

  Args:
    values: may be empty.
    is_log: whether the axis is logarithmic.
    low: the axis begins here if no value is below it.
    margin: share of the axis that stays free at both ends.
  """
  known = [v for v in values if math.isfinite(v) and (v > 0 or not is_log)]
  bottom, top = min(known, default=1.0), max(known, default=10.0 if is_log else 2.0)
  if low is not None and (low > 0 or not is_log):
    bottom = min(bottom, low)
  if is_log:
    if bottom == top:
      bottom, top = bottom / 2, top * 2
    space = (top / bottom) ** margin
    return Scale(bottom / space, top * space, True)
  if bottom == top:
    half = abs(bottom) / 2 or 0.5
    return Scale(bottom - half, top + half)
  space = margin * (top - bottom)
  return Scale(bottom if bottom == low else bottom - space, top + space)


def ticks(scale: Scale, *, most: int = 6, whole: bool = False) -> list[float]:
  """Returns round numbers on an axis: 1, 2 or 5 times powers of ten.

  Args:
    scale: the axis.
    most: maximum number of ticks.
    whole: only whole numbers.
  """
  if scale.is_log:
    decades = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
      found = [f * 10.0**d for d in decades for f in factors]
      found = [v for v in found if scale.low <= v <= scale.high]
      if len(found) <= most:
        break
    found = found[:: math.ceil(len(found) / most) or 1]
    if len(found) > 1:
      return found
  span = scale.high - scale.low
  power = 10.0 ** math.floor(math.log10(span / (most - 1)))
  step = next(f * power for f in (1, 2, 5, 10, 20) if span / (f * power) <= most - 1)
  if whole:
    step = max(1, round(step))
  first = math.ceil(scale.low / step - 1e-9)
  found = [i * step for i in range(first, first + most + 2)]
  return [v for v in found if scale.low - 1e-9 * span <= v <= scale.high + 1e-9 * span]


def fewer(points: Points, *, most: int) -> Points:
  """Returns at most about `most` points of a curve, with the lowest and highest of each stretch.

  A single bad step therefore stays visible among 100,000.
  """
  if len(points) <= most:
    return points
  length = len(points) / max(1, most // 2)
  kept: Points = []
  start = 0.0
  while start < len(points):
    stretch = points[int(start) : max(int(start) + 1, int(start + length))]
    ends = {
      index
      for choose in (min, max)
      for index in [choose(range(len(stretch)), key=lambda i: stretch[i][1])]
    }
    kept += [stretch[i] for i in sorted(ends)]
    start += length
  return [points[0], *kept, points[-1]]


def short_number(value: float) -> str:
  """Returns '12k' for 12,000, '1.5M', '0.05', '2e-05'."""
  size = abs(value)
  for factor, unit in ((1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
    if size >= factor * 0.99995:
      return f'{value / factor:.4g}{unit}'
  return f'{value:.4g}'


Format = Callable[[float], str]
