"""Progress on stdout: a live display on a terminal, an occasional line with the time elsewhere.

`bar` shows long work with an ETA. `ProgressLine` shows a run:

    step 10/100 | loss 5.912 | acc 0.121 | 12,345 tok/s | wait 0.3% | ETA 0:01:23
Only the main process prints. The terminal is always restored at the end of the run.
"""

import atexit
import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Optional, Self, TextIO, Union

import rich.console
import rich.live
import rich.progress
import rich.progress_bar
import rich.table
import rich.text

from t5x_gpu.terminal.logging_setup import stamp
from t5x_gpu.terminal.printable import printable

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


# Number of lines that stay above the live line, so that the falling loss is visible at the end.
_LINES_KEPT = 10
_MIN_BAR, _MAX_BAR = 10, 40


def format_loss(value: float) -> str:
  """Returns three decimals, or three significant digits for small values."""
  if not math.isfinite(value):
    return str(value)
  return f'{value:.3f}' if value == 0 or abs(value) >= 0.01 else f'{value:.2e}'


def format_fields(values: Mapping[str, float], *, eta_seconds: Optional[float] = None) -> list[str]:
  """Returns the parts of a progress line after the step, most important first.

  Args:
    values: metrics by name, `train/loss` or `loss`; only some names are shown.
    eta_seconds: seconds until the end of the run, if known.
  """
  short = {name.removeprefix('train/'): value for name, value in values.items()}
  show = {
    'loss': lambda v: f'loss {format_loss(v)}',
    'accuracy': lambda v: f'acc {v:.3f}',
    'tokens_per_second': lambda v: f'{v:,.0f} tok/s',
    'input_wait_fraction': lambda v: f'wait {100 * v:.1f}%',
  }
  fields = [text(short[name]) for name, text in show.items() if name in short]
  if eta_seconds is not None:
    fields.append(f'ETA {format_seconds(eta_seconds)}')
  return fields


