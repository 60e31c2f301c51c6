"""Other users' files in MODEL_DIR are never deleted, renamed or taken for a checkpoint."""

import os
import pathlib
import shutil

import pytest

from t5x_gpu.checkpoint.model_dir import newest_complete
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.errors import CheckpointError
from tests.checkpoint.test_checkpointer import (
  abstract,
  assert_equal,
  folder_with,
  new_state,
  opened,
  save,
)
from tests.helpers_train import listing
from tests.messages import raises


def a_folder(name: str):
  def put(folder: pathlib.Path, good: pathlib.Path) -> None:
    del good
    (folder / name).mkdir()
    (folder / name / 'notes.txt').write_text('mine')

  return put


def a_file(name: str):
  return lambda folder, good: (folder / name).write_text('mine')


def a_copy(name: str):
  return lambda folder, good: shutil.copytree(good, folder / name)


def a_link(name: str):
  return lambda folder, good: (folder / name).symlink_to(good, target_is_directory=True)


FOREIGN = [
  a_folder('checkpoint_notes'),
  a_copy('my_checkpoint_7'),
  a_copy('old_checkpoint_5'),
  a_copy('checkpoint_5.backup'),
  a_copy('checkpoint_5 (copy)'),
  a_copy('7'),
  # Python's int() takes these for numbers.
  a_copy('checkpoint_007'),
  a_copy('checkpoint_1_0'),
  a_copy('checkpoint_\u0667'),
  a_copy('checkpoint_+7'),
  a_copy('checkpoint_-7'),
  a_file('checkpoint_5'),
  a_file('checkpoint_7.orbax-checkpoint-tmp-1'),
  a_folder('notes.orbax-checkpoint-tmp'),
  a_folder('checkpoint_notes.orbax-checkpoint-tmp'),
  a_link('checkpoint_4.orbax-checkpoint-tmp'),
]


def entries(folder: pathlib.Path) -> dict:
  """Returns every entry below `folder` except the run's, without following links."""

  def kind(path: pathlib.Path):
    return (
      os.readlink(path)
      if path.is_symlink()
      else (path.read_bytes() if path.is_file() else 'folder')
    )

  return {str(p.relative_to(folder)): kind(p) for p in folder.rglob('*')}


@pytest.mark.parametrize('last', [3, 8], ids=['a_restore_meets_it_first', 'it_is_older'])
def test_what_somebody_put_there_stays_and_does_not_count(tmp_path, last):
  good = folder_with(tmp_path / 'elsewhere', 7) / 'checkpoint_7'
  folder = folder_with(tmp_path, last)
  before = entries(folder)
  for put in FOREIGN:
    put(folder, good)
  foreign = {name: what for name, what in entries(folder).items() if name not in before}
  assert len([name for name in foreign if '/' not in name]) == len(FOREIGN)
  elsewhere = listing(good)
  assert newest_complete(folder, target=abstract(new_state())).step == last
  with opened(folder, keep=Keep(last=1)) as checkpointer:
    assert checkpointer.steps() == [last]
    restored = checkpointer.restore_latest(abstract(new_state()))
    assert_equal(restored.state, new_state(last, seed=last))
    for step in (last + 7, last + 8):
      save(checkpointer, step, new_state(step))
      checkpointer.wait()
    assert checkpointer.steps() == [last + 8]
  now = entries(folder)
  assert {name: now.get(name) for name in foreign} == foreign
  assert listing(good) == elsewhere


def test_a_folder_with_the_name_of_a_checkpoint_is_never_deleted(tmp_path):
  """It counts, as it may be a damaged checkpoint; a restore that fails on it renames it."""
  folder = folder_with(tmp_path, 8)
  for step in (7, 9):
    a_folder(f'checkpoint_{step}')(folder, None)
  with opened(folder, keep=Keep(last=1)) as checkpointer:
    assert int(checkpointer.restore_latest(abstract(new_state())).state.step) == 8
    for step in (9, 10):
      save(checkpointer, step, new_state(step))
      checkpointer.wait()
    assert checkpointer.steps() == [7, 10]
  for name in ('checkpoint_7', 'corrupt_checkpoint_9'):
    assert (folder / name / 'notes.txt').read_text() == 'mine'


@pytest.mark.parametrize('put', [a_link('checkpoint_9'), a_file('checkpoint_9')])
def test_a_save_over_what_is_not_ours_fails_by_name_and_leaves_it(tmp_path, put):
  good = folder_with(tmp_path / 'elsewhere', 7) / 'checkpoint_7'
  folder, elsewhere = folder_with(tmp_path, 8), listing(good)
  put(folder, good)
  before = entries(folder)
  with opened(folder, keep=Keep(last=1)) as checkpointer:
    with raises(CheckpointError):
      save(checkpointer, 9, new_state(9))
      checkpointer.wait()
  now = entries(folder)
  assert {name: now.get(name) for name in before} == before and listing(good) == elsewhere
