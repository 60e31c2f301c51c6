"""A comparison as table rows and as JSON."""

import dataclasses
import math
from typing import Any, Optional

from t5x_gpu.training.parity.compare import ArrayDifference
from t5x_gpu.training.parity.report import Report


def step_rows(report: Report) -> list[list[str]]:
  """Returns a row per step: metrics on the mesh, their differences, and the worst of the arrays."""
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


def as_dict(report: Report) -> dict[str, Any]:
  """Returns the report for JSON; infinite differences are None."""

  def arrays(found: list[ArrayDifference]) -> dict[str, Any]:
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
