"""Sections of a report: loss, speed, evaluations, profiles, configuration, data, samples, time."""

import csv
import json
import math
import pathlib
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from typing import Optional

import numpy as np

from t5x_gpu.metrics import scores
from t5x_gpu.metrics.goodput import (
  CATEGORIES,
  DONE,
  DOWNTIME,
  LOST,
  MEANING,
  ProcessAccount,
  summary,
)
from t5x_gpu.metrics.throughput import pauses_that_took_time
from t5x_gpu.reporting import interruptions
from t5x_gpu.reporting.charts import Axis, Points, Series, line_chart, short_number, stacked_bars
from t5x_gpu.reporting.page import Child, Section, element, folded, table, views
from t5x_gpu.reporting.run_record import ReportedSetting, RunRecord, differences
from t5x_gpu.storage.json_schema import Fields, Json, ListOf, MapOf, Nullable, Whole, read_json
from t5x_gpu.terminal.progress import format_seconds

_DENSE = 30  # with more points, a smoothed curve is drawn over the raw curve
_STEP = Axis('step', exact=lambda v: f'{v:,.0f}', whole=True)
_LOG_STEP = Axis('step', is_log=True, exact=lambda v: f'{v:,.0f}')
_MOST_TABLE_STEPS = 12
_MOST_LOST = 3
_MOST_CHARTS = 6
_EVAL = ('eval/', 'infer_eval/')
_LOSSES = ('train/loss', 'eval/loss')


def _exact(value: float) -> str:
  return f'{value:.4g}' if abs(value) >= 1000 else f'{value:.4f}'


def _value_axis(label: str, *, is_log: bool = False, low: Optional[float] = None) -> Axis:
  return Axis(label, is_log=is_log, low=low, exact=_exact)


def smooth(values: Sequence[float], *, span: float) -> list[float]:
  """Returns `values` smoothed over about `span` neighbors, without lag.

  Local linear regression with Gaussian weights (Fan and Gijbels 1996, section 2.2). An exponential
  average was tried first: it lagged behind a falling loss by a tenth of the picture, and its last
  value was not the current loss. Ignores values that are not finite.
  """
  y = np.asarray(values, np.float64)
  known = np.isfinite(y)
  sigma = max(span / 2, 0.5)
  radius = math.ceil(4 * sigma)
  offsets = np.arange(-radius, radius + 1)
  kernel = np.exp(-0.5 * (offsets / sigma) ** 2)

  def moment(x: np.ndarray, power: int) -> np.ndarray:
    # convolve flips the kernel: the weight of x[i + k] is kernel(k) * k**power
    full = np.convolve(x, (kernel * offsets.astype(np.float64) ** power)[::-1])
    return full[radius : radius + len(x)]

  weight, value = known.astype(np.float64), np.where(known, y, 0.0)
  s0, s1, s2 = (moment(weight, power) for power in range(3))
  t0, t1 = (moment(value, power) for power in range(2))
  determinant = s0 * s2 - s1 * s1
  with np.errstate(divide='ignore', invalid='ignore'):
    line, mean = (s2 * t0 - s1 * t1) / determinant, t0 / s0
  # One known neighbor does not determine a slope; without neighbors, there is no value.
  out = np.where(determinant > 1e-9 * s0 * s2, line, mean)
  return np.where(s0 > 1e-12, out, np.nan).tolist()


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
  marks = [*restart_marks(runs[0]), *_lost(runs[0])] if len(runs) == 1 else []
  limits = [(loss, f'loss of guessing: {loss:.2f}') for loss in _guesses(runs)]

  def chart(x: Axis, y: Axis) -> ET.Element:
    return line_chart(curves, title='Loss', x=x, y=y, marks=marks, limits=limits)

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
  intro = intro if dense else ''
  intro += f' Dotted lines: {", ".join(dict.fromkeys(what for _, what in marks))}.' if marks else ''
  intro += f' Dashed line: {", ".join(text for _, text in limits)}.' if limits else ''
  return Section('loss', 'Loss', [content, more if charts else None], intro.strip())


