"""A progress line with a plan's current activity and its seconds."""

import contextlib
import sys
import time
from collections.abc import Iterator

import rich.console
import rich.progress


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
  """Context that shows `what` and its seconds on a terminal; elsewhere prints it when done.

  Args:
    what: 'compiling the step for 64 x H100'.
  """
  begin = time.monotonic()
  console = rich.console.Console(stderr=True)
  columns = (
    rich.progress.SpinnerColumn(),
    rich.progress.TextColumn('{task.description}'),
    rich.progress.TimeElapsedColumn(),
  )
  with rich.progress.Progress(
    *columns, console=console, transient=True, disable=not console.is_terminal
  ) as bar:
    bar.add_task(what, total=None)
    yield
  print(f'{what}: {time.monotonic() - begin:.0f} s', file=sys.stderr, flush=True)
