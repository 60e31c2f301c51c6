"""The cache of compiled programs, and `--precompile`."""

import logging

import jax
import pytest

from t5x_gpu.runtime.xla import programs
from tests.helpers_train import Project


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
