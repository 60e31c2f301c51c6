"""Matmuls of arrays in 8 bits, forward and backward.

Forward, both operands are E4M3; backward, the gradient of the product is E5M2. GPUs multiply 8-bit
operands directly and accumulate in float32. The scales multiply the product: if operands were
scaled back first (quantize, dequantize, multiply), XLA would compile a bfloat16 GEMM.

Scales follow from the current values; or, with delayed scaling, from the largest values of earlier
steps (`Quantized.amax`). The largest values of this step are then returned as the gradient of
`amax`.
Source: Micikevicius et al. 2022 (FP8 formats for deep learning), section 3.
"""

import dataclasses
from typing import Any, Optional, Union

import jax
import jax.numpy as jnp

from t5x_gpu.partitioning.quantized import (
  E4M3,
  E5M2,
  Kernel,
  Operand,
  Quantized,
  is_quantized,
  largest_value,
  saturated,
  scale_of,
  seen,
  to_8_bits,
)


def contract(x: Union[jax.Array, Quantized], kernel: Kernel, num_in: int = 1) -> jax.Array:
  """Returns the product over the last `num_in` dimensions of `x` and the first of `kernel`.

  Args:
    x: [..., inputs].
    kernel: [inputs, features]; if it is quantized, 8-bit operands are multiplied.
    num_in: number of dimensions of `inputs`.
  """
  if not is_quantized(kernel):
    return jnp.tensordot(x, kernel, num_in)
  x = operand(x, kernel)
  product = _Product(num_in, x.port.dtype, kernel.port.dtype)
  return _product(product, *_arrays(x), *_arrays(kernel), kernel.amax)


def operand(x: Union[jax.Array, Quantized], kernel: Kernel) -> Union[jax.Array, Quantized]:
  """Returns `x` as an operand of several products with kernels like `kernel`."""
  if is_quantized(x) or not is_quantized(kernel):
    return x
  return quantized(x, kernel.amax)


def _quantized(x: jax.Array, amax: Optional[jax.Array]) -> Quantized:
  values, scale = _converted(x, E4M3, amax, Operand.X)
  # As bits, because `jax.checkpoint` passes saved values through `reduce_precision`, which turns
  # E4M3 values above 240 into infinities (jax 0.10 to 0.12).
  return Quantized(jax.lax.bitcast_convert_type(values, jnp.uint8), scale, x)


quantized = jax.custom_vjp(_quantized)
quantized.__doc__ = 'Returns `x` in E4M3, as bits; the gradient of `port` is its gradient.'
quantized.defvjp(
  lambda x, amax: (_quantized(x, amax), seen(amax, Operand.X, x)),
  lambda x_seen, gradient: (gradient.port, x_seen),
)


def _e4m3(values: jax.Array) -> jax.Array:
  return values if values.dtype == E4M3 else jax.lax.bitcast_convert_type(values, E4M3)


def _converted(
  x: jax.Array, dtype: Any, amax: Optional[jax.Array], which: Operand
) -> tuple[jax.Array, jax.Array]:
  """Returns (values, scale) of `x`.

  Without `amax`, the largest value is taken over this device's rows and positions, without a
  collective; along `model`, which the compiler handles, it is taken over all parts.
  """
  if amax is not None:
    scale = scale_of(amax[which], dtype)
    return saturated(x, scale, dtype), scale
  scale = scale_of(largest_value(x), dtype)
  return to_8_bits(x, scale, dtype), scale


def _arrays(x: Quantized) -> tuple[jax.Array, jax.Array, jax.Array]:
  return x.values, x.scale, x.port


@dataclasses.dataclass(frozen=True)
class _Product:
  """A product over `num_in` dimensions; gradients have the dtypes of the ports."""

  num_in: int
  x_dtype: Any
  kernel_dtype: Any


def _multiply(
  p: _Product, x8: Any, x_scale: Any, x: Any, w8: Any, w_scale: Any, w: Any, amax: Any
) -> Any:
  """Returns [..., features] in the dtype of the port `x`."""
  del x, w, amax
  last, first = tuple(range(x8.ndim - p.num_in, x8.ndim)), tuple(range(p.num_in))
  return _dot(_e4m3(x8), w8, (last, first), x_scale * w_scale, p.x_dtype)


def _dot(a: jax.Array, b: jax.Array, contracted: Any, scale: jax.Array, dtype: Any) -> jax.Array:
  product = jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=dtype)
  return product * scale.astype(dtype)


def _forward(
  p: _Product, x8: Any, x_scale: Any, x: Any, w8: Any, w_scale: Any, w: Any, amax: Any
) -> Any:
  return _multiply(p, x8, x_scale, x, w8, w_scale, w, amax), (x8, x_scale, w8, w_scale, amax)


def _backward(p: _Product, saved: Any, gradient: jax.Array) -> Any:
  x8, x_scale, w8, w_scale, amax = saved
  g8, g_scale = _converted(gradient, E5M2, amax, Operand.GRADIENT)
  rows = tuple(range(x8.ndim - p.num_in))
  features = tuple(range(len(rows), g8.ndim)), tuple(range(p.num_in, w8.ndim))
  dx = _dot(g8, w8, features, g_scale * w_scale, p.x_dtype)
  dw = _dot(_e4m3(x8), g8, (rows, rows), x_scale * g_scale, p.kernel_dtype)
  return None, None, dx, None, None, dw, seen(amax, Operand.GRADIENT, gradient)


_product = jax.custom_vjp(_multiply, nondiff_argnums=(0,))
_product.defvjp(_forward, _backward)
