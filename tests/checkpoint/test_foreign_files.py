"""What somebody else has put into MODEL_DIR is never deleted, renamed or taken for a checkpoint."""

import os
import pathlib
import shutil

import pytest

from t5x_gpu.checkpoint.keep import Keep
from t5x_gpu.checkpoint.model_dir import check_model_dir
from tests.checkpoint.test_checkpointer import (
    abstract, assert_equal, folder_with, new_state, opened, save)
from tests.helpers_train import listing


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


FOREIGN = {
    'folder_of_notes': a_folder('checkpoint_notes'),
    'other_prefix': a_copy('my_checkpoint_7'),
    'backup': a_copy('checkpoint_5.backup'),
    'copy': a_copy('checkpoint_5 (copy)'),
    'old': a_copy('old_checkpoint_5'),
    'zeros': a_copy('checkpoint_007'),
    'underscore': a_copy('checkpoint_1_0'),
    'digits_of_another_script': a_copy('checkpoint_٧'),
    'sign': a_copy('checkpoint_+7'),
    'negative': a_copy('checkpoint_-7'),
    'link': a_link('checkpoint_7'),
    'link_to_nothing': lambda folder, good: (folder / 'checkpoint_7').symlink_to('nowhere'),
    'file': a_file('checkpoint_7'),
    'folder_of_a_step': a_folder('checkpoint_7'),
    'empty_folder_of_a_step': lambda folder, good: (folder / 'checkpoint_7').mkdir(),
    'number_alone': a_copy('7'),
    'file_of_a_save': a_file('checkpoint_7.orbax-checkpoint-tmp-1'),
    'temporary_folder_of_somebody': a_folder('notes.orbax-checkpoint-tmp'),
}


def lists(folder: pathlib.Path) -> dict:
  """Returns every entry below `folder`, links as such, but those of the run."""
  def kind(path: pathlib.Path):
    return os.readlink(path) if path.is_symlink() else (
        path.read_bytes() if path.is_file() else 'folder')
  return {str(p.relative_to(folder)): kind(p) for p in folder.rglob('*')}


@pytest.mark.parametrize('put', FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize('newest', [False, True], ids=['among_old_ones', 'newest'])
def test_what_somebody_put_there_stays_and_does_not_count(tmp_path, put, newest):
  """`newest`: a restore looks at it first; else keeping the last one would delete it."""
  good = folder_with(tmp_path / 'elsewhere', 7) / 'checkpoint_7'
  folder = folder_with(tmp_path, 3 if newest else 8)
  before = lists(folder)
  put(folder, good)
  foreign = {name: what for name, what in lists(folder).items() if name not in before}
  assert foreign
  elsewhere = listing(good)
  last = 3 if newest else 8
  assert check_model_dir(folder, target=abstract(new_state())).step == last
  with opened(folder, keep=Keep(last=1)) as checkpointer:
    assert checkpointer.steps() == [last]
    restored = checkpointer.restore_latest(abstract(new_state()))
    assert_equal(restored.state, new_state(last, seed=last))
    for step in (last + 1, last + 2):
      save(checkpointer, step, new_state(step))
      checkpointer.wait()
    assert checkpointer.steps() == [last + 2]
  now = lists(folder)
  assert {name: now.get(name) for name in foreign} == foreign
  assert listing(good) == elsewhere
