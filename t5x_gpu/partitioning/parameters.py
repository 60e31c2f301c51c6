"""Parameters inside the region: gathered just before use, gradients reduced as soon as known.

This is the path of a parameter through a training step:

1. The region (region.py) gives the model a `Split` for each parameter: this device's part, and in
   `Dims` how to get the whole parameter and whom to send its gradient.
2. `over_layers` runs the layers of a stack, one after the other. Each calls `whole`, so only one
   layer's parameters are whole at a time. The backward pass gathers them again (`keep_policy`).
3. The gradient of `whole` is `reduced`: summed over devices; each device keeps its part.

Most layers and models call only `whole`; tests/test_layering.py lists the others. Other features
are other kinds of `Parameter` with the same interface: layers/fp8.py gathers kernels in 8 bits;
overlap.py communicates one layer ahead of the computation, in its own loop (`Parameter.loop`).
`manual_collectives.InBfloat16` sends gradients with half the bytes. `Split.earlier` adds the
gradients of earlier microbatches.
"""

import abc
import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Optional, Union

import flax.struct
import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from t5x_gpu.partitioning.axis_rules import AxisNames, Names, Table, varying
from t5x_gpu.partitioning.fsdp import Padding, own_table, padding_of
from t5x_gpu.partitioning.layer_stacks import check_runs_once
from t5x_gpu.partitioning.manual_collectives import InFloat32, Reducer, all_gather
from t5x_gpu.partitioning.trees import DTypeLike, Index, Params, Tree


def whole(params: Params, dtype: DTypeLike, *, wide: bool = False) -> Params:
  """Returns parameters as layers use them: arrays, or kernels in 8 bits (layers/fp8.py).

  Models call it as late as possible: `over_layers` does, once per layer; models do for parameters
  outside of layers. Plain arrays, as on one device, are unchanged.

  Args:
    params: parameters as passed to a model's `loss`.
    dtype: compute dtype; parameters are gathered in it. Gradients are summed in float32.
    wide: return float32, rounded to `dtype`, so that gradients arrive in float32.
  """
  return jax.tree.map(
    lambda x: x.whole(dtype, wide=wide) if is_parameter(x) else x, params, is_leaf=is_parameter
  )


# A whole parameter: an array, or `fp8.LowPrecisionKernel`.
Weights = Any


class Parameter(abc.ABC):
  """A parameter that has to be made whole.

  Attributes:
    loop: runs stacks that have such a parameter; it takes the arguments of `over_layers`. None for
      the loop of `over_layers`.
    adds_in_place: whether this loop adds gradients to the gradients of earlier microbatches.
  """

  loop: ClassVar[Optional[Callable[..., Tree]]] = None
  adds_in_place: ClassVar[bool] = False

  @property
  def is_converted(self) -> bool:
    """Whether it holds values that were converted for the matmuls ahead of its use."""
    return False

  @property
  @abc.abstractmethod
  def split(self) -> 'Split':
    """The differentiated part, and how it is split."""

  @property
  def num_layers(self) -> int:
    """Number of layers that a loop over this stack runs."""
    return self.split.part.shape[0]

  @abc.abstractmethod
  def whole(self, dtype: DTypeLike, *, wide: bool = False) -> Weights:
    """Returns the whole parameter; its gradient is reduced to the gradient of the part.

    Args:
      dtype, wide: as in `whole`.
    """

  @abc.abstractmethod
  def convert(self, function: Callable[['Split'], 'Parameter']) -> 'Parameter':
    """Returns this parameter with `function(split)` in place of `split`."""

  @abc.abstractmethod
  def as_gradient(self, part: jax.Array, others: Tree) -> 'Parameter':
    """Returns the gradient of this parameter.

    Args:
      part: gradient of the part.
      others: gradients of other arrays, from `others`.
    """

  @abc.abstractmethod
  def others(self, gradient: Weights) -> Tree:
    """Returns the gradients of arrays that are not reduced; None if there are none.

    Args:
      gradient: gradient of the result of `whole`.
    """

  @abc.abstractmethod
  def unreduced(self, gradient: Weights) -> jax.Array:
    """Returns the gradient of the result of `whole` as a float32 array."""


def is_parameter(x: object) -> bool:
  """Returns whether `x` is a `Parameter`; an `is_leaf` for tree maps."""
  return isinstance(x, Parameter)


