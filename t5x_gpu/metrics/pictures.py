"""Draws the pictures of a run: losses, confusion matrix, and lengths of packed examples.

`new_figure` and `save_figure` need neither a display nor pyplot's state.
"""

import importlib
import logging
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

from t5x_gpu.errors import ConfigError, ShapeError
from t5x_gpu.metrics import scores, writers
from t5x_gpu.storage.files import atomic_write

_log = logging.getLogger(__name__)


def draw_confusion(
  folder: str | os.PathLike, confusion: np.ndarray, class_names: Sequence[str], *, step: int
) -> tuple[list[str], str]:
  """Writes confusion.csv and, if matplotlib is installed, confusion.png.

  Args:
    folder: folder of the run.
    confusion, class_names, step: as for `closing_text`.
  Returns:
    the names of the files, and a table for the terminal.
  """
  names = scores.all_names(class_names, len(confusion))
  scores.write_confusion_csv(confusion, names, os.path.join(folder, 'confusion.csv'))
  files = ['confusion.csv']
  try:
    plot_confusion(
      confusion, names, os.path.join(folder, 'confusion.png'), title=f'Step {step}, validation'
    )
    files.insert(0, 'confusion.png')
  except ConfigError as e:
    _log.warning('No picture of the confusion matrix: %s', e)
  return files, scores.confusion_table(confusion, names) + '\n'


# Okabe-Ito colors, which color-blind readers can distinguish, also in grey print.
_TRAIN, _EVAL, _GREY, _RATE = '#0072B2', '#D55E00', '#666666', '#009E73'


