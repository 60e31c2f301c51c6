"""A run on several hosts that random faults hit again and again: `python -m benchmarks.faults`.

    python -m benchmarks.faults                                  # 100 faults, 20 pairs: 1.5 hours
    python -m benchmarks.faults --faults 5 --pairs 1             # each fault once, and two at once

The hosts are network namespaces on one switch (root and iproute2 are needed), each with one
`t5x_gpu.launch --restarts`, a folder for its local checkpoints, and a supervisor that starts a
`launch` again that ended. Each fault hits a run that trains on all hosts:

    worker   kill -9 of a process that trains
    agent    kill -9 of a host's launch
    host     kill -9 of everything on a host, whose local checkpoints are lost as well
    power    the same, and no connection is closed: the host is silent
    stop     SIGSTOP of everything on a host, later SIGCONT
    hang     SIGSTOP of a host's launch alone, later SIGCONT
    cut      the network of a host is cut, and later works again

A pair is two of these at the same time, on two hosts. Measured are the seconds until an agent
names the failure, until the next step is done, and until all hosts train again, and the steps that
are repeated. At the end, each step has the loss of a run without faults, and no process is left.
Writes results/faults.json after each fault.
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

from t5x_gpu.metrics import goodput
from tests.cluster.netlab import NetLab, NetLabError
from tests.helpers_train import REPOSITORY, WATCHED_BATCHES, Project
from tests.helpers_xla import set_default_flags, xla_flags

OUT = pathlib.Path(__file__).parent / 'results' / 'faults.json'
KINDS = ('worker', 'agent', 'host', 'power', 'stop', 'hang', 'cut')
SILENT = ('stop', 'hang', 'cut')
SECONDS_OF_FAULT = (2, 30)
SECONDS_OF_SILENCE = (5, 30)  # a shorter one costs nothing
PORT = 62000
LOCAL_PERIOD = 10
SAVE_PERIOD = 500
SETTINGS = {
  'DATA_MODULE': 'paced_data',
  'TRAIN_STEPS': 1_000_000,  # more than any loop needs
  'LEARNING_RATE': 1e-4,
  'SAVE_PERIOD': SAVE_PERIOD,
  'CheckpointConfig.local_checkpoint_dir': '$LOCAL_OF_HOST',
  'CheckpointConfig.local_period': LOCAL_PERIOD,
}
TOLERANCE = 1e-5
POLL_SECONDS = 0.03
RECOVER_SECONDS = 400
END_SECONDS = 120
LEAVE_SECONDS = 10
STRAY_SECONDS = 60  # a process without its launch has this long to save
# Without limits on the faults of a day, and soon after a start a host is taken in.
LAUNCH = """
from t5x_gpu import cli, launch
from t5x_gpu.runtime.cluster import generations
generations.GROW_SECONDS = 15
generations.BAD_HOST_FAILURES = 10**9
cli.run_main(launch.main)
"""
PACED_DATA = (
  """import importlib, os, time
_inner = importlib.import_module('t5x_gpu.data.synthetic')
_seconds = float(os.environ.get('SECONDS_PER_STEP', 0))


def before(number):
  time.sleep(_seconds)

