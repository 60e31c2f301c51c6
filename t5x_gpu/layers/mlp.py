"""The MLP of a block, plain or gated."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Optional

import flax.linen as nn
import jax

from t5x_gpu.errors import ModelError, did_you_mean
from t5x_gpu.layers.config import LayerConfig
from t5x_gpu.layers.dense import DenseGeneral, fan_in_init, project_together
from t5x_gpu.layers.dropout import DropoutRng, dropout
from t5x_gpu.partitioning.axis_rules import shard

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'linear': lambda x: x,
  'relu': jax.nn.relu,
  'gelu': jax.nn.gelu,  # by tanh
  'gelu_exact': functools.partial(jax.nn.gelu, approximate=False),
  'silu': jax.nn.silu,
}


def activation(
  name: str, parameter: str = 'TransformerConfig.mlp_activations'
) -> Callable[[jax.Array], jax.Array]:
  """Returns the activation function; raises ModelError for an unknown name in `parameter`."""
  if name not in ACTIVATIONS:
    raise ModelError(
      f'{parameter.rpartition(".")[2]} has the unknown {name!r}.{did_you_mean(name, ACTIVATIONS)}',
      fix=f'Choose from {", ".join(ACTIVATIONS)}.',
      parameters=(parameter,),
    )
  return ACTIVATIONS[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpConfig(LayerConfig):
  """Settings of an MLP.

  Attributes:
    mlp_dim: hidden features of the MLP, or of each expert.
    mlp_activations: ('gelu', 'linear') for a gated GELU (T5.1.1), ('relu',) for a plain MLP (T5
      1.0). 'gelu' is the tanh approximation; 'gelu_exact' is BERT's.
    mlp_bias: whether the linear maps have a bias.
    mlp_dropout: dropout rate of the hidden features, one mask for all positions as in T5; None for
      dropout_rate.
  """

  mlp_dim: int
  mlp_activations: tuple[str, ...] = ('gelu', 'linear')
  mlp_bias: bool = False
  mlp_dropout: Optional[float] = None

  @property
  def branches(self) -> tuple[str, ...]:
    """Names of the kernels that multiply the input, one for each activation."""
    number = len(self.mlp_activations)
    return ('wi',) if number == 1 else tuple(f'wi_{i}' for i in range(number))


def activated(config: MlpConfig, branches: Iterable[jax.Array]) -> jax.Array:
  """Returns the hidden features: the product of the activations of all branches."""
  return functools.reduce(
    operator.mul, (activation(name)(y) for name, y in zip(config.mlp_activations, branches))
  )


class Mlp(nn.Module):
  """Two linear maps with an activation between them, or the product of several (gated MLP).

  Source: Shazeer 2020 (GLU variants).
  """

  config: MlpConfig

  @nn.compact
  def __call__(self, x: jax.Array, *, dropout_rng: Optional[DropoutRng] = None) -> jax.Array:
    """Returns [batch, length, embed], the shape of `x`; `dropout_rng` None for no dropout."""
    c = self.config
    init = c.kernel_init or fan_in_init(num_in=1, distribution='truncated_normal')
    branches = project_together(
      x,
      dict.fromkeys(c.branches, init),
      features=c.mlp_dim,
      axes=('embed', 'mlp'),
      dtype=c.compute_dtype,
      use_bias=c.mlp_bias,
    )
    hidden = shard(activated(c, branches), 'batch', 'length', 'mlp')
    hidden = dropout(hidden, c.dropout('mlp'), dropout_rng)
    out = DenseGeneral(
      (x.shape[-1],),
      ('mlp', 'embed'),
      dtype=c.compute_dtype,
      name='wo',
      kernel_init=c.kernel_init,
      use_bias=c.mlp_bias,
      bias_along='residual_length',
    )(hidden)
    return shard(out, 'batch', 'residual_length', 'embed')
