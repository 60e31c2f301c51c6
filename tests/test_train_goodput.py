"""The ledger of real processes: a kill -9, a requeue, and the sum against another clock."""

import math
import signal
import time

import pytest

from t5x_gpu.metrics.goodput import GOODPUT, accounts_of, read_ledger
from t5x_gpu.runtime.cluster.restarts import EXIT_PREEMPTED
from tests.helpers_train import Project


@pytest.mark.slow
def test_the_ledger_sums_to_the_wall_time_through_a_kill_and_a_requeue(tmp_path, warm):
  project = Project(tmp_path, warm=warm)
  macros = {'DATA_MODULE': "'held_data'", 'TRAIN_STEPS': 12, 'SAVE_PERIOD': 4, 'EVAL_PERIOD': 6}
  with project.start(**macros, hold_before=7) as run:
    begin = time.time()  # the process has been forked just now
    run.wait_for(run.held)
    run.wait_for(lambda: project.steps() == [4])
    run.kill()
  with project.start(**macros, hold_before=2) as run:
    run.wait_for(run.held)
    run.popen.send_signal(signal.SIGUSR1)
    run.let_go()
    assert run.finish() == EXIT_PREEMPTED, run.err
    assert 'The last interruption (killed) cost 0:' in run.out
    assert 'of training after step 4' in run.out
    assert 'goodput ' in run.out.splitlines()[-2]
  with project.start(**macros) as run:
    assert run.finish() == 0, run.err
  assert 'The last interruption (SIGUSR1) cost 0:' in run.out
  assert 'of training after' not in run.out

  path = project.model_dir / GOODPUT
  ledger = read_ledger(path)
  accounts = accounts_of(ledger)
  wall = path.stat().st_mtime - begin
  assert math.fsum(accounts.seconds.values()) == pytest.approx(wall, rel=0.01)
  assert accounts.wall_seconds == pytest.approx(wall, rel=0.01)
  assert [p.process.end for p in accounts.processes] == [None, 'SIGUSR1', 'done']
  assert [p.process.first_step for p in accounts.processes] == [0, 4, 7]
  assert [p.lost_steps for p in accounts.processes] == [2, 0, 0]
  assert all(accounts.seconds[name] > 0 for name in ('compile', 'restore', 'lost', 'downtime'))
  assert ledger.damaged == []
