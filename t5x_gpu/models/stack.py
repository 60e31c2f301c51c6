"""The parts of all model families: embeddings, and a stack of layers with its final norm.

Both are plain objects whose methods take the parameters. Model families combine them differently
and add different heads.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Optional, Union

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.layers.backends.choose import make_attention
from t5x_gpu.layers.backends.kinds import AttentionKind
from t5x_gpu.layers.dropout import DropoutRng, dropout
from t5x_gpu.layers.embedding import Embedding, is_looked_up_in_parts, rows_of_parts
from t5x_gpu.layers.masks import TokenInfo
from t5x_gpu.layers.positions import PositionTable
from t5x_gpu.layers.rotary import example_lengths, rotations
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.losses import Sums, with_router_losses
from t5x_gpu.models.model import DeviceBatch, Params
from t5x_gpu.models.transformer import (
  LayerCaches,
  StackInputs,
  TransformerLayer,
  attention_kind,
  attention_need,
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
  """Returns the dropout rng of one part of a model; None without a key.

  Args:
    key: key of the step.
    batch: has 'rows', and the positions of tokens if rows are split over devices.
    part: name of the part.
    side: 'encoder' or 'decoder': the stack whose tokens are dropped.
  """
  if key is None:
    return None
  return DropoutRng(key, batch['rows'], batch.get(f'{side}_places')).at(part)


@flax.struct.dataclass
class Routed:
  """The activation between layers if the loss includes router losses.

  Attributes:
    x: [batch, length, embed], the activation without router losses.
    charges: [batch, length, 2], `moe.router_charges` summed over the layers so far.
  """

  x: jax.Array
  charges: jax.Array


# The activation between layers.
Activation = Union[jax.Array, Routed]


@dataclasses.dataclass(frozen=True)
class Embeddings:
  """Token vectors, plus position and token type vectors if the model has them."""

  config: TransformerConfig

  def init(self, keys: Keys) -> dict[str, Params]:
    """Returns part name -> parameters."""
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
    """Returns [batch, length, embed], the input of the first layer.

    Args:
      params: parameters of the model.
      tokens: [batch, length] ids.
      positions: [length] or [batch, length], position of each token in its example.
      token_types: [batch, length]; None for type 0 everywhere.
      rng: None for no dropout.
    """
    c = self.config

    def whole(name: str) -> Params:
      return {'params': fsdp.whole(params[name], c.compute_dtype)}

    table = params['token_embedder']['embedding']
    if is_looked_up_in_parts(table, tokens, c.compute_dtype):
      x = rows_of_parts(table, tokens, c.compute_dtype)
    else:
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
    x = dropout(x, c.dropout('embedding'), rng)
    if not c.charges_routers:
      return x
    # Zeros that vary over the same mesh axes as `x`.
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
  """Returns [batch, length, embed] without router charges."""
  return x.x if isinstance(x, Routed) else x


@dataclasses.dataclass(frozen=True)
class Stack:
  """Layers, the relative bias that they share, and the norm after the last layer.

  Attributes:
    config: sizes and choices, except the number of layers.
    num_layers: layers of the whole stack.
    causal: whether a token sees only itself and earlier tokens.
    final_norm: name of the last norm.
    attends_to_encoder: whether layers also attend to an encoder.
    layer: module class of one layer, created by `layer(config)` and called like TransformerLayer.
  """

  config: TransformerConfig
  num_layers: int
  causal: bool
  final_norm: str
  attends_to_encoder: bool = False
  layer: Callable[[TransformerConfig], Any] = TransformerLayer

  def init(self, keys: Keys) -> dict[str, Params]:
    """Returns part name -> parameters."""
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
    if c.norm_position != 'post':  # else the last layer ends with a norm
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
      params: 'layers', and 'relpos_bias' if layers share it.
      x: output of the embeddings or of earlier layers.
      info: positions and segments of the tokens.
      positions: [length] or [batch, length], position of each token in its example.
      encoder_info, encoded: the encoder's tokens and its output [batch, kv_length, embed].
      rng: None for no dropout.
      first_layer: index of the first of these layers in the stack.
    """
    shared = self._shared(
      params, info, positions, encoder_info, encoded, attention=self.config.attention
    )
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
    """Returns `x` [batch, new, embed] after all layers, and the caches with the new tokens.

    Args:
      params, x, info, positions: as in `run`, for the new tokens only.
      caches: keys and values of earlier tokens.
      cached: positions and segments of all slots of `caches`, including the new tokens.
      encoder_info: positions and segments of the encoder's tokens.
      encoded: output of the encoder in the first call; None afterwards, when caches hold it.
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
    """Returns `sums` plus the router losses, if the config has any.

    Args:
      sums: sums of the cross entropy.
      x: output of the last layer.
      weights: [batch, length] loss weights.
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
    attention: Optional[str] = None,
  ) -> StackInputs:
    c, bias, cross = self.config, None, None
    need, request = attention_need(c), attention
    attention = make_attention(
      attention_kind(c, causal=self.causal), info, cached, need=need, request=request
    )
    if c.relative_bias == 'shared' and 'relpos_bias' in params:
      bias = attention.bias(relative_table(c).apply({'params': params['relpos_bias']}))
    if self.attends_to_encoder:
      cross = make_attention(
        AttentionKind(causal=False, softcap=c.attention_softcap),
        info,
        encoder_info,
        need=dataclasses.replace(need, relative_bias=False),
        request=request,
      )
    lengths = None
    if c.rope_switch is not None and cached is None:
      lengths = example_lengths(info, positions)
    elif c.rope_switch is not None:  # while decoding, the newest token is the example's last
      lengths = positions[:, -1:] + 1
    rotation = rotations(c.rope_of_layers, positions, c.head_dim, lengths=lengths)
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