class Wrapper(Parameter):
  """A parameter that adds something to another one, and otherwise behaves as the other one.

  Attributes:
    param: the other parameter; a subclass is a `flax.struct.dataclass` with this field.
  """

  param: Parameter

  @property
  def split(self) -> 'Split':
    return self.param.split

  @property
  def is_converted(self) -> bool:
    return self.param.is_converted

  def whole(self, dtype: DTypeLike, *, wide: bool = False) -> Weights:
    return self.param.whole(dtype, wide=wide)

  def convert(self, function: Callable[['Split'], Parameter]) -> Parameter:
    return self.replace(param=self.param.convert(function))

  def others(self, gradient: Weights) -> Tree:
    return self.param.others(gradient)

  def unreduced(self, gradient: Weights) -> jax.Array:
    return self.param.unreduced(gradient)


@dataclasses.dataclass(frozen=True)
class Dims:
  """How a parameter is split, and over which other mesh axes its gradient is summed.

  Dimensions are counted from the last one (-1), because a scan removes the first.

  Attributes:
    fsdp: dimension that `fsdp` splits; None for a parameter that is whole on every device.
    model: dimension that `model` splits, or None.
    padding: zeros that make the parts equal, or None.
    sum_axes: mesh axes over which the backward pass sums the gradient, besides `fsdp`.
    reducer: how gradients are summed.
  """

  fsdp: Optional[int] = None
  model: Optional[int] = None
  padding: Optional[Padding] = None
  sum_axes: tuple[str, ...] = ()
  reducer: Reducer = InFloat32()

  def gather(self, part: jax.Array) -> jax.Array:
    """Returns a parameter gathered from its parts; cannot be differentiated through."""
    full = all_gather(part, 'fsdp', dim=self.fsdp, model_dim=self.model)
    return full if self.padding is None else self.padding.removed(full)

  def scatter(self, gradient: jax.Array) -> jax.Array:
    """Returns this device's part of the sum of `gradient` over `fsdp`."""
    if self.padding is not None:
      gradient = self.padding.added(gradient)
    return self.reducer.psum_scatter(gradient, 'fsdp', dim=self.fsdp, model_dim=self.model)

  def total(self, gradient: jax.Array) -> jax.Array:
    """Returns the sum of `gradient` over `sum_axes`."""
    return self.reducer.psum(gradient, self.sum_axes, model_dim=self.model)

  def reduced(self, gradient: jax.Array, earlier: Optional[jax.Array] = None) -> jax.Array:
    """Returns this device's part of the sum of `gradient` over `fsdp` and `sum_axes`, in float32.

    Args:
      gradient: gradient of the whole parameter, from this device's rows.
      earlier: as in `Split`; added before summing over the axes along which it is not yet summed.
    """
    gradient = gradient.astype(jnp.float32)
    if earlier is not None and earlier.shape == gradient.shape:
      gradient, earlier = gradient + earlier, None
    if self.fsdp is not None:
      gradient = self.scatter(gradient)
    if earlier is not None:
      gradient = gradient + earlier
    return self.total(gradient)


def dims_of(
  names: AxisNames, *, table: Table, mesh_shape: Mapping[str, int], reducer: Reducer = InFloat32()
) -> Dims:
  """Returns how a parameter is split between steps, without the sums of its gradient.

  Args:
    names: axis names of the parameter.
    table: array axis -> mesh axes, of the optimizer state.
    mesh_shape: mesh axis -> size.
    reducer: how gradients are summed that `in_bfloat16` allows to round; others in float32.
  """
  own = own_table(names, table)

  def dim_of(axis: str) -> Optional[int]:
    if mesh_shape.get(axis, 1) == 1:
      return None
    places = [i for i, name in enumerate(names.names) if axis in own.get(name, ())]
    return places[0] - len(names.names) if places else None

  padding = padding_of(names, table=own, mesh_shape=mesh_shape)
  reducer = reducer if in_bfloat16(names.names) else InFloat32()
  return Dims(dim_of('fsdp'), dim_of('model'), padding, reducer=reducer)


def in_bfloat16(names: Names) -> bool:
  """Returns whether the gradient of a parameter can be sent in bfloat16.

  Gradients of vectors (scales of norms, biases) stay in float32. They are small, and one all-reduce
  carries several.
  """
  return sum(name != 'layers' for name in names) > 1


