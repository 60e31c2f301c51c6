"""Draws a confusion matrix: which classes the model distinguishes, and which it confuses."""

import os
import pathlib
from collections.abc import Sequence

import numpy as np

from t5x_gpu.errors import ShapeError
from t5x_gpu.metrics import classification
from t5x_gpu.metrics.plots import new_figure, save_figure

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
  class_names = classification.shown_names(class_names)
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
    f'{name.replace("_", " ")} {value:.3f}' for name, value in classification.scores(matrix).items()
  )
  # Without mathtext: a $ in a name is a dollar sign.
  axes.set_title(
    '\n'.join(part for part in (title, line) if part), fontsize=9, loc='left', parse_math=False
  )
  for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
    label.set_parse_math(False)
  # Long class names and the scores may extend beyond the figure.
  return save_figure(figure, png_path, bbox_inches='tight', pad_inches=0.1)