"""
  + WATCHED_BATCHES
)
_MARK = 'T5X_GPU_FAULTS_OF'  # set for all processes of the loop, with the number of their host
_STARTS = re.compile(
  r'launch: .*(?:restart \d+ of at most \d+|the run continues|the run starts) on (host .*)'
)
_DETECTED = re.compile(r'failed first|failed \(|is lost|lost after|lost contact')


class LoopError(Exception):
  """The run did not survive a fault."""


@dataclasses.dataclass(frozen=True)
class Fault:
  """A fault of one host.

  Attributes:
    kind: one of `KINDS`.
    host: the host that it hits.
    seconds: how long it lasts, or until the launch of the host is started again.
  """

  kind: str
  host: int
  seconds: float

  def __str__(self) -> str:
    lasts = '' if self.kind == 'worker' else f' for {self.seconds:.0f} s'
    return f'{self.kind} of host {self.host}{lasts}'


def draw(num_faults: int, num_pairs: int, num_hosts: int, seed: int) -> list[tuple[Fault, ...]]:
  """Returns faults in random order; kinds and hosts take turns, so that each is hit as often."""
  chance = random.Random(seed)

  def decks(cards: Sequence[Any]) -> Iterator[Any]:
    while True:
      yield from chance.sample(cards, len(cards))

  def fault(kind: str, host: int) -> Fault:
    range_of = SECONDS_OF_SILENCE if kind in SILENT else SECONDS_OF_FAULT
    return Fault(kind, host, round(chance.uniform(*range_of), 1))

  every = decks(list(itertools.product(KINDS, range(num_hosts))))
  kinds, hosts = decks(KINDS), {kind: decks(range(num_hosts)) for kind in KINDS}
  drawn = [(fault(kind, next(hosts[kind])),) for kind in itertools.islice(kinds, num_faults)]
  for _ in range(num_pairs):
    first = next(every)
    second = next(each for each in every if each[1] != first[1])
    drawn.append((fault(*first), fault(*second)))
  return chance.sample(drawn, len(drawn))


@dataclasses.dataclass(frozen=True)
class Marked:
  """A process of the loop."""

  pid: int
  parent: int
  host: int
  is_zombie: bool


def marked() -> dict[int, Marked]:
  """Returns the processes that this loop has started, directly or not."""
  found = {}
  for folder in pathlib.Path('/proc').iterdir():
    if not folder.name.isdigit():
      continue
    with contextlib.suppress(OSError):
      variables = (folder / 'environ').read_bytes().split(b'\0')
      mark = next((v for v in variables if v.startswith(f'{_MARK}='.encode())), None)
      if mark is None:
        continue
      loop, _, host = mark.decode().partition('=')[2].partition(' ')
      if loop == str(os.getpid()):
        stat = (folder / 'stat').read_text().rpartition(')')[2].split()
        pid = int(folder.name)
        found[pid] = Marked(pid, int(stat[1]), int(host), stat[0] in 'ZX')
  return found


class Loop:
  """The hosts, what is known of the run on them, and what is still to be done to them."""

  def __init__(self, lab: NetLab, folder: pathlib.Path, *, hosts: int, devices: int, pace: float):
    self.lab, self.num_hosts, self._devices = lab, hosts, devices
    folder.mkdir(parents=True)
    (folder / 'paced_data.py').write_text(PACED_DATA)
    self.project = Project(folder)
    self._folder, self._pace = folder, pace
    self._agents: dict[int, subprocess.Popen] = {}
    self._due: list[tuple[float, Callable[[], None]]] = []
    self._read = collections.Counter[int]()
    self._silent_since: dict[int, float] = {}
    self.ended: list[dict[str, Any]] = []  # launches that have ended by themselves
    self.lines: list[tuple[float, int, str]] = []
    self.starts: list[tuple[float, tuple[int, ...]]] = []  # when, on which hosts
    self.steps: list[tuple[float, int]] = []  # when the last step in metrics.jsonl was which
    self._seen: Optional[tuple[int, int]] = None
    self._strays_at = 0.0
    self.strays: dict[int, tuple[float, float]] = {}  # process -> first and last seen

  # Hosts.

  def start(self, host: int) -> None:
    """Starts the launch of a host, as its supervisor."""
    env = {
      **os.environ,
      'XLA_FLAGS': xla_flags(self._devices),
      'JAX_PLATFORMS': 'cpu',
      'PYTHONPATH': f'{REPOSITORY}:{self._folder}',
      'JAX_COMPILATION_CACHE_DIR': str(self._folder / 'compiled'),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'T5X_GPU_JOB_SECRET': 'secret of the loop',
      'LOCAL_OF_HOST': str(self.local(host)),
      'SECONDS_PER_STEP': str(self._pace),
      _MARK: f'{os.getpid()} {host}',
    }
    command = [sys.executable, '-c', LAUNCH, '--no_gpu', '--nproc=1', '--restarts=100000']
    command += [f'--host_count={self.num_hosts}', f'--host_index={host}']
    command += [f'--coordinator_address={self.lab.address(0)}:{PORT}']
    with open(self.log(host), 'ab') as output:
      self._agents[host] = self.lab.start(
        host,
        [*command, '--', *self.project.argv(**SETTINGS)],
        cwd=self._folder,
        env=env,
        stdout=output,
        stderr=subprocess.STDOUT,
      )

  def local(self, host: int) -> pathlib.Path:
    return self._folder / f'local_{host}'

  def log(self, host: int) -> pathlib.Path:
    return self._folder / f'launch_{host}.txt'

  def _processes(self, host: int) -> list[int]:
    """Returns the processes of a host, its launch first."""
    agent = self._agents[host].pid
    found = [p.pid for p in marked().values() if p.host == host and not p.is_zombie]
    return sorted(found, key=lambda pid: (pid != agent, pid))

  def _workers(self, host: int) -> list[int]:
    """Returns the processes that train: the children of the fork server."""
    found = marked()
    servers = {p.pid for p in found.values() if p.parent == self._agents[host].pid}
    return [p.pid for p in found.values() if p.parent in servers and not p.is_zombie]

  def inject(self, fault: Fault) -> None:
    """Lets a fault happen, and its end later."""
    host = fault.host
    match fault.kind:
      case 'worker':
        _send(self._workers(host), signal.SIGKILL)
      case 'agent':
        self._kill(host, [self._agents[host].pid])
        self._later(fault.seconds, lambda: self.start(host))
      case 'host' | 'power':
        if fault.kind == 'power':
          self.lab.cut(host)
        while pids := self._processes(host):
          self._kill(host, pids)
        shutil.rmtree(self.local(host), ignore_errors=True)
        self._later(fault.seconds, lambda: self._boot(host))
      case 'stop' | 'hang':
        stopped = self._processes(host) if fault.kind == 'stop' else [self._agents[host].pid]
        _send(stopped, signal.SIGSTOP)
        self._later(fault.seconds, lambda: _send(stopped, signal.SIGCONT))
      case 'cut':
        self.lab.cut(host)
        self._later(fault.seconds, lambda: self.lab.heal(host))

  def _boot(self, host: int) -> None:
    self.lab.heal(host)
    self.start(host)

  def _kill(self, host: int, pids: Sequence[int]) -> None:
    agent = self._agents.pop(host, None) if self._agents[host].pid in pids else None
    _send(pids, signal.SIGKILL)
    if agent is not None:
      agent.wait()
      self._agents.setdefault(host, agent)

  def _later(self, seconds: float, what: Callable[[], None]) -> None:
    self._due.append((time.monotonic() + seconds, what))

  @property
  def is_over(self) -> bool:
    """Returns whether all faults have ended."""
    return not self._due

  # What happens.

  def poll(self) -> None:
    """Looks at all logs, steps and processes; ends faults; starts launches that have ended."""
    now = time.monotonic()
    for host in range(self.num_hosts):
      self._read_log(host, now)
    self._read_steps(now)
    for each in [each for each in self._due if each[0] <= now]:
      self._due.remove(each)
      each[1]()
    if now > self._strays_at + 0.5:
      self._strays_at = now
      self._look_for_strays(now)

  def supervise(self) -> None:
    """Starts launches again that have ended by themselves."""
    for host, agent in list(self._agents.items()):
      if agent.poll() in (None, -signal.SIGKILL):  # the end of its fault starts a killed one
        continue
      if not self.steps:
        raise LoopError(f'the launch of host {host} ended before the first step: {self.log(host)}')
      self.ended.append({'host': host, 'code': agent.returncode})
      self.start(host)

  def _read_log(self, host: int, now: float) -> None:
    path = self.log(host)
    if not path.exists() or path.stat().st_size == self._read[host]:
      return
    with open(path, 'rb') as file:
      file.seek(self._read[host])
      *lines, _ = file.read().split(b'\n')
    self._read[host] += sum(len(line) + 1 for line in lines)
    for line in lines:
      text = line.decode(errors='replace')
      if text.startswith('launch: '):
        self.lines.append((now, host, text))
        if found := _STARTS.search(text):
          on = tuple(map(int, re.findall(r'host (\d+) \(', found[1])))
          if not self.starts or self.starts[-1][1] != on or now > self.starts[-1][0] + 5:
            self.starts.append((now, on))

  def _read_steps(self, now: float) -> None:
    path = self.project.model_dir / 'metrics.jsonl'
    with contextlib.suppress(OSError):
      status = path.stat()
      if self._seen == (status.st_mtime_ns, status.st_size):
        return
      step = _last_step(path)
      self._seen = status.st_mtime_ns, status.st_size
      if step and step != self.step:
        self.steps.append((now, step))

  def _look_for_strays(self, now: float) -> None:
    """Notes processes that have lost their launch."""
    found = marked()
    agents = {agent.pid for agent in self._agents.values()}
    for process in found.values():
      if process.is_zombie:
        continue
      above = process
      while above is not None and above.pid not in agents:
        above = found.get(above.parent)
      if above is None:
        first, _ = self.strays.get(process.pid, (now, now))
        self.strays[process.pid] = (first, now)
    self._alive = frozenset(found)

  def left(self) -> list[int]:
    """Returns the processes that have been without their launch for too long."""
    return [
      pid
      for pid, (first, last) in self.strays.items()
      if pid in self._alive and last > first + STRAY_SECONDS
    ]

  def wait_for(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
      self.poll()
      self.supervise()
      if time.monotonic() > deadline:
        raise LoopError(f'not within {seconds} s: {what}')
      time.sleep(POLL_SECONDS)

  @property
  def step(self) -> int:
    return self.steps[-1][1] if self.steps else 0

  def trains_on(self) -> tuple[int, ...]:
    """Returns the hosts that train; () if none has taken a step since the last start."""
    if not self.starts or self.first_step_after(self.starts[-1][0]) is None:
      return ()
    return self.starts[-1][1]

  def first_step_after(self, moment: float) -> Optional[tuple[float, int]]:
    """Returns when the first step after `moment` was done, and which one it was."""
    before = next((step for at, step in reversed(self.steps) if at <= moment), 0)
    for at, step in self.steps:
      if at > moment:
        if step > before:
          return at, step
        before = step  # the file was shortened to the checkpoint
    return None

  def newest_local(self) -> int:
    """Returns the newest local checkpoint that all hosts have written."""
    found = collections.Counter(
      int(path.name.split('_')[1].partition('.')[0])
      for host in range(self.num_hosts)
      for path in self.local(host).glob('*/step_*.process_*')
      if path.suffix.removeprefix('.process_').isdigit()
    )
    return max((step for step, count in found.items() if count == self.num_hosts), default=0)

  def is_steady(self) -> bool:
    """Returns whether all hosts train, and a local checkpoint of this start is complete."""
    if not self.is_over or len(self.trains_on()) < self.num_hosts:
      return False
    first = self.first_step_after(self.starts[-1][0])
    return first is not None and self.newest_local() > first[1] + LOCAL_PERIOD

  # The end.

  def stop(self) -> list[int]:
    """Stops the run as a scheduler does; returns the exit codes of the launches."""
    for agent in self._agents.values():
      agent.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + END_SECONDS
    while any(agent.poll() is None for agent in self._agents.values()):
      if time.monotonic() > deadline:
        raise LoopError(f'the launches do not end within {END_SECONDS} s of SIGTERM')
      self.poll()
      time.sleep(POLL_SECONDS)
    return [self._agents[host].returncode for host in range(self.num_hosts)]

  def left_at_the_end(self) -> int:
    """Returns how many processes outlive their launches, which take the others with them."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while (left := sum(not p.is_zombie for p in marked().values())) and time.monotonic() < deadline:
      time.sleep(POLL_SECONDS)
    return left

  def kill_all(self) -> None:
    while pids := [p.pid for p in marked().values() if not p.is_zombie]:
      _send(pids, signal.SIGKILL)
      time.sleep(0.1)


