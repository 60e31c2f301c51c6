"""Matmuls, linear maps over named axes, T5's initializers, and parameters per position or head."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Optional, Union

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from t5x_gpu.layers import fp8
from t5x_gpu.layers.backends.choose import hardware
from t5x_gpu.layers.fp8 import Kernel, Quantized, is_quantized, on_kernels
from t5x_gpu.partitioning.axis_rules import shard, split_ways, splits_rows, varying, with_axes


def contract(x: Union[jax.Array, Quantized], kernel: Kernel, num_in: int = 1) -> jax.Array:
  """Returns `x` times `kernel`, contracting the last `num_in` dimensions of `x`.

  Args:
    x: [..., inputs].
    kernel: [inputs, features]. If it is quantized, 8-bit operands are multiplied; an array is
      rounded to the dtype of `x`, and its gradient is not.
    num_in: number of dimensions of `inputs`.
  """
  if is_quantized(kernel):
    return kernel.product(x, num_in)
  lead = x.ndim - num_in
  if lead > 1 and hardware().platform == 'cpu' and split_ways('length') == split_ways('mlp') == 1:
    # The kernel's gradient sums over rows and positions. If they are two dimensions, XLA's CPU
    # compiler transposes an operand of this matmul, which takes as long as the matmul.
    y = contract(x.reshape(-1, *x.shape[lead:]), kernel, num_in)
    return y.reshape(*x.shape[:lead], *kernel.shape[num_in:])
  if x.dtype.itemsize >= kernel.dtype.itemsize:
    return jnp.tensordot(x, kernel, num_in)
  marks = [jax.typeof(array).manual_axis_type.varying for array in (x, kernel)]
  x, kernel = (varying(array, tuple(marks[0] | marks[1])) for array in (x, kernel))
  return _narrow(num_in, x, kernel)


def in_dtype_of_x(num_in: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Returns `x` times `kernel`, which is rounded to the dtype of `x`; see `contract`."""
  return jnp.tensordot(x, kernel.astype(x.dtype), num_in)


