"""Settings of local checkpoints that cannot work are errors with a fix; a run keeps its name."""

import os
import shutil
from typing import Optional

import jax
import numpy as np
import pytest

from t5x_gpu.checkpoint.checkpointer import CheckpointConfig
from t5x_gpu.checkpoint.local.replication import Hosts, plan_copies
from t5x_gpu.checkpoint.local.tier import (
  RUN_ID,
  check_space,
  ensure_run_id,
  local_folder,
  make_private,
  read_run_id,
)
from t5x_gpu.errors import CheckpointError
from tests.helpers_layouts import program
from tests.messages import raises

NAMES = ('gpu-001', 'gpu-002', 'gpu-003', 'gpu-004')
HOSTS = Hosts(NAMES, NAMES, lambda device: device.id // 2)


@pytest.mark.parametrize(
  'local, local_period, period',
  [
    ('/dev/shm/x', 7, 100),
    ('/dev/shm/x', 100, 100),
    ('/dev/shm/x', 0, 100),
    ('/dev/shm/x', None, 100),
    ('/dev/shm/x', 1, 1),
    (None, 10, 100),
  ],
)
def test_periods_that_cannot_be_are_refused_with_their_rule(local, local_period, period):
  with raises(CheckpointError) as e:
    CheckpointConfig(period=period, local_checkpoint_dir=local, local_period=local_period)
  assert e.value.parameters


def test_a_folder_in_model_dir_and_a_variable_that_is_not_set_are_refused(tmp_path, monkeypatch):
  with raises(CheckpointError):
    local_folder(str(tmp_path / 'model' / 'local'), model_dir=tmp_path / 'model')
  with raises(CheckpointError):
    local_folder('/dev/shm/${NO_SUCH_THING}/x', model_dir=tmp_path)
  monkeypatch.setenv('NODE', 'n1')
  assert str(local_folder(f'{tmp_path}/$NODE', model_dir=tmp_path / 'm')) == f'{tmp_path}/n1'


def test_what_does_not_fit_three_times_is_refused_before_anything_is_made(tmp_path):
  abstract = {
    'w': jax.ShapeDtypeStruct((2**44,), np.float32, sharding=program('dp').layout.replicated)
  }
  copies = plan_copies(abstract, HOSTS)
  with raises(CheckpointError):
    raise check_space(tmp_path / 'a' / 'b', copies, HOSTS, run=None)
  (tmp_path / 'file').write_text('')
  with raises(CheckpointError):
    raise looked_at(tmp_path / 'file' / 'x')
  assert [p.name for p in tmp_path.iterdir()] == ['file']


def looked_at(folder, *, run=None) -> Optional[CheckpointError]:
  return check_space(folder, plan_copies(program('dp').abstract_state, HOSTS), HOSTS, run=run)


@pytest.mark.parametrize('mode', [0o777, 0o1777, 0o770, 0o722])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, mode):
  (tmp_path / 'shm' / 'run').mkdir(parents=True, mode=0o700)
  looked_at(tmp_path / 'shm', run='run')
  for folder in (tmp_path / 'shm', tmp_path / 'shm' / 'run'):
    folder.chmod(mode)
    with raises(CheckpointError) as e:
      looked_at(tmp_path / 'shm', run='run')
    assert e.value.docs == 'security.md#local-checkpoints'
    with raises(CheckpointError):
      make_private(tmp_path / 'shm' / 'run')
    folder.chmod(0o755)
  looked_at(tmp_path / 'shm', run='run')


@pytest.mark.skipif(os.geteuid() != 0, reason='only root can give a folder away')
def test_a_folder_or_a_link_of_another_user_is_refused(tmp_path):
  (tmp_path / 'shm').mkdir(mode=0o700)
  (tmp_path / 'link').symlink_to('shm')
  looked_at(tmp_path / 'link')
  os.chown(tmp_path / 'link', 65534, -1, follow_symlinks=False)
  with raises(CheckpointError):
    looked_at(tmp_path / 'link')
  os.chown(tmp_path / 'shm', 65534, -1)
  with raises(CheckpointError):
    looked_at(tmp_path / 'shm')


def test_missing_folders_are_made_for_their_user_alone(tmp_path):
  old = os.umask(0)
  try:
    make_private(tmp_path / 'a' / 'b' / 'run')
  finally:
    os.umask(old)
  for folder in ('a', 'a/b', 'a/b/run'):
    assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700


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