def _send(pids: Sequence[int], number: int) -> None:
  for pid in pids:
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, number)


def hit(loop: Loop, faults: Sequence[Fault]) -> dict[str, Any]:
  """Lets faults happen at the same time; returns what they cost."""
  before, num_lines, num_starts = loop.newest_local(), len(loop.lines), len(loop.starts)
  num_ended, known_strays = len(loop.ended), set(loop.strays)
  at = time.monotonic()
  for fault in faults:
    loop.inject(fault)

  def new_start() -> Optional[float]:
    return next((when for when, _ in loop.starts[num_starts:]), None)

  def next_step() -> Optional[tuple[float, int]]:
    start = new_start()
    return None if start is None else loop.first_step_after(start)

  loop.wait_for(lambda: next_step() is not None, RECOVER_SECONDS, 'the next step')
  row = {
    'faults': [dataclasses.asdict(fault) for fault in faults],
    'detected': next(
      (t - at for t, _, text in loop.lines[num_lines:] if _DETECTED.search(text)), None
    ),
  }
  when, step = next_step()
  reached = max((s for t, s in loop.steps if t <= new_start()), default=0)
  row |= {
    'next_step': when - at,
    'first_hosts': len(loop.starts[num_starts][1]),
    'step': reached,
    'repeated': reached - (step - 1),
    'lost_before_local': max(0, before - (step - 1)),
  }
  loop.wait_for(loop.is_steady, RECOVER_SECONDS, 'training on all hosts')
  row |= {
    'all_hosts': loop.first_step_after(loop.starts[-1][0])[0] - at,
    'starts': len(loop.starts) - num_starts,
    'ended_launches': loop.ended[num_ended:],
    'strays_seconds': max(
      (last - first for pid, (first, last) in loop.strays.items() if pid not in known_strays),
      default=0.0,
    ),
    'orphans': len(loop.left()),
    'load': os.getloadavg()[0],
  }
  return {key: round(v, 2) if isinstance(v, float) else v for key, v in row.items()}


