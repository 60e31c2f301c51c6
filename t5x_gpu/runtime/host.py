"""What Linux reports about this host."""

import pathlib
from typing import Optional

ROOT = pathlib.Path('/')


def read(path: pathlib.Path) -> str:
  """Returns the text of a system file, '' if it cannot be read."""
  try:
    return path.read_text(encoding='utf-8', errors='replace')
  except OSError:
    return ''


def boot_id() -> str:
  """Returns an id that changes with every boot; '' where the system has none."""
  return read(pathlib.Path('/proc/sys/kernel/random/boot_id')).strip()


def available_memory() -> Optional[int]:
  """Returns how many bytes programs can still allocate; None if the system does not report it."""
  return memory_bytes('MemAvailable')


def memory_bytes(field: str, *, root: pathlib.Path = ROOT) -> Optional[int]:
  """Returns a field of /proc/meminfo, such as 'MemTotal', in bytes; None if it is missing."""
  for line in read(root / 'proc/meminfo').splitlines():
    if line.startswith(f'{field}:'):
      return int(line.split()[1]) * 1024
  return None
