"""TensorFlow's and SeqIO's chatter is hidden; what Tokamax logs through the same logger is not."""

import logging

import pytest

from t5x_gpu.data import tf_runtime


def record(path, level):
  return logging.LogRecord('absl', level, path, 1, 'Autotuning cache miss', (), None)


@pytest.mark.tf
def test_only_warnings_of_tokamax_and_errors_pass():
  logger = logging.getLogger('absl')
  assert tf_runtime._is_news in logger.filters and logger.isEnabledFor(logging.WARNING)
  hidden = record('/lib/seqio/dataset_providers.py', logging.WARNING)
  assert not tf_runtime._is_news(hidden)
  assert tf_runtime._is_news(record('/lib/seqio/dataset_providers.py', logging.ERROR))
  assert tf_runtime._is_news(record('/lib/tokamax/_src/ops/op.py', logging.WARNING))
