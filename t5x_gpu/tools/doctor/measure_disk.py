"""Measures the disk of a folder, in a child of the doctor: an unreachable file server may hang it.

    python -m t5x_gpu.tools.doctor.measure_disk FOLDER

prints one JSON object.
"""

import json
import os
import sys
import tempfile
import time

from t5x_gpu.terminal.flag_types import MIB

_FILE_BYTES = 256 * MIB  # written and read


def measure_disk(folder: str) -> dict[str, float]:
  """Returns write and read bytes/s, seconds per small fsync, and free bytes of a folder's disk.

  Args:
    folder: if it does not exist, the closest existing folder above it is measured.
  Raises:
    OSError: the folder cannot be written to.
  """
  folder = os.path.abspath(folder)
  while not os.path.isdir(folder) and folder != os.path.dirname(folder):
    folder = os.path.dirname(folder)
  block = os.urandom(8 * MIB)
  stat = os.statvfs(folder)
  free = stat.f_bavail * stat.f_frsize
  num_blocks = max(1, min(_FILE_BYTES, free // 4) // len(block))
  with tempfile.NamedTemporaryFile(dir=folder, prefix='.t5x_gpu_doctor_') as file:
    begin = time.monotonic()
    for _ in range(num_blocks):
      file.write(block)
    file.flush()
    os.fsync(file.fileno())
    write_seconds = time.monotonic() - begin
    # Read from the disk rather than the page cache, if the file system allows it.
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    begin = time.monotonic()
    while file.read(len(block)):
      pass
    read_seconds = time.monotonic() - begin
    begin = time.monotonic()
    for _ in range(5):
      file.write(b'x' * 4096)
      file.flush()
      os.fsync(file.fileno())
    sync_seconds = (time.monotonic() - begin) / 5
  written = num_blocks * len(block)
  return {
    'write': written / write_seconds,
    'read': written / read_seconds,
    'sync_seconds': sync_seconds,
    'free': free,
  }


def main() -> None:
  """Measures the folder that the command names."""
  print(json.dumps({'disk': measure_disk(sys.argv[1])}))


if __name__ == '__main__':
  main()
