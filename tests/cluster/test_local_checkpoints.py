"""Two hosts that are killed resume from their local checkpoints, though one has lost its disk."""

import shutil
import signal

import pytest

from tests.cluster.test_faults import GIN, Ended, Ranks
from tests.helpers_train import WATCHED_BATCHES, Project

pytestmark = pytest.mark.cluster

# A user's own data module, which kills its process before batch FAULT once both hosts have kept the
# step before the one under way, and what the file `awaited` names exists.
KILLING_DATA = (
  '''"""Synthetic batches; before batch number $FAULT the process ends, by kill -9."""

import os
import pathlib
import signal
import time

from t5x_gpu.data import synthetic as _inner

_when = int(os.environ['FAULT'])


def before(number):
  if number == _when:
    while len(list(pathlib.Path().glob(f'host_*/*/step_{_when - 3}.process_?'))) < 2:
      time.sleep(0.01)
    awaited = pathlib.Path('awaited')
    while awaited.exists() and not pathlib.Path(awaited.read_text()).exists():
      time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

'''
  + WATCHED_BATCHES
)
NEVER = '0'
KILLED_BEFORE, KEPT, STEPS = 12, 9, 15  # 12, 15: of a save that the kill may cut off


@pytest.fixture(scope='module')
def ranks(tmp_path_factory):
  ranks = Ranks(tmp_path_factory.mktemp('compiled'))
  yield ranks
  ranks.close()


def project_in(folder) -> Project:
  folder.mkdir()
  (folder / 'killing_data.py').write_text(KILLING_DATA)
  return Project(folder, gin=GIN.replace('LOG_PERIOD = 5', 'LOG_PERIOD = 1'))


def run(ranks: Ranks, project: Project, fault: str, *, hosts: int = 2, **settings) -> Ended:
  return ranks.run(
    project,
    fault,
    ranks=hosts,
    hosts=True,
    **{
      'DATA_MODULE': 'killing_data',
      'TRAIN_STEPS': STEPS,
      'SAVE_PERIOD': 30,
      'BATCH_SIZE': 8,
      'CheckpointConfig.local_checkpoint_dir': f'{project.folder}/host_$RANK_OF_TEST',
      'CheckpointConfig.local_period': 3,
      'train.train_eval_dataset_cfg': None,
      **settings,
    },
  )


FSDP = {'Partitioner.fsdp': 2}


def killed(ranks: Ranks, project: Project, *, lost: int, **parallel) -> None:
  """Runs until both hosts are killed, and loses the disk of one."""
  ended = run(ranks, project, str(KILLED_BEFORE), **parallel)
  assert -signal.SIGKILL in ended.codes, ended.texts
  assert project.steps() == []  # nothing durable: all would be lost
  shutil.rmtree(project.folder / f'host_{lost}')


def assert_went_on(ended: Ended, project: Project) -> None:
  assert not any(ended.codes), ended.texts
  assert f'Promoted local checkpoint {KEPT} to checkpoint_{KEPT}' in ended.texts[0], ended.texts[0]
  assert f'Continuing from {project.model_dir}/checkpoint_{KEPT}' in ended.texts[0]
  assert project.steps() == [KEPT, STEPS]
  assert set(project.metrics()) == set(range(1, STEPS + 1))
  assert not any(p.is_file() for p in project.folder.glob('host_*/**/*'))  # all is in MODEL_DIR


@pytest.mark.slow
def test_killed_hosts_of_which_one_lost_its_disk_go_on_from_a_local_step(ranks, tmp_path):
  project = project_in(tmp_path / 'killed')
  killed(ranks, project, lost=1, **FSDP)
  before = project.metrics()
  assert max(before) > KEPT
  assert_went_on(run(ranks, project, NEVER, **FSDP), project)
  after = project.metrics()
  assert {
    step: after[step] for step in before
  } == before  # bit-exact, also past the local checkpoint


@pytest.mark.slow
@pytest.mark.parametrize(
  'parallel, lost, hosts_after', [(FSDP, 0, 2), ({}, 0, 2), (FSDP, 1, 1), ({}, 1, 1)]
)
def test_losses_are_those_of_a_run_that_was_not_killed(
  ranks, tmp_path, parallel, lost, hosts_after
):
  whole, project = project_in(tmp_path / 'whole'), project_in(tmp_path / 'killed')
  assert run(ranks, whole, NEVER, **parallel).codes == [0, 0]
  killed(ranks, project, lost=lost, **parallel)
  if hosts_after == 2:
    assert_went_on(run(ranks, project, NEVER, **parallel), project)
    assert project.metrics() == whole.metrics()  # bit-exact
  else:  # on the host that is left
    assert_went_on(run(ranks, project, NEVER, hosts=1), project)
    assert project.metrics() == pytest.approx(whole.metrics(), rel=1e-5)


@pytest.mark.slow
def test_without_both_copies_the_run_starts_from_what_is_durable_and_names_the_hosts(
  ranks, tmp_path
):
  project = project_in(tmp_path / 'killed')
  durable = project.model_dir / 'checkpoint_6'
  (project.folder / 'awaited').write_text(str(durable))  # its save may still be under way
  assert (
    -signal.SIGKILL in run(ranks, project, str(KILLED_BEFORE), **{**FSDP, 'SAVE_PERIOD': 6}).codes
  )
  for path in project.folder.glob('host_*/*/step_*'):
    if not path.name.startswith('step_3.'):
      path.write_bytes(path.read_bytes()[:-1000])
  ended = run(ranks, project, NEVER, **{**FSDP, 'SAVE_PERIOD': 6})
  assert ended.codes == [0, 0], ended.texts
  assert f'Continuing from {durable}' in ended.texts[0], ended.texts[0]
