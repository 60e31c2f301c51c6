"""Other data is refused by the part that differs, with what to set."""

import contextlib

import pytest

from t5x_gpu.data.same_data import check_next_batch, check_numbering, check_same_data
from t5x_gpu.errors import DataError

FACTS = {
  'task': 'mixed',
  'seed': 0,
  'rates': {'a': 0.5, 'b': 0.5},
  'batch_size': 8,
  'task_feature_lengths': {'targets': 32},
  'vocabulary of targets': 'byte, 259 ids',
  'feature_converter': 'encoder_classification',
  'source of a': {'files': 3, 'hash': '12'},
  'rows of b': {'rows': 7, 'hash': '34'},
}


def test_the_same_facts_are_the_same_data():
  check_same_data(FACTS, dict(reversed(FACTS.items())))


@pytest.mark.parametrize(
  'key, value, part, fix',
  [
    ('task', 'other', 'the mixture or task', "Set MIXTURE_OR_TASK_NAME = 'mixed'"),
    ('seed', 3, 'the seed', 'Set RANDOM_SEED = 0'),
    ('rates', {'a': 1.0}, 'the rates of the mixture', 'DatasetConfig.mixture_rates'),
    ('batch_size', 4, 'the batch size', 'Set BATCH_SIZE = 8'),
    (
      'task_feature_lengths',
      {'targets': 8},
      'the lengths',
      "Set TASK_FEATURE_LENGTHS = {'targets': 32}",
    ),
    ('vocabulary of targets', 'x', 'the tokenizer', 'Restore the earlier vocabulary'),
    ('source of a', {'files': 4}, 'the data version', 'Restore the earlier files'),
    ('rows of b', {'rows': 8}, 'the data version', 'Restore the earlier prepared folder'),
    (
      'feature_converter',
      'encoder_classification_with_types',
      'the objective',
      'EncoderModel.token_types = False',
    ),
  ],
)
def test_each_part_is_named_with_its_values_and_what_to_set(key, value, part, fix):
  with pytest.raises(DataError) as e:
    check_same_data(FACTS, {**FACTS, key: value})
  assert f'What differs: {part}.' in e.value.what
  assert f'{key}: saved {FACTS[key]!r}, now {value!r}' in e.value.what
  assert fix in e.value.fix and e.value.fix.count('\n') == 1


@pytest.mark.parametrize('saved, is_moved', [(101, True), (100, False), (102, False)])
def test_a_tokenizer_that_earlier_versions_numbered_otherwise_is_refused(saved, is_moved):
  facts = {'vocabulary of inputs': f'huggingface:tokenizer.json (12ab), {saved} ids'}
  now = 'huggingface:tokenizer.json (12ab), 100 ids'
  refused = pytest.raises(DataError, match='with id 0 of .* had id 100')
  with refused if is_moved else contextlib.nullcontext():
    check_numbering(facts, now)
  check_numbering(facts, 'byte, 259 ids')
  check_numbering({}, None)
  if is_moved:
    with pytest.raises(DataError, match='with id 0 of .* had id 100'):
      check_same_data(facts, {'vocabulary of inputs': now})


def test_all_parts_are_named_at_once():
  with pytest.raises(DataError, match='What differs: the batch size, the seed.') as e:
    check_same_data(FACTS, {**FACTS, 'seed': 1, 'batch_size': 2})
  assert 'RANDOM_SEED = 0' in e.value.fix and 'BATCH_SIZE = 8' in e.value.fix


def next_batch(saved, now):
  with pytest.raises(DataError) as e:
    check_next_batch(saved_hash='aa', hash_now='bb', saved=saved, now=now)
  return e.value.what


def test_another_next_batch_is_put_down_to_libraries_or_places_that_changed():
  saved = {**FACTS, 'libraries': {'seqio': '0.0.20', 'tensorflow': '2.20'}}
  what = next_batch(saved, {**FACTS, 'libraries': {'seqio': '0.0.20', 'tensorflow': '2.21'}})
  assert "tensorflow: saved '2.20', now '2.21' (library)" in what and 'seqio: saved' not in what
  what = next_batch(
    {**saved, 'mixture_or_task_name': 'text_files:a'},
    {**saved, 'mixture_or_task_name': 'text_files:b'},
  )
  assert "mixture_or_task_name: saved 'text_files:a', now 'text_files:b'" in what


def test_another_next_batch_of_the_same_facts_is_put_down_to_code_or_text():
  what = next_batch(FACTS, FACTS)
  assert 'task, seed, rates, batch_size, task_feature_lengths, feature_converter agree' in what
  assert 'code of the task has changed' in what and '64 KiB' in what


def test_the_same_next_batch_is_fine_wherever_the_data_is():
  check_next_batch(saved_hash='aa', hash_now='aa', saved=FACTS, now={**FACTS, 'task': 'moved'})