def _lost(run: RunRecord) -> list[tuple[float, str]]:
  """Returns (step, text) of the losses that are not finite, which leave a gap in the curve."""
  lost = {x: key for key in _LOSSES for x, y in run.series(key) if not math.isfinite(y)}
  return [(x, f'{key} is not finite at step {x:,}') for x, key in sorted(lost.items())[:_MOST_LOST]]


def _guesses(runs: Sequence[RunRecord]) -> list[float]:
  """Returns the losses of guessing, as far as the runs recorded them."""
  found = [run.facts.get('guess_loss') for run in runs]
  return sorted({loss for loss in found if isinstance(loss, float) and math.isfinite(loss)})


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


_MOST_CLASSES = 30  # with more, the squares would be too small to read
_OF_EVAL = re.compile(r'(.+)_confusion_(\d+)')


def classes_section(runs: Sequence[RunRecord]) -> Optional[Section]:
  """Returns the confusion matrices of classifiers: at the end of training, and by evaluation."""
  content: list[Child] = []
  for run in runs:
    latest: dict[str, tuple[int, pathlib.Path]] = {}
    for path in run.folder.glob('eval/*_confusion_*.csv'):
      if match := _OF_EVAL.fullmatch(path.stem):
        latest[match[1]] = max(latest.get(match[1], (-1, path)), (int(match[2]), path))
    files = {f'{name}, step {step:,}': path for name, (step, path) in sorted(latest.items())}
    if (last := run.folder / 'confusion.csv').is_file():
      files = {'Validation at the end of training': last, **files}
    for title, path in files.items():
      content.append(_confusion(path, f'{run.name}: {title}' if len(runs) > 1 else title))
  if not content:
    return None
  intro = 'A square is the percentage of the true class in its row that got this prediction.'
  return Section('classes', 'Classes', content, intro)


def _confusion(path: pathlib.Path, title: str) -> ET.Element:
  """Returns the matrix [true, predicted] of a file of `scores.write_confusion_csv` as a table."""
  try:
    with path.open(encoding='utf-8', newline='') as f:
      (_, *names), *rows = csv.reader(f)
    matrix = np.array([[float(x) for x in row[1:]] for row in rows])
    if matrix.shape != (len(names), len(names)):
      raise ValueError(f'{matrix.shape[0]} rows of {len(names)} classes')
  except (OSError, ValueError) as e:
    return element('p', f'{path.name} cannot be read: {e}.', class_='note')
  found = scores.class_scores(matrix).items()
  caption = '   '.join([title, *(f'{name.replace("_", " ")} {value:.3f}' for name, value in found)])
  if len(names) > _MOST_CLASSES:
    return element('p', f'{caption}. The matrix of {len(names)} classes is in {path.name}.')
  names, totals = scores.shown_names(names), matrix.sum(1)
  shares = matrix / np.where(totals, totals, 1)[:, None]
  cells = [
    [f'{name} ({total:g})', *map(_square, of_class)]
    for name, total, of_class in zip(names, totals, shares)
  ]
  heads = [element('div', name, class_='class-name') for name in names]
  return table(['true (examples) \\ predicted', *heads], cells, caption=caption)


def _square(share: float) -> Child:
  """Returns the percentage on a background of that strength; nothing if it rounds to 0."""
  if share < 0.005:
    return None
  tone = 'shade dark' if share > 0.55 else 'shade'
  return element('div', f'{100 * share:.0f}', class_=tone, style=f'--share:{share:.2f}')


_MOST_PROFILES = 8
_MOST_ROWS = 12
_PARTS = {'compute': 2, 'exposed_communication': 1, 'idle': 7}  # they sum to the step
_SCHEMA = Fields(
  {
    'first_step': Whole(),
    'last_step': Whole(),
    'reason': str,
    'seconds_per_step': float,
    'parts': MapOf(Nullable(float)),
    'operations': ListOf(Fields({'name': str, 'kind': str, 'seconds': float, 'share': float})),
    'collectives': ListOf(
      Fields({'kind': str, 'axes': ListOf(str), 'seconds': float, 'bytes': float})
    ),
  },
  optional={
    'mfu': Nullable(float),
    'process_index': Whole(),
    'host': str,
    'written': str,
    'ranks': ListOf(Fields({'rank': Whole(), 'host': str, **dict.fromkeys(_PARTS, float)})),
  },
)


