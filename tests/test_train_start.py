"""The cache of compiled programs, and `--precompile`."""

import collections
import logging
import shutil

import jax
import pytest

from t5x_gpu.runtime.xla import programs
from tests.helpers_train import Project, compiled_kept_in


@pytest.mark.slow
def test_precompile_trains_nothing_and_the_run_then_reads_its_programs(tmp_path):
  (tmp_path / 'own').mkdir()
  project = Project(tmp_path / 'own')  # a separate compilation cache
  done = project.run('--precompile', num_devices=1, PRECISION='fp8')
  assert done.code == 0, done
  assert 'precision: fp8, emulated' in done.out
  assert 'Compiled, without training:' in done.out and '  training step: ' in done.out
  assert not project.model_dir.exists()
  done = project.run(num_devices=1, TRAIN_STEPS=1, PRECISION='fp8')
  assert done.code == 0, done
  found = programs._counts
  assert found['cache_hits'] >= 2 and 'compiled programs: ' in done.out


def test_precompile_without_a_cache_is_an_error_that_names_the_setting(tmp_path):
  project = Project(tmp_path)
  before = jax.config.jax_enable_compilation_cache
  jax.config.update('jax_enable_compilation_cache', False)
  try:
    done = project.run('--precompile', num_devices=1)
  finally:
    jax.config.update('jax_enable_compilation_cache', before)
  assert done.code == 1 and 'JAX_COMPILATION_CACHE_DIR' in done.out + done.err
  assert not project.model_dir.exists()


@pytest.fixture
def no_folder():
  before = jax.config.jax_compilation_cache_dir
  jax.config.update('jax_compilation_cache_dir', None)
  yield
  jax.config.update('jax_compilation_cache_dir', before)


def test_the_cache_is_in_the_cache_folder_of_the_user_on_gpus_and_off_on_cpu(tmp_path, no_folder):
  environ = {'XDG_CACHE_HOME': str(tmp_path)}
  programs.start_cache('cpu', environ=environ)
  assert programs.cache_folder() is None and programs.cache_line() == ''
  assert not list(tmp_path.iterdir())
  programs.start_cache('gpu', environ=environ)
  assert programs.cache_folder() == str(tmp_path / 't5x_gpu/xla')
  assert (tmp_path / 't5x_gpu/xla').stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, no_folder, caplog):
  (tmp_path / 't5x_gpu').write_text('a file where the folder should be')
  with caplog.at_level(logging.WARNING):
    programs.start_cache('gpu', environ={'XDG_CACHE_HOME': str(tmp_path)})
  assert programs.cache_folder() is None
  assert 'every start compiles' in caplog.text and 'JAX_COMPILATION_CACHE_DIR' in caplog.text


def compiled_in(folder) -> collections.Counter:
  """Returns what jax counted while it compiled a program with this folder."""
  with compiled_kept_in(folder):
    programs.start_cache('cpu', environ={})
    jax.jit(lambda x: x * 2 + 1).lower(1.0).compile()
  return +programs._counts


def test_a_copy_of_the_folder_at_another_path_has_the_same_programs(tmp_path):
  assert compiled_in(tmp_path / 'here')['cache_misses'] == 1
  shutil.copytree(tmp_path / 'here', tmp_path / 'there')
  assert compiled_in(tmp_path / 'there')['cache_hits'] == 1


def test_the_line_names_the_process_that_compiled_most(tmp_path, monkeypatch):
  of_processes = [[13, 13]] * 4
  monkeypatch.setattr(programs.distributed, 'gather_json', lambda _: of_processes)
  with compiled_kept_in(tmp_path):
    programs.start_cache('cpu', environ={})
    line = programs.cache_line()
    assert line == f'compiled programs: 13 of 13 read from {tmp_path}, which saved 0 s'
    of_processes[2:] = [[12, 13], [0, 13]]
    assert programs.cache_line() == f'{line}; process 3 read 0 of 13'
