"""Checkpoints in object storage, against a real S3-compatible server: as on a disk, committed or
not there, and no secret is written or printed.
"""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore as ts

from t5x_gpu import reshard
from t5x_gpu.checkpoint.atomic_folder import RemoteJournal
from t5x_gpu.checkpoint.checkpointer import Checkpointer
from t5x_gpu.checkpoint.initialize import restore_from
from t5x_gpu.checkpoint.model_dir import (
  COMMIT,
  SET_ASIDE,
  UNDER_WAY,
  committed_steps,
  newest_complete,
  read_manifest,
  remove_checkpoint,
)
from t5x_gpu.checkpoint.params_files import read_params
from t5x_gpu.checkpoint.remote_checkpointer import copy_to_host, open_checkpointer
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.checkpoint.run_lock import LOCK, check_lock
from t5x_gpu.checkpoint.store import StateReader, StateWriter, find_checkpoint
from t5x_gpu.errors import CheckpointError, ConfigError
from t5x_gpu.storage.paths import RemotePath, StorageError, as_path, kvstore_spec, local_path
from tests.checkpoint import remote_ranks
from tests.checkpoint.test_checkpointer import abstract, assert_equal, new_state, save, write_array
from tests.helpers_storage import KEY_ID, SECRET, TOKEN, Gate, StorageServer
from tests.helpers_train import DEADLINE_SECONDS, REPOSITORY, run_here
from tests.test_checkpoint_tools import run as run_tool


@pytest.fixture
def address(server, request):
  """An empty MODEL_DIR."""
  return 's3://runs/' + re.sub(r'\W', '_', request.node.name)


def run_with(address: str, *steps: int, keep: Keep = Keep()) -> RemotePath:
  """Returns a MODEL_DIR with these checkpoints."""
  with open_checkpointer(address, keep=keep) as checkpointer:
    for step in steps:
      save(checkpointer, step, new_state(step, seed=step))
  return as_path(address)


def test_state_data_and_manifest_come_back(address):
  run_with(address, 3)
  with open_checkpointer(address, keep=Keep()) as checkpointer:
    restored = checkpointer.restore_latest(abstract(new_state()))
  assert_equal(restored.state, new_state(3, seed=3))
  assert restored.data_state == b'data of 3'
  assert restored.manifest['next_batch_hash'] == 'hash3'


def test_files_in_storage_are_a_checkpoint_on_a_disk_too(address, tmp_path):
  # Everything that Orbax's tree can hold: None, empty containers, tuples, bfloat16, int64 layers.
  state = new_state(3).replace(
    opt_state={
      'none': None,
      'empty': {},
      'chain': (optax.EmptyState(), {'mu': jnp.ones((8, 3))}),
      'half': jnp.arange(700, dtype=jnp.bfloat16),
      'unit': (),
    }
  )
  with open_checkpointer(address, keep=Keep()) as remote, Checkpointer(str(tmp_path / 'a')) as disk:
    save(remote, 3, state)
    save(disk, 3, state)
  path = as_path(address) / 'checkpoint_3'
  tree, same = (
    json.loads((folder / 'state' / '_METADATA').read_text())['tree_metadata']
    for folder in (path, tmp_path / 'a' / 'checkpoint_3')
  )
  assert tree == same
  for name in path.files():  # copied object by object
    copy = tmp_path / 'b' / 'checkpoint_3' / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes((path / name).read_bytes())
  with Checkpointer(str(tmp_path / 'b')) as disk:
    assert_equal(disk.restore_latest(abstract(state)).state, state)


def test_what_several_devices_hold_is_written_once_and_read_onto_any_mesh(address):
  mesh = jax.make_mesh((4, 2), ('data', 'model'))
  values = jax.random.normal(jax.random.key(1), (64, 8))
  state = new_state(3).replace(
    params={
      'split': jax.device_put(values, jax.NamedSharding(mesh, jax.P('model', None))),
      'both': jax.device_put(values, jax.NamedSharding(mesh, jax.P('data', 'model'))),
    }
  )
  with open_checkpointer(address, keep=Keep()) as checkpointer:
    save(checkpointer, 3, state)
  reader = StateReader(address)
  assert reader.chunk_shape('params/split') == (32, 8)
  assert reader.chunk_shape('params/both') == (16, 4)
  other = jax.NamedSharding(jax.make_mesh((8,), ('x',)), jax.P(None, 'x'))
  target = abstract(state).replace(
    params=jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=other), state.params
    )
  )
  with open_checkpointer(address, keep=Keep()) as checkpointer:
    restored = checkpointer.restore_latest(target).state
  assert restored.params['both'].sharding == other
  for name in ('split', 'both'):
    np.testing.assert_array_equal(restored.params[name], values)


