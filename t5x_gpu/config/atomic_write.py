"""File writes that are safe against interruptions.

`atomic_write` replaces a file: readers see the old file or the complete new file. `append_line`
appends to a file of lines.
"""

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator

_SOME_GIGABYTES = 0.1  # a disk with less free space counts as full, for any file size


@contextlib.contextmanager
def atomic_write(
  path: str | os.PathLike, *, sync: bool = False, suffix: str = '.tmp'
) -> Iterator[pathlib.Path]:
  """Yields a temporary path next to `path`; the file replaces `path` when the block ends.

  If the block raises, `path` is unchanged and the temporary file is removed.

  Args:
    path: path of the file; its folder exists.
    sync: also survive a crash of the machine, at the cost of waiting for the disk.
    suffix: suffix of the temporary file. Include the process id if several processes may write the
      same file concurrently.
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
  """Appends a line in one system call; begins a new line if the last line is incomplete.

  Args:
    path: path of the file; its folder exists.
    line: text without its newline.
  Raises:
    OSError: the file cannot be written, or only a part of the line was written.
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
  """Returns why a file in `folder` could not be written; for a full disk, which resource ran out.

  "No space left" may also mean that all inodes are used, or that a quota is exhausted.
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
