"""Predicts how much of a run's time is lost to faults: which checkpoint interval, how many spares.

`replay` runs the agents of `launch` (`generations.Member`, one per host) on a simulated clock, with
random faults and with durations in the place of processes. What follows a fault is decided by the
code that decides it in a run. `goodput` then counts the steps that survive, for any interval of
checkpoints: the interval does not change when generations start and end.
"""

import dataclasses
import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Optional, TypedDict

from t5x_gpu.checkpoint.model_dir import ModelDir
from t5x_gpu.errors import ConfigError, number_ranges
from t5x_gpu.metrics import goodput as goodput_of_runs
from t5x_gpu.runtime.cluster import generations, links
from t5x_gpu.runtime.cluster.generations import Generation, Host, HostReport, Member
from t5x_gpu.runtime.cluster.restarts import EXIT_PREEMPTED
from t5x_gpu.storage.json_schema import JsonObject, read_json, schema_of
from t5x_gpu.storage.paths import AnyPath
from t5x_gpu.terminal.console import seconds, table
from t5x_gpu.tools.planning.prediction import Prediction

# Llama 3 405B on 16,384 GPUs had 419 unexpected interruptions in 54 days; hardware caused 78% of
# them (arXiv 2407.21783, section 3.3.4).
FAULTS_PER_GPU_DAY = 4.7e-4
LOST_HOST_SHARE = 0.78
START_SECONDS = 60.0
REPAIR_HOURS = 24.0
# Round figures: from a GPU to the memory of its host, and from there to /dev/shm of another host.
_COPY_GIGABYTES = 20.0
_LOCAL_GIGABYTES = 2.0
_SPARES = (0, 1, 2)
_ROWS = (1, 2, 5, 10, 20, 30, 60, 120, 240)  # minutes from one save to the next

DAY = 86400.0
_MOST_FAULTS, _FEWEST_FAULTS, _HOST_FAULTS = 300, 50, 12_000  # of a replay: many hosts take longer
_ENDING_SECONDS = 1.0  # until killed processes are gone
# After an event, agents of a training run decide something within this time.
_LATEST_DECISION = generations.GROW_SECONDS + generations.FIND_SECONDS + 5
_QUEUE_SECONDS = 60.0  # until a run that has ended starts again


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machines:
  """The hosts of a run, and what happens to them.

  Attributes:
    num_hosts: hosts that train.
    gpus_per_host: GPUs of each.
    host_counts: numbers of hosts that the mesh fits, `num_hosts` included.
    faults_per_gpu_day: faults of one GPU and its part of the host in a day.
    lost_host_share: share of the faults after which the host is gone.
    repair_seconds: until a lost host is back.
    start_seconds: from the start of processes to the first step.
    save_seconds: until a run that is asked to stop has saved.
  """

  num_hosts: int
  gpus_per_host: int
  host_counts: tuple[int, ...]
  faults_per_gpu_day: float
  lost_host_share: float
  repair_seconds: float
  start_seconds: float
  save_seconds: float

  @property
  def faults_per_day(self) -> float:
    return self.num_hosts * self.gpus_per_host * self.faults_per_gpu_day


@dataclasses.dataclass(frozen=True)
class Stretch:
  """Time in which a generation takes steps, in seconds since the start of the run.

  Attributes:
    start, end: first and last moment; the same if it ended before its first step.
    num_hosts: hosts that train.
    saved: whether it ended with a save.
  """

  start: float
  end: float
  num_hosts: int
  saved: bool


