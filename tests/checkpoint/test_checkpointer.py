"""Checkpoints hold the state of their step, fall back by name, and never overwrite what is good."""

import contextlib
import os
import pathlib
import re
import shutil
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from etils import epath

from t5x_gpu.checkpoint import checkpointer as checkpointer_lib
from t5x_gpu.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from t5x_gpu.checkpoint.manifest import make_manifest
from t5x_gpu.checkpoint.model_dir import check_array_files, newest_complete
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.checkpoint.run_lock import LOCK
from t5x_gpu.checkpoint.store import read_state, spec_of
from t5x_gpu.errors import CheckpointError, ConfigError
from t5x_gpu.storage.paths import context
from t5x_gpu.training.state import TrainState
from tests.checkpoint.test_run_lock import lock_of
from tests.helpers_disk import small_disk
from tests.helpers_train import listing
from tests.messages import raises


def new_state(step: int = 0, *, rows: int = 64, seed: int = 0) -> TrainState:
  # 2 KiB of random numbers: arrays below 1 KiB are kept in the index.
  kernel = jax.random.normal(jax.random.key(seed), (rows, 8))
  return TrainState(
    step=jnp.int32(step),
    params={'dense': {'kernel': kernel}},
    opt_state={'mu': jnp.zeros((rows, 8))},
  )


def abstract(state: TrainState) -> TrainState:
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def save(checkpointer: Checkpointer, step: int, state: TrainState, **facts) -> None:
  checkpointer.save(
    step,
    state,
    data_state=b'data of %d' % step,
    manifest=make_manifest(
      state, mesh_shape={'data': 1}, data={'task': 'none'}, next_batch_hash=f'hash{step}', **facts
    ),
  )


@contextlib.contextmanager
def opened(folder, **options):
  checkpointer = Checkpointer(str(folder), **options)
  try:
    yield checkpointer
  finally:
    checkpointer.close()


def folder_with(tmp_path, *steps: int):
  """Returns a folder with these checkpoints, written and committed."""
  with opened(tmp_path / 'model', keep=Keep()) as checkpointer:
    for step in steps:
      save(checkpointer, step, new_state(step, seed=step))
    checkpointer.wait()
  return tmp_path / 'model'


def write_array(state, name: str, array: np.ndarray) -> None:
  """Writes an array into the folder `state` of a checkpoint, as a process that saves does."""
  spec = spec_of(state, name)
  options = dict(dtype=array.dtype, shape=array.shape, create=True, open=True, context=context())
  ts.open(spec, **options).result().write(array).result()


def assert_equal(got: Any, want: Any) -> None:
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    np.testing.assert_array_equal(a, b)


def test_no_checkpoint_restores_none(tmp_path):
  with opened(tmp_path / 'model') as checkpointer:
    assert checkpointer.restore_latest(abstract(new_state())) is None


def test_state_data_and_manifest_come_back(tmp_path):
  folder = folder_with(tmp_path, 3)
  with opened(folder) as checkpointer:
    restored = checkpointer.restore_latest(abstract(new_state()))
  assert_equal(restored.state, new_state(3, seed=3))
  assert restored.data_state == b'data of 3'
  assert restored.manifest['next_batch_hash'] == 'hash3'
  assert restored.manifest['arrays']['params/dense/kernel'] == [[64, 8], 'float32']
  assert set(restored.manifest['versions']) >= {'jax', 'orbax-checkpoint'}


def test_a_checkpoint_that_was_just_saved_is_the_latest(tmp_path):
  with opened(tmp_path / 'model', keep=Keep(last=1)) as checkpointer:
    for step in (1, 2, 3):
      save(checkpointer, step, new_state(step, seed=step))
      checkpointer.wait()
      assert_equal(
        checkpointer.restore_latest(abstract(new_state())).state, new_state(step, seed=step)
      )


def test_a_run_that_lost_its_model_dir_while_it_restored_renames_nothing(tmp_path):
  folder = folder_with(tmp_path, 1, 2)
  for path in (folder / 'checkpoint_2').glob('state/**/d/*'):
    path.write_bytes(bytes(path.stat().st_size))
  with opened(folder) as checkpointer:
    before = sorted(folder.iterdir())
    lock_of(folder, host='gpu-08', kernel='another')
    with raises(CheckpointError):
      checkpointer.restore_latest(abstract(new_state()))
  assert sorted(folder.iterdir()) == before


