"""Start N processes on this machine: `python -m t5x_gpu.launch --nproc 8 -- --gin_file=my.gin`.

One process per GPU, each on the CPU cores near it. Output lines are prefixed with the process
number. The first process that fails ends the others, and its last lines are printed again.
With `--restarts` all of them then start again, and continue from the newest checkpoint; with a
launch on each of several hosts, all hosts do (`HostAgent`).
`--write_scripts` instead writes the launch scripts of Slurm, PBS, Open MPI and Kubernetes.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import NoReturn, Optional, Union

from t5x_gpu import cli
from t5x_gpu.checkpoint import run_lock
from t5x_gpu.errors import ClusterError, ConfigError, listed
from t5x_gpu.runtime import machine, numa, progress
from t5x_gpu.runtime.cluster import (
  addresses,
  agreement,
  cluster,
  generations,
  interruptions,
  launchers,
  links,
  members,
  rendezvous,
)
from t5x_gpu.runtime.cluster.fork_server import (
  ForkedProcess,
  ForkServer,
  end_with_parent,
  is_supported,
)
from t5x_gpu.runtime.cluster.generations import Generation, Host, HostReport, Member
from t5x_gpu.runtime.cluster.interruptions import Interruption
from t5x_gpu.runtime.cluster.restarts import (
  EXIT_CONFIG,
  EXIT_INTERRUPTED,
  EXIT_PREEMPTED,
  SHARED_CODES,
  STOPPED_CODES,
  Ended,
  Restarts,
  Stop,
)
from t5x_gpu.runtime.health import fitness
from t5x_gpu.runtime.process_exit import STOP_SIGNALS
from t5x_gpu.storage.files import reason_of, write_atomically
from t5x_gpu.terminal import streams
from t5x_gpu.terminal.flag_types import positive_int, whole_number

_PACKAGE = pathlib.Path(__file__).resolve().parents[0]


def shipped_scripts() -> list[pathlib.Path]:
  """Returns the scripts of the installed package, or of the repository that contains it."""
  inside = _PACKAGE / 'scripts'
  return sorted((inside if inside.is_dir() else _PACKAGE.parent / 'scripts').glob('train*'))


def write_scripts(folder: pathlib.Path) -> list[pathlib.Path]:
  """Writes the scripts to `folder`, which is created, and returns their paths.

  Raises:
    ConfigError: `folder` is a file, or one of its files has other contents. Nothing is written
      then.
  """
  if folder.exists() and not folder.is_dir():
    raise ConfigError(f'{folder} is not a folder.', fix='Name another folder.')
  texts = {folder / path.name: path.read_bytes() for path in shipped_scripts()}
  changed = [p for p, text in texts.items() if p.exists() and p.read_bytes() != text]
  if changed:
    raise ConfigError(
      f'{", ".join(map(str, changed))} would be overwritten.',
      fix='Name another folder, or move the changed files.',
      docs='slurm.md',
    )
  folder.mkdir(parents=True, exist_ok=True)
  for path, text in texts.items():
    path.write_bytes(text)
    path.chmod(0o755 if path.suffix == '.sh' else 0o644)
  return list(texts)


DOCTOR = 't5x_gpu.doctor'
MODULES = ('t5x_gpu.train', 't5x_gpu.bench', DOCTOR, 't5x_gpu.eval', 't5x_gpu.infer')
TAIL_LINES = 30
KILL_SECONDS = 10
POLL_SECONDS = 0.02
# Processes that were asked to stop exit one after the other, the last after the save.
STOPPED_SECONDS = 120
CLOCK_SECONDS = 2  # clocks of hosts that differ by less are the same
START_SECONDS = 300  # for all hosts to come, as `DistributedConfig` gives processes
# What a run imports later than at its start.
LATER_IMPORTS = ('t5x_gpu.data.synthetic', 't5x_gpu.training.optimizers')

EXAMPLES = """examples:
  {prog} --nproc 8 -- --gin_file=my.gin --gin.MODEL_DIR=runs/a
  {prog} --nproc 2 --no_gpu -- --gin_file=gin_configs/examples/demo.gin
  {prog} --nproc 8 --restarts=20 -- --gin_file=my.gin         (docs/never_down.md)
  {prog} --restarts=20 --host_count=4 --host_index=0 --coordinator_address=node1:62000 \\
    -- --gin_file=my.gin
  srun --ntasks-per-node=1 {prog} --restarts=20 -- --gin_file=my.gin
  {prog} --module t5x_gpu.doctor -- --model_dir=runs/a
  {prog} --nproc 8 --numa cores.txt -- --gin_file=my.gin      (lines like 0: 0-15,128-143)
  {prog} --write_scripts scripts      (files for Slurm, PBS, Open MPI and Kubernetes)
