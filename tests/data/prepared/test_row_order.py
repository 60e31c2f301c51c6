"""The order of prepared rows: a function of (tasks, rates, seed, number) at the given rates."""

import collections

import grain
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t5x_gpu.data.prepared.batches import EvenMixture, checked_rates, mixed_rows
from t5x_gpu.errors import DataError
from tests.messages import raises

RATES = {'a': 0.7, 'b': 0.2, 'c': 0.1}


def tasks(**lengths):
  return {
    name: grain.MapDataset.source([(name, i) for i in range(length)])
    for name, length in lengths.items()
  }


def taken(rows, number, *, start=0):
  return [rows[i] for i in range(start, start + number)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8), st.integers(0, 10**15))
def test_shares_are_the_rates_within_one_row_per_task_and_no_row_is_left_out(rates, start):
  mixture, total = EvenMixture(rates), sum(rates)
  seen = collections.defaultdict(list)
  for k in range(start, start + 300):
    task, row = mixture[k]
    seen[task].append(row)
  for task, rows in seen.items():
    assert rows == list(range(rows[0], rows[0] + len(rows)))  # one after the other
    assert abs(rows[0] - start * rates[task] / total) <= len(rates) + start * 1e-11
    assert abs(len(rows) - 300 * rates[task] / total) <= 2 * len(rates)


def test_the_first_row_of_each_task_is_its_number_0():
  firsts = {}
  mixture = EvenMixture([3, 1, 7])
  for k in range(50):
    firsts.setdefault(*mixture[k])
  assert firsts == {0: 0, 1: 0, 2: 0}


def test_each_epoch_has_every_row_once_in_a_different_order():
  rows = mixed_rows(tasks(a=70, b=20, c=10), rates=RATES, seed=3, repeat=True)
  epochs = [taken(rows, 100, start=100 * e) for e in range(3)]
  for epoch in epochs:
    assert len(set(epoch)) == 100
  assert epochs[0] != epochs[1] != epochs[2]


def test_small_tasks_start_over_while_large_ones_go_on():
  rows = taken(mixed_rows(tasks(a=1000, b=5), rates={'a': 0.5, 'b': 0.5}, seed=0, repeat=True), 200)
  counts = collections.Counter(rows)
  assert {counts['b', i] for i in range(5)} == {20}
  assert max(counts[row] for row in counts if row[0] == 'a') == 1


def test_a_task_of_rate_0_is_left_out():
  rows = mixed_rows(tasks(a=5, b=5), rates={'a': 1, 'b': 0}, seed=0, repeat=True)
  assert {name for name, _ in taken(rows, 50)} == {'a'}


def test_neighboring_seeds_share_no_epoch():
  orders = [
    taken(mixed_rows(tasks(a=50), rates={'a': 1}, seed=seed, repeat=True), 50, start=start)
    for seed in range(3)
    for start in (0, 50, 100)
  ]
  assert len(set(map(tuple, orders))) == 9


@pytest.mark.parametrize('seed', [None, 5])
def test_evaluation_takes_every_row_once(seed):
  rows = mixed_rows(tasks(a=7, b=3), rates=RATES, seed=seed, repeat=False)
  assert len(rows) == 10
  order = taken(rows, 10)
  assert sorted(order) == [('a', i) for i in range(7)] + [('b', i) for i in range(3)]
  assert (order == sorted(order)) == (seed is None)


ROWS = {'a': 7, 'b': 3, 'c': 0}


@pytest.mark.parametrize(
  'given_rates', [{'ab': 1}, {'a': -1, 'b': 2}, {'a': float('nan')}, {'a': 0, 'b': 0}, {}, None]
)
def test_rates_that_cannot_be_are_refused_with_ones_that_can(given_rates):
  with raises(DataError):
    checked_rates(given_rates, own=RATES, rows=ROWS)


def test_rates_are_normalized_and_tasks_that_are_not_named_have_none():
  assert checked_rates({'a': 3, 'b': 1}, own=RATES, rows=ROWS) == {'a': 0.75, 'b': 0.25, 'c': 0}
