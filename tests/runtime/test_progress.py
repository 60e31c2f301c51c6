"""The steps that a process reports to the program that started it."""

import os
import subprocess
import sys

from t5x_gpu.runtime.progress import (
  HOST_COUNTS_VARIABLE,
  VARIABLE,
  Progress,
  ProgressFile,
  read_host_counts,
  read_progress,
  reserve,
  write_host_counts,
)
from tests.helpers_disk import fill, small_disk


def test_the_last_step_outlives_a_killed_process(tmp_path):
  path = tmp_path / 'progress'
  path.touch()
  assert read_progress(path) is None
  program = (
    'import os, signal\n'
    'from t5x_gpu.runtime.progress import ProgressFile\n'
    'progress = ProgressFile(os.environ, first_step=40)\n'
    'progress.step_done(41); progress.step_done(42)\n'
    'os.kill(os.getpid(), signal.SIGKILL)'
  )
  env = {**os.environ, VARIABLE: str(path)}
  done = subprocess.run([sys.executable, '-c', program], env=env, check=False)
  assert done.returncode == -9
  assert read_progress(path) == Progress(40, 42)


def test_nothing_is_written_without_the_file(tmp_path):
  ProgressFile({}, first_step=0).step_done(1)
  ProgressFile({VARIABLE: str(tmp_path / 'gone')}, first_step=0).step_done(1)
  assert not list(tmp_path.iterdir()) and read_progress(tmp_path / 'gone') is None


def test_numbers_of_hosts_reach_the_launcher(tmp_path):
  path = tmp_path / 'counts'
  assert read_host_counts(path) == ()
  write_host_counts({}, [1, 2])
  assert read_host_counts(path) == ()
  write_host_counts({HOST_COUNTS_VARIABLE: str(path)}, [1, 2, 4])
  assert read_host_counts(path) == (1, 2, 4)


def test_a_disk_that_is_full_later_hides_no_step(tmp_path):
  with small_disk(tmp_path / 'disk', size='256k') as disk:
    path, counts = disk / 'progress', disk / 'counts'
    reserve([path], counts)
    assert read_progress(path) is None and read_host_counts(counts) == ()
    fill(disk)
    program = (
      'import os\n'
      'from t5x_gpu.runtime.progress import ProgressFile, write_host_counts\n'
      'ProgressFile(os.environ, first_step=40).step_done(1041)\n'
      'write_host_counts(os.environ, range(1, 4097))'
    )
    env = {**os.environ, VARIABLE: str(path), HOST_COUNTS_VARIABLE: str(counts)}
    subprocess.run([sys.executable, '-c', program], env=env, check=True)
    assert read_progress(path) == Progress(40, 1041)
    assert read_host_counts(counts) == tuple(range(1, 4097))
    reserve([path], counts)  # for the next start
    assert read_progress(path) is None and read_host_counts(counts) == ()
