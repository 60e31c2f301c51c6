"""Several processes use compiled programs of an earlier start only if all find them."""

import os
import platform
import subprocess
import sys
import types

import pytest

from t5x_gpu.runtime.cluster import jax_internals
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


ONE_START = """
import os
import jax
from t5x_gpu.runtime.xla import programs
programs.start_cache('cpu', num_devices=1, environ=os.environ)
assert jax.jit(lambda x: 2 * x + 1)(3.0) == 7
print(programs.cache_line())
"""


@pytest.mark.process
@pytest.mark.parametrize('left', [0, 100, -1], ids=['empty', 'start', 'without the last byte'])
def test_a_program_that_was_cut_off_is_compiled_once_and_replaced(tmp_path, left):
  env = {
    **os.environ,
    'XDG_CACHE_HOME': str(tmp_path),
    'JAX_PLATFORMS': 'cpu',
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'XLA_FLAGS': '',
  }

  def start():
    done = subprocess.run(
      [sys.executable, '-c', ONE_START], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, 'Error reading persistent compilation cache' in done.stderr

  first, warns = start()
  assert first.startswith('compiled programs: 0 of ') and not warns
  kept = {path: path.read_bytes() for path in (tmp_path / 't5x_gpu/xla').glob('*-cache')}
  for path, program in kept.items():
    path.write_bytes(program[:left])
  assert start() == (first, True)
  again, warns = start()
  number = first.split()[4]
  assert again.startswith(f'compiled programs: {number} of {number} ') and not warns


def test_only_a_program_that_cannot_be_read_is_deleted(tmp_path, monkeypatch):
  def read(cache_key):
    raise errors.pop()

  errors = [ValueError('cut off'), OSError('the file server')]
  cache = jax_internals._private('compilation_cache')
  monkeypatch.setattr(cache, 'get_executable_and_time', read)
  monkeypatch.setattr(cache, '_cache', types.SimpleNamespace(_path=tmp_path))
  for name in ('one', 'other'):
    (tmp_path / f'{name}-cache').touch()
  jax_internals.delete_unreadable_programs()
  for error in (OSError, ValueError):
    with pytest.raises(error):
      cache.get_executable_and_time(cache_key='one')
    assert (tmp_path / 'one-cache').exists() == (error is OSError)
  assert (tmp_path / 'other-cache').exists()


# What jax's keys contain of the devices (cache_key.get).
OF_DEVICES = """
import hashlib
import jax
import numpy as np
from jax._src import cache_key
found = hashlib.sha256()
cache_key._hash_accelerator_config(found, np.array(jax.devices()))
print(found.hexdigest())
"""


@pytest.mark.process
@pytest.mark.skipif(platform.machine() != 'x86_64', reason='the flag is about x86')
def test_keys_contain_the_instruction_sets_of_the_cpu():
  """So machines with different CPUs may share the folder of a home."""

  def of_devices(flags: str) -> str:
    env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags}
    return subprocess.check_output([sys.executable, '-c', OF_DEVICES], env=env, text=True)

  avx2, sse = (of_devices(f'--xla_cpu_max_isa={name}') for name in ('AVX2', 'SSE4_2'))
  assert avx2 != sse
  assert of_devices('--xla_cpu_max_isa=AVX2 --xla_backend_optimization_level=0') == avx2
