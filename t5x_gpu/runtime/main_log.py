"""Messages of the main process; the other processes print nothing."""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Optional, TextIO

from t5x_gpu.runtime import distributed
from t5x_gpu.terminal.logging_setup import stamp
from t5x_gpu.terminal.printable import printable

_on_stderr = False
_silent = False


@contextlib.contextmanager
def on_stderr() -> Iterator[None]:
  """Context in which messages go to standard error, for commands whose output programs read."""
  global _on_stderr
  before, _on_stderr = _on_stderr, True
  try:
    yield
  finally:
    _on_stderr = before


@contextlib.contextmanager
def silent() -> Iterator[None]:
  """Context without messages, for programs on devices that stand in for others.

  Texts passed to `log_once` count as printed.
  """
  global _silent
  before, _silent = _silent, True
  try:
    yield
  finally:
    _silent = before


def stream_of_messages() -> TextIO:
  """Returns the stream that messages go to."""
  return sys.stderr if _on_stderr else sys.stdout


def log(text: str, *, stream: Optional[TextIO] = None) -> None:
  """Prints `text` with a time stamp, unless it is empty; `stream` is standard output by default."""
  if distributed.is_main_process() and text and not _silent:
    stream = stream or stream_of_messages()
    print(f'{stamp(stream)}{printable(text)}', file=stream, flush=True)


@functools.cache
def log_once(text: str) -> None:
  """Prints each text once per process, for choices in functions that are traced several times."""
  log(text)
