"""Messages of the main process; the other processes print nothing."""

import sys
from typing import Optional, TextIO

from t5x_gpu.runtime import distributed
from t5x_gpu.terminal.logging_setup import stamp


def log(text: str, *, stream: Optional[TextIO] = None) -> None:
  """Prints `text` with a time stamp, unless it is empty; to standard output by default."""
  if distributed.is_main_process() and text:
    stream = stream or sys.stdout
    print(f'{stamp(stream)}{text}', file=stream, flush=True)
