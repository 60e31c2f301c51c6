"""Checkpoints of T5X, in every form that it writes, become ours; broken ones are refused."""

import pathlib
import re
import tarfile

import flax.serialization
import flax.traverse_util
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

from t5x_gpu import convert
from t5x_gpu.checkpoint.params_files import ParamsReader
from t5x_gpu.checkpoint.store import StateReader
from t5x_gpu.conversion.t5x_files import T5xCheckpoint, is_t5x
from t5x_gpu.conversion.t5x_names import t5x_model, t5x_table
from t5x_gpu.conversion.to_ours import converted_once
from t5x_gpu.errors import CheckpointError
from tests.conversion.t5x_params import arrays_of_file, params_from_t5x
from tests.messages import raises

FIXTURES = pathlib.Path(__file__).parents[1] / 'parity' / 'fixtures'
WRITTEN = [('decoder_only', 'orbax'), ('encoder_decoder', 'orbax'), ('encoder_decoder', 'legacy')]


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """Returns folder(model, format): a checkpoint that T5X has written after 20 steps."""

  def folder(model, kind):
    target = tmp_path_factory.mktemp(f'{model}_{kind}')
    with tarfile.open(FIXTURES / f't5x_{model}' / f'checkpoint_{kind}.tar.xz') as archive:
      archive.extractall(target, filter='data')
    return target / f'checkpoint_{kind}'

  return folder


@pytest.mark.parametrize('model, kind', WRITTEN)
def test_everything_in_a_checkpoint_of_t5x_is_taken(model, kind, written, tmp_path, capsys):
  source = written(model, kind)
  checkpoint = T5xCheckpoint(source)
  assert checkpoint.step == 20
  table = t5x_table(t5x_model(checkpoint.shapes), checkpoint.shapes)
  assert table.their_shapes == checkpoint.shapes
  convert.main([f'--from={source}', f'--to={tmp_path / "ours"}', '--check=tensors'])
  reader = ParamsReader(tmp_path / 'ours')
  out = ' '.join(capsys.readouterr().out.split())
  if kind == 'legacy':  # the fixture has no files of the optimizer state
    assert re.search(r'optimizer: left out: .*state\.param_states\..*/\.zarray is missing', out)
    assert reader.manifest['params_only']
  else:
    moments = StateReader(tmp_path / 'ours', prefix='opt_state/')
    assert len(moments.shapes) >= len(reader.shapes) and reader.manifest['without_data']
  assert reader.step == 20
  ours = 'decoder/layers' if model == 'encoder_decoder' else 'layers'
  np.testing.assert_array_equal(
    reader.read_at(f'{ours}/self_attention/query/kernel', (1,)).reshape(
      checkpoint.shapes['decoder/layers_1/self_attention/query/kernel']
    ),
    checkpoint.read('decoder/layers_1/self_attention/query/kernel'),
  )


def test_legacy_and_orbax_hold_the_same(written):
  legacy, orbax = (T5xCheckpoint(written('encoder_decoder', k)) for k in ('legacy', 'orbax'))
  assert legacy.shapes == orbax.shapes and legacy.dtypes == orbax.dtypes
  for name in legacy.shapes:
    np.testing.assert_array_equal(legacy.read(name), orbax.read(name))


def test_own_check_runs_on_t5x_as_well(written, tmp_path, capsys):
  convert.main([f'--from={written("decoder_only", "orbax")}', f'--to={tmp_path / "ours"}'])
  out = capsys.readouterr().out
  assert "our own model with the other files' tensors: largest difference 0.0e+00" in out
  assert "assumed: mlp_activations = ('gelu', 'linear')" in out
  assert 'recognized: decoder: 2 layers, not scanned, heads joined' in out


def initial(model):
  return arrays_of_file(FIXTURES / f't5x_{model}' / 'init_params.npz')


def with_heads_apart(flat, heads):
  """Returns the parameters as scalable_t5 has them: heads and features in their own dimensions."""
  out = {}
  for key, value in flat.items():
    if key.endswith(('query/kernel', 'key/kernel', 'value/kernel')):
      value = value.reshape(value.shape[0], heads, -1)
    elif key.endswith('out/kernel'):
      value = value.reshape(heads, -1, value.shape[-1])
    out[key] = value
  return out


