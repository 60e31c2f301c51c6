"""The MLP of a block, plain or gated."""

import functools
import operator
from collections.abc import Callable
from typing import Any, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_gpu.errors import ModelError, did_you_mean
from t5x_gpu.layers.dense import DenseGeneral, Initializer, fan_in_init, project_together
from t5x_gpu.layers.dropout import DropoutRng, dropout
from t5x_gpu.partitioning.axis_rules import shard

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'linear': lambda x: x,
  'relu': jax.nn.relu,
  'gelu': jax.nn.gelu,  # by tanh
  'gelu_exact': functools.partial(jax.nn.gelu, approximate=False),
  'silu': jax.nn.silu,
}


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
  """Returns the activation function; raises ModelError for an unknown name."""
  if name not in ACTIVATIONS:
    raise ModelError(
      f'mlp_activations has the unknown {name!r}.{did_you_mean(name, ACTIVATIONS)}',
      fix=f'Choose from {", ".join(ACTIVATIONS)}.',
      parameters=('TransformerConfig.mlp_activations',),
    )
  return ACTIVATIONS[name]


class Mlp(nn.Module):
  """Two linear maps with activations between; several activations are multiplied (gated MLP).

  Attributes:
    mlp_dim: hidden features.
    activations: ('gelu', 'linear') is T5.1.1's gated GELU, ('relu',) is T5 1.0's MLP.
    dropout_rate: dropout rate of the hidden features, one mask for all positions as in T5.
    dtype: dtype of the computation.
    use_bias: whether both maps have a bias.
    kernel_init: initializer of all kernels; None for T5's initializers.
  Source: Shazeer 2020 (GLU variants).
  """

  mlp_dim: int
  activations: tuple[str, ...] = ('gelu', 'linear')
  dropout_rate: float = 0.0
  dtype: Any = jnp.float32
  use_bias: bool = False
  kernel_init: Optional[Initializer] = None

  @nn.compact
  def __call__(self, x: jax.Array, *, dropout_rng: Optional[DropoutRng] = None) -> jax.Array:
    """Returns [batch, length, embed], the shape of `x`; `dropout_rng` None for no dropout."""
    init = self.kernel_init or fan_in_init(num_in=1, distribution='truncated_normal')
    names = (
      ['wi'] if len(self.activations) == 1 else [f'wi_{i}' for i in range(len(self.activations))]
    )
    branches = project_together(
      x,
      dict.fromkeys(names, init),
      features=self.mlp_dim,
      axes=('embed', 'mlp'),
      dtype=self.dtype,
      use_bias=self.use_bias,
    )
    hidden = functools.reduce(
      operator.mul, (activation(name)(y) for name, y in zip(self.activations, branches))
    )
    hidden = dropout(shard(hidden, 'batch', 'length', 'mlp'), self.dropout_rate, dropout_rng)
    out = DenseGeneral(
      (x.shape[-1],),
      ('mlp', 'embed'),
      dtype=self.dtype,
      name='wo',
      kernel_init=self.kernel_init,
      use_bias=self.use_bias,
      bias_along='residual_length',
    )(hidden)
    return shard(out, 'batch', 'residual_length', 'embed')
