"""Encoder-decoder model (T5): the encoder is bidirectional, the decoder causal."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar, Optional

import flax.linen as nn
import jax
from jax.typing import ArrayLike

from t5x_gpu.data.batches import BatchSpec
from t5x_gpu.errors import ModelError
from t5x_gpu.layers.dropout import DropoutRng, dropout
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.flops import encoder_decoder_flops_per_row
from t5x_gpu.models.heads import init_token_logits, token_logits, token_loss
from t5x_gpu.models.incremental import DecodingState, begin
from t5x_gpu.models.losses import Sums, check_loss_options, refuse_router_losses
from t5x_gpu.models.model import DeviceBatch, Params
from t5x_gpu.models.stack import Stack, TransformerModel, dropout_rng, info_of, positions_of
from t5x_gpu.models.transformer import TransformerLayer

# Outputs of both stacks so far: [batch, inputs_length, embed] and [batch, targets_length, embed].
Activations = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class EncoderDecoderModel(TransformerModel):
  """An encoder, and a decoder that attends to it; they share the token table.

  `loss` calls `embed`, `run_layers` of each stack and `head`; a pipeline runs them on different
  stages. Between layers both activations are passed on, (encoder, decoder).

  Attributes:
    config: sizes of both stacks; num_layers is the decoder's.
    num_encoder_layers: number of encoder layers; None for the decoder's number.
    z_loss: coefficient of log(Z)^2 in the loss.
    label_smoothing: probability given to the other tokens.
    layer: module class of a layer; docs/add_a_model.md writes a custom one.
  """

  config: TransformerConfig
  num_encoder_layers: Optional[int] = None
  z_loss: float = 0.0
  label_smoothing: float = 0.0
  layer: Callable[[TransformerConfig], nn.Module] = TransformerLayer
  stacks: ClassVar[tuple[str, ...]] = ('encoder', 'decoder')

  def __post_init__(self) -> None:
    check_loss_options(
      'EncoderDecoderModel', z_loss=self.z_loss, label_smoothing=self.label_smoothing
    )
    refuse_router_losses('EncoderDecoderModel', self.config)
    for causal in (False, True):
      self.config.check_stack(causal=causal)
    if self.num_encoder_layers is not None and self.num_encoder_layers < 1:
      raise ModelError(
        f'EncoderDecoderModel.num_encoder_layers = {self.num_encoder_layers} must be at least 1.',
        fix='Set it to 1 or more, or None for as many layers as the decoder has.',
        docs='models.md#settings',
        parameters=('EncoderDecoderModel.num_encoder_layers',),
      )

  def feature_converter(self, task_feature_lengths: Mapping[str, int]) -> str:
    """Returns the feature converter's name."""
    del task_feature_lengths
    return 'encoder_decoder'

  def logical_sizes(self) -> dict[str, int]:
    """Returns axis name -> size, of all axes that a mesh may split."""
    sizes = super().logical_sizes()
    if self.num_encoder_layers:
      sizes['encoder_layers'] = self.num_encoder_layers
    return sizes

  def flops_per_token(self, length: int) -> float:
    """Returns model FLOPs of a training step per input token; targets have the same `length`."""
    return self.flops_per_row({'encoder': length, 'decoder': length}) / length

  def flops_per_row(self, lengths: Mapping[str, int]) -> float:
    """Returns model FLOPs of a training step per row; `lengths` are 'encoder' and 'decoder'."""
    return encoder_decoder_flops_per_row(
      self.config,
      lengths['encoder'],
      lengths['decoder'],
      num_encoder_layers=self._encoder.num_layers,
    )

  def init(self, rng: jax.Array, spec: BatchSpec) -> Params:
    """Returns new parameters as `NamedParam`, with their axis names."""
    del spec  # the parameters do not depend on the length
    names = ('token_embedder', 'position_embedder', 'embedding_norm', 'encoder', 'decoder')
    keys = dict(zip(names, jax.random.split(rng, len(names))))

    def of_stack(name: str) -> dict[str, jax.Array]:
      parts = ('relpos_bias', 'layers', f'{name}_norm', 'logits_dense')
      return dict(zip(parts, jax.random.split(keys[name], len(parts))))

    decoder = of_stack('decoder')
    return {
      **self._embeddings.init(keys),
      'encoder': self._encoder.init(of_stack('encoder')),
      'decoder': {
        **self._decoder.init(decoder),
        **init_token_logits(self.config, decoder['logits_dense']),
      },
    }

  @property
  def _encoder(self) -> Stack:
    return Stack(
      self.config,
      self.num_encoder_layers or self.config.num_layers,
      causal=False,
      final_norm='encoder_norm',
      layer=self.layer,
    )

  @property
  def _decoder(self) -> Stack:
    return Stack(
      self.config,
      self.config.num_layers,
      causal=True,
      final_norm='decoder_norm',
      attends_to_encoder=True,
      layer=self.layer,
    )

  def embed(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> Activations:
    """Returns the inputs of the first layer of the encoder and of the decoder."""
    return (
      self._embed(params, batch, 'encoder', dropout_key),
      self._embed(params, batch, 'decoder', dropout_key),
    )

  def run_layers(
    self,
    params: Params,
    x: Activations,
    batch: DeviceBatch,
    *,
    stack: str,
    dropout_key: Optional[jax.Array] = None,
    first_layer: ArrayLike = 0,
  ) -> Activations:
    """Returns `x` after the layers of `params[stack]['layers']`.

    Args:
      x: the output of both stacks so far; the decoder's layers need the encoder's final output.
      stack: 'encoder' or 'decoder'.
      params, batch, dropout_key, first_layer: as in Model.
    """
    of_encoder, of_decoder = x
    if stack == 'encoder':
      return self._run_encoder(params, of_encoder, batch, dropout_key, first_layer), of_decoder
    # Recomputed here: the encoder's final norm costs less than passing its output between layers.
    encoded = self._finish(params, of_encoder, batch, 'encoder', dropout_key)
    return of_encoder, self._decoder.run(
      params['decoder'],
      of_decoder,
      info_of(batch, 'decoder'),
      positions_of(batch, 'decoder'),
      encoder_info=info_of(batch, 'encoder'),
      encoded=encoded,
      first_layer=first_layer,
      rng=_dropout_rng(dropout_key, batch, 'decoder', 'layers'),
    )

  def _embed(
    self, params: Params, batch: DeviceBatch, side: str, dropout_key: Optional[jax.Array]
  ) -> jax.Array:
    return self._embeddings(
      params,
      batch[f'{side}_input_tokens'],
      positions_of(batch, side),
      rng=_dropout_rng(dropout_key, batch, side, 'embed'),
    )

  def _run_encoder(
    self,
    params: Params,
    x: jax.Array,
    batch: DeviceBatch,
    dropout_key: Optional[jax.Array],
    first_layer: ArrayLike = 0,
  ) -> jax.Array:
    return self._encoder.run(
      params['encoder'],
      x,
      info_of(batch, 'encoder'),
      positions_of(batch, 'encoder'),
      rng=_dropout_rng(dropout_key, batch, 'encoder', 'layers'),
      first_layer=first_layer,
    )

  def _finish(
    self,
    params: Params,
    x: jax.Array,
    batch: DeviceBatch,
    side: str,
    dropout_key: Optional[jax.Array],
  ) -> jax.Array:
    """Returns [batch, length, embed] after the final norm of a stack and dropout."""
    stack = self._encoder if side == 'encoder' else self._decoder
    return dropout(
      stack.finish(params[side], x),
      self.config.dropout('output'),
      _dropout_rng(dropout_key, batch, side, 'head'),
    )

  def encode(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> jax.Array:
    """Returns [batch, inputs_length, embed], the encoder's output after its final norm."""
    x = self._embed(params, batch, 'encoder', dropout_key)
    x = self._run_encoder(params, x, batch, dropout_key)
    return self._finish(params, x, batch, 'encoder', dropout_key)

  def head(
    self,
    params: Params,
    x: Activations,
    batch: DeviceBatch,
    *,
    dropout_key: Optional[jax.Array] = None,
  ) -> Sums:
    """Returns sums over target tokens from the decoder's output in `x`."""
    return token_loss(
      self.config,
      params['decoder'],
      self._finish(params, x[1], batch, 'decoder', dropout_key),
      params['token_embedder'],
      batch['decoder_target_tokens'],
      batch['decoder_loss_weights'],
      z_loss=self.z_loss,
      label_smoothing=self.label_smoothing,
    )

  def logits(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> jax.Array:
    """Returns float32 [batch, targets_length, vocab]; without a `dropout_key`, no dropout."""
    x = self._after_layers(params, batch, dropout_key)
    x = self._finish(params, x[1], batch, 'decoder', dropout_key)
    return token_logits(self.config, params['decoder'], x, params['token_embedder'])

  def start_decoding(
    self,
    params: Params,
    prompts: jax.Array,
    lengths: jax.Array,
    *,
    slots: int,
    encoder_tokens: jax.Array,
    encoder_segments: jax.Array,
  ) -> tuple[jax.Array, DecodingState]:
    """Returns float32 logits [batch, vocab] of the token after each prompt, and the state.

    Args:
      params: parameters of the model.
      prompts: [batch, prompt_length] decoder inputs, padded on the left; usually a start token.
      lengths: [batch] number of tokens of each prompt.
      slots: number of tokens that the caches can hold, prompt included.
      encoder_tokens: [batch, inputs_length].
      encoder_segments: [batch, inputs_length], 1 on tokens, 0 on padding.
    """
    inputs = {'encoder_input_tokens': encoder_tokens, 'encoder_segment_ids': encoder_segments}
    encoded = self.encode(params, inputs)
    state = begin(
      self.config,
      num_layers=self.config.num_layers,
      lengths=lengths,
      prompt_length=prompts.shape[1],
      slots=slots,
      encoder_segments=encoder_segments,
    )
    return self._decoder.next_logits(params['decoder'], params, prompts, state, encoded=encoded)

  def decode_step(
    self, params: Params, tokens: jax.Array, state: DecodingState
  ) -> tuple[jax.Array, DecodingState]:
    """Returns logits [batch, vocab] of the token after `tokens` [batch], and the next state."""
    return self._decoder.next_logits(params['decoder'], params, tokens[:, None], state)


def _dropout_rng(
  key: Optional[jax.Array], batch: DeviceBatch, side: str, part: str
) -> Optional[DropoutRng]:
  return dropout_rng(key, batch, f'{side}_{part}', side=side)
