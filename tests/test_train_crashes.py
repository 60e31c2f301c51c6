"""Kills in the middle of a save, disks that fill up or turn read-only: the work is still there."""

import random
import subprocess

import pytest

from tests import helpers_disk
from tests.helpers_crashes import MACROS, assert_reported, damaged, files_of_saves, is_saving, until
from tests.helpers_train import Project

# Held in the middle of deleting an old checkpoint: what makes it one is gone, its arrays are not.
HELD_DELETION = """
import pathlib, shutil, time
rmtree = shutil.rmtree
def held(path, *args, **kwargs):
  if 'checkpoint_' in pathlib.Path(path).name:
    rmtree(pathlib.Path(path) / 'manifest')
    pathlib.Path('held').touch()
    while not pathlib.Path('go').exists():
      time.sleep(0.005)
  return rmtree(path, *args, **kwargs)
shutil.rmtree = held
from t5x_gpu import cli, train
cli.run_main(train.main)
"""


@pytest.fixture(scope='module')
def untouched(tmp_path_factory, warm) -> dict[int, float]:
  """The losses of twenty uninterrupted steps."""
  project = Project(tmp_path_factory.mktemp('untouched'), warm=warm)
  with project.start(**MACROS, SAVE_PERIOD=100) as run:
    assert run.finish() == 0, run.err
  assert len(set(project.metrics().values())) == 20
  return project.metrics()


@pytest.fixture
def project(tmp_path, warm) -> Project:
  return Project(tmp_path, warm=warm)


def finishes(project: Project, untouched, **macros) -> None:
  """The same command continues, with the losses of an uninterrupted run."""
  with project.start(**MACROS, **macros) as run:
    assert run.finish() == 0, run.err
  assert project.metrics() == untouched
  for step in project.steps():
    assert not damaged(project.model_dir, step)


def test_kill_9_while_a_save_writes_its_files_loses_nothing_that_was_committed(project, untouched):
  rng, in_the_middle = random.Random(0), 0
  macros = {'SAVE_PERIOD': 4, 'CheckpointConfig.keep': None}
  for files in (1, rng.randrange(2, 16)):
    before = project.steps()
    with project.start(**MACROS, **macros) as run:
      assert until(run, is_saving(project, files=files)), run.err
      run.kill()
    in_the_middle += files_of_saves(project.model_dir) > 0
    assert set(before) <= set(project.steps())
    for step in project.steps():
      assert not damaged(project.model_dir, step)
  assert in_the_middle, 'no kill came while files were written: the test would prove nothing'
  finishes(project, untouched, **macros)
  assert project.steps() == [4, 8, 12, 16, 20] and not files_of_saves(project.model_dir)


def test_kill_9_while_an_old_checkpoint_is_deleted_leaves_no_half_of_it(project, untouched):
  macros = {'SAVE_PERIOD': 4, 'CheckpointConfig.keep': 1}
  with project.start(**MACROS, **macros, script=HELD_DELETION) as run:
    run.wait_for(run.held)
    # Its successor is committed by then; the one after that may be.
    assert project.steps() in ([8], [8, 12])
    run.kill()
  for step in project.steps():
    assert not damaged(project.model_dir, step)
  assert [p.name for p in project.model_dir.glob('.removed_*')] == ['.removed_checkpoint_4']
  with project.start(**MACROS, **macros) as run:
    assert run.finish() == 0, run.err
  assert 'Deleted the rest of checkpoint_4' in run.out + run.err
  assert project.metrics() == untouched and project.steps() == [20]
  assert not damaged(project.model_dir, 20) and not list(project.model_dir.glob('.removed_*'))


@pytest.mark.slow
def test_a_read_only_disk_ends_the_run_by_name_and_the_same_command_continues(project, untouched):
  with helpers_disk.small_disk(project.folder / 'disk', size='8m') as disk:
    project.model_dir = disk / 'model'
    with project.start(**MACROS, SAVE_PERIOD=4, hold_before=6) as run:
      run.wait_for(lambda: run.held.exists() and project.steps() == [4])
      turn_read_only(project.model_dir)
      run.let_go()
      assert run.finish() == 1, run.out
    assert_reported(run.err, 'Read-only file system', 'MODEL_DIR')
    assert project.steps() == [4]
    with project.start(**MACROS, SAVE_PERIOD=4) as run:
      assert run.finish() == 1
    assert_reported(run.err, 'cannot be written to: Read-only file system', 'MODEL_DIR is set at')
    helpers_disk.unmount(project.model_dir)
    finishes(project, untouched, SAVE_PERIOD=4)


def turn_read_only(folder) -> None:
  """Mounts `folder` over itself, read-only: files that are open stay open, as after a remount."""
  for options in (['--bind', str(folder)], ['-o', 'remount,bind,ro']):
    subprocess.run(['mount', *options, str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_and_then_room_again_is_the_untouched_run(project, untouched):
  with helpers_disk.small_disk(project.folder / 'disk', size='4m') as disk:
    project.model_dir = disk / 'model'
    with project.start(**MACROS, SAVE_PERIOD=4, hold_before=6) as run:
      run.wait_for(lambda: run.held.exists() and project.steps() == [4])
      filler = helpers_disk.fill(disk)
      run.let_go()
      assert run.finish() == 1, run.out
    assert_reported(run.err, 'No space left on device', 'checkpoint')
    assert project.steps() == [4] and not damaged(project.model_dir, 4)
    with project.start(**MACROS, SAVE_PERIOD=4) as run:  # nothing has changed
      assert run.finish() == 1, run.out
    assert_reported(run.err, 'No space left on device', 'MODEL_DIR')
    assert project.steps() == [4] and not damaged(project.model_dir, 4)
    filler.unlink()
    finishes(project, untouched, SAVE_PERIOD=4)
