"""What Linux reports about this host."""

import pathlib
from typing import Optional


def boot_id() -> str:
  """Returns an id that changes with every boot; '' where the system has none."""
  try:
    return pathlib.Path('/proc/sys/kernel/random/boot_id').read_text('utf-8').strip()
  except OSError:
    return ''


def available_memory() -> Optional[int]:
  """Returns how many bytes programs can still allocate; None if the system does not report it."""
  try:
    for line in pathlib.Path('/proc/meminfo').read_text('ascii').splitlines():
      if line.startswith('MemAvailable:'):
        return int(line.split()[1]) * 1024
  except OSError:
    pass
  return None
