"""Correlations between products of embeddings and human scores."""

import numpy as np


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
