"""The size of each mesh axis, and its size inside a host.

`resolve_mesh_sizes` is a pure function of the topology and the user's settings, so a laptop can
compute the mesh of 24 hosts. `Problems` collects wrong sizes, with their rule and their settings.
`mesh` arranges devices by these sizes.

As in T5X, *ici* is the part of an axis inside a host (NVLink) and *dcn* the part across hosts
(network): the size of an axis is ici * dcn.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.errors import MeshError, Problem, did_you_mean
from t5x_gpu.runtime.topology import Topology


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
  """Returns the problem if `sizes` do not fill the slots; None if they do.

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
  """Returns 'data=2 x fsdp=4'; axes of size 1 are left out, unless all are."""
  return ' x '.join(f'{axis}={size}' for axis, size in sizes.items() if size != 1) or (
    'data=1' if 'data' in sizes else 'model=1'
  )


def product_words(sizes: Mapping[str, int]) -> str:
  """Returns 'data=2 x fsdp=4 (= 8)', or 'data=2'."""
  words = sizes_words(sizes)
  return f'{words} (= {math.prod(sizes.values())})' if ' x ' in words else words


# Outermost first: neighbors on the last axis talk most and get the fastest link.
MESH_AXES = ('stage', 'data', 'fsdp', 'context', 'expert', 'model')
OUTER_AXES = MESH_AXES[:-1]
_DEFAULT_SIZES = {**dict.fromkeys(OUTER_AXES, 1), 'data': -1}

# Array axis -> the parameter that sets its size, for errors.
SET_BY = {
  'batch': 'BATCH_SIZE',
  'heads': 'TransformerConfig.num_heads',
  'mlp': 'TransformerConfig.mlp_dim',
  'embed': 'TransformerConfig.embed_dim',
  'vocab': 'TransformerConfig.vocab_size',
  'layers': 'TransformerConfig.num_layers',
  'encoder_layers': 'EncoderDecoderModel.num_encoder_layers',
}
# Mesh axis -> the field of Partitioner that sets its size.
SIZE_PARAMETERS = {axis: 'num_partitions' if axis == 'model' else axis for axis in MESH_AXES}

Sizes = dict[str, int]


@dataclasses.dataclass(frozen=True)
class MeshSizes:
  """Sizes of a mesh that fits its topology.

  Attributes:
    total: size of every axis in `MESH_AXES`, in that order; the product is the number of devices.
    ici: the part inside a host; the product is the number of devices of a host.
    dcn: the part across hosts; the product is the number of hosts.
    notes: reasons for the sizes, for the log.
    warnings: choices that are legal but probably slow.

  Comparison ignores notes and warnings.
  """

  total: Mapping[str, int]
  ici: Mapping[str, int]
  dcn: Mapping[str, int]
  notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)
  warnings: tuple[str, ...] = dataclasses.field(default=(), compare=False)

  @property
  def num_devices(self) -> int:
    return math.prod(self.total.values())

  def crosses_hosts(self, axis: str) -> bool:
    return self.dcn[axis] > 1


def resolve_mesh_sizes(
  topology: Topology,
  *,
  num_partitions: Optional[int] = None,
  model_parallel_submesh: Optional[Sequence[int]] = None,
  ici_mesh_shape: Optional[Mapping[str, int]] = None,
  dcn_mesh_shape: Optional[Mapping[str, int]] = None,
  **sizes: int,
) -> MeshSizes:
  """Returns the mesh sizes for `topology`.

  Args:
    topology: hosts and devices per host.
    num_partitions: size of `model` (tensor parallelism); 1 by default.
    model_parallel_submesh: T5X's other way to set it: 4 numbers, or 2 (hosts, devices of a host);
      their product is the size of `model`. Not together with `num_partitions`.
    ici_mesh_shape: axis -> size inside a host, such as {'fsdp': 8}; other axes are 1, one may be
      -1. Not together with the sizes above. {'data': -1} if only `dcn_mesh_shape` is given.
    dcn_mesh_shape: the same across hosts.
    **sizes: sizes of `OUTER_AXES`. One may be -1, for all remaining devices. By default `data` is
      -1 and the others are 1.
  Raises:
    MeshError: the sizes do not fit the topology; the message has all problems and their fixes.
  Source: T5X `partitioning.get_gpu_mesh` for the names and for NVLink first.
  """
  problems = Problems()
  model = _model_size(num_partitions, model_parallel_submesh, problems)
  flat = {axis: sizes.pop(axis, _DEFAULT_SIZES[axis]) for axis in OUTER_AXES}
  assert not sizes, f'not axes: {sizes}'
  if ici_mesh_shape is None and dcn_mesh_shape is None:
    given = {**flat, 'model': 1 if model is None else model}
    filled = _flat_sizes(topology, given, model_parallel_submesh, problems)
    raise_all(problems)
    return _split_over_hosts(topology, filled, model_parallel_submesh)
  set_too = [axis for axis, size in flat.items() if size != _DEFAULT_SIZES[axis]]
  if set_too:
    problems.add(
      f'The sizes are given twice: by ici_mesh_shape/dcn_mesh_shape and by '
      f'{", ".join(f"{axis}={flat[axis]}" for axis in set_too)}.',
      f'Remove {", ".join(f"Partitioner.{axis}" for axis in set_too)}, or write the sizes into '
      'ici_mesh_shape (inside a host) and dcn_mesh_shape (across hosts).',
      *set_too,
      'ici_mesh_shape',
      'dcn_mesh_shape',
    )
  return _hybrid_sizes(topology, model, ici_mesh_shape, dcn_mesh_shape, problems)


