"""What a run checks of itself: its numbers of steps, and its first loss."""

import logging
import math
from typing import Optional

from t5x_gpu.errors import ConfigError
from t5x_gpu.models.model import Model

_log = logging.getLogger(__name__)


def check_periods(**periods: Optional[int]) -> None:
  """Raises ConfigError for a number of steps below 1; None is no number."""
  wrong = [name for name, value in periods.items() if value is not None and value < 1]
  if wrong:
    raise ConfigError(
      ', '.join(f'train.{name} = {periods[name]}' for name in wrong) + ': must be at least 1.',
      fix='Give a number of steps.',
      parameters=[f'train.{name}' for name in wrong],
    )


def check_first_loss(loss: Optional[float], model: Model) -> None:
  """Warns if an untrained model is far from guessing: wrong labels, scale or initialisation.

  None, from a batch without target tokens or a model without such a metric, says nothing.
  """
  if loss is None:
    return
  expected = math.log(model.num_outcomes)
  if not expected - 1.0 <= loss <= expected + 1.5:
    _log.warning(
      'The first loss is %.2f; an untrained model should be near %.2f, that of '
      'guessing. Check labels and initialisation (tied embeddings start higher).',
      loss,
      expected,
    )
