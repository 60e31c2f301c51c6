"""python -m t5x_gpu.convert: what it writes, what it refuses; nothing half-written stays."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import types

import flax.traverse_util
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from t5x_gpu import convert
from t5x_gpu.checkpoint import atomic_folder, store
from t5x_gpu.checkpoint.checkpointer import Checkpointer
from t5x_gpu.checkpoint.manifest import make_manifest
from t5x_gpu.checkpoint.params_files import ParamsReader, read_params
from t5x_gpu.conversion import conversion, name_table
from t5x_gpu.conversion.hf.config_json import to_hf
from t5x_gpu.conversion.hf.folder import open_hf
from t5x_gpu.conversion.hf.names import JOINED
from t5x_gpu.conversion.safetensors_io import SafetensorsFolder
from t5x_gpu.convert import model_of_gin
from t5x_gpu.errors import CheckpointError, ConfigError
from t5x_gpu.storage import files
from t5x_gpu.training.state import TrainState
from tests.conversion.hf_files import (
  CONFIGS,
  VARIANTS,
  VOCAB,
  files_of,
  random_tensors,
  table_of,
  write_model,
)
from tests.messages import raises

ROOT = pathlib.Path(__file__).parents[1]
TOKENIZER = json.dumps(
  {
    'model': {'type': 'BPE', 'vocab': {'a': 0, 'b': VOCAB - 2}, 'merges': []},
    'added_tokens': [{'id': VOCAB - 1, 'content': '<end>'}],
  }
)


def run(source, target, *flags, check='tensors'):
  assert convert.main([f'--from={source}', f'--to={target}', f'--check={check}', *flags]) == 0


@pytest.fixture
def refuses(tmp_path):
  """Returns check(*arguments of run): it is refused, and nothing new lies anywhere."""

  def check(*args, error=CheckpointError, **kwargs):
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*') if p.is_file()}
    folders = {p for p in tmp_path.rglob('*') if p.is_dir()}
    with raises(error) as e:
      run(*args, **kwargs)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*') if p.is_file()} == before
    assert {p for p in tmp_path.rglob('*') if p.is_dir()} == folders
    assert e.value.fix

  return check


# ---- there and back ----------------------------------------------------------------------------


@pytest.mark.parametrize(
  'name, dtype',
  [
    ('t5', 'float32'),
    ('t5_1_1', 'bfloat16'),
    ('mt5', 'float32'),
    ('umt5', 'bfloat16'),
    ('bert_mlm', 'float16'),
    ('bert_classification', 'float32'),
    ('bert_multi_label', 'float32'),
    ('bert_regression', 'float32'),
    ('bert_tags', 'bfloat16'),
    ('gpt2', 'float16'),
    ('llama', 'bfloat16'),
    ('gemma2', 'bfloat16'),
    ('qwen3', 'float32'),
    ('mistral', 'float16'),
    ('qwen2', 'bfloat16'),
    ('gemma3_text', 'bfloat16'),
    ('smollm3', 'float32'),
    ('olmo2', 'float32'),
    ('phi3', 'bfloat16'),
    ('mixtral', 'bfloat16'),
    ('qwen3_moe', 'float32'),
  ],
)
def test_hugging_face_to_ours_and_back_is_the_same_to_the_last_byte(name, dtype, tmp_path):
  write_model(tmp_path / 'a', VARIANTS[name], dtype=dtype, max_file_bytes=20_000)
  (tmp_path / 'a' / 'tokenizer.json').write_text(TOKENIZER)
  (tmp_path / 'a' / 'chat_template.jinja').write_bytes(b'\x01\x02')
  before = files_of(tmp_path / 'a')
  assert sum(f.endswith('.safetensors') for f in before) > 1
  run(tmp_path / 'a', tmp_path / 'ours')
  run(tmp_path / 'ours', tmp_path / 'b')
  assert files_of(tmp_path / 'b') == before


def test_files_with_joined_experts_come_back_joined(tmp_path):
  config = {**CONFIGS['qwen3_moe'], 'num_local_experts': 5}
  write_model(tmp_path / 'a', config, names={JOINED})
  run(tmp_path / 'a', tmp_path / 'ours')
  run(tmp_path / 'ours', tmp_path / 'b')
  assert files_of(tmp_path / 'b') == files_of(tmp_path / 'a')


def test_names_of_older_files_copies_and_one_file_come_back_too(tmp_path):
  tensors = random_tensors(CONFIGS['bert_mlm'])
  old = {
    n.replace('Norm.weight', 'Norm.gamma').replace('Norm.bias', 'Norm.beta'): v
    for n, v in tensors.items()
  }
  old['cls.predictions.decoder.weight'] = tensors['bert.embeddings.word_embeddings.weight']
  old['cls.predictions.decoder.bias'] = tensors['cls.predictions.bias']
  write_model(tmp_path / 'a', CONFIGS['bert_mlm'], old)
  run(tmp_path / 'a', tmp_path / 'ours')
  run(tmp_path / 'ours', tmp_path / 'b')
  assert files_of(tmp_path / 'b') == files_of(tmp_path / 'a')
  assert 'bert.embeddings.LayerNorm.gamma' in (
    tmp_path / 'b' / 'model.safetensors'
  ).read_bytes().decode('latin1')


def test_names_without_the_models_prefix_are_read(tmp_path):
  tensors = random_tensors(CONFIGS['gpt2'])
  bare = {n.removeprefix('transformer.'): v for n, v in tensors.items()}
  bare['h.0.attn.bias'] = np.ones((1, 1, 64, 64), np.uint8)  # a mask: nothing to convert
  write_model(tmp_path / 'a', CONFIGS['gpt2'], bare)
  run(tmp_path / 'a', tmp_path / 'ours')
  reader = ParamsReader(tmp_path / 'ours')
  np.testing.assert_array_equal(reader.read('position_embedder/embedding'), bare['wpe.weight'])


def test_query_key_and_value_of_gpt2_are_the_thirds_of_its_one_kernel(tmp_path):
  tensors = write_model(tmp_path / 'a', CONFIGS['gpt2'])
  run(tmp_path / 'a', tmp_path / 'ours')
  reader = ParamsReader(tmp_path / 'ours')
  fused = tensors['transformer.h.1.attn.c_attn.weight']
  for i, name in enumerate(('query', 'key', 'value')):
    np.testing.assert_array_equal(
      reader.read_at(f'layers/self_attention/{name}/kernel', (1,)),
      fused[:, 32 * i : 32 * (i + 1)].reshape(32, 4, 8),
    )


def test_dtype_rounds_and_says_so(tmp_path, capsys):
  write_model(tmp_path / 'a', CONFIGS['llama'])
  run(tmp_path / 'a', tmp_path / 'ours')
  run(tmp_path / 'ours', tmp_path / 'b', '--dtype=bfloat16', check='own')
  assert 'lost digits in bfloat16' in capsys.readouterr().out
  run(tmp_path / 'b', tmp_path / 'again')
  run(tmp_path / 'again', tmp_path / 'c')
  assert files_of(tmp_path / 'c') == files_of(tmp_path / 'b')


def test_own_check_compares_logits(tmp_path, capsys):
  write_model(tmp_path / 'a', CONFIGS['llama'], dtype='bfloat16')
  run(tmp_path / 'a', tmp_path / 'ours', check='own')
  out = capsys.readouterr().out
  assert (
    "ours against our own model with the other files' tensors: largest difference 0.0e+00" in out
  )
  assert 'bit-identical' in out


# ---- our side of it ----------------------------------------------------------------------------


def abstract(shapes, sharding):
  return flax.traverse_util.unflatten_dict(
    {n: jax.ShapeDtypeStruct(s, np.float32, sharding=sharding) for n, s in shapes.items()}, sep='/'
  )


def test_converted_parameters_are_read_onto_any_mesh(tmp_path):
  tensors = write_model(tmp_path / 'a', CONFIGS['llama'])
  run(tmp_path / 'a', tmp_path / 'ours')
  shapes = table_of(CONFIGS['llama']).our_shapes
  mesh = jax.make_mesh((8,), ('x',))
  split = jax.NamedSharding(mesh, jax.P(None, 'x'))
  params = abstract(shapes, jax.NamedSharding(mesh, jax.P()))
  params['layers']['mlp']['wo']['kernel'] = jax.ShapeDtypeStruct(
    shapes['layers/mlp/wo/kernel'], np.float32, sharding=split
  )
  got = read_params(tmp_path / 'ours', params)
  wo = got['layers']['mlp']['wo']['kernel']
  assert wo.sharding == split and wo.addressable_shards[0].data.shape == (2, 6, 32)
  np.testing.assert_array_equal(wo[1], tensors['model.layers.1.mlp.down_proj.weight'].T)
  params['layers']['mlp']['wo']['kernel'] = jax.ShapeDtypeStruct((2, 3, 32), np.float32)
  params['more'] = jax.ShapeDtypeStruct((1,), np.float32)
  with raises(CheckpointError):
    read_params(tmp_path / 'ours', params)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_orbax_itself_reads_what_is_written(dtype, tmp_path):
  tensors = write_model(tmp_path / 'a', CONFIGS['gpt2'], dtype=dtype)
  run(tmp_path / 'a', tmp_path / 'ours')
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  target = {
    'step': jax.ShapeDtypeStruct((), np.int32, sharding=sharding),
    'params': abstract(table_of(CONFIGS['gpt2']).our_shapes, sharding),
  }
  with ocp.StandardCheckpointer() as checkpointer:
    got = checkpointer.restore(tmp_path / 'ours' / 'checkpoint_0' / 'state', target)
  assert got['step'] == 0
  np.testing.assert_array_equal(
    got['params']['token_embedder']['embedding'], tensors['transformer.wte.weight']
  )


def test_a_checkpoint_of_a_run_becomes_a_model_of_hugging_face(tmp_path):
  tensors = write_model(tmp_path / 'a', CONFIGS['llama'], dtype='bfloat16')
  (tmp_path / 'a' / 'tokenizer.json').write_text(TOKENIZER)
  run(tmp_path / 'a', tmp_path / 'ours')
  # As a run saves it: arrays split over a mesh, layers in one chunk, with optimizer state.
  sharding = jax.NamedSharding(jax.make_mesh((2,), ('x',), devices=jax.devices()[:2]), jax.P())
  params = read_params(tmp_path / 'ours', abstract(table_of(CONFIGS['llama']).our_shapes, sharding))
  params = jax.tree.map(lambda x: x * 2, params)
  state = TrainState(step=np.int32(7), params=params, opt_state={'mu': params})
  with Checkpointer(str(tmp_path / 'run')) as checkpointer:
    checkpointer.save(
      7,
      state,
      data_state=b'',
      manifest=make_manifest(state, mesh_shape={}, data={}, next_batch_hash=''),
    )
  model_gin = f'--gin_file={tmp_path / "ours" / "model.gin"}'
  run(tmp_path / 'run', tmp_path / 'plain', model_gin)
  config = json.loads((tmp_path / 'plain' / 'config.json').read_text())
  assert config['model_type'] == 'llama' and config['rope_scaling']['rope_type'] == 'llama3'
  run(tmp_path / 'run', tmp_path / 'like', model_gin, f'--like={tmp_path / "a"}')
  for folder, dtype in (('plain', np.float32), ('like', tensors['lm_head.weight'].dtype)):
    read = convert.SafetensorsFolder(tmp_path / folder)
    assert read.shapes.keys() == tensors.keys()
    got = read.read('model.layers.1.self_attn.k_proj.weight')
    assert got.dtype == dtype
    np.testing.assert_array_equal(
      got.astype(np.float32),
      2 * tensors['model.layers.1.self_attn.k_proj.weight'].astype(np.float32),
    )
  assert (tmp_path / 'like' / 'tokenizer.json').read_text() == TOKENIZER
  assert (tmp_path / 'like' / 'config.json').read_bytes() == (
    tmp_path / 'a' / 'config.json'
  ).read_bytes()


def test_memory_is_bounded_by_pieces(tmp_path, monkeypatch):
  monkeypatch.setattr(name_table, 'PIECE_BYTES', 4096)
  monkeypatch.setattr(store, 'FLUSH_BYTES', 4096)
  write_model(tmp_path / 'a', CONFIGS['llama'])
  sizes = []
  read = convert.SafetensorsFolder.read
  monkeypatch.setattr(
    convert.SafetensorsFolder,
    'read',
    lambda *args: (lambda out: sizes.append(out.nbytes) or out)(read(*args)),
  )
  run(tmp_path / 'a', tmp_path / 'ours')
  assert max(sizes) <= 4096 < 4 * VOCAB * 32  # the token table is larger


# ---- what is refused ---------------------------------------------------------------------------


def test_tensors_left_over_and_missing_are_named_with_the_closest(tmp_path, refuses):
  tensors = random_tensors(CONFIGS['llama'])
  tensors['model.layers.1.mlp.gate.weight'] = tensors.pop('model.layers.1.mlp.gate_proj.weight')
  tensors['model.layers.0.mlp.up_proj.weight'] = np.zeros((48, 31), np.float32)
  write_model(tmp_path / 'a', CONFIGS['llama'], tensors)
  refuses(tmp_path / 'a', tmp_path / 'ours')


def test_tensors_are_dropped_by_name_only(tmp_path, refuses, capsys):
  tensors = {
    **random_tensors(CONFIGS['bert_mlm']),
    'cls.seq_relationship.weight': np.ones((2, 32), np.float32),
  }
  write_model(tmp_path / 'a', CONFIGS['bert_mlm'], tensors)
  refuses(tmp_path / 'a', tmp_path / 'ours')
  run(tmp_path / 'a', tmp_path / 'ours', r'--drop=cls\.seq_relationship\..*')
  assert 'left out: cls.seq_relationship.weight [2, 32]' in capsys.readouterr().out
  run(tmp_path / 'ours', tmp_path / 'b')
  assert (
    convert.SafetensorsFolder(tmp_path / 'b').shapes.keys()
    == random_tensors(CONFIGS['bert_mlm']).keys()
  )


def test_a_pickle_is_refused_and_not_read(tmp_path, refuses):
  write_model(tmp_path / 'a', CONFIGS['llama'])
  (tmp_path / 'a' / 'model.safetensors').rename(tmp_path / 'a' / 'pytorch_model.bin')
  os.chmod(tmp_path / 'a' / 'pytorch_model.bin', 0)
  refuses(tmp_path / 'a', tmp_path / 'ours')
  (tmp_path / 'a' / 'config.json').unlink()
  refuses(tmp_path / 'a', tmp_path / 'ours')


@pytest.mark.parametrize('size', [0, 5, 500, -1])
def test_a_truncated_file_is_refused(size, tmp_path, refuses):
  write_model(tmp_path / 'a', CONFIGS['llama'])
  path = tmp_path / 'a' / 'model.safetensors'
  path.write_bytes(path.read_bytes()[:size])
  refuses(tmp_path / 'a', tmp_path / 'ours')


def test_a_shard_that_is_missing_is_named(tmp_path, refuses):
  write_model(tmp_path / 'a', CONFIGS['llama'], max_file_bytes=20_000)
  next((tmp_path / 'a').glob('model-00002*')).unlink()
  refuses(tmp_path / 'a', tmp_path / 'ours')


def test_garbled_headers_are_refused(tmp_path, refuses):
  write_model(tmp_path / 'a', CONFIGS['llama'])
  path = tmp_path / 'a' / 'model.safetensors'
  good = path.read_bytes()
  for bad in (
    good.replace(b'"F32"', b'"F3"', 1),
    good.replace(b'"F32"', b'"Q99"', 1),
    good.replace(b'[0,', b'[4,', 1),
    good[:8] + b'\xff' + good[9:],
  ):
    path.write_bytes(bad)
    refuses(tmp_path / 'a', tmp_path / 'ours')


def test_another_family_is_named(tmp_path, refuses):
  write_model(tmp_path / 'a', CONFIGS['gpt2'])
  (tmp_path / 'a' / 'config.json').write_text(json.dumps(CONFIGS['llama']))
  refuses(tmp_path / 'a', tmp_path / 'ours')
  write_model(tmp_path / 'c', CONFIGS['gpt2'])
  refuses(tmp_path / 'c', tmp_path / 'ours', '--family=llama')


@pytest.mark.parametrize(
  'config_ends, own, says',
  [
    (2, '</s>', None),
    ([3, 2], '</s>', None),
    (None, '</s>', None),
    (2, '</q>', 'the tokenizer ends a text with id 5, and eos_token_id is 2'),
    (96, '</s>', 'eos_token_id of config.json is 96, but the model has ids from 0 to 95'),
  ],
)
def test_files_that_disagree_on_the_end_of_a_text_are_named(
  tmp_path, capsys, config_ends, own, says
):
  write_model(tmp_path / 'a', {**CONFIGS['llama'], 'eos_token_id': config_ends})
  tokenizer = {'model': {'vocab': {'a': 0}}, 'added_tokens': []}
  tokenizer['added_tokens'] = [{'id': 2, 'content': '</s>'}, {'id': 5, 'content': '</q>'}]
  (tmp_path / 'a' / 'tokenizer.json').write_text(json.dumps(tokenizer))
  (tmp_path / 'a' / 'tokenizer_config.json').write_text(json.dumps({'eos_token': own}))
  convert.main([f'--from={tmp_path / "a"}', f'--to={tmp_path / "b"}', '--check=tensors'])
  out = capsys.readouterr().out
  assert (f'end of text: {says}' in out) if says else ('end of text' not in out)


@pytest.mark.parametrize('text', ['{"decoder_start_token_id": 3}', '{'])
def test_another_start_of_the_decoder_is_refused(tmp_path, text):
  write_model(tmp_path / 'a', CONFIGS['t5'])
  path = tmp_path / 'a' / 'generation_config.json'
  path.write_text(text)
  with raises(CheckpointError):
    open_hf(tmp_path / 'a')
  path.write_text('{"decoder_start_token_id": 0, "eos_token_id": 1}')
  assert open_hf(tmp_path / 'a').family == 't5'


def test_vocabularies_that_disagree_are_refused(tmp_path, refuses):
  write_model(tmp_path / 'a', CONFIGS['llama'])
  path = tmp_path / 'a' / 'config.json'
  path.write_text(json.dumps({**CONFIGS['llama'], 'vocab_size': 90}))
  refuses(tmp_path / 'a', tmp_path / 'ours')
  path.write_text(json.dumps(CONFIGS['llama']))
  (tmp_path / 'a' / 'tokenizer.json').write_text(TOKENIZER.replace('95', '96'))
  refuses(tmp_path / 'a', tmp_path / 'ours')
  (tmp_path / 'a' / 'tokenizer.json').unlink()
  (tmp_path / 'a' / 'vocab.txt').write_text('a\u2028b\x85\n' * 96, encoding='utf-8')
  (tmp_path / 'a' / 'tokenizer.model').write_bytes(b'junk')
  refuses(tmp_path / 'a', tmp_path / 'ours')
  sentencepiece = pytest.importorskip('sentencepiece')
  (tmp_path / 'text').write_text(' '.join(map(chr, range(0x4E00, 0x4E00 + 120))))
  sentencepiece.SentencePieceTrainer.train(
    input=str(tmp_path / 'text'),
    model_prefix=str(tmp_path / 'a' / 'tokenizer'),
    vocab_size=124,
    hard_vocab_limit=False,
    minloglevel=2,
  )
  refuses(tmp_path / 'a', tmp_path / 'ours')


def test_logits_that_are_tied_in_one_place_and_not_in_another_are_refused(tmp_path, refuses):
  tensors = random_tensors(CONFIGS['llama'])
  tied = {**CONFIGS['llama'], 'tie_word_embeddings': True}
  write_model(tmp_path / 'a', tied, tensors)
  refuses(tmp_path / 'a', tmp_path / 'ours')
  write_model(
    tmp_path / 'b',
    CONFIGS['t5'],
    {**random_tensors(CONFIGS['t5']), 'lm_head.weight': np.ones((VOCAB, 32), np.float32)},
  )
  refuses(tmp_path / 'b', tmp_path / 'ours')
  tensors['lm_head.weight'] = tensors['model.embed_tokens.weight']
  write_model(tmp_path / 'c', tied, tensors)
  run(tmp_path / 'c', tmp_path / 'ours')  # a copy of the same


def test_integers_and_doubles_are_not_taken_for_weights(tmp_path, refuses):
  tensors = {n: v.astype(np.float64) for n, v in random_tensors(CONFIGS['llama']).items()}
  write_model(tmp_path / 'a', CONFIGS['llama'], tensors)
  refuses(tmp_path / 'a', tmp_path / 'ours')


def test_values_beyond_the_range_of_the_dtype_are_refused(tmp_path, refuses):
  tensors = random_tensors(CONFIGS['llama'])
  tensors['model.norm.weight'][3] = 1e6
  write_model(tmp_path / 'a', CONFIGS['llama'], tensors)
  run(tmp_path / 'a', tmp_path / 'ours')
  refuses(tmp_path / 'ours', tmp_path / 'b', '--dtype=float16')


def test_a_conversion_whose_logits_differ_leaves_nothing(tmp_path, refuses, monkeypatch):
  write_model(tmp_path / 'a', CONFIGS['llama'])
  right = conversion.params_of_checkpoint

  def wrong(reader):
    params = right(reader)
    kernel = params['layers']['self_attention']['key']['kernel']
    return {
      **params,
      'layers': {
        **params['layers'],
        'self_attention': {
          **params['layers']['self_attention'],
          'key': {'kernel': kernel[:, :, ::-1]},
        },
      },
    }

  monkeypatch.setattr(conversion, 'params_of_checkpoint', wrong)
  refuses(tmp_path / 'a', tmp_path / 'ours', check='own')


def test_a_disk_that_changes_a_bit_is_noticed(tmp_path, refuses, monkeypatch):
  write_model(tmp_path / 'a', CONFIGS['llama'])
  right = ParamsReader.read_at
  monkeypatch.setattr(
    ParamsReader,
    'read_at',
    lambda self, path, place: right(self, path, place) * np.float32(1 + 1e-7),
  )
  refuses(tmp_path / 'a', tmp_path / 'ours')


def test_logits_that_do_not_fit_into_memory_are_refused(tmp_path, refuses, monkeypatch):
  write_model(tmp_path / 'a', CONFIGS['llama'])
  monkeypatch.setattr(conversion, 'available_memory', lambda: 10_000)
  refuses(tmp_path / 'a', tmp_path / 'ours', check='own')


def test_nothing_is_overwritten(tmp_path, refuses):
  write_model(tmp_path / 'a', CONFIGS['llama'])
  (tmp_path / 'full').mkdir()
  (tmp_path / 'full' / 'x').write_text('mine')
  refuses(tmp_path / 'a', tmp_path / 'full')
  (tmp_path / 'empty').mkdir()
  run(tmp_path / 'a', tmp_path / 'empty')


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path, refuses, monkeypatch):
  write_model(tmp_path / 'a', CONFIGS['llama'])
  monkeypatch.setattr(
    files.shutil, 'disk_usage', lambda path: types.SimpleNamespace(free=0, total=1)
  )
  refuses(tmp_path / 'a', tmp_path / 'new' / 'ours')


def test_what_a_killed_conversion_left_is_removed_by_the_next(tmp_path):
  write_model(tmp_path / 'a', CONFIGS['llama'])
  left = tmp_path / '.ours.unfinished/new/checkpoint_0'
  left.mkdir(parents=True)
  run(tmp_path / 'a', tmp_path / 'ours')
  assert sorted(path.name for path in tmp_path.iterdir()) == ['a', 'ours']


def test_two_conversions_to_one_folder_do_not_mix(tmp_path, refuses):
  write_model(tmp_path / 'a', CONFIGS['llama'])
  with atomic_folder.new_folder(tmp_path / 'ours', num_bytes=0):
    refuses(tmp_path / 'a', tmp_path / 'ours')


SLOW = """
import sys, time
from t5x_gpu import convert
from t5x_gpu.conversion import to_ours
def copy(*args, **kwargs):
  print('copying', flush=True)
  for _ in range(600):  # one long sleep would not see a signal that arrives just before it
    time.sleep(0.1)
