"""Numbers and names in files of strangers that no honest program writes are refused by name."""

import json
import os
import pathlib
import time

import pytest
import tensorstore as ts

from t5x_gpu.checkpoint.local.tier import RUN_ID, ensure_run_id, read_run_id
from t5x_gpu.checkpoint.params_files import ParamsReader
from t5x_gpu.conversion.safetensors_io import SafetensorsFolder
from t5x_gpu.data.prepared.index import Index, MixtureMember, Shard, check_shards, read_index
from t5x_gpu.errors import CheckpointError, DataError
from t5x_gpu.storage.json_schema import (
  Also,
  Fields,
  ListOf,
  MapOf,
  Nullable,
  Number,
  Text,
  Whole,
  parse_json,
  read_json,
)
from tests.checkpoint.test_checkpointer import abstract, folder_with, new_state, opened
from tests.helpers_fuzz import replace
from tests.messages import raises


def write_safetensors(folder: pathlib.Path, header, *, data_bytes: int) -> pathlib.Path:
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  path = folder / 'model.safetensors'
  path.write_bytes(len(text).to_bytes(8, 'little') + text)
  os.truncate(path, 8 + len(text) + data_bytes)
  return path


def tensor(shape, offsets, dtype='F32'):
  return {'dtype': dtype, 'shape': shape, 'data_offsets': offsets}


HEADERS = {
  'a negative size': {'x': tensor([-2, -3], [0, 24])},
  'a fraction': {'x': tensor([1.5, 4], [0, 24])},
  'a boolean': {'x': tensor([True, 6], [0, 24])},
  'a thousand dimensions': {'x': tensor([1] * 1000, [0, 4])},
  'a huge size': {'x': tensor([10**30], [0, 24])},
  'a huge product': {'x': tensor([2**40, 2**40], [0, 24])},
  'huge next to zero': {'x': tensor([0, 2**60], [0, 0])},
  'floating offsets': {'x': tensor([6], [0.0, 24.0])},
  'offsets backwards': {'x': tensor([6], [24, 0])},
  'overlap': {'x': tensor([6], [0, 24]), 'y': tensor([6], [12, 36])},
  'a gap': {'x': tensor([3], [0, 12]), 'y': tensor([2], [16, 24])},
  'beyond the end': {'x': tensor([600], [0, 2400])},
  'three offsets': {'x': tensor([6], [0, 24, 24])},
  'no object': [1, 2],
  'no tensor': {'x': 5},
  'deep JSON': b'{"x": ' + b'[' * 200_000 + b']' * 200_000 + b'}',
  'many digits': b'{"x": ' + b'9' * 5000 + b'}',
  'half a character': b'{"\\ud800": 1}',
}


@pytest.mark.parametrize('header', HEADERS.values(), ids=list(HEADERS))
def test_a_hostile_safetensors_header_is_refused(tmp_path, header):
  write_safetensors(tmp_path, header, data_bytes=24)
  with raises(CheckpointError):
    SafetensorsFolder(tmp_path)


def test_a_sparse_terabyte_is_refused_by_its_size_alone(tmp_path):
  path = write_safetensors(tmp_path, {'x': tensor([6], [0, 24])}, data_bytes=24)
  assert SafetensorsFolder(tmp_path).read('x').shape == (6,)
  os.truncate(path, 2**40)
  started = time.process_time()
  with raises(CheckpointError):
    SafetensorsFolder(tmp_path)
  path.write_bytes((2**39).to_bytes(8, 'little'))
  os.truncate(path, 2**40)
  with raises(CheckpointError):
    SafetensorsFolder(tmp_path)
  assert time.process_time() - started < 1


@pytest.mark.quick_cases('huge*', 'deep')
@pytest.mark.parametrize(
  'change',
  [
    lambda good: b'[' * 100_000 + b']' * 100_000,
    lambda good: good + b' ' * 2**20,
    lambda good: json.dumps({**json.loads(good), 'chunks': [2**50, 4]}).encode(),
    lambda good: b'{}',  # so short that the index itself holds it
  ],
  ids=['deep', 'long', 'huge chunk', 'short'],
)
def test_metadata_of_arrays_is_refused_before_tensorstore_sees_it(tmp_path, change):
  """TensorStore ends the process for the first of them."""
  folder = folder_with(tmp_path, 3, 7)
  store = ts.KvStore.open(
    {'driver': 'ocdbt', 'base': f'file://{folder}/checkpoint_7/state/'}
  ).result()
  key = b'params.dense.kernel/.zarray'
  store[key] = change(store[key])
  with raises(CheckpointError):
    ParamsReader(folder)
  with opened(folder) as checkpointer:
    assert checkpointer.restore_latest(abstract(new_state())).path.name == 'checkpoint_3'


