"""Folders that appear complete or not at all, on file systems with and without locks."""

import errno
import fcntl
import os
import pathlib

import pytest

from t5x_gpu.checkpoint.atomic_folder import Journal, new_folder
from t5x_gpu.errors import CheckpointError
from t5x_gpu.storage import files
from tests.messages import raises


def write_to(target: pathlib.Path) -> None:
  with new_folder(target, num_bytes=0) as folder:
    (folder / 'file').write_text('content')


@pytest.mark.parametrize('code', [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_written_all_the_same(tmp_path, monkeypatch, code):
  def flock(*args):
    raise OSError(code, os.strerror(code))

  monkeypatch.setattr(fcntl, 'flock', flock)
  write_to(tmp_path / 'new')
  assert [p.name for p in tmp_path.iterdir()] == ['new']


def test_a_folder_appears_once_its_files_are_on_the_disk(tmp_path, monkeypatch):
  synced, before = [], []
  sync, rename = os.fsync, os.rename

  def noted_sync(number):
    synced.append(pathlib.Path(os.readlink(f'/proc/self/fd/{number}')).name)
    sync(number)

  def noted_rename(source, target):
    before.extend(synced)
    rename(source, target)

  monkeypatch.setattr(os, 'fsync', noted_sync)
  monkeypatch.setattr(os, 'rename', noted_rename)
  write_to(tmp_path / 'target')
  assert before == ['file', 'new']  # the folder has another name until it is complete
  assert synced[2:] == [tmp_path.name]


@pytest.fixture
def nfs(tmp_path, monkeypatch):
  """On NFS, an open file that is removed stays in its folder under another name."""
  rmdir = os.rmdir

  def rmdir_unless_open(path, **options):
    links = [f'/proc/self/fd/{number}' for number in os.listdir('/proc/self/fd')]
    targets = [os.readlink(link) for link in links if os.path.exists(link) or os.path.islink(link)]
    if any(target.startswith(f'{os.path.abspath(path)}/') for target in targets):
      raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
    rmdir(path, **options)

  monkeypatch.setattr(os, 'rmdir', rmdir_unless_open)


def test_nothing_is_left_on_nfs(tmp_path, nfs):
  write_to(tmp_path / 'new')
  assert [p.name for p in tmp_path.iterdir()] == ['new']


def test_a_block_that_fails_leaves_nothing_on_nfs(tmp_path, nfs):
  with pytest.raises(KeyError), new_folder(tmp_path / 'a' / 'new', num_bytes=0):
    raise KeyError
  assert not list(tmp_path.iterdir())


def fail(*args):
  raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_failure_at_the_start_leaves_nothing_and_names_the_target(tmp_path, monkeypatch):
  monkeypatch.setattr(fcntl, 'flock', fail)
  with raises(CheckpointError):
    Journal(tmp_path / 'new', work=None, num_bytes=0)
  assert not list(tmp_path.iterdir())


def test_a_disk_of_unknown_space_does_not_stop_the_work(tmp_path, monkeypatch):
  monkeypatch.setattr(files.shutil, 'disk_usage', fail)
  write_to(tmp_path / 'new')
  assert [p.name for p in tmp_path.iterdir()] == ['new']


def test_an_unfinished_folder_survives_a_failure_at_the_start(tmp_path):
  with Journal(tmp_path / 'new', work={'a': 1}, num_bytes=0) as journal:
    (journal.folder / 'file').write_text('content')
    journal.note({'pieces': 1})
  with raises(CheckpointError):
    Journal(tmp_path / 'new', work={'a': 1}, num_bytes=10**18)
  with Journal(tmp_path / 'new', work={'a': 1}, num_bytes=0) as journal:
    assert journal.entry == {'pieces': 1} and (journal.folder / 'file').exists()
    journal.finish()
  assert [p.name for p in tmp_path.iterdir()] == ['new']
