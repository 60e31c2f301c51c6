"""The device mesh: devices arranged so that the axes that communicate most stay inside a host.

Device number h * devices_per_host + d is device d of host h. Both h and d are written in mixed
radix, h with the sizes across hosts and d with the sizes inside a host. The index on a mesh axis
combines both digits, the digit across hosts first. So each host holds one block of the mesh.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import jax
import numpy as np

from t5x_gpu.errors import Problem, did_you_mean
from t5x_gpu.partitioning.mesh.mesh_problems import any_of, legal_partitions, product_words
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

  Host blocks equal the blocks of `jax.experimental.mesh_utils.create_hybrid_device_mesh`, but the
  devices do not need attributes.
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
  """How a problem describes one model size.

  Attributes:
    set_by: the gin parameter or macro that sets it.
    words: its name in the problem; the axis name by default.
    each_of: number of equal parts, computed in turn, that are each split.
    multiple_of: another number that the size must be a multiple of.
    rule: what to do with `set_by`, up to the number.
    is_width: another size would make another model, so the fix is another mesh.
  """

  set_by: str
  words: str = ''
  each_of: int = 1
  multiple_of: int = 1
  rule: str = 'to a multiple of'
  is_width: bool = False


def check_model_sizes(
  sizes: MeshSizes,
  logical_sizes: Mapping[str, int],
  rules: Mapping[str, tuple[str, ...]],
  *,
  hints: Optional[Mapping[str, SizeHint]] = None,
) -> list[Problem]:
  """Returns a problem for every model size that its mesh axes do not divide.

  Args:
    sizes: sizes of the mesh.
    logical_sizes: array axis -> size, {'heads': 12, 'batch': 128}.
    rules: array axis -> mesh axes that split it, () for none.
    hints: array axis -> how to describe it; its name by default.
  """
  problems = []
  for name, size in logical_sizes.items():
    if name not in rules:
      missing = f'{name} = {size} has no sharding rule.{did_you_mean(name, rules)}'
      problems.append(Problem(missing))
      continue
    unknown = [axis for axis in rules[name] if axis not in MESH_AXES]
    if unknown:
      problems.append(
        Problem(
          f'{name} is split over {any_of(unknown)}, which no mesh has. The axes are '
          f'{", ".join(MESH_AXES)}.{did_you_mean(unknown[0], MESH_AXES)}'
        )
      )
      continue
    hint = (hints or {}).get(name) or SizeHint(name)
    ways = {axis: sizes.total[axis] for axis in rules[name] if sizes.total[axis] > 1}
    if size % (math.prod(ways.values()) * hint.each_of):
      each = f' in each of {hint.each_of} microbatches' if hint.each_of > 1 else ''
      problems.append(
        Problem(
          f'{hint.words or name} = {size} does not divide over {product_words(ways)}{each}.',
          _size_fix(sizes, hint, size, ways),
          (hint.set_by, *(f'Partitioner.{SIZE_PARAMETERS[axis]}' for axis in ways)),
        )
      )
  return problems


def _size_fix(sizes: MeshSizes, hint: SizeHint, size: int, ways: Mapping[str, int]) -> str:
  """Returns the rule for a size that does not divide over the mesh axes `ways`."""
  if hint.is_width and list(ways) == ['model']:
    hosts = Topology(math.prod(sizes.dcn.values()), math.prod(sizes.ici.values()))
    legal = [n for n in sum(legal_partitions(hosts), ()) if size % n == 0]
    return f'Set Partitioner.num_partitions = {any_of(legal)}.'
  unit = math.lcm(math.prod(ways.values()) * hint.each_of, hint.multiple_of)
  return f'Set {hint.set_by} {hint.rule} {unit}.'
