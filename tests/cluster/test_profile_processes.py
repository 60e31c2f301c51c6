"""Profiles of several processes: kept traces, their folders, and the comparison by process 0."""

import json
import socket

import pytest

from tests.helpers_train import DEADLINE_SECONDS, WATCHED_BATCHES, Project
from tests.test_launch import project_launch

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

# SIGUSR2 comes to process 1 before step 6, to both before step 10.
SIGNALLED = (
  '''"""Batches of synthetic, and signals."""

import os
import signal

import jax

from t5x_gpu.data import synthetic as _inner


def before(number):
  if number == 11 or number == 6 and jax.process_index() == 1:
    os.kill(os.getpid(), signal.SIGUSR2)

'''
  + WATCHED_BATCHES
)


def test_each_process_keeps_its_own_trace_and_the_first_compares_all(tmp_path):
  project = Project(tmp_path)
  (tmp_path / 'signalled_data.py').write_text(SIGNALLED)

  flags = dict(PROFILE_STEPS=(2, 4), DATA_MODULE='signalled_data', TRAIN_STEPS=16)
  with project_launch(project, **flags) as run:
    output = run.communicate(timeout=DEADLINE_SECONDS)[0]
  assert run.returncode == 0, output
  assert 'cannot be read' not in output and 'No more profiles' not in output
  found = {
    path.parent.name: json.loads(path.read_text())
    for path in (project.model_dir / 'profiles').glob('*/anatomy.json')
  }
  by_start = {name.partition('_')[0] for name in found}
  assert len(found) == 4 and '2' in by_start, found.keys()
  for name, anatomy in found.items():
    assert len(list((project.model_dir / 'profiles' / name).rglob('*.xplane.pb'))) == 1
    rank = int(name.partition('_process_')[2] or 0)
    assert (anatomy['process_index'], anatomy['num_processes']) == (rank, 2)
    assert anatomy['host'] == socket.gethostname()
    # The devices of a process are its own: process 0 alone has the numbers of both.
    ranks = [r['rank'] for r in anatomy['ranks']]
    assert ranks == ([rank] if rank else [0, 1]), name
    assert all(r['host'] == anatomy['host'] and r['compute'] > 0 for r in anatomy['ranks'])
  reasons = sorted((a['reason'], a['process_index']) for a in found.values())
  assert reasons == [('PROFILE_STEPS', 0), ('SIGUSR2', 0), ('SIGUSR2', 1), ('SIGUSR2', 1)]
  assert 'profile of steps 2-4 (PROFILE_STEPS)' in output
