"""Imports TensorFlow and SeqIO quietly, and does nothing else: the fork server imports this.

Measured with TensorFlow 2.21: the import starts no thread and does not load CUDA, and processes
forked after it run TensorFlow and JAX. `tf_runtime`, which hides the GPUs, loads CUDA.
"""

import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Iterator

from t5x_gpu.terminal.logging_setup import is_verbose

_LEVEL = 'TF_CPP_MIN_LOG_LEVEL'


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
  """Hides TF's startup messages ("failed call to cuInit" and the like) from the terminal.

  jaxlib reads the same log level, so the level is set only during the import. TF 2.21 also logs
  through absl before absl is initialized, regardless of the level: stderr is captured during the
  import, then passed on without its informational lines.
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


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
  """Turns the garbage collector off; later collections skip all objects that exist afterwards.

  The import creates half a million objects, which stay. Visiting them again and again took 1.4 of
  the 12 CPU seconds until the demo's first step.
  """
  enabled = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    gc.freeze()
    if enabled:
      gc.enable()


with _without_chatter(), _without_collections():
  import seqio
  import tensorflow as tf

__all__ = ['seqio', 'tf']
