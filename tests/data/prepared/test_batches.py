"""`prepared:DIR`: one order on any topology, and only for the data it was made from."""

import collections
import dataclasses
import errno
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_gpu.data import batches, data_module
from t5x_gpu.data.prepared.index import read_index
from t5x_gpu.errors import DataError
from tests.helpers_disk import refused_to_python
from tests.helpers_prepared import prepare_here
from tests.messages import raises

pytestmark = pytest.mark.tf
ROOT = pathlib.Path(__file__).parents[3]


def hashes(iterator, number):
  return [batches.batch_hash(next(iterator)) for _ in range(number)]


def letters(batch):
  """Returns how many rows of a batch are of each task, which is the first letter of a row."""
  return collections.Counter(
    chr(token - 3) for token in np.asarray(batch['decoder_target_tokens'])[:, 0]
  )


def test_batches_hold_what_the_model_takes(mixed_rows, open_data):
  opened = open_data(f'prepared:{mixed_rows}')
  batch = next(opened.iterator)
  opened.spec.check(batch)
  positions, segments = batch['decoder_positions'], batch['decoder_segment_ids']
  assert segments.max() > 1 and (positions[segments > 0] >= 0).all()
  starts = np.diff(segments, axis=1) > 0
  assert (positions[:, 1:][starts & (segments[:, 1:] > 0)] == 0).all()


def test_the_order_is_a_function_of_the_seed(mixed_rows, open_data):
  first = hashes(open_data(f'prepared:{mixed_rows}').iterator, 8)
  assert hashes(open_data(f'prepared:{mixed_rows}').iterator, 8) == first
  assert not set(hashes(open_data(f'prepared:{mixed_rows}', seed=1).iterator, 8)) & set(first)
  in_order = [
    hashes(open_data(f'prepared:{mixed_rows}', shuffle=False, seed=s).iterator, 8) for s in (0, 1)
  ]
  assert in_order[0] == in_order[1] != first


def test_seeking_gives_what_walking_gives_and_reads_nothing_on_the_way(mixed_rows, open_data):
  walked = open_data(f'prepared:{mixed_rows}').iterator
  states, want = [], []
  for _ in range(121):  # several epochs of each task
    states.append(walked.get_state())
    want += hashes(walked, 1)
  for step in (0, 1, 57, 119):
    sought = open_data(f'prepared:{mixed_rows}').iterator
    sought.set_state(states[step])
    assert sought.rows_read == 0
    assert hashes(sought, 1) == [want[step]]
    assert batches.batch_hash(sought.peek()) == want[step + 1]
  walked.set_state(states[3])  # back again
  assert hashes(walked, 2) == want[3:5]


def test_a_step_far_away_is_found_at_once(mixed_rows, open_data):
  iterator = open_data(f'prepared:{mixed_rows}').iterator
  state = json.loads(iterator.get_state())
  iterator.set_state(json.dumps({**state, 'batches_taken': 10**12}).encode())
  assert letters(next(iterator)).keys() <= set('abc') and iterator.rows_read <= 8


def test_the_shards_are_watched_and_a_state_may_be_of_an_earlier_batch(mixed_rows, open_data):
  iterator = open_data(f'prepared:{mixed_rows}').iterator
  names = sorted(os.path.basename(path) for path in iterator.watched_files())
  assert 'index.json' in names and len(names) > 3
  assert all(os.path.isfile(path) for path in iterator.watched_files())
  want = hashes(iterator, 5)
  iterator.set_state(iterator.counted_state(ago=2))
  assert hashes(iterator, 2) == want[3:]


def test_peek_takes_nothing(mixed_rows, open_data):
  iterator = open_data(f'prepared:{mixed_rows}').iterator
  peeked = batches.batch_hash(iterator.peek())
  assert hashes(iterator, 1) == [peeked] != [batches.batch_hash(iterator.peek())]


def test_tasks_are_mixed_at_their_rates(mixed_rows, open_data):
  iterator = open_data(f'prepared:{mixed_rows}', batch_size=10).iterator
  seen = collections.Counter()
  for _ in range(30):
    counted = letters(next(iterator))
    assert 5 <= counted['a'] <= 7 and 2 <= counted['b'] <= 4 and counted['c'] <= 2
    seen += counted
  assert abs(seen['a'] - 180) <= 2 and abs(seen['b'] - 90) <= 2 and abs(seen['c'] - 30) <= 2


def test_rates_change_without_preparing_again(mixed_rows, open_data):
  iterator = open_data(
    f'prepared:{mixed_rows}', batch_size=10, mixture_rates={'mixed_c': 1, 'mixed_b': 1}
  ).iterator
  assert letters(next(iterator)) == {'b': 5, 'c': 5}
  with raises(DataError):
    open_data(f'prepared:{mixed_rows}', mixture_rates={'mixed_d': 1})


