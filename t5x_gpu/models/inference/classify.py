"""Computes classes of texts or words, and numbers or vectors of texts, on any mesh."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Optional, Union

import jax
import numpy as np

from t5x_gpu.data.data_module import EncodedRow
from t5x_gpu.errors import DataError
from t5x_gpu.models.inference.generation import padded_length
from t5x_gpu.models.model import DeviceBatch, Model, Params, config_of
from t5x_gpu.partitioning.layout import Layout

# Probabilities of the classes, a number or a vector; or of each word, None without a token.
Classified = Union[list[float], list[Optional[list[float]]]]


@dataclasses.dataclass(frozen=True)
class ClassifierConfig:
  """How to classify texts.

  Attributes:
    max_length: maximum number of tokens of a row, as in training.
    batch_size: number of texts at a time.
    outcome: 'classes' (one per text), 'labels' (any number per text), 'tags' (one per word),
      'numbers' (one per text) or 'vectors'.
  """

  max_length: int
  batch_size: int
  outcome: str = 'classes'

  @property
  def facts(self) -> dict[str, object]:
    """The settings that results depend on."""
    return {'max_length': self.max_length, 'outcome': self.outcome}


class Classifier:
  """Computes the probabilities of all classes for each text.

  Args:
    model: a model that classifies.
    params: parameters on `layout`; None for a dry run.
    layout: mesh and rules of training.
    config: length and batch size.
  Attributes:
    batch_size: number of texts at a time: `config.batch_size`, rounded up for the mesh.
  """

  def __init__(self, model: Model, params: Params, *, layout: Layout, config: ClassifierConfig):
    self._model, self._params, self.config = model, params, config
    self._layout = layout.for_decoding
    parts = self._layout.batch_parts
    self.batch_size = -(-config.batch_size // parts) * parts
    self._classify = self._layout.jit(
      functools.partial(_outputs, model, outcome=config.outcome),
      out_shardings=self._layout.replicated,
    )

  def check_prompt(self, length: int, *, where: str, targets: int = 0) -> None:
    """Raises DataError for a row that is longer than in training."""
    del targets
    if length > self.config.max_length:
      raise DataError(
        f'{where} has {length} tokens; rows have at most {self.config.max_length}.',
        fix='Shorten the text.',
        parameters=('DatasetConfig.task_feature_lengths',),
      )

  def generate(
    self, prompts: Sequence[EncodedRow], *, numbers: Optional[Sequence[int]] = None
  ) -> list[Classified]:
    """Returns one result per prompt: the class probabilities, [number] or the vector.

    For a model that classifies words, a result is a list with one entry per word; None marks a word
    without a token in the row.
    """
    del numbers
    found: list[Classified] = []
    for start in range(0, len(prompts), self.batch_size):
      part = prompts[start : start + self.batch_size]
      batch = self._layout.put(self._batch(part))
      rows = np.asarray(self._classify(self._params, batch))[: len(part)]
      found += map(_of_words, rows, part) if rows.ndim == 3 else rows.tolist()
    return found

  def _batch(self, prompts: Sequence[EncodedRow]) -> dict[str, np.ndarray]:
    length = min(padded_length(max(map(len, prompts))), self.config.max_length)
    tokens, segments, types = np.zeros((3, self.batch_size, length), np.int32)
    tokens[:, 0] = segments[:, 0] = 1  # rows without a text need a token to attend to
    for row, prompt in enumerate(prompts):
      tokens[row, : len(prompt)] = prompt.tokens
      segments[row, : len(prompt)] = 1
      types[row, len(prompt) - prompt.num_second : len(prompt)] = 1
    batch = {'encoder_input_tokens': tokens, 'encoder_segment_ids': segments}
    config = config_of(self._model)
    if config is not None and config.num_token_types > 1:
      batch['encoder_token_types'] = types
    return batch


def _of_words(tokens: np.ndarray, row: EncodedRow) -> list[Optional[list[float]]]:
  """Returns the probabilities [classes] of each word, from the probabilities of all tokens."""
  return [tokens[place].tolist() if place >= 0 else None for place in row.words]


def _outputs(model: Model, params: Params, batch: DeviceBatch, *, outcome: str) -> jax.Array:
  """Returns float32 [batch, classes], [batch, length, classes], [batch, 1] or [batch, embed]."""
  logits = model.logits(params, batch)
  if outcome == 'numbers':
    return logits
  if outcome == 'vectors':
    return logits[:, 0]
  return jax.nn.sigmoid(logits) if outcome == 'labels' else jax.nn.softmax(logits)
