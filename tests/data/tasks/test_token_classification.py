"""Words with tags: a tag at the first token of each word, in rows, packed rows and prompts."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from t5x_gpu.data import batches, data_module, features
from t5x_gpu.data.prompts import Prompt
from t5x_gpu.data.streaming import task_lookup
from t5x_gpu.errors import DataError
from tests.messages import raises

pytestmark = pytest.mark.tf
ROWS = [(['Ada', 'met', 'Al'], ['B-PER', 'O', 'B-PER']), (['in', 'York'], ['O', 'B-LOC'])]
NAMES = ('O', 'B-PER', 'B-LOC')


def write(folder, form='jsonl', rows=ROWS):
  for name in ('train', 'dev'):
    records = [{'tokens': words, 'tags': tags} for words, tags in rows]
    if form == 'parquet':
      parquet.write_table(pa.Table.from_pylist(records), folder / f'{name}.parquet')
    else:
      lines = ''.join(json.dumps(record) + '\n' for record in records)
      (folder / f'{name}.jsonl').write_text(lines)
  return f'token_classification:{form}:{folder}/*.{form}'


def config(name, *, length=16, pack=False):
  return batches.DatasetConfig(name, {'inputs': length}, 'train', 2, pack=pack, shuffle=False)


def batch_of(name, **kwargs):
  cfg = config(name, **kwargs)
  spec = features.batch_spec(
    'encoder_tags',
    task_feature_lengths=cfg.task_feature_lengths,
    batch_size=2,
    pack=cfg.pack,
    vocab_size=384,
    num_classes=3,
    class_names=NAMES,
  )
  iterator = data_module.open_batches(
    cfg, spec=spec, feature_converter='encoder_tags', repeat=False
  )
  batch = next(iterator)
  iterator.close()
  return batch


@pytest.mark.parametrize('form', ('jsonl', 'parquet'))
def test_the_first_token_of_a_word_has_its_tag(tmp_path, form):
  batch = batch_of(write(tmp_path, form))
  assert batch['encoder_input_tokens'][0, :9].tolist() == [*(ord(c) + 3 for c in 'AdametAl'), 1]
  assert batch['encoder_labels'].tolist() == [[2, 0, 0, 1, 0, 0, 2, *[0] * 9], [1, 0, 3, *[0] * 13]]


def test_words_that_do_not_fit_have_no_tag(tmp_path):
  batch = batch_of(write(tmp_path), length=6)
  assert batch['encoder_labels'][0].tolist() == [2, 0, 0, 1, 0, 0]
  assert batch['encoder_input_tokens'][0, 5] == 1


def test_packed_rows_hold_several_sentences(tmp_path):
  batch = batch_of(write(tmp_path), pack=True)
  assert batch['encoder_segment_ids'][0].tolist() == [1] * 9 + [2] * 7
  assert batch['encoder_labels'][0].tolist() == [2, 0, 0, 1, 0, 0, 2, 0, 0, 1, 0, 3, 0, 0, 0, 0]


def test_prompts_are_encoded_as_in_training(tmp_path):
  name = write(tmp_path)
  text = data_module.open_text(
    config(name, length=8), 'class_text', model_vocab_size=384, of_words=True
  )
  batch = batch_of(name, length=8)
  row = text.encode(Prompt('here', ' Ada met\tAl '))
  assert list(row) == batch['encoder_input_tokens'][0].tolist() and row.words == (0, 3, 6)
  assert text.encode(Prompt('here', 'Ada of York now')).words == (0, 3, 5, -1)
  first, _ = text.examples()
  assert (first.inputs, first.targets) == ('Ada met Al', 'B-PER O B-PER')


@pytest.mark.parametrize(
  'line',
  [
    {'tokens': ['a', 'b'], 'tags': ['O']},
    {'tokens': 'a b', 'tags': ['O']},
    {'tokens': ['a', 3], 'tags': ['O', 'O']},
    {'tokens': [], 'tags': []},
    {'tokens': ['a']},
  ],
)
def test_flaws_are_named(tmp_path, line):
  name = write(tmp_path)
  (tmp_path / 'train.jsonl').write_text(json.dumps(line) + '\n')
  with raises(DataError):
    task_lookup.lookup(config(name))