to_ours.copy_to_ours = copy
from t5x_gpu import cli
cli.run_main(convert.main)
"""


def test_sigterm_leaves_nothing(tmp_path):
  write_model(tmp_path / 'a', CONFIGS['llama'])
  process = subprocess.Popen(
    [sys.executable, '-c', SLOW, f'--from={tmp_path / "a"}', f'--to={tmp_path / "new" / "ours"}'],
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    stdout=subprocess.PIPE,
    text=True,
  )
  while 'copying' not in process.stdout.readline():
    assert process.poll() is None
  assert (tmp_path / 'new').exists()
  process.send_signal(signal.SIGTERM)
  assert process.wait(timeout=60) == 128 + signal.SIGTERM
  process.stdout.close()
  assert [p.name for p in tmp_path.iterdir()] == ['a']


@pytest.mark.parametrize(
  'flags',
  [
    ['--from=a'],
    ['--to=b'],
    ['--from=a', '--to=b', '--format=hf'],
    ['--from=a', '--to=b', '--dtype=float32', '--step=3'],
    ['--from=a', '--to=b', '--drop=('],
    ['--from=a', '--to=b', '--max_shard_size=big'],
    ['--from=a', '--to=b', '--famly=llama'],
  ],
  ids=str,
)
def test_wrong_flags_are_refused(flags, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  write_model(tmp_path / 'a', CONFIGS['llama'])
  with raises(ConfigError):
    convert.main(flags)


def test_a_record_that_names_files_elsewhere_is_refused(tmp_path, refuses):
  write_model(tmp_path / 'a', CONFIGS['llama'])
  run(tmp_path / 'a', tmp_path / 'ours')
  record = tmp_path / 'ours' / 'hf' / 'safetensors_headers.json'
  record.write_text(record.read_text().replace('"model.safetensors"', '"../model.safetensors"'))
  refuses(tmp_path / 'ours', tmp_path / 'b')


def test_an_impossible_check_is_refused_first(tmp_path, refuses, monkeypatch):
  write_model(tmp_path / 'a', CONFIGS['llama'])
  monkeypatch.setattr(convert, 'has_transformers', lambda: False)
  refuses(tmp_path / 'a', tmp_path / 'ours', check='transformers', error=ConfigError)


def test_the_model_file_of_a_checkpoint_describes_its_model(tmp_path, refuses):
  tensors = write_model(tmp_path / 'a', CONFIGS['llama'])
  run(tmp_path / 'a', tmp_path / 'ours')
  model = tmp_path / 'ours' / 'model.gin'
  model.write_text(model.read_text().replace('max_length = 128', 'max_length = 256'))
  run(tmp_path / 'ours', tmp_path / 'b')  # config.json of hf/, with what has changed
  assert json.loads((tmp_path / 'b' / 'config.json').read_text()) == {
    **to_hf(model_of_gin([model]), family='llama', like=CONFIGS['llama']),
    'max_position_embeddings': 256,
  }
  shutil.rmtree(tmp_path / 'ours' / 'hf')  # as of T5X, or of a run whose adapters are merged
  run(tmp_path / 'ours', tmp_path / 'c')
  found = SafetensorsFolder(tmp_path / 'c')
  for name, value in tensors.items():
    np.testing.assert_array_equal(found.read(name, 0, len(value)), value)
  model.unlink()
  refuses(tmp_path / 'ours', tmp_path / 'd', error=ConfigError)


def test_a_gin_file_of_another_model_is_refused(tmp_path, refuses):
  write_model(tmp_path / 'a', CONFIGS['llama'])
  run(tmp_path / 'a', tmp_path / 'ours')
  refuses(
    tmp_path / 'a',
    tmp_path / 'b',
    f'--gin_file={tmp_path / "ours" / "model.gin"}',
    '--gin.TransformerConfig.mlp_dim=47',
  )


def test_folders_without_a_checkpoint_are_refused(tmp_path, refuses):
  refuses(tmp_path / 'none', tmp_path / 'b')
  (tmp_path / 'a').mkdir()
  refuses(tmp_path / 'a', tmp_path / 'b')


def test_speed_is_not_lost_to_small_files(tmp_path):
  # One file of arrays per flush: a file per layer would be thousands, which file systems dislike.
  write_model(tmp_path / 'a', {**CONFIGS['llama'], 'num_hidden_layers': 20})
  run(tmp_path / 'a', tmp_path / 'ours')
  assert len(list((tmp_path / 'ours' / 'checkpoint_0' / 'state' / 'd').iterdir())) < 10
