"""MODEL_DIR/run.lock: one run at a time, stale locks do not block, a loser stops writing."""

import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from t5x_gpu.checkpoint import run_lock
from t5x_gpu.checkpoint.run_lock import LOCK, STALE_SECONDS, RunLock, check_lock
from t5x_gpu.errors import CheckpointError
from t5x_gpu.runtime.watchdog import EXIT_STUCK
from tests.helpers_disk import refused_to_python
from tests.helpers_train import TINY_GIN, Project, listing, without_ledger
from tests.messages import raises


def lock_of(where, *, age: float = 0, **changes) -> None:
  """Writes a lock that was touched `age` seconds ago."""
  owner = dataclasses.replace(run_lock._this_process(where), **changes)
  path = where / LOCK
  path.write_text(json.dumps(dataclasses.asdict(owner)))
  os.utime(path, (time.time() - age,) * 2)


@pytest.fixture
def ended() -> int:
  """The pid of a process that has ended."""
  process = subprocess.Popen([sys.executable, '-c', ''])
  process.wait()
  return process.pid


def test_a_live_process_of_this_host_keeps_others_out_however_silent(tmp_path):
  with subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE) as process:
    lock_of(tmp_path, pid=process.pid, born=run_lock._born(process.pid), age=9999)
    with raises(CheckpointError) as e:
      RunLock(tmp_path)
    process.communicate(b'\n')
  assert e.value.parameters == ('MODEL_DIR',)
  assert check_lock(tmp_path).endswith('it has ended')  # the moment the process has


def test_another_host_is_believed_until_it_is_silent_for_long(tmp_path):
  lock_of(tmp_path, host='gpu-07', kernel='another', age=STALE_SECONDS - 20)
  with raises(CheckpointError):
    check_lock(tmp_path)
  lock_of(tmp_path, host='gpu-07', kernel='another', age=STALE_SECONDS + 5)
  assert 'last heartbeat was 125 s ago' in check_lock(tmp_path)


def test_a_lock_that_another_user_keeps_to_himself_counts_while_it_is_renewed(
  tmp_path, monkeypatch
):
  lock_of(tmp_path)
  real_open = os.open  # root may read everything, so permissions cannot show it

  def refuse(name, *args, **kwargs):
    if str(name).endswith(LOCK):
      raise PermissionError(13, 'Permission denied', name)
    return real_open(name, *args, **kwargs)

  monkeypatch.setattr(os, 'open', refuse)
  with raises(CheckpointError):
    RunLock(tmp_path)
  os.utime(tmp_path / LOCK, (time.time() - STALE_SECONDS - 5,) * 2)
  assert 'cannot be read' in check_lock(tmp_path)


def test_a_restart_waits_for_the_lock_of_a_container_that_is_gone_and_logs_it(
  tmp_path, monkeypatch, caplog
):
  monkeypatch.setattr(run_lock, 'POLL_SECONDS', 0.01)
  lock_of(tmp_path, host='t5x-gpu-0', kernel='another', age=STALE_SECONDS - 1)
  with caplog.at_level('INFO', logger='t5x_gpu'):
    assert 'last heartbeat was 120 s ago' in check_lock(tmp_path, wait=True)
  [line] = [r.getMessage() for r in caplog.records]  # once, not with each look
  assert re.search(
    r'Waiting for .*run.lock of process \d+ on t5x-gpu-0.* last heartbeat was 119 '
    r's ago.*takes over in 1 s',
    line,
  )


def test_a_restart_that_waits_gives_up_when_the_lock_is_renewed(tmp_path, monkeypatch, caplog):
  def renew(seconds: float) -> None:
    lock_of(tmp_path, host='gpu-07', kernel='another')

  monkeypatch.setattr(run_lock.time, 'sleep', renew)
  lock_of(tmp_path, host='gpu-07', kernel='another', age=30)
  with caplog.at_level('INFO', logger='t5x_gpu'), raises(CheckpointError):
    check_lock(tmp_path, wait=True)
  assert 'Waiting for' in caplog.text


@pytest.mark.slow
def test_a_run_starts_once_the_lock_of_another_container_is_stale(tmp_path, warm):
  project = Project(tmp_path, warm=warm)
  project.model_dir.mkdir()
  lock_of(project.model_dir, host='t5x-gpu-0', kernel='another', age=STALE_SECONDS - 10)
  with project.start(TRAIN_STEPS=2) as run:
    assert run.finish() == 0, run.err
  assert 'Taking over' in run.err and project.steps() == [2]


def test_a_new_folder_in_the_place_of_the_locked_one_is_refused(tmp_path):
  folder = tmp_path / 'model'  # a mount point without its disk, for example
  folder.mkdir()
  lock = RunLock(folder)
  folder.rename(tmp_path / 'moved')
  folder.mkdir()
  with raises(CheckpointError):
    lock.check()
  assert not list(folder.iterdir())


