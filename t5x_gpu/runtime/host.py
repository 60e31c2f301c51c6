"""Facts that Linux reports about this host and process, and installed versions."""

import importlib.metadata
import os
import pathlib
import time
from collections.abc import Iterable
from typing import Optional

ROOT = pathlib.Path('/')
_MOST_AGE_SECONDS = 24 * 3600  # above it, the kernel's clocks are not comparable (containers)
_is_command = False


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


def this_is_a_command() -> None:
  """Records that this whole process, including its imports, serves one command."""
  global _is_command
  _is_command = True


def seconds_since_start() -> float:
  """Returns the age of this process; 0 if unknown, or if it also does other work (a notebook)."""
  if not _is_command:
    return 0.0
  try:
    fields = read(pathlib.Path('/proc/self/stat')).rpartition(')')[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf('SC_CLK_TCK')
  except (OSError, ValueError, IndexError, AttributeError):  # not Linux
    return 0.0
  return age if 0 <= age < _MOST_AGE_SECONDS else 0.0


def versions(packages: Iterable[str]) -> dict[str, str]:
  """Returns package -> version of the installed `packages`."""
  found = {}
  for package in packages:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found