def stacked(flat, axis, name='layers', bias=None):
  """Returns what T5X's scan makes of parameters: one array for all layers, stacked on `axis`."""
  out, layers = {}, {}
  for key, value in flat.items():
    match = re.fullmatch(r'(encoder|decoder)/layers_(\d+)/(.+)', key)
    if match:
      layers.setdefault(f'{match[1]}/{name}/{match[3]}', []).append((int(match[2]), value))
    elif bias and key.endswith('relpos_bias/rel_embedding'):
      pass
    else:
      out[key] = value
  if bias:
    rng = np.random.default_rng(0)
    for stack in {key.split('/')[0] for key in layers}:
      num = len(next(v for k, v in layers.items() if k.startswith(stack)))
      layers[f'{stack}/{name}/{bias}/rel_embedding'] = [
        (i, rng.normal(size=(4, 32)).astype(np.float32)) for i in range(num)
      ]
  return {
    **out,
    **{
      k: np.stack([v for _, v in sorted(values, key=lambda item: item[0])], axis)
      for k, values in layers.items()
    },
  }


@pytest.mark.parametrize('axis', [0, 1])
@pytest.mark.parametrize('model', ['decoder_only', 'encoder_decoder'])
def test_scanned_layers_are_the_same_as_layers_one_by_one(model, axis):
  flat = initial(model)
  scanned = stacked(flat, axis, name='decoder' if axis else 'layers')
  shapes = {n: v.shape for n, v in flat.items()}
  assert t5x_model({n: v.shape for n, v in scanned.items()}) == t5x_model(shapes)
  jax.tree.map(np.testing.assert_array_equal, params_from_t5x(scanned), params_from_t5x(flat))


@pytest.mark.parametrize('axis', [None, 0, 1])
@pytest.mark.parametrize('model, heads', [('decoder_only', 8), ('encoder_decoder', 4)])
def test_heads_in_their_own_dimension_are_the_same_as_joined_ones(model, heads, axis):
  flat = initial(model)
  apart = with_heads_apart(flat, heads)
  apart = apart if axis is None else stacked(apart, axis)
  shapes = {n: v.shape for n, v in flat.items()}
  if axis == 1:  # as nn.scan stacks the kernels of scalable_t5
    kv = flat['decoder/layers_0/self_attention/query/kernel'].shape[1] // heads
    embed = flat['decoder/layers_0/self_attention/query/kernel'].shape[0]
    assert apart['decoder/layers/self_attention/query/kernel'].shape == (embed, 2, heads, kv)
    assert apart['decoder/layers/self_attention/out/kernel'].shape == (heads, 2, kv, embed)
  assert t5x_model({n: v.shape for n, v in apart.items()}) == t5x_model(shapes)
  jax.tree.map(np.testing.assert_array_equal, params_from_t5x(apart), params_from_t5x(flat))


@pytest.mark.parametrize('bias', ['relpos_bias', 'relative_posemb'])
def test_scanned_layers_with_a_separate_bias_are_read(bias):
  scanned = stacked(initial('encoder_decoder'), 1, bias=bias)
  shapes = {n: v.shape for n, v in scanned.items()}
  model = t5x_model(shapes)
  assert model.config.relative_bias == 'per_layer' and model.config.num_heads == 4
  got = params_from_t5x(scanned)
  np.testing.assert_array_equal(
    got['decoder']['layers']['relpos_bias']['rel_embedding'][1],
    scanned[f'decoder/layers/{bias}/rel_embedding'][:, 1],
  )


def test_a_plain_mlp_is_relu_as_in_t5_1_0(written):
  shapes = {
    n.replace('wi_0', 'wi'): v.shape
    for n, v in initial('encoder_decoder').items()
    if 'wi_1' not in n
  }
  model = t5x_model(shapes)
  assert model.config.mlp_activations == ('relu',)
  assert t5x_table(model, shapes).their_shapes == shapes