"""


@dataclasses.dataclass(frozen=True)
class ProcessPlan:
  """How to start one process."""

  env: Mapping[str, str]
  binding: numa.CoreBinding
  gpus: str


class Group:
  """Local processes that start and end together.

  Args:
    command: command line of each process.
    plans: one per process.
    end_together: whether the first failing process ends the others.
    at_once: whether the others are killed without a delay if a signal ended the first process:
      they have nothing to add, and wait for it.
    first, count: number of the first process in the run, and processes of the run, for messages.
    fork_server: forks the processes, if it runs; it has the same command.
    if_lost: signal that the processes get if this process is killed.
  Attributes:
    failed: the processes that had failed when the first failure was seen; if one failed by itself,
      without processes that only lost another one or were asked to stop.
    failed_at: when that was, in seconds of the monotonic clock; None before.
    ended_at: when this process saw the first failure or end, or ended the processes, in seconds
      since 1970; None before.
    was_ended: whether the processes were ended before all of them had.
  """

  def __init__(
    self,
    command: Sequence[str],
    plans: Sequence[ProcessPlan],
    *,
    end_together: bool = True,
    at_once: bool = False,
    first: int = 0,
    count: Optional[int] = None,
    fork_server: Optional[ForkServer] = None,
    if_lost: int = signal.SIGTERM,
  ):
    self._end_together, self._at_once = end_together, at_once
    self._first_number, self._count = first, count or len(plans)
    self.was_ended = False
    self.failed: frozenset[int] = frozenset()
    self.failed_at: Optional[float] = None
    self.ended_at: Optional[float] = None
    self._first: Optional[tuple[int, int]] = None  # process, return code
    self._ending = math.inf
    self._tails = [collections.deque(maxlen=TAIL_LINES) for _ in plans]
    self._lock = threading.Lock()
    self._processes: list[Union[subprocess.Popen, ForkedProcess]] = []
    self._interrupts = 0
    try:
      for plan in plans:
        self._processes.append(_start_process(command, plan, fork_server, if_lost))
    except BaseException:  # Ctrl-C, or too many processes
      self._send(signal.SIGKILL)
      raise
    self._readers = [
      threading.Thread(target=self._copy, args=(i,), daemon=True) for i in range(len(plans))
    ]
    for reader in self._readers:
      reader.start()

  def _copy(self, index: int) -> None:
    prefix = f'[{self._first_number + index}] '.encode()
    with self._processes[index].stdout as lines:
      for line in lines:
        self._tails[index].append(line)
        with self._lock:
          # While the reader stalls, the process's pipe fills, and the process keeps its text.
          streams.wait_for_stdout()
          sys.stdout.buffer.write(prefix + line.rstrip(b'\n') + b'\n')
          sys.stdout.buffer.flush()
        if streams.stdout_is_lost():
          # Without a reader, the process has lost its output too, and keeps it in MODEL_DIR.
          return

  def forward(self, number: int, frame: Optional[FrameType] = None) -> None:
    """Sends a signal to all running processes; a third Ctrl-C kills them."""
    del frame
    self._interrupts += number == signal.SIGINT
    self._send(signal.SIGKILL if self._interrupts > 2 else number)

  def _send(self, number: int) -> None:
    for process in self._processes:
      if process.poll() is None:
        if number == signal.SIGKILL:
          os.killpg(process.pid, number)  # with its children: each process leads a session
        else:
          process.send_signal(number)

  def kill_children(self) -> None:
    """Kills what ended processes have left: it may hold GPU memory, and write to MODEL_DIR.

    The system does not reuse a process number while its session has members. PermissionError: the
    session had none, and the number now belongs to another user.
    """
    for process in self._processes:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)

  def poll(self) -> bool:
    """Returns whether a process still runs; a first failure ends the others.

    Without `at_once` it waits until they have ended. With `at_once` it never waits: the kernel may
    need seconds to end a process that has much memory of a GPU, and an agent has to beat.
    """
    codes = [process.poll() for process in self._processes]
    runs = None in codes
    if self.ended_at is None and any(code is not None for code in codes):
      self.ended_at = time.time()
    ended = {i: p.returncode for i, p in enumerate(self._processes) if p.returncode}
    if ended and self.failed_at is None and not self.was_ended:
      # Processes that lose another one may exit before the next poll.
      rank = {i: (code in STOPPED_CODES, code in SHARED_CODES) for i, code in ended.items()}
      index = min(ended, key=rank.get)
      code, now = ended[index], time.monotonic()
      self.failed = frozenset(i for i in ended if rank[i] == rank[index])
      self.failed_at, self._first = now, (index, code)
      if code in STOPPED_CODES:
        self._ending = now + STOPPED_SECONDS
      else:  # the others name the process that failed, or fail too, and may still commit a save
        self._ending = now + (KILL_SECONDS if self._at_once and code > 0 else 0)
    if runs and self._end_together and self._ending < time.monotonic() and not self.was_ended:
      self._end_all()
      return self._at_once
    return runs

  def end(self, seconds: float) -> None:
    """Ends all processes that still run after `seconds`."""
    self._ending = min(self._ending, time.monotonic() + seconds)
    self.ended_at = self.ended_at or time.time()

  def finish(self) -> int:
    """Returns the exit code of the first process that failed; minus the signal if one ended it.

    Call it once all processes have ended.
    """
    deadline = time.monotonic() + (1 if self._at_once else KILL_SECONDS)
    for reader in self._readers:  # a process's own children may keep its output open
      reader.join(timeout=max(0.0, deadline - time.monotonic()))
    if self._first is None:
      return 0
    if self._end_together and self._first[1] not in STOPPED_CODES:
      self._show(*self._first)
    return self._first[1]

  def error(self) -> str:
    """Returns the error of the process that failed first as one line, '' if its code has none.

    Call it after `finish`.
    """
    if self._first is None or self._first[1] < 0:
      return ''
    lines = self._tails[self._first[0]]
    return interruptions.error_line([line.decode(errors='replace') for line in lines])

  def wait(self) -> int:
    """Returns the exit code of the first process that failed, 0 if none did.

    A process that a signal ended counts as 128 + signal.
    """
    while self.poll():
      time.sleep(POLL_SECONDS)
    return shell_code(self.finish())

  def _end_all(self) -> None:
    """Sends SIGTERM, then SIGKILL: JAX makes SIGTERM a request, which a stuck process ignores."""
    if not self._at_once:
      self._send(signal.SIGTERM)
      deadline = time.monotonic() + KILL_SECONDS
      while time.monotonic() < deadline and any(p.poll() is None for p in self._processes):
        time.sleep(POLL_SECONDS)
    self._send(signal.SIGKILL)
    self.was_ended = True
    if not self._at_once:
      for process in self._processes:
        process.wait()

  def _show(self, index: int, code: int) -> None:
    print(
      f'\nlaunch: process {self._first_number + index} of {self._count} failed first '
      f'({generations.how_ended(code)}); the others were ended. Its last lines:',
      file=sys.stderr,
    )
    for line in self._tails[index]:
      print(f'  {line.decode(errors="replace").rstrip()}', file=sys.stderr)


def _start_process(
  command: Sequence[str], plan: ProcessPlan, fork_server: Optional[ForkServer], if_lost: int
) -> Union[subprocess.Popen, ForkedProcess]:
  """Returns a process in a new session: the terminal's Ctrl-C reaches only this one."""
  parent = os.getpid()
  with numa.running_on(plan.binding.cpus):
    if fork_server is not None:
      try:
        return fork_server.start(plan.env, plan.binding.cpus, if_lost)
      except OSError as error:
        _log(f'{error}; this process starts with its own imports.')
    return subprocess.Popen(
      command,
      env=plan.env,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      stdin=subprocess.DEVNULL,
      start_new_session=True,
      preexec_fn=lambda: end_with_parent(if_lost, parent=parent),
    )