def test_a_state_may_be_overwritten_once_save_returns(address):
  state = new_state(3, seed=3)
  with open_checkpointer(address, keep=Keep()) as checkpointer:
    save(checkpointer, 3, state)
    jax.block_until_ready(
      jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)(state)
    )
  with open_checkpointer(address, keep=Keep()) as checkpointer:
    assert_equal(checkpointer.restore_latest(abstract(new_state())).state, new_state(3, seed=3))


def test_old_ones_go_once_newer_ones_are_committed_and_nothing_else_does(address):
  folder = as_path(address)
  foreign = ['checkpoint_notes/a.txt', 'checkpoint_7/mine.txt', 'checkpoint_1.backup/a', 'notes']
  for name in foreign:
    (folder / name).write_text('mine')
  run_with(address, 1, 2, 3, 4, keep=Keep(last=1, every=2))
  assert committed_steps(folder) == [2, 4]
  left = folder.files()
  assert set(foreign) <= set(left) and LOCK not in left
  assert not [name for name in left if name.startswith(('checkpoint_1/', 'checkpoint_3/'))]
  with open_checkpointer(address, keep=Keep()) as checkpointer:
    with pytest.raises(CheckpointError, match='has 1 objects, but is not a checkpoint'):
      save(checkpointer, 7, new_state(7))
    with pytest.raises(CheckpointError, match='checkpoint_4 exists and was not overwritten'):
      save(checkpointer, 4, new_state(4))


def test_what_was_not_committed_is_not_there_and_goes_at_the_next_start(address):
  folder = run_with(address, 1, 2)
  (folder / 'checkpoint_2' / COMMIT).unlink()
  (folder / 'checkpoint_2' / UNDER_WAY).write_text('{}')  # as a kill leaves it
  assert committed_steps(folder) == [1]
  with pytest.raises(CheckpointError, match='no checkpoint of step 2'):
    StateReader(address, step=2)
  with pytest.raises(CheckpointError, match='has no checkpoint'):
    StateReader(folder / 'checkpoint_2')
  with open_checkpointer(address, keep=Keep()) as checkpointer:
    assert int(checkpointer.restore_latest(abstract(new_state())).state.step) == 1
    assert not [name for name in folder.files() if name.startswith('checkpoint_2/')]
    save(checkpointer, 2, new_state(2))
  assert committed_steps(folder) == [1, 2]


@pytest.mark.quick_cases('unlink')
@pytest.mark.parametrize('cut_at', ['unlink', 'remove_tree'])
def test_a_deletion_that_was_cut_short_leaves_no_half_of_a_checkpoint(
  address, cut_at, monkeypatch, caplog
):
  folder = run_with(address, 1, 2)
  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(RemotePath, cut_at, mock.Mock(side_effect=KeyboardInterrupt))
    remove_checkpoint(folder, 1)
  whole = cut_at == 'unlink'
  assert committed_steps(folder) == ([1, 2] if whole else [2])
  with caplog.at_level('INFO', logger='t5x_gpu'):
    with open_checkpointer(address, keep=Keep(last=1)) as checkpointer:
      save(checkpointer, 3, new_state(3))
  assert whole != ('Deleted the rest of checkpoint_1' in caplog.text)
  assert committed_steps(folder) == [3]
  assert not [name for name in folder.files() if name.startswith('checkpoint_1/')]


@pytest.mark.slow
def test_an_unreadable_one_does_not_count_until_its_step_is_saved_again(address, caplog):
  folder = run_with(address, 1, 2)
  [data] = [
    n
    for n in folder.files(first='checkpoint_2/state/ocdbt', stop='checkpoint_2/state/p')
    if '/d/' in n
  ]
  whole = (folder / data).read_bytes()
  (folder / data).write_bytes(whole[:200] + bytes(len(whole) - 200))
  with open_checkpointer(address, keep=Keep()) as checkpointer:
    assert int(checkpointer.restore_latest(abstract(new_state())).state.step) == 1
    assert 'checkpoint_2 cannot be read' in caplog.text
    assert 'Continuing from checkpoint_1' in caplog.text
    assert (folder / data).read_bytes() != whole and (folder / 'checkpoint_2' / SET_ASIDE).is_file()
    assert committed_steps(folder) == [1]
    save(checkpointer, 2, new_state(2, seed=5))
  with open_checkpointer(address, keep=Keep()) as checkpointer:
    assert_equal(checkpointer.restore_latest(abstract(new_state())).state, new_state(2, seed=5))


