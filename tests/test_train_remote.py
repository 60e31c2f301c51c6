"""Training with MODEL_DIR in object storage, against a real S3-compatible server."""

import contextlib
import json
import re

import pytest

from t5x_gpu import eval, infer, report, top
from t5x_gpu.checkpoint.model_dir import COMMIT, UNDER_WAY, committed_steps
from t5x_gpu.checkpoint.run_files import RunFiles, append_sample
from t5x_gpu.checkpoint.run_lock import LOCK
from t5x_gpu.errors import ConfigError
from t5x_gpu.storage.paths import as_path
from tests.helpers_storage import KEY_ID, SECRET, TOKEN, Gate, StorageServer
from tests.helpers_train import Project, run_here
from tests.messages import raises
from tests.parity.tolerances import MESH_LOSS

SECRETS = (KEY_ID, SECRET, TOKEN)
FAST = {'TRAIN_STEPS': 6, 'SAVE_PERIOD': 2}


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  """Losses of six steps with MODEL_DIR on a disk."""
  project = Project(tmp_path_factory.mktemp('disk'))
  assert project.run(**FAST).code == 0
  return project.metrics()


def losses(address: str) -> dict[int, float]:
  """Returns step -> loss; fails if a step comes twice."""
  records = [
    json.loads(line) for line in (as_path(address) / 'metrics.jsonl').read_text().splitlines()
  ]
  found = {r['step']: r['train/loss'] for r in records if 'train/loss' in r}
  assert len(found) == len([r for r in records if 'train/loss' in r])
  return found


@pytest.mark.slow
def test_a_run_is_that_of_a_disk_resumes_on_other_devices_and_leaves_no_secret(
  server, uninterrupted, tmp_path
):
  address, project = 's3://runs/resumed', Project(tmp_path)
  first = project.run(MODEL_DIR=address, **FAST)
  assert first.code == 0, first.err
  assert f'In {address}: report.html' in first.out
  folder = as_path(address)
  assert committed_steps(folder) == [2, 4, 6] and losses(address) == uninterrupted
  # A save that a kill has cut short.
  (folder / 'checkpoint_6' / UNDER_WAY).write_text('{}')
  (folder / 'checkpoint_6' / COMMIT).unlink()
  second = project.run(MODEL_DIR=address, num_devices=4, EVAL_STEPS=1, **FAST)
  assert second.code == 0, second.err
  assert f'Continuing from {address}/checkpoint_4.' in second.out
  assert committed_steps(folder) == [2, 4, 6]
  assert losses(address) == pytest.approx(uninterrupted, rel=MESH_LOSS)  # four devices for eight
  names = folder.files()
  for wanted in (
    'config.gin',
    'config_origins.txt',
    'config_1.gin',
    'report.html',
    'metrics.jsonl',
  ):
    assert wanted in names
  ledger = [json.loads(line) for line in (folder / 'goodput.jsonl').read_text().splitlines()]
  assert len({line['run'] for line in ledger if line.get('end') == 'done'}) == 2
  assert LOCK not in names and any(name.startswith('tensorboard/') for name in names)
  assert not list(tmp_path.glob('s3*')) and not project.model_dir.exists()
  written = b'\n'.join((folder / name).read_bytes() for name in names)
  local = b'\n'.join(p.read_bytes() for p in tmp_path.rglob('*') if p.is_file())
  for secret in SECRETS:
    assert secret.encode() not in written + local
    assert secret not in first.out + first.err + second.out + second.err


@pytest.mark.slow
def test_report_and_top_read_a_run_in_object_storage(server, tmp_path, capsys):
  address, project = 's3://runs/reported', Project(tmp_path)
  flags = ('--gin.PROFILE_STEPS=(3, 4)',)
  assert project.run(*flags, MODEL_DIR=address, **FAST).code == 0
  append_sample(tmp_path, 6, prompt='once', temperature=1.0, text='the continued text')
  (as_path(address) / 'samples.jsonl').write_bytes((tmp_path / 'samples.jsonl').read_bytes())
  page = tmp_path / 'page.html'
  assert report.main([address, f'--out={page}']) == 0
  for shown in ('Goodput', 'Anatomy of a step', 'steps 3-4 (PROFILE_STEPS)', 'the continued text'):
    assert shown in page.read_text(), shown
  assert top.main([address]) == 0
  out = capsys.readouterr().out
  assert 'checkpoint_6' in out and 'step 6' in out and 'cannot be read' not in out
  with raises(ConfigError):
    top.main([f'{address}/nowhere'])
  with raises(ConfigError):
    report.main([address])


def test_other_processes_copy_only_files_that_carry_their_number(server):
  address = as_path('s3://runs/ranks')
  own = ['profiles/7_process_1/plugins/x.pb', 'spikes/step_00000001/process_1.txt']
  with RunFiles(address, is_main=False) as files:
    for name in (*own, 'metrics.jsonl', 'profiles/7/x.pb', 'spikes/step_00000001/x.txt'):
      (files.folder / name).parent.mkdir(parents=True, exist_ok=True)
      (files.folder / name).write_text(name)
  assert address.files() == own


@pytest.mark.slow
def test_unreachable_storage_during_a_save_stops_the_run_and_the_same_command_continues(
  server, uninterrupted, tmp_path
):
  address, project = 's3://runs/cut_off', Project(tmp_path)
  with (
    contextlib.closing(Gate(server.port)) as gate,
    server.used(AWS_ENDPOINT_URL=f'http://127.0.0.1:{gate.port}'),
  ):
    gate.shut_at = b'PUT /runs/cut_off/checkpoint_4/state/'
    result = project.run(MODEL_DIR=address, **FAST)
    assert result.code == 1, result.err
    assert f'checkpoint_4 could not be written to {address}' in result.err
    assert 'The last good one is checkpoint_2' in result.err and 'AWS_ENDPOINT_URL' in result.err
    assert not [secret for secret in SECRETS if secret in result.out + result.err]
    assert 'Traceback' not in result.err
  assert committed_steps(as_path(address)) == [2]
  again = project.run(MODEL_DIR=address, **FAST)
  assert again.code == 0, again.err
  assert f'Continuing from {address}/checkpoint_2.' in again.out
  assert losses(address) == uninterrupted