def shell_code(code: int) -> int:
  """Returns a return code as shells show it: 128 + signal if a signal ended the process."""
  return code if code >= 0 else 128 - code


class Agent:
  """Starts the processes of a run, and starts them again after a failure, as `Restarts` decides.

  Args:
    start: starts the processes, with these additional environment variables for each.
    num_processes: number of processes.
    restarts: how many restarts are allowed.
    find_problem: returns why this host cannot start processes again, '' if it can.
  """

  def __init__(
    self,
    start: Callable[[Sequence[Mapping[str, str]]], Group],
    *,
    num_processes: int,
    restarts: int,
    find_problem: Callable[[], str] = lambda: '',
  ):
    self._find_problem = find_problem
    self._start, self._num_processes = start, num_processes
    self._restarts = Restarts(restarts)
    self._run, self._starts = rendezvous.new_secret()[:16], 0
    self._interruptions: list[Interruption] = []
    self._group: Optional[Group] = None
    self._signals: list[int] = []

  def forward(self, number: int, frame: Optional[FrameType] = None) -> None:
    """Has `wait` pass a signal on to all processes; the run then does not start again."""
    del frame
    self._signals.append(number)

  def wait(self) -> int:
    """Returns the exit code of the first process that failed in the last start, 0 if none did."""
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
      return self._wait(pathlib.Path(folder))

  def _wait(self, folder: pathlib.Path) -> int:
    while not self._signals:
      ended = self._run_once(folder)
      self._restarts, then = self._restarts.after(ended)
      if isinstance(then, Stop):
        if then.reason:
          _log(f'not starting again: {then.reason}.')
        if ended.code == EXIT_CONFIG:
          return _config_error_code()
        if -ended.code in self._signals and ended.step is None:  # before it could take the signal
          break
        return shell_code(ended.code)
      self._group.kill_children()
      if problem := _answer_of(self._find_problem):
        _log(f'not starting again: {socket.gethostname()} cannot take part: {problem}.')
        return shell_code(ended.code)
      _log(
        f'restart {then.number} of at most {self._restarts.allowed}; the run continues from its '
        'newest checkpoint.'
      )
    return EXIT_INTERRUPTED if signal.SIGINT in self._signals else EXIT_PREEMPTED

  def _run_once(self, folder: pathlib.Path) -> Ended:
    """Starts all processes, and returns how they ended; `folder` is for their progress."""
    lost_at = None
    if self._group is not None:
      lost_at = self._group.failed_at
    files = _progress_files(folder, self._num_processes)
    history = interruptions.variables(self._run, self._interruptions)
    self._starts += 1
    self._group = group = self._start([{**_reporting_to(file), **history} for file in files])
    forwarded = 0
    while group.poll():
      for number in self._signals[forwarded:]:
        group.forward(number)
        forwarded += 1
      if lost_at is not None and _log_progress(
        files[0], last_step=self._restarts.last.step, lost_at=lost_at
      ):
        lost_at = None
      time.sleep(POLL_SECONDS)
    step, stepped_at = _last_step(files)
    code = group.finish()
    if code:
      self._interruptions.append(
        Interruption(
          self._starts,
          interruptions.kind_of(code),
          f'process {min(group.failed)} on {socket.gethostname()} failed '
          f'({generations.how_ended(code)})',
          step,
          group.ended_at,
          stepped_at,
          group.error(),
        )
      )
    return Ended(code, group.failed, step, asked=bool(self._signals))


# Temporary folder of what the processes report: one for all starts, as the disk may become full.
_FOLDER = 't5x_gpu_launch_'
_HOST_COUNTS = 'host_counts'


def _progress_files(folder: pathlib.Path, number: int) -> list[pathlib.Path]:
  """Returns the files of the processes, blank; creates what is missing."""
  files = [folder / f'process_{index}' for index in range(number)]
  folder.mkdir(mode=0o700, exist_ok=True)  # systemd removes files that are unused for ten days
  progress.reserve(files, folder / _HOST_COUNTS)
  return files


def _reporting_to(file: pathlib.Path) -> dict[str, str]:
  """Returns the variables of a process that reports its steps, and its mistakes by their code."""
  return {progress.VARIABLE: str(file), cli.CONFIG_ERROR_CODE: str(EXIT_CONFIG)}


def _last_step(files: Sequence[pathlib.Path]) -> tuple[Optional[int], Optional[float]]:
  """Returns the last finished step, and when it was finished."""
  steps = [(p.step, f.stat().st_mtime) for f in files if (p := progress.read_progress(f))]
  return max(steps, default=(None, None))


def _log_progress(
  file: pathlib.Path, *, last_step: Optional[int], lost_at: float, what: str = 'failure'
) -> bool:
  """Prints the cost of a failure or pause once the run takes steps; returns whether it did."""
  found = progress.read_progress(file)
  if found is None or found.step == found.first_step:
    return False
  seconds = time.monotonic() - lost_at
  repeated = max((last_step or 0) - found.first_step, 0)
  _log(
    f'training again: step {found.step} is done, {seconds:.1f} s after the {what}. '
    f'{repeated} finished steps are repeated.'
  )
  return True


def _answer_of(find_problem: Callable[[], str]) -> str:
  """Returns the problem of this host; '' for none, or if the question cannot be asked."""
  try:
    return find_problem()
  except Exception as error:  # no file for the answer, output of another program, ...
    _log(f'the GPUs were not checked: {type(error).__name__}: {error}.')
    return ''


def _config_error_code() -> int:
  return int(os.environ.get(cli.CONFIG_ERROR_CODE) or 1)


