"""SeqIO batches resume exactly, repeat deterministically and pad, never drop, in evaluation."""

import dataclasses
import functools
import json
import sys
import tempfile

import numpy as np
import pytest

from t5x_gpu.data import batches, seqio_batches
from t5x_gpu.data.streaming import task_lookup
from t5x_gpu.errors import ConfigError, DataError, NoExamplesError
from tests.messages import raises

pytestmark = pytest.mark.tf


def hashes(iterator, number):
  return [batches.batch_hash(next(iterator)) for _ in range(number)]


@pytest.fixture(name='lines')
def _lines(text_folder):
  return f'text_lines:{text_folder}/*.txt'


@pytest.mark.slow
def test_two_openings_give_the_same_batches(open_data, lines):
  assert hashes(open_data(lines).iterator, 5) == hashes(open_data(lines).iterator, 5)


@pytest.mark.slow
def test_another_seed_gives_another_order(open_data, lines):
  assert hashes(open_data(lines, seed=1).iterator, 3) != hashes(open_data(lines).iterator, 3)


# About 235 packed rows = 58 batches make an epoch, so 150 batches are in the third.
@pytest.mark.quick_cases('options0-150-True')
@pytest.mark.parametrize(
  'options, taken, peeked',
  [
    ({}, 150, True),
    ({'shuffle': False}, 1, True),
    *(
      pytest.param(options, taken, peeked, marks=pytest.mark.slow)
      for options in ({}, {'pack': False}, {'shuffle': False})
      for taken in (1, 150)
      for peeked in (False, True)
    ),
  ],
)
def test_restored_batches_equal_the_uninterrupted_ones(open_data, lines, taken, peeked, options):
  whole = open_data(lines, **options).iterator
  hashes(whole, taken)
  if peeked:
    whole.peek()
  state = whole.get_state()
  want = hashes(whole, 80)  # Across the end of an epoch.
  for rest in (open_data(lines, **options).iterator, whole):
    rest.set_state(state)
    assert hashes(rest, 80) == want


def test_moving_builds_no_second_dataset_unless_tensorflow_needs_it(open_data, lines, monkeypatch):
  built = []
  dataset = seqio_batches.SeqioBatches._dataset
  monkeypatch.setattr(
    seqio_batches.SeqioBatches, '_dataset', lambda self: built.append(self) or dataset(self)
  )
  iterator = open_data(lines).iterator
  state = iterator.get_state()
  want = hashes(iterator, 70)  # across the end of an epoch
  iterator.set_state(state)
  assert hashes(iterator, 70) == want and len(built) == 1

  move, calls = seqio_batches._from_bytes, []

  def fails_once(position, of):
    calls.append(of)
    if len(calls) == 1:
      raise ValueError('the cache is complete')
    move(position, of)

  monkeypatch.setattr(seqio_batches, '_from_bytes', fails_once)
  iterator.set_state(state)
  assert hashes(iterator, 70) == want and len(built) == len(calls) == 2


def test_a_position_is_saved_once_until_the_iterator_moves(open_data, lines, monkeypatch):
  saved = []
  to_bytes = seqio_batches._to_bytes
  monkeypatch.setattr(
    seqio_batches, '_to_bytes', lambda iterator: saved.append(iterator) or to_bytes(iterator)
  )
  iterator = open_data(lines).iterator
  state = iterator.get_state()
  assert len(saved) == 1  # by `prepare_to_resume`
  want = hashes(iterator, 2)
  later = iterator.get_state()
  assert len(saved) == 2
  after = hashes(iterator, 1)
  for at, expected in ((state, want + after), (later, after)):
    iterator.set_state(at)
    iterator.set_state(iterator.get_state())
    assert hashes(iterator, len(expected)) == expected


def test_an_evaluation_builds_one_pipeline(open_data, lines, monkeypatch):
  built, examples = [], task_lookup.examples
  monkeypatch.setattr(
    task_lookup, 'examples', lambda *args, **kw: built.append(kw) or examples(*args, **kw)
  )
  open_data(lines, repeat=False)
  assert len(built) == 1


@pytest.mark.parametrize('repeat', [True, False])
def test_a_split_without_examples_is_refused(tmp_path, open_data, repeat):
  (tmp_path / 'one.jsonl').write_text('{"text": "a"}\n')
  refused = []
  for split in ('train', 'validation'):  # a hash assigns the text
    try:
      open_data(f'jsonl:{tmp_path}/one.jsonl', split=split, repeat=repeat)
    except NoExamplesError as e:
      refused.append(e)
  assert len(refused) == 1 and refused[0].__context__ is None  # no frame keeps an iterator


