"""Loggers: chosen in gin, continued by a resumed run, silent about keys, never in the way."""

import contextlib
import importlib.util
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from t5x_gpu.errors import ConfigError
from t5x_gpu.launch import free_address
from t5x_gpu.metrics.loggers import FILE, BackgroundWriter, RunIds, redacted
from t5x_gpu.metrics.logging_config import EXTRAS, LoggingConfig
from tests.helpers_train import DEADLINE_SECONDS, Project
from tests.messages import raises

KEY = '0123456789abcdef0123456789abcdef01234567'  # of the shape of W&B's


def needs(package):
  """Skips unless the real client can be imported, as in `make test-loggers`."""
  missing = importlib.util.find_spec(package) is None
  return pytest.mark.skipif(missing, reason=f'{package} is not installed: make test-loggers')


class Service:
  """A client at the boundary to a service: down until `up`, then it keeps all records."""

  def __init__(self, up=True):
    self.records, self.ended = [], []
    self.up = threading.Event()
    if up:
      self.up.set()

  def connect(self):
    if not self.up.is_set():
      raise ConnectionError('http://user:hunter2@host refused')
    return self

  def log(self, step, values):
    self.records.append((step, values))

  def close(self, *, failed):
    self.ended.append(failed)


def test_records_arrive_in_order_and_the_run_ends():
  service = Service()
  with BackgroundWriter('test', service.connect) as writer:
    for step in range(100):
      writer.write(step, {'train/loss': step})
  assert service.records == [(step, {'train/loss': float(step)}) for step in range(100)]
  assert service.ended == [False]


def test_a_run_that_fails_is_marked_as_failed():
  service = Service()
  with pytest.raises(KeyError), BackgroundWriter('test', service.connect):
    raise KeyError
  assert service.ended == [True]


def test_a_service_that_is_down_for_a_while_gets_everything_later(caplog):
  service = Service(up=False)
  with BackgroundWriter('test', service.connect, first_wait=0.01) as writer:
    writer.write(1, {'x': 1})
    writer.write(2, {'x': 2})
    service.up.set()
  assert [step for step, _ in service.records] == [1, 2]


def test_a_service_that_stays_down_costs_one_warning_without_its_password(caplog):
  service = Service(up=False)
  with caplog.at_level(logging.WARNING):
    with BackgroundWriter('test', service.connect, capacity=3, first_wait=0.001) as writer:
      for step in range(10):
        writer.write(step, {'x': step})
  warnings = [record.getMessage() for record in caplog.records]
  assert [w for w in warnings if 'does not accept metrics' in w] == [
    'test does not accept metrics: http://[password]@host refused. The run continues, and keeps '
    'trying.'
  ]
  assert warnings[-1] == ('test did not get 10 of 10 records; metrics.jsonl has them all.')


def test_a_service_that_hangs_does_not_keep_the_run_from_ending():
  hangs = threading.Event()
  with BackgroundWriter('test', hangs.wait, close_seconds=0.05) as writer:
    writer.write(1, {'x': 1})
  hangs.set()


def test_keys_are_removed_from_text(monkeypatch):
  monkeypatch.setenv('WANDB_API_KEY', KEY)
  text = redacted(f'401: key {KEY} at https://me:{KEY}@host')
  assert text == '401: key [WANDB_API_KEY] at https://[password]@host'


def test_unknown_loggers_and_passwords_in_settings_are_errors():
  with raises(ConfigError):
    LoggingConfig(loggers=('terminal', 'wanbd'))
  with raises(ConfigError):
    LoggingConfig(loggers='jsonl')
  with raises(ConfigError):
    LoggingConfig(wandb_mode='of')
  with raises(ConfigError) as error:
    LoggingConfig(mlflow_tracking_uri='https://me:hunter2@host')
  assert 'hunter2' not in str(error.value)


@pytest.mark.parametrize('name', EXTRAS)
def test_a_missing_package_names_the_extra(name):
  module, extra = EXTRAS[name]
  if importlib.util.find_spec(module) is not None:
    pytest.skip(f'{module} is installed')
  with raises(ConfigError):
    LoggingConfig(loggers=(name,)).check_installed()


