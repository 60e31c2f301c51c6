"""Shows progress of long work: a bar with an ETA on a terminal, an occasional line elsewhere."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Optional, TextIO, Union

import rich.console
import rich.progress

from t5x_gpu.terminal.logging_setup import stamp

SECONDS_BETWEEN_LINES = 30  # without a terminal
Advance = Callable[[int], None]  # takes the amount done since the last call
Total = Union[int, None, Callable[[], Optional[int]]]  # the function returns None while unknown
Show = Callable[[str, Total], AbstractContextManager[Advance]]  # (title, total) -> shows a bar


def format_seconds(seconds: float) -> str:
  """Returns `0:01:23`, or `2d 03:04:05` from a day on."""
  whole = int(round(seconds))
  days, rest = divmod(whole, 86400)
  hours, minutes, secs = rest // 3600, rest % 3600 // 60, rest % 60
  if days:
    return f'{days}d {hours:02d}:{minutes:02d}:{secs:02d}'
  return f'{hours}:{minutes:02d}:{secs:02d}'


@contextlib.contextmanager
def silent(title: str, total: Total) -> Iterator[Advance]:
  """Shows nothing."""
  del title, total
  yield lambda number: None


class Count:
  """Counts finished work and estimates the time left.

  Args:
    title: name of the work, 'infer_eval cola'.
    total: amount of work.
    done: amount done by an earlier process.
    bytes: whether the amounts are bytes, shown in MB.
    clock: returns seconds that never decrease.
  """

  def __init__(
    self,
    title: str,
    total: Total,
    *,
    done: int = 0,
    bytes: bool = False,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._title, self._total, self._clock = title, total, clock
    self._unit, self._divisor = (' MB', 10**6) if bytes else ('', 1)
    self._first = self.done = done
    self._start = self._last_line = clock()

  @property
  def total(self) -> Optional[int]:
    return self._total() if callable(self._total) else self._total

  def advance(self, number: int) -> None:
    self.done += number

  def line_is_due(self) -> bool:
    """Returns True once per SECONDS_BETWEEN_LINES."""
    if self._clock() - self._last_line < SECONDS_BETWEEN_LINES:
      return False
    self._last_line = self._clock()
    return True

  def __str__(self) -> str:
    """Returns `infer_eval cola 120/1,043 | ETA 0:00:12`."""
    total, new = self.total, self.done - self._first
    done = f'{self.done // self._divisor:,}'
    if total is None:
      return f'{self._title} {done}{self._unit}'
    eta = ''
    if new:
      left = (self._clock() - self._start) / new * max(total - self.done, 0)
      eta = f' | ETA {format_seconds(left)}'
    return f'{self._title} {done}/{total // self._divisor:,}{self._unit}{eta}'


@contextlib.contextmanager
def bar(
  title: str,
  total: Total,
  *,
  done: int = 0,
  bytes: bool = False,
  note: Callable[[], str] = str,
  stream: Optional[TextIO] = None,
  enabled: bool = True,
) -> Iterator[Advance]:
  """Shows the progress of the work inside the context; other arguments as in `Count`.

  Args:
    note: returns text to show after the progress.
    stream: where to print; None for the current `sys.stdout`.
    enabled: True on the one process that shows anything.
  """
  stream = sys.stdout if stream is None else stream
  console = rich.console.Console(file=stream)
  count = Count(title, total, done=done, bytes=bytes)
  numbers = (
    (rich.progress.DownloadColumn(), rich.progress.TransferSpeedColumn())
    if bytes
    else (rich.progress.MofNCompleteColumn(),)
  )
  with rich.progress.Progress(
    rich.progress.TextColumn('{task.description}'),
    rich.progress.BarColumn(),
    *numbers,
    rich.progress.TimeRemainingColumn(),
    rich.progress.TextColumn('{task.fields[note]}'),
    console=console,
    transient=True,
    disable=not (enabled and stream.isatty()),
  ) as shown:
    task = shown.add_task(title, total=count.total, completed=done, note='')

    def advance(number: int) -> None:
      count.advance(number)
      shown.update(task, completed=count.done, total=count.total, note=note())
      if enabled and shown.disable and count.line_is_due():
        print(f'{stamp(stream)}{count}{note()}', file=stream, flush=True)

    yield advance


class BackgroundCounts(contextlib.AbstractContextManager):
  """Counts the items of iterators in threads, for totals of bars, until the context ends."""

  def __init__(self) -> None:
    self._stop = threading.Event()
    self._threads: list[threading.Thread] = []

  def __exit__(self, *exc_info: Any) -> None:
    self._stop.set()
    for thread in self._threads:
      thread.join()

  def count(self, items: Iterable[Any]) -> Callable[[], Optional[int]]:
    """Returns a function that returns the number of `items`; None until it is known."""
    found: list[int] = []

    def run() -> None:
      number = 0
      with contextlib.suppress(Exception):  # the consumer of the items also gets the error
        for _ in items:
          number += 1
          if self._stop.is_set():
            return
        found.append(number)

    thread = threading.Thread(target=run, name='count')
    thread.start()
    self._threads.append(thread)
    return lambda: found[0] if found else None
