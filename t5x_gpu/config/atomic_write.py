"""File writes that an interruption cannot spoil.

`atomic_write` replaces a file: readers see the old one or the complete new one. `append_line` adds
to a file of lines.
"""

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