def test_unpacked_rows_continue_from_a_state_of_0_2_without_reading_again(open_data, lines, caplog):
  whole = open_data(lines, pack=False).iterator
  hashes(whole, 5)
  whole.peek()
  state = whole.get_state()
  want = hashes(whole, 5)
  # 0.2 did not name a pipeline, and its rows had no masks.
  state = state.replace(b', "pipeline": 1}', b'}', 1)
  header = json.loads(state.splitlines()[1])
  assert header['has_pending'] and 'pipeline' not in header
  size = state.index(b'\n', state.index(b'\n') + 1) + 1 + header['position_bytes']
  names = ('decoder_target_tokens', 'decoder_input_tokens', 'decoder_loss_weights')
  assert len(state) - size == len(names) * 4 * 32 * 4  # rows, length, bytes
  whole.set_state(state)
  assert 'decoder_segment_ids' in whole.peek()
  assert hashes(whole, 5) == want
  assert 'again' not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize('shuffle', [True, False])
def test_an_epoch_repeats_its_order_only_without_shuffling(open_data, lines, shuffle):
  options = dict(pack=False, lengths={'targets': 64}, batch_size=1)
  epoch = len(list(open_data(lines, repeat=False, **options).iterator))
  got = hashes(open_data(lines, shuffle=shuffle, **options).iterator, 2 * epoch)
  assert (got[:epoch] == got[epoch:]) == (not shuffle)


@pytest.mark.slow
def test_taking_a_state_does_not_disturb_the_stream(open_data, lines):
  iterator = open_data(lines).iterator
  got = []
  for _ in range(6):
    got += hashes(iterator, 1)
    iterator.get_state()
  assert got == hashes(open_data(lines).iterator, 6)


def test_a_save_does_not_write_to_tmpdir(open_data, lines, tmp_path, monkeypatch):
  iterator = open_data(lines).iterator
  hashes(iterator, 3)
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'missing'))
  state = iterator.get_state()
  want = hashes(iterator, 3)
  monkeypatch.undo()  # TensorFlow itself needs it to build a pipeline
  rest = open_data(lines).iterator
  rest.set_state(state)
  assert hashes(rest, 3) == want


def test_peek_takes_nothing(open_data, lines):
  iterator = open_data(lines).iterator
  peeked = batches.batch_hash(iterator.peek())
  assert hashes(iterator, 1) == [peeked] != [batches.batch_hash(iterator.peek())]


@pytest.mark.slow
def test_state_moves_with_the_files(open_data, text_folder, tmp_path):
  first = open_data(f'text_files:{text_folder}').iterator
  hashes(first, 3)
  state = first.get_state()
  want = hashes(first, 30)
  moved = tmp_path / 'elsewhere'
  text_folder.rename(moved)
  rest = open_data(f'text_files:{moved}').iterator
  rest.set_state(state)
  assert hashes(rest, 30) == want


@pytest.mark.parametrize(
  'change',
  [
    {'seed': 7},
    *(
      pytest.param(change, marks=pytest.mark.slow)
      for change in ({'batch_size': 2}, {'lengths': {'targets': 48}}, {'split': 'validation'})
    ),
  ],
)
def test_state_of_other_data_is_refused_naming_the_difference(open_data, lines, change):
  state = open_data(lines).iterator.get_state()
  with raises(DataError):
    open_data(lines, **change).iterator.set_state(state)


def test_changed_files_are_refused(open_data, lines, text_folder):
  state = open_data(lines).iterator.get_state()
  (text_folder / '0.txt').write_text('other text\n')
  with raises(DataError):
    open_data(lines).iterator.set_state(state)


def test_foreign_bytes_are_refused(open_data, lines):
  with raises(DataError):
    open_data(lines).iterator.set_state(b'{"batches_taken": 3}')


@pytest.mark.slow
def test_state_of_another_tensorflow_is_replayed_and_exact(open_data, lines, caplog):
  iterator = open_data(lines).iterator
  hashes(iterator, 5)
  iterator.peek()
  state = iterator.get_state()
  want = hashes(iterator, 5)
  version = seqio_batches.tf.__version__.encode()
  assert version in state
  iterator.set_state(state.replace(version, b'1.99', 1))
  assert hashes(iterator, 5) == want
  assert 'reading 5 batches again' in caplog.text


def test_evaluation_pads_the_last_batch_and_drops_nothing(open_data, lines):
  opened = open_data(
    lines, repeat=False, shuffle=False, pack=False, batch_size=100, lengths={'targets': 64}
  )
  opened.iterator.set_state(opened.iterator.get_state())  # moves nothing
  got = list(opened.iterator)
  weights = np.concatenate([b['decoder_loss_weights'].any(axis=1) for b in got])
  number = int(weights.sum())
  assert weights[:number].all() and not weights[number:].any()
  alone = open_data(
    lines, repeat=False, shuffle=False, pack=False, batch_size=1, lengths={'targets': 64}
  ).iterator
  assert number == len(list(alone)) == 843 - _validation_lines(open_data, lines)
  with pytest.raises(StopIteration):
    opened.iterator.peek()


