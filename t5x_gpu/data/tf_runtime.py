"""TensorFlow and SeqIO, imported the only way they may be: quiet, and without a GPU in sight.

Everything in data/ that needs them takes them from here:

    from t5x_gpu.data.tf_runtime import seqio, tf
"""

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator

from t5x_gpu.errors import DataError
from t5x_gpu.terminal.logging_setup import is_verbose

_LEVEL = 'TF_CPP_MIN_LOG_LEVEL'


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
  """Keeps TF's start from the terminal: "failed call to cuInit" and the like, meant for nobody.

  Two measures. jaxlib reads the same log level, so TF's is set for the import alone. And TF 2.21
  logs through absl before absl is initialised, which no level stops: what C++ writes to stderr
  meanwhile is held back, then passed on without its informational lines.
  """
  if is_verbose():
    yield
    return
  level = os.environ.get(_LEVEL)
  os.environ[_LEVEL] = '3'
  with tempfile.TemporaryFile() as held:
    sys.stderr.flush()
    stderr = os.dup(2)
    os.dup2(held.fileno(), 2)
    try:
      yield
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)
      if level is None:
        del os.environ[_LEVEL]
      else:
        os.environ[_LEVEL] = level
      held.seek(0)
      for line in held.read().decode(errors='replace').splitlines():
        if not line.startswith(('I0000 ', 'WARNING: All log messages before absl')):
          print(line, file=sys.stderr)


with _without_chatter():
  import seqio
  import tensorflow as tf

# "Using an uncached ... is not recommended", feature shapes, in-memory caching: not for our users.
if not is_verbose():
  logging.getLogger('absl').setLevel(logging.ERROR)

try:
  # TF would otherwise take the memory of every GPU that JAX is about to use.
  tf.config.set_visible_devices([], 'GPU')
except RuntimeError as e:
  raise DataError(
    'TensorFlow had already taken hold of the GPUs when the data was opened: some module that '
    'was imported first ran a TensorFlow operation.',
    fix="Move that work out of the module's top level, or import t5x_gpu.data.tf_runtime before "
    'it.',
    parameters=('DatasetConfig.mixture_or_task_module',),
  ) from e

__all__ = ['seqio', 'tf']
