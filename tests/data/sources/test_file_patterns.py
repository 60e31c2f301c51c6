"""A pattern matches each real file once, loops of links end, unreadable files are named."""

import contextlib
import errno
import glob
import os
import pathlib
import tempfile
from unittest import mock

import pytest

from t5x_gpu.data.sources import discovery
from t5x_gpu.data.sources.discovery import find_files
from t5x_gpu.errors import DataError
from tests.messages import raises


@pytest.fixture(name='tree')
def _tree(tmp_path, monkeypatch):
  for name in ('a.txt', 'b/c.txt', 'b/d/e.txt', 'b/d/f.md', '.hidden/g.txt', 'b[1]/h.txt'):
    path = tmp_path / 'tree' / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(name)
  monkeypatch.chdir(tmp_path)
  return pathlib.Path('tree')


@pytest.mark.parametrize(
  'pattern',
  [
    'tree/**/*.txt',
    'tree/**',
    '**/*.txt',
    '**',
    'tree/*',
    'tree/b/**/d/*',
    '**/d/**/e.txt',
    'tree/**/**/*.txt',
    'tree/b*/*.txt',
    'tree/[ab]/c.txt',
    'none/**',
    'tree/**/none',
  ],
)
@pytest.mark.parametrize('absolute', [False, True])
def test_without_links_it_is_what_glob_finds(tree, pattern, absolute):
  pattern = os.path.join(os.getcwd(), pattern) if absolute else pattern
  assert find_files(pattern) == sorted(
    {path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)}
  )


@pytest.mark.parametrize('pattern', ['tree/**/*.txt', 'tree/**', 'tree'])
def test_links_to_folders_around_them_add_nothing_and_are_named(tree, pattern, caplog):
  want = discovery.matching_files(pattern)
  assert not caplog.text
  for name in ('loop', 'b/loop', 'b/up', 'b/d/up'):  # glob would not end within a day
    (tree / name).symlink_to(os.path.abspath('tree'))
  assert discovery.matching_files(pattern) == want
  assert 'skipped 4 names' in caplog.text and 'tree/b/d/up -> ' in caplog.text


def test_a_file_with_several_names_is_taken_once_under_the_real_one(tree, caplog):
  (tree / 'A.txt').symlink_to('b/c.txt')  # sorts first
  (tree / 'aa').symlink_to('b')
  os.link(tree / 'a.txt', tree / 'z.txt')
  (tree / 'gone.txt').symlink_to('nowhere')
  (tree / 'self').symlink_to('self')
  assert find_files('tree/**/*.txt') == [
    'tree/a.txt',
    'tree/b/c.txt',
    'tree/b/d/e.txt',
    'tree/b[1]/h.txt',
  ]
  assert 'skipped 4 names' in caplog.text and 'tree/A.txt -> b/c.txt' in caplog.text


def test_links_with_endings_stand_for_blobs_without(tmp_path):
  """As in Hugging Face's cache of a dataset."""
  for name in ('blobs', 'snapshots/0', 'snapshots/1'):
    (tmp_path / name).mkdir(parents=True)
  (tmp_path / 'blobs/9f3a').write_text('{"text": "a"}')
  for number in (0, 1):
    (tmp_path / f'snapshots/{number}/train.jsonl').symlink_to('../../blobs/9f3a')
  assert discovery.matching_files(str(tmp_path)) == [f'{tmp_path}/snapshots/0/train.jsonl']


def test_links_to_what_is_elsewhere_are_followed(tree, tmp_path, caplog):
  (tmp_path / 'other/inner').mkdir(parents=True)
  (tmp_path / 'other/inner/x.txt').write_text('x')
  (tree / 'link').symlink_to(tmp_path / 'other')
  assert 'tree/link/inner/x.txt' in find_files('tree/**/*.txt') and not caplog.text


@contextlib.contextmanager
def another_user():
  """Within, this process has only the rights of a user without files; root could read all."""
  if os.geteuid():
    yield
    return
  os.seteuid(65534)
  try:
    yield
  finally:
    os.seteuid(0)


@pytest.fixture(name='open_folder')
def _open_folder():
  """A folder that any user may enter; pytest's own are for one user."""
  with tempfile.TemporaryDirectory() as folder:
    os.chmod(folder, 0o755)
    yield pathlib.Path(folder)


