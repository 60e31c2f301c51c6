"""What `launch` knows about the ends of a run's starts."""

import time

import pytest

from t5x_gpu.runtime.cluster import interruptions

STUCK = """WATCHDOG: Process 1 on gpu-002 (pid 7) is stuck in step 14 for 120 s.
Heartbeats:
  process 0 on gpu-001 (pid 5): step 13, phase 'step' for 3 s, in ValueError: loop.py:7 (f)
WATCHDOG: process 1 exits with code 86.
"""
TRACEBACK = """step 12/40: loss 2.1
Traceback (most recent call last):
  File "my_task.py", line 3, in rows
    raise ValueError('no row')
ValueError: no row
"""
USER_ERROR = """[1/2] TrainingError: The loss of step 14 is nan.
  Lower the learning rate.
    train.learning_rate = 3.0   my.gin:7
"""


@pytest.mark.parametrize(
  'output, line',
  [
    (STUCK, 'WATCHDOG: Process 1 on gpu-002 (pid 7) is stuck in step 14 for 120 s.'),
    (TRACEBACK, 'ValueError: no row'),
    (USER_ERROR, '[1/2] TrainingError: The loss of step 14 is nan.'),
    ('jax.errors.JaxRuntimeError: INTERNAL\n\n', 'jax.errors.JaxRuntimeError: INTERNAL'),
    ('no space left\n\n', 'no space left'),
    ('', ''),
    ('x' * 1000, 'x' * 200),
  ],
)
def test_the_line_of_an_output_that_names_the_error(output, line):
  assert interruptions.error_line(output.splitlines()) == line


@pytest.mark.parametrize(
  'environ, ahead',
  [({}, 0), ({'T5X_GPU_CLOCK_AHEAD': '-60.5'}, -60.5), ({'T5X_GPU_CLOCK_AHEAD': 'x'}, 0)],
)
def test_all_hosts_of_a_run_share_a_clock(environ, ahead):
  assert interruptions.run_clock(environ)() == pytest.approx(time.time() - ahead, abs=5)


def test_a_start_knows_the_last_interruptions():
  found = [
    interruptions.Interruption(n, interruptions.KILLED, 'process 3 failed', n, 1e9, 1e9 - 1)
    for n in range(1, 100)
  ]
  environ = interruptions.variables('run', found)
  history = interruptions.history_of(interruptions.facts(environ))
  assert history == interruptions.History('run', tuple(found[-interruptions.MOST :]))
  assert interruptions.facts({}) == interruptions.facts({interruptions.VARIABLE: '{'}) == {}
