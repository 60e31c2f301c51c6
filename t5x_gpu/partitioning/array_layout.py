"""The layout of every array of a training state, for tables, pictures and the lint."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Optional, Union

import jax

from t5x_gpu.partitioning.trees import ParamNames, Tree, by_name
from t5x_gpu.terminal.console import mib, table


@dataclasses.dataclass(frozen=True)
class ArrayLayout:
  """One parameter, or one array of the optimizer state.

  Attributes:
    name: path in its tree, 'layers/mlp/wo/kernel'.
    shape: shape of the whole array.
    names: axis name (or None) per dimension.
    split: per dimension, the mesh axes of size > 1 that split it.
    parts: number of parts per dimension.
    item_bytes: bytes of one element.
    parameter: for optimizer state, the parameter that it belongs to, or None.
    padding: (true size, zeros at the end) of the padded dimension; None without padding.
  """

  name: str
  shape: tuple[int, ...]
  names: tuple[Optional[str], ...]
  split: tuple[tuple[str, ...], ...]
  parts: tuple[int, ...]
  item_bytes: int
  parameter: Optional[str] = None
  padding: Optional[tuple[int, int]] = None

  @property
  def num_bytes(self) -> int:
    """Bytes of the whole array, with padding."""
    return math.prod(self.shape) * self.item_bytes

  @property
  def true_bytes(self) -> int:
    """Bytes of the whole array, without padding."""
    size, padded = self.padding or (1, 1)
    return self.num_bytes // padded * size

  @property
  def bytes_per_device(self) -> int:
    return self.num_bytes // math.prod(self.parts)

  @property
  def mesh_axes(self) -> tuple[str, ...]:
    """The mesh axes that split the array, by dimension."""
    return sum(self.split, ())

  @property
  def is_whole(self) -> bool:
    """Whether every device holds the whole array."""
    return not self.mesh_axes

  @property
  def split_words(self) -> str:
    """Returns '- fsdp model', one word per dimension; 'whole' if it is not split."""
    if self.is_whole:
      return 'whole'
    words = ' '.join('+'.join(axes) or '-' for axes in self.split)
    return words if self.padding is None else f'{words} ({self.padding[0]} padded)'


def array_layouts(
  tree: Tree, names: ParamNames, *, parameters: Sequence[str] = ()
) -> list[ArrayLayout]:
  """Returns the layout of every array of a tree.

  Args:
    tree: shapes with NamedShardings (`program.abstract_state.params`).
    names: tree of AxisNames with the same structure.
    parameters: names of parameters, to find the owners of optimizer state.
  """
  found = []
  arrays = by_name(tree).items()
  for (name, array), axis_names in zip(arrays, jax.tree.leaves(names), strict=True):
    sizes = array.sharding.mesh.shape
    split = tuple(tuple(a for a in _axes(entry) if sizes[a] > 1) for entry in array.sharding.spec)
    split += ((),) * (len(array.shape) - len(split))
    padding = None
    if axis_names.fsdp is not None:
      stored = array.shape[axis_names.names.index(axis_names.fsdp.name)]
      padding = (axis_names.fsdp.size, stored) if stored != axis_names.fsdp.size else None
    owners = [p for p in parameters if f'/{p}/' in f'/{name}/']
    found.append(
      ArrayLayout(
        name=name,
        shape=tuple(array.shape),
        names=tuple(axis_names.names),
        split=split,
        parts=tuple(math.prod(sizes[a] for a in axes) for axes in split),
        item_bytes=array.dtype.itemsize,
        parameter=max(owners, key=len, default=None),
        padding=padding,
      )
    )
  return found


def _axes(entry: Union[None, str, tuple[str, ...]]) -> tuple[str, ...]:
  if entry is None:
    return ()
  return entry if isinstance(entry, tuple) else (entry,)


def state_layouts(state: Tree, names: ParamNames) -> tuple[list[ArrayLayout], list[ArrayLayout]]:
  """Returns the layouts of (parameters, optimizer state) of a TrainState and its names."""
  parameters = array_layouts(state.params, names.params)
  return parameters, array_layouts(
    state.opt_state, names.opt_state, parameters=[p.name for p in parameters]
  )


def optimizer_bytes(optimizer: Sequence[ArrayLayout]) -> Mapping[Optional[str], int]:
  """Returns parameter -> bytes of its optimizer state on a device; None -> all other bytes."""
  found: collections.Counter = collections.Counter()
  for array in optimizer:
    found[array.parameter] += array.bytes_per_device
  return found


def part_held(
  layout: ArrayLayout, place: Mapping[str, int], mesh_shape: Mapping[str, int]
) -> tuple[int, ...]:
  """Returns, per dimension, the index of the part on the device at `place` (mesh axis -> index)."""
  held = []
  for axes in layout.split:
    index = 0
    for axis in axes:
      index = index * mesh_shape[axis] + place[axis]
    held.append(index)
  return tuple(held)


def parameter_table(parameters: Sequence[ArrayLayout], optimizer: Sequence[ArrayLayout]) -> str:
  """Returns one line per parameter with its optimizer state, and the totals per device.

  A parameter's line names the axes of its state if the state is split over more axes (ZeRO-1 and
  2).
  """
  state = optimizer_bytes(optimizer)
  apart = {
    array.parameter: f' (state over {" and ".join(array.mesh_axes)})'
    for array in split_apart(parameters, optimizer)
  }
  rows = [('parameter', 'shape', 'axes', 'split over', 'MiB/device', 'optimizer MiB/device')]
  for p in parameters:
    rows.append(
      (
        p.name,
        ' x '.join(map(str, p.shape)),
        ' '.join(n or '-' for n in p.names),
        p.split_words + apart.get(p.name, ''),
        mib(p.bytes_per_device),
        mib(state[p.name]),
      )
    )
  if state[None]:
    rows.append(('(no parameter)', '', '', '', '', mib(state[None])))
  totals = sum(p.bytes_per_device for p in parameters), sum(state.values())
  on_one_device = sum(p.true_bytes for p in parameters), sum(a.true_bytes for a in optimizer)
  rows.append(('total', '', '', '', *map(mib, totals)))
  rows.append(('on one device', '', '', '', *map(mib, on_one_device)))
  return table(rows, right=(4, 5))


def split_apart(
  parameters: Sequence[ArrayLayout], optimizer: Sequence[ArrayLayout]
) -> list[ArrayLayout]:
  """Returns the optimizer's arrays that are split over more axes than their parameter."""
  axes = {p.name: set(p.mesh_axes) for p in parameters}
  return [a for a in optimizer if a.parameter in axes and set(a.mesh_axes) - axes[a.parameter]]