def test_evaluation_has_every_row_once_and_fills_the_last_batch_with_weight_0(
  mixed_rows, open_data
):
  got = list(open_data(f'prepared:{mixed_rows}', repeat=False, batch_size=7).iterator)
  weights = np.concatenate([np.asarray(b['decoder_loss_weights']).any(axis=1) for b in got])
  number = read_index(mixed_rows, split='train').rows
  assert weights[:number].all() and not weights[number:].any() and len(weights) - number < 7
  tokens = np.concatenate([b['decoder_target_tokens'] for b in got])[:number]
  want = read_index(mixed_rows, split='train').tokens
  assert np.count_nonzero(tokens) == want


def test_evaluation_has_the_rows_of_the_tasks_that_have_some(tmp_path, open_data):
  index = prepare_here('mixed_with_none', tmp_path, split='validation', num_parts=1, trains=False)
  given = {'split': 'validation', 'batch_size': 1, 'repeat': False}
  assert len(list(open_data(f'prepared:{tmp_path}', **given).iterator)) == index.rows > 0


def test_evaluation_starts_again_from_its_first_state(mixed_rows, open_data):
  iterator = open_data(f'prepared:{mixed_rows}', repeat=False, split='validation').iterator
  start = iterator.get_state()
  first = [batches.batch_hash(b) for b in iterator]
  with pytest.raises(StopIteration):
    iterator.peek()
  iterator.set_state(start)
  assert [batches.batch_hash(b) for b in iterator] == first


