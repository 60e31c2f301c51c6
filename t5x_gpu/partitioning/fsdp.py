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

The parts, in order: the dimension that `fsdp` splits and its padding; collectives along a manual
axis (`all_gather`, `psum_scatter`, `psum`), also in bfloat16; rules and traffic; parameters inside
the region (`Split`, `whole`), whose gradients the backward pass reduces.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_gpu.partitioning.axis_rules import AxisNames, AxisRules, FsdpDim, Table, varying
from t5x_gpu.terminal.console import show


def own_table(names: AxisNames, table: Table) -> Table:
  """Returns `table` for one array, with `fsdp` at the axis that was chosen for it."""
  if names.fsdp is None or not any('fsdp' in table.get(name, ()) for name in names.names):
    return table
  others = {name: tuple(a for a in axes if a != 'fsdp') for name, axes in table.items()}
  return {**others, names.fsdp.name: (*others.get(names.fsdp.name, ()), 'fsdp')}


AXIS = 'fsdp'
OTHERS = ('mlp', 'vocab', 'heads', 'kv_heads', 'kv')
# Factor of `fsdp` over which an array that must not be padded is repeated.
COPIES = 'fsdp_copies'


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
    names: from `choose`.
    table: array axis -> mesh axes.
    mesh_shape: mesh axis -> size.
  """
  if names.fsdp is None or AXIS not in own_table(names, table).get(names.fsdp.name, ()):
    return None
  zeros = -names.fsdp.size % mesh_shape.get(AXIS, 1)
  dim = names.names.index(names.fsdp.name) - len(names.names)
  return Padding(dim, names.fsdp.size, zeros) if zeros else None


def padded(x: jax.Array, names: AxisNames, *, table: Table, mesh_shape: Mapping[str, int]) -> Any:
  """Returns a global array with its padding, split by `table`; to be traced."""
  padding = padding_of(names, table=table, mesh_shape=mesh_shape)
  if padding is None:
    return x
  return jax.lax.with_sharding_constraint(padding.added(x), _spec(names, table))


def unpadded(x: jax.Array, names: AxisNames, *, table: Table, mesh_shape: Mapping[str, int]) -> Any:
  """Returns a global array without its padding, split in the same unequal parts; to be traced.

  XLA pads these parts by itself, so nothing moves.
  """
  padding = padding_of(names, table=table, mesh_shape=mesh_shape)
  if padding is None:
    return x
  return jax.lax.with_sharding_constraint(padding.removed(x), _spec(names, table))


def _spec(names: AxisNames, table: Table) -> PartitionSpec:
  own = own_table(names, table)
  return PartitionSpec(*(own.get(name, ()) or None for name in names.names))


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


def cost_lines(stored: Any, true: Any, names: Any, *, ways: int) -> list[str]:
  """Returns the cost of arrays that do not divide over `ways` devices; [] if all divide.

  Args:
    stored: tree of shapes with NamedShardings, padding included.
    true: the same tree without padding, as checkpoints store it.
    names: tree of AxisNames from `choose`.
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


def _axes(sharding: NamedSharding) -> set[str]:
  entries = [e if isinstance(e, tuple) else (e,) for e in sharding.spec]
  return {axis for entry in entries for axis in entry if axis}


def _local_bytes(array: Any) -> int:
  return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _size(num_bytes: float) -> str:
  return show(num_bytes, GiB='.2f', MiB='.3g')


# Collectives along a manual axis. The arrays may also be split over `model`, which is automatic in
# the region: XLA would first gather all parts on every device; here each part is sent alone. Call
# these only where they are not differentiated: in the two functions of a `jax.custom_vjp`.
#
# Part of the names of operations that send gradients in bfloat16.
SCOPE = 'gradients_in_bfloat16'