@dataclasses.dataclass(frozen=True)
class Saving:
  """A tier of checkpoints.

  Attributes:
    name: for the table.
    stall_seconds: how long a save stops the steps.
    commit_seconds: from the start of a save until it can be restored.
    stall_source, commit_source: where they were measured; '' without a measured run.
  """

  name: str
  stall_seconds: float
  commit_seconds: float
  stall_source: str = ''
  commit_source: str = ''


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredRun:
  """Durations of a run, as far as it has recorded them; none by default.

  Attributes:
    model_dir: where they were read.
    starts: seconds of each further start until its first step.
    stalls: seconds that each save stopped the steps, to MODEL_DIR or locally.
    commits: seconds from the start of a save until its commit, of the checkpoints in MODEL_DIR.
  """

  model_dir: str = ''
  starts: Sequence[float] = ()
  stalls: Sequence[float] = ()
  commits: Sequence[float] = ()

  def median(self, name: str, found: Sequence[float], *, assumed: float) -> tuple[float, str]:
    """Returns the median of the durations, or `assumed` without any, and words for its source."""
    if not found:
      return assumed, f'assumed: not recorded in {self.model_dir}' if self.model_dir else ''
    number = f'a {name}' if len(found) == 1 else f'{len(found)} {name}s'
    return statistics.median(found), f'the median of {number} in {self.model_dir}'


def goodput(
  stretches: Sequence[Stretch], *, seconds: float, num_hosts: int, saving: Saving, interval: float
) -> float:
  """Returns the share of `seconds` on `num_hosts` that went into steps that were not repeated.

  Args:
    stretches: of `replay`.
    seconds: length of the run.
    num_hosts: hosts that are paid for.
    saving: where checkpoints go.
    interval: seconds of steps from one save to the next.
  """
  useful = 0.0
  for stretch in stretches:
    length = stretch.end - stretch.start
    period = interval + saving.stall_seconds
    saves = math.floor(length / period)
    if stretch.saved:
      steps = saves * interval + min(length - saves * period, interval)
    else:
      committed = math.floor((length - saving.commit_seconds + saving.stall_seconds) / period)
      steps = max(min(saves, committed), 0) * interval
    useful += steps * stretch.num_hosts
  return useful / (seconds * num_hosts)