def addresses(state: TrainState) -> set[int]:
  return {x.unsafe_buffer_pointer() for x in jax.tree.leaves((state.params, state.opt_state))}


def test_a_saved_state_is_that_of_its_step_though_donated_buffers_change_meanwhile(tmp_path):
  """The write continues in the background while the next updates reuse the memory of the state."""
  update = jax.jit(
    lambda s: TrainState(
      s.step + 1,
      jax.tree.map(lambda x: x * 1.5 + 1, s.params),
      jax.tree.map(lambda x: x - 1, s.opt_state),
    ),
    donate_argnums=0,
  )
  rows = 2**18  # 8 MiB an array: big enough for the write to overlap
  state = update(new_state(rows=rows))
  memory = addresses(state)
  state = update(state)
  assert addresses(state) & memory, 'nothing is donated: the test would prove nothing'
  with opened(tmp_path / 'model', keep=Keep()) as checkpointer:
    wanted = {}
    for step in range(1, 6):
      wanted[step] = jax.tree.map(np.array, state)  # np.array copies
      save(checkpointer, step, state)
      for _ in range(4):
        state = update(state)
    checkpointer.wait()
    for step, want in wanted.items():
      got = read_state(checkpointer.path(step), abstract(state))
      assert_equal(got, want)


def test_the_last_three_stay(tmp_path):
  with opened(tmp_path / 'model', keep=Keep(last=3)) as checkpointer:
    for step in (2, 4, 6, 8, 9):
      save(checkpointer, step, new_state(step))
    checkpointer.wait()
    assert checkpointer.steps() == [6, 8, 9]
  assert sorted(set(os.listdir(tmp_path / 'model')) - {LOCK}) == [
    'checkpoint_6',
    'checkpoint_8',
    'checkpoint_9',
  ]


def test_a_checkpoint_is_on_the_disk_before_an_older_one_is_deleted(tmp_path, monkeypatch):
  synced, before_deletion = set(), set()
  sync, rename = os.fsync, os.rename

  def noted_sync(number):
    synced.add(re.sub(r'\.orbax-checkpoint-tmp[-0-9]*', '', os.readlink(f'/proc/self/fd/{number}')))
    sync(number)

  def noted_rename(source, target, **options):
    if '.removed_' in str(target):
      before_deletion.update(synced)
    rename(source, target, **options)

  monkeypatch.setattr(os, 'fsync', noted_sync)
  monkeypatch.setattr(os, 'rename', noted_rename)
  with opened(tmp_path, keep=Keep(last=1)) as checkpointer:
    for step in (1, 2):
      save(checkpointer, step, new_state(step))
  names = {path.relative_to(tmp_path).as_posix() for path in (tmp_path / 'checkpoint_2').rglob('*')}
  ours = {name for name in names if 'ocdbt.process_' not in name}  # TensorStore syncs its files
  ours -= {'checkpoint_2/commit_success.txt'}  # nothing reads it
  assert {'checkpoint_2/data/metadata', 'checkpoint_2/manifest/metadata'} < ours
  assert {str(tmp_path), *(str(tmp_path / name) for name in ours)} <= before_deletion


@pytest.mark.parametrize('best_is, best', [('min', 4), ('max', 5)])
def test_multiples_the_best_and_the_last_are_kept_also_after_a_restart(tmp_path, best_is, best):
  keep = Keep(last=1, every=10, best=1, metric='eval/loss', best_is=best_is)
  losses = {2: 3.0, 3: float('nan'), 4: 1.0, 5: 7.0, 12: 2.0}  # 10 and 11 are not evaluated
  for steps in ((2, 3, 4, 5), (10, 11, 12)):
    with opened(tmp_path / 'model', keep=keep) as checkpointer:
      for step in steps:
        save(
          checkpointer,
          step,
          new_state(step),
          metrics=({'eval/loss': losses[step]} if step in losses else None),
        )
      checkpointer.wait()
      assert checkpointer.steps() == {5: sorted({best, 5}), 12: [best, 10, 12]}[steps[-1]]


def test_the_best_by_a_metric_that_nothing_measures_is_refused(tmp_path):
  with opened(tmp_path / 'model', keep=Keep(last=1, best=1, metric='eval/los')) as checkpointer:
    with raises(ConfigError):
      save(checkpointer, 1, new_state(1), metrics={'eval/loss': 1.0})
    assert checkpointer.steps() == [1]  # what was trained is kept


