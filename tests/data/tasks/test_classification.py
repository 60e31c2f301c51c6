"""Labelled data: what is read, how it is split, and every flaw named by file and line."""

import pathlib
import sys

import numpy as np
import pytest

from t5x_gpu.data import batches, data_module, features
from t5x_gpu.data.streaming import task_lookup
from t5x_gpu.data.tasks import classification
from t5x_gpu.data.tf_runtime import seqio
from t5x_gpu.errors import DataError
from tests.helpers_tfds import tfds_data_dir, write_glue
from tests.messages import raises

pytestmark = pytest.mark.tf
CONVERTER = 'encoder_classification'


def config(name, *, split='train', length=32, batch_size=4, **kwargs):
  return batches.DatasetConfig(name, {'inputs': length}, split, batch_size, pack=False, **kwargs)


@pytest.fixture(name='opened')
def _opened():
  iterators = []

  def opened(name, *, repeat=False, num_classes=2, vocab_size=384, **kwargs):
    cfg = config(name, **kwargs)
    spec = features.batch_spec(
      CONVERTER,
      task_feature_lengths=cfg.task_feature_lengths,
      batch_size=cfg.batch_size,
      pack=False,
      vocab_size=vocab_size,
      num_classes=num_classes,
    )
    iterators.append(
      data_module.open_batches(cfg, spec=spec, feature_converter=CONVERTER, repeat=repeat)
    )
    return iterators[-1]

  yield opened
  for iterator in iterators:
    iterator.close()


def rows(name, split='train', **kwargs):
  """Returns (text, class name) of all examples of a split, unshuffled."""
  cfg = config(name, split=split, length=10_000, **kwargs)
  task = task_lookup.lookup(cfg)
  names = data_module.open_class_names(cfg)
  examples = task.get_dataset(None, split=split, shuffle=False).as_numpy_iterator()
  vocabulary = task.output_features['inputs'].vocabulary
  return [(vocabulary.decode(x['inputs'].tolist()), names[x['label']]) for x in examples]


def refused(name, **kwargs):
  with raises(DataError) as e:
    task_lookup.lookup(config(name, **kwargs))
  assert e.value.parameters
  return str(e.value)


# --- the standard library ---


def test_no_file_of_the_library_gives_to_both_splits():
  files = classification.package_files()
  assert tuple(files) == classification.PACKAGES == tuple(sorted(classification.PACKAGES))
  for package, paths in files.items():
    sizes = {path: pathlib.Path(path).stat().st_size for path in paths}
    held_back = classification.split_files(sizes)
    share = sum(sizes[path] for path in held_back) / sum(sizes.values())
    assert held_back < set(paths) and 0.02 < share < 0.5, package


def test_every_package_is_judged_and_none_is_most_of_the_snippets():
  table = classification.python_snippets()
  for split, least in (('train', 100), ('validation', 40)):
    counts = np.bincount(table.labels[split], minlength=len(classification.PACKAGES))
    assert counts.min() >= least and counts.max() / counts.sum() < 0.25
  assert not set(table.texts['train']) & set(table.texts['validation']) - {
    text for text in table.texts['validation'] if text.lstrip().startswith('#')
  }


def test_snippets_are_whole_lines_that_fit_and_lose_only_short_rests():
  text = ('x = 1\n' * 100 + '# ' + 'y' * 700 + '\n' + 'z = 2\n').encode()
  pieces = list(classification.snippets_of(text))
  assert max(map(len, pieces)) <= classification.MAX_BYTES
  assert pieces[0] == b'x = 1\n' * 42
  assert len(text) - sum(map(len, pieces)) < classification.MIN_BYTES


def test_split_does_not_depend_on_the_path_or_order_of_the_library():
  sizes = {f'json/{i}.py': 100 + i for i in range(9)}
  assert classification.split_files(sizes) == classification.split_files(
    dict(reversed(sizes.items()))
  )
  assert classification.split_files({'a': 5, 'b': 100}) == {'a'}  # never everything, never nothing


def test_library_without_source_is_named(monkeypatch):
  monkeypatch.setattr(classification, 'PACKAGES', ('json', 'nosuch'))
  with raises(DataError):
    classification.package_files()


