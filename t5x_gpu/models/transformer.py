"""One transformer layer, and the scan over all layers of a stack.

Model families use this layer with different choices: encoder or decoder; norms before, after or
around each block; one attention, or two in the decoder of an encoder-decoder.
"""

import dataclasses
import functools
from typing import Any, Optional, Union

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from t5x_gpu.errors import ModelError, array_text
from t5x_gpu.layers.attention import KVCache, MultiHeadAttention
from t5x_gpu.layers.backends import choose
from t5x_gpu.layers.backends.choose import AttentionNeed
from t5x_gpu.layers.backends.kinds import Attention, AttentionKind, Bias
from t5x_gpu.layers.dropout import DropoutRng, dropout
from t5x_gpu.layers.mlp import Mlp
from t5x_gpu.layers.moe import MoeMlp
from t5x_gpu.layers.norm import make_norm
from t5x_gpu.layers.positions import (
  LayerRotations,
  RelativeBuckets,
  RelativePositionTable,
  Rotation,
)
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.precision import in_8_bits
from t5x_gpu.models.remat import named_input, remat_of
from t5x_gpu.partitioning.axis_rules import is_named, shard, split_ways
from t5x_gpu.partitioning.layer_stacks import Params
from t5x_gpu.partitioning.parameters import adds_in_place, num_layers, over_layers


@flax.struct.dataclass
class StackInputs:
  """Inputs that all layers of a stack share.

  Attributes:
    attention: self-attention of the batch.
    bias: relative bias of all layers, from `attention.bias`, or None.
    rotation: rotary rotation of the positions (`positions.rotations`), or None.
    cross_attention: attention to the encoder's tokens, in the decoder of an encoder-decoder.
    encoded: [batch, kv_length, embed], output of the encoder; None once a cache holds it.
    encoder_places: [kv_length], positions of the encoder's tokens in their rows.
    valid: [batch, length], 0 on padding; None without router losses.
  """

  attention: Attention
  bias: Optional[Bias] = None
  rotation: Optional[Union[Rotation, LayerRotations]] = None
  cross_attention: Optional[Attention] = None
  encoded: Optional[jax.Array] = None
  encoder_places: Optional[jax.Array] = None
  valid: Optional[jax.Array] = None


@flax.struct.dataclass
class LayerCaches:
  """Keys and values while decoding, of the decoder's tokens and of the encoder's tokens."""

  own: KVCache
  encoder: Optional[KVCache] = None


def attention_kind(config: TransformerConfig, *, causal: bool) -> AttentionKind:
  """Returns the kind of self-attention in a stack of this configuration."""
  return AttentionKind(
    causal=causal,
    softcap=config.attention_softcap,
    buckets=RelativeBuckets(
      config.num_relpos_buckets, config.max_relpos_distance, bidirectional=not causal
    ),
  )


def attention_need(config: TransformerConfig) -> AttentionNeed:
  """Returns the requirements of this configuration's self-attention on a backend."""
  return AttentionNeed(
    dtype=jnp.dtype(config.compute_dtype).name,
    head_dim=config.head_dim,
    softcap=config.attention_softcap is not None,
    relative_bias=config.relative_bias != 'none',
    rows_and_heads=config.num_heads // split_ways('heads'),
  )


def check_attention(
  config: Optional[TransformerConfig], device: jax.Device, *, context: Optional[str] = None
) -> None:
  """Raises ModelError if the attention backend that a model names cannot run.

  Args:
    config: config of the model; None for a model without one, which passes.
    device: device that would run it.
    context: as in `AttentionNeed`.
  """
  if config is not None:
    need = dataclasses.replace(attention_need(config), context=context)
    choose.check(config.attention, need, device)


def relative_table(
  config: TransformerConfig, *, name: Optional[str] = None
) -> RelativePositionTable:
  """Returns the module of the learned relative bias."""
  return RelativePositionTable(
    num_heads=config.num_heads,
    num_buckets=config.num_relpos_buckets,
    dtype=config.compute_dtype,
    name=name,
  )


