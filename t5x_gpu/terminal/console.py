"""What commands print to stdout: lines, progress bars with a speed (`Console`), and values as text:
times, sizes, counts and aligned tables.
"""

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Optional, TextIO

from t5x_gpu.terminal.flag_types import UNITS
from t5x_gpu.terminal.logging_setup import stamp
from t5x_gpu.terminal.printable import printable
from t5x_gpu.terminal.progress import bar


class Console:
  """Prints lines and progress bars to `stream`, standard output by default.

  `on_progress` is called whenever a bar advances.
  """

  def __init__(
    self, stream: Optional[TextIO] = None, *, on_progress: Callable[[], object] = lambda: None
  ):
    self._stream, self._on_progress = stream, on_progress

  def say(self, text: str) -> None:
    """Prints a line."""
    stream = self._stream or sys.stdout
    print(f'{stamp(stream)}{printable(text)}', file=stream, flush=True)

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
    with bar(title, num_bytes, done=done, bytes=True, stream=self._stream) as advance:

      def advance_both(number: int) -> None:
        advance(number)
        self._on_progress()

      yield advance_both
    seconds = max(time.monotonic() - start, 1e-9)
    moved = num_bytes - done
    self.say(
      f'{title}: {show(moved, MB=",.1f")} in {seconds:.1f} s, '
      f'{show(moved / seconds, MB=",.0f")}/s; peak memory {show(_peak_bytes(), MB=",.0f")}'
    )


def _peak_bytes() -> int:
  unit = 1 if sys.platform == 'darwin' else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def seconds(value: float) -> str:
  """Returns '54,200 s', '1.23 s', '45.6 ms' or '8.03 µs'."""
  if value >= 99.95:
    return f'{value:,.0f} s'
  for size, unit in ((1, 's'), (1e-3, 'ms')):
    if value >= 0.9995 * size:  # rounded to three digits, 999.6 would have an exponent
      return f'{value / size:.3g} {unit}'
  return f'{value * 1e6:.3g} µs'


def duration(days: float) -> str:
  """Returns '12.3 days', '4.5 hours', '6.7 minutes' or '8.9 s'."""
  if days >= 2:
    return f'{days:,.1f} days'
  minutes = days * 24 * 60
  if minutes >= 60:
    return f'{minutes / 60:.1f} hours'
  return f'{minutes:.1f} minutes' if minutes >= 1 else seconds(minutes * 60)


def show(num_bytes: float, **digits: str) -> str:
  """Returns a number of bytes with its unit: '1.50 GiB' or '3.7 MiB'.

  Args:
    num_bytes: the number.
    **digits: unit -> format of numbers in it, the largest unit first. The last one serves smaller
      numbers.
  """
  digits = digits or {'GiB': ',.2f', 'MiB': '.1f'}
  unit = next((unit for unit in digits if num_bytes >= UNITS[unit]), [*digits][-1])
  return f'{num_bytes / UNITS[unit]:{digits[unit]}} {unit}'


def mib(num_bytes: float, *, digits: int = 2) -> str:
  """Returns a number of bytes in MiB, without the unit, for columns."""
  return f'{num_bytes / UNITS["MiB"]:,.{digits}f}'


def count(number: float) -> str:
  """Returns '1.5T', '26.2B', '3.1M', '12,345' or '0.0123'."""
  for size, letter in ((1e12, 'T'), (1e9, 'B'), (1e6, 'M')):
    if number >= size:
      return f'{number / size:.3g}{letter}'
  return f'{number:,.0f}' if number >= 10 or number == int(number) else f'{number:.2g}'


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
  """Returns rows as aligned columns; the columns numbered in `right` are right-aligned."""
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  return '\n'.join(
    '  '.join(
      cell.rjust(width) if i in right else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(row, widths))
    ).rstrip()
    for row in rows
  )
