"""Norms, with statistics always in float32."""

from collections.abc import Callable
from typing import Optional, Union

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from t5x_gpu.layers.config import LayerConfig
from t5x_gpu.layers.dense import combine, param_along


def _recomputed(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """Returns `function` of arrays, whose backward pass stores its arguments and nothing else.

  Autodiff would store the float32 arrays between an input and its norm. Remat policies that keep
  everything but weights keep them inside a `jax.checkpoint`, too.
  """
  wrapped = jax.custom_vjp(function)
  wrapped.defvjp(
    lambda *arguments: (function(*arguments), arguments),
    lambda arguments, gradient: jax.vjp(function, *arguments)[1](gradient),
  )
  return wrapped


def _divided_by_root_mean_square(
  x: jax.Array, epsilon: float, *, axis: Union[int, tuple[int, ...]] = -1
) -> jax.Array:
  """Returns `x` divided by the root of its mean square along `axis`, in float32."""
  x = x.astype(jnp.float32)
  mean_square = jnp.mean(jax.lax.square(x), axis=axis, keepdims=True)
  return x * jax.lax.rsqrt(mean_square + epsilon)


class RMSNorm(nn.Module):
  """Root-mean-square norm over the last dimension, with a scale and no bias.

  Attributes:
    epsilon: added to the mean square.
    dtype: dtype of the result.
    plus_one: multiply by 1 + scale before rounding to `dtype`, with a scale that starts at 0 and
      decays to 0 (Gemma). Otherwise round first, as in Llama and T5.
    axis: name of the last dimension.
    along: name of the dimension before it.
  Source: Zhang and Sennrich 2019, eq. 4; T5 calls it LayerNorm.
  """

  epsilon: float = 1e-6
  dtype: DTypeLike = jnp.float32
  plus_one: bool = False
  axis: str = 'embed'
  along: str = 'residual_length'

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the normalized [..., features] in `dtype`."""
    init = nn.initializers.zeros if self.plus_one else nn.initializers.ones
    scale = param_along(
      self, 'scale', init, axes=(self.axis,), shape=x.shape[-1:], along=self.along
    )

    @_recomputed
    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
      y = _divided_by_root_mean_square(x, self.epsilon)
      if self.plus_one:  # float32, as published: 1 + scale would lose its digits in bfloat16
        return combine(jnp.multiply, y, 1.0 + scale.astype(jnp.float32)).astype(self.dtype)
      return combine(jnp.multiply, y.astype(self.dtype), scale.astype(self.dtype))

    return norm(x, scale)


class HeadsNorm(nn.Module):
  """Root-mean-square norm over the features of all heads together, with a scale for each.

  Attributes:
    num_heads: number of heads of the scale; the input may repeat each head.
    epsilon, dtype: as in RMSNorm.
    heads: name of the dimension of heads.
  Source: OLMo Team 2024 (OLMo 2), section 3.2.
  """

  num_heads: int
  epsilon: float = 1e-6
  dtype: DTypeLike = jnp.float32
  heads: str = 'heads'

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the normalized [batch, length, heads, kv] in `dtype`."""
    scale = param_along(
      self,
      'scale',
      nn.initializers.ones,
      axes=(self.heads, 'kv'),
      shape=(self.num_heads, x.shape[-1]),
    ).astype(self.dtype)
    if scale.shape[-2] < x.shape[-2]:  # fewer heads than devices: heads are repeated
      scale = jnp.repeat(scale, x.shape[-2] // scale.shape[-2], axis=-2)

    @_recomputed
    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
      y = _divided_by_root_mean_square(x, self.epsilon, axis=(-2, -1))
      return y.astype(self.dtype) * scale

    return norm(x, scale)


class LayerNorm(nn.Module):
  """Norm over the last dimension to mean 0 and variance 1, with a scale and a bias.

  Source: Ba et al. 2016, eq. 3.
  """

  epsilon: float = 1e-6
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the normalized [..., embed] in `dtype`."""
    scale, bias = (
      param_along(self, name, init, axes=('embed',), shape=x.shape[-1:], along='residual_length')
      for name, init in (('scale', nn.initializers.ones), ('bias', nn.initializers.zeros))
    )

    @_recomputed
    def norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
      x = x.astype(jnp.float32)
      y = _divided_by_root_mean_square(x - jnp.mean(x, axis=-1, keepdims=True), self.epsilon)
      y = combine(jnp.multiply, y.astype(self.dtype), scale.astype(self.dtype))
      return combine(jnp.add, y, bias.astype(self.dtype))

    return norm(x, scale, bias)


def make_norm(config: LayerConfig, *, name: Optional[str] = None) -> nn.Module:
  """Returns the norm over `embed` of this configuration."""
  epsilon, dtype = config.norm_epsilon, config.compute_dtype
  if config.norm == 'layer':
    return LayerNorm(epsilon, dtype, name=name)
  return RMSNorm(epsilon, dtype, plus_one=config.norm == 'rms_plus_one', name=name)
