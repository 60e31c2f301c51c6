"""The devices that a collective connects, as written in HLO text, and the mesh axes they span."""

import math
import re
from collections.abc import Mapping
from typing import Optional

import numpy as np


def replica_groups(attributes: str, num_devices: int) -> np.ndarray:
  """Returns the groups [groups, devices per group] of a collective; pairs for a permutation.

  Args:
    attributes: the text after the operands. XLA prints groups in four ways: {{0,1},{2,3}};
      [2,2]<=[2,2]T(1,0); mesh['a'=2,'b'=2] {'b'}; and this last form with
      device_ids=([2,2]T(1,0)).
    num_devices: number of devices in the program; `replica_groups={}` means all of them.
  """
  mesh = re.search(
    r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\) )?\s*\{([^}]*)\}', attributes
  )
  if mesh:
    return _mesh_groups(*mesh.groups())
  iota = re.search(r'replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)', attributes)
  if iota:
    return _iota(iota.group(2)).reshape(_numbers(iota.group(1)))
  listed = re.search(r'(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}', attributes)
  if listed and listed.group(1):
    return np.array([_numbers(group) for group in re.findall(r'\{([\d,]+)\}', listed.group(1))])
  return np.arange(num_devices)[None]


def _numbers(text: str) -> list[int]:
  return [int(n) for n in re.findall(r'\d+', text)]


def _iota(text: str) -> np.ndarray:
  """Returns the flat array for '[4,2]T(1,0)': 0 to 7 in this shape, transposed."""
  shape, _, order = text.partition('T')
  numbers = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
  return (numbers.transpose(_numbers(order)) if order else numbers).reshape(-1)


def _mesh_groups(axes: str, device_ids: Optional[str], used: str) -> np.ndarray:
  """Returns the groups that vary over the mesh axes `used`, "'a','b':(2)2" (a part of b)."""
  sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
  number = math.prod(sizes.values())
  if not device_ids:
    devices = np.arange(number)
  elif '[' in device_ids:
    devices = _iota(device_ids)
  else:
    devices = np.array(_numbers(device_ids))
  shape, varying = [], []
  parts = {
    name: (int(before or 1), int(size or sizes[name]))
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", used)
  }
  for name, size in sizes.items():
    before, own = parts.get(name, (size, 1))
    shape += [before, own, size // before // own]
    varying += [False, name in parts, False]
  order = sorted(range(len(shape)), key=lambda i: varying[i])
  group = math.prod(size for size, varies in zip(shape, varying) if varies)
  return devices.reshape(shape).transpose(order).reshape(-1, group)


def varying_axes(groups: np.ndarray, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the mesh axes along which the devices of a group differ.

  Devices are numbered as in the flattened mesh, whose last axis varies fastest.
  """
  places = np.unravel_index(groups, tuple(mesh_shape.values()))
  return tuple(name for name, place in zip(mesh_shape, places) if (place != place[:, :1]).any())
