"""Stacks of layers: one layer's wiring, and the scan over all of them.

Every family is this layer with other choices: encoders and decoders, with a norm before, after or
around each block, with one attention or, in the decoder of an encoder-decoder, two.
"""

import functools
from typing import Any, Optional

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.layers.attention import MultiHeadAttention
from t5x_gpu.layers.attention_backends import Attention, AttentionKind
from t5x_gpu.layers.dropout import DropoutRng, dropout
from t5x_gpu.layers.kv_cache import KVCache
from t5x_gpu.layers.mlp import Mlp
from t5x_gpu.layers.moe import MoeMlp
from t5x_gpu.layers.norm import norm
from t5x_gpu.layers.positions import RelativeBuckets, RelativePositionTable, Rotation
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.partitioning import fsdp
from t5x_gpu.partitioning.axis_rules import is_named, shard

# What the backward pass finds stored; the rest is computed again.
REMAT = {
  'none': None,
  'minimal': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  'full': jax.checkpoint_policies.nothing_saveable,
}


@flax.struct.dataclass
class StackInputs:
  """What all layers of a stack share.

  Attributes:
    attention: self-attention of the batch.
    bias: relative bias of all layers, as `attention.bias` made it, or None.
    rotation: of the positions, or None.
    cross_attention: to the encoder's tokens, in the decoder of an encoder-decoder.
    encoded: [batch, kv_length, embed] what the encoder returned; None once a cache has it.
    encoder_places: [kv_length] of the encoder's tokens in their rows.
    valid: [batch, length], 0 on padding; where routers of experts are charged.
  """

  attention: Attention
  bias: Any = None
  rotation: Optional[Rotation] = None
  cross_attention: Optional[Attention] = None
  encoded: Optional[jax.Array] = None
  encoder_places: Optional[jax.Array] = None
  valid: Optional[jax.Array] = None


@flax.struct.dataclass
class LayerCaches:
  """Caches of a decoder while it decodes: of its own tokens, and of the encoder's."""

  own: KVCache
  encoder: Optional[KVCache] = None


def attention_kind(config: TransformerConfig, *, causal: bool) -> AttentionKind:
  """Returns what self-attention is like in a stack of this configuration."""
  return AttentionKind(
    causal=causal,
    softcap=config.attention_softcap,
    buckets=RelativeBuckets(
      config.num_relpos_buckets, config.max_relpos_distance, bidirectional=not causal
    ),
  )


def relative_table(
  config: TransformerConfig, *, name: Optional[str] = None
) -> RelativePositionTable:
  """Returns the module of the learned bias."""
  return RelativePositionTable(
    num_heads=config.num_heads,
    num_buckets=config.num_relpos_buckets,
    dtype=config.compute_dtype,
    name=name,
  )


def make_norm(config: TransformerConfig, *, name: Optional[str] = None) -> nn.Module:
  """Returns the norm of this configuration."""
  return norm(config.norm, epsilon=config.norm_epsilon, dtype=config.compute_dtype, name=name)


class TransformerLayer(nn.Module):
  """Self-attention, attention to an encoder if there is one, and an MLP, each on the residual."""

  config: TransformerConfig

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    shared: StackInputs,
    dropout_rng: Optional[DropoutRng],
    number: Any = 0,
    caches: Optional[LayerCaches] = None,
  ) -> tuple[jax.Array, Optional[LayerCaches], Optional[jax.Array]]:
    """Returns [batch, length, embed] from the same, `caches` with this layer's part, and charges.

    The last are `moe.router_charges`, where the routers of experts are charged, else None.

    Args:
      x: [batch, length, embed].
      shared: of the stack.
      dropout_rng: None for no dropout.
      number: of the layer in the model.
      caches: of all layers, while decoding.
    """
    c = self.config
    before, add = functools.partial(_before_block, c), functools.partial(_add_block, c)

    def rng(site: str) -> Optional[DropoutRng]:
      return dropout_rng and dropout_rng.at(site)

    # Said here as well: what the loop carries, and stores for the backward pass, is split.
    x = shard(x, 'batch', 'residual_length', 'embed')
    bias, own, of_encoder = shared.bias, None, None
    if caches is not None:
      own, of_encoder = caches.own, caches.encoder
    if c.relative_bias == 'per_layer':
      bias = shared.attention.bias(relative_table(c, name='relpos_bias')())
    h = before(x, 'self_attention')
    h, own = self._attention('self_attention')(
      h,
      shared.attention,
      kv_input=h,
      bias=bias,
      window=self._window(number),
      rotation=shared.rotation,
      cache=own,
      layer=number,
      dropout_rng=rng('attention'),
    )
    x = add(x, h, 'self_attention', dropout_rng, 'attention_out')
    if shared.cross_attention is not None:
      cross_rng = rng('cross_attention')  # drops values, which stand where the encoder's tokens do
      cross_rng = cross_rng and cross_rng.replace(positions=shared.encoder_places)
      h, of_encoder = self._attention('cross_attention')(
        before(x, 'cross_attention'),
        shared.cross_attention,
        kv_input=shared.encoded,
        cache=of_encoder,
        layer=number,
        dropout_rng=cross_rng,
      )
      x = add(x, h, 'cross_attention', dropout_rng, 'cross_attention_out')
    h, charges = before(x, 'mlp'), None
    if c.num_experts:
      h, charges = self._experts()(h, valid=shared.valid, dropout_rng=rng('mlp'))
    else:
      h = self._mlp()(h, dropout_rng=rng('mlp'))
    x = add(x, h, 'mlp', dropout_rng, 'mlp_out')
    return x, None if caches is None else LayerCaches(own, of_encoder), charges

  def _attention(self, name: str) -> MultiHeadAttention:
    c = self.config
    return MultiHeadAttention(
      c.num_heads,
      c.head_dim,
      c.num_kv_heads,
      c.query_pre_attn_scalar,
      c.attention_bias,
      c.qk_norm,
      c.norm_epsilon,
      c.dropout_rate,
      c.compute_dtype,
      c.kernel_init,
      name=name,
    )

  def _mlp(self) -> Mlp:
    c = self.config
    return Mlp(
      c.mlp_dim,
      c.mlp_activations,
      c.dropout_rate,
      c.compute_dtype,
      c.mlp_bias,
      c.kernel_init,
      name='mlp',
    )

  def _experts(self) -> MoeMlp:
    c = self.config
    return MoeMlp(
      c.num_experts,
      c.mlp_dim,
      c.num_experts_per_token,
      c.expert_capacity_factor,
      c.mlp_activations,
      c.dropout_rate,
      c.compute_dtype,
      name='moe',
    )

  def _window(self, number: Any) -> Optional[jax.Array]:
    windows = self.config.windows
    return jnp.asarray(windows)[number % len(windows)] if any(windows) else None