def test_a_missing_object_of_arrays_is_found_before_they_are_read(address):
  folder = run_with(address, 1, 2)
  [data] = [
    n
    for n in folder.files(first='checkpoint_2/state/ocdbt', stop='checkpoint_2/state/p')
    if '/d/' in n
  ]
  (folder / data).unlink()
  saved = newest_complete(address, target=abstract(new_state()))
  assert saved.step == 1


def test_two_runs_do_not_write_into_one(address):
  with open_checkpointer(address, keep=Keep()) as checkpointer:
    lock = as_path(address) / LOCK
    mine = json.loads(lock.read_text())
    lock.write_text(json.dumps({**mine, 'host': 'gpu-17', 'kernel': 'other', 'pid': 99}))
    with pytest.raises(CheckpointError, match='belongs to another run: process 99 on gpu-17'):
      check_lock(as_path(address))
    with pytest.raises(CheckpointError, match='now belongs to process 99 on gpu-17'):
      save(checkpointer, 1, new_state(1))
    lock.write_text(json.dumps({**mine, 'kernel': 'other', 'touched': mine['touched'] - 1000}))
    newest_complete(address, target=abstract(new_state()))  # no sign of life for too long
  assert committed_steps(as_path(address)) == []


def test_a_write_of_an_older_start_is_not_in_the_save_of_the_same_step(address, monkeypatch):
  folder = run_with(address, 1)
  older = open_checkpointer(address, keep=Keep())  # its processes are suspended in a save of step 2
  theirs = older._write(2, copy_to_host(new_state(2).saved()))._written
  (folder / 'checkpoint_2' / UNDER_WAY).write_text('{}')
  older.close()
  merge = StateWriter.merge

  def resume_and_merge(self, **options) -> None:  # all processes of the new start have written
    write_array(theirs, 'params/dense/kernel', np.full([64, 8], 7, np.float32))
    merge(self, **options)

  monkeypatch.setattr(StateWriter, 'merge', resume_and_merge)
  run_with(address, 2)
  with open_checkpointer(address, keep=Keep()) as checkpointer:
    assert_equal(checkpointer.restore_latest(abstract(new_state())).state, new_state(2, seed=2))


def test_a_suspended_save_does_not_touch_the_index_of_the_run_that_has_taken_over(
  address, monkeypatch
):
  folder, flush = as_path(address), StateWriter.flush

  def take_over(self) -> None:  # while this run is suspended, after its last write
    flush(self)
    lock = json.loads((folder / LOCK).read_text())
    (folder / LOCK).write_text(json.dumps({**lock, 'host': 'gpu-17', 'kernel': 'other', 'pid': 99}))
    (folder / 'checkpoint_2/state/manifest.ocdbt').write_text('theirs')

  monkeypatch.setattr(StateWriter, 'flush', take_over)
  with pytest.raises(CheckpointError, match='now belongs to process 99 on gpu-17'):
    run_with(address, 2)
  assert (folder / 'checkpoint_2/state/manifest.ocdbt').read_bytes() == b'theirs'


def test_a_check_leaves_no_trace(address):
  assert newest_complete(address, target=abstract(new_state())) is None
  assert as_path(address).files() == []


def test_a_server_that_is_gone_fails_the_save_with_the_reason(tmp_path):
  with StorageServer(tmp_path) as own, own.used():
    checkpointer = open_checkpointer(own.bucket('mortal') + '/run', keep=Keep())
    save(checkpointer, 1, new_state(1))
    checkpointer.wait()
    own.kill()
    with pytest.raises(CheckpointError) as failed:
      save(checkpointer, 2, new_state(2))
    checkpointer.close()
  assert 'Could not connect' in str(failed.value) and 'AWS_ENDPOINT_URL' in str(failed.value)


def test_a_first_save_that_the_storage_cuts_off_fails_although_nothing_can_be_listed(
  server, address
):
  bucket, folder = address.removeprefix('s3://').split('/', 1)
  with (
    contextlib.closing(Gate(server.port)) as gate,
    server.used(AWS_ENDPOINT_URL=f'http://127.0.0.1:{gate.port}'),
  ):
    checkpointer = open_checkpointer(address, keep=Keep())
    gate.shut_at = f'PUT /{bucket}/{folder}/checkpoint_1/state/'.encode()
    with pytest.raises(CheckpointError, match='checkpoint_1 could not be written'):
      save(checkpointer, 1, new_state(1))
      checkpointer.wait()
    checkpointer.close()
  assert committed_steps(as_path(address)) == []