def anatomy_section(runs: Sequence[RunRecord]) -> Optional[Section]:
  """Returns the parts of a step's time, by profile, with the longest operations."""
  content: list[Child] = []
  for run in runs:
    prefix = f'{run.name}, ' if len(runs) > 1 else ''
    found, unreadable = _profiles(run.folder)
    if found:
      content.append(
        stacked_bars(
          {f'{prefix}{_steps(p)}': _parts(p) for p in found},
          title='One step, by what the devices do',
          colors={name.replace('_', ' '): color for name, color in _PARTS.items()},
          text=lambda seconds: f'{1e3 * seconds:,.4g} ms',
        )
      )
      # Process 0 knows the device time of all processes.
      content += _tables(max(found, key=lambda p: (not _process(p), p['first_step'])), prefix)
    content += [element('p', f'{prefix}{problem}', class_='note') for problem in unreadable]
  if not content:
    return None
  intro = 'From profiles that the run took of itself; docs/monitor.md explains the numbers.'
  return Section('anatomy', 'Anatomy of a step', content, intro)


def latest_profile(run: RunRecord) -> tuple[Optional[Json], list[str]]:
  """Returns the readable profile of process 0 with the last steps, and the unreadable ones."""
  unreadable: list[str] = []
  paths = [p for p in run.folder.glob('profiles/*/anatomy.json') if p.parent.name.isdecimal()]
  for path in sorted(paths, key=lambda p: int(p.parent.name), reverse=True):
    if profile := _read(path, run.folder, unreadable):
      return profile, unreadable
  return None, unreadable


def _profiles(folder: pathlib.Path) -> tuple[list[Json], list[str]]:
  """Returns the latest profiles, by step and process, and the unreadable ones."""
  unreadable: list[str] = []
  paths = folder.glob('profiles/*/anatomy.json')
  found = [p for path in paths if (p := _read(path, folder, unreadable))]
  found.sort(key=lambda p: (p['first_step'], _process(p)))
  of_main = [p for p in found if not _process(p)]
  of_others = [p for p in found if _process(p)]
  shown = [*of_main[-_MOST_PROFILES:], *of_others[-_MOST_PROFILES:]]
  return [p for p in found if p in shown], sorted(unreadable)


def _read(path: pathlib.Path, folder: pathlib.Path, unreadable: list[str]) -> Optional[Json]:
  try:
    return read_json(path, _SCHEMA)
  except (OSError, ValueError) as e:
    unreadable.append(f'{path.relative_to(folder)} cannot be read: {e}.')
    return None


def _process(profile: Json) -> int:
  return profile.get('process_index', 0)


def _steps(profile: Json) -> str:
  rank = _process(profile)
  process = f', process {rank} on {profile.get("host", "another host")}' if rank else ''
  return f'steps {profile["first_step"]:,}-{profile["last_step"]:,} ({profile["reason"]}){process}'


def _parts(profile: Json) -> dict[str, float]:
  return {name.replace('_', ' '): profile['parts'].get(name) or 0.0 for name in _PARTS}


