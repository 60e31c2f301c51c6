"""The region of a step with explicit collectives: all axes except `model` are manual.

The compiler would repeat the reduction of gradients in each iteration of a loop over microbatches,
layers or pipeline ticks. Inside the region a device sees its own rows, positions, layers and parts
of parameters; gradients come out unreduced and are reduced once, here. The compiler handles
`model`, following the constraints of `shard`; `PerDeviceCopies` keeps it from summing at each use.
`Region` makes the parameters that a model sees and reduces their gradients.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Optional, Union

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from t5x_gpu.partitioning import context_parallel, fsdp
from t5x_gpu.partitioning.axis_rules import AxisNames, AxisRules, Table, use_rules, varying
from t5x_gpu.partitioning.fsdp import own_table
from t5x_gpu.partitioning.in_place import InPlace
from t5x_gpu.partitioning.manual_collectives import InFloat32, Reducer
from t5x_gpu.partitioning.mesh_sizes import OUTER_AXES
from t5x_gpu.partitioning.overlap import Ahead, with_ports
from t5x_gpu.partitioning.parameters import Dims, Parameter, Split, dims_of
from t5x_gpu.partitioning.pipeline import LayerSums
from t5x_gpu.partitioning.pipeline_schedules import Timetable
from t5x_gpu.partitioning.trees import DTypeLike, Gradients, ParamNames, Params, Specs, Tree, TreeFn

# Suffix of features that hold token positions.
PLACES = '_places'


def is_places(name: str) -> bool:
  """Returns whether a feature holds token positions [length], the same for all rows."""
  return name.endswith(PLACES)


@dataclasses.dataclass(frozen=True)
class Reduction:
  """How a backward pass reduces the gradients of parameters.

  Attributes:
    over_all_axes: whether it sums gradients over all devices, not only over `fsdp`. The
      differentiated parts, and their gradients, then do not vary over `Region.sum_axes`.
    earlier: gradients of earlier microbatches, which the gradients of the pass contain; with
      `over_all_axes`, not summed over these axes.
    in_layers: whether the model calls `whole` on each layer, so that a layer's gradients are
      summed as soon as they are known; otherwise all layers' gradients are summed together.
    first_stack: tree of bools: whether a parameter belongs to the layers that run first, and can
      have a port (`with_ports`); None for no ports.
  """

  over_all_axes: bool = False
  earlier: Optional[Gradients] = None
  in_layers: bool = True
  first_stack: Optional[Tree] = None


@dataclasses.dataclass(frozen=True)
class Region:
  """The manual axes, and how they split parameters, gradients and batches.

  Attributes:
    rules: which mesh axes split each array axis.
    mesh_shape: mesh axis -> size.
    zero_stage: see partitioning/fsdp.py.
    pipeline: schedule of the stages; None without a pipeline.
    accumulate_by: under ZeRO-2 and 3, 'layer' takes all microbatches through a layer before the
      next one; 'microbatch' takes a microbatch through all layers first.
    overlap_layers: whether loops over layers communicate one layer ahead (overlap.py). In a
      pipeline, only the loop of the last backward tick does (`pipeline.LayerSums`).
    reducer: how gradients are summed over devices.
  """

  rules: AxisRules
  mesh_shape: Mapping[str, int]
  zero_stage: int = 3
  pipeline: Optional[Timetable] = None
  accumulate_by: str = 'layer'
  overlap_layers: bool = False
  reducer: Reducer = InFloat32()

  @property
  def axes(self) -> tuple[str, ...]:
    """The manual axes: all of size 2 or more, except `model`."""
    return tuple(a for a in OUTER_AXES if self.mesh_shape.get(a, 1) > 1)

  @property
  def reduces_in_backward(self) -> bool:
    """Whether gradients are summed over `fsdp` as soon as a layer has them (ZeRO-2 and 3).

    False in a pipeline, whose stages have few layers and many microbatches: there, parameters are
    gathered and gradients summed once per step.
    """
    return 'fsdp' in self.axes and self.zero_stage >= 2 and self.pipeline is None

  @property
  def sums_in_backward(self) -> bool:
    """Whether the backward pass sums each gradient over all axes, not only over `fsdp`.

    Communication then runs while other gradients are computed. False in a pipeline. With several
    microbatches, only the last one's backward pass does; under ZeRO-1 it alone scatters, too.
    """
    return bool(self.axes) and self.pipeline is None

  @property
  def scatters_once(self) -> bool:
    """Whether the backward pass of the last microbatch alone scatters gradients over `fsdp`.

    The other passes then differentiate whole parameters (ZeRO-1).
    """
    return 'fsdp' in self.axes and self.sums_in_backward and not self.reduces_in_backward

  def by_layer(self, num_microbatches: int) -> bool:
    """Returns whether a layer takes all microbatches before the next layer does."""
    return self.reduces_in_backward and num_microbatches > 1 and self.accumulate_by == 'layer'

  def splits_gradients(self, num_microbatches: int) -> bool:
    """Returns whether a device holds its parts of the gradients, of all layers but one."""
    return self.reduces_in_backward or (self.scatters_once and num_microbatches == 1)

  @property
  def layers_ahead(self) -> bool:
    """Whether loops over layers communicate one layer ahead."""
    return self.overlap_layers and self.sums_in_backward

  def adds_in_place(self, reduction: Reduction) -> bool:
    """Whether the backward loop over layers adds each gradient to the earlier ones (`InPlace`)."""
    sums = self.reduces_in_backward or reduction.over_all_axes
    return reduction.in_layers and reduction.earlier is not None and not sums

  @property
  def sums_in_last_tick(self) -> bool:
    """Whether the last backward tick of a pipeline sums the gradients of its layers.

    False if a stage has several blocks of layers: that tick computes only one of them.
    """
    return (
      self.overlap_layers
      and self.pipeline is not None
      and self.pipeline.num_blocks == 1
      and self.axes != ('stage',)
    )

  def map(
    self, function: TreeFn, *, in_specs: Specs, out_specs: Specs, marked: bool = True
  ) -> TreeFn:
    """Returns `function` of local arrays as a function of global arrays.

    Args:
      function: function of local arrays.
      in_specs, out_specs: PartitionSpecs of its arguments and results.
      marked: whether arrays that are the same on all devices are passed marked as varying.
    """
    if not self.axes:
      return function

    def local(*args: Tree) -> Tree:
      with use_rules(self.rules, self.mesh_shape, manual_axes=self.axes):
        return function(*(jax.tree.map(self.varying, args) if marked else args))

    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, axis_names=set(self.axes))

  def varying(self, x: jax.Array) -> jax.Array:
    """Returns `x`, marked as different on every device of the manual axes."""
    return varying(x, self.axes)

  def with_rows(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns `batch` with global row numbers and positions, which local arrays do not contain.

    'rows' [batch] is the index of each example. If the length is split, 'encoder_places' and
    'decoder_places' [length] are the positions of the tokens of encoder and decoder features.
    """
    batch_size = next(iter(batch.values())).shape[0]
    more = {'rows': jnp.arange(batch_size)}
    if 'context' in self.axes:
      for name, x in batch.items():
        if x.ndim > 1:
          more[name.split('_')[0] + PLACES] = jnp.asarray(
            context_parallel.length_order(x.shape[1], self.mesh_shape['context'])
          )
    return {**batch, **more}

  def part_specs(self, names: ParamNames) -> Specs:
    """Returns a tree of PartitionSpecs of the differentiated parts, from a tree of AxisNames."""
    return self._specs(names, self._part_table)

  def kept_specs(self, names: ParamNames) -> Specs:
    """Returns a tree of PartitionSpecs of the parameters as stored between steps."""
    return self._specs(names, self.rules.parameters)

  def gradient_specs(self, names: ParamNames) -> Specs:
    """Returns a tree of PartitionSpecs of reduced gradients, equal to the optimizer state's."""
    return self._specs(names, self.rules.state)

  def batch_specs(self, batch: Mapping[str, jax.Array]) -> dict[str, PartitionSpec]:
    """Returns name -> PartitionSpec of [batch, length, ...], [batch], or places [length]."""
    return {
      name: self.spec(
        ('length',) if is_places(name) else ('batch', 'length')[: x.ndim], self.rules.activations
      )
      for name, x in batch.items()
    }

  @property
  def _part_table(self) -> Table:
    return self.rules.state if self.sums_in_backward else self.rules.parameters

  def _specs(self, names: ParamNames, table: Table) -> Specs:
    return jax.tree.map(lambda n: self.spec(n.names, own_table(n, table)), names)

  def spec(self, names: Sequence[Optional[str]], table: Table) -> PartitionSpec:
    """Returns the PartitionSpec of an array with axes `names` over the manual axes."""
    entries = (tuple(a for a in table.get(name, ()) if a in self.axes) for name in names)
    return PartitionSpec(*(entry or None for entry in entries))

  def padded_parts(self, params: Params, names: ParamNames) -> Params:
    """Returns global parameters that `part_specs` can split; under ZeRO-3 they are stored so."""
    return jax.tree.map(
      lambda x, n: fsdp.padded(x, n, table=self._part_table, mesh_shape=self.mesh_shape),
      params,
      names,
    )

  def unpadded_gradients(self, grads: Gradients, names: ParamNames) -> Gradients:
    """Returns global gradients, split by `gradient_specs`, in the shapes of the parameters."""
    return jax.tree.map(
      lambda x, n: fsdp.unpadded(x, n, table=self.rules.state, mesh_shape=self.mesh_shape),
      grads,
      names,
    )

  def parameters(
    self, parts: Params, params: Params, names: ParamNames, reduction: Reduction = Reduction()
  ) -> Params:
    """Returns the parameters for a model: a `Parameter` if its backward pass reduces, else arrays.

    Args:
      parts: differentiated parts, split by `part_specs`; or copies of them.
      params: parameters as stored between steps; ZeRO-1 and 2 use these, which are whole.
      names: tree of AxisNames.
      reduction: how the backward pass reduces gradients.
    """
    reduces = reduction.over_all_axes

    def parameter(
      axis_names: AxisNames, part: jax.Array, param: jax.Array, before: Optional[jax.Array]
    ) -> Union[jax.Array, Parameter]:
      split = self._split(axis_names, part, param, before, reduces=reduces)
      is_split = split.dims.fsdp is not None
      if reduction.in_layers and 'layers' in axis_names.names:
        if self.adds_in_place(reduction):
          return InPlace(split, 0, part.shape[0])
        if not is_split and not reduces and before is None:
          return part
        return Ahead(split) if self.overlap_layers else split
      split = split.summed_once()
      return split if is_split else split.part

    def made(parts: Params) -> Params:
      return jax.tree.map(parameter, names, parts, params, before)

    before = reduction.earlier
    if before is None:
      before = jax.tree.map(lambda _: None, names)
    if not reduces or reduction.first_stack is None:
      return made(parts)
    return with_ports(made, parts, reduction.first_stack, axes=self.axes)

  def _split(
    self,
    axis_names: AxisNames,
    part: jax.Array,
    param: jax.Array,
    earlier: Optional[jax.Array],
    *,
    reduces: bool,
  ) -> Split:
    """Returns one of `parameters` in parts."""
    dims = self._dims(axis_names)
    scatters = self.reduces_in_backward or (self.scatters_once and reduces)
    if not scatters or dims.fsdp is None:
      dims = dataclasses.replace(dims, fsdp=None, padding=None)
    full = param if dims.fsdp is not None and self.zero_stage < 3 else None
    copies = self._copies.dim(axis_names)
    if copies is not None and (part.ndim, part.shape[copies:]) != (
      param.ndim,
      param.shape[copies:],
    ):
      dims = dataclasses.replace(dims, model=copies)
      full = None if full is None else self._copies.make(axis_names, full)
    sum_axes = self.sum_axes(axis_names) if reduces else ()
    return Split(part, full, dataclasses.replace(dims, sum_axes=sum_axes), earlier)

  def frozen(self, params: Params, names: ParamNames, dtype: DTypeLike) -> Params:
    """Returns parameters without gradient for a model; arguments as in `gathered`."""
    if not self.reduces_in_backward:
      return self.gathered(params, names, dtype)
    return self.parameters(params, params, names) if self.zero_stage == 3 else params

  def gathered(self, params: Params, names: ParamNames, dtype: DTypeLike) -> Params:
    """Returns stored parameters, gathered over `fsdp`; cannot be differentiated through.

    Args:
      params: parameters as stored.
      names: tree of AxisNames.
      dtype: dtype in which parameters are sent. The result keeps their own dtype, so that gradients
        are summed in it.
    """

    def parameter(axis_names: AxisNames, param: jax.Array) -> jax.Array:
      dims = self._dims(axis_names)
      if self.zero_stage < 3 or dims.fsdp is None:
        return param
      return dims.gather(param.astype(dtype)).astype(param.dtype)

    return jax.tree.map(parameter, names, params)

  def _dims(self, axis_names: AxisNames) -> Dims:
    return dims_of(
      axis_names, table=self.rules.state, mesh_shape=self.mesh_shape, reducer=self.reducer
    )

  def copies(self, parts: Params, names: ParamNames) -> Params:
    """Returns `parts` with a copy per device along `model` of parameters that need one."""
    return jax.tree.map(self._copies.make, names, parts)

  def sum_copies(self, grads: Gradients, parts: Params, names: ParamNames) -> Gradients:
    """Returns the gradients of `parts`, given the gradients of `copies(parts, names)`."""
    return jax.tree.map(self._copies.total, names, grads, parts)

  @property
  def _copies(self) -> 'PerDeviceCopies':
    return PerDeviceCopies(self.rules, self.mesh_shape)

  def reduce_gradients(self, grads: Gradients, names: ParamNames) -> Gradients:
    """Returns local gradients summed over all devices, split by `gradient_specs`; in a pipeline.

    Gradients that are reduced over the same axes in float32 share one collective. Gradients that
    the last tick of a pipeline has already summed are returned unchanged.
    """
    leaves, treedef = jax.tree.flatten(grads)
    groups = collections.defaultdict(list)
    for i, axis_names in enumerate(jax.tree.leaves(names)):
      if self.sums_in_last_tick and 'layers' in axis_names.names:
        continue
      dims, axes = self._dims(axis_names), self.sum_axes(axis_names)
      if dims.fsdp is not None:
        leaves[i] = dims.scatter(leaves[i])
      if dims.reducer == InFloat32():
        groups[axes].append(i)
      else:
        leaves[i] = dataclasses.replace(dims, sum_axes=axes).total(leaves[i])
    for axes, members in groups.items():
      if axes:
        for i, reduced in zip(members, jax.lax.psum([leaves[i] for i in members], axes)):
          leaves[i] = reduced
    return jax.tree.unflatten(treedef, leaves)

  def sum_axes(self, axis_names: AxisNames) -> tuple[str, ...]:
    """Returns the axes over which a gradient is summed and that do not split its parameter."""
    table = own_table(axis_names, self.rules.parameters)
    own = {a for name in axis_names.names for a in table.get(name, ())}
    if self._dims(axis_names).fsdp is not None:
      own.add('fsdp')
    return tuple(a for a in self.axes if a not in own)

  def layer_sums(self, names: ParamNames) -> LayerSums:
    """Returns how the last backward tick of a pipeline sums gradients, from a tree of AxisNames."""

    def dims(axis_names: AxisNames) -> Optional[Dims]:
      if 'layers' not in axis_names.names:
        return None
      split, copies = self._dims(axis_names), self._copies.dim(axis_names)
      model = split.model if copies is None else copies
      return dataclasses.replace(split, model=model, sum_axes=self.sum_axes(axis_names))

    return LayerSums(tuple(map(dims, jax.tree.leaves(names))), self.axes)

  def total(self, tree: Tree) -> Tree:
    """Returns the sum of local numbers over all devices."""
    if not self.axes:
      return tree
    return jax.lax.psum(jax.tree.map(self.varying, tree), self.axes)

  def largest(self, tree: Tree) -> Tree:
    """Returns the maximum of local numbers over all devices."""
    if not self.axes:
      return tree
    return jax.lax.pmax(jax.tree.map(self.varying, tree), self.axes)


