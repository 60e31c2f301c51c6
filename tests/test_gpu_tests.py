"""The tests of tests/gpu pass on a CPU, so that they are ready for a GPU; without one they skip."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.process
def test_they_pass_on_the_cpu_with_small_sizes():
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}  # quick compiles, as in make test
  done = subprocess.run(
    [sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider', 'tests/gpu'],
    cwd=ROOT,
    env={**env, 'T5X_GPU_TESTS_ON': 'cpu'},
    text=True,
    capture_output=True,
  )
  assert done.returncode == 0, done.stdout[-3000:]
  assert ' passed' in done.stdout
