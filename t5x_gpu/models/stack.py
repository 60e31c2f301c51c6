"""The parts of all model families: embeddings, and a stack of layers with its final norm.

Both are plain objects whose methods take the parameters. Model families combine them differently
and add different heads, on the base classes `TransformerModel` and `OneStackModel`.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar, Optional, TypeVar, Union

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from t5x_gpu.data.batches import BatchSpec
from t5x_gpu.data.features import batch_spec
from t5x_gpu.errors import ModelError
from t5x_gpu.layers.backends.choose import make_attention
from t5x_gpu.layers.backends.kinds import AttentionKind
from t5x_gpu.layers.dropout import DropoutRng, dropout
from t5x_gpu.layers.embedding import Embedding, is_looked_up_in_parts, rows_of_parts
from t5x_gpu.layers.masks import TokenInfo, token_info
from t5x_gpu.layers.norm import make_norm
from t5x_gpu.layers.positions import PositionTable, example_lengths, rotations
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.flops import transformer_flops_per_token
from t5x_gpu.models.heads import token_logits
from t5x_gpu.models.incremental import DecodingState, advance
from t5x_gpu.models.losses import Sums, with_router_losses
from t5x_gpu.models.model import DeviceBatch, Model, Params
from t5x_gpu.models.transformer import (
  LayerCaches,
  StackInputs,
  TransformerLayer,
  attention_kind,
  attention_need,
  init_layers,
  relative_table,
  scan_layers,
)
from t5x_gpu.partitioning import overlap
from t5x_gpu.partitioning.axis_rules import shard
from t5x_gpu.partitioning.layer_stacks import ONLY, run_layers
from t5x_gpu.partitioning.parameters import whole

Keys = Mapping[str, jax.Array]
_Table = TypeVar('_Table', Embedding, PositionTable)


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


def info_of(batch: DeviceBatch, side: str, *, prefix: Optional[jax.Array] = None) -> TokenInfo:
  """Returns the segments and positions that attention needs.

  Args:
    batch: features of the batch.
    side: 'encoder' or 'decoder'.
    prefix: see TokenInfo.
  """
  known = (batch.get(f'{side}_{name}') for name in ('loss_weights', 'causal_attention'))
  return token_info(
    batch['encoder_input_tokens' if side == 'encoder' else 'decoder_target_tokens'],
    prefix=prefix,
    segment_ids=batch.get(f'{side}_segment_ids'),
    positions=batch.get(f'{side}_places'),
    known=tuple(known),
  )


def positions_of(batch: DeviceBatch, side: str) -> jax.Array:
  """Returns the position of each token in its example; a packed row holds several examples."""
  return batch.get(f'{side}_positions', info_of(batch, side).positions)


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

    def gathered(name: str) -> dict[str, Params]:
      return {'params': whole(params[name], c.compute_dtype)}

    table = params['token_embedder']['embedding']
    if is_looked_up_in_parts(table, tokens, c.compute_dtype):
      x = rows_of_parts(table, tokens, c.compute_dtype)
    else:
      x = self._tokens.apply(gathered('token_embedder'), tokens)
    if c.scale_embedding:
      x = x * jnp.asarray(c.embed_dim**0.5, x.dtype)
    if c.num_positions:
      x = x + self._table(c.num_positions).apply(gathered('position_embedder'), positions)
    if c.num_token_types:
      types = jnp.zeros_like(tokens) if token_types is None else token_types
      x = x + self._table(c.num_token_types).apply(gathered('token_type_embedder'), types)
    if c.embedding_norm:
      x = make_norm(c).apply(gathered('embedding_norm'), x)
      x = shard(x, 'batch', 'residual_length', 'embed')
    x = dropout(x, c.dropout('embedding'), rng)
    if not c.charges_routers:
      return x
    # Zeros that vary over the same mesh axes as `x`.
    return Routed(x, jnp.where(False, x[..., :2].astype(jnp.float32), 0.0))

  @property
  def _tokens(self) -> Embedding:
    return self._table(self.config.vocab_size, Embedding)

  def _table(self, size: int, kind: type[_Table] = PositionTable) -> _Table:
    c = self.config
    given = (x for x in (c.embedding_stddev, c.init_stddev) if x is not None)
    return kind(size, c.embed_dim, c.compute_dtype, next(given, 1.0))


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
  layer: Callable[[TransformerConfig], nn.Module] = TransformerLayer

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
    first_layer: ArrayLike = 0,
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

  def next_logits(
    self,
    params: Params,
    embedders: Params,
    tokens: jax.Array,
    state: DecodingState,
    *,
    encoded: Optional[jax.Array] = None,
  ) -> tuple[jax.Array, DecodingState]:
    """Returns float32 logits [batch, vocab] of the token after `tokens`, and the next state.

    Args:
      params: as in `run`, with the final norm, and the logits unless they are tied.
      embedders: parameters of `Embeddings`.
      tokens: [batch, new], whose keys and values are added to the caches.
      state: state before these tokens.
      encoded: output of the encoder in the first call; None afterwards, when caches hold it.
    """
    info, positions, cached = state.of_next(tokens.shape[1])
    x = output(Embeddings(self.config)(embedders, tokens, positions))
    shared = self._shared(params, info, positions, state.encoder_info(), encoded, cached=cached)
    x, caches, _ = self._scan(params, x, shared, caches=state.caches)
    x = self.finish(params, x[:, -1:])
    logits = token_logits(self.config, params, x, embedders['token_embedder'])
    return logits[:, 0], advance(state, caches, tokens)

  def finish(self, params: Params, x: Activation) -> jax.Array:
    """Returns [batch, length, embed] after the final norm, if there is one."""
    x = output(x)
    if self.config.norm_position == 'post':
      return x
    weights = whole(params[self.final_norm], self.config.compute_dtype)
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
    self, params: Params, x: jax.Array, shared: StackInputs, **options: object
  ) -> tuple[jax.Array, Optional[LayerCaches], Optional[jax.Array]]:
    return scan_layers(
      self.layer(self.config),
      params['layers'],
      x,
      shared,
      config=self.config,
      layers_of_stack=self.num_layers,
      **options,
    )


class TransformerModel(Model, abc.ABC):
  """A model of transformer layers.

  Attributes:
    config: sizes of the model.
    layer: module class of a layer; docs/add_a_model.md writes a custom one.
  """

  config: TransformerConfig
  layer: Callable[[TransformerConfig], nn.Module]
  gathers_layers: ClassVar[bool] = True

  @property
  def takes_rounded_kernels(self) -> bool:
    """Whether kernels of the layers may be `RoundedKernel`s."""
    return self.layer is TransformerLayer

  @property
  def num_outcomes(self) -> int:
    """Number of tokens that the model chooses from."""
    return self.config.vocab_size

  @property
  def _num_label_classes(self) -> Optional[int]:
    """Number of classes of the labels in a batch; None without labels."""
    return None

  @property
  def _predicts_tokens(self) -> bool:
    """Whether logits are over the vocabulary."""
    return True

  @property
  def _texts_in_row(self) -> int:
    """Minimum number of texts in a row; the positions of each text start at 0."""
    return 1

  @property
  def _label_names(self) -> tuple[str, ...]:
    """Names of the label classes; () to use the data's names."""
    return ()

  def batch_spec(
    self, task_feature_lengths: Mapping[str, int], *, batch_size: int, pack: bool
  ) -> BatchSpec:
    """Returns shapes and dtypes of the features that `loss` reads.

    Raises:
      ModelError: rows are longer than the model's limit.
    """
    spec = batch_spec(
      self.feature_converter(task_feature_lengths),
      task_feature_lengths=task_feature_lengths,
      batch_size=batch_size,
      pack=pack,
      vocab_size=self.config.vocab_size,
      num_classes=self._num_label_classes,
      class_names=self._label_names,
    )
    _check_length(self.config, spec, self._texts_in_row)
    return spec

  def logical_sizes(self) -> dict[str, int]:
    """Returns axis name -> size, of all axes that a mesh may split."""
    c = self.config
    sizes = {
      'vocab': c.vocab_size,
      'embed': c.embed_dim,
      'heads': c.num_heads,
      'kv_heads': c.kv_heads,
      'kv': c.head_dim,
      'mlp': c.mlp_dim,
      'layers': c.num_layers,
    }
    return {**sizes, 'experts': c.num_experts} if c.num_experts else sizes

  @property
  def _embeddings(self) -> Embeddings:
    return Embeddings(self.config)


