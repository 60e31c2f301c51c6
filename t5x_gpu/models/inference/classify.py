"""Class probabilities of texts of any length, on any mesh."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Optional

import jax
import numpy as np

from t5x_gpu.errors import DataError
from t5x_gpu.models.inference.prompt_batches import padded_length
from t5x_gpu.models.model import ClassifierModel, DeviceBatch, Params, config_of
from t5x_gpu.partitioning.layout import Layout


@dataclasses.dataclass(frozen=True)
class ClassifierConfig:
  """How texts are classified.

  Attributes:
    max_length: most tokens of a row, as in training.
    end_id: last id of each text; if a row has two texts, the second has token type 1.
    batch_size: texts at a time.
  """

  max_length: int
  end_id: int
  batch_size: int


class Classifier:
  """Computes the probabilities of all classes for each text.

  Args:
    model: a model that classifies.
    params: on `layout`; None for a dry run.
    layout: mesh and rules of training.
    config: length and batch size.
  Attributes:
    batch_size: texts at a time: `config.batch_size`, rounded up to what the mesh divides.
  """

  def __init__(
    self, model: ClassifierModel, params: Params, *, layout: Layout, config: ClassifierConfig
  ):
    self._model, self._params, self.config = model, params, config
    self._layout = layout.for_decoding
    parts = self._layout.batch_parts
    self.batch_size = -(-config.batch_size // parts) * parts
    self._classify = self._layout.jit(
      functools.partial(_probabilities, model), out_shardings=self._layout.replicated
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
    self, prompts: Sequence[Sequence[int]], *, numbers: Optional[Sequence[int]] = None
  ) -> list[list[float]]:
    """Returns the probabilities of all classes for each of `prompts`, ids as in training."""
    del numbers
    found: list[list[float]] = []
    for start in range(0, len(prompts), self.batch_size):
      part = prompts[start : start + self.batch_size]
      batch = self._layout.put(self._batch(part))
      found += np.asarray(self._classify(self._params, batch))[: len(part)].tolist()
    return found

  def _batch(self, prompts: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    length = min(padded_length(max(map(len, prompts))), self.config.max_length)
    tokens, types = np.zeros((2, self.batch_size, length), np.int32)
    tokens[:, 0] = 1  # rows without a text need something to attend to
    for row, prompt in enumerate(prompts):
      tokens[row, : len(prompt)] = prompt
      ends = np.flatnonzero(tokens[row] == self.config.end_id)
      if len(ends) > 1:
        types[row, ends[0] + 1 : len(prompt)] = 1
    batch = {'encoder_input_tokens': tokens}
    config = config_of(self._model)
    if config is not None and config.num_token_types > 1:
      batch['encoder_token_types'] = types
    return batch


def _probabilities(model: ClassifierModel, params: Params, batch: DeviceBatch) -> jax.Array:
  """Returns float32 [batch, classes]."""
  return jax.nn.softmax(model.logits(params, batch))
