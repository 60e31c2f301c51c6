"""Decoder-only language model: a batch in, sums over target tokens out."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Optional

import jax

from t5x_gpu.data.batches import BatchSpec
from t5x_gpu.layers.dropout import dropout
from t5x_gpu.layers.masks import TokenInfo, token_info
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.flops import transformer_flops_per_token
from t5x_gpu.models.heads import init_token_logits, token_logits, token_loss
from t5x_gpu.models.inference.incremental import DecodingState, advance, begin
from t5x_gpu.models.losses import Sums, check_loss_options
from t5x_gpu.models.model import DeviceBatch, Params
from t5x_gpu.models.sizes import transformer_batch_spec, transformer_sizes
from t5x_gpu.models.stack import Activation, Embeddings, Stack, dropout_rng
from t5x_gpu.models.transformer import TransformerLayer


@dataclasses.dataclass(frozen=True)
class DecoderOnlyModel:
  """A causal or prefix language model.

  `loss` calls `embed`, `run_layers` and `head`; a pipeline runs them on different stages.

  Attributes:
    config: sizes of the decoder.
    z_loss: coefficient of log(Z)^2 in the loss.
    label_smoothing: probability given to the other tokens.
    inputs_bidirectional_attention: let inputs see each other both ways (prefix LM); only used for
      tasks that have 'inputs'.
    layer: module class of a layer; docs/add_a_model.md writes a custom one.
  """

  config: TransformerConfig
  z_loss: float = 0.0
  label_smoothing: float = 0.0
  inputs_bidirectional_attention: bool = False
  layer: Callable[[TransformerConfig], Any] = TransformerLayer
  gathers_layers: ClassVar[bool] = True

  def __post_init__(self) -> None:
    check_loss_options('DecoderOnlyModel', z_loss=self.z_loss, label_smoothing=self.label_smoothing)

  @property
  def num_outcomes(self) -> int:
    """Tokens that the model chooses from."""
    return self.config.vocab_size

  def feature_converter(self, task_feature_lengths: Mapping[str, int]) -> str:
    """Returns the feature converter's name: 'prefix_lm' with inputs, else 'lm'."""
    return 'prefix_lm' if 'inputs' in task_feature_lengths else 'lm'

  def batch_spec(
    self, task_feature_lengths: Mapping[str, int], *, batch_size: int, pack: bool
  ) -> BatchSpec:
    """Returns shapes and dtypes of the features that `loss` takes."""
    return transformer_batch_spec(
      self.config,
      self.feature_converter(task_feature_lengths),
      task_feature_lengths,
      batch_size=batch_size,
      pack=pack,
    )

  def logical_sizes(self) -> dict[str, int]:
    """Returns axis name -> size, of all axes that a mesh may split."""
    return transformer_sizes(self.config)

  def flops_per_token(self, length: int) -> float:
    """Returns model FLOPs of one training step per position of a row of `length`."""
    return transformer_flops_per_token(self.config, length)

  def init(self, rng: jax.Array, spec: BatchSpec) -> Params:
    """Returns new parameters as `NamedParam`, with their axis names."""
    del spec  # the parameters do not depend on the length
    names = (
      'token_embedder',
      'relpos_bias',
      'layers',
      'decoder_norm',
      'logits_dense',
      'position_embedder',
      'embedding_norm',
    )
    keys = dict(zip(names, jax.random.split(rng, len(names))))
    return {
      **self._embeddings.init(keys),
      **self._stack.init(keys),
      **init_token_logits(self.config, keys['logits_dense']),
    }

  @property
  def _embeddings(self) -> Embeddings:
    return Embeddings(self.config)

  @property
  def _stack(self) -> Stack:
    return Stack(
      self.config, self.config.num_layers, causal=True, final_norm='decoder_norm', layer=self.layer
    )

  def embed(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> Activation:
    """Returns [batch, length, embed], the input of the first layer."""
    return self._embeddings(
      params,
      batch['decoder_input_tokens'],
      self._positions(batch),
      rng=dropout_rng(dropout_key, batch, 'embed', side='decoder'),
    )

  def run_layers(
    self,
    params: Params,
    x: Activation,
    batch: DeviceBatch,
    *,
    dropout_key: Optional[jax.Array] = None,
    first_layer: Any = 0,
  ) -> Activation:
    """Returns `x` after the layers of `params['layers']`, which start at index `first_layer`."""
    return self._stack.run(
      params,
      x,
      self._info(batch),
      self._positions(batch),
      rng=dropout_rng(dropout_key, batch, 'layers', side='decoder'),
      first_layer=first_layer,
    )

  def _info(self, batch: DeviceBatch) -> TokenInfo:
    prefix = batch['decoder_causal_attention'] if self.uses_prefix(batch) else None
    return token_info(
      batch['decoder_target_tokens'],
      prefix=prefix,
      segment_ids=batch.get('decoder_segment_ids'),
      positions=batch.get('decoder_places'),
      known=(batch.get('decoder_loss_weights'), batch.get('decoder_causal_attention')),
    )

  def _positions(self, batch: DeviceBatch) -> jax.Array:
    """Returns the position of each token in its example; a packed row holds several examples."""
    return batch.get('decoder_positions', self._info(batch).positions)

  def _finish(
    self, params: Params, x: Activation, batch: DeviceBatch, dropout_key: Optional[jax.Array]
  ) -> jax.Array:
    """Returns [batch, length, embed] after the last norm and dropout."""
    return dropout(
      self._stack.finish(params, x),
      self.config.dropout_rate,
      dropout_rng(dropout_key, batch, 'head', side='decoder'),
    )

  def head(
    self,
    params: Params,
    x: Activation,
    batch: DeviceBatch,
    *,
    dropout_key: Optional[jax.Array] = None,
  ) -> Sums:
    """Returns sums over target tokens from `x`, the output of the last layer."""
    weights = batch['decoder_loss_weights']
    sums = token_loss(
      self.config,
      params,
      self._finish(params, x, batch, dropout_key),
      params['token_embedder'],
      batch['decoder_target_tokens'],
      weights,
      z_loss=self.z_loss,
      label_smoothing=self.label_smoothing,
    )
    return self._stack.charge_routers(sums, x, weights)

  def logits(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> jax.Array:
    """Returns float32 [batch, length, vocab]; without a `dropout_key`, no dropout."""
    x = self.embed(params, batch, dropout_key=dropout_key)
    x = self.run_layers(params, x, batch, dropout_key=dropout_key)
    x = self._finish(params, x, batch, dropout_key)
    return token_logits(self.config, params, x, params['token_embedder'])

  def uses_prefix(self, batch: DeviceBatch) -> bool:
    return self.inputs_bidirectional_attention and 'decoder_causal_attention' in batch

  def loss(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> Sums:
    """Returns sums over target tokens; training minimises 'loss' per token."""
    x = self.embed(params, batch, dropout_key=dropout_key)
    x = self.run_layers(params, x, batch, dropout_key=dropout_key)
    return self.head(params, x, batch, dropout_key=dropout_key)

  def start_decoding(
    self, params: Params, prompts: jax.Array, lengths: jax.Array, *, slots: int
  ) -> tuple[jax.Array, DecodingState]:
    """Returns float32 logits [batch, vocab] of the token after each prompt, and the state.

    Args:
      params: parameters of the model.
      prompts: [batch, prompt_length] decoder inputs, padded on the left.
      lengths: [batch] tokens of each prompt.
      slots: tokens that the caches can hold, prompt included.
    """
    state = begin(
      self.config,
      num_layers=self.config.num_layers,
      lengths=lengths,
      prompt_length=prompts.shape[1],
      slots=slots,
      bidirectional_prompt=self.inputs_bidirectional_attention,
    )
    return self._extend(params, prompts, state)

  def decode_step(
    self, params: Params, tokens: jax.Array, state: DecodingState
  ) -> tuple[jax.Array, DecodingState]:
    """Returns logits [batch, vocab] of the token after `tokens` [batch], and the next state."""
    return self._extend(params, tokens[:, None], state)

  def _extend(
    self, params: Params, tokens: jax.Array, state: DecodingState
  ) -> tuple[jax.Array, DecodingState]:
    info, positions, cached = state.of_next(tokens.shape[1])
    x = self._embeddings(params, tokens, positions)
    x, caches = self._stack.extend(params, x, info, positions, state.caches, cached)
    x = self._stack.finish(params, x[:, -1:])
    logits = token_logits(self.config, params, x, params['token_embedder'])
    return logits[:, 0], advance(state, caches, tokens.shape[1])
