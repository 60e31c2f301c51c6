"""The tasks that come with t5x_gpu: what they read, how they split it, what they lose (nothing)."""

import json
import pathlib

import numpy as np
import pytest

from t5x_gpu.data import seqio_batches
from t5x_gpu.data.sources import discovery, readers
from t5x_gpu.data.streaming import task_lookup
from t5x_gpu.data.tasks import builtin, tables
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.errors import DataError
from tests.helpers_tfds import tfds_data_dir, write_tfds
from tests.messages import raises

pytestmark = pytest.mark.tf


def examples(task, split='train', lengths=None):
  return list(task.get_dataset(lengths, split=split, shuffle=False).as_numpy_iterator())


def texts(task, split='train', lengths=None, feature='targets'):
  vocabulary = task.output_features[feature].vocabulary
  return [
    vocabulary.decode([int(i) for i in example[feature]])
    for example in examples(task, split, lengths)
  ]


def test_python_source_splits_files_95_to_5_without_overlap():
  split = discovery.standard_library_files()
  share = len(split['validation']) / sum(map(len, split.values()))
  assert not set(split['train']) & set(split['validation'])
  assert 0.02 < share < 0.09 and len(split['train']) > 200


def test_python_source_holds_whole_files():
  task = seqio.get_mixture_or_task('python_source')
  spans = texts(task, 'validation')
  paths = discovery.standard_library_files()['validation']
  written = ''.join(pathlib.Path(path).read_bytes().decode() for path in paths)
  # A last line without a line break gains one.
  assert 0 <= len(''.join(spans)) - len(written) <= len(paths)


def test_long_documents_are_cut_into_pieces_and_end_in_one_eos(text_folder):
  task = builtin.PATTERN_TASKS['text_files'](f'{text_folder}/6.txt')  # 300 lines.
  pieces = [
    e['targets']
    for split in ('train', 'validation')
    for e in examples(task, split, {'targets': 100})
  ]
  assert max(map(len, pieces)) == 100
  ids = np.concatenate(pieces)
  assert (ids == 1).sum() == 1
  assert len(ids) - 1 == (text_folder / '6.txt').stat().st_size


@pytest.mark.parametrize('num_lines', [1, 63, 64, 65, 128])
def test_a_document_ends_once_whatever_its_number_of_lines(num_lines, tmp_path):
  path = tmp_path / 'a.txt'
  path.write_text('b\n' * num_lines)
  spans = list(readers.read_spans(tf.constant(str(path)), tf.constant(0)).as_numpy_iterator())
  assert b''.join(span['targets'] for span in spans) == path.read_bytes()
  assert [bool(span['document_end']) for span in spans] == [False] * (len(spans) - 1) + [True]


def test_text_lines_has_a_document_per_line(text_folder):
  task = builtin.PATTERN_TASKS['text_lines'](f'{text_folder}/*.txt')
  got = texts(task) + texts(task, 'validation')
  want = [line for path in text_folder.iterdir() for line in path.read_text().splitlines()]
  assert sorted(got) == sorted(want)


def test_hash_split_puts_about_one_in_twenty_into_validation(text_folder):
  task = builtin.PATTERN_TASKS['text_lines'](f'{text_folder}/*.txt')
  assert 20 <= len(examples(task, 'validation')) <= 70  # of 843


def test_jsonl_with_text_is_a_language_model_task(tmp_path):
  lines = [{'text': f'document {i} \u00e9', 'meta': i} for i in range(60)]
  (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, lines)) + '\n\n')
  task = tables.PATTERN_TASKS['jsonl'](str(tmp_path / 'a.jsonl'))
  assert set(task.output_features) == {'targets'}
  assert sorted(texts(task) + texts(task, 'validation')) == sorted(x['text'] for x in lines)


