"""Correlations are SciPy's, ties included; pairs of weight 0 and unscored pairs do not count."""

import numpy as np
import pytest

from t5x_gpu.metrics import reduce
from t5x_gpu.metrics import scores as scores_lib


def test_correlations_are_scipys():
  from scipy import stats  # takes a second, in each worker that collects this file

  rng = np.random.default_rng(0)
  x, y = rng.integers(0, 9, 50) / 4.0, rng.normal(size=50)
  pairs = np.stack([x, y, np.ones(50)], 1)
  pairs = np.concatenate([pairs[:20], [[9.0, 9.0, 0.0]], pairs[20:]])
  found = scores_lib.pair_scores(pairs, prefix='eval/')
  assert found == pytest.approx(
    {
      'eval/spearman': stats.spearmanr(x, y).statistic,
      'eval/pearson': stats.pearsonr(x, y).statistic,
    }
  )
  assert scores_lib.pair_scores(pairs * [1.0, 0.0, 1.0]) == {}


def test_pairs_of_batches_follow_each_other():
  sums = reduce.Accumulator()
  for start in (0.0, 6.0):
    rows = np.arange(start, start + 6).reshape(2, 3)
    sums.add({'pairs': (rows, 2.0), 'loss': (1.0, 2.0)})
  np.testing.assert_array_equal(sums.sums()['pairs'][0], np.arange(12.0).reshape(4, 3))
  assert sums.means().values == {'loss': 0.5}


def test_numbers_that_differ_only_by_rounding_have_no_correlation():
  rng = np.random.default_rng(0)
  constant = 0.7 + rng.normal(size=20) * 3e-8  # what float32 makes of equal products
  scores = rng.normal(size=20)
  for function in (scores_lib.pearson, scores_lib.spearman):
    assert np.isnan(function(constant, scores)) and np.isnan(function(scores, np.full(20, 0.1)))
