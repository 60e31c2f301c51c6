"""What a process reports to `launch`, which outlives it: how far it is, and which hosts it can use.

`launch` names a small file for each in `VARIABLE` and `HOST_COUNTS_VARIABLE`. Nothing is written
without these variables. The files have their full size from the start, so that a disk that is full
later does not hide what a process has done.
"""

import contextlib
import dataclasses
import os
import pathlib
import struct
from collections.abc import Iterable, Mapping
from typing import Optional, Union

VARIABLE = 'T5X_GPU_PROGRESS_FILE'
HOST_COUNTS_VARIABLE = 'T5X_GPU_HOST_COUNTS_FILE'
_FORMAT = struct.Struct('<qq')
_UNKNOWN = b' ' * _FORMAT.size
_HOST_COUNTS_BYTES = 2**15  # for all numbers up to 4,096, and more


@dataclasses.dataclass(frozen=True)
class Progress:
  """Steps of a process.

  Attributes:
    first_step: step of the state that the process started from.
    step: the last step that it has finished.
  """

  first_step: int
  step: int


def reserve(files: Iterable[pathlib.Path], host_counts: pathlib.Path) -> None:
  """Creates the files of processes, or makes them blank again, in place.

  Raises:
    OSError: the disk is full, ...
  """
  for path, size in [*((file, len(_UNKNOWN)) for file in files), (host_counts, _HOST_COUNTS_BYTES)]:
    _overwrite(path, b' ' * size)


def _overwrite(path: Union[str, pathlib.Path], data: bytes) -> None:
  """Writes the first bytes of a file; on a full disk this works where it has bytes already."""
  with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), 'wb', buffering=0) as file:
    file.write(data)


class ProgressFile:
  """Reports the steps of this process; a file that cannot be written is ignored.

  Args:
    environ: names the file.
    first_step: step of the first state.
  """

  def __init__(self, environ: Mapping[str, str], *, first_step: int):
    self._first_step = first_step
    self._file: Optional[int] = None
    if path := environ.get(VARIABLE):
      with contextlib.suppress(OSError):
        self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    self.step_done(first_step)

  def step_done(self, step: int) -> None:
    """Records that `step` is finished."""
    if self._file is not None:
      with contextlib.suppress(OSError):
        os.pwrite(self._file, _FORMAT.pack(self._first_step, step), 0)


def read_progress(path: pathlib.Path) -> Optional[Progress]:
  """Returns the numbers in a file; None before the process has its first state."""
  try:
    data = path.read_bytes()
    return None if data == _UNKNOWN else Progress(*_FORMAT.unpack(data))
  except (OSError, struct.error):
    return None


def write_host_counts(environ: Mapping[str, str], counts: Iterable[int]) -> None:
  """Reports on how many hosts this run could continue; a file that cannot be written is ignored."""
  if path := environ.get(HOST_COUNTS_VARIABLE):
    with contextlib.suppress(OSError):
      _overwrite(path, ' '.join(map(str, counts)).encode())


def read_host_counts(path: pathlib.Path) -> tuple[int, ...]:
  """Returns the numbers of `write_host_counts`; () if there are none yet."""
  try:
    return tuple(map(int, path.read_text().split()))
  except (OSError, ValueError):
    return ()
