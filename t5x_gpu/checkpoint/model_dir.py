"""MODEL_DIR: its checkpoints, their metadata, and whether this run may write here.

All checks take milliseconds and read no array, so a run, or a dry run, reports problems before it
compiles: whether the files of a checkpoint are complete, whether the model is the same, and whether
all processes see the same folder. `ModelDir` reads a disk or object storage; for the latter,
`begin_remote` and `commit_remote` begin and commit a checkpoint, as Orbax does on a disk.
"""

import base64
import contextlib
import dataclasses
import errno
import json
import logging
import os
import pathlib
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Optional

import tensorstore as ts

from t5x_gpu.checkpoint.manifest import (
  ARRAY_METADATA,
  DATA,
  MANIFEST,
  TREE,
  WITHOUT_DATA,
  Manifest,
  check_seal,
  differences,
)
from t5x_gpu.checkpoint.run_lock import RunLock, check_lock
from t5x_gpu.errors import AccessError, CheckpointError, listed
from t5x_gpu.partitioning.trees import Tree
from t5x_gpu.runtime import distributed, shared_folder
from t5x_gpu.runtime.cluster.agreement import who_text
from t5x_gpu.storage.files import access_error, free_bytes, free_name, write_problem
from t5x_gpu.storage.json_schema import Json, open_regular, parse_json, read_json
from t5x_gpu.storage.paths import (
  AnyPath,
  RemotePath,
  access_errors,
  as_path,
  context,
  is_remote,
  kvstore_spec,
  reason_of,
)
from t5x_gpu.terminal.console import show

_log = logging.getLogger(__name__)

PREFIX = 'checkpoint'
# Errors that `read_metadata` raises for files that are missing, truncated or garbled.
UNREADABLE = (OSError, ValueError, KeyError, TypeError)


@dataclasses.dataclass(frozen=True)
class CheckpointMetadata:
  """The metadata of a checkpoint.

  Attributes:
    step: number of updates at the time of the save.
    data_state: argument of `BatchIterator.set_state`.
    manifest: see checkpoint/manifest.py.
  """

  step: int
  data_state: bytes
  manifest: Manifest


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
    self._manifests: dict[int, Manifest] = {}
    self._metadata: dict[int, CheckpointMetadata] = {}
    self.is_locked = False  # on all processes
    self._lock: Optional[RunLock] = None  # on process 0
    self._made: list[pathlib.Path] = []  # folders that `lock` has created

  @property
  def steps(self) -> list[int]:
    """The committed steps, oldest first."""
    steps = self._steps
    if steps is None:
      steps = self._steps = committed_steps(self.path)
    return list(steps)

  def checkpoint(self, step: int) -> AnyPath:
    """Returns the folder of the checkpoint of `step`."""
    return checkpoint_path(self.path, step)

  def manifest(self, step: int) -> Manifest:
    """Returns the manifest of a checkpoint, as `read_manifest`."""
    if step not in self._manifests:
      self._manifests[step] = read_manifest(self.path, step)
    return self._manifests[step]

  def metadata(self, step: int) -> CheckpointMetadata:
    """Returns the metadata of a checkpoint if its files are complete, as `read_metadata`."""
    if step not in self._metadata:
      self._metadata[step] = read_metadata(self.path, step, manifest=self._manifests.get(step))
      self._manifests[step] = self._metadata[step].manifest
    return self._metadata[step]

  def is_ours(self, step: int) -> bool:
    """Returns whether `checkpoint_<step>` has a t5x_gpu manifest; otherwise it may be foreign."""
    with contextlib.suppress(AccessError, *UNREADABLE):
      return bool(self.manifest(step)['arrays'])
    return False

  def relist(self) -> None:
    """Forgets the list of steps."""
    self._steps = None

  def refresh(self) -> None:
    """Forgets the list of steps and the manifests."""
    self.relist()
    self._manifests.clear()
    self._metadata.clear()

  def committed(self, step: int) -> None:
    """Records that this run has saved `step`."""
    self._steps = sorted({*self.steps, step})

  def removed(self, step: int) -> None:
    """Records that this run has removed or renamed the checkpoint of `step`."""
    self._steps = [s for s in self.steps if s != step]
    self._manifests.pop(step, None)
    self._metadata.pop(step, None)

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
      _remove_empty(self._made)
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
      _remove_empty(self._made)
    self.is_locked = False

  def __exit__(self, *error: object) -> None:
    self.release()


