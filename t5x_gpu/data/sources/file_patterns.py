"""Finds the files that a pattern matches, each real file once, also with symbolic link loops."""

import glob
import logging
import os
import stat
from collections.abc import Iterator

from t5x_gpu.config import set_aside
from t5x_gpu.errors import DataError, listed, task_error

_LISTED = 3
log = logging.getLogger(__name__)
_Inode = tuple[int, int]  # device and number
# Every ext4 volume has this folder; only root may read it, and it never holds a data set.
_LOST_AND_FOUND = 'lost+found'


def unreadable(path: str, e: OSError) -> DataError:
  """Returns the error for a file or folder that cannot be opened or read now."""
  return task_error(
    f'{path} cannot be read: {set_aside.reason_of(e)}.',
    fix=f'{set_aside.remedy(e)}\nOr leave it out of the pattern.',
  )


def find_files(pattern: str) -> list[str]:
  """Returns the files that `pattern` matches, sorted; `**` matches nested folders.

  A file with several names (same device and inode) is listed once. A name with an extension is
  preferred (Hugging Face's cache links to blobs without extensions), then a name without links. The
  log lists skipped links.

  Raises:
    DataError: a file or folder cannot be read.
  """
  skipped: list[str] = []
  paths: dict[tuple[int, ...], str] = {}
  for path in sorted(_matches(pattern, skipped), key=_preference):
    if not _is_file(path):
      if os.path.islink(path) and not os.path.exists(path):
        skipped.append(path)
      continue
    if not os.access(path, os.R_OK, effective_ids=True):
      _check_opens(path)
    if paths.setdefault(_identity(path), path) != path:
      skipped.append(path)
  if skipped:
    shown = [
      f'{path} -> {os.readlink(path)}' if os.path.islink(path) else path
      for path in sorted(set(skipped))
    ]
    log.warning(
      '%r: skipped %d names that are broken links, or link to files and folders already listed: %s',
      pattern,
      len(shown),
      ', '.join(listed(shown, _LISTED)),
    )
  return sorted(paths.values())


def _matches(pattern: str, skipped: list[str]) -> Iterator[str]:
  """Yields the same as `glob.glob(pattern, recursive=True)`, but visits folders below `**` once."""
  parts = pattern.split(os.sep)
  if '**' not in parts:
    _check_folders(parts)
    yield from glob.glob(pattern)
    return
  at = parts.index('**')
  above, below = os.sep.join(parts[:at]), os.sep.join(parts[at + 1 :]) or '*'
  _check_folders(parts[:at])
  roots = glob.glob(above + os.sep) if above or at else [os.curdir]
  for folder in _folders(sorted(roots), skipped):
    # As in glob, names relative to the current folder do not start with './'.
    inside = '' if folder == os.curdir else os.path.join(glob.escape(folder), '')
    yield from _matches(inside + below, skipped)


def _check_folders(parts: list[str]) -> None:
  """Raises DataError for an unreadable folder in the pattern's path, which glob would skip."""
  for i in range(1, len(parts)):
    lists = glob.has_magic(parts[i])
    for folder in glob.glob(os.sep.join(parts[:i]) + os.sep):
      try:
        _enter(folder)
        if lists:
          os.scandir(folder).close()
      except OSError as e:
        if os.path.basename(folder.rstrip(os.sep)) != _LOST_AND_FOUND:
          raise unreadable(folder.rstrip(os.sep), e) from e


def _enter(folder: str) -> None:
  """Raises OSError without permission to search `folder`."""
  os.stat(os.path.join(folder, os.curdir))


def _is_file(path: str) -> bool:
  """Returns os.path.isfile(path); raises DataError if the system denies access."""
  return stat.S_ISREG(_mode(path))


def _mode(path: str | os.PathLike) -> int:
  """Returns the mode of a file; 0 for a broken link.

  Raises DataError if the file server does not answer: the file must not silently leave the data.
  """
  try:
    return os.stat(path).st_mode
  except OSError as e:
    if not set_aside.is_missing(e):
      raise unreadable(os.fspath(path), e) from e
    return 0


def _folders(roots: list[str], skipped: list[str]) -> Iterator[str]:
  """Yields `roots` and all folders in them, each real folder once; links come last."""
  seen: set[_Inode] = set()
  todo, links = roots[::-1], []
  while todo or links:
    folder = todo.pop() if todo else links.pop(0)
    if _inode(folder) in seen:
      skipped.append(folder.rstrip(os.sep))
      continue
    seen.add(_inode(folder))
    yield folder
    try:
      with os.scandir(folder) as entries:
        # Not DirEntry.is_dir, which raises on a link to itself.
        inner = sorted(
          (
            entry
            for entry in entries
            if not entry.name.startswith('.') and stat.S_ISDIR(_mode(entry))
          ),
          key=lambda entry: entry.name,
          reverse=True,
        )
      _enter(folder)
    except OSError as e:
      if os.path.basename(folder.rstrip(os.sep)) == _LOST_AND_FOUND:
        continue
      raise unreadable(folder, e) from e
    for entry in inner:
      path = entry.name if folder == os.curdir else entry.path
      (links if entry.is_symlink() else todo).append(path)


def _check_opens(path: str) -> None:
  """Raises DataError unless the file opens: some containers forbid `os.access` but not reading."""
  try:
    with open(path, 'rb'):
      pass
  except OSError as e:
    raise unreadable(path, e) from e


def _identity(path: str) -> tuple[int, ...]:
  """Returns the identity of a file, also for FUSE file systems that reuse inodes."""
  status = os.stat(path)
  return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _inode(path: str) -> _Inode:
  status = os.stat(path)
  return status.st_dev, status.st_ino


def _preference(path: str) -> tuple[bool, bool, str]:
  has_link = os.path.realpath(path) != os.path.abspath(path)
  return not os.path.splitext(path)[1], has_link, path
