"""Encoder model: classification of sequences, or masked language modelling."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_gpu.data.batches import BatchSpec
from t5x_gpu.errors import ModelError, did_you_mean
from t5x_gpu.layers.masks import TokenInfo, token_info
from t5x_gpu.models.base import OneStackModel
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.heads import (
  POOLINGS,
  Classifier,
  MaskedTokenHead,
  masked_token_logits,
  masked_token_loss,
  pool,
)
from t5x_gpu.models.losses import Sums, check_loss_options, of_examples, refuse_router_losses
from t5x_gpu.models.model import DeviceBatch, Params
from t5x_gpu.models.stack import Activation
from t5x_gpu.models.transformer import TransformerLayer
from t5x_gpu.partitioning import fsdp

HEADS = ('classification', 'mlm')


@dataclasses.dataclass(frozen=True)
class EncoderModel(OneStackModel):
  """An encoder with a head.

  Attributes:
    config: sizes of the encoder.
    head_type: 'classification' of whole rows, or 'mlm', which predicts masked tokens.
    num_classes: classes of 'classification'.
    pooling: vector of a row: 'first_token_tanh' (BERT: the first token, a linear map and tanh),
      'first_token', or the 'mean' of all tokens.
    head_mlp_dim: hidden features of an MLP between pooling and classes; 0 for no MLP.
    label_smoothing: probability given to the other classes or tokens.
    z_loss: coefficient of log(Z)^2 in the loss.
    token_types: whether rows with labels carry token types, which distinguish the two texts of a
      pair; None if the config has several types. False continues runs that were started without.
    layer: module class of a layer; docs/add_a_model.md writes a custom one.
  """

  config: TransformerConfig
  head_type: str = 'classification'
  num_classes: int = 2
  pooling: str = 'first_token_tanh'
  head_mlp_dim: int = 0
  label_smoothing: float = 0.0
  z_loss: float = 0.0
  token_types: Optional[bool] = None
  layer: Callable[[TransformerConfig], Any] = TransformerLayer
  side: ClassVar[str] = 'encoder'

  def __post_init__(self) -> None:
    check_loss_options('EncoderModel', z_loss=self.z_loss, label_smoothing=self.label_smoothing)
    if self.head_type != 'mlm':
      refuse_router_losses('EncoderModel', self.config)
    for name, allowed in (('head_type', HEADS), ('pooling', POOLINGS)):
      value = getattr(self, name)
      if value not in allowed:
        raise ModelError(
          f'EncoderModel.{name} = {value!r} is not one of {", ".join(allowed)}.'
          f'{did_you_mean(value, allowed)}',
          fix=f'Set EncoderModel.{name} to one of them.',
        )
    if self.head_type == 'classification' and self.num_classes < 2:
      raise ModelError(
        f'EncoderModel.num_classes = {self.num_classes}: classification needs two classes or more.',
        fix='Set EncoderModel.num_classes to 2 or more.',
      )
    if self.token_types and self.config.num_token_types < 2:
      raise ModelError(
        'EncoderModel.token_types = True, but TransformerConfig.num_token_types = '
        f'{self.config.num_token_types}: the model has no embeddings of token types.',
        fix='Set TransformerConfig.num_token_types = 2, or leave EncoderModel.token_types out.',
      )

  @property
  def classifies(self) -> bool:
    """Whether a row has one label instead of a target per token."""
    return self.head_type == 'classification'

  @property
  def num_outcomes(self) -> int:
    """Classes or tokens that the model chooses from."""
    return self.num_classes if self.classifies else self.config.vocab_size

  def feature_converter(self, task_feature_lengths: Mapping[str, int]) -> str:
    """Returns the feature converter's name."""
    del task_feature_lengths
    if not self.classifies:
      return 'encoder_mlm'
    typed = self.config.num_token_types > 1 if self.token_types is None else self.token_types
    return 'encoder_classification_with_types' if typed else 'encoder_classification'

  @property
  def _num_label_classes(self) -> Optional[int]:
    return self.num_classes if self.classifies else None

  def init(self, rng: jax.Array, spec: BatchSpec) -> Params:
    """Returns new parameters as `NamedParam`, with their axis names."""
    del spec  # the parameters do not depend on the length
    names = (
      'token_embedder',
      'relpos_bias',
      'layers',
      'encoder_norm',
      'head',
      'position_embedder',
      'token_type_embedder',
      'embedding_norm',
    )
    keys = dict(zip(names, jax.random.split(rng, len(names))))
    params = {**self._embeddings.init(keys), **self._stack.init(keys)}
    x = jnp.zeros((1, 1, self.config.embed_dim), self.config.compute_dtype)
    if self.classifies:
      head = self._head_module.init(keys['head'], x[:, 0])
    else:
      head = self._head_module.init(keys['head'], x)
    return {**params, **head['params']}

  @property
  def _head_module(self) -> nn.Module:
    if self.classifies:
      return Classifier(
        self.config,
        self.num_classes,
        tanh_layer=self.pooling.endswith('tanh'),
        mlp_dim=self.head_mlp_dim,
      )
    return MaskedTokenHead(self.config)

  def _info(self, batch: DeviceBatch) -> TokenInfo:
    return token_info(
      batch['encoder_input_tokens'],
      segment_ids=batch.get('encoder_segment_ids'),
      positions=batch.get('encoder_places'),
    )

  def _logits(
    self, params: Params, x: Activation, batch: DeviceBatch, dropout_key: Optional[jax.Array]
  ) -> jax.Array:
    """Returns [batch, classes], or [batch, length, vocab], in float32."""
    if not self.classifies:
      return masked_token_logits(*self._masked_tokens(params, x))
    row = pool(self._stack.finish(params, x), self._info(batch), kind=self.pooling)
    rng = self._rng(dropout_key, batch, 'head')
    return self._head_module.apply({'params': self._head_params(params)}, row, rng)

  def _masked_tokens(self, params: Params, x: Activation) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns ([batch, length, embed], bias [vocab], table [vocab, embed]) of the token logits."""
    x = self._stack.finish(params, x)
    x, bias = self._head_module.apply({'params': self._head_params(params)}, x)
    return x, bias, fsdp.whole(params['token_embedder'], self.config.compute_dtype)['embedding']

  def _head_params(self, params: Params) -> Params:
    return {
      name: fsdp.whole(params[name], self.config.compute_dtype)
      for name in self._head_module.parameter_names
    }

  def head(
    self,
    params: Params,
    x: Activation,
    batch: DeviceBatch,
    *,
    dropout_key: Optional[jax.Array] = None,
  ) -> Sums:
    """Returns sums over examples or masked tokens from `x`, the output of the last layer.

    In classification without dropout they include 'confusion', see losses.of_examples.
    """
    options = dict(z_loss=self.z_loss, label_smoothing=self.label_smoothing)
    if self.classifies:
      return of_examples(
        self._logits(params, x, batch, dropout_key),
        batch['label'],
        batch['label_weights'],
        **options,
        with_confusion=dropout_key is None,  # in evaluation
      )
    weights = batch['encoder_loss_weights']
    sums = masked_token_loss(
      self.config,
      *self._masked_tokens(params, x),
      batch['encoder_target_tokens'],
      weights,
      **options,
    )
    return self._stack.charge_routers(sums, x, weights)

  def logits(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> jax.Array:
    """Returns float32 logits [batch, classes], or [batch, length, vocab] with the 'mlm' head."""
    x = self._after_layers(params, batch, dropout_key)
    return self._logits(params, x, batch, dropout_key)
