"""A path means what the system takes it for, links and `..` included."""

import pytest

from t5x_gpu.errors import ConfigError
from t5x_gpu.storage.paths import as_path
from t5x_gpu.storage.user_paths import expanded_path, user_path, without_dots
from tests.messages import raises


@pytest.mark.parametrize('kept', ['a/b', 'link/b', 'a b/[1]*?', '~x', 'a/...', '%20'])
def test_a_path_without_dots_only_becomes_absolute(tmp_path, monkeypatch, kept):
  (tmp_path / 'real').mkdir()
  (tmp_path / 'link').symlink_to('real')
  monkeypatch.chdir(tmp_path)
  assert str(user_path(f'./{kept}')) == f'{tmp_path}/{kept}'


@pytest.mark.parametrize(
  'given', ['link/../b', 'link/../../c/deep/../d', 'c/link2/..', '../here/./b', 'c/deep/../../b']
)
def test_dots_lead_where_the_system_leads(tmp_path, monkeypatch, given):
  here = tmp_path / 'here'
  for folder in (here / 'c' / 'deep', here / 'other' / 'target', here / 'b', tmp_path / 'c/deep'):
    folder.mkdir(parents=True, exist_ok=True)
  (here / 'link').symlink_to('other/target')
  (here / 'c' / 'link2').symlink_to('../other/target')
  monkeypatch.chdir(here)
  path = user_path(given)
  assert '..' not in path.parts and path.is_absolute()
  path.mkdir(exist_ok=True)
  assert path.samefile(given)


@pytest.mark.parametrize('given', ['a/b', '/a//b', '', '~/a', 'a..b/...', 'gs://bucket/../a'])
def test_a_path_without_dots_and_an_address_stay_as_they_are(given):
  assert without_dots(given) == given


def test_a_path_without_meaning_is_refused():
  for text in ('', 'a\0b', '~no-such-user-here/a'):
    with raises(ConfigError):
      user_path(text)
  with raises(ConfigError):
    expanded_path('~no-such-user-here/a')


@pytest.mark.parametrize('given, path', [('~/a', 'HOME/a'), ('a/~', 'a/~'), ('./~a', 'HOME/~a')])
def test_a_home_folder_is_expanded_once(tmp_path, monkeypatch, given, path):
  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.chdir(tmp_path)
  once = expanded_path(given)
  assert str(once) == path.replace('HOME', str(tmp_path))
  assert expanded_path(once) == once


@pytest.mark.parametrize('name', [300 * 'a', f'new/{128 * "é"}/b', 2048 * 'a/'])
def test_a_path_that_is_longer_than_the_system_allows_is_refused_with_the_limit(tmp_path, name):
  with pytest.raises(ConfigError, match='too long'):
    as_path(tmp_path / name)
  assert as_path(tmp_path / ('a' * 255))


@pytest.mark.parametrize('name', ['a\\b', 'a.__lock', 'a.__lock/b', 'not-utf8-\udcff', 'z\\'])
def test_a_folder_in_which_tensorstore_would_lose_files_is_refused(tmp_path, name):
  with raises(ConfigError):
    as_path(f'{tmp_path}/{name}')


def test_addresses_lose_their_dots_but_not_their_bucket():
  assert str(as_path('gs://bucket/runs/./a/../b/')) == 'gs://bucket/runs/b'
  for text in ('s3://bucket/a/..', 's3://bucket/../other/a', 's3://bucket/a/../../b'):
    with raises(ConfigError):
      as_path(text)
