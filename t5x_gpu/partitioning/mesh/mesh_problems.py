"""Problems with mesh sizes, each with the nearest sizes that fit."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Optional

from t5x_gpu.errors import MeshError, all_problems
from t5x_gpu.runtime.cluster.topology import Topology


@dataclasses.dataclass(frozen=True)
class Problem:
  """One problem: what happened, the fix, and the Partitioner parameters involved."""

  what: str
  fix: str
  parameters: tuple[str, ...] = ()


class Problems(list[Problem]):
  """What is wrong, in the order in which it was found."""

  def add(self, what: str, fix: str, *parameters: str) -> None:
    self.append(Problem(what, fix, parameters))


@dataclasses.dataclass(frozen=True)
class Slots:
  """What the sizes must fill: all devices, the devices of a host, or the hosts.

  Attributes:
    number: number of slots; the sizes must multiply to it.
    words: '16 GPUs', 'The 8 GPUs of a host', '2 hosts'.
    names: axis -> the user's name for its size.
    parameters: the gin parameters that set the sizes.
    where: ' in ici_mesh_shape', if the names alone are ambiguous.
    multiple_of: a run can be started with more slots, in multiples of this; 0 if it cannot.
    more_words: format of a number of slots, '{} GPUs'.
    legal: axis -> legal sizes, for axes with restrictions.
  """

  number: int
  words: str
  names: Mapping[str, str]
  parameters: tuple[str, ...]
  where: str = ''
  multiple_of: int = 0
  more_words: str = '{}'
  legal: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


def raise_all(problems: Problems) -> None:
  """Raises one MeshError for all `problems`; does nothing if there are none."""
  if not problems:
    return
  names = dict.fromkeys(name for problem in problems for name in problem.parameters)
  parameters = tuple(f'Partitioner.{name}' for name in names)
  if len(problems) == 1:
    raise MeshError(
      problems[0].what, fix=problems[0].fix, parameters=parameters, docs='mesh.md#sizes'
    )
  raise MeshError(
    all_problems([f'{p.what} {p.fix}' for p in problems], title='The mesh is impossible'),
    parameters=parameters,
    docs='mesh.md#sizes',
  )


def is_size(value: Any) -> bool:
  """Returns whether `value` is an int of 1 or more, or -1."""
  return isinstance(value, int) and not isinstance(value, bool) and (value >= 1 or value == -1)


def check_sizes(
  sizes: Mapping[str, object], where: str, problems: Problems, parameters: Mapping[str, str]
) -> bool:
  """Returns whether every size is 1 or more, with at most one -1; adds to `problems` otherwise."""
  good = True
  for axis, size in sizes.items():
    if not is_size(size):
      good = False
      problems.add(
        f'{where}{axis} = {size!r} is not a size.',
        f'Set {axis} to 1 or more, or to -1 for all remaining devices.',
        parameters[axis],
      )
  open_axes = [axis for axis, size in sizes.items() if size == -1]
  if len(open_axes) > 1:
    good = False
    keep = next(axis for axis in open_axes if axis != 'data')
    problems.add(
      f'{where}{" and ".join(open_axes)} are -1, but only one axis can take the rest.',
      f'Keep {keep} = -1 and set '
      + ' and '.join(f'{axis} = 1' for axis in open_axes if axis != keep)
      + (' (data is -1 unless it is set).' if 'data' in open_axes and not where else '.'),
      *dict.fromkeys(parameters[axis] for axis in open_axes),
    )
  return good


def legal_partitions(topology: Topology) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns every legal `num_partitions`: those inside a host, and those that span whole hosts."""
  inside = tuple(divisors(topology.devices_per_host))
  across = tuple(
    topology.devices_per_host * hosts for hosts in divisors(topology.num_hosts) if hosts > 1
  )
  return inside, across


def partitions_problem(
  topology: Topology,
  num_partitions: int,
  *,
  given_as: str = '',
  parameters: tuple[str, ...] = ('num_partitions',),
) -> Optional[Problem]:
  """Returns the problem with `num_partitions` on `topology`; None if it is legal.

  Tensor parallelism exchanges activations in every layer, so it belongs on the links inside a host.
  A size that neither divides a host nor covers whole hosts would straddle them.

  Args:
    topology: hosts and devices per host.
    num_partitions: size of `model`.
    given_as: how the user set it, if not as num_partitions: ' (model_parallel_submesh = ...)'.
    parameters: the parameters that set it.
  """
  inside, across = legal_partitions(topology)
  if num_partitions in inside + across:
    return None
  if topology.num_devices == 1:
    return Problem(
      f'num_partitions = {num_partitions}{given_as} splits every layer over {num_partitions} '
      f'devices, but there is {topology.count(1)}.',
      'Set Partitioner.num_partitions = 1, or '
      f'start on a host with {topology.count(num_partitions)}.',
      parameters,
    )
  per_host = topology.count(topology.devices_per_host)
  what = (
    f'num_partitions = {num_partitions}{given_as} does not fit {topology}: it must divide '
    f'the {per_host} of a host, so that tensor parallelism stays on the links inside it'
  )
  fix = f'Set Partitioner.num_partitions = {any_of(inside)}'
  if topology.num_hosts > 1:
    what += (
      f', or be a whole multiple of {topology.devices_per_host} that divides all '
      f'{topology.num_devices}'
    )
    fix += f' (inside a host), or {any_of(across)} (across hosts, over the network)'
  return Problem(what + '.', fix + '.', parameters)


