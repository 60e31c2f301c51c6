"""Settings of local checkpoints that cannot work are errors with a fix; a run keeps its name."""

import shutil

import jax
import numpy as np
import pytest

from t5x_gpu.checkpoint.checkpointer import CheckpointConfig
from t5x_gpu.checkpoint.local.replication import Hosts, plan_copies
from t5x_gpu.checkpoint.local.run_id import RUN_ID, ensure_run_id, read_run_id
from t5x_gpu.checkpoint.local.settings import check_space, local_folder
from t5x_gpu.errors import CheckpointError
from tests.helpers_layouts import program

NAMES = ('gpu-001', 'gpu-002', 'gpu-003', 'gpu-004')
HOSTS = Hosts(NAMES, NAMES, lambda device: device.id // 2)


@pytest.mark.parametrize(
  'local, local_period, period, words',
  [
    ('/dev/shm/x', 7, 100, 'local_period = 5 or 10, or CheckpointConfig.period = 105'),
    ('/dev/shm/x', 100, 100, 'local_period = 50'),
    ('/dev/shm/x', 0, 100, 'local_period = 1'),
    ('/dev/shm/x', None, 100, 'local_period = 10'),
    ('/dev/shm/x', 1, 1, 'period = 10 or more'),
    (None, 10, 100, "local_checkpoint_dir = '/dev/shm/$USER'"),
  ],
)
def test_periods_that_cannot_be_are_refused_with_those_that_can(local, local_period, period, words):
  with pytest.raises(CheckpointError) as e:
    CheckpointConfig(period=period, local_checkpoint_dir=local, local_period=local_period)
  assert words in str(e.value)


def test_a_folder_in_model_dir_and_a_variable_that_is_not_set_are_refused(tmp_path, monkeypatch):
  with pytest.raises(CheckpointError, match='is inside MODEL_DIR'):
    local_folder(str(tmp_path / 'model' / 'local'), model_dir=tmp_path / 'model')
  with pytest.raises(CheckpointError, match='NO_SUCH_THING is not set'):
    local_folder('/dev/shm/${NO_SUCH_THING}/x', model_dir=tmp_path)
  monkeypatch.setenv('NODE', 'n1')
  assert str(local_folder(f'{tmp_path}/$NODE', model_dir=tmp_path / 'm')) == f'{tmp_path}/n1'


def test_what_does_not_fit_three_times_is_refused_before_anything_is_made(tmp_path):
  abstract = {
    'w': jax.ShapeDtypeStruct((2**44,), np.float32, sharding=program('dp').layout.replicated)
  }
  copies = plan_copies(abstract, HOSTS)
  with pytest.raises(CheckpointError) as e:
    check_space(tmp_path / 'a' / 'b', copies, HOSTS, run=None)
  assert '2.11e+05 GB there: 3 times 7.04e+04 GB' in str(e.value)
  (tmp_path / 'file').write_text('')
  with pytest.raises(CheckpointError, match='cannot be written to by process 0 on gpu-001'):
    check_space(
      tmp_path / 'file' / 'x', plan_copies(program('dp').abstract_state, HOSTS), HOSTS, run=None
    )
  assert [p.name for p in tmp_path.iterdir()] == ['file']


def test_a_moved_model_dir_is_the_same_run_and_a_copied_one_another(tmp_path):
  first = tmp_path / 'first'
  first.mkdir()
  name = ensure_run_id(first)
  assert ensure_run_id(first) == name == read_run_id(first)
  shutil.copytree(first, tmp_path / 'copy')
  assert read_run_id(tmp_path / 'copy') is None
  assert ensure_run_id(tmp_path / 'copy') != name
  first.rename(tmp_path / 'moved')
  assert ensure_run_id(tmp_path / 'moved') == name
  assert (tmp_path / 'moved' / RUN_ID).exists()