def test_run_ids_survive_and_damaged_ones_are_renamed(tmp_path, caplog):
  RunIds(tmp_path).keep('wandb', 'abc')
  ids = RunIds(tmp_path)
  assert (ids.get('wandb'), ids.get('mlflow')) == ('abc', None)
  (tmp_path / FILE).write_text('{"wandb": ["../x"')
  assert RunIds(tmp_path).get('wandb') is None
  assert (tmp_path / f'corrupt_{FILE}').exists()


def all_text(*paths):
  files = [f for path in paths for f in ([path] if path.is_file() else path.rglob('*'))]
  return b''.join(f.read_bytes() for f in files if f.is_file())


@pytest.fixture
def project(tmp_path):
  return Project(tmp_path)


@pytest.mark.slow
def test_without_loggers_a_run_writes_no_metrics(project):
  result = project.run('--gin.LOGGERS=()', TRAIN_STEPS=2)
  assert result.code == 0, result.err
  assert not (project.model_dir / 'metrics.jsonl').exists()
  assert not (project.model_dir / 'tensorboard').exists()
  assert 'step 1/2' not in result.out and 'Done at step 2' in result.out


def test_an_unknown_logger_is_an_error_before_compiling(project):
  result = project.run("--gin.LOGGERS=('mlflw',)")
  assert result.code == 1
  assert "'mlflw' is not a logger. Did you mean 'mlflow'?" in result.err
  assert not project.model_dir.exists()


@needs('mlflow')
def test_mlflow_continues_the_same_run_after_a_resume(project, monkeypatch):
  import mlflow

  store = f'file://{project.folder}/mlruns'
  monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
  monkeypatch.setenv('MLFLOW_TRACKING_URI', store)
  monkeypatch.setenv('MLFLOW_TRACKING_TOKEN', KEY)
  flags = "--gin.LOGGERS=('jsonl', 'mlflow')"
  out = ''
  for steps in (2, 4):
    result = project.run(flags, TRAIN_STEPS=steps, LOG_PERIOD=1)
    assert result.code == 0, result.err
    out += result.out + result.err
  client = mlflow.MlflowClient(tracking_uri=store)
  experiment = client.get_experiment_by_name('t5x_gpu')
  (run,) = client.search_runs([experiment.experiment_id])
  assert run.info.run_id == json.loads((project.model_dir / FILE).read_text())['mlflow']
  assert (run.info.run_name, run.info.status) == ('model', 'FINISHED')
  losses = {m.step: m.value for m in client.get_metric_history(run.info.run_id, 'train/loss')}
  assert losses == project.metrics('train/loss')
  assert run.data.params['TRAIN_STEPS'] == '2'
  assert {f.path for f in client.list_artifacts(run.info.run_id)} == {
    'config.gin',
    'config_origins.txt',
  }
  assert KEY not in out
  assert KEY.encode() not in all_text(project.model_dir, project.folder / 'mlruns')


@pytest.fixture
def mlflow_server(tmp_path):
  """The address of a real MLflow server on this machine, which asks for no key; its folder."""
  folder = tmp_path / 'mlflow_server'
  folder.mkdir()
  port = int(free_address().rpartition(':')[2])
  store, artifacts = f'sqlite:///{folder}/mlflow.db', f'{folder}/artifacts'
  command = [sys.executable, '-m', 'mlflow', 'server', '--host=127.0.0.1', f'--port={port}']
  command += [f'--backend-store-uri={store}', f'--artifacts-destination={artifacts}']
  with open(folder / 'log.txt', 'wb') as log:
    server = subprocess.Popen(
      [*command, '--workers=1'], stdout=log, stderr=log, cwd=folder, start_new_session=True
    )
  address, deadline = f'http://127.0.0.1:{port}', time.monotonic() + DEADLINE_SECONDS
  try:
    while True:
      assert server.poll() is None, (folder / 'log.txt').read_text()
      assert time.monotonic() < deadline, (folder / 'log.txt').read_text()
      try:
        urllib.request.urlopen(f'{address}/health').close()
        break
      except OSError:
        time.sleep(0.1)
    yield address, folder
  finally:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself, as its log says
      os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@pytest.mark.slow