def as_model_dir(model_dir: ModelDir | str | os.PathLike | AnyPath) -> ModelDir:
  """Returns `model_dir` as an open ModelDir."""
  return model_dir if isinstance(model_dir, ModelDir) else ModelDir(model_dir)


def newest_complete(
  model_dir: ModelDir | str | os.PathLike | AnyPath, *, target: Tree
) -> Optional[CheckpointMetadata]:
  """Returns the newest checkpoint that passes the checks of `read_metadata`; None if there is none.

  Its arrays are not read: `BaseCheckpointer.restore_latest` may still find them damaged. Leaves no
  trace. All processes call it.

  Args:
    model_dir: need not exist. May be locked by this run.
    target: the TrainState (or its shapes) of this run.
  Raises:
    CheckpointError: the folder cannot be written, another run writes to it, none of its checkpoints
      can be read, or the newest checkpoint belongs to another model.
    AccessError: a checkpoint cannot be opened.
  """
  with distributed.errors_together():
    model_dir = as_model_dir(model_dir)
    is_main = distributed.is_main_process()
    if is_main and not model_dir.is_locked:
      # Only on process 0: others would see its temporary folders appear and vanish.
      _check_may_write(model_dir.path)
    reasons: dict[int, str] = {}
    for step in reversed(model_dir.steps):
      try:
        saved = model_dir.metadata(step)
      except UNREADABLE as e:
        reasons[step] = error_line(e)
        continue
      check_same_model(model_dir.path, step, saved.manifest, target=target)
      for damaged, reason in reasons.items() if is_main else ():
        _log.warning('checkpoint_%d cannot be read (%s); checkpoint_%d can.', damaged, reason, step)
      return saved
    if reasons:
      raise none_can_be_read(model_dir.path, reasons)
    return None


def _check_may_write(folder: AnyPath) -> None:
  """Raises CheckpointError unless this run could lock `folder`; removes folders that it creates."""
  with new_folders_removed(folder):
    check_writable(folder)
    check_lock(folder, wait=True)


def none_can_be_read(folder: AnyPath, reasons: Mapping[int, str]) -> CheckpointError:
  """Returns the error for a folder whose checkpoints (step -> reason) are all unreadable."""
  return CheckpointError(
    f'None of the {len(reasons)} checkpoints in {folder} can be read.\n'
    + '\n'.join(f'  checkpoint_{step}: {reason}' for step, reason in reasons.items()),
    fix='Set another MODEL_DIR to start from scratch, or move these folders away.',
    parameters=('MODEL_DIR',),
  )


def check_same_model(folder: AnyPath, step: int, manifest: Manifest, *, target: Tree) -> None:
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


@contextlib.contextmanager
def new_folders_removed(folder: AnyPath) -> Iterator[None]:
  """Context that at its end removes the folders that were missing, unless they are in use."""
  missing = missing_folders(folder)
  try:
    yield
  finally:
    _remove_empty(missing)


def _remove_empty(folders: Iterable[pathlib.Path]) -> None:
  for folder in folders:
    with contextlib.suppress(OSError):  # not created, or in use
      folder.rmdir()


def checkpoint_path(folder: AnyPath, step: int) -> AnyPath:
  """Returns the folder of the checkpoint of `step`."""
  return folder / f'{PREFIX}_{step}'


def committed_steps(folder: AnyPath) -> list[int]:
  """Returns the steps of the checkpoints in `folder` at this moment, oldest first.

  A link counts as the checkpoint that it leads to. Ignores interrupted saves, files, and names that
  only resemble `checkpoint_<step>`.

  Raises:
    AccessError: the folder cannot be listed.
  """
  if isinstance(folder, RemotePath):
    return remote_steps(folder)
  return [step for step, is_checkpoint in _named_steps(folder) if is_checkpoint]


def _named_steps(folder: pathlib.Path) -> list[tuple[int, bool]]:
  """Returns each step that names an entry `checkpoint_<step>`, and whether it is a checkpoint.

  Everything but a file counts. A link counts even if it leads nowhere: the disk with the checkpoint
  may not be mounted, and a run that ignored the link would start from scratch.
  """
  steps = []
  # Not Path.glob: without permission to list the folder, it finds nothing, and a run would start
  # from scratch.
  with access_errors(folder), contextlib.suppress(FileNotFoundError, NotADirectoryError):
    with os.scandir(folder) as entries:
      for entry in entries:
        match = re.fullmatch(rf'{PREFIX}_(0|[1-9][0-9]*)', entry.name)
        if match:
          steps.append((int(match[1]), entry.is_symlink() or entry.is_dir()))
  return sorted(steps)


