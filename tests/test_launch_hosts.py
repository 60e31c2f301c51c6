"""python -m t5x_gpu.launch on several hosts: agents start, lose and end processes together."""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import pytest

from t5x_gpu import launch
from t5x_gpu.errors import ClusterError, ConfigError, UserError
from t5x_gpu.reporting.interruptions import costs_of
from t5x_gpu.reporting.run_record import read_run
from t5x_gpu.runtime.cluster import cluster, generations, interruptions, links
from tests.helpers_train import DEADLINE_SECONDS, REPOSITORY, Project
from tests.helpers_xla import xla_flags
from tests.messages import raises
from tests.runtime.cluster.test_links import until

# JAX warns of forks in a process that has imported it: this one has, `launch` does not.
pytestmark = pytest.mark.filterwarnings('ignore:os.fork.. was called:RuntimeWarning')

SECRET = 'T5X_GPU_JOB_SECRET'
# A worker that tells its pid, runs until the file `done` appears, and stops as training does.
WORKER = """
import os, pathlib, signal, subprocess, sys, time
from t5x_gpu.runtime import progress
signal.signal(signal.SIGTERM, lambda *_: os._exit(85))
rank, count = os.environ['JAX_PROCESS_INDEX'], os.environ['JAX_PROCESS_COUNT']
hosts = int(os.environ['JAX_PROCESS_COUNT']) // 2
progress.write_host_counts(os.environ, range(1, hosts + 1))  # as training does
progress.ProgressFile(os.environ, first_step=0).step_done(7)
me = pathlib.Path(f'{os.environ["GENERATION"]}_{rank}_of_{count}')
me.with_suffix('.new').write_text(f'{os.getpid()} {os.environ["JAX_COORDINATOR_ADDRESS"]}')
me.with_suffix('.new').rename(me)
if pathlib.Path('children').exists():
  child = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  pathlib.Path(f'child_of_{rank}').write_text(str(child.pid))
if pathlib.Path('stuck').exists():
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
while not pathlib.Path('done').exists():
  time.sleep(0.02)
"""


def runs(pid: int) -> bool:
  """Returns whether a process runs; a dead one may wait for its new parent."""
  try:
    return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
  except OSError:
    return False


