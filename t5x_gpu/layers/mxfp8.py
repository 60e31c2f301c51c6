"""Kernels whose matmuls multiply MXFP8: 8-bit floats with a scale for every 32 values.

The 32 values are neighbors along the contracted dimension, so a product adds up blocks, each times
the two scales of its operands. The gradient of the input contracts features, and the gradient of
the kernel contracts rows: each of the three products converts both operands from the original
values. All values are E4M3, also of gradients: each block has its own range. Scales are powers of
two in 8 bits (E8M0), rounded up, so nothing is clipped.

Blackwell multiplies this format by a custom call that XLA turns into a kernel of cuDNN. CPUs
multiply the scaled values in float32, which gives the same up to the order of the sums.
Source: OCP Microscaling Formats (MX) 1.0, sections 5 and 6.3; NVIDIA Transformer Engine,
MXFP8BlockScaling, for E4M3 in every operand and for rounding up.
"""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from t5x_gpu.layers.backends.choose import hardware
from t5x_gpu.layers.fp8 import E4M3, PRODUCT, LowPrecisionKernel, largest_value, scale_of, to_8_bits
from t5x_gpu.partitioning.axis_rules import varying
from t5x_gpu.partitioning.parameters import Parameter, Split, Wrapper, as_parameter
from t5x_gpu.partitioning.trees import DTypeLike, Tree

BLOCK = 32  # values that share a scale


@flax.struct.dataclass
class BlockKernel(LowPrecisionKernel):
  """A kernel whose matmuls convert both operands to MXFP8.

  Attributes:
    array: [inputs..., features...], not yet converted; differentiated.
  """

  array: jax.Array

  @property
  def shape(self) -> tuple[int, ...]:
    return self.array.shape

  def rearranged(
    self, function: Callable[..., jax.Array], *others: LowPrecisionKernel
  ) -> 'BlockKernel':
    return BlockKernel(function(self.array, *(kernel.array for kernel in others)))

  def product(self, x: jax.Array, num_in: int) -> jax.Array:
    axes = tuple(_axes_of(x) | _axes_of(self.array))
    return _product(num_in, varying(x, axes), varying(self.array, axes))


@flax.struct.dataclass
class InBlocks(Wrapper):
  """A parameter that is whole as a `BlockKernel`; `fsdp` gathers the original values."""

  param: Split

  def whole(self, dtype: DTypeLike, *, wide: bool = False) -> BlockKernel:
    return BlockKernel(self.param.whole(dtype, wide=wide))

  def as_gradient(self, part: jax.Array, others: Tree) -> 'InBlocks':
    return InBlocks(self.param.as_gradient(part, others))

  def others(self, gradient: BlockKernel) -> None:
    del gradient

  def unreduced(self, gradient: BlockKernel) -> jax.Array:
    return gradient.array.astype(jnp.float32)


def in_mxfp8(groups: Sequence[Sequence[Any]]) -> list[list[Parameter]]:
  """Returns groups of kernels stacked [layers, ...], arrays or Parameters, as `InBlocks`."""
  return [[as_parameter(kernel).convert(InBlocks) for kernel in group] for group in groups]


def in_blocks(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (values in E4M3 [rows, n], exponents [rows, n / 32]) of `x` [rows, columns].

  `n` is the number of columns, rounded up to whole blocks with zeros. A block's value is
  `values * 2^(exponent - 127)`; the exponent is 255, NaN in E8M0, if a value is not finite.
  """
  rows, columns = x.shape
  blocks = jnp.pad(x, ((0, 0), (0, -columns % BLOCK))).reshape(rows, -1, BLOCK)
  scales = scale_of(largest_value(blocks, axis=-1), E4M3)
  values = to_8_bits(blocks, scales[..., None], E4M3).reshape(rows, -1)
  bits = jax.lax.bitcast_convert_type(scales, jnp.uint32)
  return values, (bits >> 23 & 0xFF).astype(jnp.uint8)


def multiply(a: jax.Array, b: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Returns [m, n] in `dtype`, the product of `a` [m, inner] and `b` [n, inner] in MXFP8."""
  operands = in_blocks(a), in_blocks(b)
  if hardware().platform == 'gpu':
    return _kernel(*operands, dtype)
  scaled = (
    values.astype(jnp.float32) * jnp.repeat(_scales(exponents), BLOCK, axis=-1)
    for values, exponents in operands
  )
  return jnp.einsum('mk,nk->mn', *scaled, precision='highest').astype(dtype)


def _scales(exponents: jax.Array) -> jax.Array:
  """Returns float32 scales; results of `scale_of` are large enough not to be flushed to zero."""
  bits = jax.lax.bitcast_convert_type(exponents.astype(jnp.uint32) << 23, jnp.float32)
  return jnp.where(exponents == 0xFF, jnp.nan, bits)


def _kernel(
  a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array], dtype: DTypeLike
) -> jax.Array:
  # `jax.nn.scaled_matmul` lowers to this call through custom partitioning, `jax.lax.scaled_dot` to
  # an operation that XLA's partitioner does not know: neither compiles inside the region
  # (jax 0.10.2).
  batch = {f'{side}_batch_dimensions': [0] for side in ('lhs', 'rhs')}
  name = {jnp.dtype(jnp.float32): 'F32', jnp.dtype(jnp.bfloat16): 'BF16'}[jnp.dtype(dtype)]
  call = jax.ffi.ffi_call(
    '__op$block_scaled_dot',
    jax.ShapeDtypeStruct((1, a[0].shape[0], b[0].shape[0]), dtype),
    custom_call_api_version=2,
    legacy_backend_config=json.dumps(
      {'scaled_dot_backend_config': {**batch, 'dequantize_type': name}}
    ),
  )
  scales = (jax.lax.bitcast_convert_type(x[1], jnp.float8_e8m0fnu) for x in (a, b))
  product = call(*(x[None] for x in (a[0], b[0], *scales)))[0]
  return varying(product, tuple(_axes_of(a[0])))


def _axes_of(x: jax.Array) -> frozenset[str]:
  return jax.typeof(x).manual_axis_type.varying


def _matrix(x: jax.Array, num_rows: int) -> jax.Array:
  """Returns `x` [rows..., columns...] as a matrix, with `num_rows` dimensions of rows."""
  return x.reshape(math.prod(x.shape[:num_rows]), -1)


def _forward(
  num_in: int, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  rows = x.ndim - num_in
  # Rounded as `fsdp` rounds what it gathers, so that every layout converts the same values.
  columns = _matrix(kernel.astype(x.dtype), num_in)
  y = checkpoint_name(multiply(_matrix(x, rows), columns.T, x.dtype), PRODUCT)
  return y.reshape(*x.shape[:rows], *kernel.shape[num_in:]), (x, kernel)


def _backward(
  num_in: int, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
  x, kernel = saved
  rows = x.ndim - num_in
  x_matrix, g_matrix = _matrix(x, rows), _matrix(gradient, rows)
  dx = multiply(g_matrix, _matrix(kernel.astype(x.dtype), num_in), x.dtype)
  dw = multiply(x_matrix.T, g_matrix.T, kernel.dtype)
  return dx.reshape(x.shape), dw.reshape(kernel.shape)


_product = jax.custom_vjp(
  lambda num_in, x, kernel: _forward(num_in, x, kernel)[0], nondiff_argnums=(0,)
)
_product.defvjp(_forward, _backward)
