"""Fully sharded data parallelism (ZeRO): also splits optimizer state, gradients and parameters.

What is split: `batch` of activations over `fsdp`. `zero_stage` adds `embed` (or another dimension,
see `choose_dim`) of
 1. the optimizer state: gradients are reduce-scattered once per step, the updated parameters
    gathered once;
 2. and gradients: each layer's are reduce-scattered as soon as the backward pass has them;
 3. and parameters: each layer's are gathered before use, forward and again backward.
What moves, per device and step, for P bytes of parameters over n devices: (n - 1) / n x 2 P for
stages 1 and 2 (like plain data parallelism), x 3 P for stage 3. The number of microbatches does not
matter: stages 2 and 3 take all of them through a layer together (training/train_step.py). In a
pipeline, stage 3 gathers the parameters of a stage once per step; stored parameters stay split.
When: parameters and optimizer state do not fit on one GPU. Try it before tensor parallelism.
Source: Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (PyTorch FSDP).

The step gathers parameters and reduces their gradients in parameters.py. Here, in order: the rules
and their traffic, the dimension that `fsdp` splits, and its padding.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_gpu.partitioning.axis_rules import AxisNames, AxisRules, FsdpDim, Table
from t5x_gpu.partitioning.trees import ArrayLike, ParamNames, Tree
from t5x_gpu.terminal.console import show

AXIS = 'fsdp'
OTHERS = ('mlp', 'vocab', 'heads', 'kv_heads', 'kv')
# Factor of `fsdp` over which an array that must not be padded is repeated.
COPIES = 'fsdp_copies'
SPLIT = {'embed': ('fsdp',)}


def rules(zero_stage: int = 3) -> AxisRules:
  """Returns the rules of FSDP."""
  return AxisRules(
    parameters=SPLIT if zero_stage == 3 else {},
    optimizer={} if zero_stage == 3 else SPLIT,
    activations={'batch': ('fsdp',)},
  )


def traffic_per_step(
  *,
  layers_size: int,
  other_size: int,
  fsdp: int,
  zero_stage: int = 3,
  dtype_bytes: int = 4,
  in_pipeline: bool = False,
  in_bfloat16: bool = False,
) -> dict[str, float]:
  """Returns collective -> bytes that a device sends over `fsdp` per training step.

  Gradients of parameters that `fsdp` does not split are all-reduced as under data parallelism.

  Args:
    layers_size, other_size: elements of the layers of one device, and of all other parameters,
      before division by `fsdp`. Exclude a table whose rows are looked up in parts
      (layers/embedding.py).
    fsdp: size of the axis.
    zero_stage: see above.
    dtype_bytes: bytes per value when stage 3 gathers, in the compute dtype. The rest is float32.
    in_pipeline: whether parameters are gathered once per step.
    in_bfloat16: whether gradients are sent in bfloat16, in an all-to-all.
  """
  share, size = (fsdp - 1) / fsdp, layers_size + other_size
  gathered = 4 * size
  if zero_stage == 3:
    gathered = dtype_bytes * (size if in_pipeline else size + layers_size)
  if in_bfloat16:
    return {'all-gather': share * gathered, 'all-to-all': share * 2 * size}
  return {'all-gather': share * gathered, 'reduce-scatter': share * 4 * size}


def choose_dim(
  names: AxisNames, shape: Sequence[int], *, rules: AxisRules, mesh_shape: Mapping[str, int]
) -> AxisNames:
  """Returns `names` with the dimension that `fsdp` splits, on any number of devices.

  This is `embed` if its size divides. Otherwise it is the first dimension of `OTHERS` that divides
  and that no other mesh axis splits. If there is none, `embed` is padded with zeros to the next
  multiple. A dimension is never split over both `fsdp` and `model`: a device would gather
  interleaved parts of its share over `model`. Arrays without `embed` (biases of heads) stay whole
  on every device.

  Args:
    names: axis names of an array of parameters or optimizer state.
    shape: the array's true shape.
    rules: rules of the run.
    mesh_shape: mesh axis -> size.
  """
  ways = mesh_shape.get(AXIS, 1)
  first = next((n for n in names.names if AXIS in rules.state.get(n, ())), None)
  if ways == 1 or first is None or names.fsdp is not None:
    return names
  sizes = dict(zip(names.names, shape))

  def is_free(name: str) -> bool:
    tables = (rules.state, rules.activations)
    axes = [axis for table in tables for axis in table.get(name, ()) if axis != AXIS]
    return all(mesh_shape.get(axis, 1) == 1 for axis in axes)

  name = next(
    (n for n in (first, *OTHERS) if n in sizes and sizes[n] % ways == 0 and is_free(n)), first
  )
  return dataclasses.replace(names, fsdp=FsdpDim(name, sizes[name]))


def own_table(names: AxisNames, table: Table) -> Table:
  """Returns `table` for one array, with `fsdp` at the axis that was chosen for it."""
  if names.fsdp is None or not any('fsdp' in table.get(name, ()) for name in names.names):
    return table
  others = {name: tuple(a for a in axes if a != 'fsdp') for name, axes in table.items()}
  return {**others, names.fsdp.name: (*others.get(names.fsdp.name, ()), 'fsdp')}


@dataclasses.dataclass(frozen=True)
class Padding:
  """Zeros at the end of one dimension of an array.

  Only arrays in memory are padded. Optimizers, models and checkpoints see the true shapes, so
  checkpoints do not depend on the number of devices.

  Attributes:
    dim: counted from the last one (-1), because a scan removes the first.
    size: size of the dimension without the zeros.
    zeros: number of zeros.
  """

  dim: int
  size: int
  zeros: int

  def added(self, x: jax.Array) -> jax.Array:
    """Returns `x` with the zeros; `x` itself if it is already padded."""
    at = x.ndim + self.dim
    if x.shape[at] != self.size:
      return x
    return jnp.pad(x, [(0, self.zeros if i == at else 0) for i in range(x.ndim)])

  def removed(self, x: jax.Array) -> jax.Array:
    """Returns `x` without the zeros."""
    return jax.lax.slice_in_dim(x, 0, self.size, axis=x.ndim + self.dim)

  def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the padded shape of an array of `shape`."""
    at = len(shape) + self.dim
    return tuple(n + self.zeros if i == at else n for i, n in enumerate(shape))