def _model_size(num_partitions, submesh, problems: Problems) -> Optional[int]:
  """Returns the size of `model`; None if neither parameter sets it."""
  if submesh is not None:
    numbers = tuple(submesh) if isinstance(submesh, Sequence) else (submesh,)
    if len(numbers) not in (2, 4) or not all(is_size(n) and n != -1 for n in numbers):
      problems.add(
        f'model_parallel_submesh = {submesh!r} is not four sizes as in T5X, (1, 2, 1, 1), nor '
        'two, (hosts, devices of a host).',
        'Set Partitioner.num_partitions instead: it is the product of the four.',
        'model_parallel_submesh',
      )
      return None
    if num_partitions is not None:
      problems.add(
        f'num_partitions = {num_partitions} and model_parallel_submesh = {numbers} both set the '
        'size of the model axis.',
        f'Keep one of them: Partitioner.num_partitions = {math.prod(numbers)} means the same as '
        'that submesh.',
        'num_partitions',
        'model_parallel_submesh',
      )
    return math.prod(numbers)
  if num_partitions is not None and (not is_size(num_partitions) or num_partitions == -1):
    problems.add(
      f'num_partitions = {num_partitions!r} must be a number of at least 1.',
      'Set Partitioner.num_partitions = 1 for no tensor parallelism. Only the other sizes can '
      'be -1 (all remaining devices).',
      'num_partitions',
    )
    return None
  return num_partitions


def _flat_sizes(topology: Topology, given: Mapping[str, int], submesh, problems: Problems) -> Sizes:
  """Returns the sizes with -1 filled in, in the order of `MESH_AXES`."""
  sizes = {axis: given[axis] for axis in MESH_AXES}
  if submesh is None:
    bad = partitions_problem(topology, sizes['model'])
  else:
    bad = partitions_problem(
      topology,
      sizes['model'],
      given_as=f' (the product of model_parallel_submesh = {submesh})',
      parameters=('Partitioner.model_parallel_submesh',),
    )
  if bad:
    problems.append(bad)
  if not check_sizes(sizes, '', problems, SIZE_PARAMETERS):
    return sizes
  names = dict(SIZE_PARAMETERS)
  if submesh is not None:
    names['model'] = 'model_parallel_submesh'
  slots = Slots(topology.num_devices, topology.count(topology.num_devices), names, parameters=names)
  _fill(sizes, problems, slots, open_axis='model' if bad else None)
  return sizes


def _fill(
  sizes: Sizes, problems: Problems, slots: Slots, *, open_axis: Optional[str] = None
) -> None:
  """Sets the axis that is -1 to the remaining slots, or adds a problem.

  Args:
    sizes: changed in place; each is legal by itself, at most one is -1.
    problems: list to add to.
    slots: the slots to fill.
    open_axis: treat this axis as not set, because its size is already refused.
  """
  fixed = {axis: size for axis, size in sizes.items() if size != -1 and axis != open_axis}
  product = math.prod(fixed.values())
  left_over = next((axis for axis, size in sizes.items() if size == -1), open_axis)
  fits = slots.number % product == 0 if left_over else product == slots.number
  if not fits:
    problems.append(slots_problem(slots, fixed, open_axis=left_over))
  elif left_over:
    sizes[left_over] = slots.number // product


