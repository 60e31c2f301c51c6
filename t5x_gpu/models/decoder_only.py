"""Decoder-only language model: a batch in, sums over target tokens out."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_gpu.data.batches import BatchSpec
from t5x_gpu.layers.dropout import dropout
from t5x_gpu.layers.masks import TokenInfo
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.heads import init_token_logits, token_log_probs, token_logits, token_loss
from t5x_gpu.models.incremental import DecodingState, begin
from t5x_gpu.models.losses import Sums, check_loss_options
from t5x_gpu.models.model import DeviceBatch, Params
from t5x_gpu.models.stack import Activation, OneStackModel, info_of
from t5x_gpu.models.transformer import TransformerLayer


@dataclasses.dataclass(frozen=True)
class DecoderOnlyModel(OneStackModel):
  """A causal or prefix language model.

  Attributes:
    config: sizes of the decoder.
    z_loss: coefficient of log(Z)^2 in the loss.
    label_smoothing: probability given to the other tokens.
    inputs_bidirectional_attention: let inputs attend to each other in both directions (prefix LM);
      only used for tasks that have 'inputs'.
    layer: module class of a layer; docs/add_a_model.md writes a custom one.
  """

  config: TransformerConfig
  z_loss: float = 0.0
  label_smoothing: float = 0.0
  inputs_bidirectional_attention: bool = False
  layer: Callable[[TransformerConfig], nn.Module] = TransformerLayer
  side: ClassVar[str] = 'decoder'

  def __post_init__(self) -> None:
    check_loss_options('DecoderOnlyModel', z_loss=self.z_loss, label_smoothing=self.label_smoothing)
    self.config.check_stack(causal=True)

  def feature_converter(self, task_feature_lengths: Mapping[str, int]) -> str:
    """Returns the feature converter's name: 'prefix_lm' with inputs, else 'lm'."""
    return 'prefix_lm' if 'inputs' in task_feature_lengths else 'lm'

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

  def _info(self, batch: DeviceBatch) -> TokenInfo:
    prefix = batch['decoder_causal_attention'] if self.uses_prefix(batch) else None
    return info_of(batch, 'decoder', prefix=prefix)

  def finish(
    self, params: Params, x: Activation, batch: DeviceBatch, dropout_key: Optional[jax.Array]
  ) -> jax.Array:
    """Returns [batch, length, embed] after the last norm and dropout."""
    return self._finish(params, x, batch, dropout_key)

  # The name in 0.2, which users' models call and override.
  def _finish(
    self, params: Params, x: Activation, batch: DeviceBatch, dropout_key: Optional[jax.Array]
  ) -> jax.Array:
    return dropout(
      self._stack.finish(params, x),
      self.config.dropout('output'),
      self._rng(dropout_key, batch, 'head'),
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
      self.finish(params, x, batch, dropout_key),
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
    x = self._after_layers(params, batch, dropout_key)
    x = self.finish(params, x, batch, dropout_key)
    return token_logits(self.config, params, x, params['token_embedder'])

  def token_log_probs(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> jax.Array:
    """Returns log-probabilities of the target tokens, float32 [batch, length]."""
    x = self._after_layers(params, batch, dropout_key)
    x = self.finish(params, x, batch, dropout_key)
    targets = batch['decoder_target_tokens']
    return token_log_probs(self.config, params, x, params['token_embedder'], targets)

  def uses_prefix(self, batch: DeviceBatch) -> bool:
    return self.inputs_bidirectional_attention and 'decoder_causal_attention' in batch

  def start_decoding(
    self, params: Params, prompts: jax.Array, lengths: jax.Array, *, slots: int
  ) -> tuple[jax.Array, DecodingState]:
    """Returns float32 logits [batch, vocab] of the token after each prompt, and the state.

    Args:
      params: parameters of the model.
      prompts: [batch, prompt_length] decoder inputs, padded on the left.
      lengths: [batch] number of tokens of each prompt.
      slots: number of tokens that the caches can hold, prompt included.
    """
    state = begin(
      self.config,
      num_layers=self.config.num_layers,
      lengths=lengths,
      prompt_length=prompts.shape[1],
      slots=slots,
      bidirectional_prompt=self.inputs_bidirectional_attention,
      keeps_tokens=True,
    )
    return self._stack.next_logits(params, params, prompts, state)

  def decode_step(
    self, params: Params, tokens: jax.Array, state: DecodingState
  ) -> tuple[jax.Array, DecodingState]:
    """Returns logits [batch, vocab] of the token after `tokens` [batch], and the next state."""
    if state.tokens is not None:
      grown = state.slot - state.first == self.config.rope_switch
      state = jax.lax.cond(
        grown.any(), lambda state: self._again(params, state, grown), lambda state: state, state
      )
    return self._stack.next_logits(params, params, tokens[:, None], state)

  def _again(self, params: Params, state: DecodingState, rows: jax.Array) -> DecodingState:
    """Returns `state` with keys and values of `rows` [batch] computed with long rotary factors."""
    own = state.caches.own
    start = state.replace(caches=state.caches.replace(own=own.replace(slot=jnp.int32(0))))
    # Also fills slots of future tokens, which are overwritten before they are read.
    return state.of_rows(rows, self._stack.next_logits(params, params, state.tokens, start)[1])
