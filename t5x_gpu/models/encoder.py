"""Encoder model: predicts classes, numbers, tags or masked tokens, or embeds texts."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_gpu.data.batches import BatchSpec
from t5x_gpu.data.entities import entity_kinds
from t5x_gpu.data.features import LABEL, LABEL_WEIGHTS, LABELS, SCORES
from t5x_gpu.layers.masks import TokenInfo, token_info
from t5x_gpu.models.base import OneStackModel
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.encoding.checks import MULTI_LABEL, SINGLE_LABEL, check_encoder
from t5x_gpu.models.encoding.pooling import pool, pool_texts
from t5x_gpu.models.encoding.sums import entity_hits, of_label_sets, of_numbers, of_text_sets
from t5x_gpu.models.heads import (
  ClassifierHead,
  MaskedTokenHead,
  masked_token_logits,
  masked_token_loss,
)
from t5x_gpu.models.losses import Sums, cross_entropy, of_examples
from t5x_gpu.models.model import DeviceBatch, Params
from t5x_gpu.models.stack import Activation
from t5x_gpu.models.transformer import TransformerLayer
from t5x_gpu.partitioning import fsdp
from t5x_gpu.partitioning.axis_rules import is_manual, shard

_CONVERTERS = {
  'classification': 'encoder_classification',
  'token_classification': 'encoder_tags',
  'regression': 'encoder_regression',
  'embedding': 'encoder_text_sets',
  'mlm': 'encoder_mlm',
}


@dataclasses.dataclass(frozen=True)
class EncoderModel(OneStackModel):
  """An encoder with a head.

  Attributes:
    config: sizes of the encoder.
    head_type: 'classification' of whole rows, 'token_classification' (a tag for each word),
      'regression' (a number for each row), 'embedding' (texts as vectors), or 'mlm' (prediction of
      masked tokens).
    num_classes: number of classes or tags.
    pooling: how a row becomes a vector: 'first_token_tanh' (BERT: the first token, a linear map and
      tanh), 'first_token', or the 'mean' of all tokens.
    head_mlp_dim: hidden features of an MLP between pooling and classes; 0 for no MLP.
    label_smoothing: probability given to the other classes or tokens.
    z_loss: coefficient of log(Z)^2 in the loss.
    token_types: whether rows with labels carry token types, which distinguish the two texts of a
      pair; None means True if the config has several types. False continues runs started without.
    problem_type: kind of 'classification': 'single_label_classification', or
      'multi_label_classification', in which a row has any number of classes.
    class_names: names of the classes or tags, in the order of their numbers; the labels of the data
      get these numbers. Empty to let the data number its classes. Tags need names.
    normalize: divide embeddings by their length, so that their products are cosines.
    temperature: divides the products of embeddings in the loss.
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
  problem_type: str = SINGLE_LABEL
  class_names: tuple[str, ...] = ()
  normalize: bool = True
  temperature: float = 0.05
  layer: Callable[[TransformerConfig], Any] = TransformerLayer
  side: ClassVar[str] = 'encoder'

  def __post_init__(self) -> None:
    object.__setattr__(self, 'class_names', tuple(map(str, self.class_names)))
    check_encoder(self)
    self.config.check_stack(causal=False)

  @property
  def embeds(self) -> bool:
    """Whether each text becomes a vector."""
    return self.head_type == 'embedding'

  @property
  def couples_rows(self) -> bool:
    """Whether the loss of a row depends on other rows of the batch."""
    return self.embeds

  @property
  def has_classes(self) -> bool:
    """Whether texts or words have classes."""
    return self.classifies or self.tags

  @property
  def classifies(self) -> bool:
    """Whether a row has one label instead of a target per token."""
    return self.head_type == 'classification'

  @property
  def regresses(self) -> bool:
    """Whether each row has a number; the loss is the squared error."""
    return self.head_type == 'regression'

  @property
  def tags(self) -> bool:
    """Whether each word has a tag."""
    return self.head_type == 'token_classification'

  @property
  def multi_label(self) -> bool:
    """Whether a row can have several classes, or none, each predicted independently."""
    return self.classifies and self.problem_type == MULTI_LABEL

  @property
  def num_outcomes(self) -> int:
    """Classes or tokens that the model chooses from."""
    if self.embeds or self.regresses:
      return 1
    if self.multi_label:
      return 2
    return self._num_label_classes or self.config.vocab_size

  def feature_converter(self, task_feature_lengths: Mapping[str, int]) -> str:
    """Returns the feature converter's name."""
    del task_feature_lengths
    name = 'encoder_multi_label' if self.multi_label else _CONVERTERS[self.head_type]
    typed = self.config.num_token_types > 1 if self.token_types is None else self.token_types
    return f'{name}_with_types' if typed and self._has_row_targets else name

  @property
  def _has_row_targets(self) -> bool:
    """Whether the target belongs to the whole row."""
    return self.classifies or self.regresses

  @property
  def _num_label_classes(self) -> Optional[int]:
    return self.num_classes if self.has_classes else None

  @property
  def _label_names(self) -> tuple[str, ...]:
    return self.class_names if self.has_classes else ()

  @property
  def _predicts_tokens(self) -> bool:
    return self.head_type == 'mlm'

  @property
  def _texts_in_row(self) -> int:
    return 2 if self.embeds else 1

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
    if self.embeds:
      return params
    head = self._head_module.init(keys['head'], x[:, 0] if self._has_row_targets else x)
    return {**params, **head['params']}

  @property
  def _head_module(self) -> nn.Module:
    if self.has_classes or self.regresses:
      return ClassifierHead(
        self.config,
        1 if self.regresses else self.num_classes,
        tanh_layer=self._has_row_targets and self.pooling.endswith('tanh'),
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
    """Returns float32 [batch, classes], [batch, 1] or [batch, length, tags or vocab]."""
    if self.embeds:
      return self._vectors(params, x, batch)[0]
    if self.head_type == 'mlm':
      return masked_token_logits(*self._masked_tokens(params, x))
    x = self._stack.finish(params, x)
    if self.tags:
      row = shard(x, 'batch', 'length', 'embed')
    else:
      row = pool(x, self._info(batch), kind=self.pooling)
    rng = self._rng(dropout_key, batch, 'head')
    return self._head_module.apply({'params': self._head_params(params)}, row, rng)

  def _vectors(
    self, params: Params, x: Activation, batch: DeviceBatch
  ) -> tuple[jax.Array, jax.Array]:
    """Returns text vectors [batch, 3, embed] in float32, and whether each text exists."""
    x, segments = self._stack.finish(params, x), self._info(batch).segments
    vectors, exist = pool_texts(x, segments, self._positions(batch), kind=self.pooling)
    if self.normalize:
      squares = jnp.sum(jax.lax.square(vectors), axis=-1, keepdims=True)
      vectors = vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))
    return vectors, exist

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

    Without dropout they include matrices: 'confusion' (losses.of_examples), 'hits' or 'pairs'
    (encoding/sums.py).
    """
    if self.multi_label:
      logits, labels = self._logits(params, x, batch, dropout_key), batch[LABELS]
      return of_label_sets(logits, labels, batch[LABEL_WEIGHTS], with_hits=dropout_key is None)
    if self.regresses:
      return of_numbers(
        self._logits(params, x, batch, dropout_key)[:, 0],
        batch[SCORES],
        batch['rows'],
        batch[LABEL_WEIGHTS],
        # A pipeline stage has only the rows of a microbatch.
        with_pairs=dropout_key is None and not is_manual('stage'),
      )
    options = dict(z_loss=self.z_loss, label_smoothing=self.label_smoothing)
    if self.classifies:
      return of_examples(
        self._logits(params, x, batch, dropout_key),
        batch[LABEL],
        batch[LABEL_WEIGHTS],
        **options,
        with_confusion=dropout_key is None,  # in evaluation
      )
    if self.embeds:
      vectors, exist = self._vectors(params, x, batch)
      return of_text_sets(
        vectors,
        exist,
        batch['rows'],
        batch[LABEL_WEIGHTS],
        batch[SCORES],
        temperature=self.temperature,
        with_pairs=dropout_key is None,
      )
    if self.tags:
      logits = self._logits(params, x, batch, dropout_key)
      return self._tag_sums(logits, batch, with_hits=dropout_key is None)
    weights = batch['encoder_loss_weights']
    sums = masked_token_loss(
      self.config,
      *self._masked_tokens(params, x),
      batch['encoder_target_tokens'],
      weights,
      **options,
    )
    return self._stack.charge_routers(sums, x, weights)

  def _tag_sums(self, logits: jax.Array, batch: DeviceBatch, *, with_hits: bool) -> Sums:
    labels, info = batch[LABELS], self._info(batch)
    options = dict(z_loss=self.z_loss, label_smoothing=self.label_smoothing)
    sums = cross_entropy(logits, jnp.maximum(labels - 1, 0), labels > 0, **options)
    if with_hits and entity_kinds(self.class_names):
      hits = entity_hits(
        logits.argmax(-1), labels, info.segments, info.positions, names=self.class_names
      )
      sums['hits'] = hits, sums['loss'][1]
    return sums

  def logits(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> jax.Array:
    """Returns float32 logits [batch, classes], or [batch, length, tags or vocab].

    With the head 'regression': [batch, 1]. With 'embedding': vectors [batch, 3, embed] of the
    texts of each row.
    """
    x = self._after_layers(params, batch, dropout_key)
    return self._logits(params, x, batch, dropout_key)
