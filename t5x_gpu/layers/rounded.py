"""Kernels in 16 bits that are rounded once for many matmuls, with gradients in float32.

A `RoundedKernel` serves the microbatches that pass a layer together; `RoundedOnce`, a stack of
kernels, the ticks of a pipeline. Each use would round a float32 kernel again.
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from t5x_gpu.layers.dense import gradients, in_dtype_of_x
from t5x_gpu.layers.fp8 import LowPrecisionKernel
from t5x_gpu.partitioning.axis_rules import varying
from t5x_gpu.partitioning.parameters import Split, Wrapper
from t5x_gpu.partitioning.trees import Tree


@flax.struct.dataclass
class RoundedKernel(LowPrecisionKernel):
  """A kernel that is rounded once for several matmuls, whose gradients add up unrounded.

  Attributes:
    values: [inputs..., features...] in 16 bits; not differentiated.
    port: float32 array of the same shape that is never read, as in `Quantized`; its gradient is the
      kernel's.
    added_later: whether its gradient is added to an entry of a stack (`InPlace`). XLA would add in
      the matmul of the gradient, for which it copies the entry out of the stack and back.
  """

  values: jax.Array
  port: jax.Array
  added_later: bool = flax.struct.field(pytree_node=False, default=False)

  @property
  def shape(self) -> tuple[int, ...]:
    return self.values.shape

  def rearranged(
    self, function: Callable[..., jax.Array], *others: LowPrecisionKernel
  ) -> 'RoundedKernel':
    kernels = self, *others
    return self.replace(
      values=function(*(k.values for k in kernels)), port=function(*(k.port for k in kernels))
    )

  def product(self, x: jax.Array, num_in: int) -> jax.Array:
    arrays = x, self.values, self.port
    axes = set().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))
    product = _Rounded(num_in, self.added_later)
    return _rounded_product(product, *(varying(array, tuple(axes)) for array in arrays))


def rounded_kernel(kernel: jax.Array, dtype: DTypeLike) -> RoundedKernel:
  """Returns a float32 kernel, rounded to `dtype`."""
  return RoundedKernel(jax.lax.stop_gradient(kernel.astype(dtype)), kernel)


@flax.struct.dataclass
class RoundedOnce(Wrapper):
  """Kernels stacked [layers, ...] that every device holds whole, rounded once for many uses.

  Attributes:
    param: the differentiated parameter.
    values: `param` in 16 bits; not differentiated.
  """

  param: Split
  values: jax.Array

  @property
  def is_converted(self) -> bool:
    return True

  def whole(self, dtype: DTypeLike, *, wide: bool = False) -> RoundedKernel:
    del dtype, wide  # the gradient is float32
    port = varying(self.param.part, self.param.dims.sum_axes)  # its gradient is not yet summed
    return RoundedKernel(self.values, port, added_later=True)

  def as_gradient(self, part: jax.Array, others: Tree) -> 'RoundedOnce':
    return RoundedOnce(self.param.as_gradient(part, others), None)

  def others(self, gradient: RoundedKernel) -> None:
    del gradient

  def unreduced(self, gradient: RoundedKernel) -> jax.Array:
    return gradient.port


class _Rounded(NamedTuple):
  num_in: int
  added_later: bool


_rounded_product = jax.custom_vjp(
  lambda p, x, values, port: in_dtype_of_x(p.num_in, x, values), nondiff_argnums=(0,)
)


def _rounded_backward(
  p: _Rounded, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None, jax.Array]:
  dx, dw = gradients(p.num_in, *saved, gradient, dtype=jnp.float32)
  return dx, None, jax.lax.optimization_barrier(dw) if p.added_later else dw


_rounded_product.defvjp(
  lambda p, x, values, port: (in_dtype_of_x(p.num_in, x, values), (x, values)), _rounded_backward
)
