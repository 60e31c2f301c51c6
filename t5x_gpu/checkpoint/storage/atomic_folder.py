"""A folder that appears at the end; should its process be killed, the next one goes on with it.

Beside `target` lies `.NAME.unfinished`: `new`, which becomes `target`, and the journal, which says
how far `new` is good. The same work, started again, goes on from there.

`Journal` for a folder in object storage: written where it will be, committed at the end.

`reshard.json` in the folder says how far it is good. Until the commit no reader takes it for a
checkpoint.

A folder that appears whole or not at all.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from typing import Any, Optional, Self, Union

from t5x_gpu.checkpoint.storage.object_store_steps import commit
from t5x_gpu.checkpoint.storage.paths import AnyPath, RemotePath
from t5x_gpu.config.atomic_write import atomic_write
from t5x_gpu.config.json_schema import Fields, Nullable, read_json
from t5x_gpu.errors import CheckpointError

_log = logging.getLogger(__name__)


SCHEMA = Fields({'work': str, 'entry': Nullable(dict)})


class Journal:
  """The unfinished folder of `target`, and how far it is. No other process may work on it.

  Args:
    target: must not exist, or be empty.
    work: JSON-ready, all that the result depends on; what an other work has left is removed.
    num_bytes: about what will be written in all.
  Attributes:
    folder: to write into.
    entry: what `note` was told last, by an earlier process perhaps; None at the beginning.
  Raises:
    CheckpointError: it exists, cannot be written, is being written, or the disk is too small.
  """

  def __init__(self, target: str | os.PathLike, *, work: Any, num_bytes: int):
    self._target = pathlib.Path(target).absolute()
    self._unfinished = self._target.with_name(f'.{self._target.name}.unfinished')
    self._path = self._unfinished / 'journal.json'
    self.folder = self._unfinished / 'new'
    self._work = hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()
    self.entry: Optional[dict[str, Any]] = None
    if self._target.exists() and (not self._target.is_dir() or any(self._target.iterdir())):
      if not self.folder.exists():  # a kill after the last step
        shutil.rmtree(self._unfinished, ignore_errors=True)
      raise CheckpointError(
        f'{self._target} exists and is not empty; nothing is overwritten.',
        fix='Name another folder with --to, or remove this one.',
      )
    try:
      self._unfinished.mkdir(parents=True, exist_ok=True)
      self._lock = open(self._unfinished / 'lock', 'w', encoding='utf-8')
    except OSError as e:
      raise CheckpointError(
        f'{self._target} cannot be written: {e.strerror or e}.',
        fix='Name a folder of yours with --to.',
      ) from e
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      self._open(num_bytes)
    except BlockingIOError as e:
      self._lock.close()
      raise CheckpointError(
        f'Another process is writing {self._target}.',
        fix='Wait for it or end it, or name another folder with --to.',
      ) from e
    except BaseException:
      self._lock.close()
      raise

  def _open(self, num_bytes: int) -> None:
    """Reads the journal if it is of this work, else begins one."""
    with contextlib.suppress(OSError, ValueError):
      kept = read_json(self._path, SCHEMA)
      if kept['work'] == self._work and self.folder.is_dir():
        self.entry = kept['entry']
    if self.entry is None:
      shutil.rmtree(self.folder, ignore_errors=True)
      self._path.unlink(missing_ok=True)
      self.folder.mkdir()
    written = sum(p.stat().st_size for p in self.folder.rglob('*') if p.is_file())
    free = shutil.disk_usage(self.folder).free
    if free < num_bytes - written:
      if self.entry is None:
        self.discard()
      raise CheckpointError(
        f'{self._target} would take about {num_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are '
        'free.',
        fix='Name a folder on a larger disk with --to, or make room'
        + (
          '.'
          if self.entry is None
          else f'; the same command then goes on: {written / 1e9:.2f} GB are written, and stay.'
        ),
      )

  def note(self, entry: dict[str, Any]) -> None:
    """Records that the folder is good as far as `entry` says; what it says must be on disk."""
    with atomic_write(self._path, sync=True) as new:
      new.write_text(json.dumps({'work': self._work, 'entry': entry}), 'utf-8')
    self.entry = entry

  def finish(self) -> None:
    """Gives the folder its name."""
    if self._target.exists():
      self._target.rmdir()
    os.rename(self.folder, self._target)
    self.discard()

  def discard(self) -> None:
    """Removes what is unfinished."""
    shutil.rmtree(self._unfinished, ignore_errors=True)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: Any) -> None:
    self._lock.close()


_JOURNAL = 'reshard.json'


def open_journal(target: AnyPath, *, work: Any, num_bytes: int) -> Union[Journal, 'RemoteJournal']:
  """Returns the unfinished folder of `target`, and how far it is; arguments as of `Journal`."""
  if isinstance(target, RemotePath):
    return RemoteJournal(target, work=work)
  return Journal(target, work=work, num_bytes=num_bytes)


class RemoteJournal(contextlib.AbstractContextManager):
  """An unfinished folder in object storage, with the methods of `Journal`.

  Args:
    target: must be empty, or unfinished; what another work has left is removed.
    work: JSON-ready, all that the result depends on.
  Attributes:
    folder: to write into.
    entry: what `note` was told last, by an earlier process perhaps; None at the beginning.
  Raises:
    CheckpointError: something else is there, or it cannot be written.
  """

  def __init__(self, target: RemotePath, *, work: Any):
    self.folder = target
    self.entry: Optional[dict[str, Any]] = None
    self._work = hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()
    self._path = target / _JOURNAL
    names = target.files()
    if names and _JOURNAL not in names:
      raise CheckpointError(
        f'{target} is not empty: it has {len(names)} objects. Nothing is overwritten.',
        fix='Name another folder with --to, or remove this one.',
      )
    if names:
      kept: Mapping[str, Any] = {}
      with contextlib.suppress(ValueError):
        kept = read_json(self._path, SCHEMA)
      if kept.get('work') == self._work:
        self.entry = kept['entry']
      else:
        target.remove_tree(last=[_JOURNAL])
    if self.entry is None:
      self._note()

  def note(self, entry: dict[str, Any]) -> None:
    """Records that the folder is good as far as `entry` says."""
    self.entry = entry
    self._note()

  def _note(self) -> None:
    self._path.write_text(json.dumps({'work': self._work, 'entry': self.entry}))

  def finish(self) -> None:
    """Makes what was written a checkpoint."""
    for name in sorted(
      {
        name.split('/')[0]
        for name in self.folder.files(first='checkpoint_')
        if name.startswith('checkpoint_')
      }
    ):
      commit(self.folder / name)
    self._path.unlink()

  def discard(self) -> None:
    """Removes what is unfinished."""
    self.folder.remove_tree(last=[_JOURNAL])

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: Any) -> None:
    """Leaves what is unfinished for the next call."""


_PARTIAL = '.partial-'


@contextlib.contextmanager
def new_folder(target: str | os.PathLike, *, num_bytes: int) -> Iterator[pathlib.Path]:
  """Yields an empty folder beside `target`, which becomes `target` if all goes well.

  If not, it is removed; what a killed process has left is removed by the next one on its host.

  Args:
    target: must not exist, or be empty.
    num_bytes: about what will be written.
  Raises:
    CheckpointError: it exists, it cannot be written, or the disk is too small.
  """
  target = pathlib.Path(target).absolute()
  if target.exists() and (not target.is_dir() or any(target.iterdir())):
    raise CheckpointError(
      f'{target} exists and is not empty; nothing is overwritten.',
      fix='Name another folder with --to, or remove this one.',
    )
  staging = target.with_name(f'.{target.name}{_PARTIAL}{socket.gethostname()}-{os.getpid()}')
  made = [f for f in (target.parent, *target.parent.parents) if not f.exists()]
  try:
    staging.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(target)
    staging.mkdir()
  except OSError as e:
    raise CheckpointError(
      f'{target} cannot be written: {e.strerror or e}.', fix='Name a folder of yours with --to.'
    ) from e
  try:
    free = shutil.disk_usage(staging).free
    if free < num_bytes:
      raise CheckpointError(
        f'{target} would take about {num_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free.',
        fix='Name a folder on a larger disk with --to, or make room.',
      )
    yield staging
    if target.exists():
      target.rmdir()
    os.rename(staging, target)
  except OSError as e:
    raise CheckpointError(
      f'{target} could not be written: {e.strerror or e}. Nothing of it is left.',
      fix='Name a folder with free space with --to.',
    ) from e
  finally:
    shutil.rmtree(staging, ignore_errors=True)
    for folder in made:
      with contextlib.suppress(OSError):  # not empty: it has the target
        folder.rmdir()


def _remove_left_over(target: pathlib.Path) -> None:
  """Removes what processes of this host that no longer exist have left of this target."""
  start = f'.{target.name}{_PARTIAL}'
  for path in target.parent.iterdir():
    made_by = re.fullmatch(rf'{re.escape(start)}(.*)-(\d+)', path.name)
    if made_by is None:
      continue
    if made_by[1] != socket.gethostname():
      _log.warning(
        '%s is of process %s on %s, which may be at work; it stays. Remove it if not.',
        path,
        made_by[2],
        made_by[1],
      )
    elif not pathlib.Path(f'/proc/{made_by[2]}').exists():
      shutil.rmtree(path, ignore_errors=True)
