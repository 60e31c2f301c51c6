"""Linear maps over named axes, and the initializers that T5 uses."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_gpu.partitioning.axis_rules import split_axis, shard, with_axes

Initializer = Callable[..., jax.Array]


def fan_in_init(*, num_in: int, distribution: str, scale: float = 1.0) -> Initializer:
  """Returns a variance-scaling initializer that counts the first `num_in` dimensions as inputs.

  Args:
    num_in: leading dimensions of the kernel that are contracted; the rest are features.
    distribution: 'truncated_normal' (MLP, logits) or 'normal' (attention), as in T5.
    scale: of the variance.
  Source: He et al. 2015; T5 (Raffel et al. 2020), appendix.
  """
  flat_init = nn.initializers.variance_scaling(scale, 'fan_in', distribution)

  def init(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    # Drawn as a matrix: fan-in is then the product of the contracted dimensions.
    flat = (math.prod(shape[:num_in]), math.prod(shape[num_in:]))
    return flat_init(key, flat, dtype).reshape(shape)
  return init


class DenseGeneral(nn.Module):
  """A linear map that contracts the last `num_in` dimensions of its input.

  Attributes:
    features: sizes of the output dimensions.
    axes: names of the kernel's dimensions, inputs first.
    num_in: how many trailing dimensions are contracted.
    kernel_init: initializer of the kernel [inputs..., features...].
    dtype: of the computation; the kernel is kept in float32.
    use_bias: add a bias of shape `features`.
    dot_general: replaces `jax.lax.dot_general` (FP8).
  """
  features: tuple[int, ...]
  axes: tuple[Optional[str], ...]
  num_in: int = 1
  kernel_init: Optional[Initializer] = None
  dtype: Any = jnp.float32
  use_bias: bool = False
  dot_general: Optional[Callable[..., jax.Array]] = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., features] from [..., inputs]."""
    init = self.kernel_init or fan_in_init(num_in=self.num_in, distribution='truncated_normal')
    in_shape = x.shape[x.ndim - self.num_in:]
    kernel = self.param('kernel', with_axes(init, self.axes), in_shape + self.features,
                        jnp.float32)
    contracted = tuple(range(x.ndim - self.num_in, x.ndim)), tuple(range(self.num_in))
    dot_general = self.dot_general or jax.lax.dot_general
    y = dot_general(x.astype(self.dtype), kernel.astype(self.dtype), (contracted, ((), ())))
    if self.use_bias:
      bias = self.param('bias', with_axes(nn.initializers.zeros, self.axes[self.num_in:]),
                        self.features, jnp.float32)
      y = y + bias.astype(self.dtype)
    return y


def project_together(x: jax.Array, kernel_inits: Mapping[str, Initializer], *, features: int,
                     axes: tuple[str, str], dtype: Any = jnp.float32,
                     use_bias: bool = False) -> list[jax.Array]:
  """Returns several linear maps [batch, length, features] of `x` [batch, length, inputs].

  To be called in a module, which gets a submodule with a kernel for each map, as the branches of a
  gated MLP. Where their features are split, one matmul does them all: its input is then gathered
  once and the gradient of its input reduced once, not once per map.

  Args:
    x: the input of all.
    kernel_inits: name of each map -> initializer of its kernel [inputs, features].
    features: outputs of each map.
    axes: names of a kernel's dimensions.
    dtype: of the computation; the parameters are kept in float32.
    use_bias: each map has a bias [features].
  """
  x = x.astype(dtype)
  maps = [LinearParams((x.shape[-1], features), axes, init, use_bias, name=name)(dtype)
          for name, init in kernel_inits.items()]
  if len(maps) > 1 and split_axis(axes[1]):
    y = jnp.tensordot(x, jnp.stack([kernel for kernel, _ in maps], axis=1), 1)
    y = shard(y, 'batch', 'length', None, axes[1])
    out = [y[:, :, i] for i in range(len(maps))]
  else:
    out = [shard(jnp.tensordot(x, kernel, 1), 'batch', 'length', axes[1]) for kernel, _ in maps]
  return [y if bias is None else y + bias for y, (_, bias) in zip(out, maps)]


class LinearParams(nn.Module):
  """The kernel of a linear map [inputs, *features], and its bias [*features] if it has one."""
  shape: tuple[int, ...]
  axes: tuple[str, ...]
  init: Initializer
  use_bias: bool = False

  @nn.compact
  def __call__(self, dtype: Any) -> tuple[jax.Array, Optional[jax.Array]]:
    """Returns (kernel, bias or None) in `dtype`."""
    kernel = self.param('kernel', with_axes(self.init, self.axes), self.shape, jnp.float32)
    if not self.use_bias:
      return kernel.astype(dtype), None
    bias = self.param('bias', with_axes(nn.initializers.zeros, self.axes[1:]), self.shape[1:],
                      jnp.float32)
    return kernel.astype(dtype), bias.astype(dtype)
