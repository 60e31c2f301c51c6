"""Statements of gin files, before anything is imported."""

import importlib

import pytest

from t5x_gpu.config import gin_text

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