@pytest.mark.parametrize(
  'what, options, part',
  [
    ('bucket', {}, 'Create the bucket'),
    ('endpoint', {'AWS_ENDPOINT_URL': 'http://127.0.0.1:9'}, 'Check the network'),
  ],
)
def test_errors_name_the_problem_and_the_variables_that_are_read(server, what, options, part):
  with server.used(**options), pytest.raises(CheckpointError) as failed:
    newest_complete('s3://no-such-bucket/run', target=abstract(new_state()))
  text = str(failed.value)
  assert part in text and 's3://no-such-bucket/run' in text
  assert 'AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY' in text
  assert not [secret for secret in (KEY_ID, SECRET, TOKEN) if secret in text]


@pytest.mark.parametrize(
  'text, part',
  [
    ('s3:/bucket/run', 'two slashes'),
    ('s3://bucket', 'a folder in it'),
    ('s3://user:secret@bucket/run', 'no user or password'),
    ('hdfs://host/run', 'not supported'),
    ('gs://bucket/../run', 'BUCKET/FOLDER'),
    ('s3://bucket/run?x=1', 'BUCKET/FOLDER'),
  ],
)
def test_other_addresses_are_refused_and_never_a_local_folder(text, part):
  with pytest.raises(ConfigError) as failed:
    as_path(text)
  assert part in str(failed.value) and 'secret' not in str(failed.value)


def test_what_takes_folders_alone_refuses_addresses():
  with pytest.raises(ConfigError, match='average --to takes a folder of this machine'):
    local_path('s3://bucket/run', what='average --to')
  with pytest.raises(TypeError):
    open(as_path('s3://bucket/run'), encoding='utf-8')


def test_an_endpoint_with_a_password_is_refused_without_it(server):
  with server.used(AWS_ENDPOINT_URL='http://me:hidden@127.0.0.1:9000'):
    with pytest.raises(ConfigError) as failed:
      as_path('s3://bucket/run').files()
  assert 'http://***@127.0.0.1:9000' in str(failed.value) and 'hidden' not in str(failed.value)


def test_google_addresses_become_tensorstores_own_description():
  spec = kvstore_spec(as_path('gs://bucket/runs/a') / 'checkpoint_3')
  assert spec == {'driver': 'gcs', 'bucket': 'bucket', 'path': 'runs/a/checkpoint_3/'}
  assert ts.KvStore.Spec(spec).to_json()['bucket'] == 'bucket'


def test_a_local_folder_stays_what_it_was(tmp_path):
  assert as_path(tmp_path / 'a') == tmp_path / 'a' and isinstance(as_path('a'), pathlib.Path)
  assert as_path('~/a') == pathlib.Path('~/a').expanduser()


def reshard_from(source, target, *flags):
  return run_here(lambda: reshard.main([f'--from={source}', f'--to={target}', *flags]))


def test_reshard_carries_a_checkpoint_to_a_disk_and_back_bit_for_bit(address, tmp_path):
  folder, disk, back = run_with(address, 2, 3), tmp_path / 'disk', as_path(address + '_back')
  (folder / 'config.gin').write_text('x = 1\n')
  for result in (reshard_from(address, disk, '--verify'), reshard_from(disk, back, '--verify')):
    assert result.code == 0, result.err
  manifests = [read_manifest(where, 3) for where in (folder, disk, back)]
  assert len({json.dumps(m['checksums'], sort_keys=True) for m in manifests}) == 1
  for where in (str(disk), str(back)):
    with open_checkpointer(where, keep=Keep()) as checkpointer:
      restored = checkpointer.restore_latest(abstract(new_state()))
    assert_equal(restored.state, new_state(3, seed=3))
    assert restored.data_state == b'data of 3'
  assert (back / 'config.gin').read_text() == 'x = 1\n'
  again = reshard_from(disk, back)
  assert again.code == 1 and 'is not empty' in again.err
  assert committed_steps(back) == [3]


def test_an_interrupted_reshard_is_not_a_checkpoint_and_can_continue(server, address, tmp_path):
  run_with(address, 3)
  assert reshard_from(address, tmp_path / 'disk').code == 0
  new = as_path(address + '_new')
  with (
    contextlib.closing(Gate(server.port)) as gate,
    server.used(AWS_ENDPOINT_URL=f'http://127.0.0.1:{gate.port}'),
  ):
    gate.shut_at = f'PUT /runs/{new.key}/checkpoint_3/manifest'.encode()
    cut = reshard_from(tmp_path / 'disk', new)
  assert cut.code == 1 and str(new) in cut.err and 'AWS_ENDPOINT_URL' in cut.err
  assert committed_steps(new) == [] and new.files()
  assert reshard_from(tmp_path / 'disk', new, '--verify').code == 0
  assert committed_steps(new) == [3] and not [n for n in new.files() if 'reshard' in n]