def check_names_are_free(folder: AnyPath, *, after: int, until: int) -> None:
  """Raises CheckpointError if something that is not a checkpoint has the name of a later one.

  Args:
    folder: MODEL_DIR.
    after: the step from which a run continues.
    until: its last step.
  """
  if isinstance(folder, RemotePath):
    taken = [step for step, marks in _marks(folder).items() if not marks]
  else:
    taken = [step for step, is_checkpoint in _named_steps(folder) if not is_checkpoint]
  later = sorted(step for step in taken if after < step <= until)
  if later:
    path = checkpoint_path(folder, later[0])
    what = f'has no {COMMIT}' if isinstance(folder, RemotePath) else 'is not a folder'
    raise CheckpointError(
      f'{path} is not a checkpoint: it {what}. The run could not save step {later[0]}.',
      fix='Move it away, or set another MODEL_DIR.',
      parameters=('MODEL_DIR',),
    )


def check_room(folder: AnyPath, num_bytes: int) -> None:
  """Raises CheckpointError if the disk has no room for one more checkpoint.

  Counts what `remove_leftovers` will free. Object storage has no limit; quotas are not seen.

  Args:
    folder: MODEL_DIR; need not exist.
    num_bytes: size of a checkpoint.
  """
  free = None if isinstance(folder, RemotePath) else free_bytes(folder)
  if free is None or free >= num_bytes:
    return
  free += sum(
    file.stat().st_size
    for path in _leftovers(folder)
    for file in path.rglob('*')
    if file.is_file() and not file.is_symlink()
  )
  if free < num_bytes:
    size, has, lacks = (
      show(n, GiB=',.2f', MiB='.1f', KiB='.1f', B='.0f')
      for n in (num_bytes, free, num_bytes - free)
    )
    raise CheckpointError(
      f'A checkpoint takes {size}, and {has} are free in {folder}: the next save would fail (No '
      'space left on device).',
      fix=f'Free {lacks} there, or set MODEL_DIR to a folder on a larger disk. Old checkpoints '
      'need their space until the new one is complete.',
      parameters=('MODEL_DIR',),
      docs='checkpoints.md#room',
    )


def read_manifest(folder: AnyPath, step: int) -> Manifest:
  """Returns the manifest of a checkpoint; other files may be damaged.

  Raises:
    OSError, ValueError: the manifest is missing, truncated, garbled, or does not match
      `MANIFEST`.
    AccessError: the manifest cannot be opened.
  """
  checkpoint = checkpoint_path(folder, step)
  with access_errors(checkpoint):
    if is_dangling(checkpoint):
      raise AccessError(
        f'{checkpoint} is a link to {os.readlink(checkpoint)}, where no folder is.',
        fix='Mount the disk of that checkpoint, or let the link lead to its folder. To continue '
        'without this checkpoint, remove the link.',
        docs='checkpoints.md#links',
      )
    return read_json(checkpoint / 'manifest' / 'metadata', MANIFEST)


def read_metadata(
  folder: AnyPath, step: int, *, manifest: Optional[Manifest] = None
) -> CheckpointMetadata:
  """Returns the metadata of a checkpoint, if all of its files are complete.

  Finds array files that are missing or truncated; does not read their contents.

  Args:
    folder: MODEL_DIR.
    step: step of the checkpoint.
    manifest: its manifest, if it was read before.
  Raises:
    OSError, ValueError, KeyError, TypeError: something is missing, truncated or garbled.
    AccessError: something cannot be opened.
  """
  checkpoint = checkpoint_path(folder, step)
  if manifest is None:
    manifest = read_manifest(folder, step)
  with access_errors(checkpoint):
    if not isinstance(checkpoint, RemotePath):
      check_only_files(checkpoint)
    data = read_json(checkpoint.joinpath('data', 'metadata'), DATA)
    check_seal(manifest, data=data)
    read_json(checkpoint.joinpath('state', '_METADATA'), TREE)
    check_array_files(checkpoint / 'state')
  return CheckpointMetadata(step, base64.b64decode(data['iterator']), manifest)


def error_line(e: Exception) -> str:
  """Returns the reason for an error in one line."""
  while type(e) is Exception and isinstance(e.__cause__, Exception):
    e = e.__cause__  # Orbax's error names neither file nor reason
  return f'{type(e).__name__}: {reason_of(e)[:200]}'


