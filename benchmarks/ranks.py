"""Many ranks without devices: what a start, heartbeats, a death and a hang cost process 0.

    python -m benchmarks.ranks                     # 512 and 1,024 ranks, four minutes on two cores
    python -m benchmarks.ranks --ranks 64 --checkpoints 64

Rank 0 has its process to itself; the other ranks are threads of a few more processes. They use
t5x_gpu's rendezvous and watchdog, and JAX's coordination service, and run in a separate network
namespace (`unshare --net`), where rank 0 sends or receives every byte, headers included. A
checkpoint of as many processes, with a chunk of each array per process, shows how many files they
write and how long process 0 merges the indexes. Writes results/ranks.json.
"""

import argparse
import concurrent.futures
import contextlib
import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional

import numpy as np

from t5x_gpu.checkpoint.store import StateWriter
from t5x_gpu.runtime.cluster import addresses, coordination, jax_internals
from t5x_gpu.runtime.cluster.cluster import ClusterInfo
from t5x_gpu.runtime.cluster.members import ClusterMember
from t5x_gpu.runtime.cluster.rendezvous import meet, new_secret
from t5x_gpu.runtime.watchdog import Watchdog, WatchdogConfig

OUT = pathlib.Path(__file__).parent / 'results' / 'ranks.json'
RANKS = (512, 1024)
RANKS_PER_HOST = 8
RANKS_PER_WORKER = 128  # more threads would wait for each other
ROUNDS = 5  # of heartbeats
SECONDS = 600
CHECKPOINTS = (512, 1024, 4096)
ARRAYS = 36  # parameters of a stack of layers, each with two moments
OWN_NETWORK = ('unshare', '--map-root-user', '--net')
_IN_OWN_NETWORK = 'RANKS_IN_OWN_NETWORK'


def port_of(address: str) -> int:
  return addresses.split(address)[1]


class Clock:
  """A watchdog's clock that a phase sets, so that no phase waits for a deadline."""

  now = 0.0

  def __call__(self) -> float:
    return self.now


class Prefixed:
  """A store that prefixes every key, so that several watchdogs can share one service."""

  def __init__(self, store: coordination.Store, prefix: str):
    self._store, self._prefix = store, prefix

  def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
    self._store.key_value_set(f'{self._prefix}/{key}', value, allow_overwrite=allow_overwrite)

  def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
    return self._store.key_value_dir_get(f'{self._prefix}/{key}')

  def has_ended(self) -> bool:
    return False


