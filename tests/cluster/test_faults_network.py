"""Two hosts whose link is cut: both sides notice, the job runs again, and nothing is lost."""

import os
import re
import subprocess
import sys
import time

import pytest

from t5x_gpu.runtime.watchdog import EXIT_RANK_DEAD
from tests.cluster.netlab import NetLab, NetLabError
from tests.cluster.test_faults import FAULTY_DATA, GIN, reports
from tests.helpers_train import REPOSITORY, Project
from tests.helpers_xla import xla_flags

pytestmark = pytest.mark.cluster

DEADLINE_SECONDS = 90
SETTINGS = {'DATA_MODULE': 'faulty_data', 'BATCH_SIZE': 12, 'LOG_PERIOD': 1}
PORT = 61999  # a port that no other process uses


@pytest.fixture(scope='module')
def lab():
  try:
    with NetLab(num_hosts=2) as lab:
      yield lab
  except NetLabError as e:
    pytest.skip(str(e))


class Run:
  """One process per host. Ends with the block."""

  def __init__(self, lab: NetLab, project: Project, **settings):
    settings = {**SETTINGS, **settings}
    env = {**os.environ, 'XLA_FLAGS': xla_flags()}
    env.update(
      JAX_PLATFORMS='cpu',
      PYTHONPATH=f'{REPOSITORY}:{project.folder}',
      FAULT='none:0:none',
      PYTHONUNBUFFERED='1',
      TF_CPP_MIN_LOG_LEVEL='1',
      JAX_COMPILATION_CACHE_DIR=str(project.folder.parent / 'compiled_faults'),
      JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
    )
    self._files = [project.folder / f'host_{i}.txt' for i in range(2)]
    self._processes = []
    for i in range(2):
      flags = (
        f'--coordinator_address={lab.address(0)}:{PORT}',
        '--process_count=2',
        f'--process_index={i}',
      )
      with open(self._files[i], 'wb') as out:
        self._processes.append(
          lab.start(
            i,
            [sys.executable, '-m', 't5x_gpu.train', *project.argv(*flags, **settings)],
            cwd=project.folder,
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
          )
        )

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    for process in self._processes:
      if process.poll() is None:
        process.kill()
      process.wait()

  @property
  def texts(self) -> list[str]:
    return [path.read_text() for path in self._files]

  def wait_for(self, condition) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
      assert all(p.poll() is None for p in self._processes), self.texts
      assert time.monotonic() < deadline, self.texts
      time.sleep(0.01)

  def ends(self) -> list[tuple[int, float]]:
    """Returns exit code and seconds until the end, of each."""
    started, ends = time.monotonic(), {}
    while len(ends) < 2:
      assert time.monotonic() - started < DEADLINE_SECONDS, self.texts
      for i, process in enumerate(self._processes):
        if i not in ends and process.poll() is not None:
          ends[i] = process.returncode, time.monotonic() - started
      time.sleep(0.01)
    return [ends[i] for i in range(2)]


@pytest.fixture
def project(tmp_path) -> Project:
  (tmp_path / 'faulty_data.py').write_text(FAULTY_DATA)
  return Project(tmp_path, gin=GIN.replace('LOG_PERIOD = 5', 'LOG_PERIOD = 1'))


@pytest.mark.slow
def test_a_short_cut_heals_a_long_one_ends_both_sides_and_nothing_is_lost(lab, project, tmp_path):
  folder = tmp_path / 'alone'
  folder.mkdir()
  (folder / 'faulty_data.py').write_text(FAULTY_DATA)
  alone = Project(folder)
  total = {'TRAIN_STEPS': 100, 'SAVE_PERIOD': 10}
  assert alone.run(num_devices=1, TRAIN_STEPS=100, BATCH_SIZE=12).code == 0
  with Run(lab, project, **total) as run:  # the deadlines are the defaults
    run.wait_for(lambda: 'step 5/' in run.texts[0])
    lab.cut(1)
    time.sleep(5)
    lab.heal(1)
    steps = len(project.metrics())
    run.wait_for(lambda: len(project.metrics()) > steps + 15 and project.steps())
    assert 'WATCHDOG' not in ''.join(run.texts)
    lab.cut(1)
    ends = run.ends()
    texts = run.texts
  lab.heal(1)
  assert [code for code, _ in ends] == [EXIT_RANK_DEAD] * 2, texts
  assert max(seconds for _, seconds in ends) < 30
  assert re.search(
    r'No sign of life for 1\d s from process 1 on h2 \(pid \d+\), last seen at step',
    reports(texts[0])[0],
  )
  assert re.search(
    r'Process 1 on h2 .* has not reached process 0 on h1 \(pid \d+\), last seen at '
    r'step \d+',
    reports(texts[1])[0],
  )
  print(f'\nlink cut: process 0 ended after {ends[0][1]:.1f} s, process 1 after {ends[1][1]:.1f} s')
  last = project.steps()[-1]
  with Run(lab, project, **total) as run:
    ends = run.ends()
    assert [code for code, _ in ends] == [0, 0], run.texts
    assert f'Continuing from {project.model_dir}/checkpoint_{last}' in run.texts[0]
  losses = project.metrics()
  assert list(losses) == list(range(1, 101))
  assert losses == pytest.approx(alone.metrics(), rel=1e-4)
