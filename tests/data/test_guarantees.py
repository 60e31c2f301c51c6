"""What a run prints about the order of its data."""

import pytest

from t5x_gpu.data.same_data import STREAMING, data_line
from tests.helpers_train import Project

STREAM = {'guarantee': STREAMING, 'source of a': {'files': 3, 'bytes': 9}, 'seed': 0}


def test_one_process_logs_the_guarantees_without_a_warning():
  assert data_line(STREAM, process_count=1) == f'data: {STREAMING}'
  assert data_line({'task': 'of a user'}, process_count=2) == ''
  assert 'WARNING' not in data_line({'guarantee': 'prepared: ...'}, process_count=8)


def test_processes_that_all_read_everything_are_warned_with_the_remedy():
  line = data_line(STREAM, process_count=2)
  assert 'WARNING: each of the 2 processes reads' in line and 't5x_gpu.prepare' in line
  assert 'file(s)' not in line
  few = data_line({**STREAM, 'source of b': {'files': 20}}, process_count=4)
  assert 'in 3 file(s) for 4 processes' in few


@pytest.mark.slow
def test_a_dry_run_and_a_run_say_it(tmp_path):
  project = Project(tmp_path)
  for flags in (('--dry_run',), ()):
    result = project.run(*flags, TRAIN_STEPS=2)
    assert result.code == 0, result.err
    assert 'data: random ids; the global batch at step t depends on' in result.out
