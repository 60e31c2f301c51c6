"""How well classes are told apart: accuracy, macro-F1, Matthews correlation, from one matrix.

All come from the confusion matrix, whose counts can be added over batches, steps and processes;
means of per-batch F1 or correlations would be another number.
"""

import os
import pathlib
from collections.abc import Sequence
from typing import Optional

import numpy as np

from t5x_gpu.errors import ShapeError


def confusion_matrix(
  labels: np.ndarray,
  predictions: np.ndarray,
  *,
  num_classes: int,
  weights: Optional[np.ndarray] = None,
) -> np.ndarray:
  """Returns [true class, predicted class], float64: the summed weights of the examples.

  Args:
    labels: true classes [batch].
    predictions: predicted classes [batch].
    num_classes: how many there are.
    weights: [batch], such as `label_weights`: 0 for rows that only fill the batch. None: all 1.
  Raises:
    ShapeError: arrays of other shapes, or a class out of range with a weight that counts.
  """
  labels, predictions = np.asarray(labels), np.asarray(predictions)
  weights = np.ones(labels.shape) if weights is None else np.asarray(weights, np.float64)
  if not labels.ndim == 1 or not labels.shape == predictions.shape == weights.shape:
    raise ShapeError(
      f'labels {labels.shape}, predictions {predictions.shape} and weights '
      f'{weights.shape} must all be [batch].',
      fix='Give the predicted class of each row, logits.argmax(-1).',
    )
  counted = weights != 0
  labels, predictions, weights = labels[counted], predictions[counted], weights[counted]
  for name, x in (('labels', labels), ('predictions', predictions)):
    if x.size and (x.min() < 0 or x.max() >= num_classes):
      raise ShapeError(
        f'{name} are from {x.min()} to {x.max()}; {num_classes} classes are 0 to '
        f'{num_classes - 1}.',
        fix='Set num_classes to the number of classes.',
      )
  matrix = np.zeros((num_classes, num_classes))
  np.add.at(matrix, (labels, predictions), weights)
  return matrix


def accuracy(matrix: np.ndarray) -> float:
  """Returns the share of `matrix` [true, predicted] that is right; NaN if it is empty."""
  total = matrix.sum()
  return float(np.trace(matrix) / total) if total else float('nan')


def majority(matrix: np.ndarray) -> float:
  """Returns the accuracy of always saying the most frequent class; NaN if `matrix` is empty."""
  total = matrix.sum()
  return float(matrix.sum(1).max() / total) if total else float('nan')


def f1_by_class(matrix: np.ndarray) -> np.ndarray:
  """Returns 2 * right / (true + predicted) of each class; NaN for one that is neither anywhere."""
  true, predicted = matrix.sum(1), matrix.sum(0)
  with np.errstate(invalid='ignore'):
    return 2 * np.diag(matrix) / (true + predicted)


def macro_f1(matrix: np.ndarray) -> float:
  """Returns the mean F1 of the classes that are a label or a prediction; NaN if there is none."""
  values = f1_by_class(matrix)
  known = ~np.isnan(values)
  return float(values[known].mean()) if known.any() else float('nan')


def matthews_corrcoef(matrix: np.ndarray) -> float:
  """Returns the correlation of labels and predictions, 1 to -1; 0 if either has one class alone.

  For several classes Gorodkin's R_K (2004), which for two is Matthews' own. NaN if `matrix` is
  empty.
  """
  total = matrix.sum()
  if not total:
    return float('nan')
  true, predicted = matrix.sum(1) / total, matrix.sum(0) / total
  covariance = np.trace(matrix) / total - true @ predicted
  variances = (1 - true @ true) * (1 - predicted @ predicted)
  return float(covariance / np.sqrt(variances)) if variances > 1e-15 else 0.0


def scores(matrix: np.ndarray, *, prefix: str = '') -> dict[str, float]:
  """Returns accuracy, macro_f1, matthews_corrcoef and majority, named `prefix + name`.

  An empty matrix has none: {}.
  """
  if not matrix.sum():
    return {}
  return {
    prefix + name: function(matrix)
    for name, function in (
      ('accuracy', accuracy),
      ('macro_f1', macro_f1),
      ('matthews_corrcoef', matthews_corrcoef),
      ('majority', majority),
    )
  }


def table(matrix: np.ndarray, class_names: Sequence[str]) -> str:
  """Returns a line per class: how many, precision, recall, F1, and what it is taken for most."""
  width = max(map(len, (*class_names, 'class')))
  lines = [f'{"class":{width}}  examples  precision  recall     F1  most often taken for']
  f1 = f1_by_class(matrix)
  for k, name in enumerate(class_names):
    true, predicted, right = matrix[k].sum(), matrix[:, k].sum(), matrix[k, k]
    wrong = np.where(np.arange(len(matrix)) == k, 0, matrix[k])
    other = f'{class_names[wrong.argmax()]} ({wrong.max():g})' if wrong.any() else ''
    lines.append(
      f'{name:{width}}  {true:8g}  {_share(right, predicted):>9}  '
      f'{_share(right, true):>6}  {_share(f1[k], 1.0):>5}  {other}'.rstrip()
    )
  return '\n'.join(lines)


def _share(part: float, whole: float) -> str:
  return f'{part / whole:.3f}' if whole and np.isfinite(part) else '-'


def write_csv(
  matrix: np.ndarray, class_names: Sequence[str], path: str | os.PathLike
) -> pathlib.Path:
  """Writes `matrix` as a .csv, a row per true and a column per predicted class; returns where."""
  target = pathlib.Path(path)
  quoted = ['"' + name.replace('"', '""') + '"' for name in class_names]
  lines = [','.join(['"true \\ predicted"', *quoted])]
  lines += [','.join([name, *(f'{x:g}' for x in row)]) for name, row in zip(quoted, matrix)]
  target.write_text('\n'.join(lines) + '\n', encoding='utf-8')
  return target
