"""A Slurm and an Open MPI for the tests: installed if we are root and they are missing."""

import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

from tests.cluster.slurm_lab import SlurmLab

SLURM = {
  'programs': ('slurmctld', 'slurmd', 'sbatch', 'munged'),
  'packages': ('slurmctld', 'slurmd', 'slurm-client', 'munge'),
}
OPEN_MPI = {'programs': ('mpirun',), 'packages': ('openmpi-bin',)}
INSTALL_SECONDS = 300
_SBIN = ':/usr/sbin:/sbin'


def _missing(programs: tuple[str, ...]) -> list[str]:
  return [p for p in programs if not shutil.which(p, path=os.environ['PATH'] + _SBIN)]


def _installed(*, programs: tuple[str, ...], packages: tuple[str, ...]) -> None:
  """Returns once the programs are there; skips the test, saying why, if they cannot be had."""
  if not _missing(programs):
    return
  if os.getuid() != 0 or not shutil.which('apt-get'):
    pytest.skip(
      f'needs {", ".join(_missing(programs))}: apt-get install {" ".join(packages)} '
      '(as root, it would have been done here)'
    )
  env = {**os.environ, 'DEBIAN_FRONTEND': 'noninteractive'}
  for command in (
    ['apt-get', 'update', '-qq'],
    ['apt-get', 'install', '-y', '-qq', '--no-install-recommends', *packages],
  ):
    try:
      done = subprocess.run(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL_SECONDS,
      )
    except subprocess.TimeoutExpired:
      pytest.skip(f'{" ".join(command)} took more than {INSTALL_SECONDS} s')
    if done.returncode != 0:
      pytest.skip(f'{" ".join(command)} failed: {done.stdout.strip().splitlines()[-1:]}')
  if _missing(programs):
    pytest.skip(f'{", ".join(packages)} are installed, but {", ".join(_missing(programs))} missing')


@pytest.fixture(scope='session')
def slurm() -> Iterator[SlurmLab]:
  """Two nodes with two GPUs each (device files that nothing opens)."""
  _installed(**SLURM)
  # Not below pytest's folder: munge wants every folder above its socket open to all.
  with tempfile.TemporaryDirectory(prefix='t5x_gpu_slurm_') as folder:
    os.chmod(folder, 0o755)
    with SlurmLab(pathlib.Path(folder) / 'lab', num_nodes=2) as lab:
      yield lab


@pytest.fixture(scope='session')
def mpirun() -> str:
  _installed(**OPEN_MPI)
  return 'mpirun'


@pytest.fixture(scope='session')
def alone(tmp_path_factory) -> dict[int, float]:
  """The losses of the run that all clusters repeat: one process, one device, twenty steps."""
  from tests.helpers_train import Project  # it imports jax: only where a cluster test runs

  project = Project(pathlib.Path(tmp_path_factory.mktemp('alone')))
  assert project.run(num_devices=1).code == 0
  return project.metrics()
