"""Lines of files that an interrupted write must not spoil."""

import errno
import os

import pytest

from t5x_gpu.storage.files import append_line, sync_folder, write_problem
from tests.helpers_disk import fill, small_disk


def test_a_line_that_was_cut_short_spoils_only_itself(tmp_path):
  path = tmp_path / 'lines'
  append_line(path, 'first')
  path.write_bytes(path.read_bytes() + b'sec')
  append_line(path, 'third')
  append_line(path, 'fourth')
  assert path.read_text() == 'first\nsec\nthird\nfourth\n'


def test_a_full_disk_says_whether_bytes_inodes_or_a_quota_ended(tmp_path):
  full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  with small_disk(tmp_path / 'few', size='4m', inodes=4) as disk:
    with pytest.raises(OSError) as e:
      for number in range(9):
        (disk / str(number)).write_bytes(b'')
    assert 'all 4 inodes are used; 0.00 GB are free' in write_problem(e.value, disk)
  with small_disk(tmp_path / 'small', size='64k') as disk:
    fill(disk)
    assert write_problem(full, disk) == 'No space left on device: 0.00 GB are free (df -h)'
  assert 'quota of this user' in write_problem(OSError(errno.EDQUOT, 'Disk quota'), tmp_path)
  assert 'inodes are free: the file was larger' in write_problem(full, tmp_path)
  assert write_problem(full, tmp_path / 'gone') == 'No space left on device'


def test_a_file_where_a_folder_should_be_is_named(tmp_path):
  file = tmp_path / 'file'
  file.touch()
  for folder in (file, file / 'a' / 'b'):
    with pytest.raises(OSError) as e:
      folder.mkdir(parents=True, exist_ok=True)
    assert write_problem(e.value, folder) == f'{file} is a file, not a folder'


@pytest.mark.parametrize('number', [errno.EINVAL, errno.EIO])
def test_only_a_file_system_that_cannot_sync_is_left_alone(number, tmp_path, monkeypatch):
  def fsync(_):
    raise OSError(number, os.strerror(number))

  (tmp_path / 'file').touch()
  monkeypatch.setattr(os, 'fsync', fsync)
  if number == errno.EINVAL:
    sync_folder(tmp_path)
  else:
    with pytest.raises(OSError, match=os.strerror(number)):
      sync_folder(tmp_path)