def test_a_process_that_the_system_hides_has_not_ended(tmp_path, ended, monkeypatch):
  def kill(pid, number):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

  monkeypatch.setattr(os, 'kill', kill)  # as for another user's process under hidepid
  monkeypatch.setattr(run_lock, 'POLL_SECONDS', 0.01)
  lock_of(tmp_path, pid=ended, born='1', age=STALE_SECONDS - 20)
  with raises(CheckpointError):
    check_lock(tmp_path)
  lock_of(tmp_path, pid=ended, born='1', age=STALE_SECONDS - 1)
  assert 'last heartbeat was 120 s ago' in check_lock(tmp_path, wait=True)


@pytest.mark.parametrize('change', ['ended', 'pid used again', 'copied', 'torn'])
def test_stale_locks_are_taken_over_at_once_with_a_log_line(tmp_path, ended, change, caplog):
  if change == 'ended':
    lock_of(tmp_path, pid=ended, born='1')
  elif change == 'pid used again':
    lock_of(tmp_path, pid=os.getppid(), born='1')
  elif change == 'copied':
    lock_of(
      tmp_path, pid=os.getppid(), born=run_lock._born(os.getppid()), folder=str(tmp_path.parent)
    )
  else:
    (tmp_path / LOCK).write_text('{"host"')
  with caplog.at_level('INFO', logger='t5x_gpu'):
    lock = RunLock(tmp_path)
  assert 'Taking over' in caplog.text
  lock.check()
  lock.release()
  assert [path.name for path in tmp_path.iterdir()] == (
    ['corrupt_run.lock'] if change == 'torn' else []
  )


def test_a_requeued_slurm_job_takes_over_from_its_earlier_attempt_at_once(tmp_path, monkeypatch):
  lock_of(tmp_path, host='gpu-07', kernel='another', job='4711', attempt=0)
  monkeypatch.setenv('SLURM_JOB_ID', '4711')
  with raises(CheckpointError):  # the other step of the same attempt
    check_lock(tmp_path)
  monkeypatch.setenv('SLURM_RESTART_COUNT', '1')
  assert 'earlier attempt of Slurm job 4711' in check_lock(tmp_path)
  monkeypatch.setenv('SLURM_JOB_ID', '4712')
  with raises(CheckpointError):
    check_lock(tmp_path)


def test_a_later_start_by_the_same_launch_takes_over_at_once(tmp_path, monkeypatch):
  lock_of(tmp_path, host='gpu-07', kernel='another', run='5f1c', generation=2)
  for variable in ('', '5f1c 2', '77aa 3'):
    monkeypatch.setenv(run_lock.GENERATION_VARIABLE, variable)
    with raises(CheckpointError):
      check_lock(tmp_path)
  monkeypatch.setenv(run_lock.GENERATION_VARIABLE, '5f1c 3')
  assert 'it is start 2 of the same run, this is start 3' in check_lock(tmp_path)


def test_a_lock_without_a_launch_has_no_keys_that_older_versions_do_not_know(tmp_path):
  RunLock(tmp_path)
  assert not {'run', 'generation'} & json.loads((tmp_path / LOCK).read_text()).keys()


def test_a_run_that_lost_the_lock_gets_an_error_and_does_not_remove_it(tmp_path):
  lock = RunLock(tmp_path)
  lock_of(tmp_path, host='gpu-08', kernel='another')
  with raises(CheckpointError):
    lock.check()
  lock.release()
  assert (tmp_path / LOCK).exists()


@pytest.mark.parametrize('code', ['EIO', 'ESTALE', 'EMFILE'])
def test_a_held_lock_that_cannot_be_opened_is_kept(tmp_path, code):
  lock = RunLock(tmp_path)
  before = listing(tmp_path)
  number = getattr(errno, code)
  with refused_to_python(LOCK, number):
    with raises(CheckpointError):
      lock.check()
  assert listing(tmp_path) == before  # neither replaced nor set aside
  assert lock.check()
  lock.release()
  assert not list(tmp_path.iterdir())


