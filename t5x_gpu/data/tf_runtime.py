"""TensorFlow and SeqIO, with all GPUs hidden from them.

Everything in data/ imports them from here:

    from t5x_gpu.data.tf_runtime import seqio, tf
"""

import logging
import os

from t5x_gpu.data.tf_import import seqio, tf
from t5x_gpu.errors import DataError
from t5x_gpu.terminal.logging_setup import is_verbose


def _is_news(record: logging.LogRecord) -> bool:
  """Hides "Using an uncached ... is not recommended", feature shapes, in-memory caching.

  Tokamax reports through the same logger which kernels have no tuned block sizes.
  """
  return record.levelno >= logging.ERROR or f'{os.sep}tokamax{os.sep}' in record.pathname


if not is_verbose():
  logging.getLogger('absl').addFilter(_is_news)

try:
  # Otherwise TF would allocate the memory of every GPU that JAX is about to use.
  tf.config.set_visible_devices([], 'GPU')
except RuntimeError as e:
  raise DataError(
    'TensorFlow had already initialized the GPUs when the data was opened: a module that was '
    'imported earlier ran a TensorFlow operation.',
    fix="Move that work out of the module's top level, or import t5x_gpu.data.tf_runtime first.",
    parameters=('DatasetConfig.mixture_or_task_module',),
  ) from e


def deterministic_options(num_threads: int) -> tf.data.Options:
  """Returns options that make a dataset yield the same examples in the same order."""
  options = tf.data.Options()
  options.deterministic = True
  # With autotune a process hung 2 to 40 s at exit in the iterator's destructor; without, 2 s.
  options.autotune.enabled = False
  options.threading.private_threadpool_size = num_threads
  options.threading.max_intra_op_parallelism = 1
  return options


__all__ = ['deterministic_options', 'seqio', 'tf']
