"""Encoder model: predicts classes, numbers, tags or masked tokens, or embeds texts.

`EncoderModel` is a stack with one of `HEADS`. Before it: the poolings of token vectors, the checks
of its arguments, and the losses and counts of rows with labels, tags, a number or several texts.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_gpu.data import entities
from t5x_gpu.data.batches import BatchSpec
from t5x_gpu.data.entities import entity_kinds
from t5x_gpu.data.features import LABEL, LABEL_WEIGHTS, LABELS, SCORE_UNIT, SCORES
from t5x_gpu.errors import ModelError, did_you_mean
from t5x_gpu.layers.masks import TokenInfo
from t5x_gpu.layers.mlp import activation
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.heads import (
  ClassifierHead,
  MaskedTokenHead,
  masked_token_logits,
  masked_token_loss,
)
from t5x_gpu.models.losses import (
  Sums,
  check_loss_options,
  counted_once,
  cross_entropy,
  of_examples,
  refuse_router_losses,
  weighted_sums,
)
from t5x_gpu.models.model import DeviceBatch, Params
from t5x_gpu.models.stack import Activation, OneStackModel, positions_of
from t5x_gpu.models.transformer import TransformerLayer
from t5x_gpu.partitioning.axis_rules import gather_over, is_manual, local_ways, shard, sum_over
from t5x_gpu.partitioning.parameters import whole

TEXTS_PER_ROW = 3  # in rows for embeddings: a text, its positive text, a hard negative
FLATTEN = 'flatten'
POOLINGS = ('first_token_tanh', 'first_token', 'mean', FLATTEN)


def pool(x: jax.Array, info: TokenInfo, *, kind: str) -> jax.Array:
  """Returns [batch, embed], one vector per row.

  Args:
    x: [batch, length, embed] after the last norm.
    info: positions and segments of the tokens.
    kind: one of POOLINGS.
  """
  taken = info.segments > 0 if kind == 'mean' else info.positions == 0
  taken = jnp.broadcast_to(taken, info.segments.shape)[:, None]
  return shard(_mean(x, taken)[0][:, 0], 'batch', 'embed')


def pool_texts(
  x: jax.Array, segments: jax.Array, positions: jax.Array, *, kind: str
) -> tuple[jax.Array, jax.Array]:
  """Returns text vectors [batch, 3, embed] in float32, and whether each text exists.

  Args:
    x: [batch, length, embed] after the last norm.
    segments: [batch, length] number of the text, from 1; 0 for padding.
    positions: [length] or [batch, length] of tokens in their text.
    kind: 'mean' or 'first_token'.
  """
  taken = segments[:, None] == jnp.arange(1, TEXTS_PER_ROW + 1)[:, None]
  if kind == 'first_token':
    taken &= (jnp.broadcast_to(positions, segments.shape) == 0)[:, None]
  vectors, weights = _mean(x, taken)
  return vectors, weights > 0


def flatten(x: jax.Array, info: TokenInfo) -> jax.Array:
  """Returns whole rows [batch, length, embed] in the order of the tokens, zero on padding.

  Args:
    x: [batch, length, embed] after the last norm; the length may be split.
    info: positions [length] and segments of the tokens.
  """
  x = shard(x, 'batch', 'length', 'embed')
  x = jnp.where((info.segments > 0)[..., None], x, 0)
  if local_ways('length') > 1:
    x = gather_over(x, 'length', dim=1)[
      :, jnp.argsort(gather_over(info.positions, 'length', dim=0))
    ]
  return x


def _mean(x: jax.Array, taken: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns means [batch, texts, embed] of the taken tokens, and their number.

  Args:
    x: [batch, length, embed].
    taken: bool [batch, texts, length].
  """
  x, weights = shard(x, 'batch', 'length', 'embed').astype(jnp.float32), taken.astype(jnp.float32)
  total, number = jnp.einsum('ble,bkl->bke', x, weights), weights.sum(-1, keepdims=True)
  total, number = sum_over((total, number), 'length')
  return total / jnp.maximum(number, 1.0), number[..., 0]


HEADS = ('classification', 'token_classification', 'regression', 'embedding', 'mlm')
SINGLE_LABEL, MULTI_LABEL = 'single_label_classification', 'multi_label_classification'
PROBLEMS = (SINGLE_LABEL, MULTI_LABEL)


