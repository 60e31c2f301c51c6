"""Exits of a process that skip Python's exit handlers."""

import subprocess
import sys

import pytest


def ended(script: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, '-c', 'from t5x_gpu.runtime import process_exit as exits\n' + script],
    capture_output=True,
    text=True,
    timeout=60,
  )


@pytest.mark.parametrize(
  'end, code',
  [
    ('exits.leave_at_once(86)', 86),
    ('exits.joined(1, process_count=2); exits.leave(1, failed=True)', 1),
    ('exits.abandon_threads(); exits.leave(1, failed=True)', 1),
    ('exits.leave(0, failed=False)', 0),
  ],
)
def test_cleanups_run_once_on_every_way_out_the_last_one_first(end, code):
  done = ended(
    'exits.before_exit(lambda: print("first", flush=True))\n'
    'exits.before_exit(lambda: print("second", flush=True))\n'
    'gone = lambda: print("gone")\n'
    f'exits.before_exit(gone); exits.cancel_before_exit(gone)\n{end}'
  )
  assert (done.returncode, done.stdout, done.stderr) == (code, 'second\nfirst\n', '')


def test_a_cleanup_that_hangs_or_fails_does_not_keep_the_process():
  done = ended(
    'import threading\nexits.CLEANUP_SECONDS = 0.5\n'
    'exits.before_exit(threading.Event().wait)\n'
    'exits.before_exit(lambda: 1 / 0)\nexits.leave_at_once(87)'
  )
  assert (done.returncode, done.stderr) == (87, '')
