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

# Before the import: TF's C++ side reads it once. 3 = errors only (else "failed call to cuInit").
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')


@contextlib.contextmanager
def _without_import_chatter() -> Iterator[None]:
  """Holds back what C++ writes to stderr meanwhile, then passes on all but informational lines.

  TF 2.21 logs through absl before absl is initialised, which no environment variable stops.
  """
  if os.environ.get('T5X_GPU_VERBOSE'):
    yield
    return
  with tempfile.TemporaryFile() as held:
    sys.stderr.flush()
    stderr = os.dup(2)
    os.dup2(held.fileno(), 2)
    try:
      yield
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)
      held.seek(0)
      for line in held.read().decode(errors='replace').splitlines():
        if not line.startswith(('I0000 ', 'WARNING: All log messages before absl')):
          print(line, file=sys.stderr)


with _without_import_chatter():
  import seqio
  import tensorflow as tf

# "Using an uncached ... is not recommended", feature shapes, in-memory caching: not for our users.
if not os.environ.get('T5X_GPU_VERBOSE'):
  logging.getLogger('absl').setLevel(logging.ERROR)

try:
  # TF would otherwise take the memory of every GPU that JAX is about to use.
  tf.config.set_visible_devices([], 'GPU')
except RuntimeError as e:
  raise DataError(
      'TensorFlow had already taken hold of the GPUs when the data was opened: some module that '
      'was imported first ran a TensorFlow operation.',
      fix="Move that work out of the module's top level, or import t5x_gpu.data.tf_runtime before "
          'it.', parameters=('DatasetConfig.mixture_or_task_module',)) from e

__all__ = ['seqio', 'tf']
