"""Which checkpoints stay."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Optional

from t5x_gpu.errors import ConfigError, did_you_mean

BEST_IS = ('min', 'max')
# Prefix of metrics -> the parameter that sets how often they are computed.
EVALUATIONS = {'eval': 'eval_period', 'infer_eval': 'infer_eval_period'}


@dataclasses.dataclass(frozen=True)
class Keep:
  """Which checkpoints stay. A checkpoint stays if any of the rules keeps it.

  Attributes:
    last: keeps this many of the latest checkpoints.
    every: keeps steps that are multiples of this number.
    steps: keeps these steps.
    best: keeps this many checkpoints with the best value of `metric`.
    metric: an evaluation metric, named as in metrics.jsonl: 'eval/loss'.
    best_is: 'min' or 'max'.
    named_by: the parameter or flag that sets `metric`, for errors.
  """

  last: Optional[int] = None
  every: Optional[int] = None
  steps: Collection[int] = ()
  best: Optional[int] = None
  metric: str = 'eval/loss'
  best_is: str = 'min'
  named_by: str = 'CheckpointConfig.best_metric'

  def reasons(self, steps: Sequence[int], values: Mapping[int, float]) -> dict[int, str]:
    """Returns step -> reason, for the steps that stay.

    Args:
      steps: all steps, oldest first.
      values: step -> value of the metric, for steps that were evaluated when they were saved.
    """
    known = [step for step in steps if step in values and not math.isnan(values[step])]
    ranked = sorted(
      known, key=lambda step: (-values[step] if self.best_is == 'max' else values[step], -step)
    )
    kept = {}
    for step in steps:
      if self.last and step in steps[-self.last :]:
        kept[step] = f'one of the last {self.last}'
      elif self.every and step % self.every == 0:
        kept[step] = f'a multiple of {self.every}'
      elif step in self.steps:
        kept[step] = 'named'
      elif self.best and step in ranked[: self.best]:
        kept[step] = f'one of the best {self.best} ({self.metric} {values[step]:.6g})'
    return kept

  def value_of(self, metrics: Mapping[str, float]) -> Optional[float]:
    """Returns the value that `best` compares; None if the checkpoint lacks that evaluation.

    Raises:
      ConfigError: the evaluation did not report `metric`.
    """
    if not self.best or not metrics:
      return None
    group = self.metric.partition('/')[0]
    if group in EVALUATIONS and not any(name.startswith(f'{group}/') for name in metrics):
      return None  # that evaluation was not due at this step
    if self.metric not in metrics:
      raise ConfigError(
        f'{self.named_by} = {self.metric!r} is not a metric of the evaluation.'
        + did_you_mean(self.metric, metrics),
        fix=f'Its metrics are {", ".join(sorted(metrics))}.',
        parameters=() if self.named_by.startswith('--') else (self.named_by,),
      )
    return float(metrics[self.metric])
