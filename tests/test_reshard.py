"""python -m t5x_gpu.reshard: equal values, also after kills, in bounded memory."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from t5x_gpu import checkpoint_tools, eval, infer, reshard
from t5x_gpu.checkpoint.arrays import boxes
from t5x_gpu.checkpoint.params_files import ParamsReader, ParamsWriter, read_params
from t5x_gpu.checkpoint.store import StateReader
from t5x_gpu.errors import CheckpointError, ConfigError
from t5x_gpu.metrics.writers import read_json_lines
from t5x_gpu.tools import reshard as reshard_lib
from t5x_gpu.training.state import TrainState
from tests.checkpoint.test_checkpointer import abstract, assert_equal, new_state, opened, save
from tests.checkpoint.test_checksums import flip_a_bit
from tests.helpers_disk import small_disk
from tests.helpers_train import DEADLINE_SECONDS, REPOSITORY, Project, compiled_kept_in, run_here
from tests.messages import raises


def run(*argv):
  return run_here(lambda: reshard.main([str(a) for a in argv]))


def layered_state(step: int, *, rows: int = 48) -> TrainState:
  """Returns a state with two stacks of layers, optimizer counts, and leaves that are None."""

  def arrays(seed: int):
    key = jax.random.key(seed)
    return {
      'encoder': {
        'layers': {'w': jax.random.normal(key, (4, rows, 8)), 'b': jax.random.normal(key, (4, 6))}
      },
      'layers': {'mlp': {'w': jax.random.normal(key, (2, 8, 16))}},
      'embed': jax.random.normal(key, (33, 8)),
    }

  return TrainState(
    step=jnp.int32(step),
    params=arrays(0),
    opt_state=({'mu': arrays(1), 'nu': arrays(2), 'count': jnp.int32(step)}, None),
  )


@pytest.fixture
def source(tmp_path):
  with opened(tmp_path / 'run') as checkpointer:
    save(checkpointer, 7, layered_state(7))
    checkpointer.wait()
  (tmp_path / 'run/config.gin').write_text('# of the run')
  return tmp_path / 'run'


def restored(folder, like: TrainState):
  with opened(folder) as checkpointer:
    return checkpointer.restore_latest(abstract(like))


def names_on_disk(folder) -> set[str]:
  tree = json.loads(next(folder.glob('checkpoint_*/state/_METADATA')).read_text())['tree_metadata']
  return {'/'.join(k['key'] for k in leaf['key_metadata']) for leaf in tree.values()}


@pytest.mark.parametrize(
  'flags',
  [(), ('--layout=8x2',), ('--unscan',), ('--unscan', '--layout=4'), ('--chunk_size=256',)],
  ids=' '.join,
)
def test_every_form_restores_bit_exactly_with_data_state_and_manifest(source, tmp_path, flags):
  result = run(f'--from={source}', f'--to={tmp_path / "new"}', '--verify', *flags)
  assert result.code == 0, result.err
  want, got = restored(source, layered_state(0)), restored(tmp_path / 'new', layered_state(0))
  assert_equal(got.state, want.state)
  assert got.data_state == b'data of 7'
  assert got.manifest['next_batch_hash'] == 'hash7'
  assert got.manifest['checksums'] == want.manifest['checksums']  # of values, not of files
  assert got.manifest['resharded_from']['checkpoint'] == str(source / 'checkpoint_7')
  assert (tmp_path / 'new/config.gin').read_text() == '# of the run'
  assert checkpoint_tools.main(['verify', str(tmp_path / 'new')]) == 0
  assert [p.name for p in tmp_path.glob('.*')] == []
  is_unscanned = 'params/encoder/layers_3/w' in names_on_disk(tmp_path / 'new')
  assert is_unscanned == ('--unscan' in flags)


def test_unscanned_and_scanned_again_is_what_it_was_and_both_are_read_alike(source, tmp_path):
  one, two = tmp_path / 'one', tmp_path / 'two'
  assert run(f'--from={source}', f'--to={one}', '--unscan').code == 0
  assert run(f'--from={one}', f'--to={two}', '--scan').code == 0
  assert names_on_disk(two) == names_on_disk(source)
  assert checkpoint_tools.main(['diff', str(source), str(one)]) == 0
  assert checkpoint_tools.main(['diff', str(one), str(two)]) == 0
  params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), layered_state(0).params)
  a, b = read_params(source, params), read_params(one, params)
  jax.tree.map(np.testing.assert_array_equal, a, b)
  part = ParamsReader(one).read_at('encoder/layers/w', (slice(1, 3), slice(5, 9)))
  np.testing.assert_array_equal(part, layered_state(7).params['encoder']['layers']['w'][1:3, 5:9])
  third = ParamsReader(one).read_at('encoder/layers/w', (2,))
  np.testing.assert_array_equal(third, layered_state(7).params['encoder']['layers']['w'][2])


def test_an_unscanned_checkpoint_restores_onto_a_mesh(source, tmp_path):
  assert run(f'--from={source}', f'--to={tmp_path / "new"}', '--unscan').code == 0
  mesh = jax.make_mesh((4, 2), ('fsdp', 'model'))
  state = layered_state(0)

  def split(x):
    spec = jax.P(None, 'fsdp', 'model') if x.ndim == 3 else jax.P()
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))

  with opened(tmp_path / 'new') as checkpointer:
    got = checkpointer.restore_latest(jax.tree.map(split, state))
  assert_equal(got.state, layered_state(7))


def test_dtypes_change_where_asked_and_counts_stay(source, tmp_path):
  assert (
    run(
      f'--from={source}',
      f'--to={tmp_path / "new"}',
      '--dtype=bfloat16',
      '--optimizer_dtype=float16',
      '--verify',
    ).code
    == 0
  )
  reader, state = StateReader(tmp_path / 'new'), layered_state(7)
  np.testing.assert_array_equal(
    reader.read_at('params/embed', ()), np.asarray(state.params['embed']).astype(ml_dtypes.bfloat16)
  )
  np.testing.assert_array_equal(
    reader.read_at('opt_state/0/mu/embed', ()),
    np.asarray(state.opt_state[0]['mu']['embed']).astype(np.float16),
  )
  assert reader.dtypes['opt_state/0/count'] == np.int32 == reader.dtypes['step']
  params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.params)
  read = read_params(tmp_path / 'new', params)  # as a model wants them, for any layout of the files
  assert read['embed'].dtype == jnp.float32
  np.testing.assert_allclose(read['embed'], state.params['embed'], rtol=2**-8)


def test_without_the_optimizer_it_is_a_checkpoint_of_parameters(source, tmp_path):
  assert run(f'--from={source}', f'--to={tmp_path / "new"}', '--drop_optimizer').code == 0
  reader = StateReader(tmp_path / 'new')
  assert set(reader.shapes) == {n for n in StateReader(source).shapes if 'opt_state' not in n}
  assert reader.manifest['params_only']
  with opened(tmp_path / 'new') as checkpointer:
    with raises(CheckpointError):
      checkpointer.restore_latest(abstract(layered_state(0)))


def test_a_layout_cuts_the_largest_dimensions_that_it_divides_and_leaves_layers_whole(
  source, tmp_path
):
  assert run(f'--from={source}', f'--to={tmp_path / "new"}', '--layout=8x2').code == 0
  reader = StateReader(tmp_path / 'new')
  assert reader.chunk_shape('params/encoder/layers/w') == (4, 6, 4)
  assert reader.chunk_shape('params/layers/mlp/w') == (2, 4, 2)
  assert reader.chunk_shape('params/embed') == (33, 1)  # 33 is divided by neither


# ---- Damage, mistakes ----------------------------------------------------------------------------


def test_a_damaged_source_is_refused_and_nothing_is_left(tmp_path):
  bits = np.random.default_rng(0).integers(-(2**31), 2**31, (64, 8)).astype(np.int32)
  with opened(tmp_path / 'run') as checkpointer:
    save(checkpointer, 3, new_state(3).replace(params={'kernel': jnp.asarray(bits)}))
    checkpointer.wait()
  flip_a_bit(tmp_path / 'run/checkpoint_3', value=bits[7].tobytes())
  result = run(f'--from={tmp_path / "run"}', f'--to={tmp_path / "new"}')
  assert result.code == 1 and 'params/kernel of' in result.err
  assert 'does not have the values' in result.err
  assert [p.name for p in tmp_path.iterdir()] == ['run']


def test_a_value_beyond_float16_is_refused(tmp_path):
  with opened(tmp_path / 'run') as checkpointer:
    save(checkpointer, 3, new_state(3).replace(params={'kernel': jnp.full((4,), 1e6)}))
    checkpointer.wait()
  result = run(f'--from={tmp_path / "run"}', f'--to={tmp_path / "new"}', '--dtype=float16')
  assert result.code == 1 and 'params/kernel has values beyond the range of float16' in result.err


def test_a_budget_below_the_chunks_of_the_source_names_the_least(tmp_path):
  with opened(tmp_path / 'run') as checkpointer:
    save(checkpointer, 3, new_state(3, rows=2**18))  # 8 MiB in one chunk
    checkpointer.wait()
  result = run(f'--from={tmp_path / "run"}', f'--to={tmp_path / "new"}', '--memory=32MiB')
  assert result.code == 1 and 'Set --memory=64MiB or more' in result.err
  result = run(f'--from={tmp_path / "run"}', f'--to={tmp_path / "new"}', '--memory=64MiB')
  assert result.code == 0, result.err
  assert StateReader(tmp_path / 'new').chunk_bytes('params/dense/kernel') == 4 << 20


@pytest.mark.parametrize(
  'flags',
  [
    ('--from=a',),
    ('--layout=8x',),
    ('--memory=lots',),
    ('--scan', '--unscan'),
    ('--drop_optimizer', '--optimizer_dtype=bfloat16', '--from=a', '--to=b'),
    ('--gin_file=a.gin',),
  ],
)
def test_mistakes_are_named(flags):
  with raises(ConfigError):
    reshard.main(flags)


def test_an_existing_folder_is_not_overwritten(source, tmp_path):
  (tmp_path / 'new').mkdir()
  (tmp_path / 'new/notes').write_text('mine')
  result = run(f'--from={source}', f'--to={tmp_path / "new"}')
  assert result.code == 1 and 'exists and is not empty' in result.err
  assert [p.name for p in (tmp_path / 'new').iterdir()] == ['notes']


# ---- Kills ---------------------------------------------------------------------------------------

# The process stops itself before piece number HOLD, in the middle of an array, until it is killed.
HELD = """
import os, pathlib, time
from t5x_gpu.tools import reshard as resharding
read, count = resharding._read, 0
def held(*args):
  global count
  count += 1
  if count == int(os.environ['HOLD']):
    pathlib.Path('held').touch()
    time.sleep(600)
  return read(*args)
