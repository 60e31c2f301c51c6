"""Objectives that mask parts of a text: T5's span corruption and BERT's masked tokens.

SeqIO leaves these to the t5 package, which t5x_gpu does not need. They are SeqIO preprocessors,
applied by a Task between tokenization and feature conversion:

    preprocessors=(seqio.preprocessors.tokenize, objectives.span_corruption)

The masked tokens are drawn from (seed, index of the example in the stream). So a run is
reproducible, and every epoch masks different tokens.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Optional

import numpy as np

from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies import vocabularies
from t5x_gpu.errors import DataError

# Raffel et al. 2020, section 3.1.4 and table 7: 15% of the tokens, in spans of 3.
NOISE_DENSITY, MEAN_SPAN_LENGTH = 0.15, 3.0
# Devlin et al. 2019, section 3.1: 15% of the tokens become prediction targets; 80% of these are
# masked, 10% are replaced by another token, 10% stay unchanged.
MASKED_SHARE, HIDDEN_SHARE, RANDOM_SHARE = 0.15, 0.8, 0.1
DEFAULT_LENGTH = 512  # if task_feature_lengths is not set

Lengths = Optional[Mapping[str, int]]
Features = Mapping[str, seqio.Feature]


def cut(dataset: tf.data.Dataset, *, max_tokens: int, min_tokens: int) -> tf.data.Dataset:
  """Yields {'targets': piece}: each text cut into equal pieces of at most `max_tokens`.

  Texts shorter than `min_tokens` are skipped.
  """

  def pieces(example: Mapping[str, tf.Tensor]) -> tf.data.Dataset:
    tokens = tf.cast(example['targets'], tf.int32)
    size = tf.size(tokens, tf.int64)
    count = -(-size // max_tokens)
    return tf.data.Dataset.range(count).map(
      lambda i: {'targets': tokens[i * size // count : (i + 1) * size // count]}
    )

  return dataset.flat_map(pieces).filter(lambda x: tf.size(x['targets']) >= min_tokens)


def framed(tokens: tf.Tensor, feature: seqio.Feature) -> tf.Tensor:
  """Returns `tokens` with the vocabulary's start id, if any, and with the end id if `add_eos`."""
  start = vocabularies.start_id(feature.vocabulary)
  before = [[start]] if start is not None else []
  after = [[vocabularies.end_id(feature.vocabulary)]] if feature.add_eos else []
  return tf.concat([*before, tokens, *after], axis=0)


def frame_size(feature: seqio.Feature) -> int:
  """Returns the number of ids that `framed` adds."""
  return int(vocabularies.start_id(feature.vocabulary) is not None) + int(feature.add_eos)


def noise_counts(
  length: int, *, noise_density: float = NOISE_DENSITY, mean_span_length: float = MEAN_SPAN_LENGTH
) -> tuple[int, int]:
  """Returns (number of masked tokens, number of spans) for a text of `length` >= 2 tokens.

  Rounds products and quotients in float32, as T5 does.
  """
  single = np.float32
  hidden = min(max(int(np.round(single(length) * single(noise_density))), 1), length - 1)
  spans = int(np.round(single(hidden) / single(mean_span_length)))
  return hidden, min(max(spans, 1), hidden, length - hidden)


def tokens_for(
  *, inputs: int, targets: int, counts: Callable[[int], tuple[int, int]] = noise_counts
) -> int:
  """Returns the length of the longest text whose inputs and targets, with ends, fit; 0 if no text.

  T5's random_spans_helper: 568 tokens for inputs of 512 and targets of 114.
  """
  best = 0
  for length in range(2, 2 * (inputs + targets)):
    hidden, spans = counts(length)
    if length - hidden + spans + 1 <= inputs and hidden + spans + 1 <= targets:
      best = length
  return best