def _narrow_backward(
  num_in: int, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
  return gradients(num_in, *saved, gradient, dtype=saved[1].dtype)


def gradients(
  num_in: int, x: jax.Array, kernel: jax.Array, gradient: jax.Array, *, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
  """Returns the gradients of `x`, and of the kernel in `dtype`, which the matmul writes."""
  rows = tuple(range(x.ndim - num_in))
  features = tuple(range(len(rows), gradient.ndim)), tuple(range(num_in, kernel.ndim))
  dx = jax.lax.dot_general(gradient, kernel.astype(x.dtype), (features, ((), ())))
  if hardware().platform != 'gpu':  # XLA has no 16-bit matmul that ends in float32 for all CPUs
    x, gradient = x.astype(dtype), gradient.astype(dtype)
  dw = jax.lax.dot_general(x, gradient, ((rows, rows), ((), ())), preferred_element_type=dtype)
  return dx, dw


# `contract` of 16-bit activations and a float32 kernel, which it rounds. The matmul of the kernel's
# gradient writes float32; autodiff would round the gradient and convert it in another pass.
_narrow = jax.custom_vjp(in_dtype_of_x, nondiff_argnums=(0,))
_narrow.defvjp(
  lambda num_in, x, kernel: (in_dtype_of_x(num_in, x, kernel), (x, kernel)), _narrow_backward
)


# `param_along` and `combine` serve parameters that act on each token or head separately: scales of
# norms, and biases. If `model` splits tokens (sequence parallelism) or heads, each device has only
# its part of the gradient. A training step then passes these parameters as [copies, ...], one
# copy per device along `model`, and sums the gradients of the copies once (partitioning/region.py).


def param_along(
  module: nn.Module,
  name: str,
  init: Callable[..., jax.Array],
  *,
  axes: Sequence[Optional[str]],
  shape: Sequence[int],
  along: Optional[str] = None,
) -> jax.Array:
  """Returns the float32 parameter `name` of a module, of `shape` or [copies, *shape].

  Returns a kernel in 8 bits unchanged.

  Args:
    module: the module that owns it, while it is called.
    name: name of the parameter.
    init: (key, shape, dtype) -> values.
    axes: names of its dimensions.
    shape: shape of one copy.
    along: activation axis whose parts use separate copies of the parameter, or None. A `kv_heads`
      dimension may also hold several copies of each head.
  """
  if module.has_variable('params', name):
    value = module.get_variable('params', name)
    if along is not None or 'kv_heads' in axes or is_quantized(value):
      return value  # `module.param` would refuse copies, and kernels in 8 bits
  return module.param(name, with_axes(init, axes, along=along), tuple(shape), jnp.float32)


def combine(
  operation: Callable[[jax.Array, jax.Array], jax.Array],
  x: jax.Array,
  parameter: jax.Array,
  *,
  rank: int = 1,
) -> jax.Array:
  """Returns `operation(x, parameter)`; each part of `x` uses its own copy of the parameter.

  Args:
    operation: (x, parameter) -> [..., features], elementwise such as `jnp.multiply`, or
      `jnp.matmul` for a parameter of rank 2.
    x: [batch, length, features], split by row or position as `shard` splits residuals; or
      [..., heads, features].
    parameter: parameter with `rank` dimensions, or [copies, ...].
    rank: number of dimensions of one copy.
  """
  if parameter.ndim == rank:
    return operation(x, parameter)
  copies = parameter.shape[0]
  if x.ndim == 3 and splits_rows(x.shape):
    parts, inner = x.reshape(copies, -1, *x.shape[1:]), x.ndim - rank
  elif x.ndim > 2 and x.shape[-2] % copies == 0:
    parts, inner = x.reshape(*x.shape[:-2], copies, -1, x.shape[-1]), 2 - rank
  else:
    return operation(x, parameter[0])  # not split here: correct, but its gradient is summed here
  y = operation(parts, jnp.expand_dims(parameter, tuple(range(1, 1 + inner))))
  return y.reshape(*x.shape[:-1], -1)


Initializer = Callable[..., jax.Array]
FACTORS = ('lora_a', 'lora_b')  # parameters next to a kernel, see `Linear`


def fan_in_init(*, num_in: int, distribution: str, scale: float = 1.0) -> Initializer:
  """Returns a variance-scaling initializer that counts the first `num_in` dimensions as inputs.

  Args:
    num_in: number of leading dimensions of the kernel that are contracted; the rest are features.
    distribution: 'truncated_normal' (MLP, logits) or 'normal' (attention), as in T5.
    scale: factor of the variance.
  Source: He et al. 2015; T5 (Raffel et al. 2020), appendix.
  """
  flat_init = nn.initializers.variance_scaling(scale, 'fan_in', distribution)

  def init(key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> jax.Array:
    # Drawn as a matrix, so that fan-in is the product of the contracted dimensions.
    flat = (math.prod(shape[:num_in]), math.prod(shape[num_in:]))
    return flat_init(key, flat, dtype).reshape(shape)

  return init


@dataclasses.dataclass(frozen=True)
class Linear:
  """The arrays of a linear map.

  Attributes:
    kernel: [inputs..., features...]; for a matmul of 8-bit operands, a `LowPrecisionKernel`.
    bias: [features...], or None.
    factors: [inputs..., rank] and [rank, features...], whose product is added to the kernel without
      being formed (models/lora.py), or None.
  """

  kernel: Kernel
  bias: Optional[jax.Array] = None
  factors: Optional[tuple[jax.Array, jax.Array]] = None

  def finish(self, y: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `y` (`x` times the kernel) plus the LoRA term and the bias."""
    if self.factors is not None:
      down, up = self.factors
      low = jnp.tensordot(x.astype(down.dtype), down, down.ndim - 1)
      y = y + jnp.tensordot(low, up, 1).astype(y.dtype)
    return y if self.bias is None else y + self.bias

  def on_features(self, function: Callable[[jax.Array], jax.Array]) -> 'Linear':
    """Returns the map with `function` applied to its arrays [..., features...]."""
    return Linear(
      on_kernels(function, self.kernel),
      None if self.bias is None else function(self.bias),
      self.factors and (self.factors[0], function(self.factors[1])),
    )


def lora_factors(module: nn.Module, dtype: DTypeLike) -> Optional[tuple[jax.Array, jax.Array]]:
  """Returns the LoRA factors next to a module's kernel, or None."""
  if not module.has_variable('params', FACTORS[0]):
    return None
  first, second = (module.get_variable('params', name).astype(dtype) for name in FACTORS)
  return first, second


class DenseGeneral(nn.Module):
  """A linear map that contracts the last `num_in` dimensions of its input.

  Attributes:
    features: sizes of the output dimensions.
    axes: names of the kernel's dimensions, inputs first.
    num_in: number of trailing dimensions that are contracted.
    kernel_init: initializer of the kernel [inputs..., features...].
    dtype: dtype of the computation; the kernel is stored in float32.
    use_bias: add a bias of shape `features`.
    dot_general: replaces `jax.lax.dot_general`.
    along: name of the input's dimension [batch, along, inputs] along which the kernel may come in
      copies (layers/dense.py); for kernels without a split dimension.
    bias_along: like `along`, for the bias and the output [batch, bias_along, features].
  """

  features: tuple[int, ...]
  axes: tuple[Optional[str], ...]
  num_in: int = 1
  kernel_init: Optional[Initializer] = None
  dtype: DTypeLike = jnp.float32
  use_bias: bool = False
  dot_general: Optional[Callable[..., jax.Array]] = None
  along: Optional[str] = None
  bias_along: Optional[str] = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., features] from [..., inputs]."""
    init = self.kernel_init or fan_in_init(num_in=self.num_in, distribution='truncated_normal')
    in_shape = x.shape[x.ndim - self.num_in :]
    kernel = param_along(
      self, 'kernel', init, axes=self.axes, shape=in_shape + self.features, along=self.along
    )
    x = x.astype(self.dtype)
    if self.along:
      y = combine(jnp.matmul, x, kernel.astype(self.dtype), rank=2)
    elif self.dot_general is None:
      y = contract(x, kernel, self.num_in)
    else:
      contracted = tuple(range(x.ndim - self.num_in, x.ndim)), tuple(range(self.num_in))
      y = self.dot_general(x, kernel.astype(self.dtype), (contracted, ((), ())))
    y = Linear(kernel, factors=lora_factors(self, self.dtype)).finish(y, x)
    if not self.use_bias:
      return y
    bias = param_along(
      self,
      'bias',
      nn.initializers.zeros,
      axes=self.axes[self.num_in :],
      shape=self.features,
      along=self.bias_along,
    ).astype(self.dtype)
    if self.bias_along is None:
      return y + bias
    if y.ndim == 3:
      y = shard(y, 'batch', self.bias_along, self.axes[-1])
    return combine(jnp.add, y, bias)


def project_together(
  x: jax.Array,
  kernel_inits: Mapping[str, Initializer],
  *,
  features: int,
  axes: tuple[str, str],
  dtype: DTypeLike = jnp.float32,
  use_bias: bool = False,
) -> list[jax.Array]:
  """Returns several linear maps [batch, length, features] of `x` [batch, length, inputs].

  Computes the branches of a gated MLP. The calling module gets a submodule with a kernel per map.
  If features are split, one matmul computes all maps, so that the input is gathered once and its
  gradient reduced once, not once per map.

  Args:
    x: input of all maps.
    kernel_inits: name of each map -> initializer of its kernel [inputs, features].
    features: number of outputs of each map.
    axes: names of a kernel's dimensions.
    dtype: dtype of the computation; parameters are stored in float32.
    use_bias: whether each map has a bias [features].
  """
  x = x.astype(dtype)
  maps = [
    LinearParams((x.shape[-1], features), axes, init, use_bias, name=name)(dtype)
    for name, init in kernel_inits.items()
  ]
  operand = fp8.operand(x, maps[0].kernel)
  converts = isinstance(operand, Quantized)
  if len(maps) > 1 and split_ways(axes[1]) > 1:
    kernels = (m.kernel.astype(dtype) for m in maps)
    stacked = on_kernels(lambda *k: jnp.stack(k, axis=1), *kernels)
    product = shard(contract(operand, stacked), 'batch', 'length', None, axes[1])
    (y,) = _separate([product], only_forward=converts)
    return [m.finish(y[:, :, i], x) for i, m in enumerate(maps)]
  out = [shard(contract(operand, m.kernel), 'batch', 'length', axes[1]) for m in maps]
  out = [m.finish(y, x) for y, m in zip(out, maps, strict=True)]
  return _separate(out, only_forward=converts) if len(out) > 1 else out


def _separate(products: list[jax.Array], *, only_forward: bool) -> list[jax.Array]:
  """Returns `products` behind a barrier.

  XLA merges no kernels that read a matmul's result directly. Behind the barrier, one kernel
  computes the hidden features and the gradients of all branches. The name lets remat policies
  store the arrays behind it. Otherwise the backward pass would repeat the barrier, and XLA copy
  each layer's arrays out of their stacks in front of it.

  Args:
    products: results of matmuls.
    only_forward: whether gradients pass no barrier. In 8 bits, the kernel that computes them finds
      their largest values, too (`fp8._converted`).
  """
  barrier = _forward_barrier if only_forward else jax.lax.optimization_barrier
  return [checkpoint_name(y, fp8.PRODUCT) for y in barrier(products)]


_forward_barrier = jax.custom_vjp(lambda arrays: jax.lax.optimization_barrier(arrays))
_forward_barrier.defvjp(
  lambda arrays: (jax.lax.optimization_barrier(arrays), None), lambda _, gradients: (gradients,)
)


class LinearParams(nn.Module):
  """Kernel [inputs, *features] and optional bias [*features] of a linear map."""

  shape: tuple[int, ...]
  axes: tuple[str, ...]
  init: Initializer
  use_bias: bool = False

  @nn.compact
  def __call__(self, dtype: DTypeLike) -> Linear:
    """Returns the map, with everything but the kernel in `dtype`; `contract` rounds the kernel."""
    kernel = param_along(self, 'kernel', self.init, axes=self.axes, shape=self.shape)
    bias = None
    if self.use_bias:
      bias = param_along(
        self, 'bias', nn.initializers.zeros, axes=self.axes[1:], shape=self.shape[1:]
      ).astype(dtype)
    return Linear(kernel, bias, lora_factors(self, dtype))