def test_jsonl_with_inputs_and_targets_is_supervised(tmp_path):
  lines = [{'inputs': f'question {i}', 'targets': f'answer {i}'} for i in range(60)]
  (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  task = tables.PATTERN_TASKS['jsonl'](str(tmp_path / '*.jsonl'))
  assert sorted(
    texts(task, feature='inputs') + texts(task, 'validation', feature='inputs')
  ) == sorted(x['inputs'] for x in lines)
  assert examples(task)[0]['inputs'][-1] == examples(task)[0]['targets'][-1] == 1  # EOS


@pytest.mark.slow
def test_jsonl_gives_prefix_lm_batches_and_resumes(open_data, tmp_path):
  lines = [{'inputs': f'q{i}', 'targets': f'a{i}'} for i in range(300)]
  (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  opened = open_data(
    f'jsonl:{tmp_path}/a.jsonl', converter='prefix_lm', lengths={'inputs': 16, 'targets': 16}
  )
  next(opened.iterator)
  state = opened.iterator.get_state()
  want = next(opened.iterator)
  opened.iterator.set_state(state)
  got = next(opened.iterator)
  assert all((got[name] == want[name]).all() for name in want)


@pytest.mark.slow
def test_sentencepiece_replaces_the_byte_vocabulary(open_data, text_folder, tmp_path):
  import sentencepiece  # Comes with seqio; writes the model that people bring.

  sentencepiece.SentencePieceTrainer.train(
    input=str(text_folder / '6.txt'),
    model_prefix=str(tmp_path / 'm'),
    vocab_size=40,
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    minloglevel=2,
  )
  name = f'sentencepiece:{tmp_path}/m.model'
  opened = open_data(f'text_lines:{text_folder}/*.txt', vocabulary=name, vocab_size=40)
  assert next(opened.iterator)['decoder_target_tokens'].max() < 40
  vocabulary = seqio_batches.vocabulary(opened.config, feature_converter='lm')
  assert (vocabulary.size, vocabulary.eos_id) == (40, 1)
  assert vocabulary.decode(vocabulary.encode('line 12') + [1, 5, 6]) == 'line 12'
  assert (
    open_data('python_source', vocabulary=name, vocab_size=40)
    .iterator.describe()['vocabulary of targets']
    .startswith('sentencepiece:m.model (')
  )


def test_byte_vocabulary_has_259_ids_and_round_trips():
  config = seqio_batches.DatasetConfig('python_source', {'targets': 8}, 'train', 1)
  vocabulary = seqio_batches.vocabulary(config, feature_converter='lm')
  assert (vocabulary.size, vocabulary.eos_id) == (259, 1)
  assert vocabulary.decode(np.array(vocabulary.encode('def f(x):\n') + [0, 0])) == 'def f(x):\n'


def test_mixtures_of_our_tasks_open(open_data):
  name = 'python_and_python'
  if name not in seqio.MixtureRegistry.names():
    seqio.MixtureRegistry.add(name, [('python_source', 1.0)])
  facts = open_data(name).iterator.describe()
  assert facts['rates'] == {'python_source': 1.0} and 'source of python_source' in facts


def test_a_users_module_registers_its_task(open_data, tmp_path, monkeypatch):
  (tmp_path / 'tasks_of_mine.py').write_text("""
import functools, seqio, tensorflow as tf
def numbers(split, shuffle_files, seed=None):
  return tf.data.Dataset.range(50).map(lambda i: {'targets': tf.strings.as_string(i)})
def keep_some(ds):
  def is_even(x):  # Needs AutoGraph: a Python `if` over a tensor.
    if tf.strings.length(x['targets']) > 1:
      return True
    else:
      return False
  return ds.filter(is_even)
seqio.TaskRegistry.add('numbers_of_mine', source=seqio.FunctionDataSource(numbers, ['train']),
                       preprocessors=[keep_some, seqio.preprocessors.tokenize,
                                      seqio.preprocessors.append_eos],
                       output_features={'targets': seqio.Feature(seqio.ByteVocabulary())})
""")
  monkeypatch.syspath_prepend(str(tmp_path))
  opened = open_data('numbers_of_mine', mixture_or_task_module='tasks_of_mine', repeat=False)
  ids = np.concatenate([b['decoder_target_tokens'].ravel() for b in opened.iterator])
  assert (ids == 1).sum() == 40  # 10 to 49.
  with raises(DataError):
    open_data('numbers_of_min')


@pytest.mark.slow
@pytest.mark.parametrize('name', ['wmt_ende', 'wmt_t2t_ende_v003'])
def test_wmt_is_tensor2tensors_mixture_with_t5s_prompt(open_data, name, tmp_path):
  write_tfds(
    tmp_path, 'wmt_t2t_translate/de-en:1.0.0', {'train': [{'en': 'a house', 'de': 'ein Haus'}] * 9}
  )
  with tfds_data_dir(tmp_path):
    opened = open_data(
      name, converter='prefix_lm', lengths={'inputs': 64, 'targets': 64}, pack=False
    )
    batch = next(opened.iterator)
  text = seqio_batches.vocabulary(opened.config, feature_converter='lm').decode(
    [i for i in batch['decoder_target_tokens'][0] if i != 1]
  )
  assert text == 'translate English to German: a houseein Haus'
  from tensorflow_datasets.translate import wmt_t2t

  builder = object.__new__(wmt_t2t.WmtT2tTranslate)
  assert builder._subsets == {
    'train': ['europarl_v7', 'commoncrawl', 'newscommentary_v13'],
    'validation': ['newstest2013'],
    'test': ['newstest2014'],
  }
  task = task_lookup.lookup(opened.config)
  assert set(task.splits) == {'train', 'validation', 'test'}


def test_wmt_without_data_says_how_to_prepare_it(open_data, tmp_path):
  with tfds_data_dir(tmp_path), raises(DataError):
    open_data('wmt_ende', converter='prefix_lm', lengths={'inputs': 64, 'targets': 64})
