"""What a start opens per process and per host, with a budget: file servers serve it N times."""

import collections
import os
import pathlib
import subprocess
import sys

import pytest

from t5x_gpu.runtime.cluster.fork_server import is_supported
from tests.cluster.test_hosts_that_disagree import DATA, GIN, SCHEDULES
from tests.helpers_train import DEADLINE_SECONDS, REPOSITORY, Project
from tests.helpers_xla import xla_flags

# Appends a line for each file that a process opens; forked processes have this hook too.
HOOK = """
import os, sys
_log = os.open({path!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def _note(event, args):
  if event == 'open' and isinstance(args[0], str):
    os.write(_log, f'{{os.getpid()}} {{os.path.abspath(args[0])}}\\n'.encode())
sys.addaudithook(_note)
"""
# Measured: 318 sources in the fork server, none elsewhere; 354 and 478 files of all kinds in the
# two processes, which would be 6,600 with their own imports.
SOURCES_PER_PROCESS, OPENED_PER_PROCESS = 20, 700
FILES_PER_CHECKPOINT, FILES_PER_PROCESS = 16, 6


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.skipif(not is_supported(), reason='no pidfd_open')
def test_a_host_reads_sources_and_sampled_data_once(tmp_path):
  (tmp_path / 'my_schedules.py').write_text(SCHEDULES)
  (tmp_path / 'my_data.py').write_text(DATA)
  (tmp_path / 'corpus.txt').write_text('the same text\n' * 1000)
  hooks, log = tmp_path / 'hooks', tmp_path / 'opened'
  hooks.mkdir()
  (hooks / 'sitecustomize.py').write_text(HOOK.format(path=str(log)))
  project = Project(tmp_path, gin=GIN)
  command = [sys.executable, '-m', 't5x_gpu.launch', '--nproc=2', '--no_gpu', '--restarts=1', '--']
  done = subprocess.run(
    [*command, *project.argv(TRAIN_STEPS=2, SAVE_PERIOD=2, DATA_MODULE='my_data')],
    cwd=tmp_path,
    env={**os.environ, 'XLA_FLAGS': xla_flags(1), 'PYTHONPATH': f'{hooks}:{REPOSITORY}'},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=DEADLINE_SECONDS,
  )
  assert done.returncode == 0, done.stdout
  opened: dict[str, collections.Counter[str]] = {}
  for line in log.read_text().splitlines():
    pid, path = line.split(' ', 1)
    opened.setdefault(pid, collections.Counter())[path] += 1
  package = str(REPOSITORY / 't5x_gpu') + '/'
  sources = {
    pid: sum(n for p, n in paths.items() if p.startswith(package) and p.endswith('.py'))
    for pid, paths in opened.items()
  }
  corpus = [paths[str(tmp_path / 'corpus.txt')] for paths in opened.values()]
  assert len([n for n in corpus if n]) == 1, corpus  # one process of the host samples it
  (server,) = [pid for pid, n in sources.items() if n > SOURCES_PER_PROCESS]
  assert sources[server] < 2 * sum(1 for _ in pathlib.Path(package).rglob('*.py'))
  parent = next(iter(opened))  # launch itself
  totals = {pid: sum(n.values()) for pid, n in opened.items() if pid not in (server, parent)}
  assert max(totals.values()) < OPENED_PER_PROCESS, totals
  checkpoint = next(tmp_path.rglob('checkpoint_2'))
  files = sum(path.is_file() for path in checkpoint.rglob('*'))
  assert files <= FILES_PER_CHECKPOINT + 2 * FILES_PER_PROCESS, files
