"""Own classification data: any form and columns, pairs of texts, every flaw named by its place."""

import errno
import gzip
import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from t5x_gpu.data import batches, data_module, features
from t5x_gpu.data.sources.labelled import LabelledReader
from t5x_gpu.data.streaming import task_lookup
from t5x_gpu.data.tasks import classification
from t5x_gpu.data.tf_runtime import tf
from t5x_gpu.data.vocabularies.vocabularies import ClassVocabulary
from t5x_gpu.errors import DataError
from tests.helpers_disk import refused_to_python
from tests.messages import raises

pytestmark = pytest.mark.tf
FORMS = ('csv', 'tsv', 'jsonl', 'parquet')
ROWS = [
  {'id': str(i), 'premise': f'p {i}', 'gold': 'no' if i % 3 else 'yes', 'Hypo thesis': f'h {i}'}
  for i in range(6)
]


def write(folder, form, rows, *, name='train'):
  """Writes `rows` and returns the pattern of all files of the folder."""
  path = folder / f'{name}.{form}'
  if form == 'parquet':
    parquet.write_table(pa.Table.from_pylist(rows), path)
  elif form == 'jsonl':
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  else:
    mark = ',' if form == 'csv' else '\t'
    path.write_text('\n'.join(mark.join(row) for row in [rows[0], *(r.values() for r in rows)]))
  return f'classification:{form}:{folder}/*.{form}'


def config(name, *, length=16, split='train', **kwargs):
  return batches.DatasetConfig(
    name, {'inputs': length}, split, 2, pack=False, shuffle=False, **kwargs
  )


def source_rows(name, split='train'):
  """Returns the texts and class names of a split."""
  task = task_lookup.lookup(config(name))
  names = task_lookup.class_names(task)
  return [
    (x['inputs'].decode(), *([x['text2'].decode()] if 'text2' in x else []), names[x['label']])
    for x in task.source.get_dataset(split, shuffle=False).as_numpy_iterator()
  ]


def refused(name):
  with raises(DataError) as e:
    task_lookup.lookup(config(name))
  assert e.value.parameters
  return str(e.value)


@pytest.mark.parametrize('form', FORMS)
def test_columns_of_any_name_in_files_of_any_form(tmp_path, form):
  write(tmp_path, form, ROWS[:2], name='dev')
  name = write(tmp_path, form, ROWS)
  want = [(f'p {i}', 'no' if i % 3 else 'yes') for i in range(6)]
  assert source_rows(f'{name}#text=premise,label=gold') == want
  assert source_rows(f'{name}#label=gold,text=premise', 'validation') == want[:2]
  pairs = f'{name}#text=premise,text2=Hypo thesis,label=gold'
  assert source_rows(pairs) == [(text, f'h {text[2:]}', label) for text, label in want]
  assert data_module.open_class_names(config(pairs)) == ('no', 'yes')


@pytest.mark.parametrize('form', FORMS)
def test_a_missing_column_is_named_with_those_there_are(tmp_path, form):
  name = write(tmp_path, form, ROWS)
  refused(f'{name}#text=premise,label=golt')
  refused(name)


@pytest.mark.parametrize('form', ('jsonl', 'parquet'))
def test_labels_that_are_numbers_or_truth_values_are_classes(tmp_path, form):
  for labels, want in (
    ((10, 9, 10), ('9', '10')),
    ((2.0, 1.0, 2.0), ('1', '2')),
    ((True, False, True), ('false', 'true')),
  ):
    rows = [{'text': f't{i}', 'label': label} for i, label in enumerate(labels)]
    name = write(tmp_path, form, rows)
    write(tmp_path, form, rows[:1], name='dev')
    assert data_module.open_class_names(config(name)) == want
  name = write(tmp_path, form, [{'text': 'a', 'label': 3.5}, {'text': 'b', 'label': 1.0}])
  refused(name)


