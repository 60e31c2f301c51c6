"""Problems with mesh sizes: the sizes, their rule, and what to set."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Optional

from t5x_gpu.errors import MeshError, Problem
from t5x_gpu.runtime.cluster.topology import Topology


class Problems(list[Problem]):
  """Problems in the order in which checks found them."""

  def add(self, what: str, fix: str, *parameters: str) -> None:
    """Appends a problem with `parameters` of Partitioner."""
    self.append(Problem(what, fix, tuple(f'Partitioner.{name}' for name in parameters)))


@dataclasses.dataclass(frozen=True)
class Slots:
  """The slots that sizes must fill: all devices, the devices of a host, or the hosts.

  Attributes:
    number: number of slots; the sizes must multiply to it.
    words: '16 GPUs', 'The 8 GPUs of a host', '2 hosts'.
    names: axis -> the user's name for its size.
    parameters: axis -> the parameter of Partitioner that sets its size.
    where: ' in ici_mesh_shape', if the names alone are ambiguous.
  """

  number: int
  words: str
  names: Mapping[str, str]
  parameters: Mapping[str, str]
  where: str = ''


def raise_all(problems: Problems) -> None:
  """Raises one MeshError for all `problems`; does nothing if there are none."""
  if problems:
    raise MeshError('The mesh is impossible', problems=problems, docs='mesh.md#sizes')


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
  """Returns every legal `num_partitions`: (inside a host, across whole hosts)."""
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
  parameters: tuple[str, ...] = ('Partitioner.num_partitions',),
) -> Optional[Problem]:
  """Returns the problem with `num_partitions` on `topology`; None if it is legal.

  Tensor parallelism exchanges activations in every layer, so it belongs on the links inside a host.
  A size that neither divides a host nor covers whole hosts would straddle them.

  Args:
    topology: hosts and devices per host.
    num_partitions: size of `model`.
    given_as: how the user set it, if not as num_partitions: ' (model_parallel_submesh = ...)'.
    parameters: gin parameters that set the size.
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


def slots_problem(slots: Slots, sizes: Mapping[str, int], *, open_axis: Optional[str]) -> Problem:
  """Returns the problem that `sizes` do not fill the slots.

  Args:
    slots: the slots to fill.
    sizes: axis -> size; none of them is -1.
    open_axis: the axis that takes the rest, so that the product of `sizes` must divide the number
      of slots; None if the product must be that number.
  """
  named = [axis for axis, size in sizes.items() if size != 1] or ['data']
  names = any_of((slots.names[axis] for axis in named), word='and')
  what = f'{slots.words} cannot form {product_words(sizes)}'
  if open_axis is None:
    what += f'. The sizes must multiply to {slots.number}.'
    fix = (
      f'Set {names} so that the product is {slots.number}{slots.where}; data = -1 takes '
      'what the others leave.'
    )
  else:
    product = math.prod(sizes.values())
    what += (
      f' with {slots.names[open_axis]} taking the rest: {slots.number} is not a multiple of '
      f'{product}.'
    )
    fix = f'Set {names} so that the product divides {slots.number}{slots.where}.'
  parameters = dict.fromkeys(f'Partitioner.{slots.parameters[axis]}' for axis in named)
  return Problem(what, fix, tuple(parameters))


def divisors(number: int) -> list[int]:
  """Returns all divisors of `number`, ascending."""
  small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
  return small + [number // d for d in reversed(small) if d * d != number]


def any_of(values: Iterable[Any], *, word: str = 'or') -> str:
  """Returns '1, 2, 4 or 8'; '' for no values."""
  words = [str(value) for value in values]
  return ', '.join(words[:-1]) + f' {word} ' + words[-1] if len(words) > 1 else ''.join(words)


def sizes_words(sizes: Mapping[str, int]) -> str:
  """Returns 'data=2 x fsdp=4', without axes of size 1 unless all are."""
  return ' x '.join(f'{axis}={size}' for axis, size in sizes.items() if size != 1) or (
    'data=1' if 'data' in sizes else 'model=1'
  )


def product_words(sizes: Mapping[str, int]) -> str:
  """Returns 'data=2 x fsdp=4 (= 8)', or 'data=2'."""
  words = sizes_words(sizes)
  return f'{words} (= {math.prod(sizes.values())})' if ' x ' in words else words
