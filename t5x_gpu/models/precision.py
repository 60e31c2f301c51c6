"""Kernels that are converted before the matmuls: to 8 bits, or once for all microbatches."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from t5x_gpu.errors import ModelError
from t5x_gpu.layers import fp8
from t5x_gpu.layers.mxfp8 import in_mxfp8
from t5x_gpu.layers.rounded import RoundedOnce, rounded_kernel
from t5x_gpu.partitioning.layer_stacks import Params
from t5x_gpu.partitioning.parameters import Split, as_parameter, is_parameter
from t5x_gpu.runtime.topology import Device

_Leaf = TypeVar('_Leaf')  # an array, or the name or shape of one

# Names of a block's kernels that are multiplied in 8 bits. Kernels of a group share a scale: if
# features are split, one matmul computes the whole group.
KERNELS = (r'query|key|value', r'out', r'wi|wi_\d+', r'wo')
# Stored next to a kernel for delayed scaling: the largest values, for the scales [layers, Operand].
AMAX = 'amax'
LEAVES = ('kernel', AMAX)
# Blocks in which those names have a different meaning.
_OTHERS = ('moe',)


def in_8_bits(layers: Params, scaling: str) -> Params:
  """Returns stacked parameters of layers with `KERNELS` as `fp8.InEightBits` or `mxfp8.InBlocks`.

  Call it before the loop over the layers, with parameters that are not yet gathered. The scales of
  all kernels then cost one collective per step.

  Args:
    layers: parameters [layers, ...] by block, in the region of a step.
    scaling: TransformerConfig.fp8_scaling; a delayed one without `AMAX` is current.
  """
  groups: list[list[Params]] = []
  _on_groups(layers, lambda group: groups.append(group) or group)
  if not groups or _is_converted(groups[0][0]['kernel']):
    return layers
  kernels, amaxes = ([[p.get(name) for p in group] for group in groups] for name in LEAVES)
  if scaling == 'mxfp8':
    done = iter(in_mxfp8(kernels))
  else:
    done = iter(fp8.in_8_bits(kernels, None if amaxes[0][0] is None else amaxes))

  def converted(group: list[Params]) -> list[Params]:
    others = [{name: x for name, x in p.items() if name not in LEAVES} for p in group]
    return [{**p, 'kernel': kernel} for p, kernel in zip(others, next(done), strict=True)]

  return _on_groups(layers, converted)


def _is_converted(kernel: Any) -> bool:
  return fp8.is_quantized(kernel) or (is_parameter(kernel) and kernel.is_converted)


def kernels_converted_once(
  layers: Params, dtype: DTypeLike, *, scaling: Optional[str], rounds: bool
) -> Callable[[Params], Params]:
  """Returns a function that adds the converted kernels of `layers` to the same parameters.

  Call it before a loop in which layers run several times, such as the ticks of a pipeline; call the
  function inside, with the parameters to differentiate. Each iteration would convert them again.

  Args:
    layers: parameters [layers, ...] by block, which every device holds whole.
    dtype: compute dtype.
    scaling: `fp8_scaling_of(model)`.
    rounds: whether kernels that are not in 8 bits are rounded to `dtype`.
  """
  if scaling is not None:
    layers = in_8_bits(layers, scaling)
  elif rounds:
    layers = _on_groups(layers, lambda group: [_rounded(p, dtype, _rounded_stack) for p in group])
  done: list[Any] = []
  _on_groups(layers, lambda group: done.extend(p['kernel'] for p in group) or group)

  def added(layers: Params) -> Params:
    kernels = iter(done)

    def one(p: Params) -> Params:
      kernel = next(kernels)
      if not _is_converted(kernel):
        return p
      return {**p, 'kernel': as_parameter(p['kernel']).convert(lambda s: kernel.replace(param=s))}

    return _on_groups(layers, lambda group: [one(p) for p in group])

  return added


def _rounded_stack(kernel: jax.Array, dtype: DTypeLike) -> RoundedOnce:
  return RoundedOnce(Split(kernel), jax.lax.stop_gradient(kernel.astype(dtype)))


def rounded_once(layer: Params, dtype: DTypeLike) -> Params:
  """Returns a layer's parameters with its float32 `KERNELS` as `RoundedKernel`s in `dtype`.

  In a loop over microbatches, each iteration would round them again. Kernels in 8 bits, and all
  parameters if `dtype` is float32, are unchanged.

  Args:
    layer: whole parameters of a layer by block.
    dtype: compute dtype.
  """
  return _on_groups(layer, lambda group: [_rounded(p, dtype, rounded_kernel) for p in group])


def _rounded(p: Params, dtype: DTypeLike, make: Callable[..., Any]) -> Params:
  """Returns `p` with the kernel `make(kernel, dtype)`, unless it is as narrow or in 8 bits."""
  kernel = p['kernel']
  if fp8.is_quantized(kernel) or jnp.dtype(dtype).itemsize >= kernel.dtype.itemsize:
    return p
  return {**p, 'kernel': make(kernel, dtype)}


def amaxes_like(layers: Params, make: Callable[[_Leaf], _Leaf]) -> Params:
  """Returns the subtree of `layers` with `AMAX` = make(kernel) in place of each of `KERNELS`."""

  def pruned(tree: Params) -> Params:
    kept = {
      name: inner if AMAX in inner else pruned(inner)
      for name, inner in tree.items()
      if isinstance(inner, Mapping)
    }
    return {name: inner for name, inner in kept.items() if inner}

  return pruned(_on_groups(layers, lambda group: [{AMAX: make(p['kernel'])} for p in group]))


def _on_groups(params: Params, function: Callable[[list[Params]], list[Params]]) -> Params:
  """Returns `params` with `function` applied to the linear maps of each group, in a fixed order.

  Args:
    params: parameters [layers, ...] by block.
    function: takes a list of parameters with a 'kernel', such as query, key and value.
  """
  result = dict(params)
  for group in KERNELS:
    names = [
      name
      for name, inner in params.items()
      if re.fullmatch(group, name) and isinstance(inner, Mapping) and 'kernel' in inner
    ]
    if names:
      result |= zip(names, function([params[name] for name in names]), strict=True)
  for name, inner in params.items():
    if name not in _OTHERS and isinstance(inner, Mapping) and result[name] is inner:
      result[name] = _on_groups(inner, function)
  return result


# Minimum compute capability of NVIDIA GPUs that multiply FP8, and MXFP8.
FP8_CAPABILITY = 8.9
MXFP8_CAPABILITY = 10.0


def check_devices(scaling: Optional[str], devices: Sequence[Device]) -> None:
  """Raises ModelError if a model in FP8 has a GPU that cannot multiply its operands.

  Args:
    scaling: `fp8_scaling_of(model)`.
    devices: devices of the mesh, or GpuTargets. Devices without a `compute_capability` pass, such
      as CPUs, which emulate FP8.
  """
  capabilities = {
    (d.device_kind, d.compute_capability) for d in devices if getattr(d, 'compute_capability', None)
  }

  def below(least: float) -> str:
    return ' and '.join(kind for kind, c in sorted(capabilities) if float(c) < least)

  if scaling is not None and below(FP8_CAPABILITY):
    raise ModelError(
      f"PRECISION = 'fp8', and {below(FP8_CAPABILITY)} cannot multiply FP8: that takes compute "
      f'capability {FP8_CAPABILITY} (L4, L40S, RTX 4090), 9.0 (H100, H200) or later (B200, GB200).',
      fix="Set PRECISION = 'bfloat16', or run on one of these GPUs.",
      parameters=('TransformerConfig.dtype',),
      docs='precision.md#fp8',
    )
  if scaling == 'mxfp8' and below(MXFP8_CAPABILITY):
    raise ModelError(
      f"TransformerConfig.fp8_scaling = 'mxfp8', and {below(MXFP8_CAPABILITY)} cannot multiply "
      f'MXFP8: that takes compute capability {MXFP8_CAPABILITY} (B200, GB200) or later.',
      fix="Set TransformerConfig.fp8_scaling = 'current', or run on one of these GPUs.",
      parameters=('TransformerConfig.fp8_scaling',),
      docs='precision.md#mxfp8',
    )


def check_mesh(scaling: Optional[str], num_partitions: int) -> None:
  """Raises ModelError if `model` splits kernels in MXFP8.

  Args:
    scaling: `fp8_scaling_of(model)`.
    num_partitions: size of `model`.
  """
  if scaling == 'mxfp8' and num_partitions > 1:
    raise ModelError(
      f"TransformerConfig.fp8_scaling = 'mxfp8' with NUM_PARTITIONS = {num_partitions}: XLA cannot "
      'split its matmuls over `model`.',
      fix="Set NUM_PARTITIONS = 1 and use fsdp, or TransformerConfig.fp8_scaling = 'current'.",
      parameters=('TransformerConfig.fp8_scaling', 'Partitioner.num_partitions'),
      docs='precision.md#mxfp8',
    )
