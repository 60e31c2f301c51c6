"""What commands that copy files show: lines, and bars on a terminal."""

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator

import rich.console
import rich.progress


class Console:
  """Prints to a terminal or a file; see `checkpoint.conversions.Console`."""

  def __init__(self) -> None:
    self._console = rich.console.Console(highlight=False, soft_wrap=True)

  def say(self, text: str) -> None:
    """Prints a line."""
    self._console.print(text, markup=False)

  @contextlib.contextmanager
  def progress(self, title: str, num_bytes: int, *, done: int = 0
               ) -> Iterator[Callable[[int], None]]:
    """Shows how far something with so many bytes is; prints how long it took.

    Args:
      title: what has happened to the bytes at the end: 'written'.
      num_bytes: in all.
      done: of them, by an earlier process.
    """
    start = time.monotonic()
    bar = rich.progress.Progress(
        rich.progress.TextColumn('{task.description}'), rich.progress.BarColumn(),
        rich.progress.DownloadColumn(), rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(), console=self._console, transient=True,
        disable=not self._console.is_terminal)
    with bar:
      task = bar.add_task(title, total=num_bytes, completed=done)
      yield lambda n: bar.advance(task, n)
    seconds = max(time.monotonic() - start, 1e-9)
    megabytes = (num_bytes - done) / 1e6
    self.say(f'{title}: {megabytes:,.1f} MB in {seconds:.1f} s, {megabytes / seconds:,.0f} MB/s; '
             f'most memory so far {_peak_bytes() / 1e6:,.0f} MB')


def _peak_bytes() -> int:
  unit = 1 if sys.platform == 'darwin' else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