def _split_over_hosts(topology: Topology, sizes: Sizes, submesh) -> MeshSizes:
  """Returns `sizes` with each axis split into a part inside a host and a part across hosts.

  Innermost axes take a host's devices first. All devices of a host are used, because the sizes
  multiply to hosts * devices per host.
  """
  ici, left = {}, topology.devices_per_host
  for axis in reversed(MESH_AXES):
    ici[axis] = math.gcd(sizes[axis], left)
    left //= ici[axis]
  assert left == 1, (topology, sizes)
  ici = {axis: ici[axis] for axis in MESH_AXES}
  dcn = {axis: sizes[axis] // ici[axis] for axis in MESH_AXES}
  notes = []
  if submesh is not None:
    notes.append(
      f'model = {sizes["model"]}, the product of model_parallel_submesh {submesh}; '
      'only the product matters, not its factors'
    )
  if topology.num_hosts > 1:
    notes.append(
      f'the {topology.count(topology.devices_per_host)} of a host go to the innermost '
      'axes first: '
      + ', '.join(
        f'{axis} {_split_words(ici[axis], dcn[axis])}'
        for axis in reversed(MESH_AXES)
        if sizes[axis] > 1
      )
    )
  return MeshSizes(sizes, ici, dcn, tuple(notes), _warnings(topology, ici, dcn))


def _hybrid_sizes(
  topology: Topology, model: Optional[int], ici_shape, dcn_shape, problems: Problems
) -> MeshSizes:
  """Returns sizes from `ici_mesh_shape` and `dcn_mesh_shape`."""
  notes, parts = [], []
  for parameter, shape, count, what in (
    ('ici_mesh_shape', ici_shape, topology.devices_per_host, 'the devices of a host'),
    ('dcn_mesh_shape', dcn_shape, topology.num_hosts, 'the hosts'),
  ):
    if shape is None:
      shape = {'data': -1}
      notes.append(f'{parameter} is not set: data takes {what} ({count})')
    parts.append(_part_sizes(topology, parameter, shape, count, problems))
  raise_all(problems)
  ici, dcn = parts
  sizes = {axis: ici[axis] * dcn[axis] for axis in MESH_AXES}
  if model is not None and model != sizes['model']:
    problems.add(
      f'The model axis has {model} partitions by num_partitions (or model_parallel_submesh), '
      f'but {ici["model"]} inside a host x {dcn["model"]} across hosts = {sizes["model"]} by '
      'ici_mesh_shape and dcn_mesh_shape.',
      f'Set Partitioner.num_partitions = None, or {sizes["model"]}.',
      'num_partitions',
      'ici_mesh_shape',
      'dcn_mesh_shape',
    )
  bad = partitions_problem(
    topology,
    sizes['model'],
    given_as=' (by ici_mesh_shape and dcn_mesh_shape)',
    parameters=('Partitioner.ici_mesh_shape', 'Partitioner.dcn_mesh_shape'),
  )
  if bad:
    problems.append(bad)
  raise_all(problems)
  return MeshSizes(sizes, ici, dcn, tuple(notes), _warnings(topology, ici, dcn))


def _part_sizes(topology: Topology, parameter: str, shape, count: int, problems: Problems) -> Sizes:
  """Returns `shape` with all axes and the -1 filled in; the sizes multiply to `count`."""
  ones = dict.fromkeys(MESH_AXES, 1)
  inside = parameter == 'ici_mesh_shape'
  if not isinstance(shape, Mapping):
    problems.add(
      f'{parameter} = {shape!r} is not a mapping of axis to size.',
      f"Write Partitioner.{parameter} = {{'data': -1, 'model': {count if inside else 1}}}; T5X's "
      'tuple (data, model) has no names.',
      parameter,
    )
    return ones
  unknown = [axis for axis in shape if axis not in MESH_AXES]
  if unknown:
    problems.add(
      f'{parameter} has the unknown axis {", ".join(map(repr, unknown))}. The axes are '
      f'{", ".join(MESH_AXES)}.{did_you_mean(str(unknown[0]), MESH_AXES)}',
      f'Correct the name in Partitioner.{parameter}.',
      parameter,
    )
    return ones
  sizes = {**ones, **shape}
  parameters = dict.fromkeys(MESH_AXES, parameter)
  if not check_sizes(sizes, f'{parameter}: ', problems, parameters):
    return ones
  devices_words = f'The {topology.count(count)} of a host'
  _fill(
    sizes,
    problems,
    Slots(
      count,
      devices_words if inside else '1 host' if count == 1 else f'{count} hosts',
      names={axis: axis for axis in MESH_AXES},
      parameters=parameters,
      where=f' in {parameter}',
    ),
  )
  return sizes


def _warnings(topology: Topology, ici: Sizes, dcn: Sizes) -> tuple[str, ...]:
  if dcn['model'] == 1:
    return ()
  total = ici['model'] * dcn['model']
  return (
    f'num_partitions = {total} spans {dcn["model"]} hosts: each layer then waits for sums '
    f'over the network instead of NVLink. Up to {topology.devices_per_host} stays inside a '
    'host; fsdp across hosts is usually faster.',
  )


def _split_words(ici: int, dcn: int) -> str:
  """Returns '4 inside a host', '2 across hosts' or '2 inside a host x 3 across hosts'."""
  words = [f'{ici} inside a host'] * (ici > 1) + [f'{dcn} across hosts'] * (dcn > 1)
  return ' x '.join(words) or '1'
