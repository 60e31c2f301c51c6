"""MODEL_DIR: its checkpoints, their metadata, and whether this run may write here.

All checks take milliseconds and read no array: the sizes of the array files show whether they are
complete. So a run, or a dry run, reports problems before it compiles.
"""

import contextlib
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Optional

import jax

from t5x_gpu.checkpoint.manifest import WITHOUT_DATA, differences
from t5x_gpu.checkpoint.run_lock import RunLock, check_lock
from t5x_gpu.checkpoint.saved_checkpoint import (
  UNREADABLE,
  Saved,
  checkpoint_path,
  committed_steps,
  error_line,
  is_real_folder,
  read_manifest,
  read_saved,
)
from t5x_gpu.checkpoint.storage.paths import AnyPath, RemotePath, as_path, is_remote
from t5x_gpu.config.atomic_write import write_problem
from t5x_gpu.config.set_aside import access_error
from t5x_gpu.errors import AccessError, CheckpointError
from t5x_gpu.runtime import distributed

_log = logging.getLogger(__name__)


class ModelDir(contextlib.AbstractContextManager):
  """An open MODEL_DIR: lists steps once, reads each manifest once.

  A command opens it at startup and passes it on. A run that writes calls `lock` first, so that no
  other run can save between the listing and the restore, and again before it writes after a long
  pause. As a context, it releases the lock.

  The next access lists the steps and reads the manifests again after
  - `lock`, if it had to take the lock: another run may have saved before;
  - `refresh`, which the promotion of a local checkpoint and commands that watch another run call;
  - `relist`, for the steps alone.
  `committed` and `removed` record this run's own changes. Failed reads are not cached: a transient
  error of a file server must not mark a checkpoint as damaged. Arrays are never cached.

  Args:
    path: a folder or an address in object storage; need not exist.
  Attributes:
    path: absolute.
    is_remote: whether it is in object storage.
    is_locked: whether this run has locked it.
  """

  def __init__(self, path: str | os.PathLike | AnyPath):
    self.path = as_path(path)
    self.is_remote = is_remote(self.path)
    self._steps: Optional[list[int]] = None
    self._manifests: dict[int, Mapping[str, Any]] = {}
    self._saved: dict[int, Saved] = {}
    self.is_locked = False  # on all processes
    self._lock: Optional[RunLock] = None  # on process 0
    self._made: list[pathlib.Path] = []  # folders that `lock` has created

  @property
  def steps(self) -> list[int]:
    """The committed steps, oldest first."""
    if self._steps is None:
      self._steps = committed_steps(self.path)
    return list(self._steps)

  def checkpoint(self, step: int) -> AnyPath:
    """Returns the folder of the checkpoint of `step`."""
    return checkpoint_path(self.path, step)

  def manifest(self, step: int) -> Mapping[str, Any]:
    """Returns the manifest of a checkpoint, as `read_manifest`."""
    if step not in self._manifests:
      self._manifests[step] = read_manifest(self.path, step)
    return self._manifests[step]

  def saved(self, step: int) -> Saved:
    """Returns the metadata of a checkpoint if its files are complete, as `read_saved`."""
    if step not in self._saved:
      self._saved[step] = read_saved(self.path, step, manifest=self._manifests.get(step))
      self._manifests[step] = self._saved[step].manifest
    return self._saved[step]

  def is_ours(self, step: int) -> bool:
    """Returns whether `checkpoint_<step>` has a t5x_gpu manifest; otherwise it may be foreign."""
    with contextlib.suppress(AccessError, *UNREADABLE):
      return is_real_folder(self.checkpoint(step)) and bool(self.manifest(step)['arrays'])
    return False

  def relist(self) -> None:
    """Forgets the list of steps."""
    self._steps = None

  def refresh(self) -> None:
    """Forgets the list of steps and the manifests."""
    self.relist()
    self._manifests.clear()
    self._saved.clear()

  def committed(self, step: int) -> None:
    """Records that this run has saved `step`."""
    self._steps = sorted({*self.steps, step})

  def removed(self, step: int) -> None:
    """Records that this run has removed or renamed the checkpoint of `step`."""
    self._steps = [s for s in self.steps if s != step]
    self._manifests.pop(step, None)
    self._saved.pop(step, None)

  def lock(self, *, wait: bool = False) -> None:
    """Takes run.lock; if this run already has it, checks that no other run has taken over.

    All processes call it; process 0 reads and writes.

    Args:
      wait: see `check_lock`.
    Raises:
      CheckpointError: another run writes here or has written here since the lock was taken, or the
        folder cannot be written; raised on all processes.
    """
    with distributed.errors_together():
      if distributed.is_main_process():
        if self.is_locked:
          self._check_unchanged()
        else:
          self._take_lock(wait=wait)
    if not self.is_locked:
      self.is_locked = True
      self.refresh()

  def _take_lock(self, *, wait: bool) -> None:
    self._made = missing_folders(self.path)
    try:
      check_writable(self.path)
      self._lock = RunLock(self.path, wait=wait)
    except CheckpointError:
      self._remove_made()
      raise

  def _check_unchanged(self) -> None:
    """Raises CheckpointError if another run has used MODEL_DIR since this run locked it."""
    if self._lock.check():
      return
    before, now = (steps[-1:] for steps in (self.steps, committed_steps(self.path)))
    if before != now:
      before, now = (f'checkpoint_{steps[0]}' if steps else 'none' for steps in (before, now))
      raise CheckpointError(
        f'{self.path} has changed since this run locked it: the latest checkpoint was {before} and '
        f'is {now}. This run stopped renewing its lock, and another run used the folder.',
        fix='Start the same command again.',
        parameters=('MODEL_DIR',),
        docs='watchdog.md#two-runs-on-one-model_dir',
      )

  def check_owner(self) -> None:
    """Raises CheckpointError, on process 0, if another run has taken over MODEL_DIR."""
    if self._lock is not None:
      self._lock.check()

  def release(self) -> None:
    """Lets other runs use MODEL_DIR and removes empty folders. May be called repeatedly."""
    if self._lock is not None:
      self._lock.release()
      self._lock = None
      self._remove_made()
    self.is_locked = False

  def _remove_made(self) -> None:
    for folder in self._made:
      with contextlib.suppress(OSError):  # the folder is in use
        folder.rmdir()
    self._made = []

  @contextlib.contextmanager
  def released_on_error(self) -> Iterator[None]:
    """Context in which an error releases the lock."""
    try:
      yield
    except BaseException:
      self.release()
      raise

  def __exit__(self, *error: Any) -> None:
    self.release()


