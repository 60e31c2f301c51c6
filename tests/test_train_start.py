"""The cache of compiled programs, and `--precompile`."""

import collections
import logging
import re
import shutil

import jax
import pytest

from t5x_gpu import train
from t5x_gpu.runtime.xla import programs
from tests.helpers_train import Project, compiled_kept_in, run_here


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


@pytest.mark.parametrize('platform, num_devices', [('gpu', 8), ('gpu', 1), ('cpu', 1)])
def test_the_cache_is_in_the_cache_folder_of_the_user(tmp_path, no_folder, platform, num_devices):
  environ = {'XDG_CACHE_HOME': str(tmp_path)}
  programs.start_cache(platform, num_devices=num_devices, environ=environ)
  assert programs.cache_folder() == str(tmp_path / 't5x_gpu/xla')
  assert (tmp_path / 't5x_gpu/xla').stat().st_mode & 0o777 == 0o700


def test_the_cache_is_off_on_several_cpu_devices(tmp_path, no_folder):
  programs.start_cache('cpu', num_devices=2, environ={'XDG_CACHE_HOME': str(tmp_path)})
  assert programs.cache_folder() is None and programs.cache_line() == ''
  assert not list(tmp_path.iterdir())


def test_the_setting_of_jax_turns_the_cache_off(tmp_path, no_folder):
  before = jax.config.jax_enable_compilation_cache
  jax.config.update('jax_enable_compilation_cache', False)
  try:
    programs.start_cache('cpu', num_devices=1, environ={'XDG_CACHE_HOME': str(tmp_path)})
    assert programs.cache_folder() is None
  finally:
    jax.config.update('jax_enable_compilation_cache', before)
  assert not list(tmp_path.iterdir())


# `Project.start` names a folder; users do not.
AS_USERS = """
import os
os.environ.pop('JAX_COMPILATION_CACHE_DIR')
from t5x_gpu import cli, train
cli.run_main(train.main)
"""


@pytest.mark.process
def test_a_second_start_on_one_cpu_device_reads_its_programs_and_gives_the_same_bits(
  tmp_path, monkeypatch
):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  folder = tmp_path / 'cache/t5x_gpu/xla'
  project = Project(tmp_path)
  curves, lines, kept = [], [], []
  for name in ('first', 'second'):
    options = dict(MODEL_DIR=tmp_path / name, TRAIN_STEPS=4, EVAL_PERIOD=2)
    with project.start(script=AS_USERS, **options) as run:
      assert run.finish() == 0, run.err
    lines += re.findall(r'compiled programs: .*', run.out)
    keys = ('train/loss', 'train/grad_norm', 'eval/loss')
    curves.append([project.metrics(key, model_dir=tmp_path / name) for key in keys])
    kept.append(sorted(path.name for path in folder.iterdir()))
  first, second = lines
  assert first == f'compiled programs: 0 of 3 read from {folder}'
  assert second.startswith(f'compiled programs: 3 of 3 read from {folder}')
  assert curves[0] == curves[1] and len(curves[0][0]) == 4
  assert kept[0] == kept[1]


def test_a_run_on_several_cpu_devices_has_no_cache(tmp_path, monkeypatch, no_folder):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  done = run_here(lambda: train.main(Project(tmp_path).argv('--dry_run')))
  assert done.code == 0, done.err
  assert programs.cache_folder() is None and not (tmp_path / 't5x_gpu/xla').exists()


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, no_folder, caplog):
  (tmp_path / 't5x_gpu').write_text('a file where the folder should be')
  with caplog.at_level(logging.WARNING):
    programs.start_cache('cpu', num_devices=1, environ={'XDG_CACHE_HOME': str(tmp_path)})
  assert programs.cache_folder() is None
  assert 'every start compiles' in caplog.text and 'JAX_COMPILATION_CACHE_DIR' in caplog.text


def compiled_in(folder) -> collections.Counter:
  """Returns what jax counted while it compiled a program with this folder."""
  with compiled_kept_in(folder):
    programs.start_cache('cpu', num_devices=8, environ={})
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
    programs.start_cache('cpu', num_devices=8, environ={})
    line = programs.cache_line()
    assert line == f'compiled programs: 13 of 13 read from {tmp_path}, which saved 0 s'
    of_processes[2:] = [[12, 13], [0, 13]]
    assert programs.cache_line() == f'{line}; process 3 read 0 of 13'