def check_encoder(model: 'EncoderModel') -> None:
  """Raises ModelError for invalid or contradictory arguments of an EncoderModel."""
  check_loss_options('EncoderModel', z_loss=model.z_loss, label_smoothing=model.label_smoothing)
  if model.head_type != 'mlm':
    refuse_router_losses('EncoderModel', model.config)
  for name, allowed in (('head_type', HEADS), ('pooling', POOLINGS), ('problem_type', PROBLEMS)):
    value = getattr(model, name)
    if value not in allowed:
      raise ModelError(
        f'EncoderModel.{name} = {value!r} is not one of {", ".join(allowed)}.'
        f'{did_you_mean(value, allowed)}',
        fix=f'Set EncoderModel.{name} to one of them.',
        parameters=(f'EncoderModel.{name}',),
      )
  if model.head_mlp_dim < 0:
    raise ModelError(
      f'EncoderModel.head_mlp_dim = {model.head_mlp_dim} must be at least 1, or 0 for no MLP.',
      fix='Set EncoderModel.head_mlp_dim to a number of features, or to 0.',
      parameters=('EncoderModel.head_mlp_dim',),
    )
  if model.has_classes:
    _check_classes(model)
  if model.embeds:
    _check_embedding(model)
  if model.flattens and not (model.head_mlp_dim > 0 and model.config.length_limit):
    raise ModelError(
      f"EncoderModel.pooling = 'flatten' with head_mlp_dim = {model.head_mlp_dim} and "
      f'max_length = {model.config.max_length}: the head has an MLP with weights for each position '
      'of the longest row.',
      fix='Set EncoderModel.head_mlp_dim, such as to 256, and TransformerConfig.max_length to the '
      'length of the rows.',
      parameters=('EncoderModel.pooling', 'TransformerConfig.max_length'),
    )
  if model.head_mlp_activation is not None:
    activation(model.head_mlp_activation, 'EncoderModel.head_mlp_activation')
  if model.regresses and (model.label_smoothing or model.z_loss):
    raise _not_cross_entropy(model, 'a regression minimizes the squared error')
  if model.token_types and model.config.num_token_types < 2:
    raise ModelError(
      'EncoderModel.token_types = True, but TransformerConfig.num_token_types = '
      f'{model.config.num_token_types}: the model has no embeddings of token types.',
      fix='Set TransformerConfig.num_token_types = 2, or leave EncoderModel.token_types out.',
      parameters=('EncoderModel.token_types', 'TransformerConfig.num_token_types'),
    )


def _check_classes(model: 'EncoderModel') -> None:
  if model.num_classes < 2:
    raise ModelError(
      f'EncoderModel.num_classes = {model.num_classes}: classification needs two classes or more.',
      fix='Set EncoderModel.num_classes to 2 or more.',
      parameters=('EncoderModel.num_classes',),
    )
  count = len(set(model.class_names))
  if model.class_names and (count != len(model.class_names) or count != model.num_classes):
    raise ModelError(
      f'EncoderModel.class_names has {count} different names, and num_classes = '
      f'{model.num_classes}.',
      fix=f'Set EncoderModel.num_classes = {count}, and name each class once.',
      parameters=('EncoderModel.class_names', 'EncoderModel.num_classes'),
    )
  if model.tags and not model.class_names:
    raise ModelError(
      'Token classification needs the names of the tags: they show where an entity begins.',
      fix="Set EncoderModel.class_names = ('O', 'B-PER', 'I-PER', ...), all tags of your data.",
      parameters=('EncoderModel.class_names',),
    )
  if model.multi_label and (model.label_smoothing or model.z_loss):
    raise _not_cross_entropy(model, 'rows with several labels have a binary cross entropy')


def _not_cross_entropy(model: 'EncoderModel', instead: str) -> ModelError:
  return ModelError(
    f'label_smoothing = {model.label_smoothing} and z_loss = {model.z_loss} change the cross '
    f'entropy over one class per row, but {instead}.',
    fix='Set EncoderModel.label_smoothing = 0.0 and EncoderModel.z_loss = 0.0.',
    parameters=('EncoderModel.label_smoothing', 'EncoderModel.z_loss'),
  )