resharding._read = held
from t5x_gpu import cli, reshard
cli.run_main(reshard.main)
"""


def big_params(folder: pathlib.Path, *, rows: int, cols: int = 256) -> pathlib.Path:
  """Writes parameters in chunks of 1 MiB at most."""
  folder.mkdir()
  shapes, rng = {'layers/w': (2, rows, cols), 'b': (5,)}, np.random.default_rng(0)
  with ParamsWriter(
    folder,
    step=3,
    shapes=shapes,
    chunks={'layers/w': (1, 1024, cols), 'b': (5,)},
    about={},
    compress=False,
  ) as writer:
    for place in boxes(shapes['layers/w'], (1, 1024, cols)):
      size = [s.stop - s.start for s in place]
      writer.write('layers/w', place, rng.normal(size=size).astype(np.float32))
    writer.write('b', (), np.ones(5, np.float32))
  return folder


@pytest.mark.slow
def test_reshard_killed_in_the_middle_continues_and_equals_an_uninterrupted_one(tmp_path):
  big = big_params(tmp_path / 'run', rows=16 * 1024)  # 32 MiB, 32 pieces
  flags = [f'--from={big}', '--layout=8', '--memory=16MiB', '--dtype=bfloat16', '--unscan']
  assert run(*flags, f'--to={tmp_path / "whole"}').code == 0
  environment = {**os.environ, 'PYTHONPATH': str(REPOSITORY), 'JAX_PLATFORMS': 'cpu'}
  for hold in (12, 3):  # twice: the second one has gone on by then
    with subprocess.Popen(
      [sys.executable, '-c', HELD, *flags, f'--to={tmp_path / "cut"}'],
      cwd=tmp_path,
      env={**environment, 'HOLD': str(hold)},
    ) as process:
      wait_for(tmp_path / 'held', process)
      process.send_signal(signal.SIGKILL)
    (tmp_path / 'held').unlink()
    assert not (tmp_path / 'cut').exists() and (tmp_path / '.cut.unfinished').exists()
  result = run(*flags, f'--to={tmp_path / "cut"}')
  assert result.code == 0, result.err
  assert float(re.search(r'interrupted call: ([\d.]+) MB', result.out)[1]) > 5
  assert not list(tmp_path.glob('.*'))
  whole, cut = StateReader(tmp_path / 'whole'), StateReader(tmp_path / 'cut')
  assert cut.manifest == whole.manifest
  assert checkpoint_tools.main(['verify', str(tmp_path / 'cut')]) == 0
  assert checkpoint_tools.main(['diff', str(tmp_path / 'cut'), str(tmp_path / 'whole')]) == 0


def wait_for(path: pathlib.Path, process: subprocess.Popen) -> None:
  deadline = time.monotonic() + DEADLINE_SECONDS
  while not path.exists():
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.005)


def test_what_another_request_has_left_is_not_gone_on_with(tmp_path, source, monkeypatch):
  def stop(*args, **options):
    raise KeyboardInterrupt

  monkeypatch.setattr(reshard_lib.StateWriter, 'close', stop)
  result = run(f'--from={source}', f'--to={tmp_path / "new"}', '--unscan')
  assert result.code == 130 and 'new is unfinished.' in result.out
  assert (tmp_path / '.new.unfinished/new').exists() and not (tmp_path / 'new').exists()
  monkeypatch.undo()
  result = run(f'--from={source}', f'--to={tmp_path / "new"}')
  assert result.code == 0 and 'going on' not in result.out
  assert_equal(restored(tmp_path / 'new', layered_state(0)).state, layered_state(7))
  assert not list(tmp_path.glob('.*'))


def test_a_full_disk_is_named_and_the_same_command_continues_when_there_is_room(
  tmp_path, monkeypatch
):
  big = big_params(tmp_path / 'run', rows=2048)  # 4 MiB
  with small_disk(tmp_path / 'disk', size='2m') as disk:
    flags = (f'--from={big}', f'--to={disk / "new"}', '--memory=16MiB')
    first = run(*flags)
    assert first.code == 1 and '0.00 GB are free' in first.err and not list(disk.iterdir())
    # Somebody else takes the room that there was.
    monkeypatch.setattr(reshard_lib.ReshardPlan, 'num_bytes', 0)
    result = run(*flags)
    assert result.code == 1 and 'No space left on device' in result.err, result.err
    assert 'the same command then continues' in result.err
    monkeypatch.undo()
    result = run(*flags)  # still no room
    assert result.code == 1 and 'GB are written, and stay' in result.err, result.err
    subprocess.run(['mount', '-o', 'remount,size=20m', str(disk)], check=True)
    result = run(*flags)
    assert result.code == 0 and 'interrupted call: ' in result.out
    assert checkpoint_tools.main(['diff', str(big), str(disk / 'new')]) == 0


def test_two_processes_do_not_write_one_folder(tmp_path, source):
  work = {'a': 1}
  with reshard_lib.Journal(tmp_path / 'new', work=work, num_bytes=1):
    result = run(f'--from={source}', f'--to={tmp_path / "new"}')
  assert result.code == 1 and 'Another process is writing' in result.err


# ---- Memory --------------------------------------------------------------------------------------


def peak_bytes(*flags: str) -> int:
  """Returns the peak memory of a reshard in a separate process."""
  code = (
    'import resource, sys; from t5x_gpu import reshard; reshard.main(sys.argv[1:]); '
    'print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)'
  )
  done = subprocess.run(
    [sys.executable, '-c', code, *flags],
    capture_output=True,
    text=True,
    cwd=REPOSITORY,
    timeout=DEADLINE_SECONDS,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return 1024 * int(done.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.parametrize('rows', [32 * 1024, pytest.param(512 * 1024, marks=pytest.mark.slow)])
def test_arrays_larger_than_the_budget_keep_it(tmp_path, rows):
  """64 MiB (1 GiB in the slow form) in 32 MiB, into other chunks, and read back."""
  big, small = big_params(tmp_path / 'big', rows=rows), big_params(tmp_path / 'small', rows=8)
  flags = ['--memory=32MiB', '--layout=8x2', '--verify']
  least = peak_bytes(f'--from={small}', f'--to={tmp_path / "a"}', *flags)
  most = peak_bytes(f'--from={big}', f'--to={tmp_path / "b"}', *flags)
  assert most - least <= 32 << 20, f'{(most - least) / 2**20:.1f} MiB'


# ---- Runs ----------------------------------------------------------------------------------------


@pytest.mark.slow  # its quick sibling: test_every_form_restores_to_the_bit
def test_training_continues_from_a_resharded_checkpoint_as_if_nothing_had_happened(tmp_path):
  whole = Project(folder(tmp_path, 'whole'))
  assert whole.run(num_devices=2, DROPOUT_RATE=0.1).code == 0
  for name, flags in (('chunks', ('--layout=4',)), ('layers', ('--unscan',))):
    new = Project(folder(tmp_path, name))
    result = run(
      f'--from={whole.model_dir}', f'--to={new.model_dir}', '--step=10', '--verify', *flags
    )
    assert result.code == 0, result.err
    result = new.run(num_devices=2, DROPOUT_RATE=0.1)
    assert result.code == 0, result.err
    assert f'Continuing from {new.model_dir}/checkpoint_10' in result.out
    losses = whole.metrics()
    assert new.metrics() == {step: losses[step] for step in range(11, 21)}
    assert checkpoint_tools.main(['diff', str(new.model_dir), str(whole.model_dir)]) == 0


@pytest.mark.slow  # its quick sibling: test_unscanned_and_scanned_again_is_what_it_was
def test_eval_and_infer_find_the_same_in_an_unscanned_checkpoint(tmp_path):
  whole, layers = Project(folder(tmp_path, 'whole')), Project(folder(tmp_path, 'layers'))
  assert whole.run(num_devices=1, TRAIN_STEPS=10).code == 0
  assert run(f'--from={whole.model_dir}', f'--to={layers.model_dir}', '--unscan').code == 0
  (tmp_path / 'prompts.txt').write_text('def f(\nimport os\n')
  losses, texts = [], []
  for project in (whole, layers):
    with compiled_kept_in(tmp_path / 'compiled'):
      evaluated = run_here(lambda: eval.main(project.argv(TRAIN_STEPS=10)), num_devices=1)
      written = run_here(
        lambda: infer.main(
          [
            f'--checkpoint={project.model_dir}',
            f'--prompts={tmp_path / "prompts.txt"}',
            '--gin.DATA_MODULE=t5x_gpu.data.seqio_batches',
            '--gin.DecodingConfig.max_decode_length=6',
          ]
        ),
        num_devices=1,
      )
    assert (evaluated.code, written.code) == (0, 0), evaluated.err + written.err
    losses += [r['eval/loss'] for r in read_json_lines(project.model_dir / 'eval/validation.jsonl')]
    texts.append([json.loads(x) for x in written.out.splitlines() if x.startswith('{')])
  assert losses[0] == losses[1] and len(losses) == 2
  assert texts[0] == texts[1] and len(texts[0]) == 2


def folder(parent: pathlib.Path, name: str) -> pathlib.Path:
  (parent / name).mkdir()
  return parent / name