# Threads are inside requests while Python ends; it would abort with 134 each time.
GIVES_UP = """
import pathlib, sys, threading, time
from t5x_gpu import cli
from t5x_gpu.storage import paths
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.checkpoint.remote_checkpointer import open_checkpointer
from t5x_gpu.errors import CheckpointError
paths.RETRIES = {'max_retries': 2, 'initial_delay': '1ms', 'max_delay': '5ms'}

def ask():
  while True:
    try:
      paths.as_path(sys.argv[-1]).joinpath('x').read_bytes()
    except Exception:
      pass

def main():
  with open_checkpointer(sys.argv[-1], keep=Keep()):
    pathlib.Path('held').touch()
    while not pathlib.Path('go').exists():
      time.sleep(0.005)
    for _ in range(4):
      threading.Thread(target=ask, daemon=True).start()
    time.sleep(0.05)
    raise CheckpointError('The storage is gone.')
cli.run_main(main)
"""


def test_a_run_whose_storage_stays_away_leaves_with_1_and_its_error_each_time(
  server, tmp_path, warm
):
  project = Project(tmp_path, warm=warm)
  for attempt in range(4):
    with (
      contextlib.closing(Gate(server.port)) as gate,
      server.used(AWS_ENDPOINT_URL=f'http://127.0.0.1:{gate.port}'),
    ):
      with project.start(f's3://runs/gone_{attempt}', script=GIVES_UP) as run:
        run.wait_for(run.held)
        gate.shut()
        run.let_go()
        assert (run.finish(), run.err) == (1, 'CheckpointError: The storage is gone.\n')


# A run of the train command that does not wait a minute for storage that is gone.
IMPATIENT_RUN = """
from t5x_gpu import cli, train
from t5x_gpu.checkpoint import run_lock
from t5x_gpu.storage import paths
paths.RETRIES = {'max_retries': 6, 'initial_delay': '20ms', 'max_delay': '100ms'}
run_lock.REFRESH_SECONDS = 0.01
cli.run_main(train.main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  'steps_done', [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 4, 5) * 2)]
)
def test_a_training_run_whose_server_is_killed_leaves_with_1_and_its_error(
  steps_done, tmp_path, warm
):
  """Before the first save, while one is written, between two, and before the last."""
  project = Project(tmp_path, warm=warm)
  with StorageServer(tmp_path) as server, server.used():
    address = f'{server.bucket("runs")}/killed'
    with project.start(
      MODEL_DIR=address,
      script=IMPATIENT_RUN,
      hold_before=steps_done,
      DATA_MODULE='"held_data"',
      **{**FAST, 'train.train_eval_dataset_cfg': None},
    ) as run:
      run.wait_for(run.held)
      server.kill()
      run.let_go()
      code, err = run.finish(), run.err
  assert code == 1, err
  # Whichever thread notices first: the lock's, or the save's.
  assert len(re.findall('^(?:Checkpoint|Storage)Error: ', err, re.MULTILINE)) == 1, err
  assert 'AWS_ENDPOINT_URL' in err
  assert 'terminate called' not in err and 'Traceback' not in err
  assert not [secret for secret in SECRETS if secret in run.out + err]


def test_a_dry_run_leaves_no_trace(server, tmp_path):
  result = Project(tmp_path).run('--dry_run', MODEL_DIR='s3://runs/dry')
  assert result.code == 0 and as_path('s3://runs/dry').files() == []


def test_an_invalid_address_stops_the_run_and_names_the_parameter(tmp_path):
  result = Project(tmp_path).run('--dry_run', MODEL_DIR='s3:/runs/a')
  assert result.code == 1 and 's3://BUCKET/FOLDER' in result.err and 'MODEL_DIR' in result.err


@pytest.mark.slow
def test_checkpoints_in_storage_are_evaluated_as_during_training_and_continue_prompts(
  server, tmp_path
):
  address, project = 's3://runs/evaluated', Project(tmp_path)
  macros = {'TRAIN_STEPS': 2, 'SAVE_PERIOD': 2, 'EVAL_STEPS': 100, 'Z_LOSS': 0.0}
  trained = project.run(MODEL_DIR=address, num_devices=1, **macros)
  assert trained.code == 0, trained.err
  found = run_here(lambda: eval.main(project.argv(MODEL_DIR=address, **macros)), num_devices=1)
  assert found.code == 0, found.err
  record = json.loads((as_path(address) / 'eval/validation.jsonl').read_text())
  [trained_loss] = [
    r['eval/loss']
    for r in map(json.loads, (as_path(address) / 'metrics.jsonl').read_text().splitlines())
    if 'eval/loss' in r
  ]
  assert record['step'] == 2 and record['eval/loss'] == pytest.approx(trained_loss, rel=1e-5)
  (tmp_path / 'prompts.txt').write_text('ab\ncd\n')
  written = run_here(
    lambda: infer.main(
      [
        f'--checkpoint={address}',
        f'--prompts={tmp_path}/prompts.txt',
        "--gin.DATA_MODULE='t5x_gpu.data.seqio_batches'",
        '--gin.DecodingConfig.max_decode_length=3',
      ]
    ),
    num_devices=1,
  )
  assert written.code == 0, written.err
  assert len(written.out.splitlines()) == 2