def test_a_reshard_killed_before_its_first_entry_starts_again(address, tmp_path, monkeypatch):
  run_with(address, 3)
  new = as_path(address + '_new')

  note = RemoteJournal.note

  def interrupted(journal, entry):
    if entry is not None:
      raise KeyboardInterrupt
    note(journal, entry)

  monkeypatch.setattr(RemoteJournal, 'note', interrupted)
  assert reshard_from(address, new).code == 130
  assert any('/state/' in name for name in new.files())  # the arrays exist
  monkeypatch.undo()
  result = reshard_from(address, new, '--verify')
  assert result.code == 0, result.err
  assert committed_steps(new) == [3]


def test_arrays_of_another_writer_are_not_called_an_outage(address):
  arrays, chunks = {'params/x': ((4,), np.float32)}, {'params/x': (4,)}
  writers = [
    StateWriter(as_path(address), step=1, arrays=arrays, chunks=chunks, resume=False)
    for _ in range(2)
  ]
  writers[0].flush()
  with pytest.raises(CheckpointError, match='cannot be written: .*') as error:
    writers[1].flush()
  assert not isinstance(error.value, StorageError) and 'another folder' in error.value.fix


def test_another_run_starts_from_a_checkpoint_in_storage(address):
  folder = run_with(address, 3)
  restored = restore_from(find_checkpoint(folder, step=3), abstract(new_state()))
  assert_equal(restored.state, new_state(3, seed=3))
  params = read_params(address, abstract(new_state()).params)
  np.testing.assert_array_equal(
    params['dense']['kernel'], new_state(3, seed=3).params['dense']['kernel']
  )


@pytest.mark.slow
def test_the_tools_read_storage_and_those_that_cannot_say_so(address, tmp_path):
  folder = run_with(address, 2, 3)
  reported = json.loads(run_tool('inspect', address, '--json').out)
  assert reported['path'] == f'{folder}/checkpoint_3' and reported['checksums'] == '3 of 3 arrays'
  assert run_tool('verify', address).out.count('3 arrays match their checksums') == 2
  assert run_tool('verify', folder / 'checkpoint_2').out.count('match their checksums') == 1
  assert run_tool('diff', folder / 'checkpoint_3', address).code == 0
  assert run_tool('diff', folder / 'checkpoint_2', address).code == 1
  for argv in (
    ['average', address, '--last=2', f'--to={address}_mean'],
    ['prune', address, '--keep_last=1', '--yes'],
  ):
    refused = run_tool(*argv)
    assert refused.code == 1 and 'takes a folder of this machine' in refused.err
    assert 't5x_gpu.reshard' in refused.err
  assert run_tool('average', address, '--last=2', f'--to={tmp_path}/mean').code == 0
  assert committed_steps(tmp_path / 'mean') == [3] and committed_steps(folder) == [2, 3]


def test_verify_does_not_call_storage_out_of_reach_damage(server, address):
  run_with(address, 3)
  with (
    contextlib.closing(Gate(server.port)) as gate,
    server.used(AWS_ENDPOINT_URL=f'http://127.0.0.1:{gate.port}'),
  ):
    gate.shut_at = b'/d/'  # where the values are
    result = run_tool('verify', address)
  assert result.code == 2 and 'DAMAGED' not in result.out and 'AWS_ENDPOINT_URL' in result.err


@pytest.mark.slow
def test_two_processes_write_one_checkpoint_each_its_part(server, address):
  done = subprocess.run(
    [sys.executable, '-m', 'tests.checkpoint.remote_ranks', '--count=2', f'--address={address}'],
    cwd=REPOSITORY,
    capture_output=True,
    text=True,
    timeout=DEADLINE_SECONDS,
    env={
      **os.environ,
      'PYTHONPATH': str(REPOSITORY),
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': '--xla_force_host_platform_device_count=2',
    },
  )
  assert done.returncode == 0, done.stdout + done.stderr
  folder = as_path(address)
  assert committed_steps(folder) == [2, 3]
  for name, value in remote_ranks.values_of(3).items():
    np.testing.assert_array_equal(StateReader(address).read_at(f'params/{name}', ()), value)
  sums = json.loads(done.stdout.splitlines()[-1])
  assert sums == read_manifest(folder, 3)['checksums']['arrays'] and len(sums) == 4
  for process in (0, 1):  # the values of 'split' are with the one, or the other
    store = f'checkpoint_3/state/ocdbt.process_{process}_'
    assert [name for name in folder.files() if name.startswith(store)]
