"""Compares names, shapes, dtypes and values of two checkpoints."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Optional

import numpy as np

from t5x_gpu.checkpoint.arrays.state_reader import StateReader
from t5x_gpu.errors import did_you_mean


@dataclasses.dataclass(frozen=True)
class ChangedArray:
  """An array whose values differ between two checkpoints.

  Attributes:
    name: '/'-joined path.
    num_different: number of elements that differ; NaN equals NaN.
    max_abs: largest absolute difference; infinite if only one of two elements is NaN.
    max_relative: `max_abs` divided by the largest absolute value of the first array.
  """

  name: str
  num_different: int
  max_abs: float
  max_relative: float

  def __str__(self) -> str:
    return (
      f'{self.name}: {self.num_different:,} elements differ, by at most {self.max_abs:.3g} '
      f'({self.max_relative:.3g} of the largest value)'
    )


def tree_differences(a: StateReader, b: StateReader) -> list[str]:
  """Returns a line per array that is missing in one, or differs in shape or dtype."""
  only_a, only_b = a.shapes.keys() - b.shapes.keys(), b.shapes.keys() - a.shapes.keys()
  lines = []
  for name in [*a.shapes, *sorted(only_b)]:
    if name in only_a:
      lines.append(f'{_text(a, name)}: only in the first.{did_you_mean(name, only_b, limit=1)}')
    elif name in only_b:
      lines.append(f'{_text(b, name)}: only in the second.')
    elif (a.shapes[name], a.dtypes[name]) != (b.shapes[name], b.dtypes[name]):
      lines.append(f'{_text(a, name)} in the first, {_text(b, name)} in the second.')
  return lines


def _text(reader: StateReader, name: str) -> str:
  return f'{name} {reader.dtypes[name]}{list(reader.shapes[name])}'


def value_differences(
  a: StateReader, b: StateReader, *, advance: Callable[[int], None]
) -> Iterator[ChangedArray]:
  """Yields the arrays with equal shapes and different values; dtypes may differ.

  Args:
    a, b: the checkpoints.
    advance: called with the number of bytes of `a` compared since the last call.
  """
  for name, shape in a.shapes.items():
    if b.shapes.get(name) != shape:
      continue
    found = _difference(a, b, name, advance)
    if found is not None:
      yield found


def _difference(
  a: StateReader, b: StateReader, name: str, advance: Callable[[int], None]
) -> Optional[ChangedArray]:
  different, most, largest = 0, 0.0, 0.0
  for place, x in a.pieces(name):
    y = b.read_at(name, place)
    advance(x.nbytes)
    if x.size and x.dtype == y.dtype and np.array_equal(_bytes(x), _bytes(y)):
      largest = max(largest, _largest(x))
      continue
    x, y = x.astype(np.float64), y.astype(np.float64)
    unequal = (x != y) & ~(np.isnan(x) & np.isnan(y))
    different += int(unequal.sum())
    if unequal.any():
      with np.errstate(invalid='ignore'):  # infinity minus infinity
        most = max(most, float(np.max(np.abs(x - y), where=unequal & ~np.isnan(x - y), initial=0)))
      if np.any(np.isnan(x) != np.isnan(y)):
        most = float('inf')
    largest = max(largest, _largest(x))
  if not different:
    return None
  return ChangedArray(name, different, most, most / largest if largest else float('inf'))


def _bytes(x: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _largest(x: np.ndarray) -> float:
  finite = np.abs(x.astype(np.float64))
  return float(np.max(finite, where=np.isfinite(finite), initial=0))