def series(records: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
  """Returns steps and values of `key`, sorted by step; the last record of a step counts."""
  by_step = {r['step']: float(r[key]) for r in records if r.get(key) is not None}
  steps = sorted(by_step)
  return steps, [by_step[step] for step in steps]


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


def _finite(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
  pairs = [(s, v) for s, v in zip(steps, values) if math.isfinite(v)]
  return [s for s, _ in pairs], [v for _, v in pairs]


def new_figure(size: tuple[float, float], *, layout: Optional[str] = None) -> Any:
  """Returns a figure on matplotlib's Agg canvas, without a display or pyplot state.

  Args:
    size: width and height in inches.
    layout: matplotlib's layout engine, such as 'constrained'.
  Raises:
    ConfigError: matplotlib is not installed.
  """
  try:
    figure = importlib.import_module('matplotlib.figure').Figure(
      figsize=size, dpi=150, layout=layout
    )
    importlib.import_module('matplotlib.backends.backend_agg').FigureCanvasAgg(figure)
  except ModuleNotFoundError as e:
    raise ConfigError(
      f'Plotting needs {e.name}, which is not installed.', fix="Run: pip install 'matplotlib>=3.9'"
    ) from e
  return figure


def save_figure(figure: Any, png_path: str | os.PathLike, **options: Any) -> pathlib.Path:
  """Writes a figure to `png_path`, replacing an older picture only when complete; returns the path.

  Args:
    figure: result of `new_figure`.
    png_path: picture to write; its folder must exist.
    options: options of matplotlib's savefig.
  """
  with atomic_write(png_path) as temporary:
    figure.savefig(temporary, format='png', **options)
  return pathlib.Path(png_path)


def _tidy(axes: Any) -> None:
  """Removes the parts of the frame that do not help reading."""
  for side in ('top', 'right'):
    axes.spines[side].set_visible(False)
  axes.grid(axis='y', color='#DDDDDD', linewidth=0.6)
  axes.set_axisbelow(True)
  axes.tick_params(labelsize=8)


def _draw_losses(
  axes: Any,
  train: tuple[list[int], list[float]],
  evals: tuple[list[int], list[float]],
  guess_loss: Optional[float],
) -> None:
  steps, values = _finite(*train)
  dense = len(steps) > 30  # few points are drawn without smoothing
  if dense:
    smoothed = smooth(values, span=min(len(values) / 20, 200))
    axes.plot(steps, values, color=_TRAIN, linewidth=0.8, alpha=0.35, label='train, each log')
    axes.plot(
      steps, smoothed, color=_TRAIN, linewidth=1.8, label=f'train, smoothed ({smoothed[-1]:.3f})'
    )
  elif steps:
    axes.plot(
      steps,
      values,
      color=_TRAIN,
      linewidth=1.8,
      marker='o',
      markersize=3,
      label=f'train ({values[-1]:.3f})',
    )
  steps, values = _finite(*evals)
  if steps:
    axes.plot(
      steps,
      values,
      color=_EVAL,
      linewidth=1.5,
      marker='o',
      markersize=4,
      label=f'evaluation ({values[-1]:.3f})',
    )
  lost = sorted({s for s, v in (*zip(*train), *zip(*evals)) if not math.isfinite(v)})
  if lost:  # drawn along the lower edge, because they have no value
    axes.plot(
      lost,
      [0.02] * len(lost),
      transform=axes.get_xaxis_transform(),
      linestyle='',
      marker='x',
      markersize=5,
      color='#CC0000',
      label=f'not finite, first at step {lost[0]:,}',
    )
  if guess_loss is not None:
    axes.axhline(
      guess_loss,
      color=_GREY,
      linewidth=1,
      linestyle=(0, (4, 3)),
      label=f'guessing ({guess_loss:.2f})',
    )
  axes.set_ylabel('loss', fontsize=9)
  if axes.get_legend_handles_labels()[0]:
    axes.legend(fontsize=8, loc='best', framealpha=0.9, edgecolor='none')
  _tidy(axes)


def plot_losses(
  metrics_jsonl_path: str | os.PathLike,
  png_path: str | os.PathLike,
  *,
  guess_loss: Optional[float] = None,
  title: str = '',
) -> Optional[pathlib.Path]:
  """Draws train and evaluation loss with the learning rate below; returns the path of the picture.

  The raw train loss is pale, with the smoothed curve on top. Returns None, without a picture, if
  the file has no loss yet.

  Args:
    metrics_jsonl_path: file written by `JsonLinesWriter`.
    png_path: picture to write; its folder must exist.
    guess_loss: loss of guessing, drawn as a line; None for no line.
    title: text above the picture.
  Raises:
    ConfigError: matplotlib is not installed.
  """
  records = writers.read_json_lines(metrics_jsonl_path)
  train, evals = series(records, 'train/loss'), series(records, 'eval/loss')
  rate = _finite(*series(records, 'train/learning_rate'))
  if not train[0] and not evals[0]:
    return None
  figure = new_figure((7.2, 4.6 if rate[0] else 3.6), layout='constrained')
  if rate[0]:
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    rates.plot(
      *rate, color=_RATE, linewidth=1.5, marker='o' if len(rate[0]) < 3 else '', markersize=3
    )
    rates.set_ylim(bottom=0)
    rates.set_ylabel('learning rate', fontsize=9)
    rates.ticklabel_format(axis='y', style='sci', scilimits=(-3, 3), useMathText=True)
    rates.yaxis.get_offset_text().set_fontsize(8)
    _tidy(rates)
    bottom = rates
  else:
    losses = bottom = figure.subplots()
  _draw_losses(losses, train, evals, guess_loss)
  bottom.set_xlabel('step', fontsize=9)
  # Steps are whole numbers: no tick at 2.5.
  bottom.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
  bottom.xaxis.set_major_formatter('{x:,.0f}')
  all_steps = sorted({*train[0], *evals[0]})
  if len(all_steps) == 1:
    bottom.set_xlim(all_steps[0] - 1, all_steps[0] + 1)
  if title:
    losses.set_title(title, fontsize=10, loc='left')
  return save_figure(figure, png_path)


MAX_WRITTEN_CLASSES = 30  # with more classes, the numbers in the squares would overlap


def plot_confusion(
  matrix: np.ndarray, class_names: Sequence[str], png_path: str | os.PathLike, *, title: str = ''
) -> pathlib.Path:
  """Draws `matrix` [true, predicted]; returns the path of the picture.

  Color and number of a square show the percentage of the true class with that prediction. The axis
  labels show the number of examples per class.

  Args:
    matrix: counts [classes, classes].
    class_names: class names in the order of class numbers.
    png_path: picture to write; its folder must exist.
    title: text above the picture; the scores follow below it.
  Raises:
    ConfigError: matplotlib is not installed.
    ShapeError: the number of names is not the number of classes.
  """
  matrix = np.asarray(matrix, np.float64)
  count = len(class_names)
  if matrix.shape != (count, count):
    raise ShapeError(
      f'The confusion matrix {matrix.shape} does not match {count} class names.',
      fix=f'Pass a matrix of shape [{count}, {count}].',
    )
  class_names = scores.shown_names(class_names)
  totals = matrix.sum(1)
  shares = matrix / np.where(totals, totals, 1)[:, None]
  side = min(2.5 + 0.42 * count, 16)
  figure = new_figure((side + 0.8, side), layout='constrained')
  axes = figure.subplots()
  image = axes.imshow(shares, cmap='Blues', vmin=0, vmax=1)
  axes.set_xticks(range(count), class_names, rotation=90 if count > 3 else 0, fontsize=8)
  axes.set_yticks(
    range(count), [f'{name} ({total:g})' for name, total in zip(class_names, totals)], fontsize=8
  )
  axes.set_xlabel('predicted', fontsize=9)
  axes.set_ylabel('true (examples)', fontsize=9)
  if count <= MAX_WRITTEN_CLASSES:
    for row, column in zip(*np.nonzero(matrix)):
      share = shares[row, column]
      if share >= 0.005:  # omit 0%
        axes.text(
          column,
          row,
          f'{100 * share:.0f}',
          ha='center',
          va='center',
          fontsize=7,
          color='white' if share > 0.55 else 'black',
        )
  bar = figure.colorbar(image, ax=axes, fraction=0.045, pad=0.02)
  bar.set_ticks([0, 0.5, 1], labels=['0%', '50%', '100%'], fontsize=8)
  bar.outline.set_visible(False)
  line = '   '.join(
    f'{name.replace("_", " ")} {value:.3f}' for name, value in scores.class_scores(matrix).items()
  )
  # Without mathtext: a $ in a name is a dollar sign.
  axes.set_title(
    '\n'.join(part for part in (title, line) if part), fontsize=9, loc='left', parse_math=False
  )
  for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
    label.set_parse_math(False)
  # Long class names and the scores may extend beyond the figure.
  return save_figure(figure, png_path, bbox_inches='tight', pad_inches=0.1)


_BAR = 40


def bins(lengths: Mapping[int, int]) -> list[tuple[str, int]]:
  """Returns (range of lengths, number of examples), without gaps.

  Args:
    lengths: exponent e -> examples with 2**(e-1) < length <= 2**e.
  """
  if not lengths:
    return []

  def label(e: int) -> str:
    low, high = (2 ** (e - 1) + 1 if e else 1), 2**e
    return f'{low:,}' if low == high else f'{low:,}-{high:,}'

  return [(label(e), lengths.get(e, 0)) for e in range(min(lengths), max(lengths) + 1)]


def lengths_table(lengths: Mapping[int, int]) -> list[str]:
  """Returns the histogram as lines of text."""
  found = bins(lengths)
  total, most = sum(lengths.values()), max(lengths.values(), default=1)
  width = max((len(name) for name, _ in found), default=0)
  return [
    f'  {name:>{width}}  {number / total:6.1%}  {"#" * round(_BAR * number / most)}'.rstrip()
    for name, number in found
  ]


def plot_lengths(
  lengths: Mapping[str, Mapping[int, int]], png_path: str | os.PathLike, *, title: str
) -> pathlib.Path:
  """Draws the share of examples by length, one curve per task; returns the path of the picture.

  Args:
    lengths: task -> histogram as in `bins`.
    png_path: picture to write; its folder must exist.
    title: text above the picture.
  Raises:
    ConfigError: matplotlib is not installed.
  """
  figure = new_figure((7, 3.6), layout='constrained')
  axes = figure.subplots()
  found = [e for histogram in lengths.values() for e in histogram] or [0]
  exponents = range(min(found), max(found) + 1)
  for name, histogram in lengths.items():
    total = sum(histogram.values()) or 1
    axes.plot(
      exponents,
      [100 * histogram.get(e, 0) / total for e in exponents],
      marker='o',
      markersize=3,
      linewidth=1.2,
      label=name,
    )
  axes.set_xticks(exponents, [f'{2**e:,}' for e in exponents], fontsize=8)
  axes.set_xlabel('tokens per example, at most', fontsize=9)
  axes.set_ylabel('% of examples', fontsize=9)
  axes.set_ylim(bottom=0)
  axes.grid(alpha=0.25, linewidth=0.5)
  axes.set_title(title, fontsize=9, loc='left', parse_math=False)
  if len(lengths) > 1:
    legend = axes.legend(fontsize=8, frameon=False)
    for text in legend.get_texts():
      text.set_parse_math(False)
  return save_figure(figure, png_path)