class HostAgent:
  """Starts the processes of one host, as the agents of all hosts agree (`generations`).

  Args:
    start: starts the processes of a generation; process 0 listens at the given address. The
      mappings are additional environment variables, one for each process.
    cluster_info: this agent among the agents: a process of the cluster for each host.
    num_processes: processes on this host.
    restarts: how many restarts are allowed.
    spares: hosts that only take the place of others.
    facts: see `generations.Hello`.
    env: environment variables.
    find_problem: returns why this host cannot take part in another start, '' if it can. It may take
      seconds.
    listed: 'host:port' of hosts 0, 1, ..., as all agents know them; () for host 0 alone.
  """

  def __init__(
    self,
    start: Callable[[Generation, int, str, Sequence[Mapping[str, str]]], Group],
    *,
    cluster_info: cluster.ClusterInfo,
    num_processes: int,
    restarts: int,
    spares: int = 0,
    facts: Mapping[str, str],
    env: Mapping[str, str],
    find_problem: Callable[[], str] = lambda: '',
    listed: Sequence[str] = (),
  ):
    self._find_problem, self._listed = find_problem, listed
    self._problem: Optional[concurrent.futures.Future[str]] = None
    self._offering: Optional[int] = None  # generation for which the agent looks for a problem
    self._start, self._info, self._num_processes = start, cluster_info, num_processes
    self._addresses = (cluster_info.coordinator_address, *cluster_info.other_addresses)
    secret = rendezvous.secret_from_environment(env)
    self._has_secret = bool(secret)
    self._links = links.Links(secret, run_id=f'agents/{cluster_info.run_id}')
    self._own_host = ''  # on the network of the agents
    self._member = Member(
      Host(cluster_info.process_index, socket.gethostname(), rendezvous.new_secret()[:16], ''),
      host_count=cluster_info.process_count,
      spares=spares,
      restarts=restarts,
      processes_per_host=num_processes,
      facts=facts,
      machine='/'.join(
        (
          socket.gethostname(),
          cluster_info.node,
          machine.boot_id(),
          env.get(members.DOMAIN_VARIABLE, ''),
        )
      ),
      start_seconds=START_SECONDS,
      num_listed=max(1, len(listed)),
    )
    self._group: Optional[Group] = None
    self._folder: Optional[tempfile.TemporaryDirectory] = None
    self._files: list[pathlib.Path] = []
    self._ended_at: Optional[float] = None
    self._signals: list[int] = []
    self._num_taken = 0  # of these, by the main loop: a handler may come in the middle of a call
    self._is_paused = False
    self._exit: Optional[generations.Exit] = None
    self._reason = ''  # why the last connection failed
    self._ahead = 0.0  # seconds by which the clock of this host is ahead of the clock of the run
    self._asked_at = 0.0  # when this host last asked a leader to be taken in, by `time.monotonic`
    self._is_full = False  # whether it has said that too many files are open

  def forward(self, number: int, frame: Optional[FrameType] = None) -> None:
    """Has `wait` pass a signal on to the processes; the run then does not start again."""
    del frame
    self._signals.append(number)

  def wait(self) -> int:
    """Returns the exit code of the run.

    Raises:
      ClusterError: the agents cannot join, or the run cannot continue on this host.
    """
    self._folder = tempfile.TemporaryDirectory(prefix=_FOLDER)
    try:
      self._progress_files()  # also on a spare, whose disk may be full when it is needed
      if self._info.process_index == 0:
        listening = addresses.listen(
          self._addresses, bind_address=self._info.bind_address, is_one_host=False
        )
        self._links.listen(listening.sockets)
        if not self._has_secret and not all(map(addresses.is_loopback, listening.hosts)):
          _log(
            f'{rendezvous.SECRET_VARIABLE} is not set: anybody who can reach {listening.address} '
            'can join this run. See docs/security.md.'
          )
        self._know_address(addresses.split(listening.address)[0], listening.port)
      self._leave_if_unfit()
      self._do(self._member.start(time.monotonic()))
      while self._exit is None:
        self._take_events()
    finally:
      self._end_processes()
      self._folder.cleanup()
      self._links.leave()
    return self._exit_code()

  def _leave_if_unfit(self) -> None:
    """Leaves before others pause their processes for this host, and then continue alone."""
    self._look_for_problem()
    while not self._problem.done():
      if self._signals:
        return
      time.sleep(POLL_SECONDS)
    problem, self._problem = self._problem.result(), None
    if problem:
      self._do(self._member.unfit(problem, time.monotonic()))

  def _know_address(self, host: str, port: int) -> None:
    self._own_host = host
    self._member.me = dataclasses.replace(self._member.me, address=addresses.join(host, port))

  def _take_events(self) -> None:
    for event in self._links.poll(POLL_SECONDS):
      self._do(self._after(event))
    while self._num_taken < len(self._signals):
      number = self._signals[self._num_taken]
      self._num_taken += 1
      if self._group is not None:
        self._group.forward(number)
      self._do(self._member.asked(number, time.monotonic()))
    if self._group is not None and not self._group.poll():
      report, self._ended_at = self._report(self._group), time.monotonic()
      self._group.kill_children()
      self._group = None
      self._look_for_problem()
      self._do(self._member.processes_ended(report, time.monotonic()))
    self._offer()
    if self._group is not None and self._ended_at is not None:
      generation = self._member.started
      is_first = generation.position(self._member.me.index) == 0
      if is_first and _log_progress(
        self._files[0],
        last_step=generation.interruptions[-1].step,
        lost_at=self._ended_at,
        what='failure' if generation.is_restart else 'pause',
      ):
        self._ended_at = None
    self._do(self._member.tick(time.monotonic()))

  def _after(self, event: links.Event) -> list[generations.Action]:
    now = time.monotonic()
    match event:
      case links.Opened(index, link):
        if not self._own_host:
          self._own_host = self._links.own_host(link)
          server = self._listen()
          self._links.listen([server])
          self._know_address(self._own_host, server.getsockname()[1])
        return self._member.linked(index, link, now)
      case links.Failed(index, reason):
        if reason != self._reason and self._member.started is None:
          _log(f'waiting for host {index}: {reason}.')
        self._reason = reason
        return self._member.unreachable(index, now)
      case links.TurnedAway(link, reason):
        refused = generations.Refusal(
          f'{reason[0].upper()}{reason[1:]}.',
          f'Give all hosts the same {rendezvous.SECRET_VARIABLE}, new for each run.',
        )
        return self._member.received(link, refused, now)
      case links.NoRoom(reason):
        if not self._is_full:
          _log(f'another host cannot join: {reason}. It tries again; what runs continues.')
        self._is_full = True
        return []
      case links.Closed(link, silent_seconds):
        return self._member.link_closed(link, now, silent_seconds=silent_seconds)
      case links.Came(link, value):
        if not self._links.is_open(link):  # an event before this one, of the same poll, closed it
          return []
        try:
          message = generations.message_from_json(value)
        except rendezvous.UNREADABLE:
          return self._refuse_version(link, now)
        if self._info.process_index == 0 and not addresses.is_loopback(
          own := self._links.own_host(link)
        ):
          self._own_host = own  # the name of this host may mean loopback here
        if isinstance(message, generations.Welcome):
          self._compare_clocks(message.time)
        return self._member.received(link, message, now)
    raise AssertionError(event)

  def _compare_clocks(self, leaders: float) -> None:
    """Names this host if its clock differs, and corrects its times by the leader's."""
    latency = time.monotonic() - self._asked_at
    self._ahead = seconds_ahead(time.time(), leaders, latency=latency)
    if self._ahead:
      how = 'ahead of' if self._ahead > 0 else 'behind'
      _log(
        f'the clock of {self._member.me} is {abs(self._ahead):.0f} s {how} the clock of the host '
        'that leads; the times of this run follow the leader. Set the clock.'
      )

  def _refuse_version(self, link: int, now: float) -> list[generations.Action]:
    """Turns away an agent whose message this one cannot read."""
    me = self._member.me
    what = f'{self._links.peer_host(link)} has another version of t5x_gpu than {me}'
    _log(f'refused an agent: {what}.')
    refused = generations.Refusal(f'The agent at {what}.', generations.SAME_COMMAND)
    self._links.send(link, refused)
    self._links.close(link)
    return self._member.link_closed(link, now)

  def _do(self, actions: Sequence[generations.Action]) -> None:
    for action in actions:
      if self._exit is not None:
        return
      match action:
        case generations.Send(link, message):
          if isinstance(message, generations.Welcome):
            message = generations.Welcome(time.time() - self._ahead)
          elif isinstance(message, generations.Hello):
            self._asked_at = time.monotonic()
          self._links.send(link, message)
        case generations.Connect(index, address):
          to = self._addresses if index == 0 else self._listed[index : index + 1]
          self._links.connect(index, [address] if address else to)
        case generations.Drop(link):
          self._links.close(link)
        case generations.Offer(number):
          self._offering = number
          if self._member.started is not None and self._problem is None:
            self._look_for_problem()
          self._offer()
        case generations.StartProcesses(generation, service):
          self._start_processes(generation, service)
        case generations.PauseProcesses():
          if self._group is not None:
            self._is_paused = True
            self._group.forward(signal.SIGTERM)
        case generations.EndProcesses(seconds):
          if self._group is not None:
            self._group.end(seconds)
        case generations.Log(text):
          _log(text)
        case generations.Exit():
          self._exit = action

  def _listen(self) -> socket.socket:
    """Returns a socket on this host's listed port; on any port if it is not listed."""
    family = socket.AF_INET6 if ':' in self._own_host else socket.AF_INET
    if self._info.process_index < len(self._listed):
      address = self._listed[self._info.process_index]
      try:
        return socket.create_server((self._own_host, addresses.split(address)[1]), family=family)
      except OSError as error:
        _log(f'new hosts cannot find the run at {address}: {reason_of(error)}.')
    return socket.create_server((self._own_host, 0), family=family)

  def _look_for_problem(self) -> None:
    """Asks in a thread: while the agent waits for an answer, it still has to beat."""
    self._problem = found = concurrent.futures.Future()
    threading.Thread(
      target=lambda: found.set_result(_answer_of(self._find_problem)), daemon=True, name='problem'
    ).start()

  def _offer(self) -> None:
    """Answers a proposal, once it is known whether this host can take part."""
    if self._offering is None or (self._problem is not None and not self._problem.done()):
      return
    number, self._offering = self._offering, None
    problem, self._problem = self._problem.result() if self._problem else '', None
    if problem:
      self._do(self._member.unfit(problem, time.monotonic()))
    else:
      service = free_address(self._own_host)
      self._do(self._member.offered(number, service, time.monotonic()))

  def _progress_files(self) -> list[pathlib.Path]:
    return _progress_files(pathlib.Path(self._folder.name), self._num_processes)

  def _start_processes(self, generation: Generation, service: str) -> None:
    names = ', '.join(listed(list(map(str, generation.hosts)), 8))
    if generation.cause:
      number = f'restart {generation.restarts.done} of at most {generation.restarts.allowed}'
      how = number if generation.is_restart else 'the run continues'
      _log(f'{generation.cause}; {how} on {names}, from the newest checkpoint.')
    else:
      _log(f'the run starts on {names}.')
    self._is_paused = False
    self._files = self._progress_files()
    position = generation.position(self._member.me.index)
    more = {
      progress.HOST_COUNTS_VARIABLE: str(self._files[0].parent / _HOST_COUNTS),
      interruptions.CLOCK_VARIABLE: str(self._ahead),
      **interruptions.variables(generation.run, generation.interruptions),
    }
    self._group = self._start(
      generation, position, service, [{**_reporting_to(file), **more} for file in self._files]
    )
    for number in self._signals[: self._num_taken]:  # `_take_events` passes the others on
      self._group.forward(number)

  def _report(self, group: Group) -> HostReport:
    code, asked = group.finish(), next(iter(self._signals), 0)
    step, stepped_at = _last_step(self._files)
    if group.was_ended and group.failed_at is None:
      code = None
    elif step is None and (-code in self._signals or (self._is_paused and -code == signal.SIGTERM)):
      code = generations.stop_code(-code)  # the signal came before a process could take it
    counts = progress.read_host_counts(self._files[0].parent / _HOST_COUNTS)
    failed = tuple(sorted(group.failed))
    number, paused = self._member.started.number, self._is_paused
    ended_at = max(0.0, group.ended_at - self._ahead)
    stepped_at = stepped_at and max(0.0, stepped_at - self._ahead)
    return HostReport(
      number, code, failed, step, asked, counts, paused, ended_at, stepped_at, group.error()
    )

  def _end_processes(self) -> None:
    if self._group is not None:
      self._group.end(0)
      while self._group.poll():
        time.sleep(POLL_SECONDS)
      self._group.kill_children()
      self._group = None

  def _exit_code(self) -> int:
    code, problem = self._exit.code, self._exit.problem
    if problem is not None and problem.fix:
      raise ClusterError(problem.what, fix=problem.fix, docs='never_down.md#several-hosts')
    if problem is not None:
      _log(f'not starting again: {problem.what}.')
    return _config_error_code() if code == EXIT_CONFIG else code


