"""Two processes that each read their rows of a prepared mixture train as one that reads all."""

import os
import subprocess
import sys

import pytest

from tests.helpers_prepared import prepare_here
from tests.helpers_train import DEADLINE_SECONDS, REPOSITORY, Project
from tests.helpers_xla import xla_flags

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.tf]


def test_two_processes_on_prepared_rows_have_the_losses_of_one(tmp_path):
  rows = tmp_path / 'rows'
  prepare_here('mixed', rows, num_parts=1)
  macros = {
    'DATA_MODULE': 't5x_gpu.data.seqio_batches',
    'TRAIN_STEPS': 6,
    'SAVE_PERIOD': 3,
    'MIXTURE_OR_TASK_NAME': f'prepared:{rows}',
    'train_eval/DatasetConfig.split': 'train',
  }
  alone = Project(tmp_path)
  assert alone.run(num_devices=2, **macros).code == 0
  together = tmp_path / 'together'
  environment = {**os.environ, 'XLA_FLAGS': xla_flags()}
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      't5x_gpu.launch',
      '--nproc',
      '2',
      '--no_gpu',
      '--',
      *alone.argv(**macros, MODEL_DIR=together),
    ],
    cwd=tmp_path,
    env={**environment, 'PYTHONPATH': str(REPOSITORY)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=DEADLINE_SECONDS,
  )
  assert done.returncode == 0, done.stdout
  for key in ('train/loss', 'eval/loss'):
    one, two = alone.metrics(key), alone.metrics(key, model_dir=together)
    assert one.keys() == two.keys() and one
    assert list(two.values()) == pytest.approx(list(one.values()), rel=1e-5)
