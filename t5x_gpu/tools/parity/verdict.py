"""Whether two runs are the same: compares all differences with the tolerance, and names the first.

A mistake in a forward pass changes every later activation and every gradient; a mistake in a
backward pass changes the gradients of all earlier layers. So differences are checked in the order
of the computation: outputs of layers, forward; their gradients, backward; then gradients of
parameters, metrics, optimizer state and update. A `Report` becomes table rows or JSON.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Optional

from t5x_gpu.data.batches import Batch
from t5x_gpu.storage.json_schema import JsonObject
from t5x_gpu.tools.parity.compare import ArrayDifference
from t5x_gpu.tools.parity.paired_run import Rounding, StepDifferences, TwoRuns

# A difference counts as rounding up to this many times the effect of moving the parameters by one
# ulp: the mesh adds in another order, which rounds more than once.
ROUNDING_FACTOR = 8


@dataclasses.dataclass(frozen=True)
class Failure:
  """The first difference beyond the tolerance.

  Attributes:
    step: number of the step; 0 for the parameters before the first step.
    what: 'output of layers/2', 'gradient of layers/2/mlp/wo/kernel'.
    error: relative difference.
    how: a hint on the cause.
  """

  step: int
  what: str
  error: float
  how: str = ''


@dataclasses.dataclass(frozen=True)
class Report:
  """The result of a comparison.

  Attributes:
    tolerance: largest relative difference allowed.
    initial: differences of the parameters before the first step.
    steps: differences of each step.
    rounding: differences above the tolerance that rounding explains: 'gradient of head/shift'.
    failure: the first difference beyond the tolerance; None if the runs are the same.
  """

  tolerance: float
  initial: list[ArrayDifference]
  steps: list[StepDifferences]
  rounding: tuple[str, ...]
  failure: Optional[Failure]

  @property
  def worst(self) -> tuple[float, str]:
    """The largest difference and its name, without those explained by rounding."""
    judged = [(d.worst, f'{d.name}, initial value') for d in self.initial]
    for step in self.steps:
      judged += [
        (check.error, check.what) for check in _by_layer(step) if check.what not in self.rounding
      ]
      judged += [
        (d.worst, f'{d.name}, gradient')
        for d in step.gradient
        if _gradient_of(d) not in self.rounding
      ]
      judged += [(d.worst, f'{d.name}, update') for d in step.update]
      judged += [(d.worst, f'{d.name}, optimizer state') for d in step.optimizer_state]
      judged += [(error, name) for name, error in step.metrics.items()]
    return max(judged)

  @property
  def drift(self) -> float:
    """Relative difference of the parameters of two independent runs; it is not judged."""
    return max((d.worst for step in self.steps for d in step.drift), default=0.0)

  def sentence(self) -> str:
    """Returns the verdict in one line."""
    if self.failure is not None:
      f = self.failure
      when = f'at step {f.step}' if f.step else 'before step 1'
      return f'parity: FAILED {when}: first divergence: {f.what}, {f.error:.1e} relative'
    worst, what = self.worst
    beyond = f'; {len(self.rounding)} more within rounding' if self.rounding else ''
    return f'parity: ok, worst {worst:.1e} ({what}){beyond}'


def compare_runs(runs: TwoRuns, batches: Sequence[Batch], *, tolerance: float) -> Report:
  """Returns how two runs differ, step by step, until they diverge.

  Args:
    runs: a run on a mesh and one on one device.
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
    errors = [check.error for check in _by_layer(step)] + [d.worst for d in step.gradient]
    if max(errors) > tolerance:
      excused, failure = _judge(step, runs.rounding(state, batch), tolerance)
      rounding |= dict.fromkeys(excused)
    failure = (
      failure
      or _of_metrics(step, tolerance)
      or _of_arrays(number, 'optimizer state', step.optimizer_state, tolerance)
      or _of_arrays(number, 'update', step.update, tolerance)
    )
    state = after
  return Report(tolerance, initial, steps, tuple(rounding), failure)