def test_the_best_by_an_evaluation_that_is_not_due_or_not_there(tmp_path):
  keep = Keep(last=1, best=1, metric='infer_eval/task/score')
  assert keep.value_of({'eval/loss': 1.0}) is None  # not its turn
  assert keep.value_of({'eval/loss': 1.0, 'infer_eval/task/score': 2.0}) == 2.0
  config = CheckpointConfig(period=5, keep_best=1, best_metric='infer_eval/task/score')
  config.check_best(20, None, 10)
  with raises(CheckpointError):
    config.check_best(20, 5, None)
  with raises(CheckpointError):
    CheckpointConfig(period=5, keep_best=1, best_metric='evl/loss').check_best(20, 5, 5)


@pytest.mark.parametrize(
  'options', [{'keep': None, 'keep_best': 2}, {'keep_best': 2, 'best_is': 'low'}]
)
def test_what_to_keep_must_make_sense(options):
  with raises(CheckpointError):
    CheckpointConfig(period=1, **options)


@pytest.mark.parametrize(
  'options', [{'period': 0}, {'period': 5, 'keep': 0}, {'period': 5, 'keep_best': 0}]
)
def test_periods_and_counts_below_one_are_refused(options):
  with raises(CheckpointError):
    CheckpointConfig(**options)


def test_an_existing_step_is_not_overwritten(tmp_path):
  folder = folder_with(tmp_path, 3)
  with opened(folder) as checkpointer:
    with raises(CheckpointError):
      save(checkpointer, 3, new_state(3, seed=9))
    assert_equal(checkpointer.restore_latest(abstract(new_state())).state, new_state(3, seed=3))


def flip_bit(path, text: str) -> None:
  """Changes the last letter of `text` in a file that stays readable JSON."""
  content = path.read_text()
  assert content.count(text) == 1
  path.write_text(content.replace(text, text[:-1] + chr(ord(text[-1]) ^ 1)))


def largest_data_file(checkpoint):
  return max((p for p in checkpoint.rglob('d/*')), key=lambda p: p.stat().st_size)


CORRUPTIONS = {
  'data_file_cut': lambda c: os.truncate(largest_data_file(c), 40),
  'data_file_short_by_one_byte': lambda c: os.truncate(
    largest_data_file(c), largest_data_file(c).stat().st_size - 1
  ),
  'data_file_empty': lambda c: os.truncate(largest_data_file(c), 0),
  'data_file_gone': lambda c: largest_data_file(c).unlink(),
  'node_of_index_cut': lambda c: [os.truncate(p, 40) for p in (c / 'state/d').iterdir()],
  'index_cut': lambda c: os.truncate(c / 'state/manifest.ocdbt', 20),
  'tree_garbled': lambda c: (c / 'state/_METADATA').write_text('{"not": '),
  'tree_gone': lambda c: (c / 'state/_METADATA').unlink(),
  'state_gone': lambda c: shutil.rmtree(c / 'state'),
  'manifest_gone': lambda c: shutil.rmtree(c / 'manifest'),
  'manifest_cut': lambda c: os.truncate(c / 'manifest/metadata', 30),
  'manifest_of_nothing': lambda c: (c / 'manifest/metadata').write_text('{}'),
  'manifest_without_hash': lambda c: (c / 'manifest/metadata').write_text(
    (c / 'manifest/metadata').read_text().replace('next_batch_hash', 'hash')
  ),
  'manifest_not_an_object': lambda c: (c / 'manifest/metadata').write_text('[]'),
  'manifest_bit_flipped_in_the_hash': lambda c: flip_bit(
    c / 'manifest/metadata', '"next_batch_hash": "hash'
  ),
  'manifest_bit_flipped_in_a_name': lambda c: flip_bit(
    c / 'manifest/metadata', '"arrays": {"step": [[], "int3'
  ),
  'data_state_bit_flipped': lambda c: flip_bit(c / 'data/metadata', '{"iterator": "ZG'),
  'data_state_gone': lambda c: shutil.rmtree(c / 'data'),
  'data_state_garbled': lambda c: (c / 'data/metadata').write_text('{"iterator": "!"}'),
  'data_state_not_an_object': lambda c: (c / 'data/metadata').write_text('7'),
  'empty_folder': lambda c: [shutil.rmtree(c), c.mkdir()],
  'orbax_metadata_garbled': lambda c: (c / '_CHECKPOINT_METADATA').write_bytes(b'\x00\xff'),
}


