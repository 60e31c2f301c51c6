"""File writes that an interruption cannot spoil.

`atomic_write` replaces a file: readers see the old one or the complete new one. `append_line` adds
to a file of lines.
"""

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator

_SOME_GIGABYTES = 0.1  # with less, a disk is full, whatever the size of the file


@contextlib.contextmanager
def atomic_write(
  path: str | os.PathLike, *, sync: bool = False, suffix: str = '.tmp'
) -> Iterator[pathlib.Path]:
  """Yields a path next to `path` to write to; that file replaces `path` when the block ends.

  If the block raises, `path` stays as it was and the temporary file is removed.

  Args:
    path: of the file; its folder exists.
    sync: also survive a crash of the machine, which costs a wait for the disk.
    suffix: of the temporary file's name. Give one with the process id if several processes may
      write the same file at the same time.
  """
  path = pathlib.Path(path)
  temporary = path.with_name(path.name + suffix)
  try:
    yield temporary
    if sync:
      with open(temporary, 'rb') as f:
        os.fsync(f.fileno())
    os.replace(temporary, path)
  except BaseException:
    with contextlib.suppress(OSError):
      temporary.unlink(missing_ok=True)
    raise


def append_line(path: str | os.PathLike, line: str) -> None:
  """Appends a line in one system call; begins a new line if the last one was cut short.

  Args:
    path: of the file; its folder exists.
    line: text without its newline.
  Raises:
    OSError: the file cannot be written, or only a part of the line was.
  """
  with open(path, 'ab+', buffering=0) as f:
    size = f.seek(0, os.SEEK_END)
    if size:
      f.seek(size - 1)
      if f.read(1) != b'\n':
        line = '\n' + line
    data = line.encode() + b'\n'
    if f.write(data) != len(data):
      raise OSError('only a part of a line was written')


def write_atomically(
  path: str | os.PathLike, text: str, *, sync: bool = False, suffix: str = '.tmp'
) -> None:
  """Writes `text` as UTF-8; arguments as for `atomic_write`."""
  with atomic_write(path, sync=sync, suffix=suffix) as new:
    new.write_text(text, 'utf-8')


def write_problem(e: OSError, folder: str | os.PathLike) -> str:
  """Returns why a file in `folder` could not be written; of a full disk, what has run out.

  A disk has no space left as well when its last inode is used, or when a quota ends.
  """
  text = e.strerror or str(e)
  if e.errno == errno.EDQUOT:
    return f'{text}: the quota of this user or project has run out, not the disk (quota -s)'
  if e.errno != errno.ENOSPC:
    return text
  try:
    stats = os.statvfs(folder)
  except OSError:
    return text
  free = stats.f_bavail * stats.f_frsize / 1e9
  if stats.f_files and not stats.f_favail:
    return f'{text}: all {stats.f_files:,} inodes are used; {free:.2f} GB are free (df -i)'
  if free < _SOME_GIGABYTES:
    return f'{text}: {free:.2f} GB are free (df -h)'
  return (
    f'{text}, although {free:.2f} GB and {stats.f_favail:,} inodes are free: the file was larger, '
    'or a limit of this user, project or job (of its memory, in /dev/shm) ended'
  )
