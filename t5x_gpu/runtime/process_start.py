"""When this process started, if it is one of our commands."""

import os
import pathlib
import time

_MOST_SECONDS = 24 * 3600  # beyond it the clocks of the kernel cannot be compared (containers)
_is_command = False


def this_is_a_command() -> None:
  """Records that all of this process serves one command, its imports included."""
  global _is_command
  _is_command = True


def seconds_since_start() -> float:
  """Returns the age of this process; 0 if it serves other work too (a notebook), or is unknown."""
  if not _is_command:
    return 0.0
  try:
    stat = pathlib.Path('/proc/self/stat').read_text('ascii', errors='replace')
    born = int(stat.rpartition(')')[2].split()[19]) / os.sysconf('SC_CLK_TCK')
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - born
  except (OSError, ValueError, IndexError, AttributeError):  # not Linux
    return 0.0
  return age if 0 <= age < _MOST_SECONDS else 0.0