def is_link(path: AnyPath) -> bool:
  """Returns whether `path` is a symbolic link."""
  return not isinstance(path, RemotePath) and path.is_symlink()


def is_dangling(path: AnyPath) -> bool:
  """Returns whether `path` is a symbolic link to no folder."""
  return is_link(path) and not path.is_dir()


def is_real_folder(path: pathlib.Path) -> bool:
  """Returns whether `path` is itself a folder, not a link to one."""
  return path.is_dir() and not path.is_symlink()


# Orbax keeps the pieces of all arrays in a few files. An index, a manifest and a tree of nodes with
# checksums (TensorStore's OCDBT), stores the position of each piece. So the sizes of the files show
# whether all pieces are there. The metadata of the arrays is checked before TensorStore sees it.
# Source: https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format
_MOST_METADATA_BYTES = 1 << 20  # of one array


def check_array_files(folder: AnyPath) -> None:
  """Raises OSError or ValueError unless each piece of each array lies inside its file.

  Finds missing or truncated files, a damaged index, and metadata that would make TensorStore end
  the process. Does not find bytes that changed inside a file. Takes about 3 ms for every 1000
  pieces (one per array and shard). Objects in storage cannot be truncated, so remote files only
  need to exist, and their metadata is not checked.

  Args:
    folder: folder of the item in the checkpoint, `checkpoint_<step>/state`.
  """
  ends: dict[str, int] = {}
  metadata: dict[str, list[tuple[str, int, int]]] = {}  # file -> key, offset and length in it
  try:
    base = ts.KvStore.open(kvstore_spec(folder), context=context()).result()
    manifest = ts.ocdbt.dump(base).result()
    root = manifest['versions'][-1]['root'].get('location') if manifest else None
    if root is None:
      raise ValueError('manifest.ocdbt lists no arrays')
    for key, entry in _entries(base, root):
      if 'indirect_value' not in entry:  # short values are in the index itself
        _check_metadata(key, entry.get('inline_value', b''))
        continue
      # 'value:ocdbt.process_0/:d/bd17da16:65208:3861': folder, file, offset, length.
      place, offset, length = entry['indirect_value'].rsplit(':', 2)
      file = ''.join(place.split(':')[1:])
      ends[file] = max(ends.get(file, 0), int(offset) + int(length))
      if _name(key) in ARRAY_METADATA:
        metadata.setdefault(file, []).append((key, int(offset), int(length)))
  except (LookupError, TypeError, AttributeError, RuntimeError) as e:  # of a damaged index
    raise ValueError(f'the index of the arrays is damaged: {type(e).__name__}: {e}') from e
  if isinstance(folder, RemotePath):
    missing = sorted(ends.keys() - set(folder.files()))
    if missing:
      raise ValueError(f'{missing[0]} is missing')
    return
  for file, end in ends.items():
    size = (folder / file).stat().st_size
    if size < end:
      raise ValueError(f'{file} is truncated: it has {size:,} of at least {end:,} bytes')
  for file, places in metadata.items():
    with open_regular(folder / file) as f:
      for key, offset, length in places:
        if length > _MOST_METADATA_BYTES:
          raise ValueError(f'{key} has {length:,} bytes, and {_MOST_METADATA_BYTES:,} is the limit')
        f.seek(offset)
        _check_metadata(key, f.read(length))


def check_written(state: AnyPath) -> None:
  """Raises OSError unless the arrays of an uncommitted checkpoint, in `state`, can be opened.

  If Orbax finds no files to merge, it only logs a warning and commits a checkpoint without index.
  """
  try:
    check_array_files(state)
  except ValueError as e:
    raise OSError(errno.EIO, f'the arrays that were written cannot be opened: {e}') from e


def _entries(base: ts.KvStore, node: str, prefix: bytes = b'') -> Iterator[tuple[str, Json]]:
  """Yields key and entry of each value below a node of the index."""
  for entry in ts.ocdbt.dump(base, node).result()['entries']:
    if 'location' in entry:
      yield from _entries(base, entry['location'], prefix + entry['subtree_common_prefix'])
    else:
      yield (prefix + entry['key']).decode(errors='replace'), entry


def _name(key: str) -> str:
  return key.rpartition('/')[2]


def _check_metadata(key: str, content: bytes) -> None:
  """Raises ValueError if `content` is the metadata of an array, but not valid."""
  if _name(key) in ARRAY_METADATA:
    try:
      parse_json(content, ARRAY_METADATA[_name(key)])
    except ValueError as e:
      raise ValueError(f'{key} is damaged: {e}') from e


