"""Other data is refused by the part that differs, with what to set."""

import contextlib

import pytest

from t5x_gpu.data.same_data import check_next_batch, check_numbering, check_same_data
from t5x_gpu.errors import DataError
from tests.messages import raises

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
  'key, value',
  [
    ('task', 'other'),
    ('seed', 3),
    ('rates', {'a': 1.0}),
    ('batch_size', 4),
    ('task_feature_lengths', {'targets': 8}),
    ('vocabulary of targets', 'x'),
    ('source of a', {'files': 4}),
    ('rows of b', {'rows': 8}),
    ('feature_converter', 'encoder_classification_with_types'),
  ],
)
def test_each_part_is_named_with_its_values_and_what_to_set(key, value):
  with raises(DataError):
    check_same_data(FACTS, {**FACTS, key: value})


@pytest.mark.parametrize('saved, is_moved', [(101, True), (100, False), (102, False)])
def test_a_tokenizer_that_earlier_versions_numbered_otherwise_is_refused(saved, is_moved):
  facts = {'vocabulary of inputs': f'huggingface:tokenizer.json (12ab), {saved} ids'}
  now = 'huggingface:tokenizer.json (12ab), 100 ids'
  with raises(DataError) if is_moved else contextlib.nullcontext():
    check_numbering(facts, now)
  check_numbering(facts, 'byte, 259 ids')
  check_numbering({}, None)
  if is_moved:
    with raises(DataError):
      check_same_data(facts, {'vocabulary of inputs': now})


def test_all_parts_are_named_at_once():
  with raises(DataError):
    check_same_data(FACTS, {**FACTS, 'seed': 1, 'batch_size': 2})


def next_batch(saved, now):
  with raises(DataError) as e:
    check_next_batch(saved_hash='aa', hash_now='bb', saved=saved, now=now)
  return e.value.what


def test_another_next_batch_is_put_down_to_libraries_or_places_that_changed():
  saved = {**FACTS, 'libraries': {'seqio': '0.0.20', 'tensorflow': '2.20'}}
  next_batch(saved, {**FACTS, 'libraries': {'seqio': '0.0.20', 'tensorflow': '2.21'}})
  next_batch(
    {**saved, 'mixture_or_task_name': 'text_files:a'},
    {**saved, 'mixture_or_task_name': 'text_files:b'},
  )


def test_another_next_batch_of_the_same_facts_is_put_down_to_code_or_text():
  next_batch(FACTS, FACTS)


def test_the_same_next_batch_is_fine_wherever_the_data_is():
  check_next_batch(saved_hash='aa', hash_now='aa', saved=FACTS, now={**FACTS, 'task': 'moved'})
