"""Folders that appear complete or not at all; a killed command can continue its folder."""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import IO, Optional

from t5x_gpu.checkpoint.model_dir import commit_remote, new_folders_removed
from t5x_gpu.errors import CheckpointError
from t5x_gpu.storage.files import (
  free_bytes,
  lock_file,
  sync_folder,
  sync_names,
  write_atomically,
  write_problem,
)
from t5x_gpu.storage.json_schema import Fields, Json, Nullable, read_json
from t5x_gpu.storage.paths import AnyPath, RemotePath
from t5x_gpu.terminal.console import show

_SCHEMA = Fields({'work': str, 'entry': Nullable(dict)})
_REMOTE_JOURNAL = 'reshard.json'


@contextlib.contextmanager
def new_folder(target: str | os.PathLike, *, num_bytes: int) -> Iterator[pathlib.Path]:
  """Yields an empty folder, which becomes `target` if the block succeeds and is removed otherwise.

  The next process with the same target removes leftovers of a killed process.

  Args:
    target: must be missing or empty.
    num_bytes: estimated size of the folder.
  Raises:
    CheckpointError: see `Journal`.
  """
  target = pathlib.Path(target).absolute()
  try:
    with (
      new_folders_removed(target.parent),
      Journal(target, work=None, num_bytes=num_bytes) as journal,
    ):
      try:
        yield journal.folder
        journal.finish()
      finally:
        journal.discard()
  except OSError as e:
    raise CheckpointError(
      f'{target} could not be written: {write_problem(e, target.parent)}. The partial output was '
      'removed.',
      fix='Name a folder with free space with --to.',
    ) from e


class Journal(contextlib.AbstractContextManager):
  """The unfinished folder of `target`, with a record of the progress.

  Only one process at a time can open it, if the file system supports locks.

  Next to `target` is `.NAME.unfinished` with `new`, which becomes `target`, and the journal. The
  same work, started again after a kill, continues from the journal.

  Args:
    target: must be missing or empty.
    work: JSON-ready, everything that the result depends on; leftovers of other work are removed.
    num_bytes: estimated total size.
  Attributes:
    folder: folder to write into.
    entry: the last `note`, perhaps of an earlier process; None at the beginning.
  Raises:
    CheckpointError: the target exists, cannot be written, another process is writing it, or the
      disk is too small.
  """

  def __init__(self, target: str | os.PathLike, *, work: object, num_bytes: int):
    self._target = pathlib.Path(target).absolute()
    self._unfinished = self._target.with_name(f'.{self._target.name}.unfinished')
    self._path = self._unfinished / 'journal.json'
    self._lock_path = self._unfinished / 'lock'
    self.folder = self._unfinished / 'new'
    self._work = _digest(work)
    self.entry: Optional[Json] = None
    if self._target.exists() and (not self._target.is_dir() or any(self._target.iterdir())):
      if not self.folder.exists():  # killed after the last step
        shutil.rmtree(self._unfinished, ignore_errors=True)
      raise CheckpointError(
        f'{self._target} exists and is not empty; nothing is overwritten.',
        fix='Name another folder with --to, or remove this one.',
      )
    try:
      self._unfinished.mkdir(parents=True, exist_ok=True)
      self._lock = self._locked()
      try:
        self._open(num_bytes)
      except BaseException:
        if self.entry is None:
          self.discard()
        self._lock.close()
        raise
    except OSError as e:
      with contextlib.suppress(OSError):  # not empty
        self._unfinished.rmdir()
      raise CheckpointError(
        f'{self._target} cannot be written: {write_problem(e, self._target.parent)}.',
        fix='Name a folder you can write to with --to.',
      ) from e

  def _locked(self) -> IO[str]:
    """Returns the lock file, which this process holds until it closes the file."""
    lock = open(self._lock_path, 'a', encoding='utf-8')
    try:
      lock_file(lock)
    except BlockingIOError as e:
      lock.close()
      raise CheckpointError(
        f'Another process is writing {self._target}.',
        fix='Wait for it or end it, or name another folder with --to.',
      ) from e
    except OSError:
      lock.close()
      self._lock_path.unlink(missing_ok=True)
      raise
    return lock

  def _open(self, num_bytes: int) -> None:
    """Continues the journal if it belongs to this work, else starts a new one."""
    with contextlib.suppress(FileNotFoundError, ValueError):
      kept = read_json(self._path, _SCHEMA)
      if kept['work'] == self._work and self.folder.is_dir():
        self.entry = kept['entry']
    if self.entry is None:
      shutil.rmtree(self.folder, ignore_errors=True)
      self._path.unlink(missing_ok=True)
      self.folder.mkdir()
    written = sum(p.stat().st_size for p in self.folder.rglob('*') if p.is_file())
    free = free_bytes(self.folder)
    if free is not None and free < num_bytes - written:
      raise CheckpointError(
        f'{self._target} would take about {show(num_bytes, GB=".2f")}, and '
        f'{show(free, GB=".2f")} are free.',
        fix='Name a folder on a larger disk with --to, or free space'
        + (
          '.'
          if self.entry is None
          else f'; the same command then continues: {show(written, GB=".2f")} are written, and '
          'stay.'
        ),
      )

  def note(self, entry: Json) -> None:
    """Records that everything up to `entry` is on disk."""
    write_atomically(self._path, json.dumps({'work': self._work, 'entry': entry}), sync=True)
    self.entry = entry

  def finish(self) -> None:
    """Renames the folder to `target`, once its files are on the disk."""
    if self._target.exists():
      self._target.rmdir()
    sync_folder(self.folder)
    os.rename(self.folder, self._target)
    sync_names(self._target.parent)
    self.discard()

  def discard(self) -> None:
    """Removes the unfinished folder and releases the lock."""
    if self._lock.closed:  # removed before; another process may be using the name by now
      return
    shutil.rmtree(self.folder, ignore_errors=True)
    with contextlib.suppress(OSError):
      self._path.unlink(missing_ok=True)
      self._lock_path.unlink(missing_ok=True)
      self._lock.close()  # on NFS, a folder with an open file cannot be removed
      self._unfinished.rmdir()

  def __exit__(self, *error: object) -> None:
    self._lock.close()