class TransformerLayer(nn.Module):
  """Self-attention, attention to the encoder if there is one, and an MLP, each with a residual."""

  config: TransformerConfig

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    shared: StackInputs,
    dropout_rng: Optional[DropoutRng],
    number: ArrayLike = 0,
    caches: Optional[LayerCaches] = None,
  ) -> tuple[jax.Array, Optional[LayerCaches], Optional[jax.Array]]:
    """Returns `x` [batch, length, embed] after the layer, updated `caches`, and router charges.

    Charges are `moe.router_charges`, or None without router losses.

    Args:
      x: [batch, length, embed].
      shared: inputs that all layers share.
      dropout_rng: None for no dropout.
      number: index of the layer in its stack.
      caches: keys and values of all layers, while decoding.
    """
    c = self.config
    before, add = functools.partial(_before_block, c), functools.partial(_add_block, c)

    def rng(site: str) -> Optional[DropoutRng]:
      return dropout_rng and dropout_rng.at(site)

    # Repeated here so that the loop's carry, which the backward pass stores, is also split.
    x = shard(x, 'batch', 'residual_length', 'embed')
    bias, own, of_encoder = shared.bias, None, None
    if caches is not None:
      own, of_encoder = caches.own, caches.encoder
    if c.relative_bias == 'per_layer':
      bias = shared.attention.bias(relative_table(c, name='relpos_bias')())
    h = before(x, 'self_attention')
    h, own = MultiHeadAttention(c, name='self_attention')(
      h,
      shared.attention,
      kv_input=h,
      bias=bias,
      window=self._window(number),
      rotation=shared.rotation and shared.rotation.of_layer(number),
      cache=own,
      layer=number,
      dropout_rng=rng('attention'),
    )
    x = add(x, h, 'self_attention', dropout_rng, 'attention_out')
    if shared.cross_attention is not None:
      cross_rng = rng('cross_attention')  # drops values, which have the encoder's positions
      cross_rng = cross_rng and cross_rng.replace(positions=shared.encoder_places)
      h, of_encoder = MultiHeadAttention(c, name='cross_attention')(
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
      h, charges = MoeMlp(c, name='moe')(h, valid=shared.valid, dropout_rng=rng('mlp'))
    else:
      h = Mlp(c, name='mlp')(h, dropout_rng=rng('mlp'))
    x = add(x, h, 'mlp', dropout_rng, 'mlp_out')
    return x, None if caches is None else LayerCaches(own, of_encoder), charges

  def _window(self, number: ArrayLike) -> Optional[jax.Array]:
    windows = self.config.windows
    return jnp.asarray(windows)[number % len(windows)] if any(windows) else None


# Functions, not methods: Flax would put a method's name into the names of the compiled operations.
def _before_block(config: TransformerConfig, x: jax.Array, block: str) -> jax.Array:
  """Returns the input of a block, [batch, length, embed], from the residual."""
  if config.norm_position in ('pre', 'sandwich'):
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
  if config.norm_position in ('sandwich', 'output'):
    h = make_norm(config, name=f'post_{block}_layer_norm')(h)
  x = x + dropout(h, config.dropout('residual'), rng and rng.at(site))
  if config.norm_position != 'post':
    return x
  x = make_norm(config, name=f'post_{block}_layer_norm')(x)
  return shard(x, 'batch', 'residual_length', 'embed')


# The carry of the loop over layers: x, caches, router charges so far.
_Carry = tuple[jax.Array, Optional[LayerCaches], Optional[jax.Array]]


def init_layers(layer: nn.Module, rng: jax.Array, *inputs: object, num_layers: int) -> Params:
  """Returns the parameters of `num_layers` layers, stacked on a leading `layers` axis.

  Args:
    layer: the layer's module.
    rng: key, split into one per layer.
    *inputs: inputs of the layer, of any size.
    num_layers: length of the stack.
  """
  stacked = jax.vmap(lambda key: layer.init(key, *inputs)['params'])(
    jax.random.split(rng, num_layers)
  )
  # Parameters without names are unchanged: `split_names` reports all of them to the user.
  return jax.tree.map(
    lambda p: p.replace(names=('layers', *p.names)) if is_named(p) else p, stacked, is_leaf=is_named
  )


# Compiling 24 layers without a loop takes 20 CPU seconds instead of 8, in FP8 43 instead of 10; 48
# layers take 66 instead of 12.
_MOST_UNROLLED = 32


def layers_per_iteration(
  config: TransformerConfig,
  num_layers: int,
  *,
  num_devices: int,
  platform: str,
  is_block: bool,
  adds_in_place: bool,
) -> int:
  """Returns `scan_unroll`, by default all layers on GPUs if they are not too many.

  A loop keeps what its layers store for the backward pass in stacked arrays: it fills them with
  zeros, copies each value into them and later out of them, 24 of 292 ms of a step with 1.3B
  parameters on an H200 (docs/performance.md). On several GPUs, layers that compute something again
  run in a loop: without it, XLA computes it long before it is used. On one GPU, too, where a loop
  adds gradients in place (`InPlace`): it moves nearly as little as no loop, in less memory.

  Args:
    config: the model's config.
    num_layers: number of layers.
    num_devices, platform: where they run.
    is_block: whether they are a block of a stack, in a pipeline.
    adds_in_place: whether their loop adds gradients to gradients of earlier microbatches.
  """
  if config.scan_unroll is not None:
    return config.scan_unroll
  stores_all = config.remat_policy == 'none' and not config.full_remat_layers
  serves = stores_all or (num_devices <= 1 and not adds_in_place)
  fits = num_layers <= _MOST_UNROLLED and not is_block
  return num_layers if platform == 'gpu' and fits and serves else 1


def _checked(returned: object, layer: nn.Module, carry: _Carry) -> _Carry:
  """Returns what `layer` returned for `carry`; raises ModelError unless it fits the next layer."""
  (x, caches, charges), name = carry, type(layer).__name__

  def wrong(what: str, fix: str) -> ModelError:
    return ModelError(f'The layer {name} {what}', fix=fix, docs='add_a_model.md')

  if not isinstance(returned, (tuple, list)) or len(returned) != 3:
    kind = f'a tuple of {len(returned)}' if isinstance(returned, tuple) else array_text(returned)
    raise wrong(
      f'returned {kind}; a layer returns (x, caches, router losses).',
      'Without experts: return x, caches and LayerCaches(own), None',
    )
  out, own, more = returned
  if not isinstance(out, jax.Array) or (out.shape, out.dtype) != (x.shape, x.dtype):
    raise wrong(
      f'got x {array_text(x)} and returned x {array_text(out)}.',
      'Return x with the shape and dtype that the layer got.',
    )
  if (own is None) != (caches is None):
    got, made = ('no caches', 'caches') if caches is None else ('caches, for decoding,', 'none')
    raise wrong(
      f'got {got} and returned {made}.',
      'Return the caches that attention returned: caches and LayerCaches(own)',
    )
  if more is not None and charges is None:
    raise wrong(
      'returned router losses, and this model adds up none.',
      'Return None in their place, or set TransformerConfig.router_balance_loss.',
    )
  return out, own, more


def scan_layers(
  layer: nn.Module,
  params: Params,
  x: jax.Array,
  shared: StackInputs,
  *,
  config: TransformerConfig,
  dropout_rng: Optional[DropoutRng] = None,
  first_layer: ArrayLike = 0,
  caches: Optional[LayerCaches] = None,
  charges: Optional[jax.Array] = None,
  layers_of_stack: Optional[int] = None,
) -> _Carry:
  """Returns (x, caches, charges) after all layers of `params`.

  FSDP parameters are gathered one layer at a time.

  Args:
    layer: a module called as `layer(x, shared, dropout_rng, number, caches)`.
    params: stacked parameters of the layers, of the whole stack or of a pipeline stage. A tuple
      with the parameters of each layer (`generation.by_layer`) runs without a loop, for decoding.
    x: [batch, length, embed].
    shared: inputs that all layers share.
    config: dtype, remat and scan_unroll are used. While decoding, matmuls are not in 8 bits:
      they are bound by memory, and one token of each row would set the scale for all rows.
    dropout_rng: None for no dropout.
    first_layer: index of the first of these layers in the stack.
    caches: keys and values, while decoding.
    charges: [batch, length, 2], router charges so far; None without router losses.
    layers_of_stack: number of layers of the whole stack; None for the number in `params`.
  """

  def one(
    weights: Params,
    carry: _Carry,
    shared: tuple[StackInputs, Optional[DropoutRng]],
    number: ArrayLike,
  ) -> _Carry:
    (x, caches, charges), (shared, rng) = carry, shared
    rng = rng and rng.fold(number)
    returned = layer.apply({'params': weights}, named_input(x), shared, rng, number, caches)
    x, caches, more = _checked(returned, layer, carry)
    return x, caches, charges if more is None else charges + more

  options: dict[str, Any] = {'unroll': config.scan_unroll or 1}
  if caches is None:
    count = num_layers(params)
    options['remat'] = remat_of(
      config.remat_policy,
      config.full_remat_layers,
      num_layers=count,
      of_stack=layers_of_stack or count,
    )
    options['unroll'] = layers_per_iteration(
      config,
      count,
      num_devices=jax.sharding.get_abstract_mesh().size,
      platform=choose.hardware().platform,
      is_block=count < (layers_of_stack or count),
      adds_in_place=adds_in_place(params),
    )
  return over_layers(
    one,
    in_8_bits(params, config.fp8_scaling) if config.fp8 and caches is None else params,
    (x, caches, charges),
    (shared, dropout_rng),
    dtype=config.compute_dtype,
    first_layer=first_layer,
    **options,
  )