def seconds_ahead(own: float, other: float, *, latency: float) -> float:
  """Returns the seconds by which a clock is ahead of another; 0 if they may agree.

  Args:
    own: time of this clock when the other's arrived.
    other: time of the other clock when it was sent, at most `latency` seconds ago.
  """
  ahead = own - other
  return 0.0 if -CLOCK_SECONDS <= ahead <= CLOCK_SECONDS + latency else ahead


def _log(text: str) -> None:
  print(f'launch: {text}', file=sys.stderr, flush=True)


def plan(
  num_processes: int,
  *,
  use_gpus: bool,
  numa_mode: str,
  env: Mapping[str, str],
  gpus: Sequence[machine.PhysicalGpu],
  address: str,
  first: int = 0,
  count: Optional[int] = None,
) -> list[ProcessPlan]:
  """Returns how to start each process.

  Args:
    num_processes: processes on this machine.
    use_gpus: False for CPU devices.
    numa_mode: 'auto', 'off' or a file.
    env: the launcher's environment.
    gpus: GPUs of this machine, in PCI order.
    address: 'host:port' for process 0.
    first: number of the first process of this machine in the run.
    count: processes of the run; None if all are on this machine.
  Raises:
    ConfigError: the GPUs cannot be divided evenly.
  """
  visible = cluster.visible_gpus(env, len(gpus)) or 0 if use_gpus else 0
  if use_gpus and (visible < num_processes or visible % num_processes):
    raise ConfigError(
      f'--nproc={num_processes}, but {visible} GPUs are visible on this machine'
      f'{" through CUDA_VISIBLE_DEVICES" if "CUDA_VISIBLE_DEVICES" in env else ""}.',
      fix=f'Set --nproc to a number that divides {visible}.'
      if visible
      else 'Add --no_gpu for CPU devices, or run nvidia-smi to see why there are none.',
    )
  allowed = frozenset(os.sched_getaffinity(0))
  if numa_mode not in ('auto', 'off'):
    bindings = numa.read_bindings(numa_mode, num_processes=num_processes)
  plans, each = [], visible // num_processes
  secret = env.get(rendezvous.SECRET_VARIABLE, '')
  if count is None:  # other hosts could not know a new one
    secret = secret or rendezvous.new_secret()
  for index in range(num_processes):
    ids = list(range(index * each, (index + 1) * each))
    child = {
      **env,
      'JAX_COORDINATOR_ADDRESS': address,
      'JAX_PROCESS_COUNT': str(count or num_processes),
      'JAX_PROCESS_INDEX': str(first + index),
      'LOCAL_WORLD_SIZE': str(num_processes),
      'LOCAL_RANK': str(index),
      'PYTHONUNBUFFERED': '1',
      rendezvous.SECRET_VARIABLE: secret,
    }
    if use_gpus:
      # CUDA must use PCI order like NVML and nvidia-smi; otherwise a process would be bound to
      # cores near another process's GPU.
      child.update(JAX_LOCAL_DEVICE_IDS=','.join(map(str, ids)), CUDA_DEVICE_ORDER='PCI_BUS_ID')
      if count is None:
        child.setdefault('NCCL_SOCKET_IFNAME', '=lo')  # all processes are on this host
    else:
      child['JAX_PLATFORMS'] = 'cpu'
    if numa_mode == 'auto':
      own = machine.own_gpus(gpus, child, ids) if use_gpus else ()
      binding = numa.bind_to_gpus([g.pci_address for g in gpus if g.uuid in own], allowed=allowed)
    else:
      binding = (
        numa.CoreBinding(None, 'not bound: --numa=off') if numa_mode == 'off' else (bindings[index])
      )
    plans.append(ProcessPlan(child, binding, 'GPU ' + ','.join(map(str, ids)) if ids else 'CPU'))
  return plans


