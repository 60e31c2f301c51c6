"""The device mesh: devices arranged by the sizes of `mesh_sizes`, with chatty axes inside a host.

Device number h * devices_per_host + d is device d of host h. Both h and d are written in mixed
radix, h with the sizes across hosts and d with the sizes inside a host. The index on an axis of the
mesh combines its two digits, the one across hosts first. So each host holds one block of the mesh.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import jax
import numpy as np

from t5x_gpu.errors import did_you_mean
from t5x_gpu.partitioning.mesh.mesh_problems import (
  any_of,
  divisors,
  legal_partitions,
  nearest_multiples,
  product_words,
)
from t5x_gpu.partitioning.mesh.mesh_sizes import (
  MESH_AXES,
  SIZE_PARAMETERS,
  MeshSizes,
  resolve_mesh_sizes,
)
from t5x_gpu.runtime.cluster.topology import Topology

__all__ = [
  'MESH_AXES',
  'MeshSizes',
  'SizeHint',
  'build_mesh',
  'check_model_sizes',
  'device_array',
  'mesh_table',
  'resolve_mesh_sizes',
]

# Mesh axis -> what it splits, for the table.
SPLITS = {
  'stage': 'layers (pipeline)',
  'data': 'batch',
  'context': 'length of the sequence',
  'expert': 'experts',
  'model': 'heads, mlp, vocab',
}
# By zero_stage.
FSDP_SPLITS = {
  1: 'batch and optimizer state',
  2: 'batch, gradients, optimizer state',
  3: 'batch and parameters',
}


def build_mesh(sizes: MeshSizes, topology: Topology, devices: Sequence[Any]) -> jax.sharding.Mesh:
  """Returns the mesh with the axes `MESH_AXES`, all of them Auto.

  Args:
    sizes: from `resolve_mesh_sizes` of the same topology.
    topology: hosts and devices per host.
    devices: host-major, as `topology.discover` returns them.
  """
  # jax.make_mesh makes Explicit axes, but the compiler must propagate the partitioner's rules.
  return jax.sharding.Mesh(
    device_array(sizes, topology, devices),
    MESH_AXES,
    axis_types=(jax.sharding.AxisType.Auto,) * len(MESH_AXES),
  )


def device_array(sizes: MeshSizes, topology: Topology, devices: Sequence[Any]) -> np.ndarray:
  """Returns `devices`, host-major, as an array [stage, data, fsdp, context, expert, model].

  The host blocks are those of `jax.experimental.mesh_utils.create_hybrid_device_mesh`, but the
  devices do not need any attributes.
  """
  ici = [sizes.ici[axis] for axis in MESH_AXES]
  dcn = [sizes.dcn[axis] for axis in MESH_AXES]
  assert math.prod(ici) == topology.devices_per_host, (ici, topology)
  assert math.prod(dcn) == topology.num_hosts, (dcn, topology)
  assert len(devices) == topology.num_devices, (len(devices), topology)
  flat = np.empty(len(devices), dtype=object)
  flat[:] = devices
  blocks = flat.reshape(dcn + ici)
  n = len(MESH_AXES)
  digits_together = [place for axis in range(n) for place in (axis, n + axis)]
  return blocks.transpose(digits_together).reshape([sizes.total[axis] for axis in MESH_AXES])


def mesh_table(sizes: MeshSizes, topology: Topology, *, zero_stage: int = 3) -> str:
  """Returns the table that a run prints: axis, size, what it splits, and the link it uses.

  Axes of size 1 are left out, except data and model. Notes and warnings follow.
  """
  words = {**SPLITS, 'fsdp': FSDP_SPLITS[zero_stage]}
  rows = [('axis', 'size', 'splits', 'link')]
  for axis in MESH_AXES:
    if sizes.total[axis] > 1 or axis in ('data', 'model'):
      rows.append((axis, str(sizes.total[axis]), words[axis], _link_words(sizes, axis)))
  widths = [max(len(row[column]) for row in rows) for column in range(4)]
  lines = [f'mesh: {topology} = {topology.count(topology.num_devices)} ({topology.reason})']
  for axis, size, splits, link in rows:
    lines.append(
      f'  {axis:<{widths[0]}}  {size:>{widths[1]}}  {splits:<{widths[2]}}  {link}'.rstrip()
    )
  lines += [f'  note: {note}' for note in sizes.notes]
  lines += [f'  WARNING: {warning}' for warning in sizes.warnings]
  return '\n'.join(lines)


def _link_words(sizes: MeshSizes, axis: str) -> str:
  if sizes.total[axis] == 1:
    return '-'
  if not sizes.crosses_hosts(axis):
    return 'inside a host'
  if sizes.ici[axis] == 1:
    return 'crosses the network'
  return f'crosses the network ({sizes.dcn[axis]} hosts x {sizes.ici[axis]} inside each)'


@dataclasses.dataclass(frozen=True)
class SizeHint:
  """How a message describes one model size.

  Attributes:
    set_by: the gin parameter or macro to change.
    words: its name in the message; the axis name by default.
    each_of: number of equal parts, computed in turn, that are each split.
    multiple_of: another number that suggested sizes must be a multiple of.
    or_else: another fix, a parameter with its value.
    is_width: another size would make another model.
  """

  set_by: str
  words: str = ''
  each_of: int = 1
  multiple_of: int = 1
  or_else: str = ''
  is_width: bool = False


def check_model_sizes(
  sizes: MeshSizes,
  logical_sizes: Mapping[str, int],
  rules: Mapping[str, tuple[str, ...]],
  *,
  hints: Optional[Mapping[str, SizeHint]] = None,
  legal_sizes: Optional[Mapping[str, Sequence[int]]] = None,
  with_data: Optional[Mapping[str, Sequence[int]]] = None,
) -> list[str]:
  """Returns one sentence with its fix for every model size that its mesh axes do not divide.

  Args:
    sizes: of the mesh.
    logical_sizes: array axis -> size, {'heads': 12, 'batch': 128}.
    rules: array axis -> mesh axes that split it, () for none.
    hints: array axis -> how to describe it; its name by default.
    legal_sizes: mesh axis -> sizes to suggest; None for all that divide the devices.
    with_data: mesh axis -> sizes that fit if `data` takes the remaining devices; None to suggest
      other sizes of the model, too.
  """
  problems = []
  for name, size in logical_sizes.items():
    if name not in rules:
      problems.append(f'{name} = {size} has no sharding rule.{did_you_mean(name, rules)}')
      continue
    unknown = [axis for axis in rules[name] if axis not in MESH_AXES]
    if unknown:
      problems.append(
        f'{name} is split over {any_of(unknown)}, which no mesh has. The axes are '
        f'{", ".join(MESH_AXES)}.{did_you_mean(unknown[0], MESH_AXES)}'
      )
      continue
    hint = (hints or {}).get(name) or SizeHint(name)
    ways = {axis: sizes.total[axis] for axis in rules[name]}
    if size % (math.prod(ways.values()) * hint.each_of):
      each = f' in each of {hint.each_of} microbatches' if hint.each_of > 1 else ''
      problems.append(
        f'{hint.words or name} = {size} does not divide over {product_words(ways)}'
        f'{each}. {_size_fix(sizes, hint, size, ways, legal_sizes, with_data)}'
      )
  return problems


def _size_fix(
  sizes: MeshSizes,
  hint: SizeHint,
  size: int,
  ways: Mapping[str, int],
  legal_sizes: Optional[Mapping[str, Sequence[int]]],
  with_data: Optional[Mapping[str, Sequence[int]]],
) -> str:
  """Returns the nearest sizes of the model, and of the mesh if changing one axis is enough."""
  unit = math.lcm(math.prod(ways.values()) * hint.each_of, hint.multiple_of)
  fixes = [f'{hint.set_by} = {any_of(nearest_multiples(size, unit))}']
  used = [axis for axis, way in ways.items() if way > 1]
  if len(used) == 1:
    # Another axis must take the devices that this one gives up, so its size divides all devices.
    legal = divisors(sizes.num_devices)
    if used == ['model']:
      inside, across = legal_partitions(
        Topology(math.prod(sizes.dcn.values()), math.prod(sizes.ici.values()))
      )
      legal = inside + across
    fitting = [
      value
      for value in (legal if legal_sizes is None else legal_sizes[used[0]])
      if size % (value * hint.each_of) == 0
    ]
    also = ''
    instead = hint.is_width and with_data is not None
    if not fitting and instead:
      fitting = [value for value in with_data[used[0]] if size % (value * hint.each_of) == 0]
      also = ' and Partitioner.data = -1'
    if fitting:
      fixes.append(f'Partitioner.{SIZE_PARAMETERS[used[0]]} = {any_of(fitting)}{also}')
      if instead:
        del fixes[0]
  if hint.or_else:
    fixes.append(hint.or_else)
  return f'Set {", or ".join(fixes)}.'