def _partition(total: tf.Tensor, parts: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
  """Returns random sizes [parts], each at least 1, uniform over all choices that sum to `total`."""
  order = tf.argsort(tf.random.stateless_uniform([total - 1], seed))
  cuts = tf.sort(order[: parts - 1]) + 1
  ends = tf.concat([cuts, [total]], axis=0)
  return ends - tf.concat([[0], cuts], axis=0)


def noise_mask(
  length: tf.Tensor, *, hidden: tf.Tensor, spans: tf.Tensor, seed: tf.Tensor
) -> tf.Tensor:
  """Returns booleans [length] with `spans` masked spans (True); the first token is never masked."""
  seeds = tf.unstack(tf.random.experimental.stateless_split(seed, 2))
  sizes = tf.stack(
    [_partition(length - hidden, spans, seeds[0]), _partition(hidden, spans, seeds[1])], axis=1
  )
  mask = tf.repeat(tf.tile([False, True], [spans]), tf.reshape(sizes, [-1]))
  return tf.ensure_shape(mask, [None])


def noise_span_to_unique_sentinel(
  tokens: tf.Tensor, mask: tf.Tensor, sentinels: tf.Tensor
) -> tf.Tensor:
  """Returns `tokens` with the k-th span of `mask` replaced by `sentinels[k]`."""
  starts = mask & ~tf.concat([[False], mask[:-1]], axis=0)
  number = tf.cumsum(tf.cast(starts, tf.int32)) - 1
  marked = tf.where(starts, tf.gather(sentinels, tf.maximum(number, 0)), tokens)
  return tf.boolean_mask(marked, starts | ~mask)


def span_corruption(
  dataset: tf.data.Dataset,
  sequence_length: Lengths,
  output_features: Features,
  *,
  noise_density: float = NOISE_DENSITY,
  mean_span_length: float = MEAN_SPAN_LENGTH,
) -> tf.data.Dataset:
  """Yields T5's {'inputs': text with sentinels for spans, 'targets': sentinels and their spans}.

  Each text {'targets': tokens} is first cut so that inputs and targets, with ends, fit.

  Raises:
    DataError: the lengths are too short; the vocabulary has fewer sentinels than spans.
  """
  vocabulary = output_features['targets'].vocabulary
  counts = functools.partial(
    noise_counts, noise_density=noise_density, mean_span_length=mean_span_length
  )
  lengths = {
    name: (sequence_length or {}).get(name) or DEFAULT_LENGTH for name in ('inputs', 'targets')
  }
  longest = tokens_for(**lengths, counts=counts)
  if not longest:
    raise DataError(
      f'Span corruption needs at least 3 inputs and 3 targets; task_feature_lengths = {lengths}.',
      fix="Set TASK_FEATURE_LENGTHS = {'inputs': 512, 'targets': 114}, as in T5.",
      parameters=('DatasetConfig.task_feature_lengths',),
    )
  sentinels, num_spans = vocabularies.sentinel_ids(vocabulary), counts(longest)[1]
  if num_spans > len(sentinels):
    raise DataError(
      f'{longest} tokens have {num_spans} masked spans, but '
      f'{vocabularies.vocabulary_name(vocabulary)!r} has {len(sentinels)} sentinels.',
      fix='Set TASK_FEATURE_LENGTHS lower, or give the task a vocabulary with more extra_ids.',
      parameters=('DatasetConfig.task_feature_lengths', 'DatasetConfig.vocabulary'),
    )
  # By length, so that tf.data uses the same numbers as `tokens_for`.
  table = tf.constant([(0, 0)] * 2 + [counts(n) for n in range(2, longest + 1)], tf.int32)
  sentinels = tf.constant(sentinels, tf.int32)
  end = tf.constant([vocabularies.end_id(vocabulary)], tf.int32)

  @seqio.map_over_dataset(num_seeds=1)
  def corrupt(example: Mapping[str, tf.Tensor], seed: tf.Tensor) -> dict[str, tf.Tensor]:
    tokens = example['targets']
    hidden, spans = tf.unstack(tf.gather(table, tf.size(tokens)))
    mask = noise_mask(tf.size(tokens), hidden=hidden, spans=spans, seed=seed)
    return {
      name: tf.concat([noise_span_to_unique_sentinel(tokens, m, sentinels), end], axis=0)
      for name, m in (('inputs', mask), ('targets', ~mask))
    }

  return corrupt(cut(dataset, max_tokens=longest, min_tokens=2))


def masked_lm(
  dataset: tf.data.Dataset, sequence_length: Lengths, output_features: Features
) -> tf.data.Dataset:
  """Yields BERT's {'inputs': some tokens masked, 'targets': all tokens, 'loss_mask': 0 or 1}.

  Each text {'targets': tokens} is cut to the length. Each piece gets the start id ([CLS]), if the
  vocabulary has one, and the end id; these are never masked.

  Raises:
    DataError: the vocabulary does not have a mask id; the lengths leave no room for a token.
  """
  feature = output_features['targets']
  hiding = vocabularies.mask_id(feature.vocabulary)
  if hiding is None:
    raise DataError(
      f'{vocabularies.vocabulary_name(feature.vocabulary)!r} has no id for masked tokens: neither '
      '[MASK] nor a sentinel.',
      fix='Name "mask_token" in tokenizer_config.json, or give the task a vocabulary with '
      'extra_ids = 1.',
      parameters=('DatasetConfig.vocabulary',),
    )
  length = (sequence_length or {}).get('targets') or DEFAULT_LENGTH
  room, before = length - frame_size(feature), frame_size(feature) - int(feature.add_eos)
  if room < 1:
    raise DataError(
      f"'targets' has length {length}; each text also needs {frame_size(feature)} special ids.",
      fix="Set TASK_FEATURE_LENGTHS = {'inputs': 128, 'targets': 128}.",
      parameters=('DatasetConfig.task_feature_lengths',),
    )
  counts = tf.constant([max(1, round(n * MASKED_SHARE)) for n in range(room + 1)], tf.int32)
  ordinary = tf.constant(np.asarray(vocabularies.ordinary_ids(feature.vocabulary)), tf.int32)

  @seqio.map_over_dataset(num_seeds=1)
  def hide(example: Mapping[str, tf.Tensor], seed: tf.Tensor) -> dict[str, tf.Tensor]:
    tokens = example['targets']
    size = tf.size(tokens)
    seeds = tf.unstack(tf.random.experimental.stateless_split(seed, 3))
    order = tf.argsort(tf.random.stateless_uniform([size], seeds[0]))
    chosen = tf.tensor_scatter_nd_update(
      tf.zeros([size], tf.int32),
      order[: tf.gather(counts, size), None],
      tf.ones([tf.gather(counts, size)], tf.int32),
    )
    what = tf.random.stateless_uniform([size], seeds[1])
    other = tf.gather(
      ordinary, tf.random.stateless_uniform([size], seeds[2], 0, tf.size(ordinary), tf.int32)
    )
    shown = tf.where(
      what < HIDDEN_SHARE, hiding, tf.where(what < HIDDEN_SHARE + RANDOM_SHARE, other, tokens)
    )
    edges = [[before, int(feature.add_eos)]]
    return {
      'inputs': framed(tf.where(chosen > 0, shown, tokens), feature),
      'targets': framed(tokens, feature),
      'loss_mask': tf.pad(chosen, edges),
    }

  return hide(cut(dataset, max_tokens=room, min_tokens=1))