def free_address(host: str = '127.0.0.1') -> str:
  """Returns 'host:port' with a port of this machine that is free, outside the ephemeral range."""
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  for port in cluster.ports(f'launch {os.getpid()} {time.time_ns()}'):
    try:
      socket.create_server((host, port), family=family).close()
      return addresses.join(host, port)
    except OSError:
      continue
  raise ConfigError(
    'No port is free for process 0.', fix='End other runs on this machine, or try again.'
  )


def _add_flags(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    '--nproc', type=positive_int, metavar='N', help='number of processes (default: one per GPU)'
  )
  parser.add_argument(
    '--numa',
    default='auto',
    metavar='auto|off|FILE',
    help='cores of each process: near its GPU, any, or from a file',
  )
  parser.add_argument(
    '--no_gpu', action='store_true', help='use CPU devices even if there are GPUs'
  )
  parser.add_argument(
    '--restarts',
    type=whole_number,
    default=0,
    metavar='N',
    help='start all processes again if one fails, at most N times (default: 0)',
  )
  parser.add_argument(
    '--code_file',
    metavar='FILE',
    help='write the exit code of the run there; a host that has left the run does not',
  )
  hosts = parser.add_argument_group(
    'several hosts, with --restarts: start the same command on each (not needed with srun, ...)'
  )
  hosts.add_argument('--host_count', type=positive_int, metavar='N', help='number of hosts')
  hosts.add_argument(
    '--host_index', type=int, metavar='I', help='number of this host, from 0; Kubernetes gives it'
  )
  hosts.add_argument(
    '--spares',
    type=whole_number,
    default=0,
    metavar='N',
    help='of these hosts, N wait until they take the place of a lost one (default: 0)',
  )
  hosts.add_argument(
    '--coordinator_address',
    metavar='HOST:PORT[,...]',
    help='where the launch of host 0 listens; further addresses, of hosts 1, 2, ..., help a new '
    'host to find the run while host 0 is away',
  )
  parser.add_argument('--module', default=MODULES[0], choices=MODULES, help='module to start')
  parser.add_argument(
    '--write_scripts',
    metavar='FOLDER',
    help='write the scripts for Slurm, PBS, Open MPI and Kubernetes there; start nothing',
  )


