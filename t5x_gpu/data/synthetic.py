"""Random batches without TensorFlow: for benchmarks, dry runs and tests of everything after data.

Batch t is a function of (seed, spec, t), so seeking to any step is immediate.

`uneven_batches` are random batches that expose a wrong mean: ragged rows, unequal weights, a row of
padding. With full rows and weights of 1, the mean of the devices' means equals the true mean, which
would hide an error in the weighting.
"""

import dataclasses
import json
from collections.abc import Iterator
from typing import Optional

import numpy as np

from t5x_gpu.data.batches import Batch, BatchSpec, DatasetConfig, row_masks
from t5x_gpu.data.features import (
  LABEL,
  LABEL_WEIGHTS,
  LABELS,
  SCORES,
  check_batch_size,
  check_lengths,
  check_pack,
)
from t5x_gpu.data.same_data import resumed_step
from t5x_gpu.errors import DataError
from t5x_gpu.storage.json_schema import Fields, Json, JsonObject, Whole

SEGMENTS_PER_ROW = 4
MAX_SCORE = 10_000
MASKED_SHARE = 0.15  # share of masked tokens, for masked language models
EVAL_BATCHES = 8
_STATE = Fields({'batches_taken': Whole(), 'data': dict})


@dataclasses.dataclass(frozen=True)
class _Rows:
  """The segments of a row of `length` tokens; all arrays are [length], int32."""

  segment_ids: np.ndarray
  positions: np.ndarray
  is_input: np.ndarray


