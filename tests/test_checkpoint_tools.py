"""python -m t5x_gpu.checkpoint: it shows the true contents, and removes only what it announced."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from t5x_gpu import checkpoint_tools
from t5x_gpu.checkpoint.arrays import checksums_of
from t5x_gpu.checkpoint.model_dir import committed_steps, remove_checkpoint
from t5x_gpu.checkpoint.params_files import ParamsWriter, read_params
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.errors import CheckpointError, ConfigError
from tests.checkpoint.test_checkpointer import (
  folder_with,
  largest_data_file,
  new_state,
  opened,
  save,
)
from tests.checkpoint.test_checksums import flip_a_bit
from tests.helpers_train import listing, run_here
from tests.messages import raises


def run(*argv):
  return run_here(lambda: checkpoint_tools.main([str(a) for a in argv]))


def write_params(folder, step, value):
  folder.mkdir(exist_ok=True)
  values = np.full((64, 32), value, np.float32)
  with ParamsWriter(
    folder,
    step=step,
    shapes={'dense/kernel': (64, 32)},
    chunks={'dense/kernel': (16, 32)},
    about={},
    compress=False,
  ) as writer:
    writer.write('dense/kernel', (), values)
  return folder


def test_inspect_spells_out_what_a_terminal_would_obey(tmp_path):
  shapes = {'dense/kernel': (2, 2)}
  about = {'converted_from': {'name': 'a\x1b[2Jb'}}
  writer = ParamsWriter(tmp_path, step=1, shapes=shapes, chunks=shapes, about=about, compress=False)
  with writer:
    writer.write('dense/kernel', (), np.zeros((2, 2), np.float32))
  out = run('inspect', tmp_path).out
  assert 'converted from: ' in out and '\x1b' not in out


def random_bits(step: int):
  """Returns a state that no compression shortens."""
  bits = np.random.default_rng(step).integers(-(2**31), 2**31, (64, 8)).astype(np.int32)
  return bits, new_state(step).replace(params={'dense': {'kernel': jnp.asarray(bits)}})


def test_inspect_prints_what_was_saved(tmp_path):
  folder = folder_with(tmp_path, 3)
  (folder / 'config.gin').write_text('')
  described = json.loads(run('inspect', folder, '--json').out)
  state = new_state(3, seed=3)
  assert (
    described['step'] == 3 and described['mesh'] == {'data': 1} and described['num_processes'] == 1
  )
  assert described['arrays']['params/dense/kernel'] == {
    'shape': [64, 8],
    'dtype': 'float32',
    'bytes': 2048,
    'chunk': [64, 8],
    'checksum': checksums_of(state)['params/dense/kernel'],
  }
  assert described['parts'] == {
    'step': {'arrays': 1, 'elements': 1, 'bytes': 4},
    'params': {'arrays': 1, 'elements': 512, 'bytes': 2048},
    'opt_state': {'arrays': 1, 'elements': 512, 'bytes': 2048},
  }
  assert described['bytes_on_disk'] == sum(
    size for size, _ in listing(folder / 'checkpoint_3').values()
  )
  assert (
    described['data_state_bytes'] == len(b'data of 3') and described['next_batch_hash'] == 'hash3'
  )
  assert described['gin'] == [str(folder / 'config.gin')] and 'jax' in described['versions']
  assert described['checksums'] == '3 of 3 arrays'
  text = run('inspect', folder / 'checkpoint_3').out
  for part in ('params/dense/kernel', 'float32[64, 8]', '2.0 KiB', 'data=1', 'config.gin', 'hash3'):
    assert part in text


def test_diff_is_0_for_the_same_1_for_others_and_2_for_errors(tmp_path):
  folder = folder_with(tmp_path, 3, 4)
  shutil.copytree(folder / 'checkpoint_3', tmp_path / 'checkpoint_3')
  same = run('diff', folder / 'checkpoint_3', tmp_path / 'checkpoint_3')
  assert same.code == 0 and 'hold the same 3 arrays' in same.out
  other = run('diff', folder / 'checkpoint_3', folder / 'checkpoint_4')
  a, b = (np.asarray(new_state(seed=n).params['dense']['kernel'], np.float64) for n in (3, 4))
  most = np.max(np.abs(a - b))
  assert other.code == 1
  assert (
    f'params/dense/kernel: 512 elements differ, by at most {most:.3g} '
    f'({most / np.max(np.abs(a)):.3g} of the largest value)'
  ) in other.out
  assert 'opt_state/mu' not in other.out
  trouble = run('diff', folder / 'checkpoint_3', tmp_path / 'nothing')
  assert trouble.code == 2 and 'does not exist' in trouble.err


def test_diff_names_arrays_that_only_one_has_and_other_shapes(tmp_path):
  with opened(tmp_path / 'a') as checkpointer:
    save(checkpointer, 1, new_state(1))
    checkpointer.wait()
  with opened(tmp_path / 'b') as checkpointer:
    state = new_state(1, rows=32)
    save(checkpointer, 1, state.replace(params={'dense': {'kernels': jnp.zeros((2,))}}))
    checkpointer.wait()
  result = run('diff', tmp_path / 'a', tmp_path / 'b')
  assert result.code == 1
  for line in (
    "params/dense/kernel float32[64, 8]: only in the first. Did you mean 'params/dense/kernels'?",
    'params/dense/kernels float32[2]: only in the second.',
    'opt_state/mu float32[64, 8] in the first, opt_state/mu float32[32, 8] in the',
  ):
    assert line in result.out


def test_verify_finds_one_bit_in_one_of_two_checkpoints(tmp_path):
  with opened(tmp_path, keep=Keep()) as checkpointer:
    for step in (10, 20):
      save(checkpointer, step, random_bits(step)[1])
    checkpointer.wait()
  whole = run('verify', tmp_path)
  assert whole.code == 0 and 'checkpoint_20: 3 arrays match their checksums' in whole.out
  flip_a_bit(tmp_path / 'checkpoint_20', value=random_bits(20)[0][30].tobytes())
  damaged = run('verify', tmp_path)
  assert damaged.code == 1 and 'checkpoint_10: 3 arrays match' in damaged.out
  assert 'checkpoint_20: DAMAGED: params/dense/kernel does not have the values' in damaged.out
  assert run('verify', tmp_path / 'checkpoint_10').code == 0
  assert run('verify', tmp_path, '--step=20').code == 1
  assert run('verify', tmp_path, '--step=30').code == 2


def test_a_folder_of_one_checkpoint_is_judged_as_in_its_model_dir_and_has_one_step(tmp_path):
  folder = folder_with(tmp_path, 3, 5)
  one = folder / 'checkpoint_5'
  for command in ('inspect', 'verify'):
    said = run(command, one, '--step=3')
    assert said.code and f'{one} is the checkpoint of step 5, not of step 3' in said.err
    said = run(command, folder / 'checkpoint_7')
    assert said.code and f'{folder / "checkpoint_7"} does not exist' in said.err
  assert run('verify', one, '--step=5').code == 0
  shutil.rmtree(one / 'manifest')
  for path in (folder, one):
    said = run('verify', path)
    assert said.code == 1 and 'checkpoint_5: DAMAGED' in said.out


def test_verify_reports_files_that_are_truncated_or_do_not_decompress(tmp_path):
  folder = folder_with(tmp_path, 10, 20)
  os.truncate(largest_data_file(folder / 'checkpoint_10'), 40)
  for path in (folder / 'checkpoint_20/state/ocdbt.process_0/d').iterdir():
    size = path.stat().st_size
    path.write_bytes(b'\xff' * (size // 2) + path.read_bytes()[size // 2 :])
  result = run('verify', folder)
  assert result.code == 1
  assert 'checkpoint_10: DAMAGED' in result.out and 'checkpoint_20: DAMAGED' in result.out


@pytest.mark.parametrize('reads', [1, 5])
def test_a_checkpoint_that_its_run_deletes_meanwhile_is_not_damaged(tmp_path, monkeypatch, reads):
  folder = folder_with(tmp_path, 10, 20)
  left = [(10, reads), (20, reads)]
  open_array = ts.open

  def deletes(spec, **options):
    step, count = left[0]
    left[0] = step, count - 1
    if count == 1:
      remove_checkpoint(folder, step)
    return open_array(spec, **options)

  monkeypatch.setattr(ts, 'open', deletes)
  result = run('verify', folder)
  assert result.code == 0 and 'DAMAGED' not in result.out
  assert 'checkpoint_10: its run has deleted it' in result.out
  assert 'checkpoint_20: 3 arrays match' in result.out
  del left[0]
  result = run('verify', folder / 'checkpoint_20')
  assert result.code == 2 and 'checkpoint_20 was deleted while it was read' in result.err


def test_verify_reads_what_has_no_checksums_and_says_so(tmp_path):
  folder = folder_with(tmp_path, 3)
  path = folder / 'checkpoint_3/manifest/metadata'
  manifest = json.loads(path.read_text())
  del manifest['checksums'], manifest['seal']
  path.write_text(json.dumps(manifest))
  result = run('verify', folder)
  assert result.code == 0 and '3 can be read but have no checksum' in result.out


def test_average_is_the_mean_and_reads_as_any_checkpoint(tmp_path):
  folder = write_params(tmp_path / 'run', 1, 1.0)
  write_params(folder, 2, 3.0)
  write_params(folder, 5, 8.0)
  (folder / 'config.gin').write_text('# of the run')
  (folder / 'hf').mkdir()
  (folder / 'hf' / 'tokenizer.json').write_text('{}')
  assert run('average', folder, '--last=2', f'--to={tmp_path / "two"}').code == 0
  result = run(
    'average',
    folder / 'checkpoint_1',
    folder / 'checkpoint_2',
    folder,
    f'--to={tmp_path / "three"}',
  )
  assert result.code == 0, result.err
  want = {'dense': {'kernel': jax.ShapeDtypeStruct((64, 32), jnp.float32)}}
  for name, mean in (('two', 5.5), ('three', 4.0)):
    got = read_params(tmp_path / name, want)['dense']['kernel']
    np.testing.assert_array_equal(got, np.full((64, 32), mean, np.float32))
    assert committed_steps(tmp_path / name) == [5]
    assert (tmp_path / name / 'config.gin').read_text() == '# of the run'
    assert (tmp_path / name / 'hf' / 'tokenizer.json').read_text() == '{}'
    assert run('verify', tmp_path / name).code == 0


def test_average_of_another_model_or_of_damaged_files_leaves_nothing(tmp_path):
  a, b = write_params(tmp_path / 'a', 1, 1.0), write_params(tmp_path / 'b', 1, 1.5)
  data = np.full((64, 32), 1.5, np.float32)
  flipped = data.copy()
  for path in (b / 'checkpoint_1/state').rglob('d/*'):
    text = path.read_bytes()
    flipped[:] = 1.25
    path.write_bytes(text.replace(data[:16].tobytes(), flipped[:16].tobytes(), 1))
  result = run('average', a, b, f'--to={tmp_path / "c"}')
  assert result.code == 1 and 'params/dense/kernel of' in result.err
  folder = folder_with(tmp_path, 3)
  with raises(CheckpointError):
    checkpoint_tools.main(['average', str(a), str(folder), f'--to={tmp_path / "c"}'])
  assert sorted(p.name for p in tmp_path.iterdir()) == ['a', 'b', 'model']


@pytest.mark.parametrize(
  'argv',
  [
    ('inspect', 'a', '--yes'),
    ('diff', 'a'),
    ('prune', 'a'),
    ('average', 'a'),
    ('verfy', 'a'),
    ('inspect', 'a', '--gin_file=x.gin'),
    ('prune', 'a', '--keep_last=0'),
  ],
)
def test_mistakes_are_named(argv):
  with raises(ConfigError):
    checkpoint_tools.main(argv)
