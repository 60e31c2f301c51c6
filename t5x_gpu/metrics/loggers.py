"""Sends metrics to W&B and MLflow from a separate thread, and never stops the run.

`open_loggers` opens the writers that `LoggingConfig` selects: files, and a `BackgroundWriter` for
each service. `RunIds` keeps the run's ids at the services in MODEL_DIR, so that a resumed run
continues them. Printed errors are `redacted`: without keys and passwords.
"""

import ast
import collections
import functools
import importlib
import json
import logging
import os
import pathlib
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Optional, Protocol, Self, Union

from t5x_gpu.config import provenance
from t5x_gpu.config.report import CONFIG, ORIGINS
from t5x_gpu.errors import ConfigError, first_line
from t5x_gpu.metrics import logging_config
from t5x_gpu.metrics.logging_config import MLFLOW, WANDB, LoggingConfig
from t5x_gpu.metrics.writers import METRICS, JsonLinesWriter, MetricWriter, TensorBoardWriter
from t5x_gpu.storage.files import set_aside_damaged, write_atomically
from t5x_gpu.storage.json_schema import MapOf, Text, read_json

_log = logging.getLogger(__name__)

Scalar = Union[int, float, str, bool, None]  # a setting, as services show it

FILE = 'loggers.json'
_IDS = MapOf(Text(r'[A-Za-z0-9_-]{1,128}'))


class RunIds:
  """Logger name -> id of the run at the service.

  Args:
    folder: MODEL_DIR. A damaged file in it is renamed, with a warning.
  """

  def __init__(self, folder: str | os.PathLike):
    self._path = pathlib.Path(folder) / FILE
    self._ids: dict[str, str] = {}
    if os.path.lexists(self._path):
      try:
        self._ids = read_json(self._path, _IDS)
      except (ValueError, OSError) as e:
        set_aside_damaged(self._path, e, '; W&B and MLflow will show a new run')

  def get(self, logger: str) -> str | None:
    """Returns the id of this run at `logger`; None for a new run."""
    return self._ids.get(logger)

  def keep(self, logger: str, run_id: str) -> None:
    """Writes the id of this run at `logger`."""
    self._ids[logger] = run_id
    write_atomically(self._path, json.dumps(self._ids, indent=1) + '\n')


# MLflow: https://mlflow.org/docs/latest/tracking
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
    settings: Mapping[str, Scalar],
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

  def _new_run(self, project: str, run_name: str, settings: Mapping[str, Scalar]) -> str:
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


_SECRET_NAME = re.compile(r'KEY|TOKEN|PASSWORD|SECRET', re.IGNORECASE)
_LEAST_LENGTH = 6  # shorter values would also remove ordinary words
_IN_URL = re.compile(r'(://)[^/\s@]+@')


def redacted(text: str) -> str:
  """Returns `text` without values of secret environment variables or passwords in URLs."""
  for name, value in os.environ.items():
    if len(value) >= _LEAST_LENGTH and _SECRET_NAME.search(name):
      text = text.replace(value, f'[{name}]')
  return _IN_URL.sub(r'\1[password]@', text)


CAPACITY = 10_000  # maximum number of records queued for a service that is down; about 10 MB
CLOSE_SECONDS = 30.0
_LONGEST_WAIT = 60.0


class Client(Protocol):
  """A connection to a service. Any method may raise or block."""

  def log(self, step: int, values: Mapping[str, float]) -> None:
    """Sends numbers."""

  def close(self, *, failed: bool) -> None:
    """Ends the run at the service."""