class Hosts:
  """Agents in separate processes, all on this machine, each with two workers."""

  def __init__(self, folder: pathlib.Path, num_hosts: int):
    self.folder, self.num_hosts = folder, num_hosts
    with contextlib.ExitStack() as stack:
      free = [stack.enter_context(socket.create_server(('127.0.0.1', 0))) for _ in range(num_hosts)]
      self.addresses = [f'127.0.0.1:{each.getsockname()[1]}' for each in free]
    self.address = self.addresses[0]
    self.pids: dict[int, int] = {}

  def start(self, index: int, *, secret: str = 'secret', **facts: str) -> None:
    self.pids[index] = pid = os.fork()
    if pid == 0:
      code = 99
      try:
        code = self._run(index, secret, facts)
      except BaseException:
        traceback.print_exc()
      finally:
        os._exit(code)

  def _run(self, index: int, secret: str, facts: dict[str, str]) -> int:
    os.chdir(self.folder)
    output = os.open(f'agent_{index}.txt', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (os.fdopen(n, 'w', buffering=1) for n in (1, 2))
    if (shift := pathlib.Path(f'clock_{index}')).exists():
      real, seconds = time.time, float(shift.read_text())
      time.time = lambda: real() + seconds
    generations.GRACE_SECONDS, generations.GROW_SECONDS, generations.FIND_SECONDS = 1, 2, 1
    env = {
      **os.environ,
      'PYTHONPATH': str(REPOSITORY),
      'T5X_GPU_DOMAIN': f'host {index}',
      SECRET: secret,
    }

    def start(generation, position, service, variables):
      plans = launch.plan(
        2,
        use_gpus=False,
        numa_mode='off',
        env={**env, 'GENERATION': str(generation.number)},
        gpus=[],
        address=service,
        first=2 * position,
        count=2 * len(generation.hosts),
      )
      plans = [
        dataclasses.replace(p, env={**p.env, **v}) for p, v in zip(plans, variables, strict=True)
      ]
      command = [sys.executable, '-c', WORKER]
      return launch.Group(command, plans, at_once=True, first=2 * position, if_lost=signal.SIGKILL)

    agent = launch.HostAgent(
      start,
      cluster_info=cluster.detect(
        {}, coordinator_address=self.address, process_count=self.num_hosts, process_index=index
      ),
      num_processes=2,
      restarts=5,
      facts={'t5x_gpu': '1', **facts},
      env=env,
      find_problem=lambda: (
        'it had 8 GPUs and has 7 now' if pathlib.Path(f'unfit_{index}').exists() else ''
      ),
      listed=self.addresses,
    )
    signal.signal(signal.SIGTERM, agent.forward)
    try:
      return agent.wait()
    except UserError as error:
      print(f'{type(error).__name__}: {error}', flush=True)
      return 1

  def output(self, index: int) -> str:
    file = self.folder / f'agent_{index}.txt'
    return file.read_text() if file.exists() else ''

  def wait_for(self, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
      outputs = '\n'.join(f'{i}:\n{self.output(i)}' for i in range(self.num_hosts))
      assert time.monotonic() < deadline, outputs
      time.sleep(0.02)

  def workers(self, generation: int, count: int) -> list[int]:
    """Returns the pids of all workers of a generation, once they run."""
    files = [self.folder / f'{generation}_{rank}_of_{count}' for rank in range(count)]
    self.wait_for(lambda: all(file.exists() for file in files))
    texts = [file.read_text().split() for file in files]
    assert len({address for _, address in texts}) == 1
    return [int(pid) for pid, _ in texts]

  def has_link(self, index: int, to: int) -> bool:
    """Returns whether the agent of a host has a connection to the agent of another host."""
    port = int(self.addresses[to].rpartition(':')[2])
    sockets = set()
    for fd in pathlib.Path(f'/proc/{self.pids[index]}/fd').iterdir():
      with contextlib.suppress(OSError):  # it was closed
        sockets.add(os.readlink(fd))
    rows = [row.split() for row in pathlib.Path('/proc/net/tcp').read_text().splitlines()[1:]]
    open_to = {
      f'socket:[{row[9]}]' for row in rows if row[3] == '01' and row[2][-4:] == f'{port:04X}'
    }
    return not sockets.isdisjoint(open_to)

  def kill_agent(self, index: int, *workers: int) -> None:
    """kill -9 of everything on a host."""
    for pid in (self.pids[index], *workers):
      os.kill(pid, signal.SIGKILL)
    os.waitpid(self.pids.pop(index), 0)

  def end(self, index: int) -> int:
    """Returns the exit code of an agent."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
      pid, status = os.waitpid(self.pids[index], os.WNOHANG)
      if pid:
        del self.pids[index]
        return os.waitstatus_to_exitcode(status)
      assert time.monotonic() < deadline, self.output(index)
      time.sleep(0.02)


@pytest.fixture
def three(tmp_path) -> Iterator[Hosts]:
  hosts = Hosts(tmp_path, 3)
  yield hosts
  for pid in hosts.pids.values():
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
  (tmp_path / 'done').touch()  # ends workers that are left


def test_hosts_lose_a_worker_and_then_the_first_host_and_finish_together(three):
  for index in (2, 1, 0):
    three.start(index)
  pids = three.workers(1, 6)

  os.kill(pids[3], signal.SIGKILL)
  pids = three.workers(2, 6)
  assert 'process 3 on host 1' in three.output(
    2
  ) and 'failed (SIGKILL) after step 7; restart 1 of' in (three.output(2))

  three.kill_agent(0, *pids[:2])
  three.workers(3, 4)
  assert 'host 0' in three.output(2) and 'was lost after step 7; restart 2 of' in three.output(2)

  (three.folder / 'done').touch()
  assert [three.end(1), three.end(2)] == [0, 0], three.output(1)


def test_a_stopped_host_is_left_out_and_ends_its_workers_once_it_continues(three):
  for index in range(3):
    three.start(index)
  old = three.workers(1, 6)[4:]
  for pid in (three.pids[2], *old):
    os.kill(pid, signal.SIGSTOP)
  three.workers(2, 4)
  for pid in (*old, three.pids[2]):
    os.kill(pid, signal.SIGCONT)
  three.wait_for(lambda: 'host 0, which leads, is lost' in three.output(2))
  three.wait_for(lambda: not any(map(runs, old)))
  three.wait_for(lambda: three.has_link(2, to=0))  # after the end, no host would answer
  (three.folder / 'done').touch()
  assert [three.end(index) for index in range(3)] == [0, 0, 0], three.output(2)


def test_processes_of_a_killed_agent_are_killed_even_if_they_are_stuck(three):
  (three.folder / 'stuck').touch()
  for index in range(3):
    three.start(index)
  old = three.workers(1, 6)[2:4]
  three.kill_agent(1)
  three.start(1)  # before the others continue without it: the same GPUs are used again
  three.workers(2, 6)
  assert not any(map(runs, old))
  (three.folder / 'done').touch()
  assert [three.end(index) for index in range(3)] == [0, 0, 0], three.output(0)


def test_children_of_a_killed_process_end_while_its_host_waits(three):
  (three.folder / 'children').touch()
  for index in range(3):
    three.start(index)
  workers = three.workers(1, 6)
  files = [three.folder / f'child_of_{rank}' for rank in range(6)]
  three.wait_for(lambda: all(file.exists() and file.read_text() for file in files))
  children = [int(file.read_text()) for file in files]
  try:
    for index in (0, 1):  # so that nothing starts again
      os.kill(three.pids[index], signal.SIGSTOP)
    os.kill(workers[5], signal.SIGKILL)
    three.wait_for(lambda: not any(map(runs, children[4:])))
    assert all(map(runs, children[:4]))
  finally:
    for child in filter(runs, children):
      os.kill(child, signal.SIGKILL)


def test_a_clock_that_differs_is_named_and_the_times_of_the_run_follow_one_clock(three):
  (three.folder / 'clock_1').write_text('-60')
  (three.folder / 'clock_2').write_text('1')
  for index in range(3):
    three.start(index)
  pids = three.workers(1, 6)
  at = time.time()
  os.kill(pids[2], signal.SIGKILL)
  pids = three.workers(2, 6)
  assert 'the clock of host 1 (vm) is 60 s behind' in three.output(1)
  assert 'the clock of' not in three.output(0) + three.output(2)
  environ = [
    dict(
      variable.split('=', 1)
      for variable in pathlib.Path(f'/proc/{pid}/environ').read_text().split('\0')
      if '=' in variable
    )
    for pid in pids
  ]
  ahead = [float(each[interruptions.CLOCK_VARIABLE]) for each in environ]
  assert ahead == pytest.approx([0, 0, -60, -60, 0, 0], abs=5)
  (killed,) = interruptions.history_of(interruptions.facts(environ[0])).interruptions
  assert killed.at == pytest.approx(at, abs=30)
  (three.folder / 'done').touch()
  assert [three.end(index) for index in range(3)] == [0, 0, 0], three.output(0)


@pytest.mark.parametrize('lost', [0, 2])
def test_a_host_that_comes_back_is_taken_in_without_a_failure(three, lost):
  for index in range(3):
    three.start(index)
  three.kill_agent(lost, *three.workers(1, 6)[2 * lost : 2 * lost + 2])
  three.workers(2, 4)
  three.start(lost)
  three.workers(3, 6)
  assert f'host {lost} (vm) joins; the run continues on host 0' in three.output(lost)
  (three.folder / 'done').touch()
  assert [three.end(index) for index in range(3)] == [0, 0, 0], three.output(0)


def test_a_new_agent_finds_the_run_while_host_0_is_away(three):
  for index in range(3):
    three.start(index)
  three.kill_agent(0, *three.workers(1, 6)[:2])
  three.kill_agent(2, *three.workers(2, 4)[2:])
  three.start(2)
  both = [three.folder / f'{generation}_3_of_4' for generation in range(3, 9)]
  three.wait_for(lambda: any(file.exists() for file in both))
  assert 'on host 1 (' in three.output(2).rpartition('launch: ')[2]
  (three.folder / 'done').touch()
  assert [three.end(1), three.end(2)] == [0, 0], three.output(1)


def test_a_host_that_has_lost_a_gpu_leaves_and_is_named_with_both_numbers(three):
  for index in range(3):
    three.start(index)
  workers = three.workers(1, 6)
  (three.folder / 'unfit_2').touch()
  os.kill(workers[0], signal.SIGKILL)
  three.workers(3, 4)  # the second generation was proposed and not started
  assert three.end(2) == 1
  assert 'leaves the run: it had 8 GPUs and has 7 now.' in three.output(2)
  assert f'host 2 ({socket.gethostname()}) leaves the run: it had 8 GPUs' in three.output(0)
  three.start(2)  # by a supervisor; nothing is repaired
  assert three.end(2) == 1
  assert 'cannot take part in the run: it had 8 GPUs and has 7 now.' in three.output(2)
  assert 'the run is saved' not in three.output(0)
  (three.folder / 'done').touch()
  assert [three.end(0), three.end(1)] == [0, 0], three.output(0)


def test_a_stop_signal_ends_the_agents_with_the_code_of_their_workers(three):
  for index in range(3):
    three.start(index)
  three.workers(1, 6)
  for pid in three.pids.values():  # as scancel does
    os.kill(pid, signal.SIGTERM)
  assert {three.end(index) for index in range(3)} == {85}, three.output(0)


def test_agents_with_another_secret_or_version_are_refused_by_name(three):
  three.start(0)
  three.start(1, secret='stale')
  assert three.end(1) == 1
  assert f'has another {SECRET}, but the agent at' in three.output(1), three.output(0)
  three.start(2, t5x_gpu='2')
  assert three.end(2) == 1
  assert 'has t5x_gpu = 2, but host 0' in three.output(2), three.output(0)


def test_an_agent_whose_messages_cannot_be_read_is_refused_and_named_on_both_sides(three):
  @dataclasses.dataclass(frozen=True)
  class Hello:
    of_a_newer_version: int = 1

  three.start(0)
  newer = links.Links('secret', run_id='run')

  def poll() -> list[links.Event]:
    events = newer.poll(0.01)
    if any(isinstance(event, links.Failed) for event in events):  # host 0 does not listen yet
      newer.connect(0, [three.address])
    return events

  newer.connect(0, [three.address])
  opened = until(poll, links.Opened)[-1]
  newer.send(opened.link, Hello())
  came = until(poll, links.Came)[-1]
  refused = generations.message_from_json(came.message)
  newer.leave()
  assert refused.is_final
  assert 'The agent at 127.0.0.1 has another version of t5x_gpu than host 0' in refused.reason
  three.wait_for(lambda: 'refused an agent: 127.0.0.1 has another version' in three.output(0))


def test_a_message_over_a_link_that_an_earlier_message_of_the_same_poll_closed_is_ignored(
  monkeypatch,
):
  with socket.create_server(('127.0.0.1', 0)) as listener:
    address = f'127.0.0.1:{listener.getsockname()[1]}'
    agent = launch.HostAgent(
      lambda *_: None,
      cluster_info=cluster.detect(
        {}, coordinator_address=address, process_count=3, process_index=0
      ),
      num_processes=1,
      restarts=1,
      facts={},
      env={},
    )
    agent._links.listen([listener])
    agent._do(agent._member.start(time.monotonic()))
    other = links.Links('', run_id='run')

    def poll() -> list[links.Event]:
      agent._take_events()
      return other.poll(0.01)

    hello = generations.Hello(generations.Host(1, 'gpu-1', 'one', 'gpu-1:1'), {}, 'machine 1')
    two = []
    for _ in range(2):
      other.connect(1, [address])
      two.append(until(poll, links.Opened)[-1].link)
    other.send(two[0], hello)
    assert until(poll, links.Came)[-1].link == two[0]
    other.send(two[1], hello)  # the same agent over a new link, which closes the first one
    other.send(two[0], generations.Asked(signal.SIGTERM))
    # One poll may return both events, in either order; Hello comes first here, and closes the link.
    events: list[links.Event] = []
    while len(events) < 2:
      events += until(lambda: [*agent._links.poll(0.01), *other.poll(0)], links.Came)
    events.sort(key=lambda event: event.message['kind'], reverse=True)
    with monkeypatch.context() as patch:
      patch.setattr(agent._links, 'poll', lambda _: events)
      agent._take_events()
    came = [event.link for event in until(poll, links.Came) if isinstance(event, links.Came)]
    assert came == two[1:]
    assert list(agent._member._followers) == [1] and agent._exit is None
    other.leave()
    agent._links.leave()


@pytest.mark.parametrize(
  'flags',
  [
    '--host_count=2 --host_index=0 --coordinator_address=node1:62000',
    '--restarts=3 --host_count=2 --host_index=0',
    '--restarts=3 --host_count=2 --host_index=2 --coordinator_address=node1:62000',
    '--restarts=3 --host_count=2 --host_index=1 --coordinator_address=node1:62000 --spares=2',
    '--restarts=3 --host_count=2 --host_index=1 --coordinator_address=node1:62000,node2',
    '--restarts=3 --host_count=2 --host_index=0 --coordinator_address=node1:62000,',
    '--restarts=3 --host_count=2 --host_index=0 --coordinator_address=',
    '--restarts=3 --host_count=2 --host_index=0 --coordinator_address=0.0.0.0:62000',
    '--restarts=3 --host_count=2 --host_index=0 --coordinator_address=[::]:62000',
    '--restarts=3 --host_count=2 --host_index=0 --coordinator_address=a:62000,a:62000',
    '--restarts=0 --host_count=2 --host_index=0 --coordinator_address=node1:62000',
    '--restarts=3 --host_count=2 --host_index=1 --coordinator_address=a:62000,b:62000,c:62000',
    '--restarts=3 --spares=1',
    '--spares=1',
  ],
)
def test_flags_of_several_hosts_that_do_not_fit_each_other_are_refused(flags):
  with raises(ConfigError):
    launch.main([*flags.split(), '--no_gpu', '--', '--gin_file=x.gin'])


def test_addresses_of_hosts_may_have_spaces_after_their_commas():
  flags = argparse.Namespace(restarts=3, spares=0, host_count=2, host_index=1)
  flags.coordinator_address = 'node1.cluster:62000, [fd00::1]:62001'
  assert launch._agents(flags).coordinator_address == 'node1.cluster:62000'
  assert launch._listed(flags.coordinator_address) == ['node1.cluster:62000', '[fd00::1]:62001']


def test_a_kubernetes_pod_knows_the_number_of_its_host(monkeypatch):
  for name, value in {'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'JOB_COMPLETION_INDEX': '1'}.items():
    monkeypatch.setenv(name, value)
  flags = argparse.Namespace(restarts=3, spares=0, host_index=None)
  flags.coordinator_address = 'job-0.job:62000,job-1.job:62000'
  flags.host_count = 1
  with pytest.raises(ConfigError):  # number 1 of 1
    launch._agents(flags)
  flags.host_count = 2
  info = launch._agents(flags)
  assert (info.process_index, info.process_count) == (1, 2)
  assert info.coordinator_address == 'job-0.job:62000'


def test_several_launches_on_one_host_are_refused(monkeypatch):
  slurm = {'JOB_ID': 7, 'STEP_NODELIST': 'gpu-[1-2]', 'PROCID': 0, 'LOCALID': 0, 'NODEID': 0}
  slurm.update(STEP_NUM_TASKS=4, STEP_TASKS_PER_NODE='2(x2)')
  for name, value in slurm.items():
    monkeypatch.setenv(f'SLURM_{name}', str(value))
  with raises(ClusterError):
    launch.main(['--restarts=3', '--no_gpu', '--', '--gin_file=x.gin'])


# launch, which takes a host in soon after a start.
LAUNCH = """
from t5x_gpu import cli, launch
from t5x_gpu.runtime.cluster import generations
generations.GROW_SECONDS = 5
cli.run_main(launch.main)
"""


@pytest.mark.slow
def test_training_loses_a_worker_and_a_host_which_returns_and_has_the_losses_of_an_unbroken_run(
  tmp_path,
):
  (alone := tmp_path / 'alone').mkdir()
  (folder := tmp_path / 'hosts').mkdir()
  # Nine rows on three hosts; on two, a row of weight 0 fills them.
  # Long enough for the processes to agree on a pause after `go`.
  sizes = {'BATCH_SIZE': 9, 'TRAIN_STEPS': 400, 'SAVE_PERIOD': 20, 'LEARNING_RATE': 1e-4}
  reference = Project(alone)
  assert reference.run(num_devices=1, **sizes).code == 0
  project = Project(folder)
  # Each start waits after 25 batches, until the test ends a process.
  env = {**os.environ, 'PYTHONPATH': str(REPOSITORY), 'HOLD_AFTER': '25', SECRET: 'secret'}
  env['XLA_FLAGS'] = xla_flags(1)
  env.update(JAX_COMPILATION_CACHE_DIR=str(tmp_path / 'compiled'))
  env.update(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0')
  with socket.create_server(('127.0.0.1', 0)) as free:
    address = f'127.0.0.1:{free.getsockname()[1]}'

  def start(index: int, *flags: str, num_hosts: int = 3) -> subprocess.Popen:
    hosts = [f'--host_count={num_hosts}', f'--host_index={index}']
    hosts.append(f'--coordinator_address={address}')
    argv = project.argv(*flags, DATA_MODULE='held_data', **sizes)
    command = [sys.executable, '-c', LAUNCH, '--no_gpu', '--nproc=1', '--restarts=2']
    with open(folder / f'agent_{index}.txt', 'ab') as output:
      return subprocess.Popen(
        [*command, *hosts, '--', *argv],
        cwd=folder,
        env={**env, 'T5X_GPU_DOMAIN': f'host {index}'},
        stdout=output,
        stderr=subprocess.STDOUT,
      )

  def output() -> str:
    return '\n'.join(file.read_text() for file in sorted(folder.glob('agent_*.txt')))

  def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 3 * DEADLINE_SECONDS
    while not condition():
      assert time.monotonic() < deadline, output()
      assert all(agent.poll() is None for agent in agents), output()
      time.sleep(0.05)

  def children(pid: int) -> list[int]:
    return [int(n) for n in subprocess.check_output(['pgrep', '-P', str(pid)], text=True).split()]

  def worker_of(agent: subprocess.Popen) -> int:
    (server,) = children(agent.pid)  # the fork server
    return children(server)[0]

  held = folder / 'held'
  ahead = ('--precompile', '--gin.Partitioner.uneven_batch=fill')
  agents = [start(index, *ahead, num_hosts=2) for index in range(2)]
  try:
    assert [agent.wait(DEADLINE_SECONDS) for agent in agents] == [0, 0], output()
    agents = [start(index) for index in range(3)]
    wait_for(lambda: held.exists() and project.steps()[-1:] == [20] and 24 in project.metrics())
    first = project.metrics()
    held.unlink()
    os.kill(worker_of(agents[1]), signal.SIGKILL)

    wait_for(lambda: held.exists() and project.steps()[-1:] == [40])
    lost = agents.pop(2)
    worker = worker_of(lost)
    lost.kill()
    lost.wait()
    os.kill(worker, signal.SIGKILL)
    held.unlink()

    wait_for(lambda: held.exists() and project.steps()[-1:] == [60])
    agents.append(start(2))
    wait_for(lambda: 'to continue with host 2' in output())
    (folder / 'go').touch()
    codes = [agent.wait(3 * DEADLINE_SECONDS) for agent in agents]
  finally:
    for agent in agents:
      agent.kill()
      agent.wait()
  assert codes == [0, 0, 0], output()
  # Only the first start compiled: `--precompile` had, for two hosts.
  read = re.findall(r'compiled programs: (\d of \d) read .*?(; process|$)', output(), re.MULTILINE)
  assert read[2:] == [('2 of 2', '')] * 3, output()
  assert 'process 1 on host 1' in output() and '(vm) joins; the run continues on' in output()
  costs = costs_of(read_run(project.model_dir).accounts)
  assert [cost.kind for cost in costs] == [
    interruptions.KILLED,
    interruptions.LOST_HOST,
    interruptions.JOINED,
  ]
  assert all(cost.noticing is not None and cost.restarting > 0 for cost in costs)
  assert 0 < costs[0].repeated_steps and 'process 1 on host 1' in costs[0].cause
  losses, expected = project.metrics(), reference.metrics()
  repeated = [step for step in first if step > 20]
  assert repeated and all(losses[step] == first[step] for step in repeated)
  assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_host_whose_processes_see_another_number_of_devices_ends_the_run_by_name(tmp_path):
  project = Project(tmp_path)
  with socket.create_server(('127.0.0.1', 0)) as free:
    address = f'127.0.0.1:{free.getsockname()[1]}'
  agents = [
    subprocess.Popen(
      [sys.executable, '-m', 't5x_gpu.launch', '--no_gpu', '--nproc=1', '--restarts=9']
      + ['--host_count=3', f'--host_index={index}', f'--coordinator_address={address}', '--']
      + project.argv(),
      cwd=tmp_path,
      env={
        **os.environ,
        'PYTHONPATH': str(REPOSITORY),
        'XLA_FLAGS': xla_flags(devices),
        'T5X_GPU_DOMAIN': f'host {index}',
        SECRET: 'secret',
      },
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for index, devices in enumerate((1, 2, 1))
  ]
  outputs = [agent.communicate(timeout=3 * DEADLINE_SECONDS)[0] for agent in agents]
  assert [agent.returncode for agent in agents] == [1, 1, 1], outputs[0]
  for output in outputs:
    assert 'restart 1' not in output and 'another start would end with the same error' in output
  name = socket.gethostname()
  assert f'1 in most of them, but 2 in process 1 on {name}.' in ''.join(outputs)