def test_a_removed_lock_is_written_again_and_a_lock_is_touched_while_it_is_held(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(run_lock, 'REFRESH_SECONDS', 0.01)
  lock = RunLock(tmp_path)
  (tmp_path / LOCK).unlink()
  lock.check()
  os.utime(tmp_path / LOCK, (0, 0))
  deadline = time.monotonic() + 20
  while (tmp_path / LOCK).stat().st_mtime < 1:
    assert time.monotonic() < deadline
    time.sleep(0.005)
  lock.release()
  assert not list(tmp_path.iterdir())


def test_a_second_run_and_a_dry_run_fail_before_compiling_and_change_nothing(tmp_path, warm):
  project = Project(tmp_path, warm=warm)
  with project.start(DATA_MODULE='held_data', hold_before=2) as run:
    run.wait_for(run.held)
    owner = json.loads((project.model_dir / LOCK).read_text())
    assert owner['pid'] == run.popen.pid
    before = listing(project.model_dir)
    for flags in ((), ('--dry_run',)):
      result = project.run(*flags)
      assert result.code == 1 and 'Traceback' not in result.err
      assert f'belongs to another run: process {run.popen.pid} on {owner["host"]}' in result.err
      assert 'MODEL_DIR is set at' in result.err
    now = listing(project.model_dir)
    assert {k: v for k, v in now.items() if k != LOCK} == {
      k: v for k, v in before.items() if k != LOCK
    }
    run.let_go()
    assert run.finish() == 0, run.err
  assert not (project.model_dir / LOCK).exists()
  assert project.run('--dry_run').code == 0 and not (project.model_dir / LOCK).exists()


@pytest.mark.slow
def test_a_run_that_was_disconnected_and_lost_its_model_dir_exits_without_saving(tmp_path, warm):
  project = Project(tmp_path, warm=warm)
  with project.start(DATA_MODULE='held_data', hold_before=8) as run:
    run.wait_for(run.held)
    lock_of(project.model_dir, host='gpu-08', kernel='another')
    run.let_go()
    assert run.finish() == 1, run.out
  assert 'CheckpointError: MODEL_DIR = ' in run.err and 'now belongs to process' in run.err
  assert 'gpu-08' in run.err and 'Traceback' not in run.err
  assert not project.steps() and not list(project.model_dir.glob('checkpoint_*'))
  assert json.loads((project.model_dir / LOCK).read_text())['host'] == 'gpu-08'


OPENS_LATE = """
import pathlib, time
from t5x_gpu.data import synthetic

def open_batches(config, **options):
  pathlib.Path('held').touch()
  while not pathlib.Path('go').exists():
    time.sleep(0.005)
  return synthetic.open_batches(config, **options)
"""


@pytest.mark.slow
def test_a_run_that_lost_its_model_dir_before_its_first_step_touches_nothing(tmp_path, warm):
  project = Project(tmp_path, warm=warm)
  assert project.run(TRAIN_STEPS=2).code == 0
  (tmp_path / 'opens_late.py').write_text(OPENS_LATE)
  with project.start(DATA_MODULE='opens_late', TRAIN_STEPS=4) as run:
    run.wait_for(run.held)
    lock_of(project.model_dir, host='gpu-08', kernel='another')
    (project.model_dir / 'checkpoint_3.orbax-checkpoint-tmp').mkdir()  # the other run is saving
    (project.model_dir / 'checkpoint_3.orbax-checkpoint-tmp' / 'part').write_text('half')
    with open(project.model_dir / 'metrics.jsonl', 'a', encoding='utf-8') as metrics:
      metrics.write('{"step": 3, "train/loss": 1.0}\n')
    before = without_ledger(listing(project.model_dir))
    run.let_go()
    assert run.finish() == 1, run.out
  assert 'now belongs to process' in run.err and 'Traceback' not in run.err
  assert without_ledger(listing(project.model_dir)) == before


@pytest.mark.slow
def test_a_model_dir_deleted_during_a_run_is_named(tmp_path, warm):
  project = Project(tmp_path, warm=warm)
  with project.start(DATA_MODULE='held_data', hold_before=6, SAVE_PERIOD=8) as run:
    run.wait_for(run.held)
    shutil.rmtree(project.model_dir)
    run.let_go()
    assert run.finish() == 1, run.out
  assert f'CheckpointError: MODEL_DIR = {str(project.model_dir)!r} no longer exists' in run.err
  assert 'Without the folder the run starts over' in run.err and 'MODEL_DIR is set at' in run.err
  assert 'run.lock' not in run.err and 'Traceback' not in run.err
  assert not project.model_dir.exists()


@pytest.mark.slow
def test_the_watchdog_releases_the_lock(tmp_path, warm):
  gin = TINY_GIN.replace(
    'from t5x_gpu.models', 'from t5x_gpu.runtime import watchdog\nfrom t5x_gpu.models', 1
  )
  gin += """
train_script.train.watchdog_cfg = @watchdog.WatchdogConfig()
watchdog.WatchdogConfig.step_seconds = 1
watchdog.WatchdogConfig.step_factor = 1
"""
  project = Project(tmp_path, gin=gin, warm=warm)
  with project.start(DATA_MODULE='held_data', hold_before=4) as run:
    assert run.finish() == EXIT_STUCK, run.err
  assert 'exits with code 86' in run.err
  assert not (project.model_dir / LOCK).exists()