def open_journal(target: AnyPath, *, work: object, num_bytes: int) -> 'Journal | RemoteJournal':
  """Returns the unfinished folder of `target`, on a disk or in a bucket; see `Journal`."""
  if isinstance(target, RemotePath):
    return RemoteJournal(target, work=work)
  return Journal(target, work=work, num_bytes=num_bytes)


class RemoteJournal(contextlib.AbstractContextManager):
  """An unfinished folder in object storage, with the methods of `Journal`.

  Objects are written in place, with `reshard.json` as the journal. Readers ignore the checkpoint
  until it is committed at the end.

  Args:
    target: must be empty, or unfinished; leftovers of other work, or without an entry, are
      removed.
    work: JSON-ready, everything that the result depends on.
  Attributes:
    folder: folder to write into.
    entry: the last `note`, perhaps of an earlier process; None at the beginning.
  Raises:
    CheckpointError: the target has other objects, or cannot be written.
  """

  def __init__(self, target: RemotePath, *, work: object):
    self.folder = target
    self.entry: Optional[Json] = None
    self._work = _digest(work)
    self._path = target / _REMOTE_JOURNAL
    names = target.files()
    if names and _REMOTE_JOURNAL not in names:
      raise CheckpointError(
        f'{target} is not empty: it has {len(names)} objects. Nothing is overwritten.',
        fix='Name another folder with --to, or remove this one.',
      )
    if names:
      kept: Json = {}
      with contextlib.suppress(ValueError):
        kept = read_json(self._path, _SCHEMA)
      if kept.get('work') == self._work:
        self.entry = kept['entry']
      if self.entry is None:  # a process killed between writing and `note` may have left arrays
        target.remove_tree(last=[_REMOTE_JOURNAL])
    if self.entry is None:
      self.note(None)

  def note(self, entry: Optional[Json]) -> None:
    """Records that everything up to `entry` is stored."""
    self.entry = entry
    self._path.write_text(json.dumps({'work': self._work, 'entry': entry}))

  def finish(self) -> None:
    """Commits the checkpoints that were written."""
    for name in sorted(
      {
        name.split('/')[0]
        for name in self.folder.files(first='checkpoint_')
        if name.startswith('checkpoint_')
      }
    ):
      commit_remote(self.folder / name)
    self._path.unlink()

  def discard(self) -> None:
    """Removes the unfinished folder."""
    self.folder.remove_tree(last=[_REMOTE_JOURNAL])

  def __exit__(self, *error: object) -> None:
    """Leaves the unfinished folder for the next call."""


def _digest(work: object) -> str:
  return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()
