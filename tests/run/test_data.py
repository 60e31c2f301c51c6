"""The record of the text that a run reads: a damaged one is a warning, a refused one an error."""

import errno
import os

import pytest

from t5x_gpu.data.sources.source_files import NAME, SourceFiles
from t5x_gpu.errors import AccessError
from t5x_gpu.run.data import open_sources
from tests.helpers_disk import refused_to_python
from tests.messages import raises


class Data:
  """Data that reads one file."""

  def __init__(self, path):
    self.files = SourceFiles({'task': [str(path)]})

  def source_files(self):
    return self.files


@pytest.mark.parametrize(
  'replace',
  [
    os.mkfifo,
    os.mkdir,
    lambda path: os.symlink('/dev/zero', path),
    lambda path: os.symlink(path, path),
    lambda path: path.write_bytes(b'[' * 100_000),
  ],
  ids=['pipe', 'folder', 'device', 'loop', 'garbage'],
)
def test_a_record_of_the_text_that_cannot_be_read_is_a_warning(tmp_path, caplog, replace):
  (tmp_path / 'a.txt').write_text('text')
  replace(tmp_path / NAME)
  data = Data(tmp_path / 'a.txt')
  assert open_sources(data, tmp_path, resumed=True) is data.files
  [warning] = caplog.messages
  assert NAME in warning and 'a restart compares only' in warning


def test_a_record_of_the_text_that_cannot_be_opened_stops_the_run(tmp_path):
  (tmp_path / 'a.txt').write_text('text')
  data = Data(tmp_path / 'a.txt')
  (tmp_path / NAME).write_bytes(data.files.to_json())
  with refused_to_python(NAME, errno.EACCES), raises(AccessError):
    open_sources(data, tmp_path, resumed=True)
