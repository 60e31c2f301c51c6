"""Checks prompts and targets, and pads them into rows of a batch.

Each length and batch size is compiled once, so lengths are powers of two, and all batches have the
same size.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from t5x_gpu.errors import DataError
from t5x_gpu.models.decoding import DecodingConfig, reads_inputs
from t5x_gpu.models.model import Model, config_of

SHORTEST = 16  # tokens; shorter rows are padded to this length


def padded_length(length: int) -> int:
  """Returns the length that rows of `length` tokens are padded to: a power of two."""
  return max(SHORTEST, 1 << (length - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class PromptBatches:
  """Makes batches of `batch_size` rows; rows without a prompt fill the last batch.

  Attributes:
    model: the model. If it has an encoder, the encoder reads the prompts.
    config: how to decode.
    batch_size: number of rows.
  """

  model: Model
  config: DecodingConfig
  batch_size: int

  @property
  def _has_encoder(self) -> bool:
    return reads_inputs(self.model)

  @property
  def _start(self) -> tuple[int, ...]:
    start = self.config.start_token
    return () if start is None else (start,)

  def check(self, prompt: Sequence[int], *, where: str, target: Sequence[int] = ()) -> None:
    """Raises DataError for a prompt and target that are too long or have unknown ids."""
    self.check_length(len(prompt), where=where, targets=len(target))
    ids, vocab_size = (*prompt, *target), self.model.num_outcomes
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
      raise DataError(
        f'{where} has ids from {min(ids)} to {max(ids)}; the model has {vocab_size} ids.',
        fix='Use the vocabulary that the model was trained with.',
        parameters=('DatasetConfig.vocabulary', 'TransformerConfig.vocab_size'),
      )

  def check_length(self, length: int, *, where: str, targets: int = 0) -> None:
    """Raises DataError unless the model has positions for a prompt and the tokens after it.

    Args:
      length: number of tokens of the prompt.
      where: origin of the prompt, for the error.
      targets: number of tokens after the prompt; 0 for max_decode_length.
    """
    c = self.config
    if length < 1 and (self._has_encoder or c.start_token is None):
      raise DataError(
        f'{where}: the prompt is empty.',
        fix='Give every prompt at least one token'
        + (
          '.'
          if self._has_encoder
          else ', or set DecodingConfig.start_token to the id that precedes a text in training.'
        ),
        parameters=('DecodingConfig.start_token',),
      )
    model, new = config_of(self.model), targets or c.max_decode_length
    limit = None if model is None else model.length_limit
    before = 0 if self._has_encoder else length
    if limit is None or max(before + new, length) <= limit:
      return
    follow = 'target' if targets else 'new'
    room = limit - before
    fix = (
      'Shorten the prompt'
      if targets or room < 1 or length > limit
      else f'Set DecodingConfig.max_decode_length to at most {room}, or shorten the prompt'
    )
    learned = model.num_positions > 0
    parameter = f'TransformerConfig.{"num_positions" if learned else "max_length"}'
    raise DataError(
      f'{where}: the prompt has {length} tokens and {new} {follow} ones may follow; the model '
      + ('has learned vectors for' if learned else 'was made for')
      + f' {limit} positions.',
      fix=f'{fix}: {parameter} is the number of positions.'
      if learned
      else f'{fix}. If the model was trained on longer texts, set {parameter}, or 0 for no limit.',
      parameters=('DecodingConfig.max_decode_length', parameter),
      docs='infer.md#refused',
    )

  def to_continue(
    self, prompts: Sequence[Sequence[int]], numbers: Sequence[int]
  ) -> dict[str, np.ndarray]:
    """Returns a batch to generate from.

    The features are 'prompts' [batch, length], decoder inputs padded on the left; 'lengths'
    [batch], the number of their tokens; 'numbers' [batch], -1 for a row without a prompt; and, with
    an encoder, 'encoder_tokens' and 'encoder_segments' [batch, inputs_length], padded on the right.

    Args:
      prompts: ids of each prompt; at most `batch_size` prompts.
      numbers: numbers of the prompts; samples depend on them.
    """
    begins = [self._start if self._has_encoder else (*self._start, *prompt) for prompt in prompts]
    width = 1 if self._has_encoder else padded_length(max(map(len, begins)))
    batch = {
      'prompts': np.zeros((self.batch_size, width), np.int32),
      'lengths': np.ones(self.batch_size, np.int32),
      'numbers': np.full(self.batch_size, -1, np.int32),
    }
    for row, begin in enumerate(begins):
      batch['prompts'][row, width - len(begin) :] = begin
      batch['lengths'][row] = len(begin)
    batch['numbers'][: len(prompts)] = numbers
    if self._has_encoder:
      batch['encoder_tokens'], batch['encoder_segments'] = self._encoder_rows(prompts)
    return batch

  def to_score(
    self, prompts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
  ) -> dict[str, np.ndarray]:
    """Returns a batch as in training: prompt and target in a row, loss weight 1 on the target."""
    before = [() if self._has_encoder else tuple(prompt) for prompt in prompts]
    rows = [(*self._start, *prompt, *target) for prompt, target in zip(before, targets)]
    length = padded_length(max(map(len, rows)) - 1)
    batch = {
      name: np.zeros((self.batch_size, length), np.int32)
      for name in (
        'decoder_input_tokens',
        'decoder_target_tokens',
        'decoder_loss_weights',
        'decoder_causal_attention',
        'decoder_segment_ids',
      )
    }
    for i, (row, target) in enumerate(zip(rows, targets)):
      end, first = len(row) - 1, len(row) - 1 - len(target)
      batch['decoder_input_tokens'][i, :end] = row[:-1]
      batch['decoder_target_tokens'][i, :end] = row[1:]
      batch['decoder_segment_ids'][i, :end] = 1
      batch['decoder_loss_weights'][i, first:end] = 1
      batch['decoder_causal_attention'][i, : first + 1] = 1
    if self._has_encoder:
      inputs = self._encoder_rows(prompts)
      batch['encoder_input_tokens'], batch['encoder_segment_ids'] = inputs
      del batch['decoder_causal_attention']
    return batch

  def _encoder_rows(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns tokens and segment ids, [2, batch, length]."""
    rows = np.zeros((2, self.batch_size, padded_length(max(map(len, prompts)))), np.int32)
    rows[:, :, 0] = 1  # rows without a prompt need a token to attend to
    for row, prompt in enumerate(prompts):
      rows[0, row, : len(prompt)] = prompt
      rows[1, row, : len(prompt)] = 1
    return rows