class Rank:
  """One process of the run; each method is a phase, which all ranks do at the same time."""

  def __init__(self, index: int, count: int, port: int, secret: str):
    self._index, self._count, self._secret = index, count, secret
    self._info = ClusterInfo(
      kind='flags',
      process_index=index,
      process_count=count,
      run_id='ranks',
      coordinator_address=f'127.0.0.1:{port}',
    )
    self._client: Optional[jax_internals.CoordinationClient] = None
    self._dogs: dict[str, Watchdog] = {}
    self._clock = Clock()
    self._end: Optional[int] = None

  def rendezvous(self) -> None:
    """Meets the others; process 0 starts JAX's service."""
    host = self._index // RANKS_PER_HOST
    key = f'gpu-{host:04}.cluster.example//{host:08x}-1b07-4e9c-9a5f-1f5a2f0c7d11'
    me = ClusterMember(
      self._index,
      f'gpu-{host:04}.cluster.example',
      key,
      key,
      gpus=(f'GPU-{self._index:08x}-7c1d-0a3b-55e2-8e0d1c2b3a49',),
      versions='jax 0.10.2, jaxlib 0.10.2',
      code='0123456789abcdef',
    )
    lib = jax_internals._private('lib')._jax
    with meet(self._info, me, timeout_seconds=SECONDS, secret=self._secret) as meeting:
      if self._index == 0:
        self._service = lib.get_distributed_runtime_service(
          f'0.0.0.0:{port_of(meeting.address)}', self._count, heartbeat_timeout=SECONDS
        )
    assert len(meeting.members) == self._count
    # With one address for all, the ranks of a process would share one connection.
    own = f'127.1.{self._index // 250}.{self._index % 250 + 1}'
    self._address = addresses.join(own, port_of(meeting.address))
    self._client = lib.get_distributed_runtime_client(
      self._address, self._index, init_timeout=SECONDS, heartbeat_timeout=SECONDS
    )

  def connect(self) -> None:
    """Connects to JAX's service."""
    self._client.connect()
    store = coordination._JaxStore(self._client, self._address)
    for name in ('death', 'hang'):
      self._dogs[name] = Watchdog(
        WatchdogConfig(period_seconds=0.01),
        process_index=self._index,
        process_count=self._count,
        store=Prefixed(store, name),
        leave=self._leave,
        clock=self._clock,
      )

  def _leave(self, code: int) -> None:
    self._end = code

  def agreement(self) -> None:
    """Every rank learns a value of every rank."""
    found = coordination.exchange_by(
      self._client, f'{self._index % 2:016x}', name='all', index=self._index, count=self._count
    )
    assert len(found) == self._count

  def heartbeats(self) -> None:
    """One heartbeat, and a look for a verdict."""
    for dog in self._dogs.values():
      dog._talk()

  def death(self) -> None:
    """The last rank is silent: process 0 says so, and the others end."""
    if self._index < self._count - 1:
      self._ends('death', after=WatchdogConfig.dead_seconds + 1)

  def hang(self) -> None:
    """All ranks exceed the deadline of a step at the same time."""
    self._ends('hang', after=WatchdogConfig.compile_seconds + 1)

  def _ends(self, name: str, *, after: float) -> None:
    self._end = None
    self._dogs[name]._talk()  # a heartbeat before the clock jumps
    self._clock.now += after
    while self._end is None:
      self._dogs[name]._talk()
      self._dogs[name]._watch()


PHASES = ('rendezvous', 'connect', 'agreement', *('heartbeats',) * ROUNDS, 'death', 'hang')


def at_once(ranks: list[Rank], gate: Callable[[], object]) -> Iterator[None]:
  """Lets the ranks do their phases, all at the same time; yields before and after each."""
  with concurrent.futures.ThreadPoolExecutor(len(ranks)) as pool:
    for phase in PHASES:
      gate()
      yield
      for done in [pool.submit(getattr(rank, phase)) for rank in ranks]:
        done.result(SECONDS)
      gate()
      yield