def _validation_lines(open_data, lines):
  return len(
    list(
      open_data(
        lines, repeat=False, pack=False, batch_size=1, split='validation', lengths={'targets': 64}
      ).iterator
    )
  )


@pytest.mark.slow
def test_evaluation_starts_again_from_its_first_state(open_data, lines):
  iterator = open_data(lines, repeat=False, batch_size=32).iterator
  start = iterator.get_state()
  first = [batches.batch_hash(b) for b in iterator]
  iterator.set_state(start)
  assert [batches.batch_hash(b) for b in iterator] == first


def test_small_data_still_fills_a_training_batch(open_data, tmp_path):
  (tmp_path / 'a.txt').write_text('one\ntwo\nthree\n')
  batch = next(open_data(f'text_lines:{tmp_path}/a.txt', batch_size=64, pack=False).iterator)
  assert batch['decoder_loss_weights'].any(axis=1).all()


def test_description_lists_the_guarantees(open_data, lines):
  facts = open_data(lines).iterator.describe()
  assert facts['mixture_or_task_name'] == lines and '(data, seed, t)' in facts['guarantee']


@pytest.mark.slow
def test_state_of_the_default_task_is_below_2_mb(open_data):
  iterator = open_data('python_source', lengths={'targets': 256}, batch_size=8).iterator
  hashes(iterator, 20)
  assert len(iterator.get_state()) < 2_000_000


CODE = 'tests.python_code_tasks'


@pytest.mark.quick_cases('generated')
@pytest.mark.parametrize(
  'name',
  [
    'generated',
    pytest.param('generated_and_plain', marks=pytest.mark.slow),
    pytest.param('with_noise', marks=pytest.mark.slow),
  ],
)
def test_a_pipeline_that_cannot_be_saved_resumes_by_reading_its_batches_again(
  open_data, name, caplog
):
  whole = open_data(name, mixture_or_task_module=CODE).iterator
  assert 'whose position TensorFlow cannot save. So a restart reads all earlier' in caplog.text
  hashes(whole, 30)
  state = whole.get_state()
  want = hashes(whole, 30)
  whole.set_state(state)
  assert hashes(whole, 30) == want


@pytest.mark.parametrize('name', ['other_rows_each_time', 'one_iterator'])
def test_python_code_that_gives_other_rows_each_time_is_refused_before_a_step(open_data, name):
  with raises(DataError):
    open_data(name, mixture_or_task_module=CODE)


def test_a_task_without_its_cache_names_the_setting(open_data):
  module = 'tests.mixed_tasks'
  with raises(DataError) as e:
    open_data('mixed_cached', mixture_or_task_module=module, use_cached=True)
  assert e.value.parameters == ('DatasetConfig.use_cached',)
  assert next(open_data('mixed_a', mixture_or_task_module=module, use_cached=True).iterator)
  # The task without a validation split does not need a cache for it.
  of_two = functools.partial(
    open_data, 'mixed_one_cached', mixture_or_task_module=module, use_cached=True
  )
  assert next(of_two(split='validation').iterator)
  with raises(DataError):
    of_two(split='train')


def test_a_task_that_cannot_list_its_splits_may_have_any():
  class NotPrepared:
    @property
    def splits(self):
      raise ValueError('Task t_x has no splits')

  assert task_lookup._may_have(NotPrepared(), 'train')


def test_all_modules_that_a_configuration_names_are_imported(open_data, tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'imported_first.py').write_text('')
  modules = ['imported_first', 'tests.mixed_tasks']
  assert next(open_data('mixed_a', mixture_or_task_module=modules).iterator)
  assert 'imported_first' in sys.modules
  with raises(ConfigError):
    open_data('mixed_a', mixture_or_task_module=[*modules, 'no_such_module'])


def test_examples_of_a_mixture_are_all_examples_of_each_task():
  lengths = {'targets': 64}
  config = batches.DatasetConfig(
    'mixed_one_split', lengths, 'train', 2, mixture_or_task_module='tests.mixed_tasks'
  )
  for split, tasks in (('train', {'mixed_a': 300, 'mixed_t': 40}), ('validation', {'mixed_a': 75})):
    text = seqio_batches.prompt_text(
      dataclasses.replace(config, split=split),
      feature_converter='lm',
      model_vocab_size=384,
      has_inputs=False,
    )
    found = list(text.examples())
    assert [prompt.where for prompt in found] == [
      f'{name}, split {split}, example {i}' for name, number in tasks.items() for i in range(number)
    ]
