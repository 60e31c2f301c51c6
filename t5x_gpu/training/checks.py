"""Checks of a run: its periods, and its first loss."""

import logging
from typing import Optional

from t5x_gpu.errors import ConfigError
from t5x_gpu.models.model import Model, OptionalMembers

_log = logging.getLogger(__name__)


def check_periods(**periods: Optional[int]) -> None:
  """Raises ConfigError for a period below 1; None is allowed."""
  wrong = [name for name, value in periods.items() if value is not None and value < 1]
  if wrong:
    raise ConfigError(
      ', '.join(f'train.{name} = {periods[name]}' for name in wrong) + ': must be at least 1.',
      fix='Give a number of steps.',
      parameters=[f'train.{name}' for name in wrong],
    )


def check_whole_batch(model: Model, *, num_microbatches: int, is_pipeline: bool) -> None:
  """Raises ConfigError for microbatches if the loss of a row depends on the other rows."""
  if OptionalMembers(model).couples_rows and (num_microbatches > 1 or is_pipeline):
    raise ConfigError(
      'The loss of embeddings takes its negatives from the whole batch, so '
      + ('a pipeline' if is_pipeline else f'num_microbatches = {num_microbatches}')
      + ' cannot split the batch.',
      fix='Set train.num_microbatches = 1 and use no pipeline stages; split the batch over more '
      'devices, or set TransformerConfig.remat_policy to save memory.',
      parameters=('train.num_microbatches', 'Partitioner.stage'),
    )


def check_first_loss(loss: Optional[float], model: Model) -> None:
  """Warns if the first loss of a new model is far from the loss of guessing.

  Args:
    loss: None for a batch without target tokens or a model without this metric: no warning.
    model: computes the loss of guessing.
  """
  if loss is None:
    return
  expected = OptionalMembers(model).guess_loss
  if expected is None:
    return
  if not expected - 1.0 <= loss <= expected + 1.5:
    _log.warning(
      'The first loss is %.2f; an untrained model should be near %.2f, the loss of '
      'guessing. Check labels and initialization (tied embeddings start higher).',
      loss,
      expected,
    )