def work(
  indices: range, count: int, port: int, secret: str, gate: threading.Barrier, cpu: Sequence[float]
) -> None:
  """A process with some of the ranks; `cpu` gets its CPU seconds at the end of each phase."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the watchdogs' reports
  gc.disable()  # each rank holds a table of all: a collection here would visit all tables
  ranks = [Rank(i, count, port, secret) for i in indices]
  for number, _ in enumerate(at_once(ranks, lambda: gate.wait(SECONDS))):
    cpu[number] = time.process_time()
  gate.wait(SECONDS)
  os._exit(0)  # without JAX's own end of a run


def bytes_of_network() -> int:
  """Returns the bytes that have passed this network."""
  text = pathlib.Path('/proc/net/dev').read_text()
  return int(next(line for line in text.splitlines() if 'lo:' in line).split()[1])


def num_sockets() -> int:
  """Returns the sockets that this process holds."""
  found = 0
  for each in os.listdir('/proc/self/fd'):
    with contextlib.suppress(OSError):
      found += os.readlink(f'/proc/self/fd/{each}').startswith('socket:')
  return found


def measure(count: int, answer: multiprocessing.connection.Connection) -> None:
  """Sends, for each phase, seconds, CPU seconds, bytes and sockets of process 0."""
  with socket.create_server(('127.0.0.1', 0)) as server:
    port = server.getsockname()[1]
  spawn = multiprocessing.get_context('spawn')
  num_workers = -(-count // RANKS_PER_WORKER)
  gate, secret = spawn.Barrier(num_workers + 1), new_secret()
  cpu = [spawn.Array('d', 2 * len(PHASES)) for _ in range(num_workers)]
  for i in range(num_workers):
    own = range(1 + i, count, num_workers)
    spawn.Process(target=work, args=(own, count, port, secret, gate, cpu[i])).start()
  most, stop = [0], threading.Event()

  def watch() -> None:
    while not stop.wait(0.05):
      most[0] = max(most[0], num_sockets())

  threading.Thread(target=watch, daemon=True).start()
  os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
  rows: dict[str, list[dict[str, float]]] = {}
  before = ()
  moments = at_once([Rank(0, count, port, secret)], lambda: gate.wait(SECONDS))
  for number, _ in enumerate(moments):
    now = time.monotonic(), time.process_time(), bytes_of_network()
    if number % 2 == 0:
      before, most[0] = now, num_sockets()
      continue
    seconds, own, sent = (after - earlier for after, earlier in zip(now, before))
    rows.setdefault(PHASES[number // 2], []).append(
      {
        'seconds': round(seconds, 2),
        'cpu_seconds_of_process_0': round(own, 2),
        'bytes': sent,
        'sockets': max(most[0], num_sockets()),
      }
    )
  gate.wait(SECONDS)
  for phase, found in rows.items():
    at = PHASES.index(phase)
    others = sum(each[2 * at + 1] - each[2 * at] for each in cpu)
    found[0]['cpu_seconds_of_others'] = round(others, 2)
  median = {
    phase: {k: sorted(r.get(k, v) for r in found)[len(found) // 2] for k, v in found[0].items()}
    for phase, found in rows.items()
  }
  answer.send(median)
  os._exit(0)


def checkpoint(count: int) -> dict[str, float]:
  """Returns the number of files of a checkpoint, and what merging its indexes costs."""
  arrays = {f'state/layers/array_{i}': ((count, 256), np.dtype('float32')) for i in range(ARRAYS)}
  chunks = dict.fromkeys(arrays, (1, 256))
  with tempfile.TemporaryDirectory() as folder:
    for process in range(count):
      writer = StateWriter(
        pathlib.Path(folder), step=1, arrays=arrays, chunks=chunks, process=process
      )
      for name in arrays:
        writer.write(name, (slice(process, process + 1),), np.full((1, 256), process, 'float32'))
      writer.flush()
    files = sum(len(names) for _, _, names in os.walk(folder))
    seconds, cpu = time.monotonic(), time.process_time()
    writer.merge(num_processes=count)
    return {
      'files': files,
      'merge_seconds': round(time.monotonic() - seconds, 2),
      'merge_cpu_seconds': round(time.process_time() - cpu, 2),
    }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--ranks', type=int, nargs='*', default=RANKS)
  parser.add_argument('--checkpoints', type=int, nargs='*', default=CHECKPOINTS)
  parser.add_argument('--name', default='now', help='name of these figures in the file')
  parser.add_argument('--out', type=pathlib.Path, default=OUT)
  args = parser.parse_args()
  if _IN_OWN_NETWORK not in os.environ:
    command = [sys.executable, '-m', 'benchmarks.ranks', *sys.argv[1:], f'--out={args.out}']
    script = 'ip link set lo up && exec "$@"'
    sys.exit(
      subprocess.call(
        [*OWN_NETWORK, 'sh', '-c', script, 'sh', *command],
        env={**os.environ, _IN_OWN_NETWORK: '1', 'JAX_PLATFORMS': 'cpu'},
      )
    )
  known = json.loads(args.out.read_text())['rows'] if args.out.exists() else {}
  for count in args.ranks:
    here, there = multiprocessing.Pipe()
    spawn = multiprocessing.get_context('spawn')
    spawn.Process(target=measure, args=(count, there)).start()
    found = known.setdefault(args.name, {})[str(count)] = here.recv()
    for phase, row in found.items():
      print(f'{count} ranks, {phase}: {row}', flush=True)
    save(args.out, known)
  for count in args.checkpoints:
    found = known.setdefault(args.name, {}).setdefault(str(count), {})
    found['checkpoint'] = checkpoint(count)
    print(f'{count} processes, checkpoint: {found["checkpoint"]}', flush=True)
    save(args.out, known)


def save(out: pathlib.Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
  what = 'process 0 of N ranks, 8 per host; all ranks share two CPU cores'
  out.write_text(json.dumps({'what': what, 'rows': rows}, indent=1) + '\n')


if __name__ == '__main__':
  main()
