"""Small files of MODEL_DIR stay readable; damaged ones neither stop nor hang a start."""

import errno
import json
import os

import pytest

from t5x_gpu.checkpoint import initialize
from t5x_gpu.checkpoint.run_files import append_sample, carried_generation
from t5x_gpu.data.sources.source_files import NAME, SourceFiles
from t5x_gpu.errors import AccessError
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
  assert initialize.open_sources(data, tmp_path, resumed=True) is data.files
  [warning] = caplog.messages
  assert NAME in warning and 'a restart compares only' in warning


def test_a_record_of_the_text_that_cannot_be_opened_stops_the_run(tmp_path):
  (tmp_path / 'a.txt').write_text('text')
  data = Data(tmp_path / 'a.txt')
  (tmp_path / NAME).write_bytes(data.files.to_json())
  with refused_to_python(NAME, errno.EACCES), raises(AccessError):
    initialize.open_sources(data, tmp_path, resumed=True)


def test_settings_of_a_converted_model_that_cannot_be_opened_are_not_called_damaged(tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  with refused_to_python('config.json', errno.EACCES), raises(AccessError):
    carried_generation(tmp_path)


def test_a_sample_after_one_that_was_cut_short_can_be_read(tmp_path):
  (tmp_path / 'samples.jsonl').write_text('{"step": 4, "prom')
  append_sample(tmp_path, 8, prompt='a', temperature=1.0, text='ab')
  last = (tmp_path / 'samples.jsonl').read_text().splitlines()[-1]
  assert json.loads(last)['text'] == 'ab'