def check_only_files(folder: str | os.PathLike) -> None:
  """Raises OSError or ValueError if something in `folder` is neither a file nor a folder.

  Orbax and TensorStore would wait for a pipe forever.
  """
  with os.scandir(folder) as entries:
    for entry in entries:
      if entry.is_dir(follow_symlinks=False):
        check_only_files(entry)
      elif not entry.is_file():  # follows links
        raise ValueError(f'{entry.path} is not a file')


# Names of folders on a disk that are not checkpoints: Orbax is still writing the first, and the
# second was renamed before it is deleted. A kill leaves them.
CUT_SHORT, REMOVED = '.orbax-checkpoint-tmp', '.removed_'
_LEFTOVER = re.compile(
  rf'{PREFIX}_([0-9]+){re.escape(CUT_SHORT)}(?:-[0-9]+)?|{re.escape(REMOVED)}{PREFIX}_([0-9]+)'
)


def remove_checkpoint(folder: AnyPath, step: int) -> None:
  """Deletes `checkpoint_<step>`; a kill leaves nothing under its name that counts as a checkpoint.

  Of a link, deletes only the link: another run may use the files that it leads to.

  Raises:
    OSError, CheckpointError: a part of it remains.
  """
  path = checkpoint_path(folder, step)
  if isinstance(path, RemotePath):
    _claim(path)
    path.joinpath(COMMIT).unlink(missing_ok=True)
    path.remove_tree(last=[UNDER_WAY])
  elif is_link(path):
    target = os.readlink(path)
    path.unlink()
    _log.info('Removed the link checkpoint_%d. Its files stay in %s.', step, target)
  else:
    aside = folder / f'{REMOVED}{path.name}'
    os.rename(path, aside)
    shutil.rmtree(aside)


def remove_leftovers(folder: AnyPath) -> list[int]:
  """Removes the rest of saves and deletions that were killed; returns their steps.

  The caller holds the lock of `folder`.
  """
  if isinstance(folder, RemotePath):
    left = sorted(
      step for step, marks in _marks(folder).items() if UNDER_WAY in marks and COMMIT not in marks
    )
    for step in left:
      checkpoint_path(folder, step).remove_tree(last=[UNDER_WAY])
    return left
  steps = []
  for path, step in _leftovers(folder).items():
    try:
      shutil.rmtree(path)
      steps.append(step)
    except OSError as e:  # harmless
      _log.warning('%s could not be deleted: %s.', path, e.strerror or e)
  return steps


def _leftovers(folder: pathlib.Path) -> dict[pathlib.Path, int]:
  """Returns folder -> step of each save or deletion that was killed."""
  matches = {
    path: _LEFTOVER.fullmatch(path.name)
    for path in (sorted(folder.iterdir()) if folder.is_dir() else ())
  }
  return {
    path: int(match[1] or match[2])
    for path, match in matches.items()
    if match and is_real_folder(path)
  }


def set_aside_checkpoint(folder: AnyPath, step: int, reason: str) -> str:
  """Makes room for a new save of a step that cannot be read; returns words: 'is kept as NAME'."""
  path = checkpoint_path(folder, step)
  if isinstance(path, RemotePath):
    path.joinpath(SET_ASIDE).write_text(f'{_now()}: {reason}\n')
    return 'no longer counts; its objects stay until that step is saved again'
  aside = free_name(folder / f'corrupt_{path.name}')
  os.rename(path, aside)
  return f'is kept as {aside.name}'


# Objects cannot be renamed, so a checkpoint in object storage is written under its final name. The
# last object, `commit_success.txt` (Orbax's name), commits it. The first object, `under_way.json`,
# names the writer: it distinguishes leftovers of a killed process from other users' objects, and a
# removal deletes it last. All other objects are the same as the files of a checkpoint on disk.
COMMIT, UNDER_WAY, SET_ASIDE = 'commit_success.txt', 'under_way.json', 'cannot_be_read.txt'
_AFTER_PREFIX = f'{PREFIX}`'  # the next character after '_'


def remote_steps(folder: RemotePath) -> list[int]:
  """Returns the steps of the committed checkpoints in `folder`, oldest first."""
  return sorted(
    step for step, marks in _marks(folder).items() if COMMIT in marks and SET_ASIDE not in marks
  )


