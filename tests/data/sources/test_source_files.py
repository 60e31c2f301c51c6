"""Source files that changed between two starts of a run are found by times, blocks or all bytes."""

import errno
import json
import os
import shutil
import time
from unittest import mock

import pytest

from t5x_gpu.data.sources import source_files
from t5x_gpu.data.sources.source_files import NAME, FileWatch, SourceFile, SourceFiles
from t5x_gpu.errors import DataError
from tests.messages import raises

MEGABYTE = bytes(range(256)) * 4096


@pytest.fixture(name='folder')
def _folder(tmp_path):
  """One file of 1 MB and one of a few bytes."""
  folder = tmp_path / 'text'
  folder.mkdir()
  (folder / 'large.txt').write_bytes(MEGABYTE)
  (folder / 'small.txt').write_bytes(b'a few bytes')
  return folder


def files(folder):
  return SourceFiles({'task': sorted(map(str, folder.iterdir()))})


def record_with_all_hashes(folder, model_dir):
  """What a run leaves that had the time to hash everything."""
  model_dir.mkdir()
  run = files(folder)
  with run.kept_in(model_dir):
    deadline = time.monotonic() + 60
    while not all(file.sha256 for file in run.files.values()):
      assert time.monotonic() < deadline
      time.sleep(0.002)
  return (model_dir / NAME).read_bytes()


def overwrite(path, *, at, keep_times=False):
  before = path.stat()
  with open(path, 'rb+') as f:
    f.seek(at)
    f.write(b'changed')
  if keep_times:
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
  else:
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))


def refusal(folder, record):
  with raises(DataError) as e:
    files(folder).check(record, where='model/' + NAME)
  return str(e.value)


def test_the_same_files_pass_with_and_without_hashes(folder, tmp_path):
  files(folder).check(files(folder).to_json(), where='')
  files(folder).check(record_with_all_hashes(folder, tmp_path / 'model'), where='')


@pytest.mark.parametrize('at', [0, 200_000, len(MEGABYTE) - 7])
def test_bytes_overwritten_anywhere_are_refused(folder, tmp_path, at):
  record = record_with_all_hashes(folder, tmp_path / 'model')
  overwrite(folder / 'large.txt', at=at)
  refusal(folder, record)


def test_a_forged_modification_time_does_not_hide_a_change(folder, tmp_path):
  record = record_with_all_hashes(folder, tmp_path / 'model')
  overwrite(folder / 'large.txt', at=200_000, keep_times=True)
  refusal(folder, record)


def test_a_file_of_few_bytes_is_compared_in_full_from_the_start(folder):
  record = files(folder).to_json()
  overwrite(folder / 'small.txt', at=3, keep_times=True)
  refusal(folder, record)


def test_another_size_is_named(folder):
  record = files(folder).to_json()
  (folder / 'small.txt').write_bytes(b'more than a few bytes')
  refusal(folder, record)


def test_copies_and_touched_files_pass_by_their_hashes(folder, tmp_path, caplog):
  record = record_with_all_hashes(folder, tmp_path / 'model')
  shutil.copytree(folder, tmp_path / 'elsewhere', copy_function=shutil.copyfile)
  moved = files(tmp_path / 'elsewhere')
  moved.check(record, where='')
  assert '1 source files (0.00105 GB) have modification times' in caplog.text
  assert all(file.sha256 for file in moved.files.values())  # the next restart has them, too


def test_a_touched_file_without_a_hash_is_refused_with_what_to_do(folder):
  record = files(folder).to_json()
  os.utime(folder / 'large.txt', ns=(0, 10**18))
  refusal(folder, record)


def test_a_copy_with_the_same_modification_times_is_not_hashed(folder, tmp_path):
  record = files(folder).to_json()
  shutil.copytree(folder, tmp_path / 'elsewhere')  # as cp -a
  files(tmp_path / 'elsewhere').check(record, where='')


def test_a_file_written_to_during_the_run_is_reported_and_refused(folder, tmp_path, caplog):
  run = files(folder)
  overwrite(folder / 'large.txt', at=200_000)
  with run.kept_in(tmp_path):
    deadline = time.monotonic() + 60
    while 'has changed since this run began' not in caplog.text:
      assert time.monotonic() < deadline
      time.sleep(0.002)
  refusal(folder, (tmp_path / NAME).read_bytes())