def _check_embedding(model: 'EncoderModel') -> None:
  wrong = [
    f'{name} = {getattr(model, name)!r}'
    for name, allowed in (
      ('pooling', model.pooling in ('mean', 'first_token')),
      ('head_mlp_dim', not model.head_mlp_dim),
      ('temperature', model.temperature > 0),
      ('label_smoothing', not model.label_smoothing),
      ('z_loss', not model.z_loss),
    )
    if not allowed
  ]
  if wrong:
    raise ModelError(
      f"EncoderModel.head_type = 'embedding' does not work with {', '.join(wrong)}.",
      fix="Set EncoderModel.pooling = 'mean' or 'first_token', a temperature above 0 (0.05 is "
      'usual), and head_mlp_dim, label_smoothing and z_loss to 0.',
      parameters=('EncoderModel.head_type',),
    )


def of_label_sets(
  logits: jax.Array, labels: jax.Array, weights: jax.Array, *, with_hits: bool
) -> Sums:
  """Returns sums over examples with any number of labels: 'loss', 'subset_accuracy'.

  The loss of an example is the mean over classes of the binary cross entropy, as in torch's
  BCEWithLogitsLoss. An example is correct if its labels are exactly the classes with positive
  logits.

  Args:
    logits: [batch, classes], float32; whole rows, as in `of_examples`.
    labels: [batch, length] class numbers plus one, 0 for no label; the length may be split.
    weights: [batch]; 0 leaves an example out.
    with_hits: add 'hits', see `hits_of`.
  """
  true = sum_over(jax.nn.one_hot(labels - 1, logits.shape[-1]).sum(1), 'length')
  true, predicted = true > 0, logits > 0
  weights = counted_once(weights).astype(jnp.float32)
  loss = jnp.where(true, jax.nn.softplus(-logits), jax.nn.softplus(logits)).mean(-1)
  right = (true == predicted).all(-1).astype(jnp.float32)
  sums = {'loss': jnp.sum(loss * weights), 'subset_accuracy': jnp.sum(right * weights)}
  found = weighted_sums(sums, weights)
  if with_hits:
    weights = jnp.broadcast_to(weights[:, None], true.shape)
    found['hits'] = hits_of(true & predicted, predicted, true, weights), found['loss'][1]
  return found


def of_numbers(
  predicted: jax.Array, scores: jax.Array, rows: jax.Array, weights: jax.Array, *, with_pairs: bool
) -> Sums:
  """Returns sums over examples with a number: 'loss', the squared error, and 'absolute_error'.

  Args:
    predicted: [batch], float32; whole rows, as in `of_examples`.
    scores: [batch], the true numbers in ten-thousandths.
    rows: [batch] indices of the rows in the global batch.
    weights: [batch]; 0 leaves an example out.
    with_pairs: add 'pairs' [global batch, 3]: prediction, true number, weight.
  """
  weight = counted_once(weights).astype(jnp.float32)
  true = scores.astype(jnp.float32) / SCORE_UNIT
  error = predicted - true
  found = {'loss': jnp.square(error), 'absolute_error': jnp.abs(error)}
  sums = weighted_sums({name: jnp.sum(x * weight) for name, x in found.items()}, weight)
  if with_pairs:
    sums['pairs'] = _pairs(predicted, true, rows, weight), weight.sum()
  return sums


def _pairs(x: jax.Array, y: jax.Array, rows: jax.Array, weight: jax.Array) -> jax.Array:
  """Returns [global batch, 3] of x, y and weight [batch]; rows of other devices are 0."""
  pairs = jnp.stack([x, y.astype(jnp.float32), jnp.ones_like(x)], -1) * weight[:, None]
  return jnp.zeros((rows.shape[0] * local_ways('batch'), 3)).at[rows].add(pairs)