def _tables(profile: Json, prefix: str) -> list[Child]:
  operations = [
    [o['name'], o['kind'], f'{1e3 * o["seconds"]:.3f}', f'{o["share"]:.1%}', o.get('op_name', '')]
    for o in profile['operations'][:_MOST_ROWS]
  ]
  collectives = [
    [
      c['kind'],
      ' + '.join(c['axes']),
      f'{1e3 * c["seconds"]:.3f}',
      f'{c["bytes"] / 1e6:,.2f}',
      '' if c.get('gb_per_second') is None else f'{c["gb_per_second"]:.3g}',
    ]
    for c in profile['collectives'][:_MOST_ROWS]
  ]
  where = f'{prefix}{_steps(profile)}'
  tables: list[Child] = []
  pauses = pauses_that_took_time(profile['parts'])
  if pauses:
    rows = [[name, f'{1e3 * seconds:.3f}'] for name, seconds in pauses.items()]
    caption = f'Between steps, on average since the start, {where}'
    tables.append(table(['pause', 'ms per step'], rows, caption=caption))
  if operations:
    head = ['operation', 'kind', 'ms per step', 'share', 'place in the model']
    tables.append(table(head, operations, caption=f'Longest operations, {where}', texts=(0, 1, 4)))
  if collectives:
    head = ['collective', 'mesh axes', 'ms per step', 'MB per device', 'GB/s']
    tables.append(table(head, collectives, caption=f'Collectives, {where}', texts=(0, 1)))
  ranks = sorted(profile.get('ranks', ()), key=lambda r: -r['compute'])
  if len(ranks) > 1:
    head = ['process', 'host', *(f'{name.replace("_", " ")}, ms' for name in _PARTS)]
    rows = [[r['rank'], r['host'], *(f'{1e3 * r[n]:.3f}' for n in _PARTS)] for r in ranks]
    caption = f'Processes by device time, {where}'
    tables.append(table(head, rows[:_MOST_ROWS], caption=caption, texts=(1,)))
  return tables


_MOST_SAMPLES = 20
_MOST_SHARES = 30
# Facts about the data that are shown elsewhere or carry no information.
_NOT_LISTED = ('rates', 'libraries', 'guarantee', 'repeat')


def configuration_section(runs: Sequence[RunRecord]) -> Section:
  """Returns three tables: settings that differ, settings that users changed, all settings."""
  content: list[Child] = []
  if len(runs) > 1:
    content.append(_differences(runs))
  for run in runs:
    name = f' of {run.name}' if len(runs) > 1 else ''
    for number, changes in enumerate(run.earlier, 1):
      content.append(
        folded(
          f'Configuration {number + 1}{name}: {len(changes)} changed while it trained',
          element('pre', '\n'.join(changes)),
          is_open=len(runs) == 1,
        )
      )
    own = {key: s for key, s in run.settings.items() if s.overrides}
    if own:
      content.append(folded(f'Overridden values{name}', _settings(own), is_open=len(runs) == 1))
    if run.settings:
      content.append(folded(f'All {len(run.settings)} values{name}', _settings(run.settings)))
    else:
      content.append(element('p', f'No configuration is known{name}.'))
  return Section('configuration', 'Configuration', content)


def _differences(runs: Sequence[RunRecord]) -> ET.Element:
  rows = [
    [key, *(_with_origin(setting) for setting in settings)]
    for key, settings in differences([run.settings for run in runs])
  ]
  if not rows:
    return element('p', 'The configurations do not differ.')
  return table(
    ['parameter', *(run.name for run in runs)],
    rows,
    caption='Values that differ, and where they are set',
    texts=range(len(runs) + 1),
  )


def _with_origin(setting: Optional[ReportedSetting]) -> Child:
  if setting is None:
    return 'not used'
  origin = element('div', setting.origin, class_='note') if setting.origin else None
  return element('div', element('code', setting.value), origin)


def _settings(settings: Mapping[str, ReportedSetting]) -> ET.Element:
  rows = [
    [key, element('code', s.value), ' '.join(filter(None, (s.origin, s.through))), s.overrides]
    for key, s in settings.items()
  ]
  return table(['parameter', 'value', 'set at', 'instead of'], rows, texts=range(4))