def test_classes_that_are_numbers_are_in_numerical_order(tmp_path):
  for labels, want in (
    (('10.5', '9.5', '-1.0', '1e1'), ('-1.0', '9.5', '1e1', '10.5')),
    (('10', '9.5'), ('9.5', '10')),
    (('10.5', '9.5', 'nan'), ('10.5', '9.5', 'nan')),  # words, in alphabetical order
  ):
    rows = [{'text': f't{i}', 'label': label} for i, label in enumerate(labels)]
    name = write(tmp_path, 'csv', rows)
    write(tmp_path, 'csv', rows[:1], name='dev')
    assert data_module.open_class_names(config(name)) == want


@pytest.mark.parametrize('label', [None, '', ' '])
@pytest.mark.parametrize('form', ('jsonl', 'parquet'))
def test_a_row_without_a_label_or_a_text_is_named(tmp_path, form, label):
  rows = [{'text': 'a', 'label': 'x'}, {'text': 'b', 'label': label}]
  refused(write(tmp_path, form, rows))
  rows = [{'text': 'a', 'label': 'x'}, {'text': label, 'label': 'y'}]
  refused(write(tmp_path, form, rows))


@pytest.mark.parametrize(
  'line',
  [
    '{"text": "b"}',
    '{"text": 3, "label": "x"}',
    '{"text": "b", "label": ["x"]}',
    '["b", "x"]',
    '{"text": ',
    '{"text": "\\ud800", "label": "x"}',
    '{"text": "b", "label": "\\ud800"}',
    pytest.param('[' * 100_000, id='nested'),
    '{"text": "b", "label": "x"}',
  ],
)
def test_flaws_of_json_lines_are_named(tmp_path, line):
  (tmp_path / 'train.jsonl').write_text('{"text": "a", "label": "x"}\n' + line)
  refused(f'classification:jsonl:{tmp_path}/train.jsonl')


def test_files_that_are_something_else_are_named(tmp_path):
  for form, content in (
    ('parquet', b'no such thing'),
    ('csv', b'text,label\n\xff,0\n'),
    ('tsv', b'text\tlabel\na\n'),
    ('csv', b'text,text,label\na,b,0\n'),
  ):
    (tmp_path / f'a.{form}').write_bytes(content)
    refused(f'classification:{form}:{tmp_path}/a.{form}')
  (tmp_path / 'a.csv.gz').write_bytes(gzip.compress(b'text,label\n' + b'a,x\nb,y\n' * 9)[:-12])
  refused(f'classification:csv:{tmp_path}/a.csv.gz')


def test_a_file_that_cannot_be_opened_is_not_called_another_form(tmp_path):
  (tmp_path / 'a.csv').write_text('text,label\na,0\n')
  with refused_to_python('a.csv', errno.EMFILE), raises(DataError):
    LabelledReader('csv', None)(str(tmp_path / 'a.csv'))


@pytest.mark.parametrize(
  'spelled',
  [
    'data/*.csv',
    'jsonk:data/*',
    'csv:data/*#text=a',
    'csv:data/*#text=a,labels=b',
    'csv:data/*#text=a,label=a',
    'csv:data/*#text=a,text=b,label=c',
    'csv:data/*#text=a,label=',
  ],
)
def test_a_wrong_spelling_is_refused(spelled):
  refused(f'classification:{spelled}')


def test_the_old_name_is_the_same_and_reads_compressed_files(tmp_path):
  (tmp_path / 'train.csv.gz').write_bytes(gzip.compress(b'Review,Sentiment,x\na,pos,1\nb,neg,2\n'))
  (tmp_path / 'test.csv.gz').write_bytes(gzip.compress(b'x,sentiment,review\n1,pos,c\n'))
  for name in (f'imdb_csv:{tmp_path}', f'classification:csv:{tmp_path}'):
    assert source_rows(name, 'test') == [('c', 'pos')]
  assert (
    source_rows(
      f'imdb_csv:{tmp_path}/train*#text=review,label=x'.replace('review', 'Review'), 'train'
    )[0][1]
    == '1'
  )


