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
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from t5x_gpu.partitioning import context_parallel, fsdp
from t5x_gpu.partitioning.axis_rules import AxisNames, AxisRules, Table, use_rules, varying
from t5x_gpu.partitioning.mesh.mesh_problems import divisors
from t5x_gpu.partitioning.mesh.mesh_sizes import OUTER_AXES
from t5x_gpu.partitioning.per_device_copies import Copies

# What the names of features end in that tell the place of every token in its row.
PLACES = '_places'


def is_places(name: str) -> bool:
  """Returns whether a feature has no rows, but tells where tokens stand in all of them."""
  return name.endswith(PLACES)


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """How stages take turns; the arguments of pipeline_parallel.value_and_grad."""

  schedule: str
  num_stages: int
  num_microbatches: int
  repeats: int
  skip_idle: bool
  num_stacks: int = 1

  @property
  def options(self) -> dict[str, Any]:
    return dataclasses.asdict(self)

  @property
  def least_rows(self) -> int:
    """Rows that a device needs: the microbatches of several blocks per stage come round."""
    return self.num_stages if self.repeats * self.num_stacks > 1 else 1

  def for_rows(self, rows: int) -> 'Pipeline':
    """Returns the same for batches of other sizes, in at most as many microbatches if possible.

    Args:
      rows: of one device, at least `least_rows`.
    """
    legal = [n for n in divisors(rows) if n >= self.least_rows]
    count = max((n for n in legal if n <= self.num_microbatches), default=legal[0])
    return dataclasses.replace(self, num_microbatches=count)


