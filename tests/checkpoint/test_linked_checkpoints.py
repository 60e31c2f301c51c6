"""A link to the folder of a checkpoint counts as the checkpoint; its files are never deleted."""

import os
import pathlib
import shutil

import pytest

from t5x_gpu import checkpoint_tools
from t5x_gpu.checkpoint.model_dir import check_names_are_free, newest_complete
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.checkpoint.store import StateReader
from t5x_gpu.errors import AccessError, CheckpointError
from tests.checkpoint.test_checkpointer import (
  abstract,
  assert_equal,
  folder_with,
  new_state,
  opened,
  save,
)
from tests.helpers_train import Project, listing, run_here
from tests.messages import raises


def moved(folder: pathlib.Path, *steps: int) -> pathlib.Path:
  """Returns the folder into which the checkpoints were moved; links take their places."""
  disk = folder.parent / 'disk'
  disk.mkdir()
  for step in steps:
    shutil.move(folder / f'checkpoint_{step}', disk)
    (folder / f'checkpoint_{step}').symlink_to(disk / f'checkpoint_{step}')
  return disk


def test_a_run_continues_from_a_link_and_retention_removes_the_link_alone(tmp_path):
  folder = folder_with(tmp_path, 2, 4)
  disk = moved(folder, 2, 4)
  before = listing(disk)
  assert newest_complete(folder, target=abstract(new_state())).step == 4
  assert StateReader(folder / 'checkpoint_4').step == 4
  with opened(folder, keep=Keep(last=1)) as checkpointer:
    assert checkpointer.steps() == [2, 4]
    restored = checkpointer.restore_latest(abstract(new_state()))
    assert_equal(restored.state, new_state(4, seed=4))
    save(checkpointer, 5, new_state(5))
    checkpointer.wait()
    assert checkpointer.steps() == [5]
  assert not os.path.lexists(folder / 'checkpoint_4') and listing(disk) == before


def test_verify_reads_a_link_and_prune_says_that_its_files_stay(tmp_path):
  folder = folder_with(tmp_path, 2, 4)
  disk = moved(folder, 2)
  before = listing(disk)
  verified = run_here(lambda: checkpoint_tools.main(['verify', str(folder)]))
  assert verified.code == 0 and 'checkpoint_2: 3 arrays match' in verified.out
  pruned = run_here(lambda: checkpoint_tools.main(['prune', str(folder), '--keep_last=1', '--yes']))
  assert f'the link only; its files stay in {disk}/checkpoint_2' in pruned.out
  assert not os.path.lexists(folder / 'checkpoint_2') and listing(disk) == before


def test_a_damaged_checkpoint_behind_a_link_is_set_aside_as_a_link(tmp_path):
  folder = folder_with(tmp_path, 2, 4)
  (folder / 'checkpoint_4' / 'manifest' / 'metadata').write_text('')
  disk = moved(folder, 4)
  before = listing(disk)
  with opened(folder) as checkpointer:
    assert int(checkpointer.restore_latest(abstract(new_state())).state.step) == 2
  assert os.readlink(folder / 'corrupt_checkpoint_4') == str(disk / 'checkpoint_4')
  assert listing(disk) == before


@pytest.mark.parametrize('target', ['nowhere', 'checkpoint_4', 'run.lock'])
def test_a_link_that_leads_to_no_folder_stops_every_reader_unless_a_newer_one_is_there(
  tmp_path, target
):
  folder = folder_with(tmp_path, 2)
  (folder / 'run.lock').touch()
  (folder / 'checkpoint_4').symlink_to(target)
  with raises(AccessError):
    newest_complete(folder, target=abstract(new_state()))
  for source in (folder, folder / 'checkpoint_4'):
    with pytest.raises(AccessError):
      StateReader(source)
  with opened(folder, keep=Keep(last=1, best=1)) as checkpointer:
    save(checkpointer, 6, new_state(6))
    checkpointer.wait()
    assert checkpointer.steps() == [4, 6]
  assert newest_complete(folder, target=abstract(new_state())).step == 6
  assert os.readlink(folder / 'checkpoint_4') == target


def test_a_file_with_the_name_of_a_later_checkpoint_is_refused_before_the_run_starts(tmp_path):
  project = Project(tmp_path)
  project.model_dir.mkdir()
  path = project.model_dir / 'checkpoint_3'
  path.write_text('mine')
  with raises(CheckpointError):
    project.check(num_devices=1)
  check_names_are_free(project.model_dir, after=3, until=9)
  check_names_are_free(project.model_dir, after=0, until=2)
  assert path.read_text() == 'mine'
