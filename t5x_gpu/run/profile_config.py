"""When a run takes profiles of itself: `PROFILE_STEPS` in gin files."""

import dataclasses
from collections.abc import Sequence
from typing import Optional

from t5x_gpu.errors import ConfigError

MOST_STEPS = 100  # a trace holds every operation of every step


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
  """When to take a trace, and of how many steps.

  Attributes:
    steps: first and last step of a trace, as (10, 12); None for no trace.
    period: takes a trace every `period` steps; None for never.
    num_steps: steps of each trace, except for the trace of `steps`.
    slow_factor: takes a trace, once per start, after a step that is this many times slower than
      the median of the last 200 steps; None for never.
  """

  steps: Optional[Sequence[int]] = None
  period: Optional[int] = None
  num_steps: int = 3
  slow_factor: Optional[float] = 1.5

  def __post_init__(self) -> None:
    if self.steps is not None:
      steps = tuple(self.steps) if isinstance(self.steps, Sequence) else (self.steps,)
      if len(steps) != 2 or not all(type(s) is int for s in steps) or not 1 <= steps[0] <= steps[1]:
        raise ConfigError(
          f'PROFILE_STEPS = {self.steps!r} is not a range of steps.',
          fix='Give the first and the last step: PROFILE_STEPS = (10, 12)',
          parameters=('ProfileConfig.steps',),
          docs='monitor.md#profiles',
        )
      self._check_length('steps', steps[1] - steps[0] + 1)
    self._check_length('num_steps', self.num_steps)
    if self.num_steps < 1 or self.period is not None and self.period <= self.num_steps:
      raise ConfigError(
        f'ProfileConfig.num_steps = {self.num_steps}, period = {self.period}: num_steps must '
        'be at least 1 and less than period.',
        fix='Set num_steps = 3 and a period of 100 or more.',
        parameters=('ProfileConfig.num_steps', 'ProfileConfig.period'),
      )
    if self.slow_factor is not None and self.slow_factor <= 1:
      raise ConfigError(
        f'ProfileConfig.slow_factor = {self.slow_factor} must be more than 1.',
        fix='Set it to 1.5, or to None to disable it.',
        parameters=('ProfileConfig.slow_factor',),
      )

  def _check_length(self, name: str, length: int) -> None:
    if length > MOST_STEPS:
      raise ConfigError(
        f'ProfileConfig.{name} asks for a trace of {length} steps; at most {MOST_STEPS} are '
        'allowed, because a trace holds every operation of every step.',
        fix='Three steps show where the time goes.',
        parameters=(f'ProfileConfig.{name}',),
      )

  def check_total(self, total_steps: int) -> None:
    """Raises ConfigError if the run ends before `steps`."""
    if self.steps is not None and self.steps[0] > total_steps:
      raise ConfigError(
        f'PROFILE_STEPS = {tuple(self.steps)} begins after the last step, TRAIN_STEPS = '
        f'{total_steps}.',
        fix=f'Choose steps up to {total_steps}.',
        parameters=('ProfileConfig.steps', 'train.total_steps'),
      )