def test_classification_batches_of_the_library(opened):
  iterator = opened(
    'python_source_classification', split='validation', length=256, num_classes=16, batch_size=32
  )
  everything = list(iterator)
  assert {name: x.shape for name, x in everything[0].items()} == {
    'encoder_input_tokens': (32, 256),
    'encoder_segment_ids': (32, 256),
    'label': (32,),
    'label_weights': (32,),
  }
  count = len(classification.python_snippets().labels['validation'])
  assert sum(batch['label_weights'].sum() for batch in everything) == count
  filled = everything[-1]['label_weights'] == 0
  assert filled.sum() == -count % 32
  assert not everything[-1]['encoder_input_tokens'][filled].any()
  assert (
    data_module.open_class_names(config('python_source_classification')) == classification.PACKAGES
  )


def test_classification_resumes_exactly(opened):
  kwargs = dict(repeat=True, length=64, num_classes=16, seed=3)
  iterator = opened('python_source_classification', **kwargs)
  for _ in range(3):
    next(iterator)
  iterator.peek()
  state = iterator.get_state()
  assert len(state) < 500_000
  want = [batches.batch_hash(next(iterator)) for _ in range(4)]
  other = opened('python_source_classification', **kwargs)
  other.set_state(state)
  assert [batches.batch_hash(next(other)) for _ in range(4)] == want


def test_data_with_more_classes_than_the_model_is_refused(opened):
  with raises(DataError):
    opened('python_source_classification')


def test_task_with_labels_is_not_a_language_model(open_data):
  with raises(DataError):
    open_data('python_source_classification')
  with raises(DataError):
    open_data(
      'python_source', converter=CONVERTER, lengths={'inputs': 8}, pack=False, num_classes=2
    )


# --- CoLA ---

COLA = 'gj04\t1\t\tOur friends won\'t buy this analysis.\ngj04\t0\t*\tThey drank the pub. "\n'


def test_cola_files_are_split_by_their_names_and_labelled_by_their_meaning(tmp_path, opened):
  (tmp_path / 'in_domain_train.tsv').write_text(COLA)
  (tmp_path / 'in_domain_dev.tsv').write_text('x\t1\t\tIn.\n')
  (tmp_path / 'out_of_domain_dev.tsv').write_text('y\t0\t*\tOut.\n')
  name = f'cola_tsv:{tmp_path}/*.tsv'
  assert rows(name) == [
    ("Our friends won't buy this analysis.", 'acceptable'),
    ('They drank the pub. "', 'unacceptable'),
  ]
  assert rows(name, 'validation') == [('In.', 'acceptable'), ('Out.', 'unacceptable')]
  batch = next(opened(name))
  assert batch['label_weights'].tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
  'text',
  [
    'a\t1\t\tFine.\nb\t0\tNo mark.\n',
    'a\t1\t\tFine.\n\nb\t2\t\tTwo.\n',
    'a\t1\t\t \n',
    '\n\n',
    'a\t1\t\tFine.\nb\t1\t\tFine too.\n',
    b'a\t1\t\t\xff\n',
  ],
)
def test_flaws_of_cola_files_are_named(tmp_path, text):
  (tmp_path / 'train.tsv').write_bytes(text if isinstance(text, bytes) else text.encode())
  refused(f'cola_tsv:{tmp_path}')


def test_cola_of_tfds_has_our_features(opened, tmp_path):
  write_glue(tmp_path, ['cola'], version='2.0.0')
  with tfds_data_dir(tmp_path):
    got = list(opened('cola', split='validation'))
  assert [batch['label_weights'].sum() for batch in got] == [4, 2]
  text = got[0]['encoder_input_tokens'][0]
  assert seqio.ByteVocabulary().decode(text.tolist()).startswith('The green dog')
  assert data_module.open_class_names(config('cola')) == ('unacceptable', 'acceptable')


def test_cola_without_data_says_both_ways_to_get_it(opened, tmp_path):
  with tfds_data_dir(tmp_path), raises(DataError):
    opened('cola')


# --- csv ---

CSV = """text,label
"Good, even ""great"".",positive
"Bad.

Very bad.",negative
Fine,positive
"""


def test_csv_holds_commas_quotes_and_line_breaks(tmp_path):
  (tmp_path / 'train.csv').write_text('\ufeff' + CSV)
  (tmp_path / 'test.csv').write_text('label,text\r\nnegative,"a\r\nb"\r\n', newline='')
  name = f'imdb_csv:{tmp_path}/*.csv'
  got = rows(name) + rows(name, 'validation')
  assert sorted(got) == [
    ('Bad.\n\nVery bad.', 'negative'),
    ('Fine', 'positive'),
    ('Good, even "great".', 'positive'),
  ]
  assert rows(name, 'test') == [('a\r\nb', 'negative')]
  assert task_lookup.lookup(config(name)).name == 'imdb_csv'  # checkpoints of older runs have it