def as_model_dir(model_dir: ModelDir | str | os.PathLike | AnyPath) -> ModelDir:
  """Returns `model_dir` as an open ModelDir."""
  return model_dir if isinstance(model_dir, ModelDir) else ModelDir(model_dir)


def missing_folders(folder: AnyPath) -> list[pathlib.Path]:
  """Returns the missing folders among `folder` and its parents, innermost first.

  Raises:
    AccessError: a folder above one of them cannot be entered.
  """
  if isinstance(folder, RemotePath):
    return []
  try:
    return [f for f in (folder, *folder.parents) if not f.exists()]
  except OSError as e:
    raise access_error(e) from e


def check_model_dir(
  model_dir: ModelDir | str | os.PathLike | AnyPath, *, target: Any
) -> Optional[Saved]:
  """Returns the latest checkpoint that passes the checks of `read_saved`; None if there is none.

  Leaves no trace. All processes call it.

  Args:
    model_dir: need not exist. May be locked by this run.
    target: the TrainState (or its shapes) of this run.
  Raises:
    CheckpointError: the folder cannot be written, another run writes to it, none of its checkpoints
      can be read, or the latest checkpoint belongs to another model.
    AccessError: a checkpoint cannot be opened.
  """
  with distributed.errors_together():
    return _latest_readable(as_model_dir(model_dir), target)


