"""Opens the writers of a run that `LoggingConfig` selects."""

import ast
import functools
import logging
import os
import pathlib
from typing import Any

from t5x_gpu.config import provenance
from t5x_gpu.config.report import CONFIG, ORIGINS
from t5x_gpu.errors import ConfigError
from t5x_gpu.metrics.loggers import logging_config
from t5x_gpu.metrics.loggers.background import BackgroundWriter
from t5x_gpu.metrics.loggers.logging_config import LoggingConfig
from t5x_gpu.metrics.loggers.mlflow_client import MlflowClient
from t5x_gpu.metrics.loggers.run_ids import RunIds
from t5x_gpu.metrics.loggers.wandb_client import WandbClient
from t5x_gpu.metrics.writers import JsonLinesWriter, MetricWriter, TensorBoardWriter

METRICS = 'metrics.jsonl'
TENSORBOARD = 'tensorboard'
_log = logging.getLogger(__name__)


def open_loggers(
  config: LoggingConfig, folder: str | os.PathLike, *, run_name: str
) -> tuple[list[MetricWriter], list[BackgroundWriter]]:
  """Returns the writers for files, and the writers for services, which are not yet started.

  Args:
    config: selects the loggers.
    folder: folder of the run's files.
    run_name: name for services, unless `config` has a name.
  Raises:
    ConfigError: the metrics file cannot be opened.
  """
  files: list[MetricWriter] = []
  if config.has(logging_config.JSON_LINES):
    files.append(JsonLinesWriter(os.path.join(folder, METRICS)))
  if config.has(logging_config.TENSORBOARD):
    try:
      files.append(TensorBoardWriter(os.path.join(folder, TENSORBOARD)))
    except ConfigError as e:  # not installed; metrics.jsonl has the same numbers
      _log.warning('No TensorBoard files: %s', e)
  services = []
  if config.has(logging_config.WANDB) or config.has(logging_config.MLFLOW):
    ids, name = RunIds(folder), config.run_name or run_name
    shared = dict(run_name=name, settings=_settings(), files=_configuration_files(folder))
    if config.has(logging_config.WANDB):
      connect = functools.partial(WandbClient, config, ids, folder=folder, **shared)
      services.append(BackgroundWriter('W&B', connect))
    if config.has(logging_config.MLFLOW):
      services.append(
        BackgroundWriter('MLflow', functools.partial(MlflowClient, config, ids, **shared))
      )
  return files, services


def _settings() -> dict[str, Any]:
  """Returns the configuration values of this run by name, including defaults."""
  found = provenance.current()
  if found is None:
    return {}
  return {setting.key: _value(setting.value) for setting in (*found.settings, *found.defaults)}


def _value(text: str) -> Any:
  """Returns the number or text that `text` spells, so that services can sort by it."""
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text
  return value if isinstance(value, (int, float, str, bool, type(None))) else text


def _configuration_files(folder: str | os.PathLike) -> tuple[pathlib.Path, ...]:
  paths = [pathlib.Path(folder) / name for name in (CONFIG, ORIGINS)]
  return tuple(path for path in paths if path.is_file())