# Functions, not methods: Flax would put a method's name into the names of the compiled operations.
def _before_block(config: TransformerConfig, x: jax.Array, block: str) -> jax.Array:
  """Returns the input of a block, [batch, length, embed], from the residual."""
  if config.norm_position != 'post':
    x = make_norm(config, name=f'pre_{block}_layer_norm')(x)
  return shard(x, 'batch', 'length', 'embed')


def _add_block(
  config: TransformerConfig,
  x: jax.Array,
  h: jax.Array,
  block: str,
  rng: Optional[DropoutRng],
  site: str,
) -> jax.Array:
  """Returns the residual `x` [batch, length, embed] after a block with output `h`."""
  if config.norm_position == 'sandwich':
    h = make_norm(config, name=f'post_{block}_layer_norm')(h)
  x = x + dropout(h, config.dropout_rate, rng and rng.at(site))
  if config.norm_position != 'post':
    return x
  x = make_norm(config, name=f'post_{block}_layer_norm')(x)
  return shard(x, 'batch', 'residual_length', 'embed')


def init_layers(layer: nn.Module, rng: jax.Array, *inputs: Any, num_layers: int) -> Any:
  """Returns the parameters of `num_layers` layers, stacked on a leading `layers` axis.

  Args:
    layer: a module.
    rng: key; each layer gets one of its own.
    *inputs: what the layer is called with; any size will do.
    num_layers: length of the stack.
  """
  stacked = jax.vmap(lambda key: layer.init(key, *inputs)['params'])(
    jax.random.split(rng, num_layers)
  )
  # One without names stays as it is: `split_names` tells the user of all of them.
  return jax.tree.map(
    lambda p: p.replace(names=('layers', *p.names)) if is_named(p) else p, stacked, is_leaf=is_named
  )


def scan_layers(
  layer: nn.Module,
  params: Any,
  x: jax.Array,
  shared: Any,
  *,
  config: TransformerConfig,
  dropout_rng: Optional[DropoutRng] = None,
  first_layer: Any = 0,
  caches: Optional[LayerCaches] = None,
  charges: Optional[jax.Array] = None,
) -> tuple[jax.Array, Optional[LayerCaches], Optional[jax.Array]]:
  """Returns `x` after all layers of `params`, each made whole when its turn comes; and the rest.

  The rest are `caches`, and `charges` with those of these layers added.

  Args:
    layer: a module called as `layer(x, shared, dropout_rng, number, caches)`.
    params: of the layers, stacked; all of the model's, or those of a pipeline stage. A tuple of
      those of each layer (`generation.by_layer`) is run without a loop, to decode.
    x: [batch, length, embed].
    shared: the same for all layers.
    config: its dtype, remat_policy and scan_unroll are used.
    dropout_rng: None for no dropout.
    first_layer: number of the first of these layers in the model.
    caches: while decoding.
    charges: [batch, length, 2] of routers so far; None where they are not charged.
  """

  def body(carry: Any, of_layer: Any) -> tuple[Any, None]:
    (x, caches, charges), (split_params, number) = carry, of_layer
    weights = fsdp.whole(split_params, config.compute_dtype)
    rng = dropout_rng and dropout_rng.fold(number)
    x, caches, more = layer.apply({'params': weights}, x, shared, rng, number, caches)
    return (x, caches, charges if more is None else charges + more), None

  carry = (x, caches, charges)
  if isinstance(params, tuple):
    for number, of_layer in enumerate(params, first_layer):
      carry, _ = body(carry, (of_layer, number))
    return carry
  num_layers = jax.tree.leaves(params)[0].shape[0]
  unroll = min(config.scan_unroll, num_layers)
  policy = fsdp.keep_policy(REMAT[config.remat_policy], params)
  if policy is not None:
    # A loop keeps forward and backward apart; unrolled whole, XLA would merge the recomputation
    # with what it was to replace, and save nothing.
    body = jax.checkpoint(body, policy=policy, prevent_cse=unroll == num_layers)
  numbers = first_layer + jnp.arange(num_layers)
  return jax.lax.scan(body, carry, (params, numbers), unroll=unroll)[0]
