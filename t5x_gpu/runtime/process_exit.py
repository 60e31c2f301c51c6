"""How a process exits, by itself, by SIGTERM or by Ctrl-C. Without jax, so all commands can use it.

In a run of several processes, a process that raises must not exit the usual way: JAX's exit handler
would wait minutes for the others, which wait for this process in a collective, and its exit code
would be lost.
"""

import atexit
import contextlib
import functools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn, Optional, Self, Union

from t5x_gpu.terminal.streams import write_stderr

# Slurm's --signal=USR1 comes before the time limit, SIGTERM at the limit and on preemption, SIGHUP
# when the terminal or the SSH connection is gone.
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
STOP_SIGNALS = (signal.SIGINT, *PREEMPTION_SIGNALS)

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


def _from_signal(error: BaseException, number: int) -> BaseException:
  """Returns `error` for a signal handler to raise, with the number of its signal."""
  error.signal_number = number
  _raised_signals.append(number)
  return error


@contextlib.contextmanager
def ignored_signals_repeated() -> Iterator[None]:
  """Context in which a signal comes again if Python ignored the exception of its handler.

  Python ignores exceptions in callbacks of its garbage collector, which JAX has, and in `__del__`.
  """
  before = sys.unraisablehook
  sys.unraisablehook = hook = functools.partial(_repeat_signal, hook=before)
  try:
    yield
  finally:
    if sys.unraisablehook is hook:
      sys.unraisablehook = before


def _repeat_signal(
  unraisable: 'sys.UnraisableHookArgs', *, hook: Callable[['sys.UnraisableHookArgs'], object]
) -> None:
  number = getattr(unraisable.exc_value, 'signal_number', None)
  if number is None:
    hook(unraisable)
    return
  handler, num_raised = signal.getsignal(number), len(_raised_signals)

  def send() -> None:
    while True:
      time.sleep(_REPEAT_SECONDS)  # the callback returns meanwhile
      # A signal just before the main thread starts to wait does not end that wait.
      if len(_raised_signals) > num_raised or signal.getsignal(number) is not handler:
        return
      if number == signal.SIGINT:
        _repeated.release()
      signal.pthread_kill(threading.main_thread().ident, number)

  threading.Thread(target=send, name='repeated signal', daemon=True).start()


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
  """Makes SIGTERM and SIGHUP raise inside the block, so that no half-written files stay behind.

  SIGHUP stays ignored under nohup.
  """

  def leave_now(number: int, frame: Optional[FrameType]) -> NoReturn:
    del frame
    raise _from_signal(SystemExit(128 + number), number)

  ends = [signal.SIGTERM]
  if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    ends.append(signal.SIGHUP)
  before = {number: signal.signal(number, leave_now) for number in ends}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


EXIT_INTERRUPTED = 130
_HANDLER_SECONDS = 0.5  # if the program still runs by then, prints where the main thread waits
_REPEAT_SECONDS = 0.1
_OTHERS = re.compile(rf'^<frozen |{os.sep}jax|{os.sep}(threading|contextlib|thread|_base)\.py$')
_CLEANUP_SECONDS = 2.0  # for `with` blocks, after the second Ctrl-C
# What `signal.signal` takes and returns.
HandlerFunction = Callable[[int, Optional[FrameType]], object]
SignalHandler = Union[HandlerFunction, int, signal.Handlers, None]
_handled, _raised = threading.Event(), threading.Event()
_raised_signals: list[int] = []  # numbers of the signals whose handlers have raised
_repeated = threading.Semaphore(0)  # Ctrl-C that `_repeat_signal` sent, not yet read


def stops_on_interrupt(handler: HandlerFunction) -> HandlerFunction:
  """Marks a SIGINT handler: its first call asks the program to stop, a second Ctrl-C exits.

  Handlers without the mark, such as `launch`'s, decide for themselves.
  """

  def marked(number: int, frame: Optional[FrameType]) -> None:
    _handled.set()
    handler(number, frame)

  marked.stops_on_interrupt = True
  return marked


@stops_on_interrupt
def _raise(number: int, frame: Optional[FrameType]) -> None:
  del frame
  _raised.set()
  raise _from_signal(KeyboardInterrupt(), number)


