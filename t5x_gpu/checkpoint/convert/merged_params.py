"""A checkpoint with adapters, read as one of the model that they adapt.

Kernels come with their factors multiplied in, in the pieces that are asked for: no more than a
piece is in memory, whatever reads them.
"""

from collections.abc import Mapping
from typing import Any, Optional

import numpy as np

from t5x_gpu.checkpoint.arrays.params_files import ParamsReader, Place
from t5x_gpu.errors import CheckpointError
from t5x_gpu.models.lora import LoraModel, factors_of


class MergedParams:
  """The parameters of the model that a LoraModel wraps; attributes and methods as ParamsReader's.

  Args:
    reader: of a checkpoint of the LoraModel.
    lora: that model.
  Raises:
    CheckpointError: the checkpoint has no adapters.
  """

  def __init__(self, reader: ParamsReader, lora: LoraModel):
    self._reader, self._scale = reader, lora.scale
    self.path, self.step = reader.path, reader.step
    self.manifest: Mapping[str, Any] = reader.manifest
    self.shapes = {n: shape for n, shape in reader.shapes.items() if not lora.is_adapter(n)}
    self.dtypes = {name: reader.dtypes[name] for name in self.shapes}
    factors = {name: factors_of(name, {n: n for n in reader.shapes}.get) for name in self.shapes}
    self._factors = {name: both for name, both in factors.items() if both[0] is not None}
    if not self._factors:
      raise CheckpointError(
        f'{reader.path} has no adapters, and its model should have: '
        f'LoraModel.pattern = {lora.pattern!r}.',
        fix='Name the gin file that the checkpoint was trained with: --gin_file=FILE.',
      )

  @property
  def num_merged(self) -> int:
    """Number of kernels that have factors, stacks of layers counted once."""
    return len(self._factors)

  def read_at(self, path: str, place: Place) -> np.ndarray:
    """Returns a part of a parameter."""
    kernel = self._reader.read_at(path, place)
    if path not in self._factors:
      return kernel
    a, b = self._factors[path]
    rank_at = len(self._reader.shapes[a]) - 1  # as many stack and input dimensions come before it
    num_stack = rank_at + len(self._reader.shapes[b]) - 1 - len(self.shapes[path])
    place = (*place, *[slice(None)] * (len(self.shapes[path]) - len(place)))
    stack, inputs, features = place[:num_stack], place[num_stack:rank_at], place[rank_at:]
    a = self._reader.read_at(a, (*stack, *inputs, slice(None)))
    b = self._reader.read_at(b, (*stack, slice(None), *features))
    if any(isinstance(i, slice) for i in stack):  # layer by layer
      product = np.stack([np.tensordot(x, y, 1) for x, y in zip(a, b)])
    else:
      product = np.tensordot(a, b, 1)
    return kernel + np.float32(self._scale) * product

  def read(self, path: str, start: int = 0, stop: Optional[int] = None) -> np.ndarray:
    """Returns rows `start` to `stop` of a parameter."""
    return self.read_at(path, (slice(start, self.shapes[path][0] if stop is None else stop),))
