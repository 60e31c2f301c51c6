"""One log format for all libraries, without log lines that are irrelevant to users.

    quiet_environment()                       # before importing jax, whose C++ reads it once
    setup(jax.process_index(), process_count=jax.process_count())

    11-20 14:05:21 INFO mesh: data=2 fsdp=4
    11-20 14:05:22 [3/8] WARNING this host is slow

Lines on a terminal have no time. T5X_GPU_VERBOSE=1 shows the lines of all libraries; upstream T5X
writes 947 lines for 30 steps.
"""

import functools
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Optional, TextIO

from absl import logging as absl_logging

from t5x_gpu.terminal.printable import printable

# Loggers that set their own level, so the root's level does not apply.
_THIRD_PARTY = (
  'absl',
  'etils',
  'flax',
  'jax',
  'optax',
  'orbax',
  'seqio',
  'tensorboardX',
  'tensorflow',
  'tensorflow_datasets',
  'urllib3',
)
_Hook = Callable[['sys.UnraisableHookArgs'], None]  # sys.unraisablehook
_OURS = ('t5x_gpu', '__main__')


def is_verbose() -> bool:
  """Returns whether T5X_GPU_VERBOSE turns on the log lines of all libraries."""
  return os.environ.get('T5X_GPU_VERBOSE', '') not in ('', '0')


def stamp(stream: TextIO, *, seconds: Optional[float] = None) -> str:
  """Returns `11-20 14:05:21 `, the start of a line in a file; '' for a terminal.

  Args:
    stream: stream of the line.
    seconds: seconds since 1970; None for now.
  """
  if stream.isatty():
    return ''
  return time.strftime('%m-%d %H:%M:%S ', time.localtime(seconds))


def quiet_environment() -> None:
  """Sets environment variables that C++ libraries read when they load, unless the user set them.

  Level 1 keeps XLA's warnings and errors (out of memory, failed rematerialization). jax would set
  the same level, but not if TensorFlow is imported first.
  """
  if is_verbose():
    return
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '1')
  os.environ.setdefault('GRPC_VERBOSITY', 'ERROR')  # "fork() ..." lines of jax.distributed


class _Formatter(logging.Formatter):
  """`11-20 14:05:21 [3/8] WARNING message`; Python warnings without the source line."""

  def __init__(self, process_index: int, process_count: int):
    super().__init__()
    self._process = f'[{process_index}/{process_count}] ' if process_count > 1 else ''

  def format(self, record: logging.LogRecord) -> str:
    message = record.getMessage()
    if record.name == 'py.warnings':  # "file:line: Category: text\n  source\n"
      lines = message.rstrip('\n').split('\n')
      message = '\n'.join(lines[:-1] if len(lines) > 1 and lines[-1][:2] == '  ' else lines)
    if record.exc_info:
      message += '\n' + self.formatException(record.exc_info)
    if record.stack_info:
      message += '\n' + self.formatStack(record.stack_info)
    moment = stamp(sys.stderr, seconds=record.created)
    return f'{moment}{self._process}{record.levelname} {printable(message)}'


class _FirstOfEachWarning(logging.Filter):
  """Shows each Python warning once.

  Python's own filter forgets its warnings whenever a library enters `warnings.catch_warnings`.
  """

  def __init__(self):
    super().__init__()
    self._seen: set[str] = set()

  def filter(self, record: logging.LogRecord) -> bool:
    if record.name != 'py.warnings':
      return True
    message = record.getMessage()
    if message in self._seen:
      return False
    self._seen.add(message)
    return True


def _drop_known(record: logging.LogRecord) -> bool:
  """Drops two kinds of Orbax's records that repeat what the run itself reports.

  These are warnings about a stop, one per thread, and stacks of a failed save, one per layer of
  Orbax.
  """
  is_stack = record.exc_info and '/orbax/checkpoint/' in record.pathname
  return not is_stack and 'Reached preemption sync point' not in str(record.msg)


def _unless_abandoned(unraisable: 'sys.UnraisableHookArgs', *, hook: _Hook) -> None:
  """Calls `hook`, but not for the other writes of a save that has failed.

  Orbax closes its event loop at the first write that fails, and does not wait for the other writes.
  They report to the closed loop when they end, at any time.
  """
  if str(unraisable.exc_value) != 'Event loop is closed':
    hook(unraisable)


class _StderrHandler(logging.StreamHandler):
  """Writes to the current `sys.stderr`, which the live progress line replaces."""

  def __init__(self):
    logging.Handler.__init__(self)

  @property
  def stream(self) -> TextIO:
    return sys.stderr


def setup(process_index: int = 0, *, process_count: int = 1) -> None:
  """Sends all logging and Python warnings to stderr in our format. May be called repeatedly.

  Args:
    process_index: index of this process. Only process 0 logs INFO; all processes log warnings.
    process_count: number of processes. With several processes, each line names its process.
  """
  verbose = is_verbose()
  # absl first: its first message would add another handler to the root logger.
  absl_logging.use_python_logging(quiet=True)
  absl_logging.set_verbosity(absl_logging.INFO if verbose else absl_logging.WARNING)
  root = logging.getLogger()
  for handler in list(root.handlers):
    # Only handlers that print: other handlers of a test or notebook stay.
    if isinstance(handler, (_StderrHandler, absl_logging.ABSLHandler)) or (
      type(handler) is logging.StreamHandler
    ):
      root.removeHandler(handler)
  handler = _StderrHandler()
  handler.setFormatter(_Formatter(process_index, process_count))
  if not verbose:
    handler.addFilter(_FirstOfEachWarning())
    handler.addFilter(_drop_known)
    if getattr(sys.unraisablehook, 'func', None) is not _unless_abandoned:
      sys.unraisablehook = functools.partial(_unless_abandoned, hook=sys.unraisablehook)
  root.addHandler(handler)

  root.setLevel(logging.INFO if verbose else logging.WARNING)
  for name in _THIRD_PARTY:
    logging.getLogger(name).setLevel(logging.NOTSET if verbose else logging.WARNING)
  for name in _OURS:
    logging.getLogger(name).setLevel(
      logging.INFO if verbose or process_index == 0 else logging.WARNING
    )
  logging.captureWarnings(True)
