"""Ctrl-C while the main thread waits inside XLA, in real processes."""

import signal
import subprocess
import sys

import pytest

DEADLINE_SECONDS = 60

# The device never answers: a callback locks a mutex twice, in C, which no signal interrupts.
# Another thread prints 'held' once the main thread has been at that line for half a second.
HANGS_IN_XLA = """
import ctypes, sys, threading, time
import jax
import numpy as np
from t5x_gpu import cli

mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
main_thread = threading.get_ident()

def never(x):
  lock(mutex)
  return lock(mutex)

def watch():
  same = 0
  while same < 5:
    time.sleep(0.1)
    frame = sys._current_frames()[main_thread]
    same = same + 1 if (frame.f_code.co_name, frame.f_lineno) == ('never', 12) else 0
  print('held', flush=True)

def main():
  {before}
  threading.Thread(target=watch, daemon=True).start()
  wait = jax.jit(lambda x: jax.pure_callback(never, jax.ShapeDtypeStruct((), np.float32), x))
  return int(wait(np.float32(1)))

cli.run_main(main)
"""
GRACEFUL = 'from t5x_gpu.runtime import preemption; preemption.StopRequest().__enter__()'


# As in a talk, after an answer that Ctrl-C ended.
NOTED = (
  'from t5x_gpu.runtime.process_exit import interrupts_noted as noted\n'
  '  with noted() as pressed: signal.raise_signal(signal.SIGINT); assert pressed()\n'
  '  noted().__enter__()'
)


# A shell starts what it runs in the background with SIGINT ignored, the tests maybe.
NOT_IGNORED = 'import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n'


def started(code: str) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, '-c', NOT_IGNORED + code.lstrip()],
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )


def read_until(stream, text: str) -> str:
  seen = ''
  while text not in seen:
    line = stream.readline()
    assert line, f'ended before {text!r}: {seen}'
    seen += line
  return seen


@pytest.mark.slow
@pytest.mark.parametrize(
  'before',
  [
    pytest.param('pass', id='set-up', marks=pytest.mark.slow),
    pytest.param(GRACEFUL, id='loop'),
    pytest.param(NOTED, id='talk'),
  ],
)
def test_a_second_ctrl_c_leaves_a_main_thread_that_waits_inside_xla(before):
  with started(HANGS_IN_XLA.format(before=before)) as process:
    try:
      read_until(process.stdout, 'held')
      process.send_signal(signal.SIGINT)
      said = read_until(process.stderr, 'Press Ctrl-C again to exit immediately.')
      assert 'stopping as soon as <string>:' in said
      assert process.poll() is None
      process.send_signal(signal.SIGINT)
      assert process.wait(DEADLINE_SECONDS) == 130
      assert 'Leaving at once.' in process.stderr.read()
    finally:
      process.kill()


def test_one_ctrl_c_interrupts_python_code_without_any_message():
  with started(
    'import time\nfrom t5x_gpu import cli\n'
    'def main():\n  print("held", flush=True)\n  time.sleep(600)\n'
    'cli.run_main(main)'
  ) as process:
    try:
      read_until(process.stdout, 'held')
      process.send_signal(signal.SIGINT)
      assert process.wait(DEADLINE_SECONDS) == 130
      assert process.stderr.read() == 'Interrupted.\n'
    finally:
      process.kill()


def test_a_second_ctrl_c_does_not_wait_for_cleanup_that_hangs():
  with started(
    'import time\nfrom t5x_gpu import cli\n'
    'def main():\n  try:\n    print("held", flush=True)\n    time.sleep(600)\n'
    '  finally:\n    print("cleanup", flush=True)\n    {}\n'
    'cli.run_main(main)'.format('[print(end="") for _ in iter(int, 1)]')
  ) as process:
    try:
      read_until(process.stdout, 'held')
      process.send_signal(signal.SIGINT)
      read_until(process.stdout, 'cleanup')
      read_until(process.stderr, 'Press Ctrl-C again to exit immediately')
      process.send_signal(signal.SIGINT)
      assert process.wait(DEADLINE_SECONDS) == 130
    finally:
      process.kill()


def test_a_forked_child_does_not_press_ctrl_c_for_its_parent():
  """In a terminal Ctrl-C reaches all processes of the group: it must count once."""
  with started(
    # Python 3.12 and newer warn of a fork in a process with threads.
    'import warnings; warnings.simplefilter("ignore", DeprecationWarning)\n'
    'import os, signal, time\nfrom t5x_gpu import cli\n'
    'def main():\n'
    '  if os.fork() == 0:\n'
    '    signal.signal(signal.SIGINT, lambda *_: print("child", flush=True))\n'
    '    [os.kill(os.getpid(), signal.SIGINT) for _ in range(3)]\n'
    '    os._exit(0)\n'
    '  os.wait()\n  time.sleep(1)\n  print("alive", flush=True)\n'
    'cli.run_main(main)'
  ) as process:
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert 'child' in out and 'alive' in out and not err and process.returncode == 0


@pytest.mark.parametrize(
  'name, code, last_line', [('SIGINT', 130, 'Interrupted.\n'), ('SIGTERM', 143, '')]
)
def test_a_signal_in_a_callback_of_the_garbage_collector_is_not_lost(name, code, last_line):
  """JAX has such a callback, and Python ignores exceptions in it."""
  with started(
    'import gc, os, signal, time\nfrom t5x_gpu import cli\n'
    'from t5x_gpu.runtime.process_exit import sigterm_raises\n'
    'def callback(*_):\n'
    f'  gc.callbacks.clear()\n  os.kill(os.getpid(), signal.{name})\n  time.sleep(0.001)\n'
    'def main():\n'
    '  with sigterm_raises():\n'
    '    gc.callbacks[:] = [callback]\n    gc.collect()\n    time.sleep(1)\n'
    '    time.sleep(4)\n    print("went on")\n'
    'cli.run_main(main)'
  ) as process:
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert (process.returncode, out, err) == (code, '', last_line)