def reference(folder: pathlib.Path, devices: int, until: int) -> dict[int, float]:
  """Returns the losses of a run without faults, in one process."""
  folder.mkdir()
  (folder / 'paced_data.py').write_text(PACED_DATA)
  project = Project(folder)
  settings = {**SETTINGS, 'CheckpointConfig.local_checkpoint_dir': folder / 'local'}
  with project.start(num_devices=devices, **settings) as run:
    path = project.model_dir / 'metrics.jsonl'
    run.wait_for(lambda: path.exists() and _last_step(path) >= until, seconds=3600)
  return project.metrics()


def _last_step(metrics: pathlib.Path) -> int:
  with open(metrics, 'rb') as file:
    file.seek(max(0, metrics.stat().st_size - 8192))
    found = re.findall(rb'\{"step": (\d+)[^\n]*\n', file.read())
  return int(found[-1]) if found else 0


def compare(losses: dict[int, float], expected: dict[int, float]) -> dict[str, Any]:
  """Returns how far the losses are from the losses without faults."""
  last = max(losses)
  missing = sorted(set(range(1, last + 1)) - losses.keys())
  error = {step: abs(losses[step] / expected[step] - 1) for step in losses}
  worst = max(error, key=error.get)
  return {'steps': last, 'missing': missing[:10], 'largest_error': error[worst], 'at_step': worst}


