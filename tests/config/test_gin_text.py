"""Statements of gin files, before anything is imported."""

import importlib

import pytest

from t5x_gpu.config import gin_text
from t5x_gpu.errors import ConfigError

CLASSES = {
  't5x_gpu.analysis.profile.profile_config': 'ProfileConfig',
  't5x_gpu.metrics.loggers.logging_config': 'LoggingConfig',
  't5x_gpu.models.preference.dpo': 'DpoModel',
  't5x_gpu.planning.assumptions': 'Assumptions',
  't5x_gpu.training.guards.spikes': 'SpikeConfig',
}


@pytest.mark.parametrize('old', sorted({*CLASSES, *gin_text.MOVED}))
@pytest.mark.parametrize('alias', ['', ' as other'])
def test_gin_files_of_older_versions_find_a_module_that_moved(old, alias):
  folder, _, name = old.rpartition('.')
  (statement,) = gin_text.read(f'from {folder} import {name}{alias}', shown='old.gin')
  assert statement.bound_name() == (alias.removeprefix(' as ') or name)
  assert hasattr(importlib.import_module(statement.module), CLASSES[old])


@pytest.mark.parametrize('character', ['\udcff', '\0'])
def test_a_line_with_a_character_that_no_python_reads_is_named(character):
  with pytest.raises(ConfigError, match=r'^bad\.gin:2 is not gin: '):
    list(gin_text.read(f'A = 1\nB = {character}\nC = 1\n', shown='bad.gin'))


def test_a_path_of_any_bytes_is_a_value_without_quotes():
  assert gin_text.parse_override('MODEL_DIR=run-\udcff').value == 'run-\udcff'


def test_brackets_without_end_on_the_command_line_are_an_error_of_ours():
  with pytest.raises(ConfigError):
    gin_text.parse_override('A=' + '[' * 5000)
