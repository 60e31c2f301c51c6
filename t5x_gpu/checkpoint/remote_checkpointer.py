"""The checkpoints of a MODEL_DIR in object storage, for hosts without a shared file system.

Each process copies its part to host memory, and a thread writes the copy to the storage. Process 0
waits for all processes, writes the index, adds the manifest and the data state, and commits. The
processes report their progress through JAX's coordination service, so the step loop never waits
for another process. The objects are the same files that `Checkpointer` writes to a disk.
"""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Optional, Union

import jax
import numpy as np

from t5x_gpu.checkpoint.arrays import boxes, chunk_of_shard, piece_shape
from t5x_gpu.checkpoint.checkpointer import BaseCheckpointer, Checkpointer
from t5x_gpu.checkpoint.manifest import Manifest
from t5x_gpu.checkpoint.model_dir import ModelDir, as_model_dir, begin_remote, commit_remote
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.checkpoint.store import ZSTD, StateWriter, empty_leaves
from t5x_gpu.errors import CheckpointError
from t5x_gpu.partitioning.trees import Shape, Tree, by_name
from t5x_gpu.runtime import process_exit
from t5x_gpu.runtime.cluster.coordination import coordination_store
from t5x_gpu.storage.json_schema import Json
from t5x_gpu.storage.paths import AnyPath, reason_of
from t5x_gpu.training.state import TrainState

_log = logging.getLogger(__name__)


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
  dtype: np.dtype
  chunk: Shape
  parts: Sequence[tuple[tuple[slice, ...], np.ndarray]]

  def pieces(self, *, most_bytes: int) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """Yields (slices, values), whole chunks of about `most_bytes` each."""
    for place, values in self.parts:
      starts = [s.indices(n)[0] for s, n in zip(place, self.shape)]
      piece = piece_shape(values.shape, self.chunk, itemsize=values.itemsize, most_bytes=most_bytes)
      for box in boxes(values.shape, piece):
        yield tuple(slice(i + b.start, i + b.stop) for i, b in zip(starts, box)), values[box]


def copy_to_host(tree: Tree) -> list[HostArray]:
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


_OTHERS_SECONDS = 3600.0  # the watchdog ends a run long before if a process is gone
_FLUSH_BYTES = 128 << 20  # bytes of arrays to encode and send at once: about one object
_DONE = 'done'


def open_checkpointer(model_dir: ModelDir | str | AnyPath, *, keep: Keep) -> 'AnyCheckpointer':
  """Returns the checkpointer for MODEL_DIR on a disk or in a bucket."""
  model_dir = as_model_dir(model_dir)
  return (RemoteCheckpointer if model_dir.is_remote else Checkpointer)(model_dir, keep=keep)


