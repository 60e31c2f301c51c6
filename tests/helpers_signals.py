"""Gives processes that tests start the default signals, however the tests were started.

`make test &` in a script, nohup and some CI runners ignore SIGINT or SIGHUP, and an ignored signal
stays ignored in every program that the tests start. A handler does not: `exec` resets it.
"""

import os
import signal
from types import FrameType
from typing import Optional

# Without SIGPIPE and SIGXFSZ: Python ignores both, and `subprocess` restores them.
SIGNALS = tuple(
  getattr(signal, f'SIG{name}') for name in ('HUP', 'INT', 'QUIT', 'TERM', 'USR1', 'USR2', 'TSTP')
)
_STILL_IGNORED = 'T5X_GPU_TESTS_IGNORE'  # for the workers of pytest-xdist, which are programs too


def start_programs_with_default_signals() -> None:
  """Replaces each ignored or blocked signal by a handler that does nothing.

  This process still survives the signal; programs that it starts do not inherit the handler.
  """
  still = os.environ.get(_STILL_IGNORED, '').split()
  ignored = [s for s in SIGNALS if signal.getsignal(s) is signal.SIG_IGN or s.name in still]
  for number in ignored:
    signal.signal(number, _do_nothing)
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, every exit code reads as 0
  signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
  os.environ[_STILL_IGNORED] = ' '.join(s.name for s in ignored)


def _do_nothing(number: int, frame: Optional[FrameType]) -> None:
  del number, frame
