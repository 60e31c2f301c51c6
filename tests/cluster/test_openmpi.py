"""scripts/train_mpi.sh with a real mpirun is the same run."""

import os
import subprocess
import sys

import pytest

from tests.helpers_train import DEADLINE_SECONDS, REPOSITORY, Project
from tests.helpers_xla import xla_flags

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.mark.parametrize(
  'restarts, shown',
  [
    ('0', '(OMPI_COMM_WORLD_RANK of mpirun)'),
    ('3', '(JAX_PROCESS_INDEX or JAX_PROCESS_ID)'),  # a launch on the only host numbers them
  ],
)
def test_two_processes_of_mpirun_give_the_losses_of_one(restarts, shown, mpirun, tmp_path, alone):
  project = Project(tmp_path)
  env = {
    **os.environ,
    'RESTARTS': restarts,
    'PYTHON': sys.executable,
    'PYTHONPATH': str(REPOSITORY),
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': xla_flags(),
    'OMPI_ALLOW_RUN_AS_ROOT': '1',
    'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1',
    'OMPI_MCA_rmaps_base_oversubscribe': '1',
  }
  done = subprocess.run(
    [REPOSITORY / 'scripts' / 'train_mpi.sh', '2', project.gin_file, *project.argv()[1:]],
    cwd=project.folder,
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=DEADLINE_SECONDS,
  )
  assert done.returncode == 0, done.stdout
  assert shown in done.stdout
  assert 'mesh: 1 host x 2 CPU devices' in done.stdout
  assert project.metrics() == pytest.approx(alone, rel=1e-5)
