"""Tests do not depend on the signals that their parent ignores or blocks."""

import subprocess
import sys

from tests.helpers_train import REPOSITORY

# A parent such as nohup or `make test &`, then pytest, a worker of pytest-xdist, and a program.
PARENT = """
import signal, subprocess, sys
for name in ('SIGINT', 'SIGHUP', 'SIGPIPE', 'SIGCHLD'):
  signal.signal(getattr(signal, name), signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
subprocess.run([sys.executable, '-c', sys.argv[1], *sys.argv[2:]])
"""
TESTS = """
import os, signal, subprocess, sys
from tests.helpers_signals import start_programs_with_default_signals
start_programs_with_default_signals()
os.kill(os.getpid(), signal.SIGHUP)  # the tests themselves still ignore it
print(subprocess.run([sys.executable, '-c', sys.argv[1], *sys.argv[2:]]).returncode)
"""
PROGRAM = """
import signal, sys
print(signal.getsignal(signal.SIGINT).__name__, int(signal.getsignal(signal.SIGHUP)),
      signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)
sys.exit(7)
"""


def test_programs_get_default_signals_under_a_parent_that_ignores_them():
  done = subprocess.run(
    [sys.executable, '-c', PARENT, TESTS, TESTS, PROGRAM],
    cwd=REPOSITORY,
    capture_output=True,
    text=True,
  )
  assert done.stdout.split('\n') == ['default_int_handler 0 set()', '7', '0', ''], done.stderr
