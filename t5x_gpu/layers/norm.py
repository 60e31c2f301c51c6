"""Normalisation, with statistics in float32 whatever the compute dtype."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_gpu.partitioning.axis_rules import with_axes


class RMSNorm(nn.Module):
  """Root-mean-square norm over the last dimension, with a scale and no bias.

  Source: Zhang and Sennrich 2019, eq. 4; T5 calls it LayerNorm.
  """
  epsilon: float = 1e-6
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the normalised [..., embed] in `dtype`."""
    scale = self.param('scale', with_axes(nn.initializers.ones, ('embed',)), (x.shape[-1],),
                       jnp.float32)
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(jax.lax.square(x), axis=-1, keepdims=True)
    y = x * jax.lax.rsqrt(mean_square + self.epsilon)
    return y.astype(self.dtype) * scale.astype(self.dtype)