def _listed(text: Optional[str]) -> list[str]:
  """Returns the addresses of hosts 0, 1, ... that --coordinator_address lists; [] without it.

  Raises:
    ConfigError: an address cannot be a host's, or is listed twice.
  """
  found = [address.strip() for address in text.split(',')] if text else []
  for address in found:
    host, port = addresses.split(address or text, '--coordinator_address')
    if host in ('0.0.0.0', '::'):
      raise ConfigError(
        f'--coordinator_address={text}: other hosts cannot connect to {host}.',
        fix='Write the name or address of the host there. To listen on all of its interfaces, set '
        f'{addresses.BIND_VARIABLE}={addresses.join(host, port)} on host 0.',
        docs='never_down.md#several-hosts',
      )
    if found.count(address) > 1:
      raise ConfigError(
        f'--coordinator_address={text}: {address} is there twice.',
        fix='Name host 0, or hosts 0, 1, ... in this order, each with its own address.',
        docs='never_down.md#several-hosts',
      )
  return found


def _agents(flags: argparse.Namespace) -> Optional[cluster.ClusterInfo]:
  """Returns this agent among the launches of several hosts; None if this is the only one.

  Raises:
    ConfigError: flags that do not fit each other.
    ClusterError: a scheduler started several agents on this host.
  """
  found = cluster.ask_all(os.environ)
  flags.coordinator_address = flags.coordinator_address or None  # a variable that is not set
  if flags.host_count is not None and flags.host_index is None:
    # Kubernetes numbers its pods, but does not say how many there are.
    flags.host_index = next((each.process_index for each in found if not each.process_count), None)
  names = ('host_count', 'host_index', 'coordinator_address')
  given = {f'--{name}': v for name in names if (v := getattr(flags, name)) is not None}
  starter = launchers.starter_of_several(found, os.environ) if flags.restarts else None
  if starter is None and not given and not flags.spares:
    return None
  if flags.spares and not flags.restarts:
    given['--spares'] = flags.spares
  if not flags.restarts:
    raise ConfigError(
      f'{", ".join(given)} without --restarts.',
      fix='Set --restarts=N for one run on several hosts.',
      docs='never_down.md#several-hosts',
    )
  if starter is None and not given:
    raise ConfigError(
      f'--spares={flags.spares}, but launch starts on one host.',
      fix='Set --host_count, --host_index and --coordinator_address, or remove --spares.',
      docs='never_down.md#several-hosts',
    )
  if starter is None and len(given) < len(names):
    missing = ' and '.join(f'--{name}' for name in names if f'--{name}' not in given)
    raise ConfigError(
      f'{", ".join(f"{flag}={value}" for flag, value in given.items())} without {missing}.',
      fix=f'Set {missing} too, or remove the others for a run of one host.',
      docs='never_down.md#several-hosts',
    )
  if flags.host_count is not None and flags.host_index is not None:
    if not 0 <= flags.host_index < flags.host_count:
      raise ConfigError(
        f'--host_index={flags.host_index} is not one of --host_count={flags.host_count} hosts.',
        fix=f'Number the hosts from 0 to {flags.host_count - 1}.',
        docs='never_down.md#several-hosts',
      )
    if flags.host_count == 1:
      return None
  known = _listed(flags.coordinator_address)
  if flags.host_count is not None and len(known) > flags.host_count:
    raise ConfigError(
      f'--coordinator_address names {len(known)} hosts, but --host_count={flags.host_count}.',
      fix='Name host 0, or hosts 0, 1, ... in this order.',
      docs='never_down.md#several-hosts',
    )
  info = cluster.detect(
    os.environ,
    coordinator_address=known[0] if known else None,
    process_count=flags.host_count,
    process_index=flags.host_index,
  )
  if (info.local_process_count or 1) > 1 and flags.host_index is None:
    raise ClusterError(
      f'{info.reason} starts {info.local_process_count} launches on this host.',
      fix='Start launch once per host (Slurm: --ntasks-per-node=1, mpirun: --map-by ppr:1:node); '
      'it starts the processes of its GPUs.',
      docs='never_down.md#several-hosts',
    )
  if flags.spares >= info.process_count:
    raise ConfigError(
      f'--spares={flags.spares} leaves no host to train on: there are {info.process_count} hosts.',
      fix='Set fewer spares.',
      docs='never_down.md#several-hosts',
    )
  return info


def not_as_process_1() -> None:
  """Continues in a child if this is process 1 of a container.

  Process 1 itself passes signals on to the child and ends as it does. It takes the exit codes of
  processes whose parents have ended, which would stay in the table of processes otherwise: each
  restart kills the children of the processes that train.
  """
  if os.getpid() != 1:
    return
  with warnings.catch_warnings(action='ignore'):  # JAX has no threads before its backend
    child = os.fork()
  if child == 0:
    return
  for number in STOP_SIGNALS:
    signal.signal(number, lambda number, frame: os.kill(child, number))
  while True:
    ended, status = os.wait()
    if ended == child:
      os._exit(shell_code(os.waitstatus_to_exitcode(status)))


