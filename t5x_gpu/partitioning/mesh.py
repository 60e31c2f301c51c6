"""The device mesh: devices arranged so that the axes that communicate most stay inside a host.

Device number h * devices_per_host + d is device d of host h. Both h and d are written in mixed
radix, h with the sizes across hosts and d with the sizes inside a host. The index on a mesh axis
combines both digits, the digit across hosts first. So each host holds one block of the mesh.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np

from t5x_gpu.partitioning.mesh_sizes import MESH_AXES, MeshSizes
from t5x_gpu.runtime.topology import Device, Topology

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


def build_mesh(
  sizes: MeshSizes, topology: Topology, devices: Sequence[Device]
) -> jax.sharding.Mesh:
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


def device_array(sizes: MeshSizes, topology: Topology, devices: Sequence[Device]) -> np.ndarray:
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
  """Returns the table that a run prints: axis, size, the dimensions it splits, link.

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
