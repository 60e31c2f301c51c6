"""A run that is killed continues from its newest local checkpoint, as if nothing had happened."""

import contextlib
import re
from typing import Any

import pytest

from t5x_gpu.checkpoint.manifest import STARTED_FROM
from t5x_gpu.checkpoint.store import StateReader
from t5x_gpu.runtime.cluster.interruptions import Interruption, variables
from tests.helpers_disk import small_disk
from tests.helpers_train import Project, listing


@pytest.fixture
def project(tmp_path, monkeypatch) -> Project:
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.chdir(tmp_path)
  return Project(tmp_path)


def settings(project: Project) -> dict[str, Any]:
  return {
    'DATA_MODULE': 'held_data',
    'SAVE_PERIOD': 8,
    'TRAIN_STEPS': 16,
    'CheckpointConfig.local_checkpoint_dir': project.folder / '$LOCAL_OF_TEST',
    'CheckpointConfig.local_period': 2,
  }


def run(project: Project, *flags: str, **macros):
  return project.run(*flags, num_devices=1, **{**settings(project), **macros})


@pytest.mark.slow
def test_a_run_continues_from_a_local_step_and_a_dry_run_says_so(project, monkeypatch):
  monkeypatch.setenv('LOCAL_OF_TEST', 'local')
  with project.start(**settings(project), hold_before=13) as process:
    local = project.folder / 'local'
    process.wait_for(lambda: project.steps() == [8] and [*local.glob('*/step_1[02].process_0')])
    process.kill()
  before = listing(project.folder)
  dry = run(project, '--dry_run')
  assert dry.code == 0, dry.err
  # A machine that still wrote step 10 when step 12 was due has left that one out.
  step = int(re.search(r'Local checkpoint (1[02]) would be promoted to checkpoint_', dry.err)[1])
  assert f'Steps done: {step}.' in dry.out and listing(project.folder) == before
  went_on = run(project)
  assert went_on.code == 0, went_on.err
  assert f'Promoted local checkpoint {step} to checkpoint_{step}' in went_on.err
  assert f'Continuing from {project.model_dir}/checkpoint_{step}.' in went_on.out
  assert project.steps() == [8, step, 16]
  assert not list((project.folder / 'local').iterdir())

  manifest = StateReader(project.model_dir, step=step).manifest
  assert manifest['promoted_from']['processes'] == 1 and manifest[STARTED_FROM] is None
  whole = project.folder / 'whole'
  assert run(project, MODEL_DIR=whole).code == 0
  assert project.metrics() == project.metrics(model_dir=whole)
  assert (
    StateReader(project.model_dir, step=16).manifest['checksums']
    == (StateReader(whole, step=16).manifest['checksums'])
  )


@pytest.mark.slow
def test_a_full_local_folder_ends_no_run_that_launch_has_started_again(project, monkeypatch):
  monkeypatch.setenv('LOCAL_OF_TEST', 'shm/me')
  with small_disk(project.folder / 'shm', size='64m') as disk:
    local = disk / 'me'
    with project.start(**settings(project), hold_before=13) as process:
      process.wait_for(lambda: project.steps() == [8] and [*local.glob('*/step_1[02].process_0')])
      process.kill()
    with open(disk / 'of_others', 'wb', buffering=0) as filler:
      with contextlib.suppress(OSError):
        while filler.write(b'x' * 65536):
          pass
    refused = run(project)
    assert refused.code == 1 and 'CheckpointError: CheckpointConfig.local_' in refused.err
    killed = Interruption(1, 'process killed', 'process 0 failed (SIGKILL)', 12, 1e9)
    for name, value in variables('run1', [killed]).items():
      monkeypatch.setenv(name, value)
    went_on = run(project)
    assert went_on.code == 0, went_on.err
    assert f'local_checkpoint_dir = {str(local)!r}' in went_on.err
    assert 'Until the next start, the run saves to MODEL_DIR only.' in went_on.err
    step = int(re.search(r'Promoted local checkpoint (1[02]) to', went_on.err)[1])
    assert project.steps() == [8, step, 16]
