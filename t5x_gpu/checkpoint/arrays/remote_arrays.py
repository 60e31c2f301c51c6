"""The arrays of a state on their way to object storage: each process writes what it holds.

The objects are the files that Orbax writes on a disk: zarr arrays, an OCDBT store for each process,
and an index over all of them, which process 0 makes at the end.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from t5x_gpu.checkpoint.arrays.state_reader import spec_of, store_of
from t5x_gpu.checkpoint.storage.chunks import Shape, boxes, chunk_of_shard, piece_shape
from t5x_gpu.checkpoint.storage.paths import RemotePath, context, kvstore_spec

COMPRESSOR = {'id': 'zstd', 'level': 1}  # Orbax's
FLUSH_BYTES = 128 << 20  # of arrays, encoded and sent at once: about an object


@dataclasses.dataclass(frozen=True)
class HostArray:
  """What a process writes of an array: each element of it is with one process.

  Attributes:
    name: '/'-joined path.
    shape, dtype: of the whole array.
    chunk: shape of what is read as a whole; no chunk lies in two shards.
    parts: (where, values), copied to host memory.
  """

  name: str
  shape: Shape
  dtype: Any
  chunk: Shape
  parts: Sequence[tuple[tuple[slice, ...], np.ndarray]]


def copy_to_host(tree: Any) -> list[HostArray]:
  """Returns what this process writes of all arrays; the arrays may be overwritten afterwards."""
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  owned = [
    (
      jax.tree_util.keystr(path, simple=True, separator='/'),
      x,
      [s for s in x.addressable_shards if s.replica_id == 0],
    )
    for path, x in flat
  ]
  for _, _, shards in owned:
    for shard in shards:
      shard.data.copy_to_host_async()
  return [
    HostArray(
      name,
      x.shape,
      x.dtype,
      _chunk(x),
      # On CPU the array would be the device's own memory.
      [(s.index, np.array(s.data, copy=True)) for s in shards],
    )
    for name, x, shards in owned
  ]


def _chunk(x: jax.Array) -> Shape:
  return chunk_of_shard(x.shape, x.sharding.shard_shape(x.shape), itemsize=x.dtype.itemsize)


def write_arrays(arrays: Sequence[HostArray], state: RemotePath, *, process_index: int) -> None:
  """Writes what one process holds; raises TensorStore's ValueError if it cannot.

  Args:
    arrays: of `copy_to_host`.
    state: folder in the checkpoint.
    process_index: of this process; those without a part of an array write none of it.
  """
  own, limits = _own(state, process_index), context()
  transaction, waiting = ts.Transaction(), 0
  for array in arrays:
    if not array.parts and process_index:
      continue
    store = ts.open(
      {
        **spec_of(own, array.name),
        'metadata': {
          'shape': list(array.shape),
          'chunks': [max(c, 1) for c in array.chunk],
          'compressor': COMPRESSOR,
        },
      },
      create=True,
      dtype=array.dtype,
      context=limits,
      transaction=transaction,
    ).result()
    for place, values in _pieces(array):
      store[place] = values
      waiting += values.nbytes
      if waiting >= FLUSH_BYTES:
        transaction.commit_async().result()
        transaction, waiting = ts.Transaction(), 0
        store = store.with_transaction(transaction)
  transaction.commit_async().result()


def _pieces(array: HostArray) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
  """Yields (where, values) of whole chunks, about as large as what is sent at once."""
  for place, values in array.parts:
    starts = [s.indices(n)[0] for s, n in zip(place, array.shape)]
    piece = piece_shape(values.shape, array.chunk, itemsize=values.itemsize, most_bytes=FLUSH_BYTES)
    for box in boxes(values.shape, piece):
      yield tuple(slice(i + b.start, i + b.stop) for i, b in zip(starts, box)), values[box]


def join_stores(state: RemotePath, *, num_processes: int) -> None:
  """Makes the index over what all processes have written; arrays stay where they are."""
  limits = context()  # one of it: stores of another are not known to lie in the same place

  def opened(folder: RemotePath) -> ts.KvStore:
    return ts.KvStore.open(store_of(folder), context=limits).result()

  whole, transaction = opened(state), ts.Transaction(atomic=True)
  for i in _written(state, num_processes):
    opened(_own(state, i)).experimental_copy_range_to(whole.with_transaction(transaction)).result()
  transaction.commit_async().result()


def _written(state: RemotePath, num_processes: int) -> Iterator[int]:
  """Yields the processes that had something to write."""
  base = ts.KvStore.open(kvstore_spec(state), context=context()).result()
  for i in range(num_processes):
    if base.read(f'ocdbt.process_{i}/manifest.ocdbt').result().state == 'value':
      yield i


def _own(state: RemotePath, process_index: int) -> RemotePath:
  return state / f'ocdbt.process_{process_index}'