def data_section(runs: Sequence[RunRecord]) -> Optional[Section]:
  """Returns the shares of a mixture and the facts about the data, from the latest checkpoint."""
  content: list[Child] = []
  shares = {run.name: found for run in runs if len(found := mixture_shares(run)) > 1}
  if shares:
    names = list(dict.fromkeys(name for found in shares.values() for name in found))
    content.append(
      stacked_bars(
        shares,
        title='Shares of the mixture',
        colors={name: i for i, name in enumerate(names)},
        text='{:.1%}'.format,
        full=1.0,
      )
    )
  for run in runs:
    facts = {k: v for k, v in _data(run).items() if k not in _NOT_LISTED}
    if facts:
      title = f'Data of {run.name}' if len(runs) > 1 else 'Facts about the data'
      rows = [[name, _text(value)] for name, value in sorted(facts.items())]
      content.append(
        folded(title, table(['fact', 'value'], rows, texts=(0, 1)), is_open=not shares)
      )
  if not content:
    return None
  return Section('data', 'Data', content, 'As recorded in the latest checkpoint.')


def _data(run: RunRecord) -> Json:
  return run.manifest.get('data', {})


def mixture_shares(run: RunRecord, *, most: int = _MOST_SHARES) -> dict[str, float]:
  """Returns task -> share of the mixture, largest first; tasks after `most` as 'others'."""
  rates = _data(run).get('rates')
  if not isinstance(rates, dict) or not all(_is_rate(v) for v in rates.values()):
    return {}
  total = sum(rates.values()) or 1.0
  ordered = sorted(((v / total, name) for name, v in rates.items()), reverse=True)
  found = {name: share for share, name in ordered[:most]}
  if rest := sum(share for share, _ in ordered[most:]):
    found['others'] = rest
  return found


def _is_rate(value: object) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _text(value: object) -> str:
  return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def samples_section(runs: Sequence[RunRecord]) -> Optional[Section]:
  """Returns the texts that the runs wrote, latest first."""
  content: list[Child] = []
  for run in runs:
    for sample in reversed(run.samples[-_MOST_SAMPLES:]):
      where = f'{run.name}, step' if len(runs) > 1 else 'Step'
      title = f'{where} {sample["step"]:,}, prompt {sample["prompt"]!r}'
      if 'temperature' in sample:
        title += f', temperature {sample["temperature"]:g}'
      content += [element('h3', title), element('pre', sample['text'])]
  return Section('samples', 'Samples', content) if content else None


# Category -> number of its color.
COLORS = dict(zip(CATEGORIES, (2, 7, 6, 5, 4, 0, 1, 9, 3, 8)))
SILENT_SECONDS = 120.0  # a living process writes to its ledger every 30 s
_ENDS = {'KeyboardInterrupt': 'Ctrl-C', 'SIGINT': 'Ctrl-C'}  # as a person ends a run
_NO_LEDGER = (
  'has no goodput.jsonl: the file was lost, the run has not started, or an earlier version of '
  't5x_gpu trained it'
)


def goodput_section(runs: Sequence[RunRecord]) -> Section:
  """Returns a section on how the wall time was spent."""
  known = {run.name: run for run in runs if run.accounts}
  content: list[Child] = []
  if known:
    content += [
      stacked_bars(
        {name: run.accounts.seconds for name, run in known.items()},
        title='Wall time by category',
        colors=COLORS,
        text=format_seconds,
        full=max(sum(run.accounts.seconds.values()) for run in known.values()),
      ),
      *(
        element('p', f'{name}: ' if len(known) > 1 else None, f'goodput {summary(run.accounts)}.')
        for name, run in known.items()
      ),
      _meaning(),
    ]
  content += [element('p', f'{run.name} {_NO_LEDGER}.') for run in runs if not run.accounts]
  intro = 'Goodput is the share of wall time spent on training steps that count.'
  return Section('goodput', 'Goodput', content, intro)


def _meaning() -> Optional[ET.Element]:
  return folded(
    'What the categories mean',
    table(['category', 'its seconds'], list(MEANING.items()), texts=(0, 1)),
  )


