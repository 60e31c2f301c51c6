"""A global batch whose rows are read on access.

Every process has the global batch but accesses only the rows for its devices
(`Layout.put_batch`), so other rows are never read. Using an array as a whole reads all rows.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from t5x_gpu.data.batches import BatchSpec

# Reads the rows with these numbers into the arrays of the batch.
ReadRows = Callable[[Sequence[int], dict[str, np.ndarray]], None]


class LazyBatch:
  """The rows of one batch, read as needed.

  Args:
    spec: shapes and dtypes.
    read: reads rows into the arrays of all features.
  Attributes:
    asked: row numbers that were accessed by index, not as part of a whole array.
  """

  def __init__(self, spec: BatchSpec, *, read: ReadRows):
    # The pages of np.zeros use memory only after a write.
    self._arrays = {name: np.zeros(spec.shapes[name], spec.dtypes[name]) for name in spec.shapes}
    self._have = np.zeros(spec.batch_size, bool)
    self._read = read
    self._lock = threading.Lock()
    self.asked: set[int] = set()
    self.features = {name: LazyArray(self, name) for name in spec.shapes}

  def need(self, rows: Sequence[int]) -> None:
    """Reads the rows among `rows` that have not been read yet."""
    with self._lock:
      missing = [row for row in rows if not self._have[row]]
      if missing:
        self._read(missing, self._arrays)
        self._have[missing] = True

  def array(self, name: str) -> np.ndarray:
    """Returns a feature; unread rows are zeros."""
    return self._arrays[name]


class LazyArray(NDArrayOperatorsMixin):
  """One feature of a LazyBatch; it behaves like a numpy array [batch, ...]."""

  def __init__(self, batch: LazyBatch, name: str):
    self._batch, self._name = batch, name
    array = batch.array(name)
    self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

  def __len__(self) -> int:
    return self.shape[0]

  def __getitem__(self, index: Any) -> np.ndarray:
    """Returns part of the array; a row or a slice of rows reads only these rows."""
    rows = index[0] if isinstance(index, tuple) and index else index
    if not isinstance(rows, (slice, int, np.integer)):
      return self.__array__()[index]
    numbers = range(len(self))[rows]
    numbers = [numbers] if isinstance(numbers, int) else numbers
    self._batch.asked.update(numbers)
    self._batch.need(numbers)
    return self._batch.array(self._name)[index]

  def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> np.ndarray:
    self._batch.need(range(len(self)))
    return np.array(self._batch.array(self._name), dtype=dtype, copy=copy)

  def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
    whole = [x.__array__() if isinstance(x, LazyArray) else x for x in inputs]
    return getattr(ufunc, method)(*whole, **options)

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__'):  # copy and pickle probe for optional methods
      raise AttributeError(name)
    return getattr(self.__array__(), name)
