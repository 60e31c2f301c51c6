"""Stacks of layers: one layer's wiring, and the scan over all of them."""

from typing import Any, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_gpu.layers.attention import MultiHeadAttention
from t5x_gpu.layers.attention_backends import Attention
from t5x_gpu.layers.dropout import DropoutRng, dropout
from t5x_gpu.layers.mlp import Mlp
from t5x_gpu.layers.moe import MoeMlp
from t5x_gpu.layers.norm import RMSNorm
from t5x_gpu.layers.positions import RelativePositionTable
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.partitioning import fsdp
from t5x_gpu.partitioning.axis_rules import NamedParam, is_named, shard

# What the backward pass finds stored; the rest is computed again.
REMAT = {'none': None, 'minimal': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
         'full': jax.checkpoint_policies.nothing_saveable}


def relative_table(config: TransformerConfig, *,
                   name: Optional[str] = None) -> RelativePositionTable:
  """Returns the module of the learned bias."""
  return RelativePositionTable(num_heads=config.num_heads, num_buckets=config.num_relpos_buckets,
                               dtype=config.compute_dtype, name=name)


class DecoderLayer(nn.Module):
  """Norm, causal self-attention, residual; norm, MLP, residual (pre-norm, as T5)."""
  config: TransformerConfig

  @nn.compact
  def __call__(self, x: jax.Array, attention: Attention, shared_bias: Any,
               dropout_rng: Optional[DropoutRng]) -> jax.Array:
    """Returns [batch, length, embed] from the same; no dropout without `dropout_rng`."""
    c, dtype = self.config, self.config.compute_dtype

    def rng(site: str) -> Optional[DropoutRng]:
      return dropout_rng and dropout_rng.at(site)
    bias = shared_bias
    if c.relative_bias == 'per_layer':
      bias = attention.bias(relative_table(c, name='relpos_bias')())
    h = RMSNorm(dtype=dtype, name='pre_self_attention_layer_norm')(x)
    h = MultiHeadAttention(c.num_heads, c.head_dim, dropout_rate=c.dropout_rate, dtype=dtype,
                           name='self_attention')(shard(h, 'batch', 'length', 'embed'), attention,
                                                  bias=bias, dropout_rng=rng('attention'))
    x = x + dropout(h, c.dropout_rate, rng('attention_out'))
    h = RMSNorm(dtype=dtype, name='pre_mlp_layer_norm')(x)
    options = dict(mlp_dim=c.mlp_dim, activations=c.mlp_activations, dropout_rate=c.dropout_rate,
                   dtype=dtype)
    mlp = Mlp(**options, name='mlp') if c.num_experts == 0 else MoeMlp(
        num_experts=c.num_experts, experts_per_token=c.num_experts_per_token,
        capacity_factor=c.expert_capacity_factor, **options, name='moe')
    h = mlp(shard(h, 'batch', 'length', 'embed'), dropout_rng=rng('mlp'))
    return x + dropout(h, c.dropout_rate, rng('mlp_out'))


def init_layers(layer: nn.Module, rng: jax.Array, *inputs: Any, num_layers: int) -> Any:
  """Returns the parameters of `num_layers` layers, stacked on a leading `layers` axis.

  Args:
    layer: a module.
    rng: key; each layer gets one of its own.
    *inputs: what the layer is called with; any size will do.
    num_layers: length of the stack.
  """
  stacked = jax.vmap(lambda key: layer.init(key, *inputs)['params'])(
      jax.random.split(rng, num_layers))
  # One without names stays as it is: `split_names` tells the user of all of them.
  return jax.tree.map(lambda p: NamedParam(p.value, ('layers', *p.names)) if is_named(p) else p,
                      stacked, is_leaf=is_named)


def scan_layers(layer: nn.Module, params: Any, x: jax.Array, *inputs: Any,
                config: TransformerConfig, dropout_rng: Optional[DropoutRng] = None,
                first_layer: Any = 0) -> jax.Array:
  """Returns `x` after all layers of `params`, each of them made whole when its turn comes.

  Args:
    layer: a module called as `layer(x, *inputs, dropout_rng)`.
    params: of the layers, stacked; all of the model's, or those of a pipeline stage.
    x: [batch, length, embed].
    *inputs: further arguments, the same for all layers.
    config: its dtype, remat_policy and scan_unroll are used.
    dropout_rng: None for no dropout.
    first_layer: number of the first of these layers in the model.
  """
  num_layers = jax.tree.leaves(params)[0].shape[0]
  unroll = min(config.scan_unroll, num_layers)

  def body(x: jax.Array, of_layer: Any) -> tuple[jax.Array, None]:
    split_params, number = of_layer
    weights = fsdp.whole(split_params, config.compute_dtype)
    rng = dropout_rng and dropout_rng.fold(number)
    return layer.apply({'params': weights}, x, *inputs, rng), None
  policy = fsdp.keep_policy(REMAT[config.remat_policy], params)
  if policy is not None:
    # A loop keeps forward and backward apart; unrolled whole, XLA would merge the recomputation
    # with what it was to replace, and save nothing.
    body = jax.checkpoint(body, policy=policy, prevent_cse=unroll == num_layers)
  numbers = first_layer + jnp.arange(num_layers)
  return jax.lax.scan(body, x, (params, numbers), unroll=unroll)[0]
