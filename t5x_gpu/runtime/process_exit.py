"""How a process leaves. Imports no jax, so that every entry point can ask.

A process of several that raises must not leave the usual way: JAX's exit handler would wait for the
others, minutes long, while they wait in a collective for this one, and its exit code would be lost.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

MAIN_PROCESS_SECONDS = 2
CLEANUP_SECONDS = 5  # a file system that does not answer must not keep the process from leaving

_others: dict[str, int] = {}
_left_behind = threading.Event()
_cleanups: list[Callable[[], object]] = []


def joined(process_index: int, *, process_count: int) -> None:
  """Notes that other processes now count on this one."""
  _others.update(index=process_index, count=process_count)


def label() -> str:
  """Returns '[2/4] ' for process 2 of 4, '' for a single process."""
  return f'[{_others["index"]}/{_others["count"]}] ' if _others.get('count', 1) > 1 else ''


def abandon_threads() -> None:
  """Notes that threads of this process may wait for what never comes: a failure leaves them."""
  _left_behind.set()


def before_exit(cleanup: Callable[[], object]) -> None:
  """Calls `cleanup` before this process exits, with or without Python's exit handlers."""
  _cleanups.append(cleanup)
  atexit.register(cleanup)


def cancel_before_exit(cleanup: Callable[[], object]) -> None:
  """Takes back `before_exit`."""
  _cleanups.remove(cleanup)
  atexit.unregister(cleanup)


def leave_at_once(code: int) -> NoReturn:
  """Exits without Python's exit handlers, from any thread. The cleanups of `before_exit` run, for
  at most `CLEANUP_SECONDS`."""

  def clean_up() -> None:
    for cleanup in reversed(_cleanups.copy()):
      with contextlib.suppress(Exception):
        cleanup()

  thread = threading.Thread(target=clean_up, daemon=True)
  thread.start()
  thread.join(CLEANUP_SECONDS)
  os._exit(code)


def leave(code: int, *, failed: bool) -> NoReturn:
  """Exits with `code`; at once, without exit handlers, if this process of several has `failed`.

  So does a single one whose threads have been abandoned: Python would wait for some, and abort
  (`terminate called`) because of those that are inside TensorStore.

  Or if it leaves with a code: srun sends SIGTERM to the others as soon as the first one has, and
  JAX, which swallows it, lets go of it in its exit handler. That process would end with 143.
  """
  if label() and (failed or code) or failed and _left_behind.is_set():
    sys.stdout.flush()
    sys.stderr.flush()
    if label() and _others['index'] == 0:
      # JAX aborts the others when process 0 is gone: time to say what is wrong with themselves.
      time.sleep(MAIN_PROCESS_SECONDS)
    leave_at_once(code)
  sys.exit(code)


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
  """Within, SIGTERM ends the process as an exception does: nothing half-written stays."""

  def leave_now(number: int, frame: Any) -> NoReturn:
    del frame
    raise SystemExit(128 + number)

  before = signal.signal(signal.SIGTERM, leave_now)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, before)
