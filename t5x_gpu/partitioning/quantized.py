"""Arrays in 8-bit floating point, with one scale per tensor.

A scale is a power of two. Multiplying by it is then exact, so a value rounds to the same 8 bits
under any scale, unless it is 2^14 times smaller than the largest value. Two devices with different
rows, and so with different scales, still agree. The price is up to one bit of range at the top.
Source: Micikevicius et al. 2022 (FP8 formats for deep learning), sections 3 and 4.
"""

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.partitioning import fsdp
from t5x_gpu.partitioning.axis_rules import varying

# Four bits of exponent and three of mantissa, for operands of the forward pass; five and two for
# gradients, which need more range.
E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
_SMALLEST = 2.0**-100  # so that the scale of an array of zeros is not 0


class Operand(enum.IntEnum):
  """Place of an operand of a matmul in an `amax`: activation, kernel, gradient of the product."""

  X, KERNEL, GRADIENT = range(3)


@flax.struct.dataclass
class Quantized:
  """An array whose value is `values * scale`.

  Attributes:
    values: values in 8 bits; an activation's as uint8 (layers/fp8.py).
    scale: float32 scalar, a power of two.
    port: an array of the same shape that is never read, so compilers drop it. Its gradient is the
      array's gradient: the gradient of `values` could only have 8 bits.
    amax: for a kernel under delayed scaling: float32 [Operand], the largest values that set the
      scales of its matmuls. Its gradient holds the largest values of this step. Otherwise None.
  """

  values: jax.Array
  scale: jax.Array
  port: jax.Array
  amax: Optional[jax.Array] = None

  @property
  def shape(self) -> tuple[int, ...]:
    return self.values.shape

  @property
  def ndim(self) -> int:
    return self.values.ndim

  def astype(self, dtype: Any) -> 'Quantized':
    """Returns itself: a product has the dtype of the other operand."""
    del dtype
    return self


Kernel = Union[jax.Array, Quantized]


def is_quantized(x: Any) -> bool:
  """Returns whether `x` is a Quantized; an `is_leaf` for tree maps."""
  return isinstance(x, Quantized)


def on_kernels(function: Callable[..., jax.Array], *kernels: Kernel) -> Kernel:
  """Returns `function(*kernels)`, a rearrangement of values; quantized ones have one scale."""
  if not is_quantized(kernels[0]):
    return function(*kernels)
  return kernels[0].replace(
    values=function(*(k.values for k in kernels)), port=function(*(k.port for k in kernels))
  )


def scale_of(largest: jax.Array, dtype: Any) -> jax.Array:
  """Returns the smallest powers of two by which `largest` divided is in the range of `dtype`.

  A scale is NaN where `largest` is not finite, so that an overflow is noticed.

  Args:
    largest: largest absolute values, float32 of any shape.
    dtype: E4M3 or E5M2.
  """
  ratio = jnp.maximum(largest / float(jnp.finfo(dtype).max), _SMALLEST)
  bits = jax.lax.bitcast_convert_type(ratio, jnp.uint32)
  rounded_up = (bits + 0x7FFFFF) & jnp.uint32(0x7F800000)  # no mantissa, the next exponent
  scale = jax.lax.bitcast_convert_type(rounded_up, jnp.float32)
  return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def largest_value(x: jax.Array, *, axis: Any = None) -> jax.Array:
  """Returns the largest absolute value along `axis` (None for all) in float32."""
  return jnp.max(jnp.abs(x), axis=axis).astype(jnp.float32)


