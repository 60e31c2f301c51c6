"""Fully sharded data parallelism (ZeRO): also splits optimizer state, gradients and parameters.

What is split: `batch` of activations over `fsdp`. `zero_stage` adds `embed` (or another dimension,
see fsdp_dims.py) of
 1. the optimizer state: gradients are reduce-scattered once per step, the updated parameters
    gathered once;
 2. and gradients: each layer's are reduce-scattered as soon as the backward pass has them;
  3. and parameters: each layer's are gathered before use, forward and again backward.
What moves, per device and step, for P bytes of parameters over n devices: (n - 1) / n x 2 P for
stages 1 and 2 (like plain data parallelism), x 3 P for stage 3. The number of microbatches does not
matter: stages 2 and 3 take all of them through a layer together (training/breadth_first.py). In a
pipeline, stage 3 gathers the parameters of a stage once per step; stored parameters stay split.
When: parameters and optimizer state do not fit on one GPU. Try it before tensor parallelism.
Source: Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (PyTorch FSDP).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.partitioning import manual_collectives
from t5x_gpu.partitioning.arrays import fsdp_dims
from t5x_gpu.partitioning.arrays.fsdp_dims import Padding
from t5x_gpu.partitioning.axis_rules import AxisNames, AxisRules, Table, own_table, varying
from t5x_gpu.partitioning.manual_collectives import InBfloat16

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
    ahead: whether the loop over layers communicates one layer ahead (layer_loop.py).
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

  padding = fsdp_dims.padding_of(names, table=own, mesh_shape=mesh_shape)
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
      gradient of the first layer before it is reduced (first_layer.py); its value is never read.
      None to reduce the first layer's gradient like the other layers' gradients.
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
  full = manual_collectives.all_gather(part, 'fsdp', dim=dims.fsdp, model_dim=dims.model)
  return full if dims.padding is None else dims.padding.removed(full)


def scatter(gradient: jax.Array, dims: Dims) -> jax.Array:
  """Returns this device's part of the sum of `gradient` over `fsdp`."""
  if dims.padding is not None:
    gradient = dims.padding.added(gradient)
  return manual_collectives.psum_scatter(
    gradient, 'fsdp', dim=dims.fsdp, model_dim=dims.model, sent=dims.sent
  )


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
  return manual_collectives.psum(gradient, dims.sums, model_dim=dims.model, sent=dims.sent)


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
