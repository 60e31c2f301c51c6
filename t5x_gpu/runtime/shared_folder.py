"""Whether all processes see the same folder: process 0 writes a file there, and each looks for it.

    with shared_folder.marked(folder) as name:
      seen = distributed.gather_json(shared_folder.sees(folder, name, seconds=20))

The file has a new name: an NFS client may cache the attributes of folders for a minute (acdirmax).
Reading the parent folders makes it ask the server, and a new name is not in its cache.
"""

import contextlib
import os
import pathlib
import secrets
import time
from collections.abc import Iterator
from typing import Optional

from t5x_gpu.runtime import distributed
from t5x_gpu.storage.paths import AnyPath, RemotePath

_POLL_SECONDS = 0.1


@contextlib.contextmanager
def marked(folder: Optional[AnyPath]) -> Iterator[str]:
  """Yields, on all processes, the name of a file that process 0 has written into its folder.

  The name is '' if process 0 has no folder or cannot write there. The file is removed at the end.
  """
  name = ''
  try:
    if distributed.is_main_process() and folder is not None:
      new = f'.shared_{secrets.token_hex(8)}'
      with contextlib.suppress(OSError):
        (folder / new).write_bytes(b'ok')
        name = new
    yield distributed.broadcast_json(name)
  finally:
    if name:
      with contextlib.suppress(OSError):
        (folder / name).unlink(missing_ok=True)


def sees(folder: AnyPath, name: str, *, seconds: float) -> bool:
  """Returns whether this process sees the file within a time; False for the name ''."""
  deadline = time.monotonic() + seconds
  while name:
    if not isinstance(folder, RemotePath):
      _refresh(folder)
    with contextlib.suppress(OSError):  # no permission, or a stale handle
      if (folder / name).is_file():
        return True
    if time.monotonic() > deadline:
      break
    time.sleep(_POLL_SECONDS)
  return False


def _refresh(folder: pathlib.Path) -> None:
  """Reads the beginning of each parent folder, so that NFS asks the server."""
  for above in (*reversed(folder.parents), folder):
    with contextlib.suppress(OSError), os.scandir(above) as entries:
      next(entries, None)
