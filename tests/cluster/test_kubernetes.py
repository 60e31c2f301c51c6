"""scripts/train_k8s.yaml on simulated pods: they are lost, return with other addresses, and finish.

A pod is a network namespace with its host name of an indexed Job, and a PID namespace whose
process 1 does what Kubernetes' `pause` does with shareProcessNamespace. No cluster is needed.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import yaml

from tests.cluster.netlab import NetLab, NetLabError
from tests.helpers_train import DEADLINE_SECONDS, REPOSITORY, WATCHED_BATCHES, Project
from tests.helpers_xla import xla_flags

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

# launch, which takes a host in soon after a start.
LAUNCH = """
from t5x_gpu import cli, launch
from t5x_gpu.runtime.cluster import generations
generations.GROW_SECONDS = 5
cli.run_main(launch.main)
"""
# Process 1 of a pod: starts the container, passes SIGTERM on to it as the kubelet would, takes the
# exit codes of all others, and ends with the container.
PAUSE = """
import os, signal, subprocess, sys
container = subprocess.Popen(sys.argv[1:])
signal.signal(signal.SIGTERM, lambda *_: os.kill(container.pid, signal.SIGTERM))
while (ended := os.wait())[0] != container.pid: pass
code = os.waitstatus_to_exitcode(ended[1])
os._exit(code if code >= 0 else 128 - code)
"""
PACED_DATA = (
  """import importlib, os, time
_inner = importlib.import_module('t5x_gpu.data.synthetic')

def before(number):
  if not os.path.exists('go'):
    time.sleep(0.5)

"""
  + WATCHED_BATCHES
)
SIZES = {'TRAIN_STEPS': 200, 'SAVE_PERIOD': 10, 'LEARNING_RATE': 1e-4}


class Pods:
  """The pods of the Job in train_k8s.yaml."""

  def __init__(self, project: Project):
    text = (REPOSITORY / 'scripts' / 'train_k8s.yaml').read_text()
    service, job = yaml.safe_load_all(text)
    name, subdomain = job['metadata']['name'], service['metadata']['name']
    (container,) = job['spec']['template']['spec']['containers']
    assert container['command'] == ['python', '-m', 't5x_gpu.launch']
    flags = container['args'][: container['args'].index('--')]
    self.count = job['spec']['completions']
    self._command = [sys.executable, '-c', LAUNCH, *flags, '--nproc=1', '--']
    self._command += project.argv(DATA_MODULE='paced_data', **SIZES)
    self._folder = project.folder
    hosts = [f'{name}-{i}' for i in range(self.count)]
    self.lab = NetLab(num_hosts=self.count, names=[[host, f'{host}.{subdomain}'] for host in hosts])
    self._env = {
      **os.environ,
      **{each['name']: each['value'] for each in container['env'] if 'value' in each},
      'T5X_GPU_JOB_SECRET': 'secret',
      'KUBERNETES_SERVICE_HOST': '10.96.0.1',
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': xla_flags(1),
      'PYTHONPATH': os.pathsep.join((str(REPOSITORY), str(project.folder))),
      'JAX_COMPILATION_CACHE_DIR': str(project.folder / 'compiled'),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    }
    self._running: dict[int, subprocess.Popen] = {}
    self._files: list[pathlib.Path] = []

  def start(self, index: int) -> None:
    self._files.append(self._folder / f'pod_{index}_{len(self._files)}.txt')
    isolated = ['unshare', '--pid', '--fork', '--kill-child', '--mount-proc']
    with open(self._files[-1], 'wb') as output:
      self._running[index] = self.lab.start(
        index,
        [*isolated, sys.executable, '-c', PAUSE, *self._command],
        cwd=self._folder,
        env={**self._env, 'JOB_COMPLETION_INDEX': str(index)},
        stdout=output,
        stderr=subprocess.STDOUT,
      )

  def replace(self, index: int) -> None:
    """Starts the pod of this index again, with another address."""
    self.lab.replace_address(index)
    self.start(index)

  def kill(self, index: int) -> None:
    pod = self._running.pop(index)
    pod.kill()
    pod.wait()

  def terminate(self, index: int) -> None:
    pid = subprocess.check_output(['pgrep', '-P', str(self._running[index].pid)], text=True)
    os.kill(int(pid), signal.SIGTERM)

  def codes(self) -> list[int]:
    """Returns the exit codes of all pods, which end."""
    return [self._running.pop(i).wait(2 * DEADLINE_SECONDS) for i in sorted(self._running)]

  def output(self) -> str:
    return '\n'.join(file.read_text() for file in self._files)

  def wait_for(self, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 3 * DEADLINE_SECONDS
    while not condition():
      assert time.monotonic() < deadline, self.output()
      assert all(pod.poll() is None for pod in self._running.values()), self.output()
      time.sleep(0.1)

  def stop(self) -> None:
    for index in list(self._running):
      self.kill(index)


@pytest.fixture
def project(tmp_path) -> Project:
  (folder := tmp_path / 'pods').mkdir()
  (folder / 'paced_data.py').write_text(PACED_DATA)
  return Project(folder)


@pytest.fixture
def pods(project) -> Iterator[Pods]:
  made = Pods(project)
  with contextlib.ExitStack() as stack:
    try:
      stack.enter_context(made.lab)
    except NetLabError as error:
      pytest.skip(str(error))
    yield made
    made.stop()


def test_lost_and_moved_pods_cost_restarts_and_the_losses_are_those_of_an_unbroken_run(
  pods, project, tmp_path
):
  (alone := tmp_path / 'alone').mkdir()
  reference = Project(alone)
  assert reference.run(num_devices=1, **SIZES).code == 0
  both = 'on host 0 (t5x-gpu-0), host 1 (t5x-gpu-1)'

  def new_step() -> None:
    """Returns once the run has taken a step on the hosts that it has now."""
    before = pods.output().count('| loss ')
    pods.wait_for(lambda: pods.output().count('| loss ') > before)

  for index in range(pods.count):
    pods.start(index)
  pods.wait_for(lambda: f'the run starts {both}' in pods.output())
  new_step()

  pods.kill(1)
  pods.wait_for(lambda: 'restart 1 of at most 20 on host 0 (t5x-gpu-0), from' in pods.output())
  pods.replace(1)
  pods.wait_for(lambda: f'host 1 (t5x-gpu-1) joins; the run continues {both}' in pods.output())
  new_step()

  pods.kill(0)
  pods.replace(0)
  pods.wait_for(lambda: f'restart 2 of at most 20 {both}' in pods.output())
  new_step()

  pods.terminate(1)  # as a drained node
  assert pods.codes() == [85, 85], pods.output()
  (project.folder / 'go').touch()
  for index in range(pods.count):
    pods.replace(index)
  assert pods.codes() == [0, 0], pods.output()
  assert project.metrics() == pytest.approx(reference.metrics(), rel=1e-5)
