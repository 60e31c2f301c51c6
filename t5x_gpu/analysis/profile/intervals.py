"""Unions and differences of time intervals, (begin, end) pairs."""

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
  """Returns disjoint intervals in order that cover the same time."""
  merged: list[Interval] = []
  for start, end in sorted(intervals):
    if merged and start <= merged[-1][1]:
      merged[-1] = merged[-1][0], max(end, merged[-1][1])
    elif end > start:
      merged.append((start, end))
  return merged


def length(intervals: Iterable[Interval]) -> float:
  """Returns the length of disjoint intervals."""
  return sum(end - start for start, end in intervals)


def without(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
  """Returns the parts of disjoint, ordered `intervals` that are not in `others`."""
  rest: list[Interval] = []
  taken = list(others)
  first = 0
  for start, end in intervals:
    while first < len(taken) and taken[first][1] <= start:
      first += 1
    at, i = start, first
    while i < len(taken) and taken[i][0] < end:
      if taken[i][0] > at:
        rest.append((at, taken[i][0]))
      at = max(at, taken[i][1])
      i += 1
    if at < end:
      rest.append((at, end))
  return rest