def test_orbax_without_ocdbt_is_read(tmp_path):
  flat = initial('decoder_only')
  tree = {
    'target': flax.traverse_util.unflatten_dict(flat, sep='/'),
    'state': {'step': np.int32(3)},
  }
  handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
  with ocp.Checkpointer(handler) as checkpointer:
    checkpointer.save(tmp_path / 'checkpoint_3' / 'state', tree)
  checkpoint = T5xCheckpoint(tmp_path)
  assert checkpoint.step == 3 and checkpoint.path.name == 'checkpoint_3'
  assert checkpoint.shapes == {n: v.shape for n, v in flat.items()}
  np.testing.assert_array_equal(
    checkpoint.read('decoder/layers_1/mlp/wo/kernel', 3, 9),
    flat['decoder/layers_1/mlp/wo/kernel'][3:9],
  )


def write_legacy(folder, flat, **options):
  """Writes T5X's legacy format: small arrays in the msgpack file, others next to it."""
  target = {}
  for i, (name, value) in enumerate(flat.items()):
    if i % 2:
      target[name] = value
      continue
    path = f'target.{name.replace("/", ".")}'
    spec = {
      'driver': 'zarr',
      'dtype': 'float32',
      'metadata': {
        'chunks': list(value.shape),
        'compressor': {'id': 'gzip'},
        'shape': list(value.shape),
      },
    }
    ts.open({**spec, 'kvstore': f'file://{folder / path}/'}, create=True).result().write(
      value
    ).result()
    target[name] = {**spec, 'kvstore': {'driver': 'gfile', 'path': f'/elsewhere/ckpt/{path}/'}}
  tree = {
    'version': 3,
    'optimizer': {
      'state': {'step': np.int32(5), 'param_states': {}},
      'target': flax.traverse_util.unflatten_dict(target, sep='/'),
    },
  }
  (folder / 'checkpoint').write_bytes(flax.serialization.msgpack_serialize(tree, **options))


def test_arrays_of_the_legacy_format_are_found_wherever_it_was_written(tmp_path):
  folder = tmp_path / 'checkpoint_5'
  folder.mkdir()
  flat = initial('decoder_only')
  write_legacy(folder, flat)
  checkpoint = T5xCheckpoint(folder)
  assert checkpoint.step == 5
  for name, value in flat.items():
    np.testing.assert_array_equal(checkpoint.read(name), value)


def test_broken_checkpoints_are_refused(tmp_path, written):
  folder = written('encoder_decoder', 'legacy')
  array = folder / 'target.decoder.logits_dense.kernel'
  data = folder / 'checkpoint'
  good = data.read_bytes()
  data.write_bytes(good[:-100])
  with raises(CheckpointError):
    T5xCheckpoint(folder)
  data.write_bytes(good)
  (array / '0.0').write_bytes((array / '0.0').read_bytes()[:-50])
  with raises(CheckpointError):
    T5xCheckpoint(folder).read('decoder/logits_dense/kernel')
  (array / '.zarray').unlink()
  with raises(CheckpointError):
    T5xCheckpoint(folder)
  with raises(CheckpointError):
    T5xCheckpoint(tmp_path)
  assert not is_t5x(tmp_path)


def test_parameters_of_no_t5_are_refused():
  with raises(CheckpointError):
    t5x_model({'encoder/conv/kernel': (3, 3)})
  shapes = {n: v.shape for n, v in initial('decoder_only').items() if 'relpos' not in n}
  with raises(CheckpointError):
    t5x_model(shapes)
  flat = initial('decoder_only')
  del flat['decoder/layers_1/mlp/wo/kernel']
  with raises(CheckpointError):
    params_from_t5x(flat)


def test_several_checkpoints_are_refused_where_all_are_wanted(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for step in (10, 20):
    folder = tmp_path / 'theirs' / f'checkpoint_{step}'
    folder.mkdir(parents=True)
    (folder / 'checkpoint').touch()
  with raises(CheckpointError):
    converted_once(pathlib.Path('theirs'), tmp_path / 'ours', None, wants_all=True)