@flax.struct.dataclass
class Split(Parameter):
  """A parameter in parts, one per device along `fsdp`, or one that is whole on every device.

  Attributes:
    part: this device's part, which is differentiated.
    full: the whole parameter if every device has it (stages 1 and 2, pipelines), else None.
    dims: the dimensions that are split.
    earlier: gradient of earlier microbatches, whole or scattered over `fsdp`, but not yet summed
      over `dims.sum_axes`; None if there are no earlier microbatches.
  """

  part: jax.Array
  full: Optional[jax.Array] = None
  dims: Dims = flax.struct.field(pytree_node=False, default=Dims())
  earlier: Optional[jax.Array] = None

  @property
  def split(self) -> 'Split':
    return self

  def summed_once(self) -> 'Split':
    """Returns this parameter for several uses, after which its gradient is summed over devices.

    Without this, the gradient of each use would be summed over `dims.sum_axes`.
    """
    if self.full is not None:
      return Split(self.whole(self.full.dtype))
    if not self.dims.sum_axes and self.earlier is None:
      return self
    dims = dataclasses.replace(self.dims, fsdp=None)
    part = _use(None, False, dims, self.part, None, self.earlier)
    return Split(part, self.full, dataclasses.replace(self.dims, sum_axes=()))

  def whole(self, dtype: DTypeLike, *, wide: bool = False) -> jax.Array:
    return _use(dtype, wide, self.dims, self.part, self.full, self.earlier)

  def convert(self, function: Callable[['Split'], Parameter]) -> Parameter:
    return function(self)

  def as_gradient(self, part: jax.Array, others: Tree) -> 'Split':
    del others
    return self.replace(part=part, full=None, earlier=None)

  def others(self, gradient: jax.Array) -> None:
    del gradient

  def unreduced(self, gradient: jax.Array) -> jax.Array:
    return gradient.astype(jnp.float32)

  def __mul__(self, factor: float) -> 'Split':
    """Returns `factor` times the parameter."""
    part, full = jax.tree.map(lambda x: x * factor, (self.part, self.full))
    earlier = None if self.earlier is None else self.earlier / factor
    return self.replace(part=part, full=full, earlier=earlier)

  @property
  def is_gathered(self) -> bool:
    """Whether using the parameter takes an all-gather."""
    return self.full is None and self.dims.fsdp is not None


def as_parameter(x: Union[jax.Array, Parameter]) -> Parameter:
  """Returns `x`, or an array as a parameter that is whole on every device."""
  return x if is_parameter(x) else Split(x)


def _make_whole(
  dtype: Optional[DTypeLike],
  wide: bool,
  dims: Dims,
  part: jax.Array,
  full: Optional[jax.Array],
  earlier: Optional[jax.Array],
) -> jax.Array:
  """Returns the whole parameter; if it is split, in `dtype` or rounded to it."""
  del earlier
  part = varying(part, dims.sum_axes)
  if dims.fsdp is None:
    return part if full is None else full
  rounded = dims.gather(part.astype(dtype)) if full is None else full.astype(dtype)
  return rounded.astype(part.dtype) if wide else rounded


def _use_forward(
  dtype: Optional[DTypeLike],
  wide: bool,
  dims: Dims,
  part: jax.Array,
  full: Optional[jax.Array],
  earlier: Optional[jax.Array],
) -> tuple[jax.Array, Tree]:
  return _make_whole(dtype, wide, dims, part, full, earlier), (full, earlier)


def _use_backward(
  dtype: Optional[DTypeLike], wide: bool, dims: Dims, kept: Tree, gradient: jax.Array
) -> tuple[jax.Array, Optional[jax.Array], Optional[jax.Array]]:
  del dtype, wide
  full, earlier = kept
  return (dims.reduced(gradient, earlier), *jax.tree.map(jnp.zeros_like, (full, earlier)))


_use = jax.custom_vjp(_make_whole, nondiff_argnums=(0, 1, 2))
_use.defvjp(_use_forward, _use_backward)

# (weights of a layer, carry, shared, number of the layer) -> carry.
Layer = Callable[[Params, Tree, Tree, Index], Tree]
# For `jax.checkpoint`: (primitive, ...) -> whether its results are stored for the backward pass.
Policy = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Remat:
  """What the layers of a loop store for the backward pass in addition to their input.

  Attributes:
    policy: None stores everything except gathered parameters.
    first_layers: number of first layers with another policy.
    of_first: their policy.
  """

  policy: Optional[Policy] = None
  first_layers: int = 0
  of_first: Optional[Policy] = None

  def segments(self, num_layers: int) -> list[tuple[range, Optional[Policy]]]:
    """Returns the layers that share a policy, and the policy, in the order of the layers."""
    first = min(self.first_layers, num_layers)
    found = [(range(first), self.of_first), (range(first, num_layers), self.policy)]
    return [segment for segment in found if segment[0]]