class BackgroundWriter:
  """A MetricWriter in front of a `Client`. Use it as a context manager.

  A failed client is retried after 1, 2, 4, ... 60 s, with one warning. Records wait in memory;
  beyond `capacity` the oldest record is dropped. metrics.jsonl has all records.

  Args:
    name: name of the service, for messages.
    connect: returns the client; called in the thread.
    capacity: maximum number of waiting records.
    close_seconds: how long the end of the run waits for queued records.
    first_wait: seconds until the first retry.
  """

  def __init__(
    self,
    name: str,
    connect: Callable[[], Client],
    *,
    capacity: int = CAPACITY,
    close_seconds: float = CLOSE_SECONDS,
    first_wait: float = 1.0,
  ):
    self._name, self._connect = name, connect
    self._close_seconds, self._first_wait = close_seconds, first_wait
    self._records: collections.deque[tuple[int, dict[str, float]]] = collections.deque(
      maxlen=capacity
    )
    self._changed = threading.Condition()
    self._closing = self._failed = self._closed = False
    self._stop_waiting = threading.Event()
    self.num_sent = self.num_lost = 0
    self._thread = threading.Thread(target=self._work, name=f'logger_{name}', daemon=True)

  def __enter__(self) -> Self:
    self._thread.start()
    return self

  def __exit__(self, kind: Optional[type[BaseException]], *rest: object) -> None:
    self._failed = kind is not None
    self.close()

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Queues one record; never blocks."""
    with self._changed:
      self.num_lost += len(self._records) == self._records.maxlen
      self._records.append((step, {name: float(value) for name, value in values.items()}))
      self._changed.notify()

  def truncate_after(self, step: int) -> None:
    """Does nothing: a service keeps its records; repeated steps are written again."""

  def flush(self) -> None:
    """Does nothing: the thread sends records as soon as it can."""

  def close(self) -> None:
    """Sends queued records, for at most `close_seconds`."""
    if self._closed:
      return
    self._closed = True
    with self._changed:
      self._closing = True
      self._changed.notify()
    self._stop_waiting.set()
    if self._thread.ident is not None:
      self._thread.join(self._close_seconds)
    lost = self.num_lost + len(self._records)
    if lost:
      _log.warning(
        '%s did not get %d of %d records; metrics.jsonl has them all.',
        self._name,
        lost,
        lost + self.num_sent,
      )

  def _work(self) -> None:
    client: Optional[Client] = None
    wait = self._first_wait
    while True:
      with self._changed:
        while not self._records and not self._closing:
          self._changed.wait()
        record = self._records.popleft() if self._records else None
      last_try = self._closing
      try:
        client = client or self._connect()
        if record is None:
          client.close(failed=self._failed)
          return
        client.log(*record)
        self.num_sent += 1
        wait = self._first_wait
      except Exception as e:
        self._warn(e)
        with self._changed:
          if record is not None and len(self._records) < self._records.maxlen:
            self._records.appendleft(record)
          elif record is not None:
            self.num_lost += 1
        if last_try:
          return
        self._stop_waiting.wait(wait)
        wait = min(2 * wait, _LONGEST_WAIT)

  def _warn(self, e: Exception) -> None:
    """Warns about the first failure; other loggers continue meanwhile."""
    if not self._warned:
      self._warned = True
      _log.warning(
        '%s does not accept metrics: %s. The run continues, and keeps trying.',
        self._name,
        redacted(first_line(e)).rstrip('.'),
      )

  _warned = False


# Weights & Biases: https://docs.wandb.ai/ref/python
_STEP = 'step'
_INIT_SECONDS = 60.0


class WandbClient:
  """One run at W&B, with the configuration of this run and its files.

  A step that was logged before a crash and is repeated after it appears twice: W&B's step counter
  cannot go back, so the step is a metric.

  Args:
    config: project, and name of the run.
    ids: stores the id of the run.
    folder: MODEL_DIR; W&B writes to `wandb/` in it.
    run_name: name shown by W&B.
    settings: configuration values by name.
    files: files of `folder` to upload.
  """

  def __init__(
    self,
    config: LoggingConfig,
    ids: RunIds,
    *,
    folder: str | os.PathLike,
    run_name: str,
    settings: Mapping[str, Scalar],
    files: tuple[pathlib.Path, ...],
  ):
    wandb = importlib.import_module('wandb')
    run_id = ids.get(WANDB)
    if run_id is None:  # stored first, so that a run killed in `init` continues with the same id
      run_id = uuid.uuid4().hex[:12]
      ids.keep(WANDB, run_id)
    self._run = wandb.init(
      project=config.project,
      entity=config.wandb_entity,
      id=run_id,
      resume='allow',
      name=run_name,
      dir=os.fspath(folder),
      mode=config.wandb_mode,
      config=dict(settings),
      allow_val_change=True,
      settings=wandb.Settings(
        console='off',  # W&B would replace stdout, which may be a progress bar
        silent=True,
        init_timeout=_INIT_SECONDS,
        login_timeout=1,  # do not prompt for a key on a terminal
      ),
    )
    self._run.define_metric(_STEP)
    self._run.define_metric('*', step_metric=_STEP)
    for path in files:
      self._run.save(os.fspath(path), base_path=os.fspath(folder), policy='now')

  def log(self, step: int, values: Mapping[str, float]) -> None:
    self._run.log({_STEP: step, **values})

  def close(self, *, failed: bool) -> None:
    self._run.finish(exit_code=int(failed))


TENSORBOARD = 'tensorboard'


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


def _settings() -> dict[str, Scalar]:
  """Returns the configuration values of this run by name, including defaults."""
  found = provenance.current()
  if found is None:
    return {}
  return {setting.key: _value(setting.value) for setting in (*found.settings, *found.defaults)}


def _value(text: str) -> Scalar:
  """Returns the number or text that `text` spells, so that services can sort by it."""
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text
  return value if isinstance(value, Scalar) else text


def _configuration_files(folder: str | os.PathLike) -> tuple[pathlib.Path, ...]:
  paths = [pathlib.Path(folder) / name for name in (CONFIG, ORIGINS)]
  return tuple(path for path in paths if path.is_file())
