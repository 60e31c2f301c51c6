"""Two hosts whose names resolve to 127.0.1.1, as on Debian, meet over their network."""

import json
import os
import subprocess
import sys

import pytest

from tests.cluster.netlab import NetLab, NetLabError
from tests.helpers_train import DEADLINE_SECONDS, REPOSITORY
from tests.helpers_xla import xla_flags

pytestmark = pytest.mark.cluster


@pytest.mark.slow
def test_hosts_whose_names_mean_loopback_join_and_compute_on_cpus(tmp_path):
  env = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': str(REPOSITORY),
    'XLA_FLAGS': xla_flags(2),
  }
  script = str(REPOSITORY / 'tests' / 'runtime' / 'two_processes.py')
  try:
    with NetLab(num_hosts=2, own_address='127.0.1.1') as lab:
      processes = [
        lab.start(
          i,
          [sys.executable, script, 'h1:61998', str(i), str(tmp_path)],
          env=env,
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
          text=True,
        )
        for i in range(2)
      ]
      try:
        outputs = [process.communicate(timeout=DEADLINE_SECONDS)[0] for process in processes]
      finally:
        for process in processes:
          process.kill()
          process.wait()
  except NetLabError as e:
    pytest.skip(str(e))
  assert [process.returncode for process in processes] == [0, 0], outputs
  assert "'h1' means 127.0.1.1 on this host" in outputs[0]
  results = [
    json.loads(line.removeprefix('RESULT '))
    for output in outputs
    for line in output.splitlines()
    if line.startswith('RESULT ')
  ]
  assert [result['sum'] for result in results] == [28.0, 28.0]
