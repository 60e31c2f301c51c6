"""Whether two runs are the same: every difference against the tolerance, the first one named."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

from t5x_gpu.data.batches import Batch
from t5x_gpu.training.compare import Difference
from t5x_gpu.training.find_layer import find_layer
from t5x_gpu.training.two_runs import StepDifferences, TwoRuns

# How many times what one unit in the last place of the parameters does a difference may be, and
# still count as rounding: the mesh sums in another order, which is more than one such change.
ROUNDING_FACTOR = 8


@dataclasses.dataclass(frozen=True)
class Failure:
  """The first difference beyond the tolerance.

  Attributes:
    step: where; 0 for the parameters before the first step.
    what: 'gradient of layers/2/mlp/wo/kernel'.
    error: relative.
    how: what else is known of it.
  """
  step: int
  what: str
  error: float
  how: str = ''


@dataclasses.dataclass(frozen=True)
class Report:
  """What a comparison found.

  Attributes:
    tolerance: largest relative difference allowed.
    initial: of the parameters before the first step.
    steps: of each step.
    rounding: names of arrays whose gradients differ by more, but not beyond what rounding does.
    failure: the first difference beyond the tolerance; None if the runs are the same.
  """
  tolerance: float
  initial: list[Difference]
  steps: list[StepDifferences]
  rounding: tuple[str, ...]
  failure: Optional[Failure]

  @property
  def worst(self) -> tuple[float, str]:
    """The largest difference that was judged and what it is of; rounding apart."""
    judged = [(d.worst, f'{d.name}, initial value') for d in self.initial]
    for step in self.steps:
      judged += [(d.worst, f'{d.name}, gradient') for d in step.gradient
                 if d.leaf.name() not in self.rounding]
      judged += [(d.worst, f'{d.name}, update') for d in step.update]
      judged += [(d.worst, f'{d.name}, optimizer state') for d in step.optimizer_state]
      judged += [(error, name) for name, error in step.metrics.items()]
    return max(judged)

  @property
  def drift(self) -> float:
    """How far the parameters of two runs are apart that never met, relative; not judged."""
    return max((d.worst for step in self.steps for d in step.drift), default=0.0)

  def sentence(self) -> str:
    """Returns the verdict in one line."""
    if self.failure is not None:
      f = self.failure
      when = f'at step {f.step}' if f.step else 'before step 1'
      return f'parity: FAILED {when}: first divergence: {f.what}, {f.error:.1e} relative'
    worst, what = self.worst
    beyond = f'; {len(self.rounding)} arrays within their rounding' if self.rounding else ''
    return f'parity: ok, worst {worst:.1e} ({what}){beyond}'


def compare_runs(runs: TwoRuns, batches: Sequence[Batch], *, tolerance: float) -> Report:
  """Returns how two runs differ, step by step; the steps after a divergence are left out.

  Args:
    runs: on a mesh and on one device.
    batches: one per step.
    tolerance: largest relative difference allowed.
  """
  state, initial = runs.init()
  steps: list[StepDifferences] = []
  rounding: dict[str, None] = {}
  failure = _of_arrays(0, 'initial value', initial, tolerance)
  alone = state
  for number, batch in enumerate(batches, 1):
    if failure:
      break
    step, after, alone = runs.step(number, state, alone, batch)
    steps.append(step)
    beyond = [d for d in step.gradient if d.worst > tolerance]
    if beyond:
      limits = {leaf: max(tolerance, ROUNDING_FACTOR * noise)
                for leaf, noise in runs.rounding(state, batch).items()}
      rounding |= {d.leaf.name(): None for d in beyond if d.worst <= limits[d.leaf]}
      if any(d.worst > limits[d.leaf] for d in beyond):
        found = find_layer(runs, state, batch, gradient=step.gradient, limits=limits)
        failure = Failure(number, f'gradient of {found.name}', found.error, found.how)
    failure = (failure or _of_metrics(step, tolerance)
               or _of_arrays(number, 'optimizer state', step.optimizer_state, tolerance)
               or _of_arrays(number, 'update', step.update, tolerance))
    state = after
  return Report(tolerance, initial, steps, tuple(rounding), failure)


def _of_metrics(step: StepDifferences, tolerance: float) -> Optional[Failure]:
  for name, error in step.metrics.items():
    if error > tolerance:
      return Failure(step.step, name, error, 'The gradients agree.')
  return None


def _of_arrays(number: int, what: str, found: list[Difference], tolerance: float
               ) -> Optional[Failure]:
  worst: Any = max(found, key=lambda d: d.worst, default=None)
  if worst is None or worst.worst <= tolerance:
    return None
  how = '' if number == 0 else 'The gradients agree; one device makes something else of them.'
  return Failure(number, f'{what} of {worst.name}', worst.worst, how)