def best_interval(
  stretches: Sequence[Stretch], *, seconds: float, num_hosts: int, saving: Saving
) -> tuple[float, float]:
  """Returns the interval with the highest goodput, and the goodput."""
  shortest = max(saving.commit_seconds, saving.stall_seconds, 1.0)
  intervals = [shortest * 1.2**i for i in range(80) if shortest * 1.2**i < 2 * DAY] or [shortest]

  def value(interval: float) -> float:
    return goodput(
      stretches, seconds=seconds, num_hosts=num_hosts, saving=saving, interval=interval
    )

  found = max(intervals, key=value)
  return found, value(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostsOfFaults:
  """What faults cost a run.

  Attributes:
    machines: the hosts and their faults.
    step_seconds: duration of a step on all hosts.
    savings: tiers of checkpoints: MODEL_DIR, then local.
    replays: spare hosts -> stretches and seconds of a replay.
    num_faults: faults of each replay.
    start_source: where the seconds of a start were measured; '' for a given or assumed value.
  """

  machines: Machines
  step_seconds: float
  savings: tuple[Saving, ...]
  replays: Mapping[int, tuple[Sequence[Stretch], float]]
  num_faults: int
  start_source: str = ''

  def goodput(self, saving: Saving, spares: int, interval: float) -> float:
    """Returns the share of all GPU time, of spares too."""
    stretches, length = self.replays[spares]
    num_hosts = self.machines.num_hosts + spares
    return goodput(stretches, seconds=length, num_hosts=num_hosts, saving=saving, interval=interval)

  def best(self, saving: Saving) -> tuple[int, float, float]:
    """Returns the number of spares, the seconds between saves, and their goodput."""
    found = []
    for spares, (stretches, length) in self.replays.items():
      num_hosts = self.machines.num_hosts + spares
      interval, value = best_interval(stretches, seconds=length, num_hosts=num_hosts, saving=saving)
      found.append((value, -spares, interval))
    value, spares, interval = max(found)
    return -spares, interval, value


def costs_of_faults(
  prediction: Prediction,
  host_counts: Sequence[int],
  *,
  faults_per_gpu_day: float = FAULTS_PER_GPU_DAY,
  start_seconds: float = START_SECONDS,
  measured: MeasuredRun = MeasuredRun(),
  repair_hours: float = REPAIR_HOURS,
) -> CostsOfFaults:
  """Returns what faults cost the run of `prediction`, whose mesh fits `host_counts`.

  What `measured` has replaces what is assumed, `start_seconds` too.
  """
  num_bytes, num_hosts = prediction.checkpoint.num_bytes, prediction.num_hosts
  step = prediction.seconds_per_step
  copy = num_bytes / prediction.num_gpus / 1e9 / _COPY_GIGABYTES
  start, start_source = measured.median('further start', measured.starts, assumed=start_seconds)
  stall, stall_source = measured.median('save', measured.stalls, assumed=max(copy, step / 10))
  commit, commit_source = measured.median(
    'checkpoint', measured.commits, assumed=copy + prediction.checkpoint.seconds
  )
  local, local_source = measured.median(
    'local checkpoint', (), assumed=copy + num_bytes / num_hosts / 1e9 / _LOCAL_GIGABYTES
  )
  machines = Machines(
    num_hosts=num_hosts,
    gpus_per_host=prediction.num_gpus // num_hosts,
    host_counts=tuple(host_counts),
    faults_per_gpu_day=faults_per_gpu_day,
    lost_host_share=LOST_HOST_SHARE,
    repair_seconds=repair_hours * 3600,
    start_seconds=start,
    save_seconds=commit,
  )
  num_faults = min(_MOST_FAULTS, max(_FEWEST_FAULTS, _HOST_FAULTS // num_hosts))
  return CostsOfFaults(
    machines=machines,
    step_seconds=step,
    savings=(
      Saving('MODEL_DIR', stall, commit, stall_source, commit_source),
      Saving('local', stall, local, stall_source, local_source),
    ),
    replays={spares: replay(machines, spares=spares, num_faults=num_faults) for spares in _SPARES},
    num_faults=num_faults,
    start_source=start_source,
  )


def measured_run(model_dir: AnyPath) -> MeasuredRun:
  """Returns how long the starts and saves of a run took.

  Raises:
    ConfigError: the run has no ledger, or has started only once.
  """
  ledger = model_dir / goodput_of_runs.GOODPUT
  if not ledger.exists():
    raise ConfigError(
      f'{model_dir} has no {ledger.name}, from which --measured_run takes durations.',
      fix='Name the MODEL_DIR of a run.',
      docs='plan.md#faults',
    )
  lines = goodput_of_runs.read_ledger(ledger)
  _, *later = goodput_of_runs.accounts_of(lines).processes
  if not later:
    raise ConfigError(
      f'The run in {model_dir} has started only once: it has not measured a further start.',
      fix='Leave --measured_run out, or name a run that was started again.',
      docs='plan.md#faults',
    )
  checkpoints = ModelDir(model_dir)
  return MeasuredRun(
    model_dir=str(model_dir),
    starts=[sum(each.seconds[name] for name in ('init', 'compile', 'restore')) for each in later],
    stalls=[stall for process in lines.runs for stall in _stalls(process)],
    commits=[
      commit
      for step in checkpoints.steps
      if (commit := _commit_seconds(checkpoints.checkpoint(step))) > 0
    ],
  )


def _stalls(process: goodput_of_runs.ProcessLines) -> list[float]:
  """Returns how long each save stopped the steps; a save writes a line when it begins."""
  found: dict[Optional[int], float] = {}
  for line, after in itertools.pairwise(process.lines):
    if line.phase == 'save':
      waited = after.seconds.get('save', 0.0) - line.seconds.get('save', 0.0)
      found[line.step] = found.get(line.step, 0.0) + waited
  if process.last.phase == 'save':  # killed in this save
    found.pop(process.last.step, None)
  return list(found.values())


def _commit_seconds(checkpoint: AnyPath) -> float:
  """Returns the seconds from the start of a save to its commit; 0 if it was not recorded.

  Orbax records them, not `StateWriter`, which promotes local checkpoints and writes to buckets.
  """
  try:
    times = read_json(checkpoint / '_CHECKPOINT_METADATA', schema_of(_SaveTimes))
  except (OSError, ValueError):
    return 0.0
  return (times['commit_timestamp_nsecs'] - times['init_timestamp_nsecs']) / 1e9


class _SaveTimes(TypedDict):
  """The times in Orbax's metadata of a checkpoint, which has further keys."""

  init_timestamp_nsecs: int
  commit_timestamp_nsecs: int


def _gin_line(costs: CostsOfFaults, saving: Saving, interval: float) -> str:
  steps = max(1, round(interval / costs.step_seconds))
  if saving.name == 'local':
    return f'checkpointer.CheckpointConfig.local_period = {steps}'
  return f'SAVE_PERIOD = {steps}'


def _sourced(duration: float, source: str) -> str:
  return f'{seconds(duration)} ({source})' if source else seconds(duration)


def text(costs: CostsOfFaults) -> str:
  """Returns the table and the recommended setting."""
  machines = costs.machines
  gpus = machines.num_hosts * machines.gpus_per_host
  source = f', {costs.start_source}' if costs.start_source else ''
  lines = [
    f'Faults: {machines.faults_per_day:.2g} a day on {gpus} GPUs '
    f'({machines.faults_per_gpu_day:g} per GPU and day). {machines.lost_host_share:.0%} of them '
    f'take a host away for {machines.repair_seconds / 3600:g} hours.',
    f'A start takes {machines.start_seconds:.3g} s{source}. The mesh fits '
    f'{number_ranges(machines.host_counts, separator=", ")} hosts.',
    '',
    'Share of the GPU time, of spare hosts too, in steps that are not repeated:',
    '',
  ]
  for saving in costs.savings:
    shortest = max(saving.commit_seconds, saving.stall_seconds)
    header = [
      f'{saving.name} checkpoint every',
      *(f'{n} spare' if n == 1 else f'{n} spares' for n in costs.replays),
    ]
    shares = [
      [
        f'  {minutes} min',
        *(f'{costs.goodput(saving, spares, 60.0 * minutes):.1%}' for spares in costs.replays),
      ]
      for minutes in _ROWS
      if 60 * minutes >= shortest
    ]
    lines += [
      table([header, *shares], right=range(1, len(header))),
      f'  A save stops the steps for {_sourced(saving.stall_seconds, saving.stall_source)}, and '
      f'can be restored after {_sourced(saving.commit_seconds, saving.commit_source)}.',
      '',
    ]
  for saving in costs.savings:
    spares, interval, value = costs.best(saving)
    lines.append(
      f'Best with {saving.name} checkpoints: {value:.1%}, --spares={spares}, every '
      f'{seconds(interval)}:'
    )
    lines.append(f'  {_gin_line(costs, saving, interval)}')
  lines.append('')
  lines.append(
    f'{costs.num_faults} random faults, replayed with the agents of launch --restarts. The default '
    "rate is Llama 3 405B's (arXiv 2407.21783)."
  )
  return '\n'.join(lines)


def as_json(costs: CostsOfFaults) -> JsonObject:
  """Returns the same figures for --json."""
  return {
    'machines': dataclasses.asdict(costs.machines),
    'start_source': costs.start_source,
    'step_seconds': costs.step_seconds,
    'tiers': [
      {
        **dataclasses.asdict(saving),
        'best': dict(zip(('spares', 'seconds', 'goodput'), costs.best(saving), strict=True)),
        'goodput': [
          {
            'seconds': 60 * minutes,
            'spares': spares,
            'goodput': costs.goodput(saving, spares, 60.0 * minutes),
          }
          for minutes in _ROWS
          for spares in costs.replays
        ],
      }
      for saving in costs.savings
    ],
  }


def replay(machines: Machines, *, spares: int, num_faults: int) -> tuple[list[Stretch], float]:
  """Returns the stretches of a run with faults, and its length in seconds."""
  run = _Replay(machines, spares)
  return run.until(num_faults), run.now


class _Replay:
  """Agents, their links, and a clock that jumps from event to event."""

  def __init__(self, machines: Machines, spares: int):
    self._machines, self._spares = machines, spares
    self._random = random.Random(0)
    self.now = 0.0
    self._events: list[tuple[float, int, Callable[[], None]]] = []
    self._count = 0
    self._agents: dict[int, Member] = {}
    self._running: dict[int, Generation] = {}
    self._links: dict[int, tuple[int, int]] = {}
    self._next_link = 0
    self._training: Optional[tuple[Generation, float]] = None  # and when its steps begin
    self._stretches: list[Stretch] = []
    self._steps_before = 0.0
    self._woken_at, self._ticks_until = 0.0, 0.0
    self._is_ticking = False
    for index in range(machines.num_hosts + spares):
      self._boot(index)

  def until(self, num_faults: int) -> list[Stretch]:
    rate = self._machines.faults_per_day / DAY
    for _ in range(num_faults):
      at = self.now + self._random.expovariate(rate)
      while self._events and self._events[0][0] <= at:
        self._next()
      self.now = at
      self._fault()
    self._stop(saved=True)
    return self._stretches

  # Time.

  def _after(self, seconds: float, event: Callable[[], None]) -> None:
    self._count += 1
    heapq.heappush(self._events, (self.now + seconds, self._count, event))

  def _next(self) -> None:
    self.now, _, event = heapq.heappop(self._events)
    event()

  def _tick(self) -> None:
    """Agents look at the clock, until nothing is left for them to decide."""
    for agent in list(self._agents.values()):
      self._do(agent, agent.tick(self.now))
    self._is_ticking = self._training is None or self.now < self._ticks_until
    if self._is_ticking and self._agents:
      self._after(max(1.0 if self._training is None else 5.0, self._calm()), self._tick)
    else:
      self._is_ticking = False

  def _calm(self) -> float:
    """Returns seconds that do not matter any more: the longer nothing has happened, the more."""
    return (self.now - self._woken_at) / 20

  def _wake(self) -> None:
    self._woken_at, self._ticks_until = self.now, self.now + _LATEST_DECISION
    if not self._is_ticking:
      self._is_ticking = True
      self._after(0.0, self._tick)

  # Hosts.

  def _boot(self, index: int) -> None:
    self._count += 1
    me = Host(index, f'host{index}', str(self._count), f'host{index}:{self._count}')
    agent = self._agents[index] = Member(
      me,
      host_count=self._machines.num_hosts + self._spares,
      spares=self._spares,
      restarts=10**9,
      processes_per_host=self._machines.gpus_per_host,
      facts={},
      machine=me.name,
      start_seconds=math.inf,
    )
    # A host that was repaired is another one: it is not known by its former failures.
    agent.me = dataclasses.replace(me, name=f'{me.name}.{self._count}')
    self._wake()
    self._do(agent, agent.start(self.now))

  def _fault(self) -> None:
    if self._training is None:
      return
    host = self._random.choice(self._training[0].hosts)
    if host.index not in self._running:
      return
    if self._random.random() < self._machines.lost_host_share:
      self._stop(saved=False)
      self._running.pop(host.index)
      del self._agents[host.index]
      self._after(self._machines.repair_seconds, lambda: self._boot(host.index))
      silence = links.SILENT_SECONDS
      self._after(silence, lambda: self._close_all(host.index, silence))
    else:
      self._end(self._agents[host.index], self._running[host.index], generations.LOST_CODE)
    self._wake()

  def _close_all(self, index: int, silent_seconds: float = 0.0) -> None:
    for link, ends in list(self._links.items()):
      if index in ends:
        self._close(link, index, silent_seconds)

  def _close(self, link: int, by: int, silent_seconds: float = 0.0) -> None:
    ends = self._links.pop(link, None)
    if ends is not None:
      other = self._agents.get(ends[0] if ends[1] == by else ends[1])
      if other is not None:
        self._after(
          0.0,
          lambda: self._do(other, other.link_closed(link, self.now, silent_seconds=silent_seconds)),
        )

  # Processes.

  def _begin(self, generation: Generation) -> None:
    self._training = generation, self.now + self._machines.start_seconds
    self._ticks_until = self.now + _LATEST_DECISION

  def _stop(self, *, saved: bool) -> None:
    if self._training is not None:
      generation, start = self._training
      end = max(start, self.now)
      self._stretches.append(Stretch(start, end, len(generation.hosts), saved))
      self._steps_before += end - start
      self._training = None

  def _end(
    self, agent: Member, generation: Generation, code: Optional[int], *, paused: bool = False
  ) -> None:
    if self._agents.get(agent.me.index) is not agent:
      return
    if self._running.get(agent.me.index) is not generation:
      return
    self._stop(saved=paused)
    del self._running[agent.me.index]
    report = HostReport(
      generation.number,
      code,
      (0,) if code else (),
      int(self._steps_before),  # a step takes a second here: failures do not repeat
      host_counts=tuple(n for n in self._machines.host_counts if n <= len(generation.hosts)),
      paused=paused,
    )
    self._wake()
    self._do(agent, agent.processes_ended(report, self.now))

  def _do(self, agent: Member, actions: Sequence[generations.Action]) -> None:
    index = agent.me.index
    for action in actions:
      if self._agents.get(index) is not agent:
        return
      match action:
        case generations.Send(link, message):
          self._after(0.0, lambda link=link, m=message: self._deliver(link, index, m))
        case generations.Connect(other, address):
          self._after(0.0, lambda o=other, a=address: self._connect(agent, o, a))
        case generations.Drop(link):  # after its last messages
          self._after(0.0, lambda link=link: self._close(link, index))
        case generations.Offer(number):
          self._do(agent, agent.offered(number, 'host:1', self.now))
        case generations.StartProcesses(generation, _):
          self._running[index] = generation
          if all(self._running.get(host.index) == generation for host in generation.hosts):
            self._begin(generation)
        case generations.PauseProcesses():
          running = self._running[index]
          self._after(
            self._machines.save_seconds,
            lambda g=running: self._end(agent, g, EXIT_PREEMPTED, paused=True),
          )
        case generations.EndProcesses(seconds):
          self._after(
            seconds + _ENDING_SECONDS,
            lambda g=self._running.get(index): g and self._end(agent, g, None),
          )
        case generations.Exit():  # as a scheduler does, which starts the job again
          self._running.pop(index, None)
          del self._agents[index]
          self._after(0.0, lambda: self._close_all(index))  # after their last messages
          self._after(_QUEUE_SECONDS, lambda: self._boot(index))

  def _deliver(self, link: int, sender: int, message: generations.Message) -> None:
    ends = self._links.get(link)
    if ends is not None:
      receiver = self._agents.get(ends[0] if ends[1] == sender else ends[1])
      if receiver is not None:
        self._do(receiver, receiver.received(link, message, self.now))

  def _connect(self, agent: Member, other: int, address: Optional[str]) -> None:
    if self._agents.get(agent.me.index) is not agent:
      return
    to = self._agents.get(other)
    if to is None or (address is not None and to.me.address != address):
      again = max(1.0, self._calm())
      self._after(again, lambda: self._do(agent, agent.unreachable(other, self.now)))
      return
    self._next_link += 1
    self._links[self._next_link] = (agent.me.index, other)
    self._do(agent, agent.linked(other, self._next_link, self.now))
