"""Ctrl-C and SIGTERM as a request to stop after the step under way, not an exception inside it."""

import os
import signal
from types import FrameType
from typing import Any, Optional, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
  """Remembers the first stop signal; a second one interrupts at once.

      with StopRequest() as stop:
        for step in ...:
          ...
          if stop.signal: save and leave
  """

  def __init__(self) -> None:
    self.signal: Optional[signal.Signals] = None
    self._previous: dict[signal.Signals, Any] = {}

  def __enter__(self) -> Self:
    for number in SIGNALS:
      self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *exc_info: Any) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  @property
  def exit_code(self) -> int:
    """128 + signal number, as shells report it; 0 without a request."""
    return 0 if self.signal is None else 128 + self.signal

  def _handle(self, number: int, frame: Optional[FrameType]) -> None:
    if self.signal is not None:
      raise KeyboardInterrupt
    self.signal = signal.Signals(number)
    # Not print(): a handler may run inside a print of the main thread.
    os.write(2, f'\n{self.signal.name}: finishing this step, then saving and leaving. '
                'Once more to leave at once.\n'.encode())
