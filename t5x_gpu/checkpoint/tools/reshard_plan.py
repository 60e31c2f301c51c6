"""Plans arrays, dtypes and chunks of a resharded checkpoint within a memory budget."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import jax.numpy as jnp
import numpy as np

from t5x_gpu.checkpoint.arrays.state_reader import UNSTACKED, StateReader, stacked_arrays
from t5x_gpu.checkpoint.storage.chunks import CHUNK_BYTES, Shape, smaller_chunk
from t5x_gpu.checkpoint.storage.paths import AnyPath
from t5x_gpu.errors import CheckpointError

LEAST_MEMORY = 16 << 20
# Budget in chunks of the source: memory holds input data three times (compressed, as a chunk, as a
# piece), output data three times, and chunks cached from one piece to the next.
_CHUNKS_IN_MEMORY = 8
_PIECES_IN_MEMORY = 16
_OPTIMIZER, _PARAMS = 'opt_state/', 'params/'


@dataclasses.dataclass(frozen=True)
class ReshardRequest:
  """Which checkpoint to rewrite, and how.

  Attributes:
    source: MODEL_DIR, or the folder of one checkpoint. `source` and `target` may be in object
      storage.
    target: new MODEL_DIR.
    step: step of the checkpoint; None for the latest.
    dtype: new dtype of floating-point parameters; None to keep it.
    optimizer_dtype: new dtype of the optimizer's floating-point arrays; None to keep it.
    drop_optimizer: leave the optimizer's arrays out.
    layout: number of parts for the largest dimension of each array, for the next, and so on: (8, 2)
      matches the shards of a mesh with fsdp=8 and model=2. Empty keeps the chunks.
    chunk_bytes: maximum size of a chunk.
    unscan: True for one array per layer, False for one array with all layers, None to keep the
      source's stacking.
    verify: read everything back at the end.
    memory: budget for array data in host memory, in bytes.
  """

  source: AnyPath
  target: AnyPath
  step: Optional[int] = None
  dtype: Optional[str] = None
  optimizer_dtype: Optional[str] = None
  drop_optimizer: bool = False
  layout: tuple[int, ...] = ()
  chunk_bytes: int = CHUNK_BYTES
  unscan: Optional[bool] = None
  verify: bool = False
  memory: int = 2 << 30


@dataclasses.dataclass(frozen=True)
class ReshardPlan:
  """The arrays of the new checkpoint.

  Attributes:
    arrays: '/'-joined path -> (shape, dtype).
    chunks: '/'-joined path -> shape of a chunk.
    unstacked: paths of the arrays that are stored as one array per layer.
  """

  arrays: Mapping[str, tuple[Shape, np.dtype]]
  chunks: Mapping[str, Shape]
  unstacked: tuple[str, ...]

  @property
  def num_bytes(self) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays.values())

  def as_json(self) -> Any:
    return [
      [name, list(shape), str(dtype), list(self.chunks[name]), name in self.unstacked]
      for name, (shape, dtype) in self.arrays.items()
    ]


def plan_reshard(reader: StateReader, request: ReshardRequest) -> ReshardPlan:
  """Returns the arrays of the new checkpoint; does not read any array.

  Raises:
    CheckpointError: the budget is too small for the chunks of the source.
  """
  arrays = {
    name: (shape, _new_dtype(name, reader.dtypes[name], request))
    for name, shape in reader.shapes.items()
    if not (request.drop_optimizer and name.startswith(_OPTIMIZER))
  }
  largest = max(arrays, key=reader.chunk_bytes)
  least = max(_CHUNKS_IN_MEMORY * reader.chunk_bytes(largest), LEAST_MEMORY)
  if request.memory < least:
    raise CheckpointError(
      f'--memory={request.memory:,} bytes is too little: {largest} of {reader.path} is stored in '
      f'chunks of {reader.chunk_bytes(largest):,} bytes, which must be read whole.',
      fix=f'Set --memory={-(-least // 2**20)}MiB or more. The new checkpoint has chunks of at most '
      f'{_max_chunk_bytes(request):,} bytes and will need less.',
      docs='reshard.md#memory',
    )
  stacked = set(stacked_arrays(reader.shapes))
  as_it_was = set(reader.manifest.get(UNSTACKED, ()))
  per_layer = as_it_was if request.unscan is None else stacked if request.unscan else set()
  unstacked = tuple(n for n in arrays if n in per_layer)
  chunks = {}
  for name, (shape, dtype) in arrays.items():
    chunk = reader.chunk_shape(name)
    if request.layout:
      chunk = _laid_out(shape, request.layout, first=1 if name in stacked else 0)
    if name in unstacked:
      chunk = (1, *chunk[1:])
    # The wider of both dtypes: memory also holds the unconverted piece.
    itemsize = max(dtype.itemsize, reader.dtypes[name].itemsize)
    chunks[name] = smaller_chunk(chunk, itemsize=itemsize, most_bytes=_max_chunk_bytes(request))
  return ReshardPlan(arrays, chunks, unstacked)


def piece_bytes(request: ReshardRequest) -> int:
  """Returns the maximum size of a piece that the memory budget allows."""
  return request.memory // _PIECES_IN_MEMORY


def _max_chunk_bytes(request: ReshardRequest) -> int:
  return min(request.chunk_bytes, piece_bytes(request))


def _new_dtype(name: str, dtype: np.dtype, request: ReshardRequest) -> np.dtype:
  asked = None
  if name.startswith(_PARAMS):
    asked = request.dtype
  elif name.startswith(_OPTIMIZER):
    asked = request.optimizer_dtype
  return np.dtype(asked) if asked and jnp.issubdtype(dtype, jnp.floating) else dtype


def _laid_out(shape: Shape, layout: Sequence[int], *, first: int) -> Shape:
  """Returns the chunk shape for a mesh with these sizes.

  Each size divides the largest dimension that it can; dimensions before `first` stay whole.
  """
  chunk, free = list(shape), set(range(first, len(shape)))
  for parts in layout:
    fits = [d for d in free if shape[d] and shape[d] % parts == 0]
    if fits:
      d = max(fits, key=lambda d: (shape[d], d))
      chunk[d] //= parts
      free.remove(d)
  return tuple(chunk)