def test_hashing_stops_with_the_run_and_continues_in_the_next(folder, tmp_path, monkeypatch):
  monkeypatch.setattr(source_files, '_BYTES_PER_SECOND', 1)  # a block takes eleven days
  run = files(folder)
  with run.kept_in(tmp_path):
    pass
  record = (tmp_path / NAME).read_bytes()
  assert [bool(f[4]) for f in json.loads(record)['tasks']['task'].values()] == [False, True]
  monkeypatch.undo()
  again = files(folder)
  again.check(record, where='')
  assert record_with_all_hashes(folder, tmp_path / 'next') != record


def test_a_changed_file_of_an_evaluation_is_named_and_not_refused(folder, tmp_path):
  def with_evaluation():
    found = SourceFiles({'task': [str(folder / 'large.txt')]})
    found.add_evaluation(files(folder))
    found.add_evaluation(files(folder))  # a task with metrics reads the same file
    return found

  before = with_evaluation().to_json()
  assert with_evaluation().changed_evaluation(before) == []
  (folder / 'small.txt').write_bytes(b'a FEW bytes')
  (folder / 'other.txt').write_bytes(b'more')
  now = with_evaluation()
  now.check(before, where=NAME)
  assert now.changed_evaluation(before) == [
    f'{folder}/other.txt: new',
    f'{folder}/small.txt: same size, different bytes',
  ]
  (folder / 'small.txt').unlink()
  assert 'small.txt: no longer there' in with_evaluation().changed_evaluation(before)
  assert with_evaluation().changed_evaluation(b'damaged') == []
  overwrite(folder / 'large.txt', at=0)
  assert 'large.txt' not in str(with_evaluation().changed_evaluation(before))
  with pytest.raises(DataError, match=r'large\.txt: same size, different bytes'):
    with_evaluation().check(before, where=NAME)


def test_remote_objects_are_compared_by_size_and_time():
  def stored(modified_ns):
    return SourceFiles({'task': ['gs://b/a']}, stat_remote=lambda path: SourceFile(7, modified_ns))

  stored(1).check(stored(1).to_json(), where='')
  with raises(DataError):
    stored(2).check(stored(1).to_json(), where='')


@pytest.mark.parametrize(
  'damage',
  [
    b'',
    b'{',
    b'[]',
    b'\xff',
    b'[' * 100_000,
    b'{"version": 2}',
    b'{"version": 1, "tasks": {"task": {"large.txt": [1]}}}',
    b'{"version": 1, "tasks": {"task": 3}}',
  ],
)
def test_a_damaged_record_is_reported_and_stops_nothing(folder, damage, caplog):
  files(folder).check(damage, where='model/' + NAME)
  assert 'model/source_files.json is damaged' in caplog.text


# ---- While a run trains --------------------------------------------------------------------------


def test_a_file_that_is_written_replaced_or_removed_is_noticed_at_the_next_look(folder):
  for change, says in (
    (lambda path: path.write_bytes(b'more than a few bytes'), '11 bytes at the start, 21 now'),
    (lambda path: os.utime(path, ns=(0, 10**18)), 'written during the run'),
    (lambda path: replace(path, b'A few bytes'), 'replaced by another file'),
    (lambda path: path.unlink(), 'it no longer exists'),
  ):
    (folder / 'small.txt').write_bytes(b'a few bytes')
    watch = FileWatch([*map(str, sorted(folder.iterdir())), 'gs://not/looked/at'])
    assert watch.look(3, now=True) == [] and watch.unchanged_at == 3
    change(folder / 'small.txt')
    [line] = watch.look(4, now=True)
    assert line == f'{folder / "small.txt"}: {says}' and watch.unchanged_at == 3
  assert FileWatch().look(5) == []


def replace(path, content):
  """Makes another file, with the same times, of `path`."""
  new = path.with_suffix('.new')
  new.write_bytes(content)
  shutil.copystat(path, new)
  os.replace(new, path)


def test_the_same_file_with_another_inode_is_not_a_change(folder):
  watch = FileWatch(map(str, folder.iterdir()))
  for name in ('large.txt', 'small.txt'):
    path = folder / name
    before = path.stat().st_ino
    replace(path, path.read_bytes())
    assert path.stat().st_ino != before
  assert watch.look(1, now=True) == [] and watch.unchanged_at == 1
  replace(folder / 'large.txt', b'?' + MEGABYTE[1:])
  [line] = watch.look(2, now=True)
  assert line.endswith('large.txt: replaced by another file')


def test_an_outage_of_the_storage_is_not_a_change(folder, monkeypatch):
  watch = FileWatch([str(folder / 'small.txt')])
  stale = OSError(errno.ESTALE, 'Stale file handle')
  monkeypatch.setattr(source_files.os, 'stat', mock.Mock(side_effect=stale))
  assert watch.look(1, now=True) == []