def _latest_readable(model_dir: ModelDir, target: Any) -> Optional[Saved]:
  if not model_dir.is_locked and jax.process_index() == 0:
    # Only on process 0: others would see its temporary folders appear and vanish.
    _check_may_write(model_dir.path)
  reasons: dict[int, str] = {}
  for step in reversed(model_dir.steps):
    try:
      saved = model_dir.saved(step)
    except UNREADABLE as e:
      reasons[step] = error_line(e)
      continue
    check_same_model(model_dir.path, step, saved.manifest, target=target)
    for damaged, reason in reasons.items() if jax.process_index() == 0 else ():
      _log.warning('checkpoint_%d cannot be read (%s); checkpoint_%d can.', damaged, reason, step)
    return saved
  if reasons:
    raise none_can_be_read(model_dir.path, reasons)
  return None


def _check_may_write(folder: AnyPath) -> None:
  """Raises CheckpointError unless this run could lock `folder`; removes folders that it creates."""
  made = missing_folders(folder)
  try:
    check_writable(folder)
    check_lock(folder, wait=True)
  finally:
    for new in made:
      with contextlib.suppress(OSError):  # not created, or another process has written to it
        new.rmdir()


def none_can_be_read(folder: AnyPath, reasons: Mapping[int, str]) -> CheckpointError:
  """Returns the error for a folder whose checkpoints (step -> reason) are all unreadable."""
  return CheckpointError(
    f'None of the {len(reasons)} checkpoints in {folder} can be read.\n'
    + '\n'.join(f'  checkpoint_{step}: {reason}' for step, reason in reasons.items()),
    fix='Set another MODEL_DIR to start from scratch, or move these folders away.',
    parameters=('MODEL_DIR',),
  )


def check_same_model(
  folder: AnyPath, step: int, manifest: Mapping[str, Any], *, target: Any
) -> None:
  """Raises CheckpointError if `manifest` and `target` differ; lists the differing arrays."""
  different = differences(manifest, target)
  params_only = not any(name.startswith('opt_state/') for name in manifest['arrays'])
  if manifest.get(WITHOUT_DATA) or different and params_only:
    holds = 'parameters only' if params_only else 'no position in the data'
    raise CheckpointError(
      f'{checkpoint_path(folder, step)} holds {holds}, as converted checkpoints do: '
      'it was not written by a training run and cannot be resumed.',
      fix='Set another MODEL_DIR, and start from this one: train.initialize_from =\n'
      f'@initialize.RestoreConfig() with RestoreConfig.path = {str(folder)!r}.',
      parameters=('MODEL_DIR',),
      docs='finetune.md#what-a-run-starts-from',
    )
  if different:
    raise CheckpointError(
      f'{checkpoint_path(folder, step)} holds another model or optimizer:\n  '
      + '\n  '.join(different),
      fix='Set another MODEL_DIR for this model, or go back to the configuration of '
      f'{folder / "config.gin"}. Nothing was overwritten.',
      parameters=('MODEL_DIR',),
    )


def check_writable(folder: AnyPath) -> None:
  """Creates `folder` if needed; raises CheckpointError unless files can be created in it."""
  probe = folder / f'.write_test_{os.getpid()}'
  try:
    folder.mkdir(parents=True, exist_ok=True)
    probe.write_bytes(b'ok')
    probe.unlink()
  except OSError as e:
    raise CheckpointError(
      f'MODEL_DIR = {str(folder)!r} cannot be written to: {write_problem(e, folder)}.',
      fix='Set MODEL_DIR to a folder you can write to, with free space '
      '(--gin.MODEL_DIR=runs/my_run).',
      parameters=('MODEL_DIR',),
    ) from e
