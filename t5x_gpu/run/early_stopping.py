"""When a run ends before its last step: `EarlyStopping` in gin files."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Optional

from t5x_gpu.checkpoint.retention import BEST_IS, EVALUATIONS, Keep
from t5x_gpu.errors import ConfigError, Problem, bad_setting, did_you_mean


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
  """Ends a run once a metric has not improved for several evaluations, as T5X's action.

  Attributes:
    metric: an evaluation metric, named as in metrics.jsonl: 'eval/loss'.
    best_is: 'min' or 'max': whether low or high values are best.
    patience: the run ends after this many values in a row without an improvement.
    atol, rtol: a value improves only by more than atol + rtol * |value before|.
  Raises:
    ConfigError: a setting is invalid.
  Source: EarlyStoppingAction of t5x/trainer.py.
  """

  metric: str = 'eval/loss'
  best_is: str = 'min'
  patience: int = 3
  atol: float = 0.0
  rtol: float = 0.0

  def __post_init__(self) -> None:
    problems: list[Problem] = []
    if self.best_is not in BEST_IS:
      problems.append(bad_setting(self, 'best_is', f'is not one of {", ".join(BEST_IS)}.'))
    if self.patience < 2:
      problems.append(bad_setting(self, 'patience', 'must be at least 2: it compares values.'))
    for name in ('atol', 'rtol'):
      if getattr(self, name) < 0:
        problems.append(bad_setting(self, name, 'must be at least 0.'))
    group = self.metric.partition('/')[0]
    if group not in EVALUATIONS:
      text = f'is not a metric of an evaluation.{did_you_mean(group, EVALUATIONS)}'
      problems.append(bad_setting(self, 'metric', text))
    if problems:
      raise ConfigError(
        'EarlyStopping has invalid settings',
        problems=problems,
        fix='Set them in gin or with --gin.EarlyStopping.NAME=VALUE.',
      )

  @property
  def keep(self) -> Keep:
    """Finds the metric among others, and reports unknown names."""
    return Keep(best=1, metric=self.metric, named_by='EarlyStopping.metric')

  def check_evaluated(self, *eval_periods: Optional[int]) -> None:
    """Raises ConfigError if the run does not evaluate the metric.

    Args:
      eval_periods: steps between evaluations of each kind in `EVALUATIONS`; None if it never runs.
    """
    group = self.metric.partition('/')[0]
    if dict(zip(EVALUATIONS, eval_periods, strict=True))[group] is None:
      name = EVALUATIONS[group]
      raise ConfigError(
        f'EarlyStopping.metric = {self.metric!r}, but the run evaluates it only at its end.',
        fix=f'Set train.{name} to a number of steps, and the data of that evaluation.',
        parameters=('EarlyStopping.metric', f'train.{name}'),
      )

  def is_reached(self, values: Sequence[float]) -> bool:
    """Returns whether a run with these values of the metric, oldest first, ends."""
    last = values[-self.patience :]
    return len(last) == self.patience and not any(map(self._improves, last, last[1:]))

  def _improves(self, before: float, value: float) -> bool:
    gained = before - value if self.best_is == 'min' else value - before
    return not math.isnan(gained) and gained > self.atol + self.rtol * abs(before)
