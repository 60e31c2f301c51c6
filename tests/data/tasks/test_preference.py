"""Preferences become rows in which chosen and rejected texts alternate; the loss is on answers."""

import json
import logging

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from t5x_gpu.data.sources.conversations import preference_row
from t5x_gpu.data.vocabularies.huggingface import HuggingFaceVocabulary
from t5x_gpu.data.vocabularies.vocabularies import named_vocabulary
from t5x_gpu.errors import DataError
from tests.helpers_chat import CHATML, GENERATION, chatml_by_hand, talk, write_tokenizer
from tests.helpers_prepared import prepare_here
from tests.messages import raises

pytestmark = pytest.mark.tf
LENGTH = 96
TEXTS = [
  {'prompt': f'{i} or not?', 'chosen': f' Yes: {i}', 'rejected': ' No' + '!' * (i % 4 + 1)}
  for i in range(40)
]
ASKED = talk('Hi', 'Yes?', 'Is it?', system='Be brief.')


def write(path, records):
  path.write_text(''.join(json.dumps(record) + '\n' for record in records))
  return f'jsonl:{path}'


def of_texts(records):
  """Returns (inputs, targets, loss) of both texts of each pair, in bytes."""
  vocabulary, found = named_vocabulary('byte'), []
  for record in records:
    pair = []
    for name in ('chosen', 'rejected'):
      asked, answer = vocabulary.encode(record['prompt']), vocabulary.encode(record[name])
      ids = [*asked, *answer, 1]
      loss = [0] * len(asked) + [1] * (len(answer) + 1)
      pair.append((ids[:-1], ids[1:], loss[1:]))
    found.append(tuple(pair))
  return found


def pairs_of(iterator, number=10**9):
  """Returns ((inputs, targets, loss) of chosen, of rejected) of each pair in the batches."""
  found, names = [], ('input_tokens', 'target_tokens', 'loss_weights')
  for batch in iterator:
    for i, segments in enumerate(batch['decoder_segment_ids']):
      texts = []
      for s in range(1, segments.max() + 1):
        texts.append(tuple(batch[f'decoder_{name}'][i][segments == s].tolist() for name in names))
        positions = batch['decoder_positions'][i][segments == s]
        assert positions.tolist() == list(range(len(positions)))
      assert not batch['decoder_loss_weights'][i][segments == 0].any()
      found += zip(texts[::2], texts[1::2], strict=True)
    if len(found) >= number:
      break
  return found


def both_splits(open_data, name, **options):
  found = []
  for split in ('train', 'validation'):
    options = {'lengths': {'targets': LENGTH}, 'converter': 'preference', **options}
    found += pairs_of(open_data(name, split=split, repeat=False, **options).iterator)
  return sorted(found)


@pytest.mark.slow
def test_pairs_of_texts_are_read_once_whether_packed_prepared_or_neither(open_data, tmp_path):
  name, expected = write(tmp_path / 'a.jsonl', TEXTS), sorted(of_texts(TEXTS))
  packed = open_data(
    name, converter='preference', lengths={'targets': LENGTH}, repeat=False
  ).iterator
  assert max(batch['decoder_segment_ids'].max() for batch in packed) >= 4
  assert both_splits(open_data, name) == expected
  assert both_splits(open_data, name, pack=False) == expected


@pytest.mark.slow
def test_prepared_pairs_are_the_same(open_data, tmp_path):
  name = write(tmp_path / 'a.jsonl', TEXTS)
  prepare_here(name, tmp_path / 'rows', lengths={'targets': LENGTH}, converter='preference')
  opened = open_data(
    f'prepared:{tmp_path}/rows', converter='preference', lengths={'targets': LENGTH}, repeat=False
  )
  found = pairs_of(opened.iterator)
  assert len(found) > 30 and set(map(repr, found)) <= set(map(repr, of_texts(TEXTS)))
  with raises(DataError):
    open_data(f'prepared:{tmp_path}/rows', lengths={'targets': LENGTH})


def test_a_prompt_is_what_both_answers_begin_with(tmp_path):
  def row(**record):
    content, where = preference_row(record, key='chosen', where='a:1')
    assert where == b'a:1'
    return {name: value for name, value in json.loads(content).items() if name != 'tools'}

  texts = dict(prompt='Is it?', chosen=' Yes.', rejected=' No.')
  assert row(**texts) == texts
  assert row(chosen='Is it? Yes.', rejected='Is it? No.') == texts
  assert row(chosen=ASKED + talk('a')[:0] + [ANSWER], rejected=[*ASKED, OTHER]) == {
    'prompt': ASKED,
    'chosen': [ANSWER],
    'rejected': [OTHER],
  }
  lists = dict(prompt=ASKED, chosen=[ANSWER], rejected=[OTHER])
  assert row(**lists) == lists
  assert row(**{**lists, 'prompt': 'Hi'})['prompt'] == [{'role': 'user', 'content': 'Hi'}]
  shared = row(prompt='ignored', chosen=[*ASKED, ANSWER], rejected=[*ASKED, OTHER])
  assert shared == lists


ANSWER, OTHER = ({'role': 'assistant', 'content': text} for text in ('It is.', 'No!'))


