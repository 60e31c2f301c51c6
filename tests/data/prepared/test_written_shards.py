"""What `prepare` writes: the rows of the streaming path, whole shards, resumed after a stop."""

import collections
import errno
import fcntl
import json
import os
import shutil
import subprocess

import numpy as np
import pytest

from t5x_gpu.data.prepared import shard_writer
from t5x_gpu.data.prepared.batches import task_rows
from t5x_gpu.data.prepared.index import read_index
from t5x_gpu.data.sources.corrupt_records import RecordCounts
from t5x_gpu.errors import DataError
from tests.helpers_disk import small_disk
from tests.helpers_prepared import prepare_here
from tests.messages import raises

pytestmark = pytest.mark.tf


def rows_of(folder, split='train'):
  """Returns task -> the rows as arrays, in the order of the files."""
  index = read_index(folder, split=split)
  found = {}
  for name, rows in task_rows(folder, index).items():
    found[name] = arrays = {
      feature: np.zeros((len(rows), length), np.int32) for feature, length in index.features.items()
    }
    for i in range(len(rows)):
      shard_writer.decode_into(rows[i], arrays, i)
  return found


def as_multiset(arrays):
  names = sorted(arrays)
  return collections.Counter(
    b''.join(np.asarray(arrays[name][i], np.int32).tobytes() for name in names)
    for i in range(len(arrays[names[0]]))
  )


def examples(arrays):
  """Returns the packed examples of rows, each as the bytes of its tokens, counted."""
  tokens, segments = arrays['decoder_target_tokens'], arrays['decoder_segment_ids']
  return collections.Counter(
    row[ids == i].tobytes() for row, ids in zip(tokens, segments) for i in range(1, ids.max() + 1)
  )


def files_of(folder):
  return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob('*.arrayrecord')}


@pytest.fixture(name='lines', scope='module')
def _lines(tmp_path_factory):
  folder = tmp_path_factory.mktemp('lines')
  for f in range(5):
    (folder / f'{f}.txt').write_text(
      ''.join(f'line {f} {i} ' + 'abc' * (i % 9) + '\n' for i in range(60))
    )
  return f'text_lines:{folder}/*.txt'


@pytest.fixture(name='copied')
def _copied(mixed_rows, tmp_path):
  return shutil.copytree(mixed_rows, tmp_path / 'copied')