class OneStackModel(TransformerModel):
  """A model whose layers are one stack.

  `loss` calls `embed`, `run_layers` and `head`; a pipeline runs them on different stages.

  Attributes:
    side: 'encoder' or 'decoder', the prefix of its features; decoders are causal.
  """

  side: ClassVar[str]

  @property
  def _stack(self) -> Stack:
    return Stack(
      self.config,
      self.config.num_layers,
      causal=self.side == 'decoder',
      final_norm=f'{self.side}_norm',
      layer=self.layer,
    )

  def flops_per_token(self, length: int) -> float:
    """Returns model FLOPs of one training step per position of a row of `length`."""
    return transformer_flops_per_token(
      self.config, length, token_logits=self._predicts_tokens, causal=self._stack.causal
    )

  def embed(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> Activation:
    """Returns [batch, length, embed], the input of the first layer."""
    return self._embeddings(
      params,
      batch[f'{self.side}_input_tokens'],
      positions_of(batch, self.side),
      token_types=batch.get(f'{self.side}_token_types'),
      rng=self._rng(dropout_key, batch, 'embed'),
    )

  def run_layers(
    self,
    params: Params,
    x: Activation,
    batch: DeviceBatch,
    *,
    dropout_key: Optional[jax.Array] = None,
    first_layer: ArrayLike = 0,
  ) -> Activation:
    """Returns `x` after the layers of `params['layers']`, which start at number `first_layer`."""
    return self._stack.run(
      params,
      x,
      self._info(batch),
      positions_of(batch, self.side),
      rng=self._rng(dropout_key, batch, 'layers'),
      first_layer=first_layer,
    )

  @abc.abstractmethod
  def head(
    self, params: Params, x: Activation, batch: DeviceBatch, *, dropout_key: Optional[jax.Array]
  ) -> Sums:
    """Returns sums over the predictions from `x`, the output of the last layer."""

  def loss(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> Sums:
    """Returns sums; training minimizes 'loss' per example or target token."""
    x = self.embed(params, batch, dropout_key=dropout_key)
    with overlap.used_after(self._logits_kernel(params, batch)) as after:
      x = run_layers(self, params, x, batch, stack=ONLY, dropout_key=dropout_key)
    return self.head({**params, **after.params}, x, batch, dropout_key=dropout_key)

  def _logits_kernel(self, params: Params, batch: DeviceBatch) -> Params:
    """Returns the subset of `params` that only the logits gather."""
    if 'logits_dense' in params:
      return {'logits_dense': params['logits_dense']}
    table = params.get('token_embedder', {})
    ids = batch[f'{self.side}_input_tokens']
    in_parts = is_looked_up_in_parts(table.get('embedding'), ids, self.config.compute_dtype)
    return {'token_embedder': table} if in_parts else {}

  def _info(self, batch: DeviceBatch) -> TokenInfo:
    return info_of(batch, self.side)

  def _rng(self, key: Optional[jax.Array], batch: DeviceBatch, part: str) -> Optional[DropoutRng]:
    return dropout_rng(key, batch, part, side=self.side)


def _check_length(config: TransformerConfig, spec: BatchSpec, texts_in_row: int) -> None:
  limit = config.length_limit
  too_long = {
    name: -(-shape[1] // texts_in_row)
    for name, shape in spec.shapes.items()
    if limit is not None and len(shape) > 1 and shape[1] > limit * texts_in_row
  }
  if too_long:
    name, length = max(too_long.items(), key=lambda item: item[1])
    learned = config.num_positions > 0
    parameter = f'TransformerConfig.{"num_positions" if learned else "max_length"}'
    raise ModelError(
      f'{name} has {length} positions{" per text" * (texts_in_row > 1)}, but the model '
      + (f'has learned vectors for {limit}.' if learned else f'was made for {limit}.'),
      fix=f'Set TASK_FEATURE_LENGTHS so that rows have at most {limit * texts_in_row} tokens, or, '
      + ('for a model that starts from scratch, ' if learned else 'to train it for longer rows, ')
      + f'{parameter} = {length}.',
      parameters=('TASK_FEATURE_LENGTHS', parameter),
    )
