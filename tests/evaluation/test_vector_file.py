"""A file of vectors appears when it is complete; a bad path or a small disk fails at the start."""

import numpy as np
import pytest

from t5x_gpu.errors import ConfigError
from t5x_gpu.evaluation.generated_text import VectorFile
from tests.helpers_disk import small_disk
from tests.messages import raises


def records(*vectors: list[float]) -> list[dict]:
  return [{'vector': vector} for vector in vectors]


def test_the_file_appears_with_all_rows_in_order(tmp_path):
  path = tmp_path / 'new' / 'v.npy'
  file = VectorFile(str(path), num_rows=3, overwrite=False)
  file.write(records([1.0, 2.0], [3.0, 4.0]))
  file.write(records([5.0, 6.0]))
  assert not path.exists()
  file.close()
  found = np.load(path)
  assert found.dtype == np.float32 and found.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
  assert [p.name for p in path.parent.iterdir()] == ['v.npy']


def test_no_result_is_an_empty_array(tmp_path):
  VectorFile(str(tmp_path / 'v.npy'), num_rows=0, overwrite=False).close()
  assert np.load(tmp_path / 'v.npy').shape == (0,)


def test_an_interrupted_run_leaves_the_earlier_file(tmp_path):
  path = tmp_path / 'v.npy'
  np.save(path, np.ones(3))
  file = VectorFile(str(path), num_rows=2, overwrite=True)
  file.write(records([1.0]))
  file.close()
  assert np.load(path).tolist() == [1.0, 1.0, 1.0]
  assert [p.name for p in tmp_path.iterdir()] == ['v.npy']


@pytest.mark.parametrize('path', ['/proc/x.npy', '/proc/no/x.npy', '/dev'])
def test_a_path_that_cannot_be_written_is_refused_at_the_start(path):
  with raises(ConfigError):
    VectorFile(path, num_rows=1, overwrite=True)


def test_a_disk_without_room_for_all_vectors_is_refused_at_the_first(tmp_path):
  with small_disk(tmp_path / 'disk', size='64k') as disk:
    file = VectorFile(str(disk / 'v.npy'), num_rows=100_000, overwrite=False)
    with raises(ConfigError):
      file.write(records([1.0, 2.0]))
    file.close()
    assert not list(disk.iterdir())