def index_of(folder: pathlib.Path, *, file: str) -> Index:
  content = b'rows of another'
  shard = Shard(
    file=file,
    rows=3,
    tokens=3,
    bytes=len(content),
    sha256='0' * 64,
    sample='0' * 64,
    largest={'targets': 1},
    lengths={'2': 3},
  )
  index = Index(
    source_config={'mixture_or_task_name': 'task', 'vocabulary': None, 'module': 'm'},
    split='train',
    feature_converter='lm',
    task_feature_lengths={'targets': 4},
    pack=True,
    loss_on_targets_only=False,
    features={'decoder_target_tokens': 4},
    vocabularies={'targets': {'name': 'v', 'fingerprint': '', 'size': 9, 'by_name': True}},
    class_names=None,
    packing={'shuffle': False, 'seed': None},
    versions={},
    members={'task': MixtureMember(rate=1.0, source={}, num_shards=1, shards=(shard,))},
  )
  (folder / 'train').mkdir(exist_ok=True)
  (folder / 'train' / 'index.json').write_text(index.to_json())
  return index


@pytest.mark.parametrize('file', ['../../secret', '/etc/hostname', 'task/../../../secret', 'a\0b'])
def test_a_prepared_index_may_not_name_files_elsewhere(tmp_path, file):
  index_of(tmp_path, file=file)
  with raises(DataError):
    read_index(tmp_path, split='train')


def test_a_prepared_index_of_another_split_or_with_wrong_types_is_refused(tmp_path):
  index = index_of(tmp_path, file='task/00000-of-00001.arrayrecord')
  assert read_index(tmp_path, split='train') == index
  with raises(DataError):  # no such file
    check_shards(tmp_path, index)
  path = tmp_path / 'train' / 'index.json'
  good = json.loads(path.read_text())
  for change in (
    {'split': '../../elsewhere'},
    {'pack': 'yes'},
    {'features': {'x': -1}},
    {'members': []},
    {'vocabularies': {}},
    {'surprise': 1},
  ):
    path.write_text(json.dumps({**good, **change}))
    with raises(DataError):
      read_index(tmp_path, split='train')


@pytest.mark.parametrize('name', ['../..', '/etc', 'a/b', '', 'ABCDEF0123456789', 7])
def test_a_run_id_that_we_did_not_write_is_moved_aside(tmp_path, name, caplog):
  (tmp_path / RUN_ID).write_text(json.dumps({'name': name, 'folder': str(tmp_path)}))
  assert read_run_id(tmp_path) is None
  new = ensure_run_id(tmp_path)
  assert len(new) == 16 and read_run_id(tmp_path) == new == ensure_run_id(tmp_path)
  assert (tmp_path / 'corrupt_run.id').exists() and 'kept as corrupt_run.id' in caplog.text


@pytest.mark.parametrize('kind', ['folder', 'full folder', 'looping link', 'pipe', 'zeros'])
def test_special_files_are_neither_read_nor_waited_for(tmp_path, kind):
  replace(tmp_path / RUN_ID, kind)
  with pytest.raises(OSError):
    read_json(tmp_path / RUN_ID)
  assert len(ensure_run_id(tmp_path)) == 16 and os.path.lexists(tmp_path / 'corrupt_run.id')


@pytest.mark.parametrize(
  'schema, good, bad',
  [
    (Whole(0, 5), ['0', '5'], ['-1', '6', '1.0', 'true', 'null', '"1"']),
    (Number(0, 1), ['0', '0.5', '1'], ['1.1', 'NaN', 'Infinity', 'false', '[]']),
    (float, ['1', '1.5', 'NaN'], ['true', '"1"']),
    (Text('[a-z]+'), ['"abc"'], ['""', '"abc\\n"', '"a1"', '1']),
    (ListOf(str, most=2), ['[]', '["a", "b"]'], ['["a", "b", "c"]', '[1]', '{}']),
    ((str, bool), ['["a", true]'], ['["a"]', '["a", true, 1]', '["a", 1]']),
    (MapOf(Nullable(str)), ['{}', '{"a": null, "b": "c"}'], ['{"a": 1}', '[]', 'null']),
    (
      Fields({'a': str}, optional={'b': bool}),
      ['{"a": ""}', '{"a": "", "b": true, "c": 1}'],
      ['{}', '{"a": "", "b": 1}'],
    ),
    (Fields({}, others=False), ['{}'], ['{"a": 1}']),
    (Also(str, lambda text: '' if text == 'x' else 'no x'), ['"x"'], ['"y"', '1']),
    (
      object,
      ['[[[1]]]', '"\\ud83d\\ude00"'],
      ['[' * 101 + ']' * 101, '"\\ude00"', '1' * 41, '\xff'],
    ),
  ],
  ids=[
    'Whole',
    'Number',
    'float',
    'Text',
    'ListOf',
    'tuple',
    'MapOf',
    'Fields',
    'no others',
    'Also',
    'object',
  ],
)
def test_a_schema_takes_what_it_describes_and_nothing_else(schema, good, bad):
  for text in good:
    assert json.dumps(parse_json(text, schema)) == json.dumps(json.loads(text))
  for text in bad:
    with pytest.raises(ValueError):
      parse_json(text.encode('latin-1'), schema)