def ledger_of(model_dir: pathlib.Path) -> dict[str, Any]:
  """Returns the time of the run by category, and what the ledger knows of interruptions."""
  ledger = goodput.read_ledger(model_dir / goodput.GOODPUT)
  accounts = goodput.accounts_of(ledger)
  _, *later = accounts.processes
  kinds = collections.Counter(each.kind for start in later for each in start.interruptions)
  return {
    'starts': len(accounts.processes),
    'interruptions': dict(kinds),
    'starts_without_a_cause': sum(not start.interruptions for start in later),
    'damaged_lines': len(ledger.damaged),
    'wall_seconds': round(accounts.wall_seconds, 1),
    'seconds_counted_twice': round(math.fsum(accounts.seconds.values()) - accounts.wall_seconds, 2),
    'seconds': {name: round(value, 1) for name, value in accounts.seconds.items()},
  }


def table(rows: Sequence[dict[str, Any]]) -> str:
  """Returns a line per kind of fault: median and largest of each figure."""
  groups: dict[str, list[dict[str, Any]]] = {}
  for row in rows:
    kinds = [fault['kind'] for fault in row['faults']]
    groups.setdefault(kinds[0] if len(kinds) == 1 else 'two at once', []).append(row)
  lines = ['fault: times; median and largest: detected, next step, all hosts (s), steps repeated']
  for kind in (*KINDS, 'two at once'):
    if found := groups.get(kind):
      figures = []
      for name in ('detected', 'next_step', 'all_hosts', 'repeated'):
        values = [row[name] for row in found if row[name] is not None]
        figures.append(f'{statistics.median(values):.1f} {max(values):.1f}')
      lines.append(f'{kind:12} {len(found):4}   {"   ".join(figures)}')
  return '\n'.join(lines)


