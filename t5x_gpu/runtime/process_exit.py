"""How a process exits. Does not import jax, so that every command can use it.

In a run of several processes, a process that raises must not exit the usual way: JAX's exit handler
would wait minutes for the others, which wait for this process in a collective, and its exit code
would be lost.
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
CLEANUP_SECONDS = 5  # a hung file system must not keep the process from exiting

_others: dict[str, int] = {}
_left_behind = threading.Event()
_cleanups: list[Callable[[], object]] = []


def joined(process_index: int, *, process_count: int) -> None:
  """Records that other processes now depend on this one."""
  _others.update(index=process_index, count=process_count)


def label() -> str:
  """Returns '[2/4] ' for process 2 of 4, '' for a single process."""
  return f'[{_others["index"]}/{_others["count"]}] ' if _others.get('count', 1) > 1 else ''


def abandon_threads() -> None:
  """Records that threads of this process may wait forever; a failure exits without joining them."""
  _left_behind.set()


def before_exit(cleanup: Callable[[], object]) -> None:
  """Calls `cleanup` before this process exits, with or without Python's exit handlers."""
  _cleanups.append(cleanup)
  atexit.register(cleanup)


def cancel_before_exit(cleanup: Callable[[], object]) -> None:
  """Undoes `before_exit`."""
  _cleanups.remove(cleanup)
  atexit.unregister(cleanup)


def leave_at_once(code: int) -> NoReturn:
  """Exits from any thread without Python's exit handlers, after the cleanups of `before_exit`.

  The cleanups get at most `CLEANUP_SECONDS`.
  """

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

  A single process also exits at once if it failed and its threads were abandoned: Python would wait
  for some threads, and abort (`terminate called`) because of TensorStore's threads.

  A process of several with a nonzero code exits at once, too: as soon as the first process has
  exited, srun sends SIGTERM to the others. JAX ignores SIGTERM until its exit handler restores it,
  so such a process would end with 143.
  """
  if label() and (failed or code) or failed and _left_behind.is_set():
    sys.stdout.flush()
    sys.stderr.flush()
    if label() and _others['index'] == 0:
      # JAX aborts the others once process 0 is gone: leave them time to print their errors.
      time.sleep(MAIN_PROCESS_SECONDS)
    leave_at_once(code)
  sys.exit(code)


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
  """Makes SIGTERM and SIGHUP raise inside the block, so that no half-written files stay behind.

  SIGHUP stays ignored under nohup.
  """

  def leave_now(number: int, frame: Any) -> NoReturn:
    del frame
    raise SystemExit(128 + number)

  ends = [signal.SIGTERM]
  if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    ends.append(signal.SIGHUP)
  before = {number: signal.signal(number, leave_now) for number in ends}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