def over_layers(
  layer: Layer,
  params: Params,
  carry: Tree,
  shared: Tree,
  *,
  dtype: DTypeLike,
  first_layer: Index = 0,
  remat: Remat = Remat(),
  unroll: int = 1,
) -> Tree:
  """Returns `carry` after all layers; each layer is gathered when it runs, or by `Parameter.loop`.

  Args:
    layer: computes one layer; every array that it uses is an argument.
    params: parameters stacked [layers, ...]. A tuple with the parameters of each layer runs without
      a loop, for decoding.
    carry: input of the first layer.
    shared: tree of arrays that all layers share.
    dtype: compute dtype, as in `whole`.
    first_layer: number of the first layer.
    remat: what the layers store for the backward pass.
    unroll: layers per iteration.
  """
  leaves = jax.tree.leaves(params, is_leaf=is_parameter)
  check_runs_once(leaves[0].split.part if is_parameter(leaves[0]) else leaves[0])
  loop = next((p.loop for p in leaves if is_parameter(p) and p.loop is not None), None)
  if loop is not None:
    options = dict(dtype=dtype, first_layer=first_layer, remat=remat, unroll=unroll)
    return loop(layer, params, carry, shared, **options)

  def body(carry: Tree, of_layer: tuple[Params, Index]) -> tuple[Tree, None]:
    split_params, number = of_layer
    return layer(whole(split_params, dtype, wide=True), carry, shared, number), None

  if isinstance(params, tuple):
    for number, of_layer in enumerate(params, first_layer):
      carry, _ = body(carry, (of_layer, number))
    return carry
  segments = remat.segments(num_layers(params))
  for layers, policy in segments:
    unroll_here, policy = min(unroll, len(layers)), keep_policy(policy, params)
    of_segment, one = params, body
    if len(segments) > 1:
      of_segment = jax.tree.map(operator.itemgetter(slice(layers.start, layers.stop)), params)
    if policy is not None:
      # A loop separates forward and backward. If the loop is fully unrolled, XLA would merge the
      # recomputation with the forward pass and save nothing.
      one = jax.checkpoint(body, policy=policy, prevent_cse=unroll_here == len(layers))
    numbers = first_layer + jnp.arange(layers.start, layers.stop)
    carry, _ = jax.lax.scan(one, carry, (of_segment, numbers), unroll=unroll_here)
  return carry


def num_layers(params: Params) -> int:
  """Returns the number of layers that `over_layers` runs of stacked parameters."""
  first = jax.tree.leaves(params, is_leaf=is_parameter)[0]
  return first.num_layers if is_parameter(first) else first.shape[0]


def adds_in_place(params: Params) -> bool:
  """Returns whether the loop of `params` adds gradients to earlier ones."""
  leaves = jax.tree.leaves(params, is_leaf=is_parameter)
  return any(p.adds_in_place for p in leaves if is_parameter(p))


# Primitives that compute a layer's weights from its parameters. Their results are not stored for
# the backward pass; otherwise the weights of all layers would be whole at once.
_MOVES = frozenset(
  {
    'all_gather',
    'shard_map',
    'concatenate',
    'stack',
    'convert_element_type',
    'reshape',
    'transpose',
    'broadcast_in_dim',
    'squeeze',
    'sharding_constraint',
    'custom_vjp_call',  # of `whole`, for parameters that are not differentiated
  }
)


def keep_activations_only(primitive: Primitive, *_: Any, **__: Any) -> bool:
  """A policy for `jax.checkpoint` that stores everything except gathered parameters."""
  return primitive.name not in _MOVES


def _keep_activations_of_padded(primitive: Primitive, *_: Any, **__: Any) -> bool:
  return primitive.name not in _MOVES | {'slice'}


def keep_policy(policy: Optional[Policy], params: Params) -> Optional[Policy]:
  """Returns a remat policy under which the backward pass gathers `params` again."""
  leaves = jax.tree.leaves(params, is_leaf=is_parameter)
  gathered = [x.split for x in leaves if is_parameter(x) and x.split.is_gathered]
  if policy is not None or not gathered:
    return policy
  has_padding = any(x.dims.padding is not None for x in gathered)
  return _keep_activations_of_padded if has_padding else keep_activations_only
