"""TensorFlow's and SeqIO's chatter is hidden; what Tokamax logs through the same logger is not."""

import logging
import subprocess
import sys

import pytest

from t5x_gpu.data import tf_runtime
from tests.helpers_train import REPOSITORY

IMPORT = """
import gc
from t5x_gpu.terminal import logging_setup
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info))
from t5x_gpu.data import tf_import
print(len(collections) < 10, gc.isenabled(), gc.get_freeze_count() > 100_000)
"""


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


@pytest.mark.tf
def test_the_import_runs_hardly_a_collection_and_later_ones_skip_its_objects():
  command = [sys.executable, '-c', IMPORT]
  done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
  assert done.stdout.split() == ['True'] * 3, done.stdout + done.stderr
