"""Rows with any number of labels: every form of file, the model's own order of classes."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from t5x_gpu.data import batches, data_module, features
from t5x_gpu.data.streaming import task_lookup
from t5x_gpu.errors import DataError
from tests.messages import raises

pytestmark = pytest.mark.tf
ROWS = [('one', ['news', 'art']), ('two', []), ('three', ['sport']), ('four', ['art', 'art'])]


def write(folder, form, rows=ROWS):
  path = folder / f'train.{form}'
  records = [{'text': text, 'labels': labels} for text, labels in rows]
  if form == 'parquet':
    parquet.write_table(pa.Table.from_pylist(records), path)
  elif form == 'jsonl':
    path.write_text(''.join(json.dumps(record) + '\n' for record in records))
  else:
    path.write_text('text\tlabels\n' + ''.join(f'{t}\t{",".join(ls)}\n' for t, ls in rows))
  (folder / f'dev.{form}').write_bytes(path.read_bytes())
  return f'multi_label:{form}:{folder}/*.{form}'


def config(name, **kwargs):
  return batches.DatasetConfig(
    name, {'inputs': 8}, 'train', len(ROWS), pack=False, shuffle=False, **kwargs
  )


def labels_of(name, *, class_names=(), num_classes=3):
  spec = features.batch_spec(
    'encoder_multi_label',
    task_feature_lengths={'inputs': 8},
    batch_size=len(ROWS),
    pack=False,
    vocab_size=384,
    num_classes=num_classes,
    class_names=class_names,
  )
  iterator = data_module.open_batches(
    config(name), spec=spec, feature_converter='encoder_multi_label', repeat=False
  )
  batch, found = next(iterator), iterator.describe()[batches.CLASS_NAMES]
  iterator.close()
  assert batch['label_weights'].tolist() == [1] * len(ROWS)
  return [[found[i - 1] for i in row if i] for row in batch['encoder_labels']], found


@pytest.mark.parametrize('form', ('jsonl', 'parquet', 'tsv'))
def test_labels_are_lists_or_names_separated_by_commas(tmp_path, form):
  rows, names = labels_of(write(tmp_path, form))
  assert names == ['art', 'news', 'sport']
  assert rows == [['news', 'art'], [], ['sport'], ['art']]


def test_classes_have_the_numbers_of_the_model(tmp_path):
  own = ('sport', 'other', 'art', 'news')
  rows, names = labels_of(write(tmp_path, 'jsonl'), class_names=own, num_classes=4)
  assert tuple(names) == own and rows == [['news', 'art'], [], ['sport'], ['art']]
  with raises(DataError):
    labels_of(write(tmp_path, 'jsonl'), class_names=('arts', 'news', 'sport'))
  # Whole numbers are places in the list of names.
  numbered = write(tmp_path, 'jsonl', [('a', [2, 0]), ('b', [1]), ('c', []), ('d', [0])])
  rows, _ = labels_of(numbered, class_names=('x', 'y', 'z'))
  assert rows == [['z', 'x'], ['y'], [], ['x']]


def test_flaws_are_named(tmp_path):
  for labels in ({'a': 1}, [[1]]):
    name = write(tmp_path, 'jsonl', [('a', ['x', 'y']), ('b', labels)])
    with raises(DataError):
      task_lookup.lookup(config(name))
  with raises(DataError):
    (tmp_path / 'dev.jsonl').unlink()
    (tmp_path / 'train.jsonl').write_text('{"text": "a", "label": ["x"]}\n')
    task_lookup.lookup(config(name))
