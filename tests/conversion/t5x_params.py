"""T5X's parameters in memory, converted to ours as the command converts files."""

import numpy as np

from t5x_gpu.conversion.conversion import params_of_files
from t5x_gpu.conversion.t5x_names import t5x_model, t5x_table
from t5x_gpu.conversion.tensor_copy import ForeignWeights, Names


class ArraysInMemory:
  """Arrays by name; see `name_table.Tensors`."""

  def __init__(self, arrays):
    self._arrays = arrays
    self.shapes = {name: a.shape for name, a in arrays.items()}
    self.dtypes = {name: a.dtype for name, a in arrays.items()}

  def read(self, name, start=0, stop=None):
    return self._arrays[name][start:stop]


def arrays_of_file(path):
  """Returns the arrays of an .npz, which is closed then."""
  with np.load(path) as file:
    return dict(file)


def weights_of_t5x(arrays):
  """Returns T5X's parameters, 'decoder/layers_0/mlp/wi_0/kernel' -> array, with their table."""
  source = ArraysInMemory(arrays)
  table = t5x_table(t5x_model(source.shapes), source.shapes)
  return ForeignWeights(table, source, Names({name: name for name in arrays}))


def params_from_t5x(arrays):
  """Returns our tree of these parameters."""
  weights = weights_of_t5x(arrays)
  weights.check(what='The arrays are not a T5', fix='')
  return params_of_files(weights)