@pytest.mark.slow
@pytest.mark.parametrize('pack', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_unshuffled_shard_has_the_rows_of_the_streaming_path(tmp_path, open_data, lines, pack):
  prepare_here(lines, tmp_path, num_parts=1, shuffle=False, pack=pack)
  streamed = list(open_data(lines, repeat=False, shuffle=False, pack=pack, batch_size=1).iterator)
  streamed = {name: np.concatenate([b[name] for b in streamed]) for name in streamed[0]}
  rows = rows_of(tmp_path)['text_lines']
  assert as_multiset(rows) == as_multiset(streamed) and len(streamed) == 5 if pack else 3


@pytest.mark.slow
def test_any_number_of_shards_holds_every_example_once(tmp_path, lines):
  counted = []
  for number in (1, 6):  # more than there are files
    prepare_here(lines, tmp_path / str(number), num_parts=number)
    counted.append(examples(rows_of(tmp_path / str(number))['text_lines']))
  assert counted[0] == counted[1] and sum(counted[0].values()) > 250


@pytest.mark.slow
def test_encoder_decoder_rows_and_labels_are_prepared_too(tmp_path, open_data):
  (tmp_path / 'pairs.tsv').write_text(''.join(f'in {i}\tout {i * i}\n' for i in range(40)))
  (tmp_path / 'cola.tsv').write_text(''.join(f's\t{i % 2}\t\tThis is {i}.\n' for i in range(40)))
  for name, converter, options in (
    (
      f'text_pairs:{tmp_path}/pairs.tsv',
      'encoder_decoder',
      {'lengths': {'inputs': 16, 'targets': 24}},
    ),
    (
      f'cola_tsv:{tmp_path}/cola.tsv',
      'encoder_classification',
      {'lengths': {'inputs': 16}, 'pack': False, 'num_classes': 2},
    ),
  ):
    folder = tmp_path / converter
    prepare_here(name, folder, converter=converter, **options)
    config = {**options, 'converter': converter, 'repeat': False, 'batch_size': 4}
    streamed, prepared = (
      [
        {k: np.asarray(v) for k, v in batch.items()}
        for batch in open_data(source, **config).iterator
      ]
      for source in (name, f'prepared:{folder}')
    )
    assert streamed[0].keys() == prepared[0].keys()
    if converter == 'encoder_classification':  # rows are examples, however they are packed
      streamed, prepared = (
        collections.Counter(
          (bytes(b['encoder_input_tokens'][i]), int(b['label'][i]))
          for b in batches
          for i in range(4)
        )
        for batches in (streamed, prepared)
      )
      assert streamed == prepared and len(streamed) > 30


@pytest.mark.slow
def test_a_mixture_has_a_folder_per_task_with_its_rate(mixed_rows):
  folder, index = mixed_rows, read_index(mixed_rows, split='train')
  assert {name: m.rate for name, m in index.members.items()} == {
    'mixed_a': 6.0,
    'mixed_b': 3.0,
    'mixed_c': 1.0,
  }
  assert {p.parent.name for p in (folder / 'train').rglob('*.arrayrecord')} == set(index.members)
  for name, rows in rows_of(folder).items():
    tokens = rows['decoder_target_tokens']
    assert set(map(chr, np.unique(tokens[tokens > 3]) - 3)) <= set(f'{name[-1]} 0123456789')
    assert index.members[name].tokens == np.count_nonzero(tokens)
    assert len(tokens) == index.members[name].rows
  assert 0 < index.padding < 0.5
  lengths = collections.Counter()
  for member in index.members.values():
    for shard in member.shards:
      lengths.update(shard.lengths)
  assert sum(lengths.values()) == 400  # every example once


@pytest.mark.slow
def test_a_member_without_the_split_is_left_out_and_one_without_examples_refused(tmp_path):
  assert list(prepare_here('mixed_one_split', tmp_path / 'a', split='validation').members) == [
    'mixed_a'
  ]
  with raises(DataError):
    prepare_here('mixed_with_none', tmp_path / 'b')


def test_a_stopped_preparation_keeps_what_is_finished_and_ends_as_if_it_had_not_stopped(tmp_path):
  whole, stopped = tmp_path / 'whole', tmp_path / 'stopped'
  prepare_here('mixed_b', whole, num_parts=3)
  assert prepare_here('mixed_b', stopped, num_parts=3, stop_after=2) is None
  with raises(DataError):
    read_index(stopped, split='train')
  first = files_of(stopped)
  times = {p: p.stat().st_mtime_ns for p in stopped.rglob('*.arrayrecord')}
  assert len(first) == 2
  (stopped / 'train' / 'mixed_b' / '00002-of-00003.arrayrecord.partial').write_bytes(b'half')
  changed = stopped / 'train' / 'mixed_b' / '00001-of-00003.arrayrecord'
  changed.write_bytes(changed.read_bytes()[:-1] + b'?')
  prepare_here('mixed_b', stopped, num_parts=3)
  assert files_of(stopped) == files_of(whole)
  assert [p for p, t in times.items() if p.stat().st_mtime_ns != t] == [changed]
  ours, theirs = ((f / 'train' / 'index.json').read_text() for f in (stopped, whole))
  assert ours == theirs
  assert not list(stopped.rglob('*.partial')) and not (stopped / 'train' / '.unfinished').exists()


@pytest.mark.slow
def test_preparing_again_does_nothing_or_mends_what_is_damaged(copied):
  before = files_of(copied)
  assert prepare_here('mixed', copied) == 'nothing to do'
  (copied / 'train' / 'mixed_b' / '00000-of-00002.arrayrecord').unlink()
  prepare_here('mixed', copied)
  assert files_of(copied) == before


@pytest.mark.parametrize(
  'change',
  [
    {'lengths': {'targets': 48}},
    {'seed': 1},
    {'pack': False},
    {'num_parts': 5},
    {'vocabulary': 'words:300'},
  ],
)
def test_other_settings_are_refused_by_name_and_nothing_is_touched(copied, change):
  before = files_of(copied)
  with raises(DataError):
    prepare_here('mixed', copied, **change)
  assert files_of(copied) == before


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
  (tmp_path / 'train').mkdir()
  (tmp_path / 'train' / 'thesis.txt').write_text('all of it')
  with raises(DataError):
    prepare_here('mixed', tmp_path)
  assert [p.name for p in (tmp_path / 'train').iterdir()] == ['thesis.txt']


def test_two_at_once_are_distinguished(copied):
  unfinished = copied / 'train' / '.unfinished'
  unfinished.mkdir()
  holder = subprocess.Popen(
    ['flock', str(unfinished / 'lock'), 'cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE
  )
  try:
    holder.stdin.write(b'x\n')
    holder.stdin.flush()
    assert holder.stdout.readline() == b'x\n'  # flock has the lock before it starts cat
    with raises(DataError):
      prepare_here('mixed', copied)
  finally:
    holder.communicate()
  assert prepare_here('mixed', copied) == 'nothing to do' and not unfinished.exists()


def test_a_file_system_without_locks_is_written_all_the_same(copied, monkeypatch):
  def flock(*args):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

  monkeypatch.setattr(fcntl, 'flock', flock)
  assert prepare_here('mixed', copied) == 'nothing to do'


@pytest.mark.slow  # like the test of the checkpoints, which is in make test
def test_a_full_disk_is_named_and_the_finished_shards_stay(tmp_path):
  with small_disk(tmp_path / 'disk', size='200k') as disk:
    with raises(DataError):
      prepare_here('mixed', disk / 'rows', num_parts=1)
    kept = files_of(disk / 'rows')
    assert len(kept) == 1 and not list(disk.rglob('*.partial'))
    subprocess.run(['mount', '-o', 'remount,size=4m', str(disk)], check=True)
    prepare_here('mixed', disk / 'rows', num_parts=1)
    assert kept.items() <= files_of(disk / 'rows').items()


def test_ids_that_the_model_does_not_know_are_refused_with_the_task(tmp_path):
  with raises(DataError):
    prepare_here('mixed', tmp_path, vocab_size=100)


def test_the_index_is_readable_without_us(mixed_rows):
  index = json.loads((mixed_rows / 'train' / 'index.json').read_text())
  shard = index['members']['mixed_a']['shards'][0]
  assert index['format'] == 1 and shard['rows'] > 0
  assert index['vocabularies']['targets']['fingerprint'] == 'byte, 259 ids'
  assert {'seqio', 'tensorflow', 'array-record'} <= index['versions'].keys()


@pytest.mark.slow
@pytest.mark.parametrize(
  'num_files, num_parts', [(8, 4), pytest.param(2, 4, marks=pytest.mark.slow)]
)
def test_the_bound_of_damage_is_judged_on_all_parts_together(tmp_path, num_files, num_parts):
  for i in range(num_files):
    lines = [f'{{"text": "row {j} of {i}"}}' for j in range(50)]
    lines[7] = 'broken'
    (tmp_path / f'{i}.jsonl').write_text('\n'.join(lines))
  name, rows = f'jsonl:{tmp_path}/*.jsonl', tmp_path / 'rows'
  # Each part by a reading of its own, as if each had a worker; some before, and some after a stop.
  for bound in (0.019, 0.019):
    assert (
      prepare_here(name, rows, num_parts=num_parts, stop_after=1, max_corrupt_fraction=bound)
      is None
    )
  with raises(DataError):
    prepare_here(name, rows, num_parts=num_parts, max_corrupt_fraction=0.019)
  assert not (rows / 'train' / 'index.json').exists()
  index = prepare_here(name, rows, num_parts=num_parts, max_corrupt_fraction=0.02)
  assert index.members['jsonl'].records == RecordCounts(50 * num_files, num_files)
  assert read_index(rows, split='train') == index