@dataclasses.dataclass(frozen=True)
class Region:
  """Which axes are manual, and what that means for parameters, gradients and batches.

  Attributes:
    rules: which mesh axes split each array axis.
    mesh_shape: mesh axis -> size.
    zero_stage: see partitioning/fsdp.py.
    pipeline: how stages take turns; None without stages.
    accumulate_by: under ZeRO-2 and 3, 'layer' takes all microbatches through a layer before the
      next one, 'microbatch' the other way around.
  """

  rules: AxisRules
  mesh_shape: Mapping[str, int]
  zero_stage: int = 3
  pipeline: Optional[Pipeline] = None
  accumulate_by: str = 'layer'

  @property
  def axes(self) -> tuple[str, ...]:
    """The manual axes: those that split anything, without `model`."""
    return tuple(a for a in OUTER_AXES if self.mesh_shape.get(a, 1) > 1)

  def spec(self, names: Sequence[Optional[str]], table: Table) -> PartitionSpec:
    """Returns how an array with axes `names` is split over the manual axes."""
    entries = (tuple(a for a in table.get(name, ()) if a in self.axes) for name in names)
    return PartitionSpec(*(entry or None for entry in entries))

  @property
  def reduces_in_backward(self) -> bool:
    """Whether gradients are summed over `fsdp` as soon as a layer has them (ZeRO-2 and 3).

    Not in a pipeline, whose stages have few layers and many microbatches: there, parameters are
    made whole and gradients summed once per step.
    """
    return 'fsdp' in self.axes and self.zero_stage >= 2 and self.pipeline is None

  def part_specs(self, names: Any) -> Any:
    """Returns the tree of PartitionSpecs of what is differentiated, for a tree of AxisNames."""
    table = self.rules.state if self.reduces_in_backward else self.rules.parameters
    return jax.tree.map(lambda n: self.spec(n.names, table), names)

  def kept_specs(self, names: Any) -> Any:
    """Returns the tree of PartitionSpecs of parameters as the run keeps them."""
    return jax.tree.map(lambda n: self.spec(n.names, self.rules.parameters), names)

  def gradient_specs(self, names: Any) -> Any:
    """Returns the tree of PartitionSpecs of reduced gradients: as the optimizer's state."""
    return jax.tree.map(lambda n: self.spec(n.names, self.rules.state), names)

  def batch_specs(self, batch: Mapping[str, jax.Array]) -> dict[str, PartitionSpec]:
    """Returns name -> PartitionSpec of [batch, length, ...], [batch], or places [length]."""
    return {
      name: self.spec(
        ('length',) if is_places(name) else ('batch', 'length')[: x.ndim], self.rules.activations
      )
      for name, x in batch.items()
    }

  def with_rows(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns `batch` with what local arrays cannot tell: where rows and positions stand.

    'rows' [batch] is the number of each example. Where the length is split, 'encoder_places' and
    'decoder_places' [length] are the positions in a row of the tokens of features called so.
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

  def parameters(self, parts: Any, params: Any, names: Any) -> Any:
    """Returns what a model gets: parts of parameters as `fsdp.Split`, other parts as they are.

    Args:
      parts: what is differentiated, split as `part_specs` says; or copies of that.
      params: the same as the run keeps them; used where that is more than the part (ZeRO-2).
      names: tree of AxisNames.
    """

    def parameter(axis_names: AxisNames, part: jax.Array, param: jax.Array) -> Any:
      dims = self._fsdp_dims(axis_names) if self.reduces_in_backward else None
      if dims is None:
        return part
      full = param if self.zero_stage == 2 else None
      copies = self._copies.dim(axis_names)
      if copies is not None and (part.ndim, part.shape[copies:]) != (
        param.ndim,
        param.shape[copies:],
      ):
        dims = dataclasses.replace(dims, model=copies)
        full = None if full is None else self._copies.make(axis_names, full)
      return fsdp.Split(part, full, dims)

    return jax.tree.map(parameter, names, parts, params)

  def frozen(self, params: Any, names: Any) -> Any:
    """Returns parameters that have no gradient as a model gets them; arguments as in `whole`."""
    if not self.reduces_in_backward:
      return self.whole(params, names)
    return self.parameters(params, params, names) if self.zero_stage == 3 else params

  def whole(self, params: Any, names: Any) -> Any:
    """Returns parameters, as the run keeps them, made whole over `fsdp`; not to derive through."""

    def parameter(axis_names: AxisNames, param: jax.Array) -> jax.Array:
      dims = self._fsdp_dims(axis_names) if self.zero_stage == 3 else None
      return param if dims is None else fsdp.gather(param, dims)

    return jax.tree.map(parameter, names, params)

  def _fsdp_dims(self, axis_names: AxisNames) -> Optional[fsdp.Dims]:
    """Returns where `fsdp` splits the optimizer's state, None if it does not."""

    def dim_of(axis: str) -> Optional[int]:
      return next(
        (
          i - len(axis_names.names)
          for i, name in enumerate(axis_names.names)
          if axis in self.rules.state.get(name, ())
        ),
        None,
      )

    dim = dim_of('fsdp') if 'fsdp' in self.axes else None
    if dim is None:
      return None
    return fsdp.Dims(dim, dim_of('model') if self.mesh_shape.get('model', 1) > 1 else None)

  def copies(self, parts: Any, names: Any) -> Any:
    """Returns `parts` with copies of what devices along `model` use each for themselves."""
    return jax.tree.map(self._copies.make, names, parts)

  def sum_copies(self, grads: Any, parts: Any, names: Any) -> Any:
    """Returns gradients of `copies(parts, names)`, summed to those of `parts`."""
    return jax.tree.map(self._copies.total, names, grads, parts)

  @property
  def _copies(self) -> Copies:
    return Copies(self.rules, self.mesh_shape)

  def reduce_gradients(self, grads: Any, names: Any) -> Any:
    """Returns the sum of local gradients over all devices, split as `gradient_specs` says.

    Everything that is reduced over the same axes travels in one collective.
    """
    leaves, treedef = jax.tree.flatten(grads)
    groups = collections.defaultdict(list)
    for i, axis_names in enumerate(jax.tree.leaves(names)):
      own = {a for name in axis_names.names for a in self.rules.parameters.get(name, ())}
      dims = self._fsdp_dims(axis_names)
      if dims is not None:
        own.add('fsdp')
        if not self.reduces_in_backward:  # else summed by the backward pass of `fsdp.whole`
          leaves[i] = fsdp.scatter(leaves[i], dims)
      groups[tuple(a for a in self.axes if a not in own)].append(i)
    for axes, members in groups.items():
      if axes:
        for i, reduced in zip(members, jax.lax.psum([leaves[i] for i in members], axes)):
          leaves[i] = reduced
    return jax.tree.unflatten(treedef, leaves)

  def map(
    self, function: Callable[..., Any], *, in_specs: Any, out_specs: Any
  ) -> Callable[..., Any]:
    """Returns `function` of local arrays as one of global arrays; itself without manual axes."""
    if not self.axes:
      return function

    def local(*args: Any) -> Any:
      with use_rules(self.rules, self.mesh_shape, manual_axes=self.axes):
        return function(*jax.tree.map(self.varying, args))

    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, axis_names=set(self.axes))

  def varying(self, x: jax.Array) -> jax.Array:
    """Returns `x`, marked as different on every device of the manual axes."""
    return varying(x, self.axes)

  def total(self, tree: Any) -> Any:
    """Returns the sums over all devices of local numbers."""
    if not self.axes:
      return tree
    return jax.lax.psum(jax.tree.map(self.varying, tree), self.axes)