def padding_of(
  names: AxisNames, *, table: Table, mesh_shape: Mapping[str, int]
) -> Optional[Padding]:
  """Returns the padding of an array that is split by `table`; None if it needs none.

  Args:
    names: from `choose_dim`.
    table: array axis -> mesh axes.
    mesh_shape: mesh axis -> size.
  """
  if names.fsdp is None or AXIS not in own_table(names, table).get(names.fsdp.name, ()):
    return None
  zeros = -names.fsdp.size % mesh_shape.get(AXIS, 1)
  dim = names.names.index(names.fsdp.name) - len(names.names)
  return Padding(dim, names.fsdp.size, zeros) if zeros else None


def padded(
  x: jax.Array, names: AxisNames, *, table: Table, mesh_shape: Mapping[str, int]
) -> jax.Array:
  """Returns a global array with its padding, split by `table`; to be traced."""
  padding = padding_of(names, table=table, mesh_shape=mesh_shape)
  if padding is None:
    return x
  return jax.lax.with_sharding_constraint(padding.added(x), _spec(names, table))


def unpadded(
  x: jax.Array, names: AxisNames, *, table: Table, mesh_shape: Mapping[str, int]
) -> jax.Array:
  """Returns a global array without its padding, split in the same unequal parts; to be traced.

  XLA pads these parts by itself, so nothing moves.
  """
  padding = padding_of(names, table=table, mesh_shape=mesh_shape)
  if padding is None:
    return x
  return jax.lax.with_sharding_constraint(padding.removed(x), _spec(names, table))


def without_padding(mesh: Mesh, padding: Optional[Padding]) -> Mesh:
  """Returns a mesh over which an array divides without its padding.

  `fsdp` becomes the largest factor that divides, over which the array is split, and `COPIES`, the
  rest, over which it is repeated. The devices keep their order.
  """
  if padding is None:
    return mesh
  ways = math.gcd(padding.size, mesh.shape[AXIS])
  at = mesh.axis_names.index(AXIS)
  sizes = list(mesh.shape.values())
  names = (*mesh.axis_names[: at + 1], COPIES, *mesh.axis_names[at + 1 :])
  shape = (*sizes[:at], ways, sizes[at] // ways, *sizes[at + 1 :])
  return Mesh(
    mesh.devices.reshape(shape), names, axis_types=(jax.sharding.AxisType.Auto,) * len(names)
  )


def cost_lines(stored: Tree, true: Tree, names: ParamNames, *, ways: int) -> list[str]:
  """Returns the cost of arrays that do not divide over `ways` devices; [] if all divide.

  Args:
    stored: tree of shapes with NamedShardings, padding included.
    true: the same tree without padding, as checkpoints store it.
    names: tree of AxisNames from `choose_dim`.
    ways: size of `fsdp`.
  """
  leaves = list(zip(*(jax.tree.leaves(tree) for tree in (stored, true, names)), strict=True))
  lines = []
  by_dim: dict[tuple[str, int], list[tuple[Any, Any]]] = {}
  for kept, saved, of in leaves:
    if of.fsdp is not None and AXIS in _axes(kept.sharding):
      by_dim.setdefault((of.fsdp.name, of.fsdp.size), []).append((kept, saved))
  for (name, size), arrays in by_dim.items():
    more = sum(
      _local_bytes(kept) - _local_bytes(kept) * math.prod(saved.shape) / math.prod(kept.shape)
      for kept, saved in arrays
    )
    if size % ways:
      lines.append(
        f'fsdp = {ways} does not divide {name} = {size}: {len(arrays)} arrays in memory are padded '
        f'to {size + -size % ways}, {_size(more)} per device more than an even split'
      )
    elif name != 'embed':
      lines.append(f'fsdp splits {len(arrays)} arrays along {name} = {size}, which it divides')
  sizes = [size for _, size in by_dim if size % ways]
  fits = math.gcd(ways, *sizes)
  if sizes and fits > 1:
    lines.append(
      f'data = {ways // fits} with fsdp = {fits} divides, for {ways // fits} times the '
      'memory for the state'
    )
  if sizes:
    saving = sum(_local_bytes(saved) for _, saved, _ in leaves)
    lines.append(
      f'a save and a restore temporarily take {_size(saving)} per device for the unpadded state'
    )
  return lines


def _spec(names: AxisNames, table: Table) -> PartitionSpec:
  own = own_table(names, table)
  return PartitionSpec(*(own.get(name, ()) or None for name in names.names))


def _axes(sharding: NamedSharding) -> set[str]:
  entries = [e if isinstance(e, tuple) else (e,) for e in sharding.spec]
  return {axis for entry in entries for axis in entry if axis}


def _local_bytes(array: ArrayLike) -> int:
  return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _size(num_bytes: float) -> str:
  return show(num_bytes, GiB='.2f', MiB='.3g')