# One of each kind in `make test`.
KINDS = (
  'data_file_cut',
  'index_cut',
  'tree_garbled',
  'state_gone',
  'manifest_gone',
  'manifest_bit_flipped_in_a_name',
  'data_state_garbled',
  'empty_folder',
)
every_corruption = pytest.mark.parametrize(
  'corrupt',
  [
    pytest.param(corrupt, id=name, marks=[] if name in KINDS else pytest.mark.slow)
    for name, corrupt in CORRUPTIONS.items()
  ],
)


@pytest.mark.quick_cases('manifest_bit_flipped*', 'data_file_cut', 'state_gone')
@every_corruption
def test_a_corrupt_latest_checkpoint_is_set_aside_and_the_one_before_is_used(
  tmp_path, caplog, corrupt
):
  folder = folder_with(tmp_path, 10, 20)
  corrupt(folder / 'checkpoint_20')
  with opened(folder) as checkpointer:
    restored = checkpointer.restore_latest(abstract(new_state()))
    if int(restored.state.step) == 20:  # this harm does not matter to what is read
      assert_equal(restored.state, new_state(20, seed=20))
      assert restored.data_state == b'data of 20'
      return
    assert_equal(restored.state, new_state(10, seed=10))
    assert restored.data_state == b'data of 10'
    assert 'checkpoint_20 cannot be read' in caplog.text
    assert 'Continuing from checkpoint_10' in caplog.text
    assert sorted(set(os.listdir(folder)) - {LOCK}) == ['checkpoint_10', 'corrupt_checkpoint_20']
    assert checkpointer.steps() == [10]
    save(checkpointer, 20, new_state(20, seed=5))  # its step can be written again
    checkpointer.wait()
  with opened(folder) as checkpointer:
    assert_equal(checkpointer.restore_latest(abstract(new_state())).state, new_state(20, seed=5))


@pytest.mark.quick_cases('manifest_bit_flipped*', 'data_file_cut')
@every_corruption
def test_the_check_before_a_run_finds_what_the_restore_would_stumble_over(
  tmp_path, caplog, corrupt
):
  folder = folder_with(tmp_path, 10, 20)
  corrupt(folder / 'checkpoint_20')
  before = listing(folder)
  found = newest_complete(folder, target=abstract(new_state())).step
  assert listing(folder) == before
  assert ('checkpoint_20 cannot be read' in caplog.text) == (found == 10)
  with opened(folder) as checkpointer:
    assert int(checkpointer.restore_latest(abstract(new_state())).state.step) == found


@pytest.mark.quick_cases('manifest_gone', 'data_file_cut')
@every_corruption
def test_the_check_fails_in_the_words_of_the_restore_when_none_can_be_read(tmp_path, corrupt):
  folder = folder_with(tmp_path, 10)
  corrupt(folder / 'checkpoint_10')
  try:
    newest_complete(folder, target=abstract(new_state()))
    words = ''
  except CheckpointError as e:
    words = str(e)
    assert 'None of the 1 checkpoints' in words
  with opened(folder) as checkpointer:
    with pytest.raises(CheckpointError) if words else contextlib.nullcontext() as e:
      checkpointer.restore_latest(abstract(new_state()))
  assert not words or str(e.value) == words


