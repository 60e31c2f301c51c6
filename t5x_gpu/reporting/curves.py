"""Sections of a report with curves: loss, speed, evaluations."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Optional

from t5x_gpu.metrics.plots import smooth
from t5x_gpu.reporting.charts import Axis, Series, line_chart
from t5x_gpu.reporting.markup import element
from t5x_gpu.reporting.page import Section, folded, table, views
from t5x_gpu.reporting.run_record import RunRecord
from t5x_gpu.reporting.scales import Points

_DENSE = 30  # with more points, a smoothed curve is drawn over the raw curve
_STEP = Axis('step', exact=lambda v: f'{v:,.0f}', whole=True)
_LOG_STEP = Axis('step', is_log=True, exact=lambda v: f'{v:,.0f}')
_MOST_TABLE_STEPS = 12
_MOST_CHARTS = 6
_EVAL = ('eval/', 'infer_eval/')
_LOSSES = ('train/loss', 'eval/loss')


def _exact(value: float) -> str:
  return f'{value:.4g}' if abs(value) >= 1000 else f'{value:.4f}'


def _value_axis(label: str, *, is_log: bool = False, low: Optional[float] = None) -> Axis:
  return Axis(label, is_log=is_log, low=low, exact=_exact)


def _smoothed(points: Points) -> Points:
  values = smooth([y for _, y in points], span=min(len(points) / 20, 200))
  return [(x, y) for (x, _), y in zip(points, values)]


def _training_curves(runs: Sequence[RunRecord], key: str, *, name: str = '') -> list[Series]:
  """Returns a curve per run, with the raw values behind it if there are many."""
  found = []
  for color, run in enumerate(runs):
    points = run.series(key)
    if not points:
      continue
    label = run.name if len(runs) > 1 else name or key
    if len(points) > _DENSE:
      one = len(runs) == 1  # with several runs, the legend would be long
      smoothed = f'{label}, smoothed' if one else label
      found.append(Series(smoothed, _smoothed(points), color))
      found.append(Series(label if one else '', points, color, 'pale'))
    else:
      found.append(Series(label, points, color, 'dots'))
  return found


def restart_marks(run: RunRecord) -> list[tuple[float, str]]:
  """Returns (step, text) of the restarts of a run."""
  processes = run.accounts.processes[1:] if run.accounts else ()
  return [
    (p.process.first_step, f'restart from step {p.process.first_step:,}')
    for p in processes
    if p.process.first_step is not None
  ]


def loss_section(runs: Sequence[RunRecord]) -> Optional[Section]:
  """Returns the losses of training and evaluation."""
  curves = _training_curves(runs, 'train/loss', name='training')
  for color, run in enumerate(runs):
    points = run.series('eval/loss')
    name = f'{run.name}, evaluation' if len(runs) > 1 else 'evaluation'
    if points:
      own = color if len(runs) > 1 else 1
      kind = 'dashed' if len(runs) > 1 and len(points) > 1 else 'dots'
      curves.append(Series(name, points, own, kind))
  if not curves:
    return None
  marks = restart_marks(runs[0]) if len(runs) == 1 else []

  def chart(x: Axis, y: Axis) -> ET.Element:
    return line_chart(curves, title='Loss', x=x, y=y, marks=marks)

  label = 'loss'
  content = views(
    'loss-axes',
    {
      'linear': chart(_STEP, _value_axis(label)),
      'log loss': chart(_STEP, _value_axis(label, is_log=True)),
      'log-log': chart(_LOG_STEP, _value_axis(label, is_log=True)),
    },
  )
  others = [
    (key, title)
    for key, title in (
      ('train/accuracy', 'Accuracy of training'),
      ('train/learning_rate', 'Learning rate'),
      ('train/grad_norm', 'Gradient norm'),
      ('train/param_norm', 'Parameter norm'),
    )
    if any(run.last(key) is not None for run in runs)
  ]
  charts = [_chart(runs, key, title) for key, title in others]
  more = folded('Accuracy, learning rate, norms', element('div', *charts, class_='grid2'))
  intro = 'The thin line has the value of each log line, the thick line is smoothed.'
  dense = any(len(run.series('train/loss')) > _DENSE for run in runs)
  intro = (intro if dense else '') + (' Dotted lines are restarts.' if marks else '')
  return Section('loss', 'Loss', [content, more if charts else None], intro.strip())


def _chart(
  runs: Sequence[RunRecord], key: str, title: str, *, unit: str = '', low: Optional[float] = None
) -> ET.Element:
  label = unit or key.partition('/')[2]
  return line_chart(
    _training_curves(runs, key, name=label), title=title, x=_STEP, y=_value_axis(label, low=low)
  )


def speed_section(runs: Sequence[RunRecord]) -> Optional[Section]:
  """Returns tokens per second, step seconds, the wait for input, and MFU if known."""
  charts = [
    _chart(runs, key, title, unit=unit, low=0.0)
    for key, title, unit in (
      ('train/tokens_per_second', 'Tokens per second', 'tokens/s'),
      ('train/step_seconds_median', 'Seconds per step, median', 's'),
      ('train/input_wait_fraction', 'Share of the step that waits for input', 'share'),
      ('train/mfu', 'Model FLOPs utilization', 'share'),
      ('train/tflops_per_second_per_device', 'TFLOP/s per device', 'TFLOP/s'),
      ('train/peak_memory_bytes', 'Memory, high-water mark', 'bytes'),
    )
    if any(run.last(key) is not None for run in runs)
  ]
  if not charts:
    return None
  intro = 'All devices together, without the time of saves and evaluations.'
  return Section('speed', 'Speed', [element('div', *charts, class_='grid2')], intro)


def evaluations_section(runs: Sequence[RunRecord]) -> Optional[Section]:
  """Returns the metrics of evaluations, during training and by `python -m t5x_gpu.eval`."""
  content = []
  keys = sorted({k for run in runs for r in run.metrics for k in r if k.startswith(_EVAL)})
  shown = [
    key for key in keys if key not in _LOSSES and any(len(run.series(key)) > 1 for run in runs)
  ]
  if shown:
    charts = [_chart(runs, key, key.partition('/')[2]) for key in shown[:_MOST_CHARTS]]
    content.append(element('div', *charts, class_='grid2'))
  for run in runs:
    name = f' of {run.name}' if len(runs) > 1 else ''
    content.append(_table(run.metrics, f'During training{name}', prefixes=_EVAL))
    content += [
      _table(records, f'python -m t5x_gpu.eval --name={which}{name}')
      for which, records in run.evaluations.items()
    ]
  content = [part for part in content if part is not None]
  if not content:
    return None
  return Section('evaluations', 'Evaluations', content)


def _table(
  records: Sequence[dict], title: str, *, prefixes: tuple[str, ...] = ('',)
) -> Optional[ET.Element]:
  """Returns a row per metric and a column per step, the first and the latest steps."""
  by_step = {
    r['step']: {k: v for k, v in r.items() if k != 'step' and k.startswith(prefixes)}
    for r in records
  }
  by_step = {step: values for step, values in by_step.items() if values}
  if not by_step:
    return None
  steps = sorted(by_step)
  caption = title
  if len(steps) > _MOST_TABLE_STEPS:
    left_out = len(steps) - _MOST_TABLE_STEPS
    steps = [*steps[:1], *steps[1 - _MOST_TABLE_STEPS :]]
    caption += f' ({left_out} earlier steps are left out)'
  names = sorted({name for values in by_step.values() for name in values})
  rows = [[name, *(_cell(by_step[step].get(name)) for step in steps)] for name in names]
  return table(['step', *(f'{step:,}' for step in steps)], rows, caption=caption)


def _cell(value: Optional[float]) -> str:
  return '' if value is None else _exact(value)