def _leave_early(number: int, frame: Optional[FrameType]) -> NoReturn:
  """Ends this agent at a signal that comes before there is a run to stop.

  At once: Python ignores an exception that is raised while it collects garbage.
  """
  del number, frame
  os._exit(EXIT_PREEMPTED)


def main(argv: Optional[list[str]] = None) -> int:
  """Starts the processes and returns the exit code of the first that failed."""
  argv = list(sys.argv[1:] if argv is None else argv)
  split = argv.index('--') if '--' in argv else len(argv)
  args = cli.parse_args(
    'python -m t5x_gpu.launch',
    __doc__.splitlines()[0],
    argv[:split],
    extra=_add_flags,
    without_config='Write the flags of the run after --: '
    'python -m t5x_gpu.launch --nproc N -- --gin_file=FILE ...',
    examples=EXAMPLES,
  )
  flags = args.extra
  if flags.write_scripts is not None:
    for path in write_scripts(pathlib.Path(flags.write_scripts)):
      print(path)
    return 0
  if flags.restarts and flags.module != MODULES[0]:
    raise ConfigError(
      f'--restarts={flags.restarts} with --module={flags.module}: only {MODULES[0]} starts again.',
      fix='Leave one of the two flags out.',
      docs='never_down.md',
    )
  info = _agents(flags)
  not_as_process_1()
  if flags.restarts:
    for number in (signal.SIGTERM, signal.SIGUSR1):
      signal.signal(number, _leave_early)
  machine.allow_open_files()  # a connection to each host, and a pipe for each process
  # Each process decides for itself how to handle lost output. An agent that waits does not beat.
  streams.outlive(stall_seconds=streams.STALL_SECONDS if info is None else links.BEAT_SECONDS)
  if info is None:
    launchers.refuse_several_launches(cluster.ask_all(os.environ), os.environ)
  use_gpus = not flags.no_gpu and os.environ.get('JAX_PLATFORMS') != 'cpu'
  gpus = machine.physical_gpus() if use_gpus else []
  num_gpus = cluster.visible_gpus(os.environ, len(gpus)) or 0 if use_gpus else 0
  nproc = flags.nproc or max(1, num_gpus)
  find_problem = functools.partial(fitness.gpu_problem, len(gpus))
  command = [sys.executable, '-m', flags.module, *argv[split + 1 :]]

  def plans() -> list[ProcessPlan]:
    return plan(
      nproc,
      use_gpus=use_gpus,
      numa_mode=flags.numa,
      env=os.environ,
      gpus=gpus,
      address=free_address(),
    )

  def start(variables: Sequence[Mapping[str, str]]) -> Group:
    # With a new address and secret: JAX refuses processes of another start.
    pairs = zip(plans(), variables, strict=True)
    return Group(
      command,
      [dataclasses.replace(p, env={**p.env, **v}) for p, v in pairs],
      at_once=True,
      fork_server=fork_server,
    )

  def start_generation(
    generation: Generation, position: int, service: str, variables: Sequence[Mapping[str, str]]
  ) -> Group:
    count, first_number = len(generation.hosts) * nproc, position * nproc
    env = launchers.without_numbers(os.environ, cluster.ask_all(os.environ))
    if secret := rendezvous.secret_from_environment(os.environ):
      # Processes of an earlier generation must not join.
      key = ('generation', generation.run, str(generation.number))
      env[rendezvous.SECRET_VARIABLE] = rendezvous.proof(secret, *key)
    env[run_lock.GENERATION_VARIABLE] = f'{generation.run} {generation.number}'
    if len(generation.hosts) < info.process_count - flags.spares:
      env[generations.FEWER_HOSTS_VARIABLE] = '1'
    return Group(
      command,
      [
        dataclasses.replace(p, env={**p.env, **v})
        for p, v in zip(
          plan(
            nproc,
            use_gpus=use_gpus,
            numa_mode=flags.numa,
            env=env,
            gpus=gpus,
            address=service,
            first=first_number,
            count=count,
          ),
          variables,
          strict=True,
        )
      ],
      at_once=True,
      first=first_number,
      count=count,
      fork_server=fork_server,
      # The other hosts end their processes too, so these could not save, and would keep the GPUs
      # of the next start waiting.
      if_lost=signal.SIGKILL,
    )

  fork_server = None
  where = '' if info is None else ' of this host'
  for index, each in enumerate(first := plans()):
    print(f'launch: process {index}{where}: {each.gpus}; {each.binding.reason}', flush=True)
  if flags.restarts and is_supported():
    fork_server = ForkServer(
      flags.module, argv[split + 1 :], imports=LATER_IMPORTS, env=first[0].env, asks=True
    )
    fork_server.wait_until_ready(START_SECONDS)
  runner: Union[Group, Agent, HostAgent]
  if info is not None:
    runner = HostAgent(
      start_generation,
      cluster_info=info,
      num_processes=nproc,
      restarts=flags.restarts,
      spares=flags.spares,
      facts={
        # Processes with other code could not join: better to refuse their host while others train.
        't5x_gpu': agreement.digest(members.package_facts()),
        '--nproc': str(nproc),
        '--restarts': str(flags.restarts),
        '--host_count': str(info.process_count),
        '--spares': str(flags.spares),
        'GPUs': str(num_gpus),
        'flags of the run': shlex.join(argv[split + 1 :]),
      },
      env=os.environ,
      find_problem=find_problem,
      listed=_listed(flags.coordinator_address),
    )
  elif flags.restarts:
    runner = Agent(start, num_processes=nproc, restarts=flags.restarts, find_problem=find_problem)
  else:
    runner = Group(command, first, end_together=flags.module != DOCTOR)
  for number in STOP_SIGNALS:
    if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as by nohup
      signal.signal(number, runner.forward)
  code = runner.wait()
  if flags.code_file:
    try:
      own = f'.{socket.gethostname()}.{os.getpid()}'
      write_atomically(flags.code_file, f'{code}\n', suffix=own)
    except OSError as error:
      _log(f'the exit code {code} was not written to {flags.code_file}: {reason_of(error)}.')
  return code


if __name__ == '__main__':
  cli.run_main(main)