@pytest.mark.slow
@pytest.mark.parametrize('template', [CHATML, GENERATION], ids=['plain', 'generation'])
def test_messages_are_written_by_the_template_and_only_answers_have_a_loss(
  open_data, tmp_path, template
):
  pytest.importorskip('tokenizers')
  folder = write_tokenizer(tmp_path / 'tokenizer', template, zero_is_a_word=True)
  records = [
    {'prompt': ASKED, 'chosen': [{**ANSWER, 'content': f'{i}'}], 'rejected': [OTHER]}
    for i in range(30)
  ]
  own, expected = HuggingFaceVocabulary(folder), []
  for record in records:
    pair = []
    for name in ('chosen', 'rejected'):
      ids, _ = chatml_by_hand(own, record['prompt'])
      asked = len(ids)
      ids, loss = chatml_by_hand(own, [*record['prompt'], *record[name]])
      loss = [x * (i >= asked) for i, x in enumerate(loss)]
      pair.append((ids[:-1], ids[1:], loss[1:]))
    expected.append(tuple(pair))
  options = dict(vocabulary=f'huggingface:{folder}', lengths={'targets': 256}, pack=False)
  assert both_splits(open_data, write(tmp_path / 'a.jsonl', records), **options) == sorted(expected)
  pq.write_table(pa.Table.from_pylist(records), tmp_path / 'a.parquet')
  opened = open_data(f'parquet:{tmp_path}/a.parquet', converter='preference', **options)
  assert pairs_of(opened.iterator, number=1)[0] in expected


@pytest.mark.slow
def test_pairs_take_the_variables_of_the_template_and_those_that_it_refuses_are_counted(
  open_data, tmp_path, caplog
):
  refusing = (
    '{% if messages[0].content == refused %}{{ raise_exception("no") }}{% endif %}' + CHATML
  )
  folder = write_tokenizer(tmp_path / 'tokenizer', refusing)
  records = [
    {'prompt': talk(f'Hi {i}')[:1], 'chosen': [ANSWER], 'rejected': [OTHER]} for i in range(40)
  ]
  name, options = (
    write(tmp_path / 'a.jsonl', records),
    dict(
      vocabulary=f'huggingface:{folder}',
      lengths={'targets': 256},
      chat_template_variables={'refused': 'Hi 4'},
    ),
  )
  with raises(DataError):
    both_splits(open_data, name, **options)
  assert len(both_splits(open_data, name, max_corrupt_fraction=0.1, **options)) == 39
  assert 'a.jsonl:5: the chat template' in caplog.text


def test_long_pairs_are_cut_fairly_or_left_out_and_counted(open_data, tmp_path, caplog):
  sizes = [(10, 9, 50), (10, 50, 51), (40, 3, 50), (40, 1, 50)]  # of prompt, chosen, rejected
  records = [
    {'prompt': f'{i:0{asked}}', 'chosen': 'c' * chosen, 'rejected': 'r' * rejected}
    for i in range(10)
    for asked, chosen, rejected in sizes
  ]
  with caplog.at_level(logging.WARNING):
    opened = open_data(
      write(tmp_path / 'a.jsonl', records),
      converter='preference',
      lengths={'targets': 64},
      repeat=False,
    )
    found = pairs_of(opened.iterator)
  sizes = {tuple(len(targets) for _, targets, _ in pair) for pair in found}
  assert sizes == {(19, 45), (32, 32)}
  assert 10 < len(found) <= 20 and all(any(loss) for pair in found for _, _, loss in pair)
  assert 'has 79 tokens; a row holds 64 (TASK_FEATURE_LENGTHS): cut' in caplog.text
  assert 'left out: an answer has no token before the end of the row' in caplog.text


@pytest.mark.parametrize(
  'record',
  [
    {'chosen': 'a', 'prompt': 'b'},
    {'chosen': 'a', 'rejected': '', 'prompt': 'b'},
    {'chosen': 'a', 'rejected': 'a', 'prompt': 'b'},
    {'chosen': 'a', 'rejected': [OTHER]},
    {'chosen': 'a', 'rejected': 'b'},
    {'chosen': 'a', 'rejected': 'b', 'prompt': [OTHER]},
    {'chosen': 'a b', 'rejected': 'a b c'},
    {'chosen': [ANSWER], 'rejected': [OTHER]},
    {'chosen': ASKED, 'rejected': [*ASKED, ANSWER]},
    {'chosen': [{'role': 'bot'}], 'rejected': [OTHER]},
  ],
)
def test_bad_pairs_are_named_with_file_and_line(record):
  with raises(DataError):
    raise preference_row(record, key='chosen', where='a.jsonl:1')


def test_a_model_of_pairs_needs_pairs_and_others_need_texts(open_data, tmp_path):
  name = write(tmp_path / 'a.jsonl', TEXTS)
  with raises(DataError):
    open_data(name)
  both = write(tmp_path / 'b.jsonl', [{**record, 'text': 'x'} for record in TEXTS])
  with raises(DataError):
    open_data(both, converter='preference')
  opened = open_data(
    f'{both}#chosen=chosen,rejected=rejected,prompt=prompt',
    converter='preference',
    lengths={'targets': LENGTH},
  )
  assert set(map(repr, pairs_of(opened.iterator, 20))) <= set(map(repr, of_texts(TEXTS)))
  with raises(DataError):
    open_data(f'span_corruption:{name}')
  with raises(DataError):
    open_data(name, converter='preference', loss_on_targets_only=False)


@pytest.mark.slow
def test_the_batch_of_a_damaged_file_names_the_line(open_data, tmp_path):
  records = [*TEXTS, {'chosen': 'a', 'rejected': 'a'}]
  name = write(tmp_path / 'a.jsonl', records)
  with raises(DataError):
    both_splits(open_data, name)
  assert len(both_splits(open_data, name, max_corrupt_fraction=0.1)) == len(TEXTS)