@dataclasses.dataclass(frozen=True)
class _Check:
  """A difference in the forward or backward pass.

  Attributes:
    what: name of the compared array.
    error: its relative difference.
    layer: the layer that computed it, as `LayerDifference.name`.
    how: a hint on the cause if this is the first difference.
  """

  what: str
  error: float
  layer: str
  how: str


def _by_layer(step: StepDifferences) -> list[_Check]:
  """Returns checks of the outputs of layers, forward, then of their gradients, backward."""
  checks, names = [], [d.name for d in step.layers]
  for i, d in enumerate(step.layers):
    what = f'output of {d.name}'
    how = f'The input of {d.name}, which is the output of {names[i - 1]}, agrees.'
    if i == 0:
      how = 'It is the input of the first layer: look at the embedding.'
    elif d.name == 'head':
      what = 'loss of the head'
      how = 'The outputs of all layers agree: look at head and loss.'
    checks.append(_Check(what, d.output, d.name, how))
  for d, later in zip(step.layers[-2::-1], names[:0:-1]):
    checks.append(
      _Check(
        f'gradient of the output of {d.name}',
        d.gradient,
        later,
        'The outputs of all layers agree, and the gradients as far back as '
        f'{later}: its backward pass differs.',
      )
    )
  return checks


def _gradient_of(d: ArrayDifference) -> str:
  return f'gradient of {d.leaf.name()}'


def _judge(
  step: StepDifferences, noise: Rounding, tolerance: float
) -> tuple[list[str], Optional[Failure]]:
  """Returns the differences that rounding explains, and the first failure it cannot explain."""
  excused: list[str] = []

  def is_beyond(what: str, error: float, rounding: float) -> bool:
    if tolerance < error <= ROUNDING_FACTOR * rounding:
      excused.append(what)
    return error > max(tolerance, ROUNDING_FACTOR * rounding)

  of_layers = [
    check
    for check, rounding in zip(_by_layer(step), noise.layers, strict=True)
    if is_beyond(check.what, check.error, rounding)
  ]
  gradients = [
    d for d in step.gradient if is_beyond(_gradient_of(d), d.worst, noise.gradient[d.leaf])
  ]
  if of_layers:
    first = of_layers[0]
    return excused, Failure(
      step.step, first.what, first.error, first.how + _worst_parameter(first.layer, gradients)
    )
  if not gradients:
    return excused, None
  worst = max(gradients, key=lambda d: d.worst / max(tolerance, noise.gradient[d.leaf]))
  how = (
    (
      'The outputs of all layers and their gradients agree: look at how this gradient is '
      'computed, or at how gradients are summed over devices, microbatches or the ticks of a '
      'pipeline.'
    )
    if step.layers
    else (
      'The model cannot be run layer by layer (embed, run_layers, head), so this is the array '
      'that differs most; the mistake may be elsewhere.'
    )
  )
  return excused, Failure(step.step, f'gradient of {worst.name}', worst.worst, how)


def _worst_parameter(layer: str, gradients: Sequence[ArrayDifference]) -> str:
  """Returns a sentence on the layer's parameter whose gradient differs most, or ''."""
  stack, is_layer, number = layer.rpartition('/')
  own = [
    (d.by_layer[int(number)], d.leaf.name(int(number)))
    for d in gradients
    if is_layer and d.leaf.stack == tuple(stack.split('/'))
  ]
  if not own:
    return ''
  error, name = max(own)
  return f' Of its parameters, the gradient of {name} differs most: {error:.1e}.'


def _of_metrics(step: StepDifferences, tolerance: float) -> Optional[Failure]:
  # Gradients that agree up to their rounding have a norm that agrees about as well.
  rounding = max((d.worst for d in step.gradient), default=0.0)
  for name, error in step.metrics.items():
    if error > (max(tolerance, rounding) if name == 'grad_norm' else tolerance):
      return Failure(step.step, name, error, 'The gradients agree.')
  return None