def begin_remote(path: RemotePath) -> None:
  """Marks `path` as a checkpoint that is being written.

  Replaces a checkpoint that was set aside as unreadable.

  Raises:
    CheckpointError: the folder has a checkpoint or other objects.
  """
  names = set(path.files())
  if names and not names & {UNDER_WAY, SET_ASIDE}:
    raise CheckpointError(
      f'{path} '
      + (
        'exists and was not overwritten.'
        if COMMIT in names
        else f'has {len(names)} objects, but is not a checkpoint: {COMMIT} is missing. '
        'Nothing was overwritten.'
      ),
      fix='Continue from the latest checkpoint, move that one away, or set another MODEL_DIR.',
      parameters=('MODEL_DIR',),
    )
  _claim(path)
  path.joinpath(COMMIT).unlink(missing_ok=True)
  for name in sorted(names - {UNDER_WAY, COMMIT}):
    path.joinpath(name).unlink(missing_ok=True)


def commit_remote(path: RemotePath) -> None:
  """Commits a checkpoint; all other objects must be written by now."""
  (path / COMMIT).write_text(f'Committed {_now()}.\n')
  (path / UNDER_WAY).unlink(missing_ok=True)


def _marks(folder: RemotePath) -> dict[int, set[str]]:
  """Returns step -> the markers (names above) in its folder, committed or not."""
  found: dict[int, set[str]] = {}
  for name in folder.files(first=f'{PREFIX}_', stop=_AFTER_PREFIX):
    match = re.fullmatch(rf'{PREFIX}_(0|[1-9][0-9]*)/(.*)', name)
    if match:
      found.setdefault(int(match[1]), set()).update({match[2]} & {COMMIT, UNDER_WAY, SET_ASIDE})
  return found


def _claim(path: RemotePath) -> None:
  about = {'host': socket.gethostname(), 'pid': os.getpid(), 'since': _now()}
  (path / UNDER_WAY).write_text(json.dumps(about) + '\n')


def _now() -> str:
  return time.strftime('%Y-%m-%d %H:%M:%S %Z')


LOOK_SECONDS = 20.0  # longer than a slow file server takes


def shared_model_dir(model_dir: str | os.PathLike | AnyPath, *, dry_run: bool = False) -> ModelDir:
  """Returns MODEL_DIR, open, after checking that all processes see the same folder.

  If they did not, the first save would hang. Object storage is checked, too: hosts may talk to
  different servers. A single process skips the check.

  Args:
    model_dir: MODEL_DIR of the run.
    dry_run: remove the folder again if it did not exist. A run keeps it: removing and creating it
      again would give other hosts stale handles.
  Raises:
    ConfigError: the address is not supported.
    CheckpointError: process 0 cannot write to MODEL_DIR, or another process does not see the file;
      raised on all processes.
  """
  folder = as_path(model_dir, parameter='train.model_dir')
  if distributed.process_count() > 1:
    with _marked(folder, dry_run=dry_run) as name:
      sees = shared_folder.sees(folder, name, seconds=LOOK_SECONDS)
      seen = distributed.gather_json([sees, str(folder)])
    blind = [i for i, (sees, _) in enumerate(seen) if not sees]
    if blind:
      raise _not_shared(blind, [path for _, path in seen])
  return ModelDir(folder)


@contextlib.contextmanager
def _marked(folder: AnyPath, *, dry_run: bool) -> Iterator[str]:
  """As `shared_folder.marked`; creates the folder, and removes it again after a dry run."""
  is_main = distributed.is_main_process()
  with new_folders_removed(folder) if is_main and dry_run else contextlib.nullcontext():
    if is_main:
      check_writable(folder)
    with shared_folder.marked(folder) as name:
      yield name


def _not_shared(blind: list[int], paths: list[str]) -> CheckpointError:
  names = distributed.hostnames()
  by_host: dict[str, list[int]] = {}
  for process in blind:
    by_host.setdefault(names[process] if names else '', []).append(process)
  hosts = [f'{who_text(who, names)}: {paths[who[0]]}' for who in by_host.values()]
  return CheckpointError(
    f'MODEL_DIR = {paths[0]!r} is not one folder for all processes. Process 0'
    f'{f" ({names[0]})" if names else ""} wrote a file there; {len(blind)} of {len(paths)} '
    'processes do not see it:\n  ' + '\n  '.join(listed(hosts, 8)),
    fix='Set MODEL_DIR to an absolute path on a file system that all hosts mount, or to object '
    'storage (s3://BUCKET/FOLDER). Every process writes its part of a checkpoint there.',
    parameters=('MODEL_DIR',),
    docs='slurm.md#what-hosts-must-share',
  )