def run(args: argparse.Namespace, lab: NetLab, folder: pathlib.Path) -> dict[str, Any]:
  """Returns what the loop has measured."""
  loop = Loop(
    lab, folder / 'loop', hosts=args.hosts, devices=args.devices, pace=args.seconds_per_step
  )
  drawn = draw(args.faults, args.pairs, args.hosts, args.seed)
  found: dict[str, Any] = {
    'what': f'{args.hosts} hosts, {args.devices} CPU devices each, on {os.cpu_count()} cores',
    'seed': args.seed,
    'rows': [],
  }
  chance = random.Random(args.seed)
  began = time.monotonic()
  try:
    for host in range(args.hosts):
      loop.start(host)
    loop.wait_for(loop.is_steady, RECOVER_SECONDS, 'the first steps')
    for number, faults in enumerate(drawn):
      if time.monotonic() > began + 60 * args.minutes:
        break
      pause = time.monotonic() + chance.uniform(0, 5)
      loop.wait_for(lambda pause=pause: time.monotonic() > pause, 60, 'a pause')
      print(f'{number + 1} of {len(drawn)}: {" and ".join(map(str, faults))}', flush=True)
      row = hit(loop, faults)
      found['rows'].append(row)
      print(f'  {json.dumps({k: v for k, v in row.items() if k != "faults"})}', flush=True)
      args.out.write_text(json.dumps(found, indent=1) + '\n')
      if row['orphans']:
        raise LoopError(f'processes without their launch are left: {loop.left()}')
    found['exit_codes'] = loop.stop()
    found['left'] = loop.left_at_the_end()
    found['minutes'] = round((time.monotonic() - began) / 60, 1)
  except BaseException:
    for at, host, text in loop.lines[-40:]:
      print(f'{at - began:8.1f} {host} {text}')
    raise
  finally:
    loop.kill_all()
  losses = loop.project.metrics()
  expected = reference(folder / 'alone', args.hosts * args.devices, max(losses))
  found['losses'] = compare(losses, expected)
  found['ledger'] = ledger_of(loop.project.model_dir)
  args.out.write_text(json.dumps(found, indent=1) + '\n')
  return found


def main(argv: Optional[Sequence[str]] = None) -> dict[str, Any]:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--hosts', type=int, default=4)
  parser.add_argument('--devices', type=int, default=2, help='devices of a host')
  parser.add_argument('--faults', type=int, default=100)
  parser.add_argument('--pairs', type=int, default=20, help='faults at the same time')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--minutes', type=float, default=600, help='no further fault after this time')
  parser.add_argument('--seconds_per_step', type=float, default=0.2)
  parser.add_argument('--folder', type=pathlib.Path, help='kept afterwards (default: temporary)')
  parser.add_argument('--out', type=pathlib.Path, default=OUT)
  args = parser.parse_args(argv)
  set_default_flags()
  with contextlib.ExitStack() as stack:
    lab = stack.enter_context(NetLab(num_hosts=args.hosts))
    folder = args.folder or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    found = run(args, lab, folder)
  print(table(found['rows']))
  print(json.dumps({k: v for k, v in found.items() if k != 'rows'}, indent=1))
  return found


if __name__ == '__main__':
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leaves no host behind
  try:
    main()
  except NetLabError as error:
    sys.exit(str(error))
