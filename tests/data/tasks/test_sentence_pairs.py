"""Texts that belong together share a row: their own segments, positions and share of the length."""

import pytest

from t5x_gpu.data import batches, data_module, features
from t5x_gpu.data.streaming import task_lookup
from t5x_gpu.errors import DataError
from tests.messages import raises

pytestmark = pytest.mark.tf


def batch_of(name, *, split='train', length=12):
  config = batches.DatasetConfig(name, {'inputs': length}, split, 2, pack=False, shuffle=False)
  spec = features.batch_spec(
    'encoder_text_sets',
    task_feature_lengths={'inputs': length},
    batch_size=2,
    pack=False,
    vocab_size=384,
  )
  iterator = data_module.open_batches(
    config, spec=spec, feature_converter='encoder_text_sets', repeat=False
  )
  batch = next(iterator)
  iterator.close()
  return batch


def test_rows_hold_two_or_three_texts(tmp_path):
  (tmp_path / 'train.csv').write_text('anchor,positive,negative\nabcdef,gh,i\nj,k,lmnop\n')
  (tmp_path / 'dev.csv').write_text('Sentence1,Sentence2,Score\nab,c,2.5\nd,efghijkl,0\n')
  name = f'sentence_pairs:csv:{tmp_path}/*.csv'
  batch = batch_of(name)
  assert batch['encoder_segment_ids'].tolist() == [
    [1, 1, 1, 1, 2, 2, 2, 3, 3, 0, 0, 0],  # a third of the row each, with the end id
    [1, 1, 2, 2, 3, 3, 3, 3, 0, 0, 0, 0],
  ]
  assert batch['encoder_positions'].tolist() == [
    [0, 1, 2, 3, 0, 1, 2, 0, 1, 0, 0, 0],
    [0, 1, 0, 1, 0, 1, 2, 3, 0, 0, 0, 0],
  ]
  tokens = batch['encoder_input_tokens'][0].tolist()
  assert [chr(i - 3) if i > 1 else i for i in tokens[:9]] == [*'abc', 1, *'gh', 1, 'i', 1]
  assert batch['scores'].tolist() == [0, 0] and batch['label_weights'].tolist() == [1, 1]
  scored = batch_of(name, split='validation')
  assert scored['scores'].tolist() == [25_000, 0]
  assert scored['encoder_segment_ids'][1].tolist() == [1, 1, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0]


def test_columns_are_chosen_and_flaws_are_named(tmp_path):
  (tmp_path / 'train.tsv').write_text('q\tgood\tbad\tx\na\tb\tc\thigh\n')
  name = f'sentence_pairs:tsv:{tmp_path}/train.tsv'
  batch = batch_of(f'{name}#anchor=q,positive=good,negative=bad')
  assert batch['encoder_segment_ids'][0].tolist() == [1, 1, 2, 2, 3, 3, *[0] * 6]
  for chosen in ('#anchor=q,positive=good,score=x', '#anchor=q', ''):
    with raises(DataError):
      task_lookup.lookup(batches.DatasetConfig(name + chosen, {'inputs': 8}, 'train', 2))