def test_pieces_of_arrays_are_found_through_many_nodes_of_the_index(tmp_path):
  store = ts.KvStore.open(
    {
      'driver': 'ocdbt',
      'base': f'file://{tmp_path}/',
      'config': {'max_inline_value_bytes': 10, 'max_decoded_node_bytes': 1000},
    }
  ).result()
  with ts.Transaction() as transaction:
    for i in range(500):
      store.with_transaction(transaction)[f'layer_{i:03}/0'] = b'some value' * (i % 3)
  check_array_files(tmp_path)
  for key in (b'layer_300/.zarray', b'layer_300/0/.zarray'):
    store[key] = b'[]'
    with pytest.raises(ValueError, match=f'{key.decode()} is damaged: it is .*, not an object'):
      check_array_files(tmp_path)
    del store[key]
  largest = largest_data_file(tmp_path)
  # In half: at the end may stand nodes that a second attempt of the commit has replaced.
  os.truncate(largest, largest.stat().st_size // 2)
  with pytest.raises(ValueError):
    check_array_files(tmp_path)


def test_a_truncated_file_is_named_with_what_is_missing(tmp_path):
  folder = folder_with(tmp_path, 10) / 'checkpoint_10/state'
  check_array_files(folder)
  largest = largest_data_file(folder)
  size = largest.stat().st_size
  os.truncate(largest, size // 2)
  with pytest.raises(ValueError, match=f'{largest.name} is truncated: it has {size // 2:,} of at'):
    check_array_files(folder)


def test_bytes_that_changed_inside_a_file_are_found_by_the_restore(tmp_path, caplog):
  shardings = jax.NamedSharding(jax.make_mesh((8,), ('data',)), jax.P('data'))
  kernels = {
    f'dense{i}': jax.device_put(jax.random.normal(jax.random.key(i), (64, 64)), shardings)
    for i in range(20)
  }
  state = TrainState(step=jnp.int32(10), params=kernels, opt_state={})
  with opened(tmp_path / 'model', keep=Keep()) as checkpointer:
    for step in (10, 20):
      save(checkpointer, step, state)
    checkpointer.wait()
  for path in (tmp_path / 'model/checkpoint_20/state/ocdbt.process_0/d').iterdir():
    size = path.stat().st_size
    path.write_bytes(b'\xff' * (size // 2) + path.read_bytes()[size // 2 :])
  with opened(tmp_path / 'model') as checkpointer:
    assert_equal(checkpointer.restore_latest(abstract(state)).state, state)
  assert 'Continuing from checkpoint_10' in caplog.text


def test_the_second_corrupt_checkpoint_of_a_step_is_kept_too(tmp_path):
  folder = folder_with(tmp_path, 10, 20)
  (folder / 'corrupt_checkpoint_20').mkdir()
  shutil.rmtree(folder / 'checkpoint_20/state')
  with opened(folder) as checkpointer:
    assert int(checkpointer.restore_latest(abstract(new_state())).state.step) == 10
  assert (folder / 'corrupt_checkpoint_20.1/manifest').exists()


def test_nothing_is_renamed_or_written_when_all_are_corrupt(tmp_path):
  folder = folder_with(tmp_path, 10, 20)
  for step in (10, 20):
    shutil.rmtree(folder / f'checkpoint_{step}/state')
  before = sorted(str(p) for p in folder.rglob('*'))
  with opened(folder) as checkpointer:
    with raises(CheckpointError):
      checkpointer.restore_latest(abstract(new_state()))
  assert sorted(str(p) for p in folder.rglob('*')) == before


def test_another_model_is_refused_with_the_arrays_that_differ(tmp_path):
  folder = folder_with(tmp_path, 10)
  target = abstract(new_state(rows=6)).replace(opt_state={})
  with opened(folder) as checkpointer:
    with raises(CheckpointError):
      checkpointer.restore_latest(target)
  assert sorted(set(os.listdir(folder)) - {LOCK}) == ['checkpoint_10']


def test_a_save_cut_short_by_a_kill_is_not_a_checkpoint(tmp_path):
  folder = folder_with(tmp_path, 10)
  shutil.copytree(
    folder / 'checkpoint_10', folder / 'checkpoint_20.orbax-checkpoint-tmp-1234567890123456'
  )
  (folder / 'notes').mkdir()
  with opened(folder) as checkpointer:
    assert checkpointer.steps() == [10]
    assert int(checkpointer.restore_latest(abstract(new_state())).state.step) == 10
    save(checkpointer, 20, new_state(20))
    checkpointer.wait()
    assert checkpointer.steps() == [10, 20]
  assert sorted(set(os.listdir(folder)) - {LOCK}) == ['checkpoint_10', 'checkpoint_20', 'notes']


def test_a_model_dir_that_is_deleted_while_a_save_writes_is_named(tmp_path, monkeypatch):
  folder = tmp_path / 'model'

  def write(*args, **kwargs):
    shutil.rmtree(folder)
    raise FileNotFoundError(2, 'No such file or directory', str(folder / 'checkpoint_10'))

  with raises(CheckpointError):
    with opened(folder) as checkpointer:
      monkeypatch.setattr(checkpointer._orbax, 'save', write)
      save(checkpointer, 10, new_state(10))


def test_a_save_that_another_run_has_overtaken_commits_nothing(tmp_path, monkeypatch):
  folder = folder_with(tmp_path, 1)
  check_written = checkpointer_lib.check_written

  def take_over(state) -> None:  # while this run is suspended, after its last write
    check_written(state)
    lock_of(folder, host='gpu-08', kernel='another')

  monkeypatch.setattr(checkpointer_lib, 'check_written', take_over)
  with raises(CheckpointError), opened(folder, keep=Keep(last=1)) as checkpointer:
    save(checkpointer, 2, new_state(2))
    checkpointer.wait()
  assert (folder / 'checkpoint_1').is_dir() and not (folder / 'checkpoint_2').exists()


def test_a_write_of_an_older_start_is_not_in_the_save_of_the_same_step(tmp_path, monkeypatch):
  folder = folder_with(tmp_path, 1)
  older = Checkpointer(str(folder))  # its processes are suspended while they write step 2
  theirs = pathlib.Path(older._orbax.get_temporary_path(epath.Path(folder / 'checkpoint_2')).get())
  merge = ocp.PyTreeCheckpointHandler.finalize

  def resume_and_merge(handler, state) -> None:  # all processes of the new start have written
    written = theirs / pathlib.Path(state).name / 'ocdbt.process_0'
    write_array(written, 'params/dense/kernel', np.full([64, 8], 7, np.float32))
    merge(handler, state)

  monkeypatch.setattr(ocp.PyTreeCheckpointHandler, 'finalize', resume_and_merge)
  state = new_state(2, seed=2)
  with opened(folder, keep=Keep()) as checkpointer:
    save(checkpointer, 2, state)
    checkpointer.wait()
    restored = checkpointer.restore_latest(abstract(state)).state
  assert_equal(restored, state)
  assert theirs.is_dir()
  with opened(folder, keep=Keep()):
    assert sorted(set(os.listdir(folder)) - {LOCK}) == ['checkpoint_1', 'checkpoint_2']
  older.close()


# Writes that Orbax does not wait for after a write has failed; see `logging_setup`.
abandons_writes = pytest.mark.filterwarnings(
  'ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning'
)


@pytest.fixture
def full_disk(tmp_path):
  with small_disk(tmp_path / 'disk', size='2m') as folder:
    yield folder


@abandons_writes
def test_a_full_disk_is_named_and_the_last_good_checkpoint_stays(full_disk):
  checkpointer = Checkpointer(str(full_disk / 'model'), keep=Keep(last=1))
  try:
    save(checkpointer, 10, new_state(10, seed=10))
    checkpointer.wait()
    big = new_state(20, rows=2**17, seed=20)  # 4 MiB of random numbers
    with raises(CheckpointError):
      save(checkpointer, 20, big)
      checkpointer.wait()
  finally:
    checkpointer.close()
  with opened(full_disk / 'model') as checkpointer:
    assert checkpointer.steps() == [10]
    restored = checkpointer.restore_latest(abstract(new_state()))
    assert_equal(restored.state, new_state(10, seed=10))


@abandons_writes
def test_a_save_that_fails_later_is_reported_at_the_next_check(full_disk):
  checkpointer = Checkpointer(str(full_disk / 'model'))
  try:
    save(checkpointer, 10, new_state(10))
    checkpointer.wait()
    checkpointer.raise_if_failed()
    deadline = time.monotonic() + 60
    with raises(CheckpointError):
      save(checkpointer, 20, new_state(20, rows=2**17))
      while time.monotonic() < deadline:  # as the steps of a run do
        checkpointer.raise_if_failed()
        time.sleep(0.01)
    assert time.monotonic() < deadline
  finally:
    checkpointer.close()


def test_a_save_whose_arrays_cannot_be_opened_does_not_count(tmp_path, monkeypatch):
  folder = folder_with(tmp_path, 1)

  async def merge_nothing(*args, **kwargs):
    pass

  # Orbax logs a warning and commits where it finds nothing to merge.
  merge = 'orbax.checkpoint._src.serialization.ocdbt_utils.merge_ocdbt_per_process_files'
  monkeypatch.setattr(merge, merge_nothing)
  with opened(folder) as checkpointer:
    with raises(CheckpointError):
      save(checkpointer, 2, new_state(2))
      checkpointer.wait()
  assert not (folder / 'checkpoint_2').exists() and (folder / 'checkpoint_1').exists()