class SecondInterruptLeaves:
  """Inside the block, a second Ctrl-C exits with code 130 within two seconds.

  Python runs a signal handler only when the main thread is back in Python. A main thread that waits
  for a device is inside XLA, maybe forever, so a handler alone never sees Ctrl-C. But Python's C
  code writes the number of each signal to `signal.set_wakeup_fd` at once, where a thread reads it.

  Works in the main thread only; elsewhere it does nothing. If Ctrl-C was pressed it stays active
  after the block, since Python's exit may wait for a device, too.

  Args:
    leave: called with the exit code.
    stays: whether it stays active after the block.
  """

  def __init__(self, leave: Callable[[int], object] = os._exit, *, stays: bool = True):
    self._leave, self._stays = leave, stays
    self._sockets: Optional[tuple[socket.socket, socket.socket]] = None
    self._interrupted = self._is_over = False

  def __enter__(self) -> Self:
    if threading.current_thread() is not threading.main_thread():
      return self
    self._sockets = reading, writing = socket.socketpair()
    writing.setblocking(False)
    _handled.clear()
    _raised.clear()
    self._replaced = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if self._replaced:
      signal.signal(signal.SIGINT, _raise)
    self._previous = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=self._forget)
    threading.Thread(target=self._listen, args=(reading,), name='interrupts', daemon=True).start()
    return self

  def __exit__(self, *exc_info: object) -> None:
    self._is_over = True
    if self._sockets is None or (self._interrupted and self._stays):
      return
    _handled.clear()
    if self._replaced and signal.getsignal(signal.SIGINT) is _raise:
      signal.signal(signal.SIGINT, signal.default_int_handler)
    self._forget()

  def _forget(self) -> None:
    """Stops listening. A forked process would otherwise write its signals to its parent."""
    if self._sockets is None:
      return
    (_, writing), self._sockets = self._sockets, None
    signal.set_wakeup_fd(self._previous, warn_on_full_buffer=False)
    writing.close()  # ends the thread

  def _listen(self, reading: socket.socket) -> None:
    with reading:
      try:
        self._next_interrupt(reading, None)
        self._interrupted = True
        # A thread cannot know whether the handler will run, so it waits.
        if not self._next_interrupt(reading, _HANDLER_SECONDS):
          # A handler that only sets a flag prints a message itself. An exception may wait for a
          # thread.
          if not self._is_over and (_raised.is_set() or not _handled.is_set()):
            write_stderr(
              f'\nSIGINT: stopping as soon as {_main_thread_place()} returns. '
              'Press Ctrl-C again to exit immediately.\n'
            )
          self._next_interrupt(reading, None)
        # The handler raises KeyboardInterrupt if it can run, and the process ends by itself.
        self._next_interrupt(reading, _CLEANUP_SECONDS)
      except EOFError:
        return
      write_stderr('Leaving at once.\n')
      self._leave(EXIT_INTERRUPTED)

  def _next_interrupt(self, reading: socket.socket, seconds: Optional[float]) -> bool:
    """Returns True on the next Ctrl-C, False on a timeout; raises EOFError at the end."""
    reading.settimeout(seconds)
    while True:
      try:
        number = reading.recv(1)
      except TimeoutError:
        return False
      if not number:
        raise EOFError
      handler = signal.getsignal(signal.SIGINT)
      if number[0] == signal.SIGINT and getattr(handler, 'stops_on_interrupt', False):
        if not _repeated.acquire(blocking=False):
          return True


def _main_thread_place() -> str:
  """Returns the main thread's place outside JAX and Python: 'file.py:27 (function)'."""
  frame = sys._current_frames()[threading.main_thread().ident]
  while frame.f_back is not None and _OTHERS.search(frame.f_code.co_filename):
    frame = frame.f_back
  code = frame.f_code
  return f'{os.path.basename(code.co_filename)}:{frame.f_lineno} ({code.co_name})'


@contextlib.contextmanager
def interrupts_noted() -> Iterator[Callable[[], bool]]:
  """Context in which Ctrl-C does not end the process, unless it is pressed twice.

  Yields a function that returns whether Ctrl-C was pressed since its last call. Works in the main
  thread only; elsewhere Ctrl-C keeps its meaning.
  """
  pressed: list[int] = []

  def take() -> bool:
    found = bool(pressed)
    pressed.clear()
    return found

  if threading.current_thread() is not threading.main_thread():
    yield take
    return
  note = stops_on_interrupt(lambda number, frame: pressed.append(number))
  before = signal.signal(signal.SIGINT, note)
  try:
    # A new one: a Ctrl-C in an earlier block does not count.
    with SecondInterruptLeaves(leave=leave_at_once, stays=False):
      yield take
  finally:
    signal.signal(signal.SIGINT, before)
