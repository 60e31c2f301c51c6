"""Scores of a classifier from its confusion matrix [true class, predicted class], and correlations.

If rows have several labels, or words form entities, hits [class, (right, predicted, true)] replace
the matrix. The counts of both can be added over batches, steps and processes. A mean of per-batch
F1 scores or correlations would be a different number. `pair_scores` correlates products of
embeddings with human scores.
"""

import os
import pathlib
from collections.abc import Sequence

import numpy as np

_SHOWN_CHARACTERS = 40  # maximum shown length of a class name


def accuracy(matrix: np.ndarray) -> float:
  """Returns the share of correct predictions; NaN if `matrix` is empty."""
  total = matrix.sum()
  return float(np.trace(matrix) / total) if total else float('nan')


def majority(matrix: np.ndarray) -> float:
  """Returns the accuracy of always predicting the most frequent class; NaN if `matrix` is empty."""
  total = matrix.sum()
  return float(matrix.sum(1).max() / total) if total else float('nan')


def f1_by_class(matrix: np.ndarray) -> np.ndarray:
  """Returns 2 * correct / (true + predicted) of each class; NaN for classes that never occur."""
  true, predicted = matrix.sum(1), matrix.sum(0)
  with np.errstate(invalid='ignore'):
    return 2 * np.diag(matrix) / (true + predicted)


def macro_f1(matrix: np.ndarray) -> float:
  """Returns the mean F1 of classes that occur as label or prediction; NaN if no class occurs."""
  values = f1_by_class(matrix)
  known = ~np.isnan(values)
  return float(values[known].mean()) if known.any() else float('nan')


def matthews_corrcoef(matrix: np.ndarray) -> float:
  """Returns the correlation of labels and predictions, -1 to 1; 0 if either has only one class.

  This is Gorodkin's R_K (2004), which for two classes equals Matthews' coefficient. NaN if `matrix`
  is empty.
  """
  total = matrix.sum()
  if not total:
    return float('nan')
  true, predicted = matrix.sum(1) / total, matrix.sum(0) / total
  covariance = np.trace(matrix) / total - true @ predicted
  variances = (1 - true @ true) * (1 - predicted @ predicted)
  return float(covariance / np.sqrt(variances)) if variances > 1e-15 else 0.0


def class_scores(matrix: np.ndarray, *, prefix: str = '') -> dict[str, float]:
  """Returns accuracy, macro_f1, matthews_corrcoef and majority, named `prefix + name`.

  For an empty matrix, returns {}.
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


def hit_scores(hits: np.ndarray, *, prefix: str = '') -> dict[str, float]:
  """Returns micro_precision, micro_recall, micro_f1 and macro_f1, named `prefix + name`.

  Micro scores count all classes together, and are 0 without predictions or labels. macro_f1 is the
  mean F1 of classes that occur as label or prediction; it is left out if no class occurs.

  Args:
    hits: counts [class, (right, predicted, true)].
    prefix: prefix of the names.
  """
  right, predicted, true = hits.sum(0)
  known = hits[:, 1] + hits[:, 2] > 0
  values = {
    'micro_precision': right / max(predicted, 1),
    'micro_recall': right / max(true, 1),
    'micro_f1': 2 * right / max(predicted + true, 1),
  }
  if known.any():
    values['macro_f1'] = f1_of_hits(hits)[known].mean()
  return {prefix + name: float(value) for name, value in values.items()}


def f1_of_hits(hits: np.ndarray) -> np.ndarray:
  """Returns 2 * right / (predicted + true) of each class; NaN for classes that never occur."""
  with np.errstate(invalid='ignore'):
    return 2 * hits[:, 0] / (hits[:, 1] + hits[:, 2])


def all_names(names: Sequence[str], count: int) -> tuple[str, ...]:
  """Returns `count` names; classes that the data does not have are named 'unused 3'.

  Without `names`, returns class numbers.
  """
  word = 'unused ' if names else ''
  return (*names, *(f'{word}{i}' for i in range(len(names), count)))[:count]


def shown_names(names: Sequence[str]) -> list[str]:
  """Returns names for tables and pictures: on one line, and cut if too long."""
  lines = (''.join(c if c.isprintable() else ' ' for c in name) for name in names)
  return [
    line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 3] + '...'
    for line in lines
  ]


def hits_table(hits: np.ndarray, class_names: Sequence[str]) -> str:
  """Returns a line per class: examples, precision, recall and F1."""
  class_names = shown_names(class_names)
  width = max(map(len, (*class_names, 'class')))
  lines = [f'{"class":{width}}  examples  precision  recall     F1']
  for name, (right, predicted, true), f1 in zip(class_names, hits, f1_of_hits(hits), strict=True):
    lines.append(
      f'{name:{width}}  {true:8g}  {_share(right, predicted):>9}  '
      f'{_share(right, true):>6}  {_share(f1, 1.0):>5}'
    )
  return '\n'.join(lines)


def confusion_table(matrix: np.ndarray, class_names: Sequence[str]) -> str:
  """Returns a line per class: examples, precision, recall, F1, and the most frequent mistake."""
  class_names = shown_names(class_names)
  width = max(map(len, (*class_names, 'class')))
  lines = [f'{"class":{width}}  examples  precision  recall     F1  most often confused with']
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


def write_confusion_csv(
  matrix: np.ndarray, class_names: Sequence[str], path: str | os.PathLike
) -> pathlib.Path:
  """Writes `matrix` as .csv, with one row per true class; returns the path."""
  target = pathlib.Path(path)
  quoted = ['"' + name.replace('"', '""') + '"' for name in class_names]
  lines = [','.join(['"true \\ predicted"', *quoted])]
  lines += [
    ','.join([name, *(f'{x:g}' for x in row)]) for name, row in zip(quoted, matrix, strict=True)
  ]
  # 'replace': a class name may have characters that UTF-8 cannot write
  target.write_text('\n'.join(lines) + '\n', encoding='utf-8', errors='replace')
  return target


def ranks(x: np.ndarray) -> np.ndarray:
  """Returns the ranks of numbers [n] from 1; equal numbers share the mean of their ranks."""
  _, places, counts = np.unique(x, return_inverse=True, return_counts=True)
  return (np.cumsum(counts) - (counts - 1) / 2)[places]


def pearson(x: np.ndarray, y: np.ndarray) -> float:
  """Returns the correlation of two arrays [n]; NaN if an array is constant in float32."""
  if _is_constant(x) or _is_constant(y):
    return float('nan')
  x, y = x - x.mean(), y - y.mean()
  return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def spearman(x: np.ndarray, y: np.ndarray) -> float:
  """Returns the rank correlation of two arrays [n]; NaN as for `pearson`."""
  if _is_constant(x) or _is_constant(y):
    return float('nan')
  return pearson(ranks(x), ranks(y))


def _is_constant(x: np.ndarray) -> bool:
  """Returns whether rounding alone explains the differences: models compute in float32."""
  return float(np.ptp(x)) <= 4 * np.finfo(np.float32).eps * float(np.abs(x).max())


def pair_scores(pairs: np.ndarray, *, prefix: str = '') -> dict[str, float]:
  """Returns spearman and pearson, named `prefix + name`; {} if all scores are equal.

  Args:
    pairs: [examples, (product, score, weight)]; examples of weight 0 do not count.
    prefix: prefix of the names.
  """
  products, scores, _ = pairs[pairs[:, 2] > 0].T
  if len(np.unique(scores)) < 2:
    return {}
  return {
    f'{prefix}spearman': spearman(products, scores),
    f'{prefix}pearson': pearson(products, scores),
  }
