"""Atomic file writes: readers see the old file or the complete new one."""

import contextlib
import os
import pathlib
from collections.abc import Iterator


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
