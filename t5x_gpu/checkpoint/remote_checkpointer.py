"""The checkpoints of a MODEL_DIR in object storage: `Checkpointer`, for several hosts without a
shared file system.

Each process copies what it holds to host memory, and a thread of it writes that to the storage.
Process 0 waits until all have, makes the index, adds what the checkpoint says of itself, and
commits it. The processes tell each other how far they are through JAX's coordination service: the
step loop waits for nobody. What lies in storage is what `Checkpointer` writes to a disk.
"""

import base64
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Optional, Union

import jax

from t5x_gpu.checkpoint.arrays.remote_arrays import (
  HostArray,
  copy_to_host,
  join_stores,
  write_arrays,
)
from t5x_gpu.checkpoint.arrays.state_reader import read_state
from t5x_gpu.checkpoint.arrays.state_writer import empty_leaves, write_about
from t5x_gpu.checkpoint.base_checkpointer import CommitAtExit
from t5x_gpu.checkpoint.checkpointer import Checkpointer, Promote, Restored, nothing_local
from t5x_gpu.checkpoint.manifest import describe_arrays
from t5x_gpu.checkpoint.model_dir import (
  UNREADABLE,
  check_no_outage,
  check_same_model,
  check_writable,
  checkpoint_path,
  none_can_be_read,
  read_manifest,
  read_saved,
  why,
)
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.checkpoint.run_files import RunFiles
from t5x_gpu.checkpoint.run_lock import RunLock
from t5x_gpu.checkpoint.storage.checksums import check_restored, checksums_of, record
from t5x_gpu.checkpoint.storage.object_store_steps import (
  begin,
  commit,
  remote_steps,
  remove,
  remove_left_over,
  set_aside,
)
from t5x_gpu.checkpoint.storage.paths import RemotePath, as_path, reason_of
from t5x_gpu.errors import CheckpointError, ConfigError
from t5x_gpu.runtime import distributed, process_exit
from t5x_gpu.runtime.cluster.coordination import coordination_store
from t5x_gpu.training.train_state import TrainState

_log = logging.getLogger(__name__)

_OTHERS_SECONDS = 3600.0  # the watchdog ends a run long before, if a process of it is gone
_DONE = 'done'


def open_checkpointer(model_dir: str, *, keep: Keep) -> 'AnyCheckpointer':
  """Returns what saves and restores the checkpoints of MODEL_DIR, wherever that is."""
  path = as_path(model_dir)
  if isinstance(path, RemotePath):
    return RemoteCheckpointer(path, keep=keep)
  return Checkpointer(model_dir, keep=keep)