@needs('mlflow')
@pytest.mark.skipif(
  importlib.util.find_spec('flask') is None, reason='no server of MLflow: make test-loggers'
)
def test_a_run_of_an_mlflow_server_is_continued_over_http(project, monkeypatch, mlflow_server):
  import mlflow

  address, folder = mlflow_server
  monkeypatch.setenv('MLFLOW_TRACKING_USERNAME', 'a-user')
  monkeypatch.setenv('MLFLOW_TRACKING_PASSWORD', KEY)
  flags = (
    "--gin.LOGGERS=('terminal', 'jsonl', 'mlflow')",
    f"--gin.logging_config.LoggingConfig.mlflow_tracking_uri='{address}'",
  )
  out = ''
  for steps in (2, 4):
    result = project.run(*flags, TRAIN_STEPS=steps, LOG_PERIOD=1)
    assert result.code == 0 and 'MLflow' not in result.err, result.err
    out += result.out + result.err
  client = mlflow.MlflowClient(tracking_uri=address)
  (run,) = client.search_runs([client.get_experiment_by_name('t5x_gpu').experiment_id])
  assert run.info.run_id == json.loads((project.model_dir / FILE).read_text())['mlflow']
  assert (run.info.run_name, run.info.status) == ('model', 'FINISHED')
  losses = {m.step: m.value for m in client.get_metric_history(run.info.run_id, 'train/loss')}
  assert losses == pytest.approx(project.metrics('train/loss')) and len(losses) == 4
  assert run.data.params['TRAIN_STEPS'] == '2'
  assert {f.path for f in client.list_artifacts(run.info.run_id)} == {
    'config.gin',
    'config_origins.txt',
  }
  assert KEY not in out
  assert KEY.encode() not in all_text(project.model_dir, folder)


@needs('mlflow')
def test_a_server_that_is_down_does_not_stop_the_run(project, monkeypatch):
  monkeypatch.setenv('MLFLOW_HTTP_REQUEST_MAX_RETRIES', '0')
  monkeypatch.setenv('MLFLOW_TRACKING_URI', 'http://me:hunter2@127.0.0.1:9')
  result = project.run("--gin.LOGGERS=('jsonl', 'mlflow')", TRAIN_STEPS=2, LOG_PERIOD=1)
  assert result.code == 0, result.err
  assert len(project.metrics()) == 2
  assert result.err.count('MLflow does not accept metrics') == 1
  assert 'MLflow did not get 2 of 2 records' in result.err
  assert 'hunter2' not in result.out + result.err


@needs('wandb')
def test_wandb_continues_the_same_run_after_a_resume(project, monkeypatch):
  monkeypatch.setenv('WANDB_API_KEY', KEY)
  out = ''
  for steps in (2, 4):
    result = project.run(
      "--gin.LOGGERS=('jsonl', 'wandb')",
      "--gin.logging_config.LoggingConfig.wandb_mode='offline'",
      TRAIN_STEPS=steps,
      LOG_PERIOD=1,
    )
    assert result.code == 0, result.err
    out += result.out + result.err
  run_id = json.loads((project.model_dir / FILE).read_text())['wandb']
  folders = sorted((project.model_dir / 'wandb').glob('offline-run-*'))
  assert len(folders) == 2 and all(f.name.endswith(run_id) for f in folders)
  for folder in folders:
    (records,) = folder.glob('*.wandb')
    assert b'train/loss' in records.read_bytes() and b'TRAIN_STEPS' in records.read_bytes()
    assert {'config.gin', 'config_origins.txt'} <= {
      p.name for p in pathlib.Path(folder / 'files').iterdir()
    }
  assert KEY not in out
  assert KEY.encode() not in all_text(project.model_dir)