def _rows(length: int, *, pack: bool) -> _Rows:
  segments = min(SEGMENTS_PER_ROW, length) if pack else 1
  segment = np.arange(length) * segments // length
  starts = np.searchsorted(segment, np.arange(segments))
  sizes = np.diff(np.append(starts, length))
  positions = np.arange(length) - starts[segment]
  return _Rows(
    segment_ids=(segment + 1).astype(np.int32),
    positions=positions.astype(np.int32),
    is_input=(positions < sizes[segment] // 2).astype(np.int32),
  )


class SyntheticBatches:
  """A `BatchIterator` over uniformly random token ids in [1, vocab), weights 1, no padding.

  For masked language models, masked tokens have the last id, and only masked tokens have weight 1.
  """

  def __init__(
    self,
    spec: BatchSpec,
    *,
    seed: int,
    num_batches: Optional[int],
    loss_on_targets_only: bool = True,
  ):
    self._spec = spec
    self._seed = seed
    self._num_batches = num_batches
    self._loss_on_targets_only = loss_on_targets_only
    self._step = 0
    self._closed = False

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    batch = self.peek()
    self._step += 1
    return batch

  def peek(self) -> Batch:
    """Returns the next batch without consuming it."""
    if self._closed or (self._num_batches is not None and self._step >= self._num_batches):
      raise StopIteration
    return self._batch(self._step)

  def get_state(self) -> bytes:
    return json.dumps({'batches_taken': self._step, 'data': self._fingerprint()}).encode()

  def set_state(self, state: bytes) -> None:
    self._step = resumed_step(state, _STATE, module=__name__, now=self._fingerprint())

  def describe(self) -> Json:
    return {
      **self._fingerprint(),
      'guarantee': 'random ids; the global batch at step t depends on (seed, spec, t) alone',
    }

  def close(self) -> None:
    """Ends the iterator."""
    self._closed = True

  def _fingerprint(self) -> JsonObject:
    shapes, masks = self._spec.shapes, row_masks(self._spec.shapes)
    return {
      'task': 'synthetic',
      'seed': self._seed,
      'num_batches': self._num_batches,
      'shapes': {name: list(shapes[name]) for name in sorted(shapes) if name not in masks},
      'vocab_sizes': dict(sorted(self._spec.vocab_sizes.items())),
      'loss_on_targets_only': self._loss_on_targets_only,
    }

  def _batch(self, step: int) -> Batch:
    # Philox is counter-based: the stream of (seed, step) does not depend on earlier steps.
    random = np.random.Generator(np.random.Philox(key=[self._seed, step]))
    spec, batch = self._spec, {}
    encoder_tokens = (
      'encoder_target_tokens' if 'encoder_target_tokens' in spec.shapes else 'encoder_input_tokens'
    )
    for name in (encoder_tokens, 'decoder_target_tokens'):
      if name in spec.shapes:
        batch[name] = random.integers(
          1, spec.vocab_sizes[name], size=spec.shapes[name], dtype=np.int32
        )
    if 'encoder_target_tokens' in spec.shapes:
      masked = random.random(spec.shapes[encoder_tokens]) < MASKED_SHARE
      masked[:, 0] = True  # so that every row has a token with weight 1
      batch['encoder_loss_weights'] = masked.astype(np.int32)
      batch['encoder_input_tokens'] = np.where(
        masked, spec.vocab_sizes['encoder_input_tokens'] - 1, batch[encoder_tokens]
      )
    if LABEL in spec.shapes:
      batch[LABEL] = random.integers(0, spec.vocab_sizes[LABEL], size=spec.shapes[LABEL])
    if LABELS in spec.shapes:
      batch[LABELS] = random.integers(0, spec.vocab_sizes[LABELS], size=spec.shapes[LABELS])
    if SCORES in spec.shapes:
      batch[SCORES] = random.integers(0, MAX_SCORE, size=spec.shapes[SCORES])
    if LABEL_WEIGHTS in spec.shapes:
      batch[LABEL_WEIGHTS] = np.ones(spec.shapes[LABEL_WEIGHTS])
    for name, shape in spec.shapes.items():
      if name not in batch:
        batch[name] = self._derived(name, shape, batch)
    return {name: batch[name].astype(spec.dtypes[name], copy=False) for name in spec.shapes}

  def _derived(self, name: str, shape: tuple[int, ...], tokens: Batch) -> np.ndarray:
    stack = name.split('_')[0]
    rows = _rows(shape[1], pack=f'{stack}_positions' in self._spec.shapes)
    if name == 'decoder_input_tokens':
      targets = tokens['decoder_target_tokens']
      shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
      return np.where(rows.positions == 0, 0, shifted)
    if name == 'decoder_loss_weights':
      row = np.ones(shape[1], np.int32)
      if 'decoder_causal_attention' in self._spec.shapes and self._loss_on_targets_only:
        row = 1 - rows.is_input
    elif name == 'decoder_causal_attention':
      # As in SeqIO, the prefix includes the position that reads the last input.
      row = rows.is_input | (rows.positions == 0) | np.append(0, rows.is_input[:-1])
    elif name == 'encoder_token_types':
      row = 1 - rows.is_input
    elif name.endswith('_segment_ids'):
      row = rows.segment_ids
    elif name.endswith('_positions'):
      row = rows.positions
    else:
      raise DataError(
        f'Synthetic batches cannot make feature {name!r}.',
        fix="Set DatasetConfig.module = 't5x_gpu.data.seqio_batches'.",
        parameters=('DatasetConfig.module',),
      )
    return np.broadcast_to(row, shape).copy()


def open_batches(
  config: DatasetConfig, *, spec: BatchSpec, feature_converter: str, repeat: bool = True
) -> SyntheticBatches:
  """Returns random batches of `spec`: endless, or `EVAL_BATCHES` of them without `repeat`.

  Raises:
    DataError: batch size, lengths or packing are invalid.
  """
  check_batch_size(config.batch_size)
  check_lengths(feature_converter, task_feature_lengths=config.task_feature_lengths)
  check_pack(feature_converter, pack=config.pack)
  return SyntheticBatches(
    spec,
    seed=config.seed,
    num_batches=None if repeat else EVAL_BATCHES,
    loss_on_targets_only=config.loss_on_targets_only,
  )


MAX_WEIGHT = 3


def uneven_batches(spec: BatchSpec, *, seed: int, num_batches: int) -> list[Batch]:
  """Returns `num_batches` batches of `spec`, a function of the arguments alone.

  Each row has a random length, followed by padding (0 in every feature); the last of several rows
  is all padding. Nonzero weights are 1 to `MAX_WEIGHT`; the label of an empty row has weight 0.

  Raises:
    DataError: `spec` has a feature that synthetic batches cannot make.
  """
  batches = SyntheticBatches(spec, seed=seed, num_batches=num_batches)
  return [_uneven(batch, np.random.default_rng([seed, step])) for step, batch in enumerate(batches)]


def _uneven(batch: Batch, random: np.random.Generator) -> Batch:
  ends: dict[str, np.ndarray] = {}  # 'encoder' or 'decoder' -> end of each row
  result = {}
  for name, x in sorted(batch.items(), key=lambda item: -item[1].ndim):  # labels after tokens
    if x.ndim == 1:
      if name == LABEL_WEIGHTS:
        x = x * random.integers(1, MAX_WEIGHT + 1, x.shape)
      result[name] = np.where(ends['encoder'] > 0, x, 0).astype(batch[name].dtype)
      continue
    rows, length = x.shape[:2]
    stack = name.split('_')[0]
    if stack not in ends:
      ends[stack] = random.integers(min(2, length), length + 1, rows)
      if rows > 1:
        ends[stack][-1] = 0
    if name.endswith('loss_weights'):
      x = x * random.integers(1, MAX_WEIGHT + 1, x.shape).astype(x.dtype)
    result[name] = np.where(np.arange(length) < ends[stack][:, None], x, 0).astype(x.dtype)
  return {name: result[name] for name in batch}
