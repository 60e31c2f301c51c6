"""Output of commands that copy files: lines, with a timestamp in files, and progress bars."""

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator

from t5x_gpu.terminal.bars import bar
from t5x_gpu.terminal.logging_setup import stamp
from t5x_gpu.terminal.printable import printable


class Console:
  """Prints lines and progress bars to stdout."""

  def say(self, text: str) -> None:
    """Prints a line."""
    print(f'{stamp(sys.stdout)}{printable(text)}', flush=True)

  @contextlib.contextmanager
  def progress(
    self, title: str, num_bytes: int, *, done: int = 0
  ) -> Iterator[Callable[[int], None]]:
    """Shows the progress of the work inside the context, then prints its time and speed.

    Args:
      title: past participle for the bytes: 'written'.
      num_bytes: number of bytes.
      done: number of bytes done by an earlier process.
    """
    start = time.monotonic()
    with bar(title, num_bytes, done=done, bytes=True) as advance:
      yield advance
    seconds = max(time.monotonic() - start, 1e-9)
    megabytes = (num_bytes - done) / 1e6
    self.say(
      f'{title}: {megabytes:,.1f} MB in {seconds:.1f} s, {megabytes / seconds:,.0f} MB/s; '
      f'peak memory {_peak_bytes() / 1e6:,.0f} MB'
    )


def _peak_bytes() -> int:
  unit = 1 if sys.platform == 'darwin' else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
