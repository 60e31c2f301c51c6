"""Texts with numbers, from files and from STS-B: kept to four decimals, flaws named by place."""

import json
import re

import numpy as np
import pytest

from t5x_gpu import data_tools
from t5x_gpu.data import batches, data_module, features
from t5x_gpu.data.streaming import task_lookup
from t5x_gpu.data.streaming.task_prompts import class_text
from t5x_gpu.errors import DataError
from tests.helpers_prepared import prepare_here
from tests.helpers_tfds import tfds_data_dir, write_glue
from tests.messages import raises

pytestmark = pytest.mark.tf


def batch_of(name, *, split='train', converter='encoder_regression', length=16):
  config = batches.DatasetConfig(name, {'inputs': length}, split, 2, pack=False, shuffle=False)
  spec = features.batch_spec(
    converter,
    task_feature_lengths={'inputs': length},
    batch_size=2,
    pack=False,
    vocab_size=384,
    num_classes=3,
  )
  iterator = data_module.open_batches(config, spec=spec, feature_converter=converter, repeat=False)
  batch = next(iterator)
  iterator.close()
  return batch


def write(folder, *rows, name='train.jsonl'):
  (folder / name).write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return f'regression:jsonl:{folder}/*.jsonl'


def test_a_row_has_its_number_in_ten_thousandths(tmp_path):
  name = write(tmp_path, {'text': 'ab', 'label': -1.5}, {'text': 'c', 'label': '3.66666'})
  batch = batch_of(name)
  assert batch['scores'].tolist() == [-15_000, 36_667]
  assert batch['label_weights'].tolist() == [1, 1] and 'label' not in batch
  np.testing.assert_array_equal(batch['encoder_input_tokens'][1, :3], [ord('c') + 3, 1, 0])
  config = batches.DatasetConfig(name, {'inputs': 16}, 'train', 2, pack=False)
  prompts = list(class_text(config, model_vocab_size=384).examples())
  assert [prompt.targets for prompt in prompts] == ['-1.5', '3.6667']


def test_pairs_have_token_types(tmp_path):
  write(tmp_path, *({'q': 'a', 'r': 'bc', 'grade': i} for i in range(2)))
  name = f'regression:jsonl:{tmp_path}/*.jsonl#text=q,text2=r,label=grade'
  batch = batch_of(name, converter='encoder_regression_with_types')
  assert batch['encoder_token_types'][0, :6].tolist() == [0, 0, 1, 1, 1, 0]
  assert batch['scores'].tolist() == [0, 10_000]


def test_stsb_of_tfds(tmp_path):
  write_glue(tmp_path, ['stsb'], version='2.0.0')
  with tfds_data_dir(tmp_path):
    batch = batch_of('stsb', converter='encoder_regression_with_types', split='validation')
  assert batch['scores'].tolist() == [40_000, 50_000]
  assert batch['encoder_token_types'].max() == 1


def test_tasks_of_other_heads_are_refused(tmp_path):
  (tmp_path / 'train.csv').write_text('anchor,positive,label\nab,c,x\nd,ef,y\n')
  with raises(DataError):
    batch_of(f'classification:csv:{tmp_path}/*.csv#text=anchor,label=label')
  sets = f'sentence_pairs:csv:{tmp_path}/*.csv'
  with raises(DataError):
    batch_of(sets)
  name = f'regression:jsonl:{tmp_path}/*.jsonl'
  (tmp_path / 'train.jsonl').write_text('{"text": "a", "label": 1}\n{"text": "b", "label": 2}\n')
  for converter in ('encoder_text_sets', 'encoder_classification'):
    with raises(DataError):
      batch_of(name, converter=converter)


def test_prepared_rows_keep_numbers_below_zero(tmp_path):
  name = write(tmp_path, *({'text': f't{i}', 'label': i - 2.5} for i in range(4)))
  options = dict(converter='encoder_regression', lengths={'inputs': 16}, pack=False)
  prepare_here(name, tmp_path / 'out', **options)
  batch = batch_of(f'prepared:{tmp_path / "out"}')
  assert set(batch['scores'].tolist()) < {-25_000, -15_000, -5_000, 5_000}


@pytest.mark.parametrize(
  'rows',
  [
    [{'text': 'a', 'label': 'high'}],
    [{'text': 'a', 'label': None}],
    [{'text': 'a', 'label': True}],
    [{'text': 'a', 'label': 1e9}],
    [{'text': 'a', 'label': 1e-3}, {'text': 'b', 'label': 2e-3}],
    [{'text': 'a', 'lable': 1.0}],
  ],
)
def test_flaws_are_named(tmp_path, rows):
  name = write(tmp_path, *rows)
  with raises(DataError) as e:
    task_lookup.lookup(batches.DatasetConfig(name, {'inputs': 8}, 'train', 2))
  assert e.value.fix


def test_prepared_rows_of_numbers_are_refused_for_a_head_of_classes(tmp_path):
  name = write(tmp_path, *({'text': 'ab', 'label': i} for i in range(4)))
  options = dict(lengths={'inputs': 16}, pack=False)
  prepare_here(name, tmp_path / 'rows', converter='encoder_regression', **options)
  with raises(DataError):
    batch_of(f'prepared:{tmp_path}/rows', converter='encoder_classification')


def test_preview_shows_the_number_of_each_text(tmp_path, capsys):
  name = write(tmp_path, *({'text': 'ab', 'label': label} for label in (-1.5, 3.25)))
  options = dict(lengths={'inputs': 16}, pack=False, shuffle=False)
  prepare_here(name, tmp_path / 'rows', num_parts=1, converter='encoder_regression', **options)
  assert data_tools.main(['preview', f'prepared:{tmp_path}/rows', '--rows=2']) == 0
  assert re.findall(r'^  (score: .*)$', capsys.readouterr().out, re.MULTILINE) == [
    'score: -1.5',
    'score: 3.25',
  ]
