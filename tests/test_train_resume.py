"""A run that was killed or stopped and restarted equals the uninterrupted run bit-exactly."""

import shutil
import signal

import pytest

from t5x_gpu.runtime.preemption import EXIT_PREEMPTED
from tests.helpers_train import Project

# The checkpoint is complete in a temporary folder, and gets its name only once `go` appears.
HELD_COMMIT = """
import os, pathlib, time
rename = os.rename
def held(source, target, **kwargs):
  if os.fspath(target).endswith('checkpoint_10'):
    pathlib.Path('held').touch()
    while not pathlib.Path('go').exists():
      time.sleep(0.005)
  return rename(source, target, **kwargs)
os.rename = held
from t5x_gpu import cli, train
cli.run_main(train.main)
"""
HELD = {'DATA_MODULE': 'held_data', 'DROPOUT_RATE': 0.1}


@pytest.fixture(scope='module')
def untouched(tmp_path_factory, warm) -> dict[int, float]:
  """The losses of twenty steps with dropout, without a checkpoint on the way."""
  project = Project(tmp_path_factory.mktemp('untouched'), warm=warm)
  with project.start(**HELD, SAVE_PERIOD=100) as run:
    assert run.finish() == 0, run.err
  losses = project.metrics()
  assert list(losses) == list(range(1, 21))
  return losses


@pytest.mark.slow  # kills are in tests/test_train_crashes.py and tests/property, too
def test_losses_after_kill_9_at_any_moment_are_those_of_the_untouched_run(
  tmp_path, warm, untouched
):
  project = Project(tmp_path, warm=warm)

  with project.start(**HELD) as run:  # while it compiles
    run.wait_for(lambda: 'parameters;' in run.out)
    run.kill()
  assert not project.steps()

  with project.start(**HELD, script=HELD_COMMIT) as run:  # while it saves
    run.wait_for(run.held)
    run.kill()
  assert not project.steps()
  assert list(project.model_dir.glob('checkpoint_10.*')), 'no save was under way'

  with project.start(**HELD, hold_before=12) as run:  # after checkpoint_10, in step 12 or 13
    run.wait_for(lambda: run.held.exists() and project.steps() == [10])
    run.kill()
  assert max(project.metrics()) >= 11

  with project.start(**HELD) as run:
    assert run.finish() == 0, run.err
  assert f'Continuing from {project.model_dir}/checkpoint_10.' in run.out
  assert project.metrics() == untouched
  assert project.steps() == [10, 20]


@pytest.mark.slow
@pytest.mark.tf
def test_packed_shuffled_source_text_with_dropout_resumes_bit_exactly(tmp_path, warm):
  macros = {**HELD, 'TASK_FEATURE_LENGTHS': "{'targets': 48}"}
  seqio = 't5x_gpu.data.seqio_batches'
  whole, copy = (Project(_folder(tmp_path, name), warm=warm) for name in ('whole', 'copy'))
  with whole.start(**macros, held_module=seqio, hold_before=11) as run:
    run.wait_for(lambda: run.held.exists() and whole.steps() == [10])
    shutil.copytree(whole.model_dir, copy.model_dir)  # what kill -9 would leave in this moment
    run.let_go()
    assert run.finish() == 0, run.err
  with copy.start(**macros, held_module=seqio) as run:
    assert run.finish() == 0, run.err
  assert 'Continuing from' in run.out and 'again to get to the same place' not in run.err
  assert copy.metrics() == whole.metrics()
  assert copy.metrics('eval/loss') == whole.metrics('eval/loss')
  assert len(set(copy.metrics().values())) == 20


@pytest.mark.slow
@pytest.mark.tf
def test_a_task_of_python_code_that_is_killed_resumes_bit_exactly(tmp_path, warm):
  macros = {
    **HELD,
    'MIXTURE_OR_TASK_MODULE': 'tests.python_code_tasks',
    'MIXTURE_OR_TASK_NAME': 'generated_and_plain',
  }
  seqio = 't5x_gpu.data.seqio_batches'
  whole, copy = (Project(_folder(tmp_path, name), warm=warm) for name in ('whole', 'copy'))
  with whole.start(**macros, held_module=seqio, hold_before=11) as run:
    run.wait_for(lambda: run.held.exists() and whole.steps() == [10])
    shutil.copytree(whole.model_dir, copy.model_dir)  # what kill -9 would leave in this moment
    run.let_go()
    assert run.finish() == 0, run.err
  assert 'whose position TensorFlow cannot save' in run.err
  with copy.start(**macros, held_module=seqio) as run:
    assert run.finish() == 0, run.err
  assert 'data: read 10 batches again in' in run.err
  assert copy.metrics() == whole.metrics()
  assert copy.metrics('eval/loss') == whole.metrics('eval/loss')


def _folder(parent, name):
  folder = parent / name
  folder.mkdir()
  return folder


def test_stop_signals_save_and_leave_and_the_next_run_continues_exactly(tmp_path, warm, untouched):
  project = Project(tmp_path, warm=warm)
  for number, step, code in ((signal.SIGINT, 5, 130), (signal.SIGTERM, 9, EXIT_PREEMPTED)):
    done = max(project.steps(), default=0)
    with project.start(**HELD, hold_before=step - 1 - done) as run:
      run.wait_for(run.held)
      run.popen.send_signal(number)
      run.wait_for(lambda: f'{number.name}: finishing this step' in run.err)
      run.let_go()
      assert run.finish() == code, run.err
    assert project.steps()[-1] == step
    assert f'Stopped by {number.name} at step {step}' in run.out
    assert 'Traceback' not in run.err
  with project.start(**HELD) as run:
    assert run.finish() == 0, run.err
  assert project.metrics() == untouched


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once(tmp_path, warm):
  project = Project(tmp_path, warm=warm)
  with project.start(**HELD, hold_before=2) as run:
    run.wait_for(run.held)
    run.popen.send_signal(signal.SIGINT)
    run.wait_for(lambda: 'Press Ctrl-C again to exit immediately' in run.err)
    run.popen.send_signal(signal.SIGINT)
    assert run.finish() == 130
  assert not project.steps() and 'Traceback' not in run.err


@pytest.mark.slow
def test_ctrl_c_during_the_last_save_does_not_lose_it(tmp_path, warm):
  project = Project(tmp_path, warm=warm)
  with project.start(**HELD, TRAIN_STEPS=10, script=HELD_COMMIT) as run:
    run.wait_for(run.held)
    run.popen.send_signal(signal.SIGINT)
    run.wait_for(lambda: 'Press Ctrl-C again to exit immediately' in run.err)
    run.let_go()
    assert run.finish() == 0, run.err  # it had finished before the signal
  assert project.steps() == [10] and 'Done at step 10' in run.out


def test_ctrl_c_during_the_compile_leaves_without_a_stack(tmp_path):
  project = Project(tmp_path)
  with project.start(**HELD) as run:
    run.wait_for(lambda: 'parameters;' in run.out)
    run.popen.send_signal(signal.SIGINT)
    assert run.finish() == 130
  assert run.err.strip().endswith('Interrupted.') and 'Traceback' not in run.err
  assert not project.steps()
