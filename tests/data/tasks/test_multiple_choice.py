"""Multiple choice: questions become an example per choice, and scores become accuracies."""

import gzip
import json

import pytest

from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.data_module import ModelOutputs, open_evaluated_tasks
from t5x_gpu.data.sources import rows as data_rows
from t5x_gpu.errors import DataError
from tests.messages import raises

pytestmark = pytest.mark.tf


def opened(path, *rows, vocabulary=None):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  config = DatasetConfig(
    f'multiple_choice:{path}', {'targets': 2}, 'validation', 1, vocabulary=vocabulary
  )
  [task] = open_evaluated_tasks(config, feature_converter='lm')
  return task


def test_scores_are_compared_as_they_are_per_token_and_per_byte(tmp_path):
  first = {'inputs': 'One?', 'choices': ['é', 'abcd'], 'answer': 'abcd'}
  second = {'inputs': 'Two? ', 'choices': ['x', 'yy', 'zzz'], 'answer': 0}
  task = opened(tmp_path / 'a.jsonl', first, second)
  assert len(task.inputs) == 5 and task.needs_scores and not task.needs_predictions
  texts = [bytes(i - 3 for i in ids).decode() for ids in task.targets]
  assert texts == [' é', ' abcd', 'x', 'yy', 'zzz']  # a space joins, and nothing is cut
  found = task.metrics(ModelOutputs(scores=[-3.0, -4.0, -1.0, -1.5, -9.0]))
  assert found == {
    'accuracy': 0.5,  # é and x
    'accuracy_per_token': 0.5,  # -3 / 3 and -4 / 5; -1 and -1.5 / 2
    'accuracy_per_byte': 0.5,
    'questions': 2.0,
  }
  found = task.metrics(ModelOutputs(scores=[-3.0, -6.0, -1.0, -9.0, -9.0]))
  assert found['accuracy'] == 0.5 and found['accuracy_per_byte'] == 0.5


def test_a_vocabulary_that_puts_a_space_before_a_text_gets_no_second_one(tmp_path):
  import sentencepiece  # comes with seqio

  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(['the Nile a'] * 9),
    model_prefix=str(tmp_path / 'm'),
    vocab_size=20,
    hard_vocab_limit=False,
    model_type='bpe',
    remove_extra_whitespaces=False,
    minloglevel=2,
  )
  own = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / 'm.model'))
  row = {'inputs': 'a ', 'choices': ['the Nile', ' the'], 'answer': 0}
  name = f'sentencepiece:{tmp_path}/m.model'
  task = opened(tmp_path / 'a.jsonl', row, vocabulary=name)
  assert own.encode(' the') != own.encode('the')
  assert [list(ids) for ids in task.targets] == [own.encode('the Nile'), own.encode('the')]
  assert [list(ids) for ids in task.inputs] == 2 * [own.encode('a')]


@pytest.mark.parametrize(
  'row',
  [
    {'inputs': 'a', 'choices': ['b'], 'answer': 0},
    {'inputs': 'a', 'choices': ['b', 'c'], 'answer': 2},
    {'inputs': 'a', 'choices': ['b', 'c'], 'answer': 'd'},
    {'question': 'a', 'choices': ['b', 'c'], 'answer': 0},
    {'inputs': 'a', 'choices': ['b', '\ud800'], 'answer': 0},
  ],
  ids=['one-choice', 'no-such-index', 'no-such-choice', 'no-inputs', 'half-a-surrogate'],
)
def test_a_line_that_is_not_a_question_is_an_error_with_its_place(row, tmp_path):
  with raises(DataError):
    opened(tmp_path / 'a.jsonl', row)


def test_the_files_of_questions_are_known_so_that_their_changes_are_reported(tmp_path):
  row = {'inputs': 'a', 'choices': ['b', 'c'], 'answer': 0}
  files = opened(tmp_path / 'a.jsonl', row).source_files()
  assert [name for _, name in files.files] == ['a.jsonl']


def test_questions_are_read_like_training_data(tmp_path, monkeypatch):
  row = json.dumps({'inputs': 'a', 'choices': ['b', 'c'], 'answer': 0})
  path = tmp_path / 'a.jsonl.gz'
  path.write_bytes(gzip.compress(f'\ufeff{row}\n\n{row}\n'.encode()))
  config = DatasetConfig(f'multiple_choice:{path}', {'targets': 2}, 'validation', 1)
  [task] = open_evaluated_tasks(config, feature_converter='lm')
  assert len(task.inputs) == 4
  monkeypatch.setattr(data_rows, 'MAX_TEXT_BYTES', 10)
  with pytest.raises(DataError, match='is longer than'):
    open_evaluated_tasks(config, feature_converter='lm')


@pytest.mark.parametrize(
  'damage',
  [
    lambda packed: packed[:-12],
    lambda packed: packed[:20] + b'\xff' * 20 + packed[40:],
    lambda packed: b'not gzip',
  ],
  ids=['cut', 'overwritten', 'not-gzip'],
)
def test_a_damaged_file_of_questions_is_named(damage, tmp_path):
  row = json.dumps({'inputs': 'a', 'choices': ['b', 'c'], 'answer': 0})
  path = tmp_path / 'a.jsonl.gz'
  path.write_bytes(damage(gzip.compress(''.join(f'{row} {i}\n' for i in range(99)).encode())))
  config = DatasetConfig(f'multiple_choice:{path}', {'targets': 2}, 'validation', 1)
  with pytest.raises(DataError, match=r'a\.jsonl\.gz(:\d+)? (cannot be read|is not)'):
    open_evaluated_tasks(config, feature_converter='lm')