class RemoteCheckpointer(BaseCheckpointer):
  """The checkpoints of one MODEL_DIR in object storage; see `BaseCheckpointer`."""

  def __init__(self, model_dir: ModelDir | str | AnyPath, *, keep: Keep = Keep(last=3)):
    process_exit.abandon_threads()  # if the run fails, a thread may still be waiting for storage
    super().__init__(model_dir, keep=keep)
    self.steps()  # list now: the error of a failed save names the last step, even without storage
    self._index = jax.process_index()
    self._store = coordination_store() if jax.process_count() > 1 else None
    self._num_saves = 0
    self._thread: Optional[threading.Thread] = None
    self._problem: Optional[CheckpointError] = None

  def steps(self) -> list[int]:
    """Returns the committed steps known to this process, oldest first."""
    return self._dir.steps

  # ---- Saving ------------------------------------------------------------------------------------

  def _prepare_to_save(self, step: int) -> None:
    self.wait()
    if self._is_main:
      self._dir.check_owner()
      begin_remote(self.path(step))  # other processes write only after a message from this process

  def _start_to_save(self, step: int, state: TrainState, *, data: Json, manifest: Manifest) -> None:
    about = {'manifest': manifest, 'data': data, 'empty': empty_leaves(state.saved())}
    self._num_saves += 1
    self._thread = threading.Thread(
      target=self._save,
      args=(step, copy_to_host(state), about, f't5x_gpu/save/{self._num_saves}'),
      name='save',
      daemon=True,  # an interrupted run does not wait for it
    )
    self._thread.start()

  def _save(self, step: int, arrays: list[HostArray], about: Json, key: str) -> None:
    """Writes the checkpoint in a thread; keeps errors for the step loop."""
    try:
      if self._is_main:
        self._save_as_main(step, arrays, about, key)
      else:
        self._save_as_other(step, arrays, key)
      self._dir.committed(step)
    except Exception as e:  # TensorStore raises many kinds of errors
      self._problem = self._save_error(step, e)
      return
    if self._is_main:
      self._remove_old()

  def _save_as_main(self, step: int, arrays: list[HostArray], about: Json, key: str) -> None:
    ended = 'it has not ended'
    try:
      self._publish(f'{key}/begun')
      writer = self._write(step, arrays)
      for i in range(1, jax.process_count()):
        answer = self._wait_for(f'{key}/written/{i}')
        if answer != _DONE:
          raise OSError(f'process {i} could not write: {answer}')
      self._dir.check_owner()  # the index of another run may be there by now
      writer.merge(num_processes=jax.process_count())
      writer.close(**about)
      self.files.push()  # so that a committed checkpoint has its metrics
      self._dir.check_owner()  # no other run has taken over meanwhile
      commit_remote(self.path(step))
      ended = _DONE
    except Exception as e:
      ended = reason_of(e)
      raise
    finally:
      self._publish(f'{key}/ended', ended)

  def _save_as_other(self, step: int, arrays: list[HostArray], key: str) -> None:
    self._wait_for(f'{key}/begun')
    answer = _DONE
    try:
      self._write(step, [array for array in arrays if array.parts])
    except Exception as e:
      answer = reason_of(e)
      raise
    finally:
      self._publish(f'{key}/written/{self._index}', answer)
    ended = self._wait_for(f'{key}/ended')
    if ended != _DONE:
      raise OSError(ended)

  def _write(self, step: int, arrays: list[HostArray]) -> StateWriter:
    """Stores `arrays` and returns the writer."""
    writer = StateWriter(
      self._dir.path,
      step=step,
      arrays={array.name: (array.shape, array.dtype) for array in arrays},
      chunks={array.name: array.chunk for array in arrays},
      compressor=ZSTD,
      flush_bytes=_FLUSH_BYTES,
      process=self._index,
      start=self._start,
    )
    for array in arrays:
      for place, values in array.pieces(most_bytes=_FLUSH_BYTES):
        writer.write(array.name, place, values)
    writer.flush()
    return writer

  def _publish(self, key: str, value: str = _DONE) -> None:
    if self._store is not None:
      self._store.key_value_set(key, value)

  def _wait_for(self, key: str) -> str:
    return self._store.wait_for_value(key, seconds=_OTHERS_SECONDS)

  def _save_error(self, step: int, e: Exception) -> CheckpointError:
    reason = e.what if isinstance(e, CheckpointError) else f'{reason_of(e)}.'
    fix = [e.fix] if isinstance(e, CheckpointError) and e.fix else []
    with contextlib.suppress(CheckpointError):  # the storage does not answer
      fix.append(self._last_good())
    return CheckpointError(
      f'checkpoint_{step} could not be written to {self._dir.path}: {reason}',
      fix='\n'.join(fix),
      parameters=('MODEL_DIR',),
      docs='checkpoints.md#object-storage',
    )

  def raise_if_failed(self) -> None:
    """Raises CheckpointError if the save in progress has failed by now."""
    if self._problem is not None:
      raise self._problem

  def wait(self) -> None:
    """Waits until everything is committed; raises CheckpointError if that failed."""
    if self._thread is not None:
      self._thread.join()
      self._thread = None
    self.raise_if_failed()

  def _stop(self) -> None:
    """Does nothing: there is no background work after the last commit."""


AnyCheckpointer = Union[Checkpointer, RemoteCheckpointer]
