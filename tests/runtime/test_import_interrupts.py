"""While a command imports: Ctrl-C prints one line and exits with 130; no garbage collections."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers_train import REPOSITORY

FIRST, LATE = 'concurrent.futures', 'jax._src.api'


def interrupted_at(module: str, *arguments: str) -> tuple[int, str]:
  """Returns (exit code, stderr) of `python ARGUMENTS`, interrupted once `module` is imported."""
  with subprocess.Popen(
    [sys.executable, '-v', *arguments],
    stderr=subprocess.PIPE,
    text=True,
    stdout=subprocess.DEVNULL,
    stdin=subprocess.DEVNULL,
    cwd=REPOSITORY,
    env={**os.environ, 'PYTHONPATH': str(REPOSITORY)},
  ) as process:
    for line in process.stderr:
      if line.startswith(f"import '{module}'"):
        process.send_signal(signal.SIGINT)
        break
    rest = process.stderr.read()
  return process.returncode, rest


@pytest.mark.parametrize(
  'name, module',
  [
    ('t5x_gpu.train', FIRST),
    ('t5x_gpu.train', LATE),
    ('t5x_gpu.launch', 't5x_gpu.errors'),
    ('t5x_gpu.checkpoint', LATE),
  ],
)
def test_ctrl_c_during_imports_exits_with_130_and_one_line(name, module):
  code, err = interrupted_at(module, '-m', name, '--help')
  assert code == 130, err[-2000:]
  assert err.endswith('Interrupted.\n') and 'Traceback' not in err


def test_the_garbage_collector_is_off_during_imports_and_skips_their_objects():
  show = 'import gc; print(gc.isenabled(), gc.get_freeze_count() > 10_000)'
  code = f"""
import sys
sys.orig_argv, sys.argv = [sys.executable, '-m', 't5x_gpu.train'], ['-m']
from t5x_gpu import cli
{show}
cli.run_main(lambda: exec({show!r}))
"""
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=REPOSITORY, capture_output=True, text=True, check=True
  )
  assert done.stdout.split() == ['False', 'False', 'True', 'True'], done.stdout


def test_the_command_of_the_package_is_interrupted_in_the_same_way():
  code, err = interrupted_at(LATE, '-m', 't5x_gpu', 'train', '--help')
  assert code == 130 and err.endswith('Interrupted.\n') and 'Traceback' not in err


@pytest.mark.slow
def test_ctrl_c_while_the_processes_of_launch_import_exits_with_130():
  with subprocess.Popen(
    [sys.executable, '-m', 't5x_gpu.launch', '--nproc=2', '--no_gpu', '--', '--help'],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    cwd=REPOSITORY,
    env={**os.environ, 'PYTHONPATH': str(REPOSITORY)},
  ) as process:
    for line in process.stdout:
      if line.startswith('launch: process 1'):
        break
    time.sleep(0.5)  # any time before the imports are over will do
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
  assert process.returncode == 130 and 'Traceback' not in rest, rest


def test_programs_that_use_the_package_keep_their_ctrl_c():
  script = (
    'import signal, t5x_gpu.cli; '
    'print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)'
  )
  done = subprocess.run(
    [sys.executable, '-c', script], capture_output=True, text=True, cwd=REPOSITORY
  )
  assert done.stdout == 'True\n', done.stderr
