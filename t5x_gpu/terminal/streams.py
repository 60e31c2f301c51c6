"""Makes standard output and error safe: their failures cannot end a command.

With a full disk behind `> log`, a closed pipe (`| head`, a `tee` that died), or a terminal that is
gone or stalls, Python raises from `print`, exits with 120, or waits forever. A run must not lose
its steps to such a failure. After `outlive`, text that a stream does not accept goes to
`MODEL_DIR/terminal.log` once `keep_in` has named the folder, and the run continues.
"""

import contextlib
import errno
import io
import math
import os
import pathlib
import select
import signal
import sys
import threading
import time
from typing import Any, Optional

TERMINAL_LOG = 'terminal.log'
STALL_SECONDS = 10.0  # `| less` and Ctrl-S stop a stream without an error
_HELD_BYTES = 1 << 20  # kept in memory until the folder is known, or while its disk is full
_NAMES = {1: 'Standard output', 2: 'Standard error'}


class _Kept:
  """Text that a stream did not accept: in a file, or in memory until there is a file."""

  def __init__(self) -> None:
    self._path: Optional[pathlib.Path] = None
    self._held = b''
    self._lock = threading.RLock()  # a signal handler may interrupt the owner of the lock

  def add(self, text: bytes) -> None:
    with self._lock:
      self._held = (self._held + text)[-_HELD_BYTES:]
      self._write()

  def keep_in(self, path: Optional[pathlib.Path]) -> None:
    with self._lock:
      self._path = path
      self._write()

  def _write(self) -> None:
    if self._path is None or not self._held:
      return
    with contextlib.suppress(OSError), open(self._path, 'ab', buffering=0) as file:
      self._held = self._held[file.write(self._held) :]


_kept = _Kept()


class Stream(io.FileIO):
  """The descriptor of standard output or error.

  Args:
    descriptor: 1 or 2.
    stall_seconds: the stream counts as lost after its reader has stalled for this long.
    Attributes:
    outlives: whether text that cannot be written is kept instead of raising OSError.
    failure: why the last write failed; None if it succeeded.
  """

  def __init__(self, descriptor: int, *, stall_seconds: float = STALL_SECONDS):
    super().__init__(descriptor, 'wb', closefd=False)
    self.outlives = False
    self.failure: Optional[OSError] = None
    self.stall_seconds = stall_seconds

  def write(self, data: Any) -> int:
    # A pipe that is ready accepts PIPE_BUF bytes without blocking, but possibly no further bytes.
    piece = bytes(memoryview(data)[: select.PIPE_BUF])
    try:
      self._wait()
      written = super().write(piece)
      if written is None:  # another program has made the terminal non-blocking
        raise BlockingIOError('its buffer is full')
    except OSError as e:
      if not self.outlives:
        self.failure = e
        raise
      first, self.failure = self.failure is None, e
      if first:
        self._announce(e)
      _kept.add(piece)
      return len(piece)
    self.failure = None
    return written

  def _wait(self) -> None:
    # A signal handler or another thread may write concurrently, and a poll object refuses that.
    poll = select.poll()
    poll.register(self.fileno(), select.POLLOUT)
    stall_seconds = self.stall_seconds if self.outlives else math.inf
    end = time.monotonic() + (0 if self.failure else stall_seconds)
    # A handler whose signal comes just before a poll runs after it, so no poll takes long.
    while not poll.poll(1000 * max(0, min(1, end - time.monotonic()))):
      if time.monotonic() >= end:
        raise TimeoutError(f'its reader has read nothing for {stall_seconds:.0f} s')

  def _announce(self, error: OSError) -> None:
    text = (
      f'{time.strftime("%m-%d %H:%M:%S")} WARNING {_NAMES[self.fileno()]} cannot be written: '
      f'{error.strerror or error}. Continuing without it.\n'
    ).encode()
    _kept.add(text)
    other = _streams.get(3 - self.fileno())
    if other is not None and other.outlives and other.failure is None:
      other.write(text)


_streams: dict[int, Stream] = {}


def install() -> None:
  """Replaces `sys.stdout` and `sys.stderr` of a command; drops stderr text that cannot be written.

  Does not replace a stream that the caller has redirected, as tests and notebooks do.
  """
  for descriptor, name in ((1, 'stdout'), (2, 'stderr')):
    old = getattr(sys, name)
    if old is not getattr(sys, f'__{name}__') or descriptor in _streams:
      continue
    if old is not None:
      with contextlib.suppress(OSError):
        old.flush()
    stream = _streams[descriptor] = Stream(descriptor)
    text = io.TextIOWrapper(
      io.BufferedWriter(stream),
      encoding=getattr(old, 'encoding', 'utf-8'),
      errors='backslashreplace',  # some terminals cannot show every letter
      line_buffering=getattr(old, 'line_buffering', False),
      write_through=getattr(old, 'write_through', False),
    )
    setattr(sys, name, text)
  if 2 in _streams:
    _streams[2].outlives = True


def outlive(*, stall_seconds: float = STALL_SECONDS) -> None:
  """Makes this command continue if standard output fails; its text is then kept or dropped.

  Args:
    stall_seconds: how long a write may wait for a reader that stalls.
  """
  # As Python does at its start. With the system's default, which modules for `| head` restore, a
  # write without a reader ends the process.
  signal.signal(signal.SIGPIPE, signal.SIG_IGN)
  for stream in _streams.values():
    stream.stall_seconds = stall_seconds
  if 1 in _streams:
    _streams[1].outlives = True


def keep_in(folder: Optional[str | os.PathLike], *, process_index: int = 0) -> None:
  """Appends text that a stream does not accept to `terminal.log` in this folder.

  Args:
    folder: MODEL_DIR; None keeps the text in memory.
    process_index: index of this process; processes other than 0 write `terminal_INDEX.log`.
  """
  name = TERMINAL_LOG if process_index == 0 else f'terminal_{process_index}.log'
  _kept.keep_in(None if folder is None else pathlib.Path(folder) / name)


def lost_output() -> Optional[OSError]:
  """Returns why standard output, the result of this command, could not be written; or None."""
  stream = _streams.get(1)
  return stream.failure if stream is not None and not stream.outlives else None


def stdout_is_lost() -> bool:
  """Returns whether the last write to standard output failed permanently: the reader is gone."""
  failure = _streams[1].failure if 1 in _streams else None
  return failure is not None and failure.errno in (errno.EPIPE, errno.EBADF, errno.EIO)


def wait_for_stdout() -> None:
  """Waits, without a time limit, until standard output accepts text or fails."""
  if 1 in _streams:
    poll = select.poll()
    poll.register(_streams[1].fileno(), select.POLLOUT)
    poll.poll()


def write_stderr(text: str) -> None:
  """Writes to standard error without Python's buffers and locks, and never raises.

  For signal handlers, which may interrupt a `print`, and for threads that end the process.
  """
  data = text.encode(errors='backslashreplace')
  with contextlib.suppress(OSError):
    write = _streams[2].write if 2 in _streams else lambda piece: os.write(2, piece)
    while data:
      data = data[write(data) :]