def product_problem(slots: Slots, sizes: Mapping[str, int]) -> Problem:
  """Returns the problem that `sizes`, none of them -1, do not multiply to `slots.number`."""
  product = math.prod(sizes.values())
  nearest = nearest_sizes(slots, sizes, exact=True)
  gives = f' (each gives {slots.number})' if len(nearest) > 1 else ''
  fix = f'Set {_changes_words(slots, nearest)}{slots.where}{gives}'
  if slots.multiple_of and (product % slots.multiple_of == 0 or product <= slots.multiple_of):
    fix += f', or start {slots.more_words.format(product)}'
  return Problem(
    f'{slots.words} cannot form {product_words(sizes)}. The sizes must multiply to {slots.number}.',
    fix + '.',
    slots.parameters,
  )


def fill_problem(slots: Slots, sizes: Mapping[str, int], open_axis: str) -> Problem:
  """Returns the problem that `sizes` do not leave a whole number for `open_axis`."""
  fixed = {axis: size for axis, size in sizes.items() if axis != open_axis}
  product = math.prod(fixed.values())
  fix = f'Set {_changes_words(slots, nearest_sizes(slots, fixed, exact=False))}{slots.where}'
  if slots.multiple_of:
    unit = math.lcm(product, slots.multiple_of)
    fix += f', or start {slots.more_words.format((slots.number // unit + 1) * unit)}'
  return Problem(
    f'{slots.words} cannot form {product_words(fixed)} with '
    f'{slots.names[open_axis]} taking the rest: {slots.number} is not a multiple of {product}.',
    fix + '.',
    slots.parameters,
  )


def nearest_sizes(slots: Slots, sizes: Mapping[str, int], *, exact: bool) -> list[dict[str, int]]:
  """Returns the smallest changes of `sizes` that fit, each as {axis: new size}.

  Args:
    slots: what the sizes must fill.
    sizes: the sizes that do not fit.
    exact: whether the product must be `slots.number`; otherwise it must divide it.
  """
  free = [axis for axis, size in sizes.items() if size > 1 or axis == 'data']
  for fewest in range(1, len(free) + 1):
    changes = [
      change
      for axes in itertools.combinations(free, fewest)
      for change in _changes(slots, sizes, axes, exact=exact)
    ]
    if changes:
      break

  def distance(change):
    return sum(abs(math.log(value / sizes[axis])) for axis, value in change.items())

  changes.sort(key=lambda change: (distance(change), list(change), list(change.values())))
  if fewest == 1:
    # For every axis the nearest value, in the order of the axes.
    best = {}
    for change in changes:
      best.setdefault(next(iter(change)), change)
    return [best[axis] for axis in free if axis in best]
  return changes[:2]


def _changes(
  slots: Slots, sizes: Mapping[str, int], axes: tuple[str, ...], *, exact: bool
) -> Iterator[dict[str, int]]:
  """Yields every change of all `axes`, and only of them, that fits."""
  kept = math.prod(size for axis, size in sizes.items() if axis not in axes)
  if slots.number % kept:
    return
  for values in _products_within(slots.number // kept, len(axes)):
    change = dict(zip(axes, values))
    if (not exact or math.prod(values) * kept == slots.number) and all(
      value != sizes[axis] and value in slots.legal.get(axis, (value,))
      for axis, value in change.items()
    ):
      yield change


def divisors(number: int) -> list[int]:
  """Returns all divisors of `number`, ascending."""
  small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
  return small + [number // d for d in reversed(small) if d * d != number]


def nearest_multiples(size: int, unit: int) -> list[int]:
  """Returns the nearest multiples of `unit` below and above `size`, without 0."""
  return [n for n in (size // unit * unit, (size // unit + 1) * unit) if n > 0]


def any_of(values: Iterable[Any]) -> str:
  """Returns '1, 2, 4 or 8'."""
  words = [str(value) for value in values]
  return words[0] if len(words) == 1 else f'{", ".join(words[:-1])} or {words[-1]}'


def sizes_words(sizes: Mapping[str, int]) -> str:
  """Returns 'data=2 x fsdp=4', without axes of size 1 unless all are."""
  return ' x '.join(f'{axis}={size}' for axis, size in sizes.items() if size != 1) or (
    'data=1' if 'data' in sizes else 'model=1'
  )


def product_words(sizes: Mapping[str, int]) -> str:
  """Returns 'data=2 x fsdp=4 (= 8)', or 'data=2'."""
  words = sizes_words(sizes)
  return f'{words} (= {math.prod(sizes.values())})' if ' x ' in words else words


def _products_within(number: int, count: int) -> Iterator[tuple[int, ...]]:
  """Yields all tuples of `count` sizes whose product divides `number`."""
  if count == 0:
    yield ()
    return
  for first in divisors(number):
    for rest in _products_within(number // first, count - 1):
      yield (first, *rest)


def _changes_words(slots: Slots, changes: list[dict[str, int]]) -> str:
  return any_of(
    ' with '.join(f'{slots.names[axis]} = {value}' for axis, value in change.items())
    for change in changes
  )
