"""Which differences of two runs count, and where they are."""

import numpy as np

from t5x_gpu.partitioning.axis_rules import AxisNames
from t5x_gpu.tools.parity.compare import differences, update_differences

NAMES = {'layers': {'wo': AxisNames(('layers', 'mlp'))}}


def tree(*rows):
  return {'layers': {'wo': np.array(rows, np.float32)}}


def test_a_difference_is_relative_to_the_array_and_names_the_layer():
  [d] = differences(tree([4, 0], [1, 2.5]), tree([4, 0], [1, 2]), names=NAMES)
  assert (d.by_layer, d.name) == ((0.0, 0.125), 'layers/1/wo')
  [d] = differences(tree([4, 0], [1, np.nan]), tree([4, 0], [1, np.nan]), names=NAMES)
  assert (d.worst, d.worst_layer) == (float('inf'), 1), 'NaN is never equal'
  [d] = differences(tree([1e-9, 0]), tree([0, 0]), names=NAMES)
  assert d.worst == float('inf'), 'something where there should be nothing'
  [d] = differences(tree([0, 0]), tree([0, 0]), names=NAMES)
  assert d.worst == 0


def test_an_update_that_did_not_happen_shows_however_small_it_is():
  before, after = tree([1, 1]), tree([1, 1 + 2e-6])
  [d] = update_differences(before, after, before, names=NAMES)
  assert d.worst > 0.5
  ulp = np.finfo(np.float32).eps
  [d] = update_differences(tree([1, 1 + 2e-6 + ulp]), after, before, names=NAMES)
  assert d.worst == 0, 'rounding of the sum'
