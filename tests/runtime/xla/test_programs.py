"""Several processes use compiled programs of an earlier start only if all find them."""

import os

import pytest

from tests.runtime.test_distributed import run_two


def start_two(tmp_path, *folders) -> list[dict]:
  """Returns what two processes found that keep compiled programs in these folders."""
  always = {'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
  envs = [{**always, 'JAX_COMPILATION_CACHE_DIR': str(folder)} for folder in folders]
  found = run_two(tmp_path, envs=envs, name='two_caches.py')
  assert [each['sum'] for each in found] == [6.0, 6.0]
  return sorted(found, key=lambda each: each['index'])


@pytest.mark.process
def test_the_second_start_reads_and_says_so(tmp_path):
  folder = tmp_path / 'programs'
  for hits in (0, 1):
    found = start_two(tmp_path, folder, folder)
    for each in found:
      assert each['folder'] == str(folder) and not each['warnings']
      assert each['counts'] == [hits, 1]
      assert each['line'].startswith(f'compiled programs: {hits} of 1 read from {folder}')
  assert not list(folder.glob('.shared*'))


@pytest.mark.process
def test_folders_that_are_not_shared_are_not_used(tmp_path):
  first, second = start_two(tmp_path, tmp_path / 'here', tmp_path / 'there')
  assert first['folder'] is None and second['folder'] is None and not first['line']
  (warning,) = first['warnings']
  assert 'process 1 (' in warning and f'writes to {tmp_path / "here"}' in warning
  assert 'JAX_COMPILATION_CACHE_DIR' in warning and not second['warnings']
  assert not [name for _, _, names in os.walk(tmp_path) for name in names]
