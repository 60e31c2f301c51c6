"""Losses and counts of encoders whose rows have several labels, tags, a number or several texts."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from t5x_gpu.data import entities
from t5x_gpu.data.features import SCORE_UNIT
from t5x_gpu.models.losses import Sums, counted_once
from t5x_gpu.partitioning.axis_rules import is_manual, manual_axes


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
  true = jax.nn.one_hot(labels - 1, logits.shape[-1]).sum(1)
  if is_manual('context'):
    true = jax.lax.psum(true, 'context')
  true, predicted = true > 0, logits > 0
  weights = counted_once(weights).astype(jnp.float32)
  loss = jnp.where(true, jax.nn.softplus(-logits), jax.nn.softplus(logits)).mean(-1)
  right = (true == predicted).all(-1).astype(jnp.float32)
  sums = {'loss': jnp.sum(loss * weights), 'subset_accuracy': jnp.sum(right * weights)}
  weight = weights.sum()
  found: Sums = {name: (value, weight) for name, value in sums.items()}
  if with_hits:
    weights = jnp.broadcast_to(weights[:, None], true.shape)
    found['hits'] = hits_of(true & predicted, predicted, true, weights), weight
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
  sums = {name: (jnp.sum(x * weight), weight.sum()) for name, x in found.items()}
  if with_pairs:
    sums['pairs'] = _pairs(predicted, true, rows, weight), weight.sum()
  return sums


def _pairs(x: jax.Array, y: jax.Array, rows: jax.Array, weight: jax.Array) -> jax.Array:
  """Returns [global batch, 3] of x, y and weight [batch]; rows of other devices are 0."""
  pairs = jnp.stack([x, y.astype(jnp.float32), jnp.ones_like(x)], -1) * weight[:, None]
  size = rows.shape[0] * math.prod(map(jax.lax.axis_size, manual_axes('batch')))
  return jnp.zeros((size, 3)).at[rows].add(pairs)


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
  axes = manual_axes('batch')

  def everywhere(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, axes, tiled=True) if axes else x

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
  sums = {name: (jnp.sum(x * weight), weight.sum()) for name, x in found.items()}
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
  if is_manual('context'):
    order = jnp.argsort(jax.lax.all_gather(positions, 'context', tiled=True))
    predicted, labels, segments = (
      jax.lax.all_gather(x, 'context', axis=1, tiled=True)[:, order]
      for x in (predicted, labels, segments)
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
  ours, theirs = found(predicted), found(jnp.maximum(labels - 1, 0))
  same = ours[0] & theirs[0] & (ours[1] == theirs[1])
  right = ours[2] & theirs[2] & same[..., None]
  return hits_of(right, ours[2], theirs[2], counted_once(jnp.ones(right.shape)))