def to_8_bits(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
  """Returns `x / scale` in `dtype`; `scale` from `scale_of`."""
  return (x * (1.0 / scale).astype(x.dtype)).astype(dtype)


def saturated(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
  """Returns `to_8_bits`, with values out of range clipped, but infinities as NaN."""
  most = float(jnp.finfo(dtype).max)
  values = jnp.clip(x * (1.0 / scale).astype(x.dtype), -most, most)
  return jnp.where(jnp.isfinite(x), values, jnp.nan).astype(dtype)


def seen(amax: Optional[jax.Array], which: Operand, x: jax.Array) -> Optional[jax.Array]:
  """Returns the gradient of `amax`: the largest value of `x` in its place, 0 in others."""
  return None if amax is None else _at(amax, which, largest_value(x))


def _at(amax: jax.Array, which: Operand, largest: jax.Array) -> jax.Array:
  found = jnp.where(jnp.arange(len(Operand)) == which, largest[..., None], 0.0)
  return varying(found, tuple(jax.typeof(amax).manual_axis_type.varying))


def amaxes_of(tree: Any) -> list[jax.Array]:
  """Returns the `amax` of each kernel of a tree that has one."""
  kernels = [x for x in jax.tree.leaves(tree, is_leaf=is_quantized) if is_quantized(x)]
  return [x.amax for x in kernels if x.amax is not None]


def with_amaxes(tree: Any, amaxes: Sequence[jax.Array]) -> Any:
  """Returns `tree` with the arrays of `amaxes_of` replaced by `amaxes`."""
  rest = iter(amaxes)
  return jax.tree.map(
    lambda x: x.replace(amax=next(rest)) if is_quantized(x) and x.amax is not None else x,
    tree,
    is_leaf=is_quantized,
  )


def copies(x: jax.Array, count: int) -> jax.Array:
  """Returns [count, ...] of an `amax`, one per microbatch; its gradient is the copies' maximum.

  Without copies, autodiff would add the microbatches' values instead of taking their maximum.
  """
  return _copies(count, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _copies(count: int, x: jax.Array) -> jax.Array:
  return jnp.broadcast_to(x, (count, *x.shape))


_copies.defvjp(
  lambda count, x: (_copies(count, x), None), lambda _, __, gradient: (gradient.max(0),)
)


@flax.struct.dataclass
class InEightBits:
  """Kernels stacked [layers, ...], with values in 8 bits that are computed once per step.

  Attributes:
    param: the differentiated parameter, an array or a Split.
    values: 8-bit values of the part of a Split, or of the whole array.
    scale: [layers], float32.
    amax: [layers, Operand], as in `Quantized`.
    largest: [layers], the largest value of this step, which is the gradient of `amax`; or None.
  """

  param: Any
  values: jax.Array
  scale: jax.Array
  amax: Optional[jax.Array] = None
  largest: Optional[jax.Array] = None


def in_8_bits(
  groups: Sequence[Sequence[Any]], amaxes: Optional[Sequence[Sequence[jax.Array]]] = None
) -> list[list[InEightBits]]:
  """Returns kernels in 8 bits; the kernels of a group share one scale per layer.

  One collective finds the largest values of all parts. Delayed scaling does not need a collective.

  Args:
    groups: kernels stacked [layers, ...], arrays or Splits.
    amaxes: [layers, Operand] of each kernel, for delayed scaling; kernels of a group have the same
      largest value of kernels.
  """

  def source(param: Any) -> jax.Array:
    if fsdp.is_split(param):
      param = varying(param.part if param.full is None else param.full, param.dims.sums)
    return jax.lax.stop_gradient(param)

  largest = jnp.stack(
    [
      functools.reduce(
        jnp.maximum, (largest_value(x, axis=tuple(range(1, x.ndim))) for x in map(source, group))
      )
      for group in groups
    ]
  )
  if amaxes is None and any(
    fsdp.is_split(param) and param.is_gathered for group in groups for param in group
  ):
    axes = jax.typeof(largest).manual_axis_type.varying
    largest = varying(jax.lax.pmax(largest, 'fsdp'), tuple(axes))

  def convert(param: Any, scale: jax.Array, *delayed: jax.Array) -> InEightBits:
    x = source(param)
    by_layer = scale.reshape(-1, *(1,) * (x.ndim - 1))
    in_range = saturated if delayed else to_8_bits
    return InEightBits(param, in_range(x, by_layer, E4M3), scale, *delayed)

  if amaxes is None:
    scales = scale_of(largest, E4M3)
    return [[convert(x, scale) for x in group] for group, scale in zip(groups, scales)]
  return [
    [
      convert(x, scale_of(of_group[0][:, Operand.KERNEL], E4M3), amax, most)
      for x, amax in zip(group, of_group)
    ]
    for group, of_group, most in zip(groups, amaxes, largest)
  ]


def whole(tree: Any, dtype: Any) -> Any:
  """Returns `fsdp.whole`, but gathers kernels that are `InEightBits` in 8 bits.

  These become `Quantized`. The gradient of a part is summed over `fsdp` in float32, as always.

  Args:
    tree: parameters of one layer.
    dtype: compute dtype.
  """

  def leaf(x: Any) -> Any:
    if not isinstance(x, InEightBits):
      return fsdp.whole(x, dtype)
    p, of_kernel = x.param, (x.values, x.scale, x.amax, x.largest)
    if not fsdp.is_split(p):
      return _use(dtype, None, p, None, *of_kernel)
    return _use(dtype, (p.dims, p.is_gathered), p.part, p.earlier, *of_kernel)

  return jax.tree.map(leaf, tree, is_leaf=is_parameter)


def is_parameter(x: Any) -> bool:
  """Returns whether `x` is a parameter other than a plain array; an `is_leaf` for tree maps."""
  return isinstance(x, (InEightBits, Quantized)) or fsdp.is_split(x)


def is_gathered(parameter: Any) -> bool:
  """Returns whether `whole` takes an all-gather."""
  p = parameter.param if isinstance(parameter, InEightBits) else parameter
  return fsdp.is_split(p) and p.is_gathered


def is_ahead(parameter: Any) -> bool:
  """Returns whether the loop over layers communicates the parameter one layer ahead."""
  p = parameter.param if isinstance(parameter, InEightBits) else parameter
  return fsdp.is_split(p) and p.dims.ahead


def are_summed_at_end(layers: Sequence[Any]) -> list[bool]:
  """Returns, per parameter, whether the loop over layers sums its gradients after the loop.

  Unsplit parameters are a few kilobytes. Reducing them inside the loop would delay the large
  collectives, so the gradients of all layers are reduced once, after it.
  """
  if not any(map(is_gathered, layers)):
    return [False] * len(layers)
  return [fsdp.is_split(leaf) and leaf.dims.fsdp is None for leaf in layers]


def part(parameter: Any) -> jax.Array:
  """Returns the differentiated array of a parameter, or of its gradient."""
  p = parameter.param if isinstance(parameter, InEightBits) else parameter
  return p.part if fsdp.is_split(p) else p


def without_first(parameter: Any) -> tuple[Any, Optional[jax.Array]]:
  """Returns a parameter without its port for the first layer's gradient, and the port."""
  if isinstance(parameter, InEightBits):
    param, port = without_first(parameter.param)
    return parameter.replace(param=param), port
  if not fsdp.is_split(parameter):
    return parameter, None
  return parameter.replace(first=None), parameter.first


def not_reduced(gradient: Any) -> jax.Array:
  """Returns the gradient of a whole parameter, from one of its uses, in float32."""
  return (gradient.port if is_quantized(gradient) else gradient).astype(jnp.float32)


def as_gradient(parameter: Any, gradient: jax.Array) -> Any:
  """Returns a gradient of `part(parameter)` in the form of a gradient of `parameter`."""
  if isinstance(parameter, InEightBits):
    return InEightBits(as_gradient(parameter.param, gradient), None, None)
  if fsdp.is_split(parameter):
    return parameter.replace(part=gradient, full=None, earlier=None)
  return gradient


# How a parameter is split, and whether its parts are gathered; None if it is not split.
_Use = Optional[tuple[fsdp.Dims, bool]]


def _make_whole(
  dtype: Any,
  use: _Use,
  part: jax.Array,
  earlier: Optional[jax.Array],
  values: jax.Array,
  scale: jax.Array,
  amax: Optional[jax.Array],
  largest: Optional[jax.Array],
) -> Quantized:
  """Returns the whole kernel of a layer; without `use`, its gradient is not summed."""
  del part, earlier, largest
  if use is not None and use[1]:
    values = fsdp.gather(values, use[0])
  return Quantized(values, scale, values.astype(dtype), amax)


def _use_forward(dtype: Any, use: _Use, *args: Any) -> Any:
  _, earlier, _, _, amax, largest = args
  kernel_seen = None if amax is None else _at(amax, Operand.KERNEL, largest)
  return _make_whole(dtype, use, *args), (earlier, kernel_seen)


def _use_backward(dtype: Any, use: _Use, kept: Any, gradient: Quantized) -> Any:
  del dtype
  earlier, kernel_seen = kept
  of_part = gradient.port.astype(jnp.float32)
  of_part = of_part if use is None else fsdp.reduced(of_part, use[0], earlier)
  of_amax = None if kernel_seen is None else gradient.amax + kernel_seen
  return of_part, None, None, None, of_amax, None


_use = jax.custom_vjp(_make_whole, nondiff_argnums=(0, 1))
_use.defvjp(_use_forward, _use_backward)
