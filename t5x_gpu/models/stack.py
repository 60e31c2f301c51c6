"""What the model families are made of: embeddings, and a stack of layers with its final norm.

Both are plain objects whose functions take their parameters; the families differ in how they put
them together and in what stands on top.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Optional, Union

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.layers.attention_backends import AttentionKind, make_attention
from t5x_gpu.layers.dropout import DropoutRng, dropout
from t5x_gpu.layers.embedding import Embedding
from t5x_gpu.layers.masks import TokenInfo
from t5x_gpu.layers.positions import PositionTable
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.losses import Sums, with_router_losses
from t5x_gpu.models.model import DeviceBatch, Params
from t5x_gpu.models.transformer import (
  LayerCaches,
  StackInputs,
  TransformerLayer,
  attention_kind,
  init_layers,
  make_norm,
  relative_table,
  scan_layers,
)
from t5x_gpu.partitioning import fsdp
from t5x_gpu.partitioning.axis_rules import shard

Keys = Mapping[str, jax.Array]


def dropout_rng(
  key: Optional[jax.Array], batch: DeviceBatch, part: str, *, side: str
) -> Optional[DropoutRng]:
  """Returns the source of the masks of one part of a model; None without a key.

  Args:
    key: of the step.
    batch: has 'rows', and the places of tokens where rows are split.
    part: name of the part.
    side: 'encoder' or 'decoder', whose tokens are meant.
  """
  if key is None:
    return None
  return DropoutRng(key, batch['rows'], batch.get(f'{side}_places')).at(part)


@flax.struct.dataclass
class Routed:
  """What passes between layers whose routers of experts are charged.

  Attributes:
    x: [batch, length, embed], as passes between all other layers.
    charges: [batch, length, 2] `moe.router_charges`, summed over the layers so far.
  """

  x: jax.Array
  charges: jax.Array


# What passes between layers.
Activation = Union[jax.Array, Routed]


@dataclasses.dataclass(frozen=True)
class Embeddings:
  """Token vectors, with those of positions and token types added where the model has them."""

  config: TransformerConfig

  def init(self, keys: Keys) -> dict[str, Params]:
    """Returns parameters, by the name of each part."""
    ids, c = jnp.zeros((1, 1), jnp.int32), self.config
    x = jnp.zeros((1, 1, c.embed_dim), c.compute_dtype)
    params = {'token_embedder': self._tokens.init(keys['token_embedder'], ids)['params']}
    for name, size in (
      ('position_embedder', c.num_positions),
      ('token_type_embedder', c.num_token_types),
    ):
      if size:
        params[name] = self._table(size).init(keys[name], ids)['params']
    if c.embedding_norm:
      params['embedding_norm'] = make_norm(c).init(keys['embedding_norm'], x)['params']
    return params

  def __call__(
    self,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    *,
    token_types: Optional[jax.Array] = None,
    rng: Optional[DropoutRng] = None,
  ) -> Activation:
    """Returns [batch, length, embed], what the first layer gets.

    Args:
      params: of the model.
      tokens: [batch, length] ids.
      positions: of each token in its example, [length] or [batch, length].
      token_types: [batch, length]; None for type 0 everywhere.
      rng: None for no dropout.
    """
    c = self.config

    def whole(name: str) -> Params:
      return {'params': fsdp.whole(params[name], c.compute_dtype)}

    x = self._tokens.apply(whole('token_embedder'), tokens)
    if c.scale_embedding:
      x = x * jnp.asarray(c.embed_dim**0.5, x.dtype)
    if c.num_positions:
      x = x + self._table(c.num_positions).apply(whole('position_embedder'), positions)
    if c.num_token_types:
      types = jnp.zeros_like(tokens) if token_types is None else token_types
      x = x + self._table(c.num_token_types).apply(whole('token_type_embedder'), types)
    if c.embedding_norm:
      x = shard(make_norm(c).apply(whole('embedding_norm'), x), 'batch', 'residual_length', 'embed')
    x = dropout(x, c.dropout_rate, rng)
    if not c.charges_routers:
      return x
    # Zeros that vary over the mesh as `x` does.
    return Routed(x, jnp.where(False, x[..., :2].astype(jnp.float32), 0.0))

  @property
  def _tokens(self) -> Embedding:
    c = self.config
    return Embedding(
      c.vocab_size,
      c.embed_dim,
      dtype=c.compute_dtype,
      stddev=1.0 if c.init_stddev is None else c.init_stddev,
    )

  def _table(self, size: int) -> PositionTable:
    c = self.config
    return PositionTable(
      size,
      c.embed_dim,
      dtype=c.compute_dtype,
      stddev=1.0 if c.init_stddev is None else c.init_stddev,
    )


def output(x: Activation) -> jax.Array:
  """Returns [batch, length, embed] of what passes between layers."""
  return x.x if isinstance(x, Routed) else x


@dataclasses.dataclass(frozen=True)
class Stack:
  """Layers, the relative bias that they share, and the norm after the last one.

  Attributes:
    config: of the layers; their number is `num_layers`.
    num_layers: of the whole stack.
    causal: whether a token sees no later one.
    final_norm: name of the last norm.
    attends_to_encoder: layers have a second attention.
    layer: module of one layer, made as `layer(config)` and called as a TransformerLayer is.
  """

  config: TransformerConfig
  num_layers: int
  causal: bool
  final_norm: str
  attends_to_encoder: bool = False
  layer: Callable[[TransformerConfig], Any] = TransformerLayer

  def init(self, keys: Keys) -> dict[str, Params]:
    """Returns parameters, by the name of each part."""
    c = self.config
    x, ones = jnp.zeros((1, 1, c.embed_dim), c.compute_dtype), jnp.ones((1, 1), jnp.int32)
    info = TokenInfo(jnp.arange(1), ones)
    shared = self._shared({}, info, info.positions, *((info, x) if self.attends_to_encoder else ()))
    params = {
      'layers': init_layers(
        self.layer(c), keys['layers'], x, shared, None, num_layers=self.num_layers
      )
    }
    if c.relative_bias == 'shared':
      params['relpos_bias'] = relative_table(c).init(keys['relpos_bias'])['params']
    if c.norm_position != 'post':
      params[self.final_norm] = make_norm(c).init(keys[self.final_norm], x)['params']
    return params

  def run(
    self,
    params: Params,
    x: Activation,
    info: TokenInfo,
    positions: jax.Array,
    *,
    encoder_info: Optional[TokenInfo] = None,
    encoded: Optional[jax.Array] = None,
    rng: Optional[DropoutRng] = None,
    first_layer: Any = 0,
  ) -> Activation:
    """Returns `x` after the layers of `params['layers']`.

    Args:
      params: 'layers', and 'relpos_bias' where layers share it.
      x: what the embeddings or earlier layers returned.
      info: of the tokens.
      positions: of each token in its example, [length] or [batch, length].
      encoder_info, encoded: the encoder's tokens and what it returned [batch, kv_length, embed].
      rng: None for no dropout.
      first_layer: number of the first of these layers.
    """
    shared = self._shared(params, info, positions, encoder_info, encoded)
    options = dict(dropout_rng=rng, first_layer=first_layer)
    if not isinstance(x, Routed):
      return self._scan(params, x, shared, **options)[0]
    shared = shared.replace(valid=(info.segments > 0).astype(jnp.float32))
    x, _, charges = self._scan(params, x.x, shared, charges=x.charges, **options)
    return Routed(x, charges)

  def extend(
    self,
    params: Params,
    x: jax.Array,
    info: TokenInfo,
    positions: jax.Array,
    caches: LayerCaches,
    cached: TokenInfo,
    *,
    encoder_info: Optional[TokenInfo] = None,
    encoded: Optional[jax.Array] = None,
  ) -> tuple[jax.Array, LayerCaches]:
    """Returns `x` [batch, new, embed] after all layers, and the caches with the new tokens in them.

    Args:
      params, x, info, positions: as in `run`, of the new tokens alone.
      caches: of what came before.
      cached: what is known of all slots of `caches`, the new tokens' included.
      encoder_info: of the encoder's tokens.
      encoded: what the encoder returned, the first time; None once the caches have it.
    """
    shared = self._shared(params, info, positions, encoder_info, encoded, cached=cached)
    return self._scan(params, output(x), shared, caches=caches)[:2]

  def finish(self, params: Params, x: Activation) -> jax.Array:
    """Returns [batch, length, embed] after the final norm, if there is one."""
    x = output(x)
    if self.config.norm_position == 'post':
      return x
    weights = fsdp.whole(params[self.final_norm], self.config.compute_dtype)
    return make_norm(self.config).apply({'params': weights}, x)

  def charge_routers(self, sums: Sums, x: Activation, weights: jax.Array) -> Sums:
    """Returns `sums` with the losses of routers, if they are charged.

    Args:
      sums: of the cross entropy.
      x: what the last layer returned.
      weights: [batch, length] of the loss.
    """
    if not isinstance(x, Routed):
      return sums
    return with_router_losses(
      sums,
      x.charges,
      weights,
      num_layers=self.num_layers,
      balance=self.config.router_balance_loss,
      z=self.config.router_z_loss,
    )

  def _shared(
    self,
    params: Params,
    info: TokenInfo,
    positions: jax.Array,
    encoder_info: Optional[TokenInfo] = None,
    encoded: Optional[jax.Array] = None,
    *,
    cached: Optional[TokenInfo] = None,
  ) -> StackInputs:
    c, bias, cross = self.config, None, None
    attention = make_attention(attention_kind(c, causal=self.causal), info, cached)
    if c.relative_bias == 'shared' and 'relpos_bias' in params:
      bias = attention.bias(relative_table(c).apply({'params': params['relpos_bias']}))
    if self.attends_to_encoder:
      cross = make_attention(
        AttentionKind(causal=False, softcap=c.attention_softcap), info, encoder_info
      )
    rotation = None if c.rope is None else c.rope.rotation(positions, c.head_dim)
    return StackInputs(
      attention,
      bias,
      rotation,
      cross,
      encoded,
      None if encoder_info is None else encoder_info.positions,
    )

  def _scan(
    self, params: Params, x: jax.Array, shared: StackInputs, **options: Any
  ) -> tuple[jax.Array, Optional[LayerCaches], Optional[jax.Array]]:
    return scan_layers(
      self.layer(self.config), params['layers'], x, shared, config=self.config, **options
    )