@dataclasses.dataclass(frozen=True)
class InBfloat16:
  """Settings for gradients sent in bfloat16: which devices share a host.

  NCCL adds bfloat16 data in bfloat16, and rounds at each hop of a ring (ncclAllReduce takes one
  datatype, https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/colls.html). Here an
  all-to-all brings the terms of a device's part together, and the device adds them in float32. An
  all-reduce then gathers the rounded sums. This sends as many values as a ring. Each term is
  rounded once, by at most 2^-8 of its value; the sum of an all-reduce is rounded once too, equally
  on all devices. Over several hosts, the devices of a host first add their terms, so that as many
  values cross the network as in a ring; the hosts' sums are rounded once more.

  Attributes:
    inside: (mesh axis, size of its part inside a host) for each axis that crosses hosts.
  """

  inside: tuple[tuple[str, int], ...] = ()

  def hosts(self, axes: Sequence[str], sizes: Sequence[int]) -> list[list[int]]:
    """Returns per host the flat places of its devices along `axes`; all places for a single host.

    Args:
      axes: mesh axes.
      sizes: sizes of the axes.
    """
    inside = dict(self.inside)
    by_host: dict[tuple[int, ...], list[int]] = {}
    for place, of_axes in enumerate(itertools.product(*map(range, sizes))):
      host = tuple(i // inside.get(axis, n) for i, axis, n in zip(of_axes, axes, sizes))
      by_host.setdefault(host, []).append(place)
    return list(by_host.values())


def all_gather(x: jax.Array, axis: str, *, dim: int, model_dim: Optional[int] = None) -> jax.Array:
  """Returns the parts of all devices of `axis`, concatenated along a dimension.

  Args:
    x: this device's part.
    axis: a manual mesh axis.
    dim: the dimension, counted from the last one (-1).
    model_dim: the dimension that `model` splits, counted the same way, or None.
  """
  return _on_each_part(
    lambda part: jax.lax.all_gather(part, axis, axis=part.ndim + dim, tiled=True), x, model_dim
  )


def psum_scatter(
  x: jax.Array,
  axis: str,
  *,
  dim: int,
  model_dim: Optional[int] = None,
  sent: Optional[InBfloat16] = None,
) -> jax.Array:
  """Returns this device's part of the sum of `x` over `axis`.

  Args:
    x: a term of the sum.
    axis, dim, model_dim: as in `all_gather`.
    sent: how to send in bfloat16; the result is float32. None sends and adds in the dtype of `x`.
  """

  def scatter(part: jax.Array) -> jax.Array:
    at = part.ndim + dim
    if sent is None:
      return jax.lax.psum_scatter(part, axis, scatter_dimension=at, tiled=True)
    size = jax.lax.axis_size(axis)
    shape = (*part.shape[:at], size, part.shape[at] // size, *part.shape[at + 1 :])
    return _own_sum(jnp.moveaxis(part.reshape(shape), at, 0), (axis,), sent)

  with jax.named_scope(SCOPE) if sent else contextlib.nullcontext():
    return _on_each_part(scatter, x, model_dim)


def psum(
  x: jax.Array,
  axes: tuple[str, ...],
  *,
  model_dim: Optional[int] = None,
  sent: Optional[InBfloat16] = None,
) -> jax.Array:
  """Returns the sum of `x` over manual mesh `axes`, the same on all devices.

  Args:
    x: a term of the sum.
    axes: manual mesh axes.
    model_dim: as in `all_gather`.
    sent: as in `psum_scatter`.
  """
  if sent is None or not axes:
    return jax.lax.psum(x, axes) if axes else x

  def total(part: jax.Array) -> jax.Array:
    size = math.prod(map(jax.lax.axis_size, axes))
    flat = jnp.pad(part.reshape(-1), (0, -part.size % size))
    own = _own_sum(flat.reshape(size, -1), axes, sent)
    whole = jax.lax.all_gather(_rounded(own), axes, tiled=True, to='invarying')
    return whole[: part.size].reshape(part.shape).astype(jnp.float32)

  with jax.named_scope(SCOPE):
    return _on_each_part(total, x, model_dim)


def _own_sum(parts: jax.Array, axes: tuple[str, ...], sent: InBfloat16) -> jax.Array:
  """Returns the sum over `axes` of this device's part [...] of `parts` [devices, ...]."""
  hosts = sent.hosts(axes, tuple(map(jax.lax.axis_size, axes)))
  exchange = functools.partial(
    jax.lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True
  )
  if len(hosts) == 1 or len(hosts[0]) == 1:
    return exchange(_rounded(parts)).astype(jnp.float32).sum(0)
  order = [host[i] for i in range(len(hosts[0])) for host in hosts]
  parts = _rounded(parts[jnp.asarray(order)]).reshape(len(hosts[0]), len(hosts), *parts.shape[1:])
  of_host = exchange(parts, axis_index_groups=hosts).astype(jnp.float32).sum(0)
  across = [list(places) for places in zip(*hosts)]
  return exchange(_rounded(of_host), axis_index_groups=across).astype(jnp.float32).sum(0)


def _rounded(x: jax.Array) -> jax.Array:
  """Returns `x` rounded to bfloat16. XLA may drop a pair of conversions, but not this rounding."""
  return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def _on_each_part(
  collective: Callable[[jax.Array], jax.Array], x: jax.Array, model_dim: Optional[int]
) -> jax.Array:
  if model_dim is None:
    return collective(x)
  spec = PartitionSpec(*('model' if i == x.ndim + model_dim else None for i in range(x.ndim)))
  return jax.shard_map(collective, in_specs=spec, out_specs=spec, axis_names={'model'})(x)


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


@dataclasses.dataclass(frozen=True)
class Dims:
  """How a parameter is split, and over which other mesh axes its gradient is summed.

  Dimensions are counted from the last one (-1), because a scan removes the first.

  Attributes:
    fsdp: dimension that `fsdp` splits; None for a parameter that is whole on every device.
    model: dimension that `model` splits, or None.
    padding: zeros that make the parts equal, or None.
    sums: mesh axes over which the backward pass sums the gradient, besides `fsdp`.
    ahead: whether the loop over layers communicates one layer ahead (overlap.py).
    sent: how the gradient is sent in bfloat16; None to send float32.
  """

  fsdp: Optional[int] = None
  model: Optional[int] = None
  padding: Optional[Padding] = None
  sums: tuple[str, ...] = ()
  ahead: bool = False
  sent: Optional[InBfloat16] = None


def dims_of(
  names: AxisNames,
  *,
  table: Table,
  mesh_shape: Mapping[str, int],
  sent: Optional[InBfloat16] = None,
) -> Dims:
  """Returns how a parameter is split between steps, without the sums of its gradient.

  Args:
    names: axis names of the parameter.
    table: array axis -> mesh axes, of the optimizer state.
    mesh_shape: mesh axis -> size.
    sent: how gradients that `in_bfloat16` allows are sent in bfloat16; None to send float32.
  """
  own = own_table(names, table)

  def dim_of(axis: str) -> Optional[int]:
    if mesh_shape.get(axis, 1) == 1:
      return None
    places = [i for i, name in enumerate(names.names) if axis in own.get(name, ())]
    return places[0] - len(names.names) if places else None

  padding = padding_of(names, table=own, mesh_shape=mesh_shape)
  sent = sent if in_bfloat16(names.names) else None
  return Dims(dim_of('fsdp'), dim_of('model'), padding, sent=sent)


def in_bfloat16(names: Sequence[Optional[str]]) -> bool:
  """Returns whether the gradient of a parameter can be sent in bfloat16.

  Gradients of vectors (scales of norms, biases) stay in float32. They are small, and one all-reduce
  carries several.
  """
  return sum(name != 'layers' for name in names) > 1


@flax.struct.dataclass
class Split:
  """A parameter inside the region, whose gradient the backward pass reduces.

  Attributes:
    part: this device's part, which is differentiated.
    full: the whole parameter if every device has it (stage 2, pipelines), else None.
    dims: the dimensions that are split.
    earlier: gradient of earlier microbatches, whole or scattered over `fsdp`, but not yet summed
      over `dims.sums`; None if there are no earlier microbatches.
    first: for a stack of layers, a port [of the whole parameter of one layer] that takes the
      gradient of the first layer before it is reduced (`region.with_ports`); its value is never
      read. None to reduce the first layer's gradient like the other layers' gradients.
  """

  part: jax.Array
  full: Optional[jax.Array]
  dims: Dims = flax.struct.field(pytree_node=False)
  earlier: Optional[jax.Array] = None
  first: Optional[jax.Array] = None

  def scaled(self, factor: float) -> 'Split':
    """Returns `factor` times the parameter."""
    part, full, first = jax.tree.map(lambda x: x * factor, (self.part, self.full, self.first))
    earlier = None if self.earlier is None else self.earlier / factor
    return self.replace(part=part, full=full, earlier=earlier, first=first)

  @property
  def is_gathered(self) -> bool:
    """Whether using the parameter takes an all-gather."""
    return self.full is None and self.dims.fsdp is not None


def is_split(x: Any) -> bool:
  """Returns whether `x` is a parameter in parts; an `is_leaf` for tree maps."""
  return isinstance(x, Split)


def whole(tree: Any, dtype: Any) -> Any:
  """Returns `tree` with every `Split` gathered, in `dtype`; other leaves unchanged.

  Models call it as late as possible, once per layer, so that only one layer's parameters are whole
  at a time. The gradient of a part is summed over `fsdp` in float32.

  Args:
    tree: parameters as passed to a model's `loss`.
    dtype: compute dtype; bfloat16 sends half as many bytes as float32.
  """
  return jax.tree.map(
    lambda x: _use(dtype, x.dims, x.part, x.full, x.earlier) if is_split(x) else x,
    tree,
    is_leaf=is_split,
  )


def gather(part: jax.Array, dims: Dims) -> jax.Array:
  """Returns a parameter gathered from its parts; cannot be differentiated through."""
  full = all_gather(part, 'fsdp', dim=dims.fsdp, model_dim=dims.model)
  return full if dims.padding is None else dims.padding.removed(full)


def scatter(gradient: jax.Array, dims: Dims) -> jax.Array:
  """Returns this device's part of the sum of `gradient` over `fsdp`."""
  if dims.padding is not None:
    gradient = dims.padding.added(gradient)
  return psum_scatter(gradient, 'fsdp', dim=dims.fsdp, model_dim=dims.model, sent=dims.sent)


def reduced(gradient: jax.Array, dims: Dims, earlier: Optional[jax.Array] = None) -> jax.Array:
  """Returns this device's part of the sum of `gradient` over `fsdp` and `dims.sums`, in float32.

  Args:
    gradient: gradient of the whole parameter, from this device's rows.
    dims: how the parameter is split.
    earlier: as in `Split`; added before summing over the axes along which it is not yet summed.
  """
  gradient = gradient.astype(jnp.float32)
  if earlier is not None and earlier.shape == gradient.shape:
    gradient, earlier = gradient + earlier, None
  if dims.fsdp is not None:
    gradient = scatter(gradient, dims)
  if earlier is not None:
    gradient = gradient + earlier
  return total(gradient, dims)


def total(gradient: jax.Array, dims: Dims) -> jax.Array:
  """Returns the sum of `gradient` over `dims.sums`."""
  return psum(gradient, dims.sums, model_dim=dims.model, sent=dims.sent)


def summed(parameter: jax.Array, dims: Dims, earlier: Optional[jax.Array] = None) -> jax.Array:
  """Returns `parameter`; the backward pass sums its gradient over `dims.sums`.

  For a parameter with several uses: reduces its gradient once, after adding all uses.
  """
  if not dims.sums and earlier is None:
    return parameter
  return _use(None, dataclasses.replace(dims, fsdp=None), parameter, None, earlier)


def make_whole(dtype: Any, dims: Dims, part: jax.Array, full: Optional[jax.Array]) -> jax.Array:
  """Returns the whole parameter, in `dtype` if it is split; cannot be differentiated through."""
  part = varying(part, dims.sums)
  if dims.fsdp is None:
    return part if full is None else full
  return gather(part.astype(dtype), dims) if full is None else full.astype(dtype)


def _use_primal(
  dtype: Any, dims: Dims, part: jax.Array, full: Optional[jax.Array], earlier: Optional[jax.Array]
) -> jax.Array:
  del earlier
  return make_whole(dtype, dims, part, full)


def _use_forward(
  dtype: Any, dims: Dims, part: jax.Array, full: Optional[jax.Array], earlier: Optional[jax.Array]
) -> Any:
  return make_whole(dtype, dims, part, full), (full, earlier)


def _use_backward(dtype: Any, dims: Dims, kept: Any, gradient: jax.Array) -> Any:
  del dtype
  full, earlier = kept
  return (reduced(gradient, dims, earlier), *jax.tree.map(jnp.zeros_like, (full, earlier)))


_use = jax.custom_vjp(_use_primal, nondiff_argnums=(0, 1))
_use.defvjp(_use_forward, _use_backward)

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


def keep_activations_only(primitive: Any, *_: Any, **__: Any) -> bool:
  """A policy for `jax.checkpoint` that stores everything except gathered parameters."""
  return primitive.name not in _MOVES


def _keep_activations_of_padded(primitive: Any, *_: Any, **__: Any) -> bool:
  return primitive.name not in _MOVES | {'slice'}


def keep_policy(
  policy: Optional[Callable[..., bool]], params: Any
) -> Optional[Callable[..., bool]]:
  """Returns a remat policy under which the backward pass gathers `params` again."""
  split = [x for x in jax.tree.leaves(params, is_leaf=is_split) if is_split(x) and x.is_gathered]
  if policy is not None or not split:
    return policy
  has_padding = any(x.dims.padding is not None for x in split)
  return _keep_activations_of_padded if has_padding else keep_activations_only
