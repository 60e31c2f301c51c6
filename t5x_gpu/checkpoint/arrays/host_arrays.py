"""Copies a process's part of a state to host memory, for writing in the background."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from t5x_gpu.checkpoint.storage.chunks import Shape, boxes, by_name, chunk_of_shard, piece_shape


@dataclasses.dataclass(frozen=True)
class HostArray:
  """The part of an array that this process writes. Each element belongs to one process.

  Attributes:
    name: '/'-joined path.
    shape, dtype: shape and dtype of the whole array.
    chunk: shape of a chunk; no chunk spans two shards.
    parts: (slices of the whole array, values in host memory).
  """

  name: str
  shape: Shape
  dtype: Any
  chunk: Shape
  parts: Sequence[tuple[tuple[slice, ...], np.ndarray]]

  def pieces(self, *, most_bytes: int) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """Yields (slices, values), whole chunks of about `most_bytes` each."""
    for place, values in self.parts:
      starts = [s.indices(n)[0] for s, n in zip(place, self.shape)]
      piece = piece_shape(values.shape, self.chunk, itemsize=values.itemsize, most_bytes=most_bytes)
      for box in boxes(values.shape, piece):
        yield tuple(slice(i + b.start, i + b.stop) for i, b in zip(starts, box)), values[box]


def copy_to_host(tree: Any) -> list[HostArray]:
  """Returns this process's part of every array; the arrays may be overwritten afterwards."""
  owned = [
    (name, x, [s for s in x.addressable_shards if s.replica_id == 0])
    for name, x in by_name(tree).items()
  ]
  for _, _, shards in owned:
    for shard in shards:
      shard.data.copy_to_host_async()
  return [
    HostArray(
      name,
      x.shape,
      x.dtype,
      chunk_of_shard(x.shape, x.sharding.shard_shape(x.shape), itemsize=x.dtype.itemsize),
      # On CPU the array would be the device's own memory.
      [(s.index, np.array(s.data, copy=True)) for s in shards],
    )
    for name, x, shards in owned
  ]
