"""Runs before a command imports: Ctrl-C prints one line and exits with 130; opens closed streams.

Imports take seconds, and a KeyboardInterrupt inside them ends in a traceback, or in an abort from a
C extension. This module runs before all of them, so it imports almost nothing. It also turns the
garbage collector off until `cli.run_main`: what imports create stays.
"""

import gc
import os
import signal
import sys

_replaced = []  # handlers of Ctrl-C


def before_imports() -> None:
  """Prepares for the imports of `python -m t5x_gpu...`; otherwise does nothing."""
  if sys.argv[:1] == ['-m']:  # while Python looks for the module, whose name precedes its flags
    name = sys.orig_argv[-len(sys.argv)].removeprefix('-m')
    if name.partition('.')[0] == 't5x_gpu':
      open_closed_streams()
      leave()
      gc.disable()


def open_closed_streams() -> None:
  """Opens /dev/null for each standard stream that was closed, for example by `>&-`.

  Otherwise the next file to be opened would get the stream's descriptor, and a library's message on
  standard error would end up inside a checkpoint.
  """
  for descriptor in (0, 1, 2):
    try:
      os.fstat(descriptor)
    except OSError:
      os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free descriptor


def leave() -> None:
  """Makes Ctrl-C exit with 130 and one line, until `raise_again`."""
  handler = signal.getsignal(signal.SIGINT)
  if callable(handler) and handler is not _leave_now:  # nohup, for example, ignores SIGINT
    _replaced.append(handler)
    signal.signal(signal.SIGINT, _leave_now)


def raise_again() -> None:
  """Restores the Ctrl-C handler that `leave` replaced."""
  if signal.getsignal(signal.SIGINT) is _leave_now:
    signal.signal(signal.SIGINT, _replaced.pop())


def _leave_now(number: int, frame: object) -> None:
  del frame
  try:
    os.write(2, b'Interrupted.\n')
  finally:
    os._exit(128 + number)
