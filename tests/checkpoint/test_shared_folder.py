"""One MODEL_DIR for all processes; several processes: tests/cluster/test_hosts_that_disagree."""

import threading

import pytest

from t5x_gpu.checkpoint import model_dir
from t5x_gpu.errors import CheckpointError
from t5x_gpu.runtime.shared_folder import sees
from t5x_gpu.storage.paths import as_path
from tests.messages import raises


def test_a_single_process_touches_nothing(tmp_path):
  assert model_dir.shared_model_dir(tmp_path / 'model').path == tmp_path / 'model'
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('dry_run', [True, False])
def test_what_is_written_to_look_for_is_gone_afterwards(tmp_path, dry_run):
  folder = tmp_path / 'runs' / 'model'
  with model_dir._marked(folder, dry_run=dry_run) as name:
    assert sees(folder, name, seconds=20)
  assert [path.name for path in tmp_path.rglob('*')] == ([] if dry_run else ['runs', 'model'])


def test_a_file_that_another_host_shows_late_is_seen(tmp_path):
  folder = tmp_path / 'model'

  def write() -> None:
    folder.mkdir()
    (folder / 'name').touch()

  late = threading.Timer(0.3, write)
  late.start()
  assert sees(folder, 'name', seconds=20)
  late.join()


def test_a_file_that_never_comes_is_not_seen(tmp_path):
  (tmp_path / 'model').write_text('a file in the place of the folder')
  assert not sees(tmp_path / 'model', 'name', seconds=0.2)
  assert not sees(tmp_path / 'none', 'name', seconds=0.2)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
  (tmp_path / 'model').write_text('a file in the place of the folder')
  with raises(CheckpointError):
    with model_dir._marked(tmp_path / 'model', dry_run=False):
      pass


def test_object_storage_is_asked_in_the_same_way(server):
  folder = as_path('s3://runs/shared')
  with model_dir._marked(folder, dry_run=False) as name:
    assert sees(folder, name, seconds=20)
    assert not sees(as_path('s3://runs/other'), name, seconds=0.2)
  assert folder.files() == []


def test_the_error_names_each_host_that_does_not_see_it(monkeypatch):
  names = tuple(f'node{i // 2}' for i in range(8))
  monkeypatch.setattr(model_dir.distributed, 'hostnames', lambda: names)
  text = str(model_dir._not_shared([3, 4, 5], ['/runs/a'] * 8))
  assert '3 of 8 processes do not see it:\n' in text and 'Process 0 (node0) wrote' in text
  assert '  process 3 (node1): /runs/a\n' in text
  assert '  process 4 (node2) and 1 more: /runs/a\n' in text
