"""A file that cannot be opened is not a damaged file: a run stops, and moves nothing."""

import errno
import json
import os
import subprocess
import sys

import pytest

from tests.checkpoint.refused_files import OF_A_RUN
from tests.helpers_disk import refusing_library
from tests.helpers_train import DEADLINE_SECONDS, REPOSITORY
from tests.helpers_xla import xla_flags


@pytest.fixture(scope='module')
def found(tmp_path_factory) -> dict:
  """What the processes of refused_files.py found."""
  folder = tmp_path_factory.mktemp('refused')
  environment = {
    **os.environ,
    'LD_PRELOAD': refusing_library(folder),
    'PYTHONPATH': str(REPOSITORY),
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': xla_flags(1),
  }
  done = subprocess.run(
    [sys.executable, '-m', 'tests.checkpoint.refused_files', str(folder)],
    cwd=REPOSITORY,
    env=environment,
    capture_output=True,
    text=True,
    timeout=DEADLINE_SECONDS,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize('part', OF_A_RUN)
def test_a_run_that_cannot_open_a_file_stops_with_the_reason_and_moves_nothing(found, part):
  got, number = found['runs'][part], OF_A_RUN[part]
  assert got['code'] == 1 and got['names'] == ['checkpoint_2', 'checkpoint_4']
  assert 'Traceback' not in got['error'] and part in got['error']
  assert f'cannot be read: {os.strerror(number)} ({errno.errorcode[number]}).' in got['error']


def test_verify_does_not_call_a_file_damaged_that_it_cannot_open(found):
  got = found['runs']['verify']
  assert got['code'] == 2 and 'DAMAGED' not in got['error'] and '(EIO)' in got['error']


@pytest.mark.cluster
def test_a_process_that_cannot_open_a_file_stops_all_and_moves_nothing(found):
  for got in (ranks['EMFILE'] for ranks in found['ranks']):
    assert got['error'].startswith('AccessError: process 1')
    assert '(EMFILE)' in got['error'] and 'ocdbt.process_1' in got['error']
    assert {'checkpoint_1', 'checkpoint_2'} <= set(got['names'])


@pytest.mark.cluster
def test_a_process_that_cannot_open_a_checkpoint_of_another_run_stops_all(found):
  for got in (ranks['of another run'] for ranks in found['ranks']):
    assert got.startswith('AccessError: process 1') and '(EMFILE)' in got


@pytest.mark.cluster
def test_files_that_one_process_alone_misses_are_not_damaged_for_all(found):
  for got in (ranks['ENOENT'] for ranks in found['ranks']):
    assert 'All other processes find it intact' in got['error'] and 'process 1' in got['error']
    assert {'checkpoint_1', 'checkpoint_2'} <= set(got['names'])


@pytest.mark.cluster
def test_damage_that_one_process_alone_reads_is_damage_for_all(found):
  for got in (ranks['damaged'] for ranks in found['ranks']):
    assert got['step'] == 1 and 'corrupt_checkpoint_2' in got['names']