def test_csv_numbers_are_in_their_order_and_words_in_the_alphabets(tmp_path):
  for labels, want in ((('10', '9', '-1'), ('-1', '9', '10')), (('b', 'a', 'c'), ('a', 'b', 'c'))):
    lines = [f'text {i},{label}' for i, label in enumerate(labels)]
    (tmp_path / 'train.csv').write_text('\n'.join(['text,label', *lines]))
    (tmp_path / 'valid.csv').write_text('text,label\nx,' + labels[0])
    assert data_module.open_class_names(config(f'imdb_csv:{tmp_path}')) == want


def test_csv_without_a_file_for_validation_holds_one_row_in_twenty_back(tmp_path):
  lines = [f'"review {i}",{i % 2}' for i in range(1000)]
  (tmp_path / 'reviews.csv').write_text('\n'.join(['review,sentiment', *lines]))
  name = f'imdb_csv:{tmp_path}/reviews.csv'
  train, validation = rows(name), rows(name, 'validation')
  assert 25 <= len(validation) <= 80 and len(train) + len(validation) == 1000
  assert not {text for text, _ in train} & {text for text, _ in validation}


@pytest.mark.parametrize(
  'text',
  [
    'text,label\na,0\nb\n',
    'text,label\na,0\n"b\nc",1,2\n',
    'text,label\na,0\n"b,1\nc,0\n',
    'text,label\na,0\nb,\n',
    'text,label\na,0\n,1\n',
    'text,lable\na,0\n',
    'text,label\n',
    '\n\n',
    'text,label\na,0\nb,0\n',
  ],
)
def test_flaws_of_csv_files_are_named(tmp_path, text):
  (tmp_path / 'train.csv').write_text(text)
  refused(f'imdb_csv:{tmp_path}/train.csv')


def test_label_that_training_does_not_have_is_named(tmp_path):
  (tmp_path / 'train.csv').write_text('text,label\na,positive\nb,negative\n')
  (tmp_path / 'dev.csv').write_text('text,label\na,positive\nb,negativ\n')
  refused(f'imdb_csv:{tmp_path}')


def test_names_that_say_a_split_for_some_files_only_are_refused(tmp_path):
  for name in ('train.csv', 'more.csv'):
    (tmp_path / name).write_text(CSV)
  refused(f'imdb_csv:{tmp_path}/*.csv')
  (tmp_path / 'train.csv').rename(tmp_path / 'dev.csv')
  (tmp_path / 'more.csv').unlink()
  refused(f'imdb_csv:{tmp_path}/*.csv')


def test_a_changed_file_is_read_again(tmp_path):
  path = tmp_path / 'train.csv'
  path.write_text('text,label\na,x\nb,y\n')
  assert data_module.open_class_names(config(f'imdb_csv:{path}')) == ('x', 'y')
  path.write_text('text,label\na,xx\nb,yy\n')
  assert data_module.open_class_names(config(f'imdb_csv:{path}')) == ('xx', 'yy')


def test_labels_out_of_range_in_a_batch_are_named(opened, tmp_path, monkeypatch):
  (tmp_path / 'tasks_with_hidden_labels.py').write_text("""
import seqio, tensorflow as tf
def hidden(split, shuffle_files, seed=None):
  return tf.data.Dataset.range(9).map(lambda i: {'inputs': [5, 6], 'label': -1})
seqio.TaskRegistry.add('hidden_labels', source=seqio.FunctionDataSource(hidden, ['train']),
    preprocessors=[], output_features={
      'inputs': seqio.Feature(seqio.ByteVocabulary()),
      'label': seqio.Feature(seqio.PassThroughVocabulary(2), add_eos=False, rank=0)})
""")
  monkeypatch.syspath_prepend(str(tmp_path))
  assert 'tasks_with_hidden_labels' not in sys.modules
  with raises(DataError):
    opened('hidden_labels', mixture_or_task_module='tasks_with_hidden_labels')
  assert data_module.open_class_names(config('hidden_labels')) is None
  assert data_module.open_class_names(config('x', module='t5x_gpu.data.synthetic')) is None


def test_files_of_a_table_are_sources_of_evaluations_alone(tmp_path, opened):
  """A table is in memory: training compares its rows, and no run reads the files twice."""
  path = tmp_path / 'train.csv'
  path.write_text('text,label\n' + 'a,0\nb,1\n' * 40)
  for repeat in (True, False):
    iterator = opened(f'classification:csv:{path}', repeat=repeat)
    assert [name for _, name in iterator.source_files().files] == ['train.csv'] * (not repeat)
    assert iterator.watched_files() == []
