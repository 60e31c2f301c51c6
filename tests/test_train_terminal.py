"""A run does not need its terminal: without it, it trains, saves and ends as usual."""

import signal

import pytest

from t5x_gpu.runtime.cluster.restarts import EXIT_PREEMPTED
from t5x_gpu.terminal.streams import TERMINAL_LOG
from tests.helpers_train import Project

FULL_DISK = 'os.dup2(os.open("/dev/full", os.O_WRONLY), 1)'
DEAD_PIPE = 'r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2)'
CLOSED = 'os.close(0); os.close(1); os.close(2); import_interrupts.open_closed_streams()'
RUN = """
import os, signal
from t5x_gpu import cli, train
from t5x_gpu.runtime import import_interrupts
{}
cli.run_main(train.main)
"""
DATA = {'DATA_MODULE': 'held_data', 'TRAIN_STEPS': 6, 'SAVE_PERIOD': 4}


@pytest.fixture(scope='module')
def losses(tmp_path_factory, warm):
  project = Project(tmp_path_factory.mktemp('plain'), warm=warm)
  with project.start(**DATA) as run:
    assert run.finish() == 0, run.err
  assert not (project.model_dir / TERMINAL_LOG).exists()
  return project.metrics()


@pytest.mark.quick_cases('full_disk')  # tests/terminal/test_streams.py has all cases
@pytest.mark.parametrize(
  'stream', [FULL_DISK, DEAD_PIPE, CLOSED], ids=['full_disk', 'dead_pipe', 'closed']
)
def test_a_run_without_a_terminal_trains_and_saves_the_same(tmp_path, warm, losses, stream):
  project = Project(tmp_path, warm=warm)
  with project.start(**DATA, script=RUN.format(stream)) as run:
    assert run.finish() == 0, run.err
  assert project.metrics() == losses and project.steps() == [4, 6]
  log = project.model_dir / TERMINAL_LOG
  if stream == CLOSED:
    assert not log.exists()
  else:
    text = log.read_text()
    assert 'Standard output cannot be written' in text and 'Continuing without it' in text
    assert 'parameters;' in text and 'step 6/6' in text and 'Done at step 6' in text


def test_a_hang_up_saves_although_the_terminal_is_gone(tmp_path, warm, losses):
  project = Project(tmp_path, warm=warm)
  with project.start(**DATA, script=RUN.format(DEAD_PIPE), hold_before=2) as run:
    run.wait_for(run.held)
    run.popen.send_signal(signal.SIGHUP)
    run.wait_for(
      lambda: 'SIGHUP: finishing this step' in (project.model_dir / TERMINAL_LOG).read_text()
    )
    run.let_go()
    assert run.finish() == EXIT_PREEMPTED
  assert project.steps() == [3]
  with project.start(**DATA) as run:
    assert run.finish() == 0, run.err
  assert project.metrics() == losses


@pytest.mark.slow
def test_nohup_keeps_a_run_from_stopping(tmp_path, warm):
  project = Project(tmp_path, warm=warm)
  nohup = RUN.format('signal.signal(signal.SIGHUP, signal.SIG_IGN)')
  with project.start(**DATA, script=nohup, hold_before=2) as run:
    run.wait_for(run.held)
    run.popen.send_signal(signal.SIGHUP)
    run.let_go()
    assert run.finish() == 0, run.err
  assert project.steps() == [4, 6]