def of_text_sets(
  vectors: jax.Array,
  exists: jax.Array,
  rows: jax.Array,
  weights: jax.Array,
  scores: jax.Array,
  *,
  temperature: float,
  with_pairs: bool,
) -> Sums:
  """Returns sums of InfoNCE over rows: finds the text that matches the first text of a row.

  Candidates are the second texts of all rows in the global batch, and their third texts (hard
  negatives), where they exist.

  Args:
    vectors: [batch, 3, embed], float32, vectors of the texts of these rows.
    exists: [batch, 3], whether a row has the text.
    rows: [batch] indices of the rows in the global batch.
    weights: [batch]; 0 leaves a row out, also as a negative.
    scores: [batch] similarity of the first two texts, on any scale.
    temperature: divides the products of vectors.
    with_pairs: add 'pairs' [global batch, 3]: product of the first two texts, score, weight.
  Source: van den Oord et al. 2018, equation 4; negatives of all devices: Radford et al. 2021.
  """
  everywhere = functools.partial(gather_over, name='batch', dim=0)
  counted = exists & (weights > 0)[:, None]
  products = functools.partial(
    jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
  )
  others = everywhere(vectors[:, 1:])
  logits = products('be,cke->bck', vectors[:, 0], others) / temperature
  is_own = (everywhere(rows) == rows[:, None])[..., None] & (jnp.arange(2) == 0)
  logits = jnp.where(everywhere(counted[:, 1:]), logits, -jnp.inf)
  target = jnp.where(is_own, logits, -jnp.inf).max((1, 2))
  kept = (counted_once(weights) > 0) & exists[:, 0] & exists[:, 1]
  target, logits = (
    jnp.where(jnp.expand_dims(kept, tuple(range(1, x.ndim))), x, 0.0) for x in (target, logits)
  )
  loss = jax.nn.logsumexp(logits, axis=(1, 2)) - target
  best_other = jnp.where(is_own, -jnp.inf, logits).max((1, 2))
  weight = jnp.where(kept, weights, 0).astype(jnp.float32)
  found = {'loss': loss, 'accuracy': target > best_other}
  sums = weighted_sums({name: jnp.sum(x * weight) for name, x in found.items()}, weight)
  if with_pairs:
    product = products('be,be->b', vectors[:, 0], vectors[:, 1])
    sums['pairs'] = _pairs(product, scores, rows, weight), weight.sum()
  return sums


def hits_of(
  right: jax.Array, predicted: jax.Array, true: jax.Array, weights: jax.Array
) -> jax.Array:
  """Returns sums of `weights` [..., classes, 3] over examples that are right, predicted, and true.

  All arguments are [..., classes]. Precision, recall and F1 follow from the sums, also after adding
  batches.
  """
  kinds = jnp.stack([right, predicted, true], -1).astype(jnp.float32) * weights[..., None]
  return kinds.reshape(-1, *kinds.shape[-2:]).sum(0)