@pytest.mark.parametrize('processes', [1, 2, 4])
def test_processes_see_one_batch_and_each_reads_its_rows_alone(mixed_rows, open_data, processes):
  want = [
    {k: np.asarray(v) for k, v in batch.items()}
    for _, batch in zip(range(6), open_data(f'prepared:{mixed_rows}', batch_size=8).iterator)
  ]
  mesh = Mesh(np.asarray(jax.devices()[:8]), ('data',))
  sharding = NamedSharding(mesh, PartitionSpec('data'))
  for process in range(processes):
    iterator = open_data(f'prepared:{mixed_rows}', batch_size=8).iterator
    own = set(jax.devices()[8 // processes * process : 8 // processes * (process + 1)])
    for step in range(6):
      batch = next(iterator)
      for name, x in batch.items():  # what make_array_from_callback does on that process
        for device, index in sharding.addressable_devices_indices_map(x.shape).items():
          if device in own:
            np.testing.assert_array_equal(x[index], want[step][name][index])
    # Six batches, and at most two that were read ahead.
    assert 6 * 8 // processes <= iterator.rows_read <= 8 * 8 // processes


@pytest.mark.parametrize(
  'change',
  [
    {'lengths': {'targets': 48}},
    {'pack': False},
    {'converter': 'prefix_lm', 'lengths': {'inputs': 16, 'targets': 16}},
    {'vocabulary': 'words:300'},
    {'vocab_size': 200},
  ],
)
def test_another_model_is_refused_with_what_to_prepare(mixed_rows, open_data, change):
  with raises(DataError):
    open_data(f'prepared:{mixed_rows}', **change)


def test_a_split_that_is_not_there_is_named_with_the_command(mixed_rows, open_data):
  with raises(DataError):
    open_data(f'prepared:{mixed_rows}', split='test')
  with raises(DataError):
    open_data('prepared:/nowhere')


@pytest.mark.parametrize(
  'damage',
  [
    lambda p: p.unlink(),
    lambda p: p.write_bytes(p.read_bytes()[:1000]),
    lambda p: p.write_bytes(b'?' + p.read_bytes()[1:]),
  ],
)
def test_a_damaged_shard_is_named_when_the_data_is_opened(mixed_rows, tmp_path, open_data, damage):
  copied = shutil.copytree(mixed_rows, tmp_path / 'copied')
  shard = copied / 'train' / 'mixed_a' / '00001-of-00002.arrayrecord'
  damage(shard)
  with raises(DataError):
    open_data(f'prepared:{copied}')


@pytest.mark.parametrize('part', ['train/index.json', '00001-of-00002.arrayrecord'])
def test_a_file_that_cannot_be_opened_has_not_changed_and_is_prepared(mixed_rows, open_data, part):
  with refused_to_python(part, errno.EMFILE), raises(DataError):
    open_data(f'prepared:{mixed_rows}')


def test_bytes_that_change_while_training_stop_it_with_the_row(tmp_path, open_data):
  prepare_here('mixed_a', tmp_path, num_parts=1)
  iterator = open_data(f'prepared:{tmp_path}').iterator
  shard = tmp_path / 'train' / 'mixed_a' / '00000-of-00001.arrayrecord'
  content = shard.read_bytes()
  shard.write_bytes(content[:64] + b'?' * (len(content) // 2) + content[len(content) // 2 + 64 :])
  with raises(DataError):
    for _ in range(100):
      np.asarray(next(iterator)['decoder_target_tokens'])


def test_fewer_rows_than_a_batch_train_with_a_warning_and_evaluate_once(
  tmp_path, open_data, caplog
):
  index = prepare_here('mixed_c', tmp_path, num_parts=1)
  assert index.rows < 64
  with caplog.at_level(logging.WARNING):
    batch = next(open_data(f'prepared:{tmp_path}', batch_size=64).iterator)
  assert f'has {index.rows} rows, fewer than the 64 of a batch' in caplog.text
  assert batch['decoder_loss_weights'].any(axis=1).all()
  assert len(list(open_data(f'prepared:{tmp_path}', batch_size=64, repeat=False).iterator)) == 1


@pytest.mark.parametrize(
  'change', [{'seed': 7}, {'batch_size': 2}, {'mixture_rates': {'mixed_a': 1}}]
)
def test_a_state_of_another_order_is_refused_by_name(mixed_rows, open_data, change):
  state = open_data(f'prepared:{mixed_rows}').iterator.get_state()
  with raises(DataError):
    open_data(f'prepared:{mixed_rows}', **change).iterator.set_state(state)


def test_a_state_of_other_rows_is_refused_and_one_of_a_moved_folder_is_not(tmp_path, open_data):
  prepare_here('mixed_a', tmp_path / 'a', num_parts=1)
  iterator = open_data(f'prepared:{tmp_path}/a').iterator
  hashes(iterator, 3)
  state, want = iterator.get_state(), hashes(iterator, 2)
  (tmp_path / 'a').rename(tmp_path / 'moved')
  moved = open_data(f'prepared:{tmp_path}/moved').iterator
  moved.set_state(state)
  assert hashes(moved, 2) == want
  prepare_here('mixed_a', tmp_path / 'b', num_parts=1, seed=5)
  with raises(DataError):
    open_data(f'prepared:{tmp_path}/b').iterator.set_state(state)


def test_a_state_of_the_streaming_path_is_refused(mixed_rows, open_data):
  state = open_data('mixed', mixture_or_task_module='tests.mixed_tasks').iterator.get_state()
  with raises(DataError):
    open_data(f'prepared:{mixed_rows}').iterator.set_state(state)


def test_text_comes_from_the_vocabulary_that_was_prepared_with(mixed_rows, open_data):
  opened = open_data(f'prepared:{mixed_rows}')
  vocabulary = data_module.open_vocabulary(opened.config, feature_converter='lm')
  assert vocabulary.name == 'byte' and vocabulary.decode(vocabulary.encode('abc')) == 'abc'
  row = next(opened.iterator)['decoder_target_tokens'][0]
  assert vocabulary.decode(row)[0] in 'abc'


def test_prompts_and_metrics_come_from_the_task_that_was_prepared(mixed_rows, open_data):
  config = open_data(f'prepared:{mixed_rows}').config
  text = data_module.open_text(
    config, 'prompt_text', feature_converter='lm', model_vocab_size=384, has_inputs=False
  )
  assert text.name == 'byte' and next(text.examples()).targets[0] in 'abc'
  with raises(DataError):
    data_module.open_evaluated_tasks(config, feature_converter='lm')
  other = dataclasses.replace(config, split='another')  # for every split
  assert data_module.open_vocabulary(other, feature_converter='lm').name == 'byte'
  assert data_module.open_class_names(other) is None


def test_the_description_lists_the_guarantees(mixed_rows, open_data):
  facts = open_data(f'prepared:{mixed_rows}').iterator.describe()
  assert '(data, rates, seed, t)' in facts['guarantee'] and 'grain' in facts['libraries']
  assert facts['rates'] == {'mixed_a': 0.6, 'mixed_b': 0.3, 'mixed_c': 0.1}
  json.dumps(facts)


WITHOUT_TEXT = """
import sys
for name in ('tensorflow', 'tensorflow_datasets', 'tensorflow_text', 'seqio', 'matplotlib',
             'sentencepiece'):
  sys.modules[name] = None
from t5x_gpu.data import batches, data_module, features
config = batches.DatasetConfig('prepared:' + sys.argv[1], {'targets': 32}, 'train', 4)
spec = features.batch_spec('lm', task_feature_lengths=config.task_feature_lengths, batch_size=4,
                           pack=True, vocab_size=384)
iterator = data_module.open_batches(config, spec=spec, feature_converter='lm')
print(batches.batch_hash(next(iterator)))
iterator.close()
"""


def test_training_data_is_read_without_tensorflow_and_seqio(mixed_rows, open_data):
  done = subprocess.run(
    [sys.executable, '-c', WITHOUT_TEXT, str(mixed_rows)],
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
    env={'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip() == hashes(open_data(f'prepared:{mixed_rows}').iterator, 1)[0]
