"""A folder that appears at the end; should its process be killed, the next one goes on with it.

Beside `target` lies `.NAME.unfinished`: `new`, which becomes `target`, and the journal, which says
how far `new` is good. The same work, started again, goes on from there.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
from typing import Any, Optional, Self

from t5x_gpu.config.json_schema import Fields, Nullable, read_json
from t5x_gpu.errors import CheckpointError

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
      raise CheckpointError(f'{self._target} exists and is not empty; nothing is overwritten.',
                            fix='Name another folder with --to, or remove this one.')
    try:
      self._unfinished.mkdir(parents=True, exist_ok=True)
      self._lock = open(self._unfinished / 'lock', 'w', encoding='utf-8')
    except OSError as e:
      raise CheckpointError(f'{self._target} cannot be written: {e.strerror or e}.',
                            fix='Name a folder of yours with --to.') from e
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      self._open(num_bytes)
    except BlockingIOError as e:
      self._lock.close()
      raise CheckpointError(f'Another process is writing {self._target}.',
                            fix='Wait for it or end it, or name another folder with --to.') from e
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
          'free.', fix='Name a folder on a larger disk with --to, or make room'
          + ('.' if self.entry is None else
             f'; the same command then goes on: {written / 1e9:.2f} GB are written, and stay.'))

  def note(self, entry: dict[str, Any]) -> None:
    """Records that the folder is good as far as `entry` says; what it says must be on disk."""
    new = self._path.with_name('journal.new')
    with open(new, 'w', encoding='utf-8') as f:
      json.dump({'work': self._work, 'entry': entry}, f)
      f.flush()
      os.fsync(f.fileno())
    os.replace(new, self._path)
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