class ProgressLine:
  """Shows the progress of a run. Use it as a context manager.

      with ProgressLine(100, first_step=0, enabled=jax.process_index() == 0) as progress:
        progress.advance(step)                           # each step; only moves the bar
        progress.update(step, metrics, eta_seconds=...)  # each log period
        progress.note('eval  step 50 | loss 2.310')      # a line that stays

  Args:
    total_steps: last step of the run.
    first_step: step at which this process starts.
    enabled: True on the main process, the only one that prints.
    stream: where to print; None for the current `sys.stdout`.
    live: whether to show a live line; None for yes on a terminal that can move its cursor.
  """

  def __init__(
    self,
    total_steps: int,
    *,
    first_step: int = 0,
    enabled: bool = True,
    stream: Optional[TextIO] = None,
    live: Optional[bool] = None,
  ):
    self._total_steps = total_steps
    self._first_step = first_step
    self._step = first_step
    self._enabled = enabled
    self._stream = sys.stdout if stream is None else stream
    # rich honors NO_COLOR, COLUMNS and TERM. With FORCE_COLOR it treats a pipe as a terminal, so
    # this class decides itself: a log file always gets plain lines.
    can_move = self._stream.isatty() and os.environ.get('TERM', '') not in ('dumb', 'unknown', '')
    self._is_live = enabled and (can_move if live is None else live)
    self._console = rich.console.Console(
      file=self._stream,
      highlight=False,
      soft_wrap=True,
      force_terminal=True if self._is_live else None,
    )
    self._live: Optional[rich.live.Live] = None
    self._fields: list[str] = []
    self._eta_end: Optional[float] = None
    self._kept = 0
    self._part: Optional[Count] = None
    self._unprinted = ''  # the last line of numbers, if it only appeared in the live line

  def __enter__(self) -> Self:
    if self._is_live:
      self._live = rich.live.Live(
        get_renderable=self._render,
        console=self._console,
        refresh_per_second=4,
        transient=True,  # the bar disappears at the end; the last numbers stay as a plain line
        # Redirect stderr only if it is the same terminal: `2> log` must stay a log.
        redirect_stdout=self._stream is sys.stdout,
        redirect_stderr=sys.stderr.isatty(),
      )
      self._live.start()
      atexit.register(self.close)  # for an exit that skips __exit__
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()

  def close(self) -> None:
    """Restores the terminal, including its cursor. May be called repeatedly."""
    live, self._live = self._live, None
    if live is not None:
      live.stop()
      atexit.unregister(self.close)
      if self._unprinted:
        self._print(self._unprinted)

  def advance(self, step: int) -> None:
    """Moves the bar to `step` (number of completed steps); prints nothing."""
    self._step = step

  def update(
    self, step: int, values: Mapping[str, float], *, eta_seconds: Optional[float] = None
  ) -> None:
    """Shows the numbers of a log period, as a plain line or in the live line.

    Args:
      step: number of completed steps.
      values: metrics by name, as for the writers.
      eta_seconds: seconds until the end, if known.
    """
    if not self._enabled:
      return
    self._step = step
    self._fields = format_fields(values)
    self._eta_end = None if eta_seconds is None else time.monotonic() + eta_seconds
    line = ' | '.join(
      [f'step {step}/{self._total_steps}', *format_fields(values, eta_seconds=eta_seconds)]
    )
    if self._live is None:
      self._print(line)
      return
    done = (step - self._first_step) / max(1, self._total_steps - self._first_step)
    if self._kept == 0 or done * _LINES_KEPT >= self._kept + 1 or step >= self._total_steps:
      self._kept = max(self._kept + 1, int(done * _LINES_KEPT))
      self._print(line)
      line = ''
    self._unprinted = line
    self._live.refresh()

  @contextlib.contextmanager
  def part(self, title: str, total: Total) -> Iterator[Advance]:
    """Shows the progress of work that the steps wait for, such as an evaluation."""
    count = Count(title, total)

    def advance(number: int) -> None:
      count.advance(number)
      if self._enabled and self._live is None and count.line_is_due():
        self._print(str(count))

    self._part = count
    try:
      yield advance
    finally:
      self._part = None

  def note(self, text: str) -> None:
    """Prints `text` as lines that stay, above the live line if any."""
    if self._enabled:
      self._print(text)

  def _print(self, line: str) -> None:
    line = printable(line)
    if self._live is not None:
      self._console.print(line, markup=False, emoji=False)
      return
    # Without rich, so that a plain line is never wrapped to 80 columns or colored.
    encoding = getattr(self._stream, 'encoding', None) or 'utf-8'
    line = stamp(self._stream) + line
    self._stream.write(line.encode(encoding, 'replace').decode(encoding) + '\n')
    self._stream.flush()

  def _render(self) -> rich.table.Table:
    """Returns the live line, with as many fields as fit into the terminal."""
    head = f'step {self._step}/{self._total_steps}'
    fields = list(self._fields)
    total, done = self._total_steps, self._step
    if self._part is not None:  # the steps wait for this work
      fields = [str(self._part)]
      total, done = self._part.total or 1, self._part.done
    elif self._eta_end is not None:
      fields.append(f'ETA {format_seconds(max(0.0, self._eta_end - time.monotonic()))}')
    width = self._console.width - 1  # some terminals wrap at the last column

    def room() -> int:
      return width - len(head) - 2 - sum(len(field) + 3 for field in fields)

    # If space is short, fields disappear in this order, then the bar. The loss stays.
    for name in ('acc', 'wait', 'tok/s', 'ETA'):
      if room() >= _MIN_BAR:
        break
      fields = [field for field in fields if name not in field]
    cells = [rich.text.Text(head, style='bold', no_wrap=True)]
    if room() >= _MIN_BAR:
      cells.append(
        rich.progress_bar.ProgressBar(
          total=max(1, total), completed=done, width=min(_MAX_BAR, room())
        )
      )
    cells.append(rich.text.Text(''.join(f' | {field}' for field in fields)[1:], no_wrap=True))
    row = rich.table.Table.grid(padding=(0, 1, 0, 0))
    row.add_row(*cells)
    return row
