"""Multi-head attention over named axes, and the cache of keys and values for decoding.

With a `KVCache`, decoding computes keys and values of each token once.
"""

import dataclasses
from collections.abc import Callable
from typing import Optional

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from t5x_gpu.layers.backends.kinds import Attention, Bias
from t5x_gpu.layers.config import LayerConfig
from t5x_gpu.layers.dense import DenseGeneral, Linear, LinearParams, contract, fan_in_init
from t5x_gpu.layers.dropout import DropoutRng, dropout_positions
from t5x_gpu.layers.fp8 import on_kernels, operand
from t5x_gpu.layers.norm import HeadsNorm, RMSNorm
from t5x_gpu.layers.positions import Rotation
from t5x_gpu.partitioning.axis_rules import shard, split_ways


@flax.struct.dataclass
class KVCache:
  """Keys and values of all layers of a stack.

  All rows write to the same slot: prompts of different lengths are padded on the left. All layers
  are in one array, which a loop over layers updates in place.

  Attributes:
    key, value: [layers, batch, kv_heads, slots, kv], the order of attention's matmuls; with slots
      first, each token would transpose all of them.
    slot: scalar int32, slot of the next token.
  """

  key: jax.Array
  value: jax.Array
  slot: jax.Array

  def write(self, layer: ArrayLike, key: jax.Array, value: jax.Array) -> 'KVCache':
    """Returns the cache with new `key` and `value` [batch, new, kv_heads, kv] of `layer`."""

    def put(stack: jax.Array, x: jax.Array) -> jax.Array:
      x = jnp.swapaxes(x, 1, 2)[None].astype(stack.dtype)
      return _laid_out(jax.lax.dynamic_update_slice(stack, x, (layer, 0, 0, self.slot, 0)))

    return self.replace(key=put(self.key, key), value=put(self.value, value))

  def read(self, layer: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Returns (key, value) [batch, slots, kv_heads, kv] of `layer`."""
    return tuple(
      jnp.swapaxes(jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), 1, 2)
      for x in (self.key, self.value)
    )

  def of_rows(self, function: Callable[[jax.Array], jax.Array]) -> 'KVCache':
    """Returns the cache with `function` applied to its arrays; `function` may only change rows."""
    return self.replace(key=_laid_out(function(self.key)), value=_laid_out(function(self.value)))

  @property
  def num_slots(self) -> int:
    """Number of tokens that the cache can hold."""
    return self.key.shape[3]


def empty_cache(
  *, num_layers: int, batch: int, slots: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike
) -> KVCache:
  """Returns a cache of zeros, split over the mesh by the active rules."""
  zeros = _laid_out(jnp.zeros((num_layers, batch, num_kv_heads, slots, head_dim), dtype))
  return KVCache(zeros, zeros, jnp.int32(0))


def _laid_out(stack: jax.Array) -> jax.Array:
  return shard(stack, None, 'batch', 'kv_heads', None, 'kv')


BIASES = ('none', 'qkv', 'all')
FEATURE_NORMS = ('head', 'head_plus_one', 'all_heads')


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(LayerConfig):
  """Settings of attention heads.

  Attributes:
    num_heads: number of attention heads.
    head_dim: features of one head; num_heads x head_dim need not be embed_dim.
    num_kv_heads: key and value heads, each shared by several query heads (GQA; 1 is MQA); None for
      num_heads.
    query_pre_attn_scalar: attention logits are divided by the square root of this number, usually
      head_dim. None for T5, whose query initializer includes the factor.
    qk_norm: RMSNorm on the features of queries and keys (Qwen-3).
    qk_norm_kind: 'head', over the features of each head; 'head_plus_one', which multiplies by
      1 + scale (Gemma-3); 'all_heads', over the features of all heads together (OLMo-2).
    attention_bias: which projections have a bias: 'none', 'qkv' or 'all'.
    attention_dropout: dropout rate of attention weights; None for dropout_rate.
  """

  num_heads: int
  head_dim: int
  num_kv_heads: Optional[int] = None
  query_pre_attn_scalar: Optional[float] = None
  qk_norm: bool = False
  qk_norm_kind: str = 'head'
  attention_bias: str = 'none'
  attention_dropout: Optional[float] = None

  @property
  def kv_heads(self) -> int:
    """Heads of keys and values."""
    return self.num_heads if self.num_kv_heads is None else self.num_kv_heads


class MultiHeadAttention(nn.Module):
  """Projections to heads, attention, and the projection back; logits and softmax are float32."""

  config: AttentionConfig

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    attention: Attention,
    *,
    kv_input: Optional[jax.Array] = None,
    bias: Optional[Bias] = None,
    window: Optional[jax.Array] = None,
    rotation: Optional[Rotation] = None,
    cache: Optional[KVCache] = None,
    layer: ArrayLike = 0,
    dropout_rng: Optional[DropoutRng] = None,
  ) -> tuple[jax.Array, Optional[KVCache]]:
    """Returns the output [batch, length, embed] and the updated `cache`.

    Args:
      x: [batch, length, embed], input of the queries.
      attention: how queries attend to keys.
      kv_input: [batch, kv_length, embed], input of keys and values; `x` for self-attention. None if
        `cache` already holds keys and values.
      bias: result of `attention.bias`.
      window: number of positions back that this layer attends to, see Attention.
      rotation: rotary rotation of the positions of `x`; for self-attention only.
      cache: earlier keys and values; new ones are added, and queries attend to all of them.
      layer: index of this layer in `cache`.
      dropout_rng: None for no dropout.
    """
    c, inputs = self.config, {'query': x}
    if kv_input is not None:
      inputs |= {'key': kv_input, 'value': kv_input}
    heads = self._project(inputs)
    query, key, value = (heads.get(name) for name in ('query', 'key', 'value'))
    if c.qk_norm:
      query = self._feature_norm('query_norm', 'heads')(query)
      key = None if key is None else self._feature_norm('key_norm', 'kv_heads')(key)
    if rotation is not None:
      query, key = (rotation(x, after_norm=c.qk_norm) for x in (query, key))
    if c.query_pre_attn_scalar is not None:
      query = query * jnp.asarray(c.query_pre_attn_scalar**-0.5, query.dtype)
    if cache is not None:
      if key is not None:
        cache = cache.write(layer, key, value)
      key, value = cache.read(layer)
    # T5 drops an attention weight for all queries at once, which is equivalent to dropping a value.
    value = dropout_positions(value, c.dropout('attention'), dropout_rng, num_heads=c.kv_heads)
    out = attention(query, key, value, bias, window)
    out = shard(out, 'batch', 'length', 'heads', 'kv')
    init = c.kernel_init or fan_in_init(num_in=2, distribution='normal')
    out = DenseGeneral(
      (x.shape[-1],),
      ('heads', 'kv', 'embed'),
      num_in=2,
      kernel_init=init,
      dtype=c.compute_dtype,
      use_bias=c.attention_bias == 'all',
      bias_along='residual_length',
      name='out',
    )(out)
    return shard(out, 'batch', 'residual_length', 'embed'), cache

  def _feature_norm(self, name: str, heads: str) -> nn.Module:
    c = self.config
    if c.qk_norm_kind == 'all_heads':
      count = c.num_heads if heads == 'heads' else c.kv_heads
      return HeadsNorm(count, c.norm_epsilon, c.compute_dtype, heads=heads, name=name)
    plus_one = c.qk_norm_kind == 'head_plus_one'
    return RMSNorm(c.norm_epsilon, c.compute_dtype, plus_one, axis='kv', along=heads, name=name)

  def _project(self, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns name -> [batch, length, heads, kv] from name -> input [batch, length, embed].

    If heads are split, one matmul computes all projections of the same input, with features ordered
    by key and value head, so the input is gathered once and its gradient reduced once. If there are
    fewer key and value heads than devices, every device computes the head that its queries need.
    """
    c, dtype, maps = self.config, self.config.compute_dtype, {}
    for name, x in inputs.items():
      axis, count = ('heads', c.num_heads) if name == 'query' else ('kv_heads', c.kv_heads)
      # T5's queries start with the factor 1/sqrt(kv), which its softmax lacks.
      scale = 1.0 / c.head_dim if name == 'query' and c.query_pre_attn_scalar is None else 1.0
      init = c.kernel_init or fan_in_init(num_in=1, distribution='normal', scale=scale)
      maps[name] = LinearParams(
        (x.shape[-1], count, c.head_dim),
        ('embed', axis, 'kv'),
        init,
        c.attention_bias != 'none',
        name=name,
      )(dtype)
    operands = {id(x): operand(x.astype(dtype), maps[name].kernel) for name, x in inputs.items()}
    ways = split_ways('kv_heads')
    if ways == 1:
      return {
        name: self._finish(name, m, contract(operands[id(x)], m.kernel), x)
        for (name, x), m in zip(inputs.items(), maps.values())
      }
    groups = c.kv_heads if c.kv_heads % ways == 0 else ways

    def by_group(x: jax.Array) -> jax.Array:
      """Returns parameters [..., heads, kv] as [..., groups, heads per group, kv]."""
      if x.shape[-2] < groups:
        x = jnp.repeat(x, groups // x.shape[-2], axis=-2)
      return x.reshape(*x.shape[:-2], groups, -1, x.shape[-1])

    projected = {}
    for x in {id(x): x for x in inputs.values()}.values():
      names = [name for name in inputs if inputs[name] is x]
      kernels = [on_kernels(by_group, maps[name].kernel.astype(dtype)) for name in names]
      joined = on_kernels(lambda *k: jnp.concatenate(k, axis=-2), *kernels)
      y = contract(operands[id(x)], joined)
      y = shard(y, 'batch', 'length', 'kv_heads', None, 'kv')
      start = 0
      for name, kernel in zip(names, kernels):
        part = y[..., start : start + kernel.shape[-2], :]
        start += kernel.shape[-2]
        m = maps[name].on_features(lambda w: by_group(w).reshape(*w.shape[:-2], -1, c.head_dim))
        projected[name] = self._finish(name, m, part.reshape(*x.shape[:2], -1, c.head_dim), x)
    return projected

  def _finish(self, name: str, linear: Linear, y: jax.Array, x: jax.Array) -> jax.Array:
    y = linear.finish(y, x)
    return shard(y, 'batch', 'length', 'heads' if name == 'query' else 'kv_heads', 'kv')