@pytest.mark.parametrize('locked', ['closed/b.txt', 'closed'])
def test_a_file_or_folder_that_cannot_be_read_is_named(open_folder, locked):
  (open_folder / 'closed').mkdir()
  (open_folder / 'a.txt').write_text('a')
  (open_folder / 'closed/b.txt').write_text('b')
  os.chmod(open_folder / locked, 0)
  with another_user(), raises(DataError):
    discovery.matching_files(f'{open_folder}/**/*.txt')
  os.chmod(open_folder / locked, 0o755)
  os.chmod(open_folder / 'a.txt', 0)
  with another_user(), raises(DataError):
    discovery.fingerprint([str(open_folder / 'a.txt')])


@pytest.mark.parametrize('mode', [0, 0o644])
@pytest.mark.parametrize('pattern', ['*/*.txt', '**/*.txt', '**', 'b/1.txt', 'b/**/*.txt'])
def test_no_pattern_skips_a_folder_that_cannot_be_entered(open_folder, pattern, mode):
  for name in 'abc':
    (open_folder / name).mkdir()
    (open_folder / name / '1.txt').write_text(name)
  os.chmod(open_folder / 'b', mode)
  with another_user(), raises(DataError):
    discovery.matching_files(f'{open_folder}/{pattern}')


def test_a_folder_above_that_may_be_entered_but_not_listed_is_fine(open_folder):
  (open_folder / 'home/me').mkdir(parents=True)
  (open_folder / 'home/me/1.txt').write_text('1')
  os.chmod(open_folder / 'home', 0o711)
  with another_user():
    assert discovery.matching_files(f'{open_folder}/home/me/*.txt') == [
      f'{open_folder}/home/me/1.txt'
    ]


def test_a_volume_with_lost_and_found_is_accepted(open_folder):
  (open_folder / 'lost+found').mkdir(mode=0)
  (open_folder / 'a.txt').write_text('a')
  with another_user():
    assert discovery.matching_files(str(open_folder)) == [f'{open_folder}/a.txt']


def test_a_file_that_opens_is_readable_whatever_access_says(tree, monkeypatch):
  # Docker before 20.10 answers EPERM to faccessat2, which glibc's faccessat calls.
  monkeypatch.setattr(os, 'access', lambda *args, **kwargs: False)
  assert find_files('tree/*.txt') == ['tree/a.txt']


@pytest.mark.parametrize(
  'given, found',
  [
    ('set[1]', ['set[1]/a.txt']),
    ('set[1]/*.txt', ['set[1]/a.txt']),
    ('set[1]/**', ['set[1]/a.txt']),
    ('set[1]/a.txt', ['set[1]/a.txt']),
    ('what?.txt', ['what?.txt']),
    ('*.txt', ['what1.txt', 'what?.txt']),
    ('**/a*.txt', ['set1/a.txt', 'set[1]/a.txt']),
    ('set[12]/a.txt', ['set1/a.txt']),
  ],
)
def test_a_path_that_exists_is_itself_and_not_a_pattern(tmp_path, monkeypatch, given, found):
  for name in ('set[1]/a.txt', 'set1/a.txt', 'what?.txt', 'what1.txt'):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(name)
  monkeypatch.chdir(tmp_path)
  assert discovery.matching_files(given) == found


@pytest.mark.parametrize('name', ['a.txt', 'inner'])
def test_a_file_whose_server_does_not_answer_does_not_vanish_from_the_data(tmp_path, name):
  for file in ('a.txt', 'b.txt', 'inner/c.txt'):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(file)
  real_stat = os.stat

  def fail(path, *args, **kwargs):
    if os.fspath(path).endswith(name):
      raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), os.fspath(path))
    return real_stat(path, *args, **kwargs)

  with mock.patch.object(os, 'stat', fail), raises(DataError):
    find_files(f'{tmp_path}/**')


@pytest.mark.parametrize('pattern', ['link/../*.txt', 'link/../**', '*/../b.txt'])
def test_files_behind_links_and_dots_have_names_that_tensorflow_opens(
  tmp_path, monkeypatch, pattern
):
  """TensorFlow takes `link/..` for the folder that holds the link."""
  (tmp_path / 'disk' / 'deep').mkdir(parents=True)
  (tmp_path / 'link').symlink_to('disk/deep')
  (tmp_path / 'disk' / 'b.txt').write_text('right')
  (tmp_path / 'b.txt').write_text('of another folder')
  monkeypatch.chdir(tmp_path)
  found = find_files(pattern)
  assert str(tmp_path / 'disk' / 'b.txt') in found
  assert not any('..' in path.split(os.sep) for path in found)
