"""MLflow: https://mlflow.org/docs/latest/tracking."""

import importlib
import os
import pathlib
import re
import time
from collections.abc import Mapping
from typing import Any

from t5x_gpu.metrics.loggers.logging_config import MLFLOW, LoggingConfig
from t5x_gpu.metrics.loggers.run_ids import RunIds

_PARAMS_PER_CALL = 100  # MLflow's limit
_MOST_CHARACTERS = 500  # maximum length of a parameter's value that every store accepts
_NOT_IN_KEYS = re.compile(r'[^\w\-./ ]')


class MlflowClient:
  """One run in MLflow, with the configuration of this run and its files.

  Args:
    config: project, and name of the run.
    ids: stores the id of the run.
    run_name: name shown by MLflow.
    settings: configuration values by name; MLflow never changes the values of an existing run.
    files: files to upload at every start.
  """

  def __init__(
    self,
    config: LoggingConfig,
    ids: RunIds,
    *,
    run_name: str,
    settings: Mapping[str, Any],
    files: tuple[pathlib.Path, ...],
  ):
    mlflow = importlib.import_module('mlflow')
    self._entities = importlib.import_module('mlflow.entities')
    self._client = mlflow.MlflowClient(tracking_uri=config.mlflow_tracking_uri)
    run_id = ids.get(MLFLOW)
    if run_id is None:
      run_id = self._new_run(config.project, run_name, settings)
      ids.keep(MLFLOW, run_id)
    self._run_id = run_id
    self._client.set_terminated(run_id, 'RUNNING')
    for path in files:
      self._client.log_artifact(run_id, os.fspath(path))

  def _new_run(self, project: str, run_name: str, settings: Mapping[str, Any]) -> str:
    client = self._client
    experiment = client.get_experiment_by_name(project)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(project)
    run_id = client.create_run(experiment_id, run_name=run_name).info.run_id
    params = [
      self._entities.Param(_NOT_IN_KEYS.sub('_', name), str(value)[:_MOST_CHARACTERS])
      for name, value in settings.items()
    ]
    for first in range(0, len(params), _PARAMS_PER_CALL):
      client.log_batch(run_id, params=params[first : first + _PARAMS_PER_CALL])
    return run_id

  def log(self, step: int, values: Mapping[str, float]) -> None:
    now = time.time_ns() // 1_000_000
    self._client.log_batch(
      self._run_id,
      metrics=[
        self._entities.Metric(_NOT_IN_KEYS.sub('_', name), value, now, step)
        for name, value in values.items()
      ],
    )

  def close(self, *, failed: bool) -> None:
    self._client.set_terminated(self._run_id, 'FAILED' if failed else 'FINISHED')