# --- pairs ---


def framed(first, second, *, length, vocabulary=None):
  """Returns ids and token types of a pair in bytes."""
  outputs = classification.features(('a', 'b'))
  if vocabulary is not None:
    outputs['inputs'] = type(outputs['inputs'])(vocabulary=vocabulary, add_eos=True)
  tokens = outputs['inputs'].vocabulary.encode(first)
  data = tf.data.Dataset.from_tensors(
    {'inputs': tf.constant(tokens, tf.int32), 'label': 1, 'text2': second}
  )
  (found,) = classification.frame_pairs(data, {'inputs': length}, outputs).as_numpy_iterator()
  return found['inputs'].tolist(), found['token_types'].tolist()


@pytest.mark.parametrize(
  'first, second, length, want',
  [
    ('abc', 'de', 99, ('abc', 'de')),
    ('abc', 'de', 7, ('abc', 'de')),
    ('abcdefgh', 'xy', 7, ('abc', 'xy')),
    ('ab', 'uvwxyz', 7, ('ab', 'uvw')),
    ('abcdef', 'uvwxyz', 7, ('abc', 'uv')),
  ],
)
def test_a_long_pair_loses_tokens_of_its_longer_text(first, second, length, want):
  ids, types = framed(first, second, length=length)
  end = 1
  as_ids = [[ord(c) + 3 for c in text] for text in want]
  assert ids == [*as_ids[0], end, *as_ids[1], end]
  assert types == [0] * (len(want[0]) + 1) + [1] * (len(want[1]) + 1)
  assert len(ids) <= length


def opened(name, converter, **kwargs):
  cfg = config(name, **kwargs)
  spec = features.batch_spec(
    converter,
    task_feature_lengths=cfg.task_feature_lengths,
    batch_size=2,
    pack=False,
    vocab_size=384,
    num_classes=2,
  )
  return data_module.open_batches(cfg, spec=spec, feature_converter=converter, repeat=False)


def test_token_types_go_to_models_that_have_them(tmp_path):
  name = write(tmp_path, 'csv', ROWS)
  pairs = f'{name}#text=premise,text2=Hypo thesis,label=gold'
  single = f'{name}#text=premise,label=gold'
  typed, plain, alone = (
    opened(task, converter)
    for task, converter in (
      (pairs, 'encoder_classification_with_types'),
      (pairs, 'encoder_classification'),
      (single, 'encoder_classification_with_types'),
    )
  )
  batch, without, one_text = (next(iterator) for iterator in (typed, plain, alone))
  tokens, types = batch['encoder_input_tokens'], batch['encoder_token_types']
  assert types[0].tolist() == [0] * 4 + [1] * 4 + [0] * 8
  assert (tokens[0, :8] > 0).all() and not tokens[0, 8:].any()
  np.testing.assert_array_equal(without['encoder_input_tokens'], tokens)
  assert 'encoder_token_types' not in without and not one_text['encoder_token_types'].any()
  for iterator in (typed, plain, alone):
    iterator.close()


def test_a_changed_second_text_is_other_data(tmp_path):
  name = write(tmp_path, 'csv', ROWS) + '#text=premise,text2=Hypo thesis,label=gold'
  iterator = opened(name, 'encoder_classification')
  state = iterator.get_state()
  iterator.close()
  write(tmp_path, 'csv', [{**row, 'Hypo thesis': row['Hypo thesis'] + '!'} for row in ROWS])
  other = opened(name, 'encoder_classification')
  with raises(DataError):
    other.set_state(state)
  other.close()


def test_classes_are_recorded_in_the_order_of_their_numbers(tmp_path):
  iterator = opened(
    write(tmp_path, 'csv', ROWS) + '#text=premise,label=gold', 'encoder_classification'
  )
  assert iterator.describe()['vocabulary of label'] == 'classes no, yes, 2 ids'
  iterator.close()
  assert ClassVocabulary(('no', 'yes')) != ClassVocabulary(('yes', 'no'))
