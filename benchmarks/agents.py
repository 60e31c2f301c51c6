"""Agents of many hosts, without processes that train: what a restart costs the host that leads.

    python -m benchmarks.agents                    # 64, 128 and 512 hosts
    python -m benchmarks.agents --hosts 16

Each host is an agent of `launch` (`runtime/cluster/generations.py`) with its own connections over
loopback; the leader has its process to itself. Measured are CPU seconds, bytes and connections of
the leader at the first start, when a process has failed, and when a host is lost. Writes
results/agents.json.
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import pathlib
import socket
import time
from collections.abc import Sequence
from typing import Optional

from benchmarks.ranks import num_sockets
from t5x_gpu.runtime import machine
from t5x_gpu.runtime.cluster import addresses, generations, links

OUT = pathlib.Path(__file__).parent / 'results' / 'agents.json'
HOSTS = (64, 128, 512)
HOSTS_PER_WORKER = 64
GPUS_PER_HOST = 8
SECONDS = 600
SECRET = 'secret of the benchmark'
POLL_SECONDS = 0.02


class Agent:
  """A host whose processes do nothing, and end as soon as the agent ends them."""

  def __init__(self, index: int, count: int, port: int):
    self._leader = f'127.0.0.1:{port}'
    self._links = links.Links(SECRET, run_id='agents')
    server = socket.create_server(('127.0.0.1', port if index == 0 else 0), backlog=count)
    self._links.listen([server])
    me = generations.Host(
      index,
      f'gpu-{index:04}.cluster.example',
      f'{index:032x}',
      addresses.join('127.0.0.1', server.getsockname()[1]),
    )
    self._member = generations.Member(
      me,
      host_count=count,
      restarts=1_000_000,
      processes_per_host=GPUS_PER_HOST,
      facts={'t5x_gpu': '0' * 64, 'flags of the run': '1' * 64},
      machine=me.name,
      start_seconds=SECONDS,
    )
    self._count = count
    self.num_bytes = self.num_starts = 0
    self._do(self._member.start(time.monotonic()))

  @property
  def num_hosts(self) -> int:
    """Hosts of the current start."""
    return len(self._member.started.hosts) if self._member.started else 0

  def poll(self) -> None:
    for event in self._links.poll(POLL_SECONDS):
      now = time.monotonic()
      match event:
        case links.Opened(index, link):
          self._do(self._member.linked(index, link, now))
        case links.Failed(index, _):
          self._do(self._member.unreachable(index, now))
        case links.Closed(link, silent_seconds):
          self._do(self._member.link_closed(link, now, silent_seconds=silent_seconds))
        case links.Came(link, value):
          self._do(self._member.received(link, generations.message_from_json(value), now))
    self._do(self._member.tick(time.monotonic()))

  def fail(self) -> None:
    """A process of this host fails."""
    self._end(-9)

  def leave(self) -> None:
    """The host is lost."""
    self._links.leave()

  def _end(self, code: Optional[int]) -> None:
    counts = tuple(range(1, self._count + 1))
    now = time.time()
    report = generations.HostReport(
      self._member.started.number,
      code,
      (0,) if code else (),
      self.num_starts * 100,  # a failure at the same step would end the run
      host_counts=counts,
      ended_at=now,
      stepped_at=now,
    )
    self._do(self._member.processes_ended(report, time.monotonic()))

  def _do(self, actions: Sequence[generations.Action]) -> None:
    for action in actions:
      match action:
        case generations.Send(link, message):
          self.num_bytes += self._links.send(link, message)
        case generations.Connect(index, address):
          self._links.connect(index, [address or self._leader])
        case generations.Drop(link):
          self._links.close(link)
        case generations.Offer(number):
          self._do(self._member.offered(number, '127.0.0.1:1', time.monotonic()))
        case generations.StartProcesses():
          self.num_starts += 1
        case generations.EndProcesses():
          self._end(None)
        case generations.Exit(_, problem):
          raise AssertionError(problem)


def follow(indices: Sequence[int], count: int, port: int, fails, leaves) -> None:
  """A process with some of the hosts."""
  agents = {index: Agent(index, count, port) for index in indices}
  while True:
    for agent in agents.values():
      agent.poll()
    if 1 in agents and agents[1].num_hosts and fails.is_set():
      fails.clear()
      agents[1].fail()
    if count - 1 in agents and leaves.is_set():
      agents.pop(count - 1).leave()


def lead(count: int, answer: multiprocessing.connection.Connection) -> None:
  """Sends what each restart costs the agent of host 0."""
  machine.allow_open_files()
  with socket.create_server(('127.0.0.1', 0)) as server:
    port = server.getsockname()[1]
  spawn = multiprocessing.get_context('spawn')
  fails, leaves = spawn.Event(), spawn.Event()
  agent = Agent(0, count, port)
  num_workers = -(-count // HOSTS_PER_WORKER)
  workers = []
  for i in range(num_workers):
    args = range(1 + i, count, num_workers), count, port, fails, leaves
    workers.append(spawn.Process(target=follow, args=args, daemon=True))
    workers[-1].start()
  rows = {}
  for name, begin in (('start', None), ('failed_process', fails.set), ('lost_host', leaves.set)):
    before = agent.num_starts, agent.num_bytes, time.monotonic(), time.process_time()
    if begin:
      begin()
    while agent.num_starts == before[0]:
      agent.poll()
      assert all(worker.is_alive() for worker in workers)
    starts, sent, seconds, cpu = before
    rows[name] = {
      'hosts': agent.num_hosts,
      'seconds': round(time.monotonic() - seconds, 2),
      'cpu_seconds': round(time.process_time() - cpu, 2),
      'bytes_sent': agent.num_bytes - sent,
      'sockets': num_sockets(),
    }
  answer.send(rows)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--hosts', type=int, nargs='+', default=HOSTS)
  parser.add_argument('--out', type=pathlib.Path, default=OUT)
  args = parser.parse_args()
  found = {}
  for count in args.hosts:
    here, there = multiprocessing.Pipe()
    multiprocessing.get_context('spawn').Process(target=lead, args=(count, there)).start()
    there.close()  # or `recv` would wait for a process that has failed
    found[str(count)] = here.recv()
    for name, row in found[str(count)].items():
      print(f'{count} hosts, {name}: {row}', flush=True)
    what = 'the agent of host 0; all agents share two CPU cores'
    args.out.write_text(json.dumps({'what': what, 'rows': found}, indent=1) + '\n')


if __name__ == '__main__':
  main()