_HEADS = 'kv_heads'


@dataclasses.dataclass(frozen=True)
class PerDeviceCopies:
  """Copies of parameters during a step, one per device along `model`, and sums of their gradients.

  The compiler handles `model`. If every device holds a parameter whole and uses it on its part of
  the activations, the compiler would sum its gradient at each use: for every layer, microbatch and
  pipeline tick. With a copy per device, each copy has a local gradient, and these are summed once.
  There are two kinds:

  - parameters that act on each position or head separately (`AxisNames.along`): [copies, ...];
  - keys and values of fewer heads than devices: [..., copies of each head, kv] of [..., heads, kv].

  Attributes:
    rules: which mesh axes split each array axis.
    mesh_shape: mesh axis -> size.
  """

  rules: AxisRules
  mesh_shape: Mapping[str, int]

  @property
  def count(self) -> int:
    return self.mesh_shape.get('model', 1)

  def dim(self, axis_names: AxisNames) -> Optional[int]:
    """Returns the dimension of the copies, counted from the last one (-1); None without copies."""
    names = axis_names.names
    if self.count > 1 and 'model' in self.rules.activations.get(axis_names.along, ()):
      return -1 - sum(name != 'layers' for name in names)
    if self.count > 1 and _HEADS in names and 'model' not in self.rules.parameters.get(_HEADS, ()):
      return names.index(_HEADS) - len(names)
    return None

  def make(self, axis_names: AxisNames, x: jax.Array) -> jax.Array:
    """Returns copies of the parameter `x`, one per device; `x` itself if it needs none."""
    dim = self.dim(axis_names)
    if dim is None:
      return x
    if axis_names.along is not None:
      x = jnp.expand_dims(x, dim)
    x = jnp.repeat(x, self.count // x.shape[dim], axis=dim)
    return jax.lax.with_sharding_constraint(
      x, PartitionSpec(*('model' if i == x.ndim + dim else None for i in range(x.ndim)))
    )

  def total(self, axis_names: AxisNames, gradient: jax.Array, like: jax.Array) -> jax.Array:
    """Returns `gradient` summed over copies, in the shape of the parameter `like`."""
    dim = self.dim(axis_names)
    if dim is None:
      return gradient
    if axis_names.along is not None:
      return gradient.sum(dim)
    at = gradient.ndim + dim
    return gradient.reshape(
      *gradient.shape[:at], like.shape[at], -1, *gradient.shape[at + 1 :]
    ).sum(at + 1)
