"""The region of a step in which every collective is written out, all axes but `model` manual.

Left to the compiler, a loop over microbatches, layers or pipeline ticks repeats the reduction of
the gradients each time around. Inside the region a device sees its own rows, positions, layers and
parts of parameters; gradients come out unreduced and are reduced once, here. `model` stays with the
compiler, which follows the constraints of `shard`.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import jax
from jax.sharding import PartitionSpec

from t5x_gpu.partitioning import fsdp
from t5x_gpu.partitioning.axis_rules import AxisNames, AxisRules, Table, use_rules

MANUAL_AXES = ('stage', 'data', 'fsdp', 'context', 'expert')


@dataclasses.dataclass(frozen=True)
class Region:
  """Which axes are manual, and what that means for parameters, gradients and batches.

  Attributes:
    rules: which mesh axes split each array axis.
    mesh_shape: mesh axis -> size.
    zero_stage: see partitioning/fsdp.py.
  """
  rules: AxisRules
  mesh_shape: Mapping[str, int]
  zero_stage: int

  @property
  def axes(self) -> tuple[str, ...]:
    """The manual axes: those that split anything, without `model`."""
    return tuple(a for a in MANUAL_AXES if self.mesh_shape.get(a, 1) > 1)

  def spec(self, names: Sequence[Optional[str]], table: Table) -> PartitionSpec:
    """Returns how an array with axes `names` is split over the manual axes."""
    entries = (tuple(a for a in table.get(name, ()) if a in self.axes) for name in names)
    return PartitionSpec(*(entry or None for entry in entries))

  def part_specs(self, names: Any) -> Any:
    """Returns the tree of PartitionSpecs of what is differentiated, for a tree of AxisNames."""
    table = self.rules.state if self.zero_stage == 2 else self.rules.parameters
    return jax.tree.map(lambda n: self.spec(n.names, table), names)

  def gradient_specs(self, names: Any) -> Any:
    """Returns the tree of PartitionSpecs of reduced gradients: as the optimizer's state."""
    return jax.tree.map(lambda n: self.spec(n.names, self.rules.state), names)

  def batch_specs(self, batch: Any) -> Any:
    """Returns the tree of PartitionSpecs of a batch of arrays [batch, length, ...] or [batch]."""
    return jax.tree.map(lambda x: self.spec(('batch', 'length')[:x.ndim],
                                            self.rules.activations), batch)

  def parameters(self, parts: Any, params: Any, names: Any) -> Any:
    """Returns what a model gets: parts of parameters as `fsdp.Split`, other parts as they are.

    Args:
      parts: what is differentiated, split as `part_specs` says.
      params: the same as the run keeps them; used where that is more than the part (ZeRO-2).
      names: tree of AxisNames.
    """
    def parameter(axis_names: AxisNames, part: jax.Array, param: jax.Array) -> Any:
      dim = self._fsdp_dim(axis_names)
      if dim is None or self.zero_stage < 2:
        return part
      return fsdp.Split(part, param if self.zero_stage == 2 else None, dim - part.ndim)
    return jax.tree.map(parameter, names, parts, params)

  def _fsdp_dim(self, axis_names: AxisNames) -> Optional[int]:
    """Returns the dimension that `fsdp` splits in the optimizer's state, None without one."""
    if 'fsdp' not in self.axes:
      return None
    return next((i for i, name in enumerate(axis_names.names)
                 if 'fsdp' in self.rules.state.get(name, ())), None)

  def reduce_gradients(self, grads: Any, names: Any) -> Any:
    """Returns the sum of local gradients over all devices, split as `gradient_specs` says.

    Everything that is reduced over the same axes travels in one collective.
    """
    leaves, treedef = jax.tree.flatten(grads)
    groups = collections.defaultdict(list)
    for i, axis_names in enumerate(jax.tree.leaves(names)):
      own = {a for name in axis_names.names for a in self.rules.parameters.get(name, ())}
      dim = self._fsdp_dim(axis_names)
      if dim is not None:
        own.add('fsdp')
        if self.zero_stage < 2:  # else summed by the backward pass of `fsdp.whole`
          leaves[i] = jax.lax.psum_scatter(leaves[i], 'fsdp', scatter_dimension=dim, tiled=True)
      groups[tuple(a for a in self.axes if a not in own)].append(i)
    for axes, members in groups.items():
      if axes:
        for i, reduced in zip(members, jax.lax.psum([leaves[i] for i in members], axes)):
          leaves[i] = reduced
    return jax.tree.unflatten(treedef, leaves)

  def map(self, function: Callable[..., Any], *, in_specs: Any, out_specs: Any
          ) -> Callable[..., Any]:
    """Returns `function` of local arrays as one of global arrays; itself without manual axes."""
    if not self.axes:
      return function

    def local(*args: Any) -> Any:
      with use_rules(self.rules, {a: n for a, n in self.mesh_shape.items() if a not in self.axes}):
        return function(*jax.tree.map(self.varying, args))
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, axis_names=set(self.axes))

  def varying(self, x: jax.Array) -> jax.Array:
    """Returns `x`, marked as different on every device of the manual axes.

    What is marked so is differentiated where it is: no collective is added to its gradient.
    """
    missing = tuple(a for a in self.axes if a not in _varying_axes(x))
    return jax.lax.pcast(x, missing, to='varying') if missing else x

  def total(self, tree: Any) -> Any:
    """Returns the sums over all devices of local numbers."""
    if not self.axes:
      return tree
    return jax.lax.psum(jax.tree.map(self.varying, tree), self.axes)


def _varying_axes(x: jax.Array) -> frozenset[str]:
  aval = jax.typeof(x)
  if hasattr(aval, 'vma'):
    return frozenset(aval.vma)
  return frozenset(aval.manual_axis_type.varying)  # jax 0.10