def _of_arrays(
  number: int, what: str, found: list[ArrayDifference], tolerance: float
) -> Optional[Failure]:
  worst = max(found, key=lambda d: d.worst, default=None)
  if worst is None or worst.worst <= tolerance:
    return None
  how = '' if number == 0 else 'The gradients agree, but one device computes a different result.'
  return Failure(number, f'{what} of {worst.name}', worst.worst, how)


def step_rows(report: Report) -> list[list[str]]:
  """Returns a row per step: metrics on the mesh, their differences, the array that differs most."""
  rows = [
    [
      'step',
      'loss',
      'off by',
      'grad norm',
      'off by',
      'learning rate',
      'off by',
      'gradients',
      'optimizer state',
      'updates',
      'drift',
    ]
  ]
  for s in report.steps:
    row = [str(s.step)]
    for name in ('loss', 'grad_norm', 'learning_rate'):
      row += [f'{s.mesh[name]:.6g}', _number(s.metrics[name])]
    rows.append(
      row
      + [
        _number(max(d.worst for d in found)) if found else '-'
        for found in (s.gradient, s.optimizer_state, s.update, s.drift)
      ]
    )
  return rows


def layer_rows(report: Report) -> list[list[str]]:
  """Returns a row per layer with its worst step, in order of the forward pass."""
  rows = [['layer', 'output', 'gradient of it']]
  for of_layer in zip(*(s.layers for s in report.steps)):
    name = of_layer[0].name
    rows.append(
      [
        name if name != 'head' else 'head (loss)',
        _number(max(d.output for d in of_layer)),
        '-' if name == 'head' else _number(max(d.gradient for d in of_layer)),
      ]
    )
  return rows


def parameter_rows(report: Report) -> list[list[str]]:
  """Returns a row per parameter with its worst step and layer, for gradient and update."""
  rows = [['parameter', 'gradient', 'layer', 'update', 'layer', 'drift']]
  for i, first in enumerate(report.steps[0].gradient if report.steps else ()):
    row = [first.leaf.name()]
    for found in ('gradient', 'update', 'drift'):
      worst = max((getattr(s, found)[i] for s in report.steps), key=lambda d: d.worst)
      row.append(_number(worst.worst))
      if found != 'drift':
        row.append('-' if worst.worst_layer is None else str(worst.worst_layer))
    rows.append(row)
  return rows


def as_dict(report: Report) -> JsonObject:
  """Returns the report for JSON; infinite differences are None."""

  def arrays(found: list[ArrayDifference]) -> JsonObject:
    return {d.leaf.name(): [_finite(x) for x in d.by_layer] for d in found}

  return {
    'ok': report.failure is None,
    'verdict': report.sentence(),
    'tolerance': report.tolerance,
    'failure': report.failure
    and {**dataclasses.asdict(report.failure), 'error': _finite(report.failure.error)},
    'rounding': list(report.rounding),
    'initial': arrays(report.initial),
    'steps': [
      {
        'step': s.step,
        'mesh': {k: _finite(v) for k, v in s.mesh.items()},
        'one_device': {k: _finite(v) for k, v in s.one.items()},
        'metrics': {k: _finite(v) for k, v in s.metrics.items()},
        'layers': [
          {'name': d.name, 'output': _finite(d.output), 'gradient': _finite(d.gradient)}
          for d in s.layers
        ],
        **{
          name: arrays(getattr(s, name))
          for name in ('gradient', 'update', 'optimizer_state', 'drift')
        },
      }
      for s in report.steps
    ],
  }


def _finite(x: float) -> Optional[float]:
  return x if math.isfinite(x) else None


def _number(error: float) -> str:
  return '0' if error == 0 else f'{error:.1e}'
