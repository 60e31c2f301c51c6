"""Orbax's CheckpointManager lists and restores checkpoints of a MODEL_DIR, as the docs show."""

import contextlib
import errno
import os

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_gpu import reshard
from t5x_gpu.checkpoint.model_dir import (
  UNREADABLE,
  committed_steps,
  read_metadata,
  remove_checkpoint,
  remove_leftovers,
)
from t5x_gpu.checkpoint.params_files import ParamsWriter
from tests.checkpoint.test_checkpointer import abstract, assert_equal, folder_with, new_state
from tests.helpers_train import listing, run_here


@pytest.fixture
def open_manager():
  managers = []

  def opened(folder):
    managers.append(
      ocp.CheckpointManager(
        folder, options=ocp.CheckpointManagerOptions(step_prefix='checkpoint', read_only=True)
      )
    )
    return managers[-1]

  yield opened
  for manager in managers:
    manager.close()


def test_steps_are_listed_and_a_state_comes_back_on_any_mesh(tmp_path, open_manager):
  folder = folder_with(tmp_path, 3, 7)
  # What else may lie there: an unreadable checkpoint, a save that was cut off, other files.
  for name in ('corrupt_checkpoint_5', 'checkpoint_9.orbax-checkpoint-tmp', 'eval', 'tensorboard'):
    (folder / name).mkdir()
  (folder / 'config.gin').write_text('')
  before = listing(folder)
  manager = open_manager(folder)
  assert manager.all_steps() == [3, 7] and manager.latest_step() == 7

  mesh = Mesh(np.array(jax.devices()), ('data',))
  rows = NamedSharding(mesh, PartitionSpec('data'))
  target = abstract(new_state()).saved()
  target['params'] = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), target['params']
  )
  for step in (3, 7):
    state = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))[
      'state'
    ]
    assert_equal(state, new_state(step, seed=step).saved())
    assert state['params']['dense']['kernel'].sharding == rows
  assert listing(folder) == before


@pytest.mark.filterwarnings('ignore:Sharding info not provided')
def test_without_a_target_the_items_are_dictionaries(tmp_path, open_manager):
  items = open_manager(folder_with(tmp_path, 3)).restore(3)
  np.testing.assert_array_equal(
    items['state']['params']['dense']['kernel'], new_state(3, seed=3).params['dense']['kernel']
  )
  assert items['state']['step'] == 3 and items['manifest']['next_batch_hash'] == 'hash3'


def test_so_are_checkpoints_that_other_commands_wrote(tmp_path, open_manager):
  kernel = np.arange(64.0, dtype=np.float32).reshape(16, 4)
  with ParamsWriter(
    tmp_path / 'converted',
    step=5,
    shapes={'dense/kernel': (16, 4)},
    chunks={'dense/kernel': (8, 4)},
    about={},
    compress=True,
  ) as writer:
    writer.write('dense/kernel', (), kernel)
  folder = folder_with(tmp_path, 3)
  done = run_here(lambda: reshard.main([f'--from={folder}', f'--to={tmp_path}/new']))
  assert done.code == 0, done.err
  converted, resharded = open_manager(tmp_path / 'converted'), open_manager(tmp_path / 'new')
  assert converted.all_steps() == [5] and resharded.all_steps() == [3]
  np.testing.assert_array_equal(converted.restore(5)['state']['params']['dense']['kernel'], kernel)
  state = resharded.restore(
    3, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract(new_state()).saved()))
  )['state']
  assert_equal(state, new_state(3, seed=3).saved())


@contextlib.contextmanager
def killed_after_some_files(monkeypatch):
  """Raises after the first deleted file of metadata, as if the process had been killed.

  Which file is the first of all depends on Python and the file system.
  """
  unlink, deleted = os.unlink, []

  def unlink_some(path, **options):
    if 'metadata' in deleted:
      raise OSError(errno.EIO, 'killed')
    deleted.append(os.path.basename(path))
    unlink(path, **options)

  with monkeypatch.context() as patch, pytest.raises(OSError, match='killed'):
    patch.setattr(os, 'unlink', unlink_some)
    yield


def test_a_killed_deletion_leaves_half_of_a_checkpoint_with_orbax_and_none_with_t5x_gpu(
  tmp_path, monkeypatch
):
  """Why t5x_gpu deletes checkpoints itself."""
  folder = folder_with(tmp_path, 3, 7)
  options = ocp.CheckpointManagerOptions(step_prefix='checkpoint')
  with ocp.CheckpointManager(folder, options=options) as manager:
    with killed_after_some_files(monkeypatch):
      manager.delete(3)
  assert committed_steps(folder) == [3, 7]
  with pytest.raises(UNREADABLE):
    read_metadata(folder, 3)

  with killed_after_some_files(monkeypatch):
    remove_checkpoint(folder, 7)
  assert committed_steps(folder) == [3]
  assert remove_leftovers(folder) == [7]