def entity_hits(
  predicted: jax.Array,
  labels: jax.Array,
  segments: jax.Array,
  positions: jax.Array,
  *,
  names: Sequence[str],
) -> jax.Array:
  """Returns 'hits' [types, 3]: number of right, predicted and true entities.

  An entity is right if type, first and last word are right. If the length is split, only one device
  along `context` counts.

  Args:
    predicted: [batch, length] numbers of tags.
    labels: [batch, length] numbers of tags plus one, 0 except at the first token of a word.
    segments: [batch, length] number of the example in a packed row.
    positions: [length] positions of these tokens.
    names: names of the tags.
  Source: data/entities.py.
  """
  if local_ways('length') > 1:
    order = jnp.argsort(gather_over(positions, 'length', dim=0))
    predicted, labels, segments = (
      gather_over(x, 'length', dim=1)[:, order] for x in (predicted, labels, segments)
    )
  length, is_word = labels.shape[1], labels > 0
  starts, ends = map(jnp.asarray, entities.boundaries(names))
  places = jnp.arange(length)
  last = jax.lax.cummax(jnp.where(is_word, places, -1), axis=1)
  next_ = jax.lax.cummin(jnp.where(is_word, places, length), axis=1, reverse=True)
  before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  after = jnp.pad(next_[:, 1:], ((0, 0), (0, 1)), constant_values=length)

  def at(x: jax.Array, where: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, jnp.clip(where, 0, length - 1), axis=1)

  def neighbor(tags: jax.Array, where: jax.Array) -> jax.Array:
    inside = (where >= 0) & (where < length) & (at(segments, where) == segments)
    return jnp.where(inside, at(tags, where), len(names))

  def found(tags: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    begins = is_word & starts[neighbor(tags, before), tags]
    finishes = is_word & ends[tags, neighbor(tags, after)]
    last_word = jax.lax.cummin(jnp.where(finishes, places, length), axis=1, reverse=True)
    kinds = jax.nn.one_hot(jnp.asarray(entities.kind_numbers(names))[tags], num_kinds, dtype=bool)
    return begins, last_word, kinds & begins[..., None]

  num_kinds = len(entities.entity_kinds(names))
  begins, last_words, predicted_kinds = found(predicted)
  true_begins, true_last_words, true_kinds = found(jnp.maximum(labels - 1, 0))
  same = begins & true_begins & (last_words == true_last_words)
  right = predicted_kinds & true_kinds & same[..., None]
  return hits_of(right, predicted_kinds, true_kinds, counted_once(jnp.ones(right.shape)))


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
      tanh), 'first_token', the 'mean' of all tokens, or 'flatten': the tokens of the row one after
      another, zeros in place of padding. 'flatten' needs head_mlp_dim, and a limit of the length:
      TransformerConfig.max_length, or num_positions.
    head_mlp_dim: hidden features of an MLP between pooling and classes; 0 for no MLP.
    head_mlp_activation: activation of this MLP; None for the first of
      TransformerConfig.mlp_activations.
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
  head_mlp_activation: Optional[str] = None
  label_smoothing: float = 0.0
  z_loss: float = 0.0
  token_types: Optional[bool] = None
  problem_type: str = SINGLE_LABEL
  class_names: tuple[str, ...] = ()
  normalize: bool = True
  temperature: float = 0.05
  layer: Callable[[TransformerConfig], nn.Module] = TransformerLayer
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
  def flattens(self) -> bool:
    """Whether the head reads the features of all positions of a row."""
    return self.pooling == FLATTEN and self._has_row_targets

  @property
  def sees_order(self) -> bool:
    """Whether the order of the tokens matters, to the layers or to the head."""
    return self.flattens or super().sees_order

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

  def flops_per_token(self, length: int) -> float:
    """Returns model FLOPs of one training step per position of a row of `length`."""
    flops = super().flops_per_token(length)
    if self.flattens:  # a matrix over whole rows
      flops += 6.0 * self.config.length_limit * self.config.embed_dim * self.head_mlp_dim / length
    return flops

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
    pooled = self._has_row_targets and not self.flattens
    head = self._head_module.init(keys['head'], x[:, 0] if pooled else x)
    return {**params, **head['params']}

  @property
  def _head_module(self) -> nn.Module:
    if self.has_classes or self.regresses:
      return ClassifierHead(
        self.config,
        1 if self.regresses else self.num_classes,
        tanh_layer=self._has_row_targets and self.pooling.endswith('tanh'),
        mlp_dim=self.head_mlp_dim,
        mlp_activation=self.head_mlp_activation,
        flat_length=self.config.length_limit if self.flattens else 0,
      )
    return MaskedTokenHead(self.config)

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
    elif self.flattens:
      row = flatten(x, self._info(batch))
    else:
      row = pool(x, self._info(batch), kind=self.pooling)
    rng = self._rng(dropout_key, batch, 'head')
    return self._head_module.apply({'params': self._head_params(params)}, row, rng)

  def _vectors(
    self, params: Params, x: Activation, batch: DeviceBatch
  ) -> tuple[jax.Array, jax.Array]:
    """Returns text vectors [batch, 3, embed] in float32, and whether each text exists."""
    x, segments = self._stack.finish(params, x), self._info(batch).segments
    vectors, exist = pool_texts(x, segments, positions_of(batch, 'encoder'), kind=self.pooling)
    if self.normalize:
      squares = jnp.sum(jax.lax.square(vectors), axis=-1, keepdims=True)
      vectors = vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))
    return vectors, exist

  def _masked_tokens(self, params: Params, x: Activation) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns ([batch, length, embed], bias [vocab], table [vocab, embed]) of the token logits."""
    x = self._stack.finish(params, x)
    x, bias = self._head_module.apply({'params': self._head_params(params)}, x)
    return x, bias, whole(params['token_embedder'], self.config.compute_dtype)['embedding']

  def _head_params(self, params: Params) -> Params:
    return {
      name: whole(params[name], self.config.compute_dtype)
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

    Without dropout they include matrices: 'confusion' (losses.of_examples), 'hits' (`hits_of`)
    or 'pairs' (`of_numbers`, `of_text_sets`).
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
      return self._tag_sums(logits, batch, with_hits=dropout_key is None, **options)
    weights = batch['encoder_loss_weights']
    sums = masked_token_loss(
      self.config,
      *self._masked_tokens(params, x),
      batch['encoder_target_tokens'],
      weights,
      **options,
    )
    return self._stack.charge_routers(sums, x, weights)

  def _tag_sums(
    self, logits: jax.Array, batch: DeviceBatch, *, with_hits: bool, **options: float
  ) -> Sums:
    labels, info = batch[LABELS], self._info(batch)
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