class RemoteCheckpointer(CommitAtExit):
  """The checkpoints of one MODEL_DIR in object storage; methods as those of `Checkpointer`.

  Args:
    model_dir: the folder in a bucket.
    keep: which checkpoints stay; one without `last` keeps all.
  Attributes:
    files: where the run writes its small files.
  Raises:
    CheckpointError: nothing can be written there, or another run writes there.
  """

  pause = 'save'  # what the step loop's timer calls it

  def __init__(self, model_dir: RemotePath, *, keep: Keep = Keep(last=3)):
    self._dir, self._keep = model_dir, keep
    process_exit.abandon_threads()  # should the run fail, a thread may be waiting for the storage
    self._is_main, self._index = jax.process_index() == 0, jax.process_index()
    self._lock = None
    if self._is_main:
      check_writable(model_dir)
      self._lock = RunLock(model_dir)
      for step in remove_left_over(model_dir):
        _log.info(
          'Deleted the rest of checkpoint_%d: an earlier process ended while saving or '
          'deleting it.',
          step,
        )
    self.files = RunFiles(model_dir, is_main=self._is_main)
    self._steps = remote_steps(model_dir)
    self._values: dict[int, float] = {}
    for step in self._steps if keep.best else ():
      with contextlib.suppress(*UNREADABLE):  # one that cannot be read is no best one
        self._note_value(step, read_manifest(model_dir, step))
    self._store = coordination_store() if jax.process_count() > 1 else None
    self._num_saves = 0
    self._thread: Optional[threading.Thread] = None
    self._problem: Optional[CheckpointError] = None

  def path(self, step: int) -> RemotePath:
    return checkpoint_path(self._dir, step)

  def steps(self) -> list[int]:
    """Returns the committed steps, oldest first, as far as this process knows."""
    return list(self._steps)

  def _note_value(self, step: int, manifest: Mapping[str, Any]) -> None:
    value = self._keep.value_of(manifest.get('metrics') or {})
    if value is not None:
      self._values[step] = value

  # ---- Saving ------------------------------------------------------------------------------------

  def check(self) -> None:
    """Raises CheckpointError if the save under way has failed by now."""
    if self._problem is not None:
      raise self._problem

  def save(
    self, step: int, state: TrainState, *, data_state: bytes, manifest: Mapping[str, Any]
  ) -> None:
    """Starts to write `checkpoint_<step>`; returns once `state` may be overwritten.

    Raises:
      CheckpointError: this or an earlier save failed, and nothing older has been deleted; or
        another run has taken over MODEL_DIR, and nothing is written.
      ConfigError: no metric is called as the best are told by; once the checkpoint is committed.
    """
    self.wait()
    if self._lock is not None:
      self._lock.check()
      begin(self.path(step))  # the others write once they are told
    no_metric = None
    try:
      self._note_value(step, manifest)
    except ConfigError as e:
      no_metric = e
    manifest = {**manifest, **record(checksums_of(state))}
    about = {
      'manifest': manifest,
      'empty': empty_leaves(state),
      'leaves': {name: shape for name, (shape, _) in describe_arrays(state).items()},
      'data': {'iterator': base64.b64encode(data_state).decode()},
    }
    arrays = copy_to_host(state)
    self._num_saves += 1
    self._thread = threading.Thread(
      target=self._save,
      args=(step, arrays, about, f't5x_gpu/save/{self._num_saves}'),
      name='save',
      daemon=True,
    )  # an interrupted run does not wait for it
    self._thread.start()
    if no_metric is not None:
      self.wait()
      raise no_metric

  def _save(self, step: int, arrays: list[HostArray], about: Mapping[str, Any], key: str) -> None:
    """Writes, in its own thread; what goes wrong is kept for the step loop."""
    try:
      work = self._save_as_main if self._is_main else self._save_as_other
      work(
        step,
        key,
        lambda: write_arrays(arrays, self.path(step) / 'state', process_index=self._index),
        about,
      )
      self._steps.append(step)
    except Exception as e:  # TensorStore's are of many kinds
      self._problem = self._save_error(step, e)
      return
    if self._is_main:
      self._remove_old()

  def _save_as_main(
    self, step: int, key: str, write: Callable[[], None], about: Mapping[str, Any]
  ) -> None:
    path, ended = self.path(step), 'it has not ended'
    try:
      self._tell(f'{key}/begun')
      write()
      for i in range(1, jax.process_count()):
        said = self._hear(f'{key}/written/{i}')
        if said != _DONE:
          raise OSError(f'process {i} could not write: {said}')
      join_stores(path / 'state', num_processes=jax.process_count())
      write_about(path, **about)
      self.files.push()  # so that what is committed has its metrics
      self._lock.check()  # nobody has taken over meanwhile
      commit(path)
      ended = _DONE
    except Exception as e:
      ended = reason_of(e)
      raise
    finally:
      self._tell(f'{key}/ended', ended)

  def _save_as_other(
    self, step: int, key: str, write: Callable[[], None], about: Mapping[str, Any]
  ) -> None:
    del step, about
    self._hear(f'{key}/begun')
    said = _DONE
    try:
      write()
    except Exception as e:
      said = reason_of(e)
      raise
    finally:
      self._tell(f'{key}/written/{self._index}', said)
    ended = self._hear(f'{key}/ended')
    if ended != _DONE:
      raise OSError(ended)

  def _tell(self, key: str, value: str = _DONE) -> None:
    if self._store is not None:
      self._store.key_value_set(key, value)

  def _hear(self, key: str) -> str:
    return self._store.wait_for_value(key, seconds=_OTHERS_SECONDS)

  def _remove_old(self) -> None:
    """Removes what need not stay, now that a newer one is committed."""
    if self._keep.last is None:
      return
    stays = self._keep.reasons(self._steps, self._values)
    for step in [s for s in self._steps if s not in stays]:
      try:
        remove(self.path(step))
        self._steps.remove(step)
      except CheckpointError as e:  # nothing is lost by it; the next save tries again
        _log.warning('checkpoint_%d could not be removed: %s', step, e.what)

  def _save_error(self, step: int, e: Exception) -> CheckpointError:
    last = self._steps[-1] if self._steps else None
    reason = e.what if isinstance(e, CheckpointError) else f'{reason_of(e)}.'
    fix = [e.fix] if isinstance(e, CheckpointError) and e.fix else []
    return CheckpointError(
      f'checkpoint_{step} could not be written to {self._dir}: {reason}',
      fix='\n'.join(
        [
          *fix,
          'No checkpoint has been committed yet.'
          if last is None
          else f'The last good one is checkpoint_{last}; a restart continues from it.',
        ]
      ),
      parameters=('MODEL_DIR',),
      docs='checkpoints.md#object-storage',
    )

  def wait(self) -> None:
    """Returns when everything is committed; raises CheckpointError if it could not be."""
    if self._thread is not None:
      self._thread.join()
      self._thread = None
    self.check()

  def close(self) -> None:
    """Lets other runs use MODEL_DIR."""
    self._release()

  def _release(self) -> None:
    if self._lock is not None:
      self._lock.release()

  # ---- Restoring ---------------------------------------------------------------------------------

  def restore_latest(
    self, target: TrainState, *, promote: Promote = nothing_local
  ) -> Optional[Restored]:
    """Returns the latest readable checkpoint on the mesh of `target`, or None without any.

    One that cannot be read counts no more, with a warning that says which is used in its place.

    Args:
      target: shapes, dtypes and shardings of today.
      promote: not asked: there are no local steps beside object storage.
    Raises:
      CheckpointError: the checkpoint is of another model, none can be read, or the storage does
        not answer.
    """
    try:
      return self._read_latest(target)
    except BaseException:
      self._release()  # the run ends before it has written anything
      raise

  def _read_latest(self, target: TrainState) -> Optional[Restored]:
    reasons: dict[int, str] = {}
    for step in reversed(self.steps()):
      restored, reason = None, ''
      try:
        saved = read_saved(self._dir, step)
        check_same_model(self._dir, step, saved.manifest, target=target)
        state = read_state(self.path(step), target)
        check_restored(state, saved.manifest, step=step)
        restored = Restored(self.path(step), state, saved.data_state, saved.manifest)
      except (CheckpointError, MemoryError):
        raise
      except Exception as e:  # TensorStore's are of many kinds
        check_no_outage(e, self._dir)
        reason = why(e)
      found = [r for r in distributed.gather_json(reason) if r]  # one process is enough
      if found:
        reasons[step] = found[0]
        continue
      self._set_aside(reasons, used=step)
      return restored
    if reasons:
      raise none_can_be_read(self._dir, reasons)
    return None

  def _set_aside(self, reasons: Mapping[int, str], *, used: int) -> None:
    for step, reason in reasons.items():
      self._steps.remove(step)
      if self._is_main:
        set_aside(self.path(step), reason)
        _log.warning(
          'checkpoint_%d cannot be read (%s) and counts no more; its objects stay until '
          'that step is saved again. Continuing from checkpoint_%d.',
          step,
          reason,
          used,
        )


AnyCheckpointer = Union[Checkpointer, RemoteCheckpointer]
