"""When a run ends before its last step: `EarlyStopping` in gin files, `EarlyStop` in the run."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Optional

from t5x_gpu.checkpoint.retention import BEST_IS, EVALUATIONS, Keep
from t5x_gpu.errors import ConfigError, Problem, bad_setting, did_you_mean
from t5x_gpu.metrics.writers import METRICS, read_json_lines
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.main_log import log


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


class EarlyStop:
  """Decides when `EarlyStopping` ends a run, from the values of its metric. All processes have one.

  Args:
    rule: None for a run that ends at its last step.
    eval_periods: as in `EarlyStopping.check_evaluated`.
    folder: folder with the metrics of earlier starts.
    first_step: number of steps taken before this start.
  Attributes:
    values: step -> value of the metric.
  """

  def __init__(
    self,
    rule: Optional[EarlyStopping],
    *eval_periods: Optional[int],
    folder: pathlib.Path,
    first_step: int,
  ):
    self._rule, self.values = rule, {}
    if rule is None:
      return
    found, path = [], folder / METRICS
    if distributed.is_main_process() and path.is_file():
      found = [(r['step'], r[rule.metric]) for r in read_json_lines(path) if rule.metric in r]
    known = distributed.broadcast_json(found)
    period = dict(zip(EVALUATIONS, eval_periods, strict=True))[rule.metric.partition('/')[0]]
    start = min((step for step, _ in known), default=0)
    # Leaves out evaluations before the first step of a restart: they are not in the period.
    self.values = {
      step: value
      for step, value in known
      if step <= first_step and (step == start or step % period == 0)
    }

  def is_due(self, step: int, metrics: Optional[Mapping[str, float]] = None) -> bool:
    """Returns whether the run ends after `step`, whose evaluation gave `metrics`."""
    if self._rule is None:
      return False
    value = self._rule.keep.value_of(metrics or {})
    if value is not None:
      self.values[step] = value
    last = [self.values[s] for s in sorted(self.values)][-self._rule.patience :]
    if not self._rule.is_reached(last):
      return False
    shown = ', '.join(f'{value:.6g}' for value in last)
    log(f'Stopping early at step {step}: {self._rule.metric} has not improved: {shown}.')
    return True