def progress_section(runs: Sequence[RunRecord]) -> Optional[Section]:
  """Returns steps against wall time, and a table of all starts."""
  known = [run for run in runs if run.accounts]
  if not known:
    return None
  longest = max(max((x for x, _ in _steps_by_time(run, 1)), default=0) for run in known)
  unit, seconds = ('hours', 3600) if longest >= 2 * 3600 else ('minutes', 60)
  curves = [Series(r.name, _steps_by_time(r, seconds), i) for i, r in enumerate(runs) if r.accounts]
  chart = line_chart(
    curves,
    title='Steps against wall time',
    x=Axis(unit, low=0.0, text=short_number, exact=lambda v: f'{v:,.2f}'),
    y=Axis('step', exact=lambda v: f'{v:,.0f}', whole=True, low=0.0),
  )
  tables = [
    made
    for run in known
    for made in (_starts(run, named=len(known) > 1), *_interruptions(run, named=len(known) > 1))
  ]
  count = sum(len(run.accounts.processes) - 1 for run in known)
  lost = sum(run.accounts.lost_steps for run in known)
  intro = f'{_counted(count, "restart")}; {_counted(lost, "step")} trained again.'
  return Section('restarts', 'Progress and restarts', [chart, *tables], intro)


def _counted(number: int, what: str) -> str:
  return f'{number:,} {what}' + ('' if number == 1 else 's')


def _steps_by_time(run: RunRecord, unit: int) -> Points:
  """Returns (units of `unit` seconds since the first start, step); a gap between processes."""
  begin = run.accounts.processes[0].process.start
  points: Points = []
  for account in run.accounts.processes:
    lines = [line for line in account.process.lines if line.step is not None]
    points += [((line.at - begin) / unit, float(line.step)) for line in lines]
    if points:
      points.append((points[-1][0], float('nan')))
  return points


def ended(account: ProcessAccount, *, is_last: bool, now: float) -> str:
  """Returns how a process ended: 'done', 'SIGTERM', 'killed', 'running' and so on."""
  if account.process.end:
    return _ENDS.get(account.process.end, account.process.end)
  age = now - account.process.last.at
  if not is_last:
    return 'killed'
  return 'running' if age < SILENT_SECONDS else f'silent for {format_seconds(age)}'


def _starts(run: RunRecord, *, named: bool) -> ET.Element:
  rows = []
  processes = run.accounts.processes
  for i, account in enumerate(processes):
    process, facts = account.process, account.process.facts
    kind = facts.get('device_kind', '')
    rows.append(
      [
        time.strftime('%Y-%m-%d %H:%M', time.localtime(process.start)),
        format_seconds(process.last.total),
        f'{process.first_step:,}' if process.first_step is not None else '',
        f'{process.last.step:,}' if process.last.step is not None else '',
        ended(account, is_last=i == len(processes) - 1, now=time.time()),
        f'{account.lost_steps:,}' if account.lost_steps else '',
        format_seconds(account.seconds[LOST]) if account.seconds[LOST] else '',
        format_seconds(account.seconds[DOWNTIME]) if i else '',
        f'{facts["devices"]} x {kind}' if 'devices' in facts else '',
        ', '.join(str(facts[k]) for k in ('host', 'job') if facts.get(k)),
      ]
    )
  head = ['start', 'time', 'from step', 'to step', 'end', 'steps lost', 'time lost', 'down before']
  return table(
    [*head, 'devices', 'host, job'],
    rows,
    caption=f'Starts of {run.name}' if named else 'Starts',
    texts=(4, 8, 9),
  )


def _interruptions(run: RunRecord, *, named: bool) -> list[ET.Element]:
  """Returns the tables of interruptions, in the order of time and by kind; [] without any."""
  costs = interruptions.costs_of(run.accounts)
  if not costs:
    return []
  of = f' of {run.name}' if named else ''
  return [
    table(each.head, each.rows, caption=each.title + of, texts=each.texts)
    for each in (
      interruptions.table_of(costs, run.accounts),
      interruptions.totals_of(costs, run.accounts),
    )
  ]


def state_of(run: RunRecord, *, now: float) -> str:
  """Returns 'done', 'running', 'stopped by SIGTERM', ...; '' if no file records it."""
  if not run.accounts:
    return ''
  last = run.accounts.processes[-1]
  end = ended(last, is_last=True, now=now)
  return f'ended by {end}' if last.process.end not in (None, '', DONE) else end
