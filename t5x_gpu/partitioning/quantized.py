"""Arrays in 8-bit floating point, with one scale per tensor.

A scale is a power of two. Multiplying by it is then exact, so a value rounds to the same 8 bits
under any scale, unless it is 2^14 times smaller than the largest one. Two devices with other rows,
and so with other scales, still agree. The price is up to one bit of range at the top.
Source: Micikevicius et al. 2022 (FP8 formats for deep learning), sections 3 and 4.
"""

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


@flax.struct.dataclass
class Quantized:
  """An array whose value is `values * scale`.

  Attributes:
    values: in 8 bits; those of an activation as uint8 (layers/fp8.py).
    scale: float32 scalar, a power of two.
    port: an array of the same shape that is never read, so compilers drop it. Its gradient is that
      of the array: `values` would take one in 8 bits only.
  """

  values: jax.Array
  scale: jax.Array
  port: jax.Array

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
  return Quantized(
    function(*(k.values for k in kernels)), kernels[0].scale, function(*(k.port for k in kernels))
  )


def scale_of(largest: jax.Array, dtype: Any) -> jax.Array:
  """Returns the smallest powers of two by which `largest` divided is in the range of `dtype`.

  They are NaN where `largest` is not finite, so that an overflow is seen.

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


@flax.struct.dataclass
class InEightBits:
  """Kernels stacked [layers, ...], with their values in 8 bits, which are made once per step.

  Attributes:
    param: what is differentiated, an array or a Split.
    values: of the part of a Split, or of the whole array.
    scale: [layers], float32.
  """

  param: Any
  values: jax.Array
  scale: jax.Array


def in_8_bits(groups: Sequence[Sequence[Any]]) -> list[list[InEightBits]]:
  """Returns kernels in 8 bits; those of a group share the scale of a layer.

  One collective finds the largest values of all parts.

  Args:
    groups: kernels stacked [layers, ...], arrays or Splits.
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
  if any(fsdp.is_split(param) and param.is_gathered for group in groups for param in group):
    axes = jax.typeof(largest).manual_axis_type.varying
    largest = varying(jax.lax.pmax(largest, 'fsdp'), tuple(axes))

  def convert(param: Any, scale: jax.Array) -> InEightBits:
    x = source(param)
    by_layer = scale.reshape(-1, *(1,) * (x.ndim - 1))
    return InEightBits(param, to_8_bits(x, by_layer, E4M3), scale)

  scales = scale_of(largest, E4M3)
  return [[convert(x, scale) for x in group] for group, scale in zip(groups, scales)]


def whole(tree: Any, dtype: Any) -> Any:
  """Returns `fsdp.whole`, which gathers kernels that are `InEightBits` in 8 bits.

  Those become `Quantized`. The gradient of a part is summed over `fsdp` in float32, as always.

  Args:
    tree: parameters of one layer.
    dtype: compute dtype.
  """

  def leaf(x: Any) -> Any:
    if not isinstance(x, InEightBits):
      return fsdp.whole(x, dtype)
    p = x.param
    if not fsdp.is_split(p):
      return _use(dtype, None, p, None, x.values, x.scale)
    return _use(dtype, (p.dims, p.is_gathered), p.part, p.earlier, x.values, x.scale)

  return jax.tree.map(leaf, tree, is_leaf=_is_parameter)


def _is_parameter(x: Any) -> bool:
  return isinstance(x, (InEightBits, Quantized)) or fsdp.is_split(x)


# How a parameter is split, and whether its parts are gathered; None for one that is not split.
_Use = Optional[tuple[fsdp.Dims, bool]]


def _make_whole(
  dtype: Any,
  use: _Use,
  part: jax.Array,
  earlier: Optional[jax.Array],
  values: jax.Array,
  scale: jax.Array,
) -> Quantized:
  """Returns the whole kernel of a layer; without `use`, its gradient is not summed."""
  del part, earlier
  if use is not None and use[1]:
    values = fsdp.gather(values, use[0])
  return Quantized(values, scale, values.astype(dtype))


def _use_forward(dtype: Any, use: _Use, *args: Any) -> Any:
  return _make_whole(dtype, use, *args), args[1]


def _use_backward(dtype: Any, use: _Use, earlier: Optional[jax.Array], gradient: Quantized) -> Any:
  del dtype
  of_part = gradient.port.astype(jnp.float32)
  return (of_part if use is None else fsdp.reduced(of_part, use[0], earlier)), None, None, None


_use = jax.custom_vjp(_make_whole, nondiff_argnums=(0, 1))
_use.defvjp(_use_forward, _use_backward)
