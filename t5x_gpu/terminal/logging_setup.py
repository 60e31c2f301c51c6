"""One log format, and silence from libraries that have nothing to say to whoever trains a model.

    quiet_environment()                       # before jax is imported: its C++ reads it once
    setup(jax.process_index(), process_count=jax.process_count())

    11-20 14:05:21 INFO mesh: data=2 fsdp=4
    11-20 14:05:22 [3/8] WARNING this host is slow

On a terminal lines have no time.

Upstream T5X writes 947 lines for 30 steps. T5X_GPU_VERBOSE=1 brings all of it back.

Whether the log lines of all libraries are wanted.
"""

import logging
import os
import sys
import time
from typing import Optional, TextIO

from absl import logging as absl_logging


def is_verbose() -> bool:
  """Returns whether T5X_GPU_VERBOSE asks for the log lines of all libraries."""
  return os.environ.get('T5X_GPU_VERBOSE', '') not in ('', '0')


# Loggers that set a level of their own somewhere, so that the root's would not reach them.
_THIRD_PARTY = (
  'absl',
  'etils',
  'flax',
  'h5py',
  'jax',
  'matplotlib',
  'optax',
  'orbax',
  'seqio',
  'tensorboardX',
  'tensorflow',
  'tensorflow_datasets',
  'urllib3',
)
_OURS = ('t5x_gpu', '__main__')


def stamp(stream: TextIO, *, seconds: Optional[float] = None) -> str:
  """Returns `11-20 14:05:21 `, what a line in a file begins with; '' for a terminal.

  Args:
    stream: where the line goes.
    seconds: since 1970; None for now.
  """
  if stream.isatty():
    return ''
  return time.strftime('%m-%d %H:%M:%S ', time.localtime(seconds))


def quiet_environment() -> None:
  """Sets what C++ libraries read when they load. What the user has set stays.

  Level 1 leaves XLA's warnings and errors (out of memory, failed rematerialisation), which matter
  to the run. jax would set the same, but TensorFlow, were it imported first, would not.
  """
  if is_verbose():
    return
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '1')
  os.environ.setdefault('GRPC_VERBOSITY', 'ERROR')  # "fork() ..." lines of jax.distributed


class _Formatter(logging.Formatter):
  """`11-20 14:05:21 [3/8] WARNING message`; a Python warning without its line of source."""

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
    return f'{moment}{self._process}{record.levelname} {message}'


class _FirstOfEachWarning(logging.Filter):
  """Lets a Python warning through once: Python's own memory of them is lost whenever any library
  enters `warnings.catch_warnings`."""

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
  """Orbax warns once per process and thread of a stop that the run itself has announced."""
  return 'Reached preemption sync point' not in str(record.msg)


class _StderrHandler(logging.StreamHandler):
  """Writes to the `sys.stderr` of the moment, which the live progress line replaces by its own."""

  def __init__(self):
    logging.Handler.__init__(self)

  @property
  def stream(self) -> TextIO:
    return sys.stderr


def setup(process_index: int = 0, *, process_count: int = 1) -> None:
  """Sends all logging and Python warnings to stderr in our format. May be called again.

  Args:
    process_index: of this process. INFO comes from process 0 alone, or every line would come once
      per GPU; warnings come from all, with their process.
    process_count: of the run; with one process, lines do not name it.
  """
  verbose = is_verbose()
  # absl first: it would put a handler of its own on the root at its first message.
  absl_logging.use_python_logging(quiet=True)
  absl_logging.set_verbosity(absl_logging.INFO if verbose else absl_logging.WARNING)
  root = logging.getLogger()
  for handler in list(root.handlers):
    # Only handlers that print: a test's or a notebook's own handlers stay.
    if isinstance(handler, (_StderrHandler, absl_logging.ABSLHandler)) or (
      type(handler) is logging.StreamHandler
    ):
      root.removeHandler(handler)
  handler = _StderrHandler()
  handler.setFormatter(_Formatter(process_index, process_count))
  if not verbose:
    handler.addFilter(_FirstOfEachWarning())
    handler.addFilter(_drop_known)
  root.addHandler(handler)

  root.setLevel(logging.INFO if verbose else logging.WARNING)
  for name in _THIRD_PARTY:
    logging.getLogger(name).setLevel(logging.NOTSET if verbose else logging.WARNING)
  for name in _OURS:
    logging.getLogger(name).setLevel(
      logging.INFO if verbose or process_index == 0 else logging.WARNING
    )
  logging.captureWarnings(True)
