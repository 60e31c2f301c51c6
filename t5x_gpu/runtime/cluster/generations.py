"""Decides, on each host of a run, which hosts train: pure, with events in and actions out.

`launch` on each host is an *agent*. A *generation* is one start of the processes of all its hosts;
it ends as a whole. The agent of the lowest host that the others reach is the leader. Whenever a
generation ends, every agent ends its processes and reports to the leader, which proposes the next
generation and starts it once all agents in it have accepted.

No two generations train at the same time, in a network that is cut as well:

- A leader needs more than half of the hosts of the last generation. Of two halves, the one with
  more of its spares counts, then the one with its first host. Agents report each generation that
  they accepted, and a leader needs this share of each that may have started. So any two leaders
  after a generation share an agent, which knows what the first of them has started; and each has a
  host that has ended the generation.
- An agent follows one leader at a time and reports only after its processes have ended. Processes
  of a generation cannot finish a step without each other, so one host that has left ends it.
- An agent that was started again knows nothing and does not count (`incarnation`). But the
  processes of its predecessor have ended, and agents report only after their processes have. So
  nothing runs any more once all hosts of the run are there, on their machines.
- A first generation starts without spares that are late. So agents that were all started again, as
  many as train, begin another run while others are cut off; `run_lock` then keeps it out.

The agents without that share end their processes and wait for the others; after `HOLD_SECONDS` the
run ends on their hosts.

A host that comes back waits as a spare. If the mesh fits it, the leader pauses the generation: its
processes save and end, and the next generation starts on more hosts.
"""

import dataclasses
import signal
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Optional, Union

from t5x_gpu.errors import Problem, listed, number_ranges
from t5x_gpu.runtime.cluster import interruptions
from t5x_gpu.runtime.cluster.interruptions import Interruption, Time
from t5x_gpu.runtime.cluster.restarts import (
  EXIT_INTERRUPTED,
  EXIT_PREEMPTED,
  SHARED_CODES,
  STEPS_IN_FLIGHT,
  STOPPED_CODES,
  Ended,
  Restarts,
  ReturnCode,
  Stop,
)
from t5x_gpu.storage.json_schema import Json, JsonObject, from_json, to_json

# Set for the processes of a generation with fewer hosts than the run began with.
FEWER_HOSTS_VARIABLE = 'T5X_GPU_FEWER_HOSTS'
# The code of a host that was lost with its processes: as if `kill -9` had ended them.
LOST_CODE = -signal.SIGKILL
# Processes have this long to report why they failed, after an exit code on another host.
REPORT_SECONDS = 10
# Processes that were asked to stop exit one after the other, the last after the save.
STOPPED_SECONDS = 120
# A host has this long to come back, from its last sign of life, before the run continues without
# it, ...
GRACE_SECONDS = 10
# ... and this long if the run cannot continue without it.
HOLD_SECONDS = 300
# An agent whose predecessor is still connected waits this long, until that one is silent.
PREDECESSOR_SECONDS = 10
# A host that has not looked at its GPUs after this time is left out; the look has its own deadline.
OFFER_SECONDS = 60
# A leader without all hosts looks this often for a lower host, which then leads.
PROBE_SECONDS = 2
# A leader that waits for hosts says so this often.
REMIND_SECONDS = 30
# The first generation waits this long for spares, once the others are there.
SPARE_SECONDS = 30
# A generation has run this long before it is paused for more hosts.
GROW_SECONDS = 60
# The leader of a running generation looks this often for host 0, which new agents ask.
FIND_SECONDS = 10
# A host that caused this many failures within this time has no processes until they are older.
BAD_HOST_FAILURES = 3
BAD_HOST_SECONDS = 86400
# Ending processes takes at most `REPORT_SECONDS` and as long again; a host that takes longer (a
# process that the kernel cannot end) is left out.
ENDING_SECONDS = 60
SAME_COMMAND = 'Start all hosts with the same command, from the same checkout.'
_REPAIR = 'Repair the host, and start the same command there again: the run takes it in.'


@dataclasses.dataclass(frozen=True)
class Host:
  """An agent.

  Attributes:
    index: number of the host, from 0.
    name: host name, for messages.
    incarnation: differs between two agents with the same index, one started after the other.
    address: 'host:port' where the agent listens.
  """

  index: int
  name: str
  incarnation: str
  address: str

  def __str__(self) -> str:
    return f'host {self.index} ({self.name})'


@dataclasses.dataclass(frozen=True)
class Blame:
  """A failure that the machine named `host` caused, `seconds` before a generation started.

  Attributes:
    reason: why this failure alone keeps the host out; '' if it takes `BAD_HOST_FAILURES`.
  """

  host: str
  seconds: float
  reason: str = ''


@dataclasses.dataclass(frozen=True)
class Generation:
  """One start of the run.

  Attributes:
    run: the same for all generations of a run, and for no other run.
    number: from 1, greater than the number of each earlier generation.
    hosts: hosts with processes, in the order of these.
    spares: hosts whose agents wait for the next generation.
    restarts: restarts so far.
    host_counts: numbers of hosts that the mesh fits, as far as they are known.
    interruptions: why the last generations before it ended.
    blamed: the last failures that hosts have caused.
    untried: indices of hosts with which the run has not come further than without them.
  """

  run: str
  number: int
  hosts: tuple[Host, ...]
  spares: tuple[Host, ...]
  restarts: Restarts
  host_counts: tuple[int, ...] = ()
  interruptions: tuple[Interruption, ...] = ()
  blamed: tuple[Blame, ...] = ()
  untried: tuple[int, ...] = ()

  @property
  def members(self) -> tuple[Host, ...]:
    return self.hosts + self.spares

  @property
  def cause(self) -> str:
    """Why the generation before it ended; '' for the first one."""
    return str(self.interruptions[-1]) if self.interruptions else ''

  @property
  def is_restart(self) -> bool:
    """Whether it follows a failure, not a pause."""
    return bool(self.interruptions) and self.interruptions[-1].kind != interruptions.JOINED

  def position(self, index: int) -> Optional[int]:
    """Returns the position of host `index` among the hosts with processes; None if it has none."""
    return next((i for i, host in enumerate(self.hosts) if host.index == index), None)


@dataclasses.dataclass(frozen=True)
class HostReport:
  """How a generation ended on one host.

  Attributes:
    number: the generation.
    code: exit code of the process that failed first, minus the signal if one ended it; 0 if all
      were done; None if the agent ended them.
    failed: local indices of the processes that had failed when the first failure was seen.
    step: the last step that a process had finished; None before the first one.
    asked: the signal that asked the run to stop; 0 for none.
    host_counts: numbers of hosts that the mesh fits, up to the generation's own; () if the
      processes did not get so far.
    paused: whether the leader asked these processes to save and end, to continue on more hosts.
    ended_at: when the agent noticed the end or ended them, in seconds since 1970; 0 if unknown.
    stepped_at: when `step` was finished, in seconds since 1970; None if unknown.
    error: the error of the process that failed first as one line.
  """

  number: int
  code: Optional[ReturnCode]
  failed: tuple[int, ...] = ()
  step: Optional[int] = None
  asked: int = 0
  host_counts: tuple[int, ...] = ()
  paused: bool = False
  ended_at: Time = 0.0
  stepped_at: Optional[Time] = None
  error: str = ''

  @property
  def is_failure(self) -> bool:
    return self.code is not None and self.code not in STOPPED_CODES


@dataclasses.dataclass(frozen=True)
class Hello:
  """An agent's first message to a leader; its processes have ended.

  Attributes:
    host: the agent.
    facts: name -> value of settings that must be the same on all hosts.
    machine: identity of the machine; two agents of a run may not share one.
    started: the last generation that this agent knows to have started.
    accepted: later generations that it has accepted.
    report: how `started` ended.
    asked: the signal that asked the run to stop; 0 for none.
  """

  host: Host
  facts: Mapping[str, str]
  machine: str
  started: Optional[Generation] = None
  accepted: tuple[Generation, ...] = ()
  report: Optional[HostReport] = None
  asked: int = 0


# Messages. From a leader: Welcome, Refusal, Propose, Start, Pause, End, Finish. To it: Hello,
# Accepted, HostReport, Asked. From any agent: Unfit. To one that looks for the leader: Redirect.


@dataclasses.dataclass(frozen=True)
class Welcome:
  """The leader has taken the sender of Hello in.

  Attributes:
    time: when the shell sent this by the clock of the run, in seconds since 1970; 0 before.
  """

  time: Time = 0.0


@dataclasses.dataclass(frozen=True)
class Refusal:
  """The receiver cannot take part: `is_final`, or only not with this sender as its leader."""

  reason: str
  fix: str = ''
  is_final: bool = True


@dataclasses.dataclass(frozen=True)
class Propose:
  """The receiver may accept this generation, its next one."""

  generation: Generation


@dataclasses.dataclass(frozen=True)
class Accepted:
  """The sender has accepted a generation; `service` is a free 'host:port' for its process 0."""

  number: int
  service: str


@dataclasses.dataclass(frozen=True)
class Start:
  """Everybody has accepted generation `number`; its process 0 listens at `service`."""

  number: int
  service: str


@dataclasses.dataclass(frozen=True)
class Pause:
  """Processes of generation `number` save and end: the next generation has more hosts."""

  number: int


@dataclasses.dataclass(frozen=True)
class Redirect:
  """Host `index` leads, at `address`; the sender does not."""

  index: int
  address: str


@dataclasses.dataclass(frozen=True)
class End:
  """Generation `number` has failed: end its processes, after `seconds` for their reports."""

  number: int
  seconds: float


@dataclasses.dataclass(frozen=True)
class Asked:
  """A signal asked the sender to stop the run."""

  signal: int


@dataclasses.dataclass(frozen=True)
class Unfit:
  """The sender leaves: its host cannot take part in another generation.

  Attributes:
    reason: why it cannot.
    report: how the last generation ended on its host; None if it had no processes there.
  """

  reason: str
  report: Optional[HostReport] = None


@dataclasses.dataclass(frozen=True)
class Finish:
  """The run ends with this exit code. `reason`: why it does not start again, '' if it is done."""

  code: int
  reason: str = ''
  fix: str = ''


Message = Union[
  Hello,
  Welcome,
  Refusal,
  Redirect,
  Propose,
  Accepted,
  Start,
  Pause,
  End,
  HostReport,
  Asked,
  Unfit,
  Finish,
]


# Actions. The shell carries them out in this order. A link is a connection to another agent.


@dataclasses.dataclass(frozen=True)
class Send:
  link: int
  message: Message


@dataclasses.dataclass(frozen=True)
class Connect:
  """Open a link to the agent of host `index`; then call `linked` or `unreachable`.

  Attributes:
    address: where it listens; None for the address that is given to all agents (host 0, ...).
  """

  index: int
  address: Optional[str]


@dataclasses.dataclass(frozen=True)
class Drop:
  """Close a link, without calling `link_closed`."""

  link: int


@dataclasses.dataclass(frozen=True)
class Offer:
  """Choose a free address for process 0, and call `offered`; or `unfit`, if the host is."""

  number: int


@dataclasses.dataclass(frozen=True)
class StartProcesses:
  generation: Generation
  service: str


@dataclasses.dataclass(frozen=True)
class PauseProcesses:
  """Ask the processes to save and end; then call `processes_ended`."""


@dataclasses.dataclass(frozen=True)
class EndProcesses:
  """End the processes after `seconds`, then call `processes_ended`."""

  seconds: float


@dataclasses.dataclass(frozen=True)
class Exit:
  """End the processes, if they run, and this agent.

  Attributes:
    code: exit code, as shells show it.
    problem: why the run does not start again; None if it is done or was asked to stop.
      A problem with a fix is an error of the command.
  """

  code: int
  problem: Optional[Problem] = None


@dataclasses.dataclass(frozen=True)
class Log:
  text: str


Action = Union[Send, Connect, Drop, Offer, StartProcesses, PauseProcesses, EndProcesses, Exit, Log]


def has_share(present: Iterable[Host], generation: Generation) -> bool:
  """Returns whether `present` may start the next generation: no other part of this one may.

  They are more than half of its hosts. Of two halves, the one with more of its spares may, and if
  these are halves too, the one with its first host. Agents that were started again do not count.
  """
  alive = {host.incarnation for host in present}

  def lead(hosts: Sequence[Host]) -> int:
    """Returns how many more of `hosts` are present than absent."""
    return sum(1 if host.incarnation in alive else -1 for host in hosts)

  return (lead(generation.hosts), lead(generation.spares), lead(generation.hosts[:1])) > (0, 0, 0)


def stop_code(number: int) -> int:
  """Returns the exit code of a run that signal `number` stopped before it had something to save."""
  return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_PREEMPTED


def how_ended(code: int) -> str:
  """Returns 'exit code 7' or 'SIGKILL'."""
  if code >= 0:
    return f'exit code {code}'
  try:
    return signal.Signals(-code).name
  except ValueError:  # most real-time signals have no name
    return f'signal {-code}'


@dataclasses.dataclass
class _Follower:
  """An agent in the eyes of its leader."""

  link: int
  hello: Hello
  is_running: bool = False

  @property
  def host(self) -> Host:
    return self.hello.host


class Member:
  """The knowledge of one agent, which decides its next actions.

  Every method takes an event and returns actions. `now` is in seconds of any one clock.

  Args:
    me: this agent.
    host_count: hosts that the run is started on.
    spares: how many of these hosts only take the place of others.
    restarts: how many restarts are allowed.
    processes_per_host: the same on all hosts.
    facts, machine: see `Hello`.
    start_seconds: how long all hosts may take to come.
    num_listed: all agents know where hosts 0 to `num_listed` - 1 listen; a new agent asks these.
  """

  def __init__(
    self,
    me: Host,
    *,
    host_count: int,
    spares: int = 0,
    restarts: int,
    processes_per_host: int,
    facts: Mapping[str, str],
    machine: str,
    start_seconds: float,
    num_listed: int = 1,
  ):
    self.me, self._num_listed = me, num_listed
    self._host_count, self._allowed, self._per_host = host_count, restarts, processes_per_host
    self._most = host_count - spares
    self._facts, self._machine, self._start_seconds = facts, machine, start_seconds
    self.started: Optional[Generation] = None
    self._started_at = 0.0
    self._accepted: list[Generation] = []
    self._report: Optional[HostReport] = None
    self._is_running = False
    self._asked = 0
    self._since = 0.0  # when this agent last began to wait for others
    # As a follower, or on the way to a leader:
    self._leader: Optional[int] = None  # link; None for a leader
    self._leader_index = 0
    self._is_welcome = False
    self._redirect: Optional[Redirect] = None  # the last one that this agent followed
    self._trying: Optional[int] = None  # host that it tries to reach
    self._candidates: list[int] = []
    self._seen: dict[int, Host] = {}  # every host of a generation that this agent was in
    # Agents that take this one for their leader, and those whose predecessor has not been missed
    # yet, by link, and until when they may wait:
    self._waiting: dict[int, tuple[Hello, float]] = {}
    # As a leader:
    self._leads = False
    self._followers: dict[int, _Follower] = {}  # by host
    self._first: Optional[tuple[Host, Optional[HostReport]]] = None  # failure; None: a lost host
    self._stopped_until: Optional[float] = None
    self._is_ending = False
    self._is_pausing = False
    self._is_leaving = False  # asked to stop while others train: it leaves once they have saved
    self._grow_at = 0.0
    self._find_at = 0.0
    self._joining: Sequence[Host] = ()  # the hosts for which it has paused the generation
    self._away: set[str] = set()  # incarnations of hosts that this leader lost since the start
    self._proposal: Optional[Generation] = None
    self._proposed_at = 0.0
    self._offers: dict[int, str] = {}
    self._probe_at = 0.0
    self._remind_at = 0.0
    self._unfit: dict[str, Unfit] = {}  # by incarnation, of hosts that have left for good
    self._is_stranded = False  # without the share of the hosts that a leader needs
    self._is_over = False

  # Events.

  def start(self, now: float) -> list[Action]:
    """This agent has started."""
    self._since = now
    return self._lead(now) if self.me.index == 0 else self._seek(now)

  def linked(self, index: int, link: int, now: float) -> list[Action]:
    """A link to the agent of host `index` is open."""
    if self._leads:  # a lower host is back
      if self.started is not None and not self._is_idle():
        return [Send(link, Redirect(self.me.index, self.me.address)), Drop(link)]
      if self._proposal is not None or index >= self.me.index:
        return [Drop(link)]
      actions: list[Action] = [Drop(follower.link) for follower in self._followers.values()]
      self._leads, self._followers = False, {}
      self._leader, self._leader_index, self._is_welcome = link, index, False
      return [*actions, Send(link, self._hello())]
    if self._leader is not None or self._is_running:
      return [Drop(link)]
    self._leader, self._leader_index, self._is_welcome = link, index, False
    self._trying = None
    return [Send(link, self._hello())]

  def unreachable(self, index: int, now: float) -> list[Action]:
    """No link to host `index` could be opened."""
    if self._leads or self._trying != index:
      return []
    self._trying = None
    return self._try_next(now)

  def link_closed(self, link: int, now: float, *, silent_seconds: float = 0.0) -> list[Action]:
    """A link was closed by its other end, or has been silent for too long."""
    self._waiting.pop(link, None)
    if link == self._leader:
      self._leader = None
      if self._is_welcome and self.started is not None:
        self._since = now - silent_seconds
      if self._is_running:
        text = f'host {self._leader_index}, which leads, is lost; ending the processes.'
        return [Log(text), EndProcesses(0)]
      return self._seek(now)
    follower = next((f for f in self._followers.values() if f.link == link), None)
    return [] if follower is None else self._lose(follower, now, silent_seconds)

  def offered(self, number: int, service: str, now: float) -> list[Action]:
    """A free address for process 0 of generation `number`, if that is on this host."""
    if self._leads:
      return self._take_offer(self.me.index, number, service, now)
    if self._leader is not None and self._accepted and self._accepted[-1].number == number:
      return [Send(self._leader, Accepted(number, service))]
    return []

  def unfit(self, reason: str, now: float) -> list[Action]:
    """This host cannot take part in another generation."""
    links = [follower.link for follower in self._followers.values()] if self._leads else []
    if self._leader is not None:
      links.append(self._leader)
    leaves = 'leaves' if self.started else 'cannot take part in'
    return [
      *(Send(link, Unfit(reason, self._report)) for link in links),
      Exit(1, Problem(f'{_capital(str(self.me))} {leaves} the run: {reason}.', _REPAIR)),
    ]

  def processes_ended(self, report: HostReport, now: float) -> list[Action]:
    """All processes of this host have ended."""
    self._is_running, self._report = False, report
    self._asked = self._asked or report.asked
    if self._is_over:
      return []
    if self._leads:
      return self._reported(self.me, report, now)
    if self._leader is not None:
      return [Send(self._leader, report)]
    return self._seek(now)

  def asked(self, number: int, now: float) -> list[Action]:
    """A signal asked to stop the run; the processes have it as well."""
    self._asked = self._asked or number
    if self._leads and self.started is not None and not self._is_running and not self._is_idle():
      self._is_leaving = True  # a spare
      text = f'{self.me} was asked to stop: the run is saved, to continue without it.'
      return self._pause(text) if self._can_pause() else []
    if self._leads:
      return self._decide(now)
    if self._leader is not None and self._is_welcome:
      return [Send(self._leader, Asked(number))]
    if self._is_running:
      return []
    return [Exit(stop_code(number))]

  def tick(self, now: float) -> list[Action]:
    """Time has passed."""
    actions = self._refuse_waiting(now)
    if not self._leads:
      return actions
    if self._stopped_until is not None and now >= self._stopped_until and not self._is_ending:
      actions += self._end(0, now)
    if self._is_ending and now >= self._since + ENDING_SECONDS:
      if self._is_running:
        return self.unfit(f'it could not end its processes within {ENDING_SECONDS} s', now)
      for follower in [f for f in self._followers.values() if f.is_running]:
        actions += [
          Log(f'{follower.host} could not end its processes within {ENDING_SECONDS} s.'),
          Drop(follower.link),
          *self._lose(follower, now),
        ]
    if self._proposal is not None and now >= self._proposed_at + OFFER_SECONDS:
      actions += self._leave_out(self._proposal, now)
    return actions + self._grow(now) + self._decide(now)

  def _leave_out(self, generation: Generation, now: float) -> list[Action]:
    """Continues without the hosts that beat but do not answer a proposal."""
    reason = f'it has not looked at its GPUs within {OFFER_SECONDS} s'
    if self.me.index not in self._offers:
      return self.unfit(reason, now)
    silent = [
      follower
      for index, follower in self._followers.items()
      if follower.host in generation.members and index not in self._offers
    ]
    actions: list[Action] = []
    for follower in silent:
      self._unfit[follower.host.incarnation] = Unfit(reason, follower.hello.report)
      text = f'{follower.host} leaves the run: {reason}.'
      refused = Refusal(_capital(text), _REPAIR)
      actions += [Log(text), Send(follower.link, refused), Drop(follower.link)]
      actions += self._lose(follower, now)
    return actions

  def received(self, link: int, message: Message, now: float) -> list[Action]:
    """A message has come. Messages that do not fit the state are late, and ignored."""
    if isinstance(message, Hello):
      return self._greet(link, message, now)
    if isinstance(message, Redirect):
      return self._follow(link, message)
    if link == self._leader:
      return self._from_leader(link, message, now)
    follower = next((f for f in self._followers.values() if f.link == link), None)
    if not self._leads or follower is None:
      return []
    if isinstance(message, Accepted):
      return self._take_offer(follower.host.index, message.number, message.service, now)
    if isinstance(message, HostReport):
      follower.is_running = False
      follower.hello = dataclasses.replace(follower.hello, report=message)
      return self._reported(follower.host, message, now)
    if isinstance(message, Asked):
      follower.hello = dataclasses.replace(follower.hello, asked=message.signal)
      return self._decide(now) if self._is_idle() else self._let_spares_leave(now)
    if isinstance(message, Unfit):
      self._unfit[follower.host.incarnation] = message
      text = f'{follower.host} leaves the run: {message.reason}.'
      return [Log(text), Drop(link), *self._lose(follower, now)]
    return []

  # A follower.

  def _hello(self) -> Hello:
    return Hello(
      self.me,
      self._facts,
      self._machine,
      self.started,
      tuple(self._accepted),
      self._report,
      self._asked,
    )

  def _known(self) -> dict[int, Host]:
    generations = [self.started, *self._accepted]
    return {host.index: host for each in generations if each for host in each.members}

  def _seek(self, now: float) -> list[Action]:
    """Looks for the lowest host that can be reached."""
    if self._asked:
      return [Exit(stop_code(self._asked))]
    self._candidates = self._to_ask()
    return self._try_next(now)

  def _to_ask(self) -> list[int]:
    """Returns the hosts that may lead, or know who does."""
    if self.started is None and not self._accepted:
      return [index for index in range(self._num_listed) if index != self.me.index]
    return [index for index in sorted({0, *self._known()}) if index < self.me.index]

  def _try_next(self, now: float) -> list[Action]:
    if self._candidates:
      return self._connect(self._candidates.pop(0))
    if self.started is not None or self.me.index == 0:
      return self._lead(now)
    if now - self._since < self._start_seconds:
      self._candidates = self._to_ask()
      return self._try_next(now)
    return [
      Exit(
        1,
        Problem(
          f'{_capital(str(self.me))} could not reach host 0 within {self._start_seconds:.0f} s.',
          'Look at the first lines of launch on host 0: it did not start, or listens elsewhere. '
          'All hosts need the same --coordinator_address, a name or address of host 0.',
        ),
      )
    ]

  def _connect(self, index: int) -> list[Action]:
    self._trying = index
    known = self._known().get(index)
    return [Connect(index, known.address if known and index else None)]

  def _follow(self, link: int, message: Redirect) -> list[Action]:
    """Looks for the agent that leads, unless this agent takes part in a run already."""
    # One that agreed to a first start and missed it gets no other answer from the agent it asked.
    is_new = self.started is None and (not self._accepted or link == self._leader)
    is_alone = self._leads and self._is_stranded and self._is_idle()
    if not (is_new or is_alone) or self._proposal is not None:
      return []
    if self._is_welcome and self._leader is not None:
      return []
    actions: list[Action] = [Drop(follower.link) for follower in self._followers.values()]
    if link == self._leader:
      actions.append(Drop(link))
    self._leads, self._followers, self._leader = False, {}, None
    self._trying, self._redirect = message.index, message
    return [*actions, Connect(message.index, message.address)]

  def _to_leader(self) -> Optional[Redirect]:
    """Returns where this agent's leader listens; None if it has none, or does not know."""
    if self._leader is None or not self._is_welcome:
      return None
    if self._redirect is not None and self._redirect.index == self._leader_index:
      return self._redirect
    leader = self._known().get(self._leader_index)
    return leader and Redirect(leader.index, leader.address)

  def _from_leader(self, link: int, message: Message, now: float) -> list[Action]:
    match message:
      case Welcome():
        self._is_welcome = True
      case Refusal(reason, fix, is_final):
        if is_final:
          return [Exit(1, Problem(reason, fix))]
        self._leader = None
        return [Drop(link), *self._try_next(now)]
      case Propose(generation):
        last = max((g.number for g in (self.started, *self._accepted) if g), default=0)
        if not self._is_running and generation.number > last and self.me in generation.members:
          self._accepted.append(generation)
          return [Offer(generation.number)]
      case Start(number, service):
        if self._accepted and self._accepted[-1].number == number:
          return self._start(self._accepted[-1], service, now)
      case Pause(number):
        if self._is_running and self.started.number == number:
          return [PauseProcesses()]
      case End(number, seconds):
        if self._is_running and self.started.number == number:
          return [EndProcesses(seconds)]
      case Unfit(reason):
        if leader := self._known().get(self._leader_index):
          self._unfit[leader.incarnation] = message
        return [Log(f'host {self._leader_index}, which leads, leaves the run: {reason}.')]
      case Finish(code, reason, fix):
        self._is_over = True
        return [Exit(code, Problem(reason, fix) if reason else None)]
    return []

  def _start(self, generation: Generation, service: str, now: float) -> list[Action]:
    self.started, self._accepted, self._report = generation, [], None
    self._started_at = now
    self._seen.update((host.index, host) for host in generation.members)
    if self.me not in generation.hosts:
      if bad := _why_bad(self.me, generation.blamed):
        reason = f'it {bad}'
      elif len(generation.hosts) == self._most:
        reason = 'the run has all the hosts that it needs'
      else:
        reason = 'the mesh does not fit one host more'
      return [Log(f'{self.me} waits as a spare: {reason}.')]
    self._is_running = True
    return [StartProcesses(generation, service)]

  def _refuse_waiting(self, now: float) -> list[Action]:
    """Turns away agents that have waited for too long.

    The leader of this agent is alive, but not for them; or their predecessor lives.
    """
    actions: list[Action] = []
    for link, (hello, until) in list(self._waiting.items()):
      if now >= until:
        del self._waiting[link]
        refused = self._refusal(hello) or Refusal('another host leads', is_final=False)
        actions += self._refuse(link, hello, refused)
    return actions

  def _refuse(self, link: int, hello: Hello, refused: Refusal) -> list[Action]:
    logs = [Log(f'refused {hello.host}: {refused.reason}')] if refused.is_final else []
    return [*logs, Send(link, refused)]

  # A leader.

  def _lead(self, now: float) -> list[Action]:
    self._leads, self._probe_at, self._remind_at = True, now + PROBE_SECONDS, now + REMIND_SECONDS
    self._first, self._stopped_until, self._away = None, None, set()
    self._is_ending, self._is_pausing, self._joining = False, False, ()
    self._proposal, self._offers = None, {}
    actions: list[Action] = []
    waiting, self._waiting = self._waiting, {}
    for link, (hello, _) in waiting.items():
      actions += self._greet(link, hello, now)
    return actions + self._decide(now)

  def _greet(self, link: int, hello: Hello, now: float) -> list[Action]:
    before = self._followers.get(hello.host.index)
    if before is not None and _replaces(hello.host, before.host):
      self._waiting[link] = (hello, now + PREDECESSOR_SECONDS)
      return []
    refused = self._refusal(hello)
    if refused is not None:
      return self._refuse(link, hello, refused)
    if not self._leads:
      redirect = self._to_leader()
      if redirect is not None and hello.started is None:
        return [Send(link, redirect)]
      self._waiting[link] = (hello, now + GRACE_SECONDS)
      return []
    actions: list[Action] = []
    if before is not None:  # the same agent, over a new connection
      actions += [Drop(before.link), *self._lose(before, now)]
    self._followers[hello.host.index] = _Follower(link, hello)
    return [*actions, Send(link, Welcome()), *self._decide(now)]

  def _refusal(self, hello: Hello) -> Optional[Refusal]:
    """Returns why an agent cannot take part in this run; None if it can."""
    who = hello.host
    for name in sorted(self._facts.keys() | hello.facts.keys()):
      ours, theirs = self._facts.get(name, 'nothing'), hello.facts.get(name, 'nothing')
      if ours != theirs:
        return Refusal(
          f'{_capital(str(who))} has {name} = {theirs}, but {self.me} has {ours}.', SAME_COMMAND
        )
    if not 0 <= who.index < self._host_count or who.index == self.me.index:
      return Refusal(
        f'Two agents are {who.index} of {self._host_count} hosts: on {self.me.name} and on '
        f'{who.name}.',
        'Give each host its own --host_index, and start launch once on each.',
      )
    others = [(self.me, self._machine)]
    others += [(f.host, f.hello.machine) for f in self._followers.values()]
    for host, machine in others:
      if host.index == who.index and host.incarnation != who.incarnation:
        return Refusal(
          f'Two agents are host {who.index}: on {host.name} and on {who.name}.',
          'Give each host its own --host_index, and start launch once on each.',
        )
      if machine == hello.machine and host.index != who.index:
        return Refusal(
          f'Hosts {host.index} and {who.index} are the same machine, {who.name}.',
          'Start launch once per host; --nproc is the number of processes that it starts there. '
          'In Slurm: --ntasks-per-node=1.',
        )
    return None

  def _lose(self, follower: _Follower, now: float, silent_seconds: float = 0.0) -> list[Action]:
    """The agent of a host is gone."""
    index = follower.host.index
    if self._followers.get(index) is follower:
      del self._followers[index]
    if self._proposal is not None and follower.host in self._proposal.members:
      self._proposal, self._offers = None, {}
    actions: list[Action] = []
    if follower.is_running:
      actions.append(Log(f'{follower.host} is lost.'))
      self._away.add(follower.host.incarnation)
      if self._first is None or (self._first[1] and self._first[1].code in SHARED_CODES):
        self._first = (follower.host, None)
      actions += self._end(0, now, since=now - silent_seconds)
    for link, (hello, _) in list(self._waiting.items()):
      if hello.host.index == index:  # its successor
        del self._waiting[link]
        actions += self._greet(link, hello, now)
    return actions + self._decide(now)

  def _reported(self, host: Host, report: HostReport, now: float) -> list[Action]:
    """The processes of `host` have ended."""
    if self.started is None or report.number != self.started.number:
      return self._decide(now)
    if report.is_failure and (self._first is None):
      self._first = (host, report)
      return self._end(0 if report.code < 0 else REPORT_SECONDS, now)
    if report.code and not report.is_failure and self._stopped_until is None:
      self._stopped_until = now + STOPPED_SECONDS
    return self._decide(now)

  def _end(self, seconds: float, now: float, since: Optional[float] = None) -> list[Action]:
    """Ends the generation on all hosts, which failed at `since` (default: now)."""
    actions: list[Action] = []
    if not self._is_ending:
      self._is_ending, self._since = True, now if since is None else since
    actions += [
      Send(follower.link, End(self.started.number, seconds))
      for follower in self._followers.values()
      if follower.is_running
    ]
    if self._is_running:
      actions.append(EndProcesses(seconds))
    return actions or self._decide(now)

  def _present(self) -> list[Host]:
    hosts = [self.me, *(follower.host for follower in self._followers.values())]
    return sorted(hosts, key=lambda host: host.index)

  def _hellos(self) -> list[Hello]:
    return [self._hello(), *(follower.hello for follower in self._followers.values())]

  def _grow(self, now: float) -> list[Action]:
    """Pauses the generation if the mesh fits more hosts now, and tells host 0, if it is back."""
    generation = self.started
    if generation is None or not self._can_pause() or any(h.asked for h in self._hellos()):
      return []
    actions: list[Action] = []
    present = self._present()
    if now >= self._find_at:
      self._find_at = now + FIND_SECONDS
      actions += self._find_lower()
    if now < self._grow_at or len(present) <= len(generation.hosts):
      return actions
    blamed = self._blamed(generation, now)
    hosts, _ = self._chosen(present, generation.host_counts, blamed)
    if len(hosts) <= len(generation.hosts):
      return actions
    self._joining = _new(hosts, generation)
    more = _names(self._joining)
    return [*actions, *self._pause(f'the run is saved, to continue with {more}.')]

  def _can_pause(self) -> bool:
    """Returns whether processes run that do not end already."""
    is_ending = self._is_pausing or self._is_ending or self._stopped_until is not None
    return not (self._is_idle() or self._is_over or is_ending)

  def _pause(self, text: str) -> list[Action]:
    """Asks all processes to save and end."""
    self._is_pausing = True
    actions: list[Action] = [Log(text)]
    actions += [
      Send(follower.link, Pause(self.started.number))
      for follower in self._followers.values()
      if follower.is_running
    ]
    return [*actions, PauseProcesses()] if self._is_running else actions

  def _let_spares_leave(self, now: float) -> list[Action]:
    """Lets the spares leave that were asked to stop, perhaps while this start was proposed."""
    leaving = [f for f in self._followers.values() if f.hello.asked and not f.is_running]
    for follower in leaving:
      del self._followers[follower.host.index]
    own = self.asked(self._asked, now) if self._asked and not self._is_running else []
    return [*(Send(f.link, Finish(stop_code(f.hello.asked))) for f in leaving), *own]

  def _is_idle(self) -> bool:
    return not self._is_running and not any(f.is_running for f in self._followers.values())

  def _decide(self, now: float) -> list[Action]:
    """Proposes the next generation, or ends the run, once it is time."""
    if self._is_over or self._proposal is not None or not self._leads:
      return []
    if not self._is_idle():
      return []
    hellos = self._hellos()
    asking = [hello for hello in hellos if hello.host != self.me or not self._is_leaving]
    asked = next((hello.asked for hello in asking if hello.asked), 0)
    last = max((h.started for h in hellos if h.started), key=lambda g: g.number, default=None)
    if last is None:
      return self._decide_first(now, asked)
    known = {hello.host.incarnation: hello.report for hello in hellos}
    unfit = {h: left for h in last.hosts if (left := self._unfit.get(h.incarnation))}
    known |= {host.incarnation: left.report for host, left in unfit.items()}
    reports = {
      host.index: report
      for host in last.hosts
      if (report := known.get(host.incarnation)) and report.number == last.number
    }
    ended, blamed, interruption = self._cause(last, reports, asked)
    left = [f'{host} left the run: {each.reason}' for host, each in unfit.items()]
    errors = '; '.join(filter(None, (interruption.error, *left)))
    interruption = dataclasses.replace(interruption, error=errors)
    present = self._present()
    before = self._blamed(last, now)
    if ended.paused:
      blamed += tuple(Blame(host.name, 0) for host in self._joining if host not in present)
    blamed = before + blamed
    # Processes know the numbers up to their own number of hosts, earlier generations larger ones.
    reported = next((r.host_counts for r in reports.values() if r.host_counts), ())
    counts = sorted({*last.host_counts, *reported})
    here = {host.index for host in present}
    missing = [h for h in last.hosts if h.index not in here and h.incarnation not in self._unfit]
    waited = not missing or now >= self._since + GRACE_SECONDS
    restarts, then = last.restarts.after(ended)
    untried = _untried(last, ended.step)
    if isinstance(then, Stop) and then.reason:
      suspects, reason = self._suspects(last, ended, untried)
      without = before + tuple(Blame(host.name, 0, reason) for host in suspects)
      elsewhere = last.restarts.after(ended, leaves_out_hosts=True)
      if self._fits_without(suspects, present, counts, without):
        blamed = without
        restarts, then = elsewhere
      elif not waited and not isinstance(elsewhere[1], Stop):
        # A host that was lost at the same time may come back, and take the place of a suspect.
        back = sorted([*present, *missing], key=lambda host: host.index)
        if self._fits_without(suspects, back, counts, without):
          return self._wait_for(missing, now)
    if isinstance(then, Stop):
      code = stop_code(asked) if asked and ended.code == LOST_CODE else ended.code
      # On hosts whose processes did not fail, nothing else names the host and the process.
      reason = then.reason and f'{then.reason}; {interruption.cause}'
      return self._finish(code, reason)
    if self._is_leaving:
      return [Exit(stop_code(self._asked))]
    may_have_started = [
      generation
      for hello in hellos
      for generation in hello.accepted
      if generation.number > last.number
    ]
    former = (last, *may_have_started)
    is_safe = all(has_share(present, each) for each in former) or self._all_are_there(former)
    self._is_stranded = not is_safe
    hosts, spares = self._chosen(present, counts, blamed)
    if is_safe and hosts and (waited or len(hosts) >= len(last.hosts)):
      if ended.paused:
        names = _names(_new(hosts, last))
        cause = f'{names} joins' if names else 'the run was saved for a change of its hosts'
        interruption = dataclasses.replace(interruption, cause=cause)
      past = (*last.interruptions, interruption)[-interruptions.MOST :]
      new = tuple(h.index for h in hosts if h in untried or h not in last.hosts)
      made = Generation('', 0, hosts, spares, restarts, tuple(counts), past, blamed, new)
      return [
        *(
          Log(f'{host} {bad}; the run continues without it.')
          for host in spares
          if host in last.hosts and (bad := _why_bad(host, blamed))
        ),
        *self._propose(made, now),
      ]
    if now >= self._since + HOLD_SECONDS:
      return self._finish(1, *_give_up(last, present, counts, is_safe, str(interruption)))
    return self._wait_for(missing, now)

  def _wait_for(self, missing: Sequence[Host], now: float) -> list[Action]:
    """Waits for hosts of the last generation, and looks for a lower host, which would lead."""
    actions = self._remind(missing, now)
    if now >= self._probe_at:
      self._probe_at = now + PROBE_SECONDS
      actions += self._find_lower()
    return actions

  def _find_lower(self) -> list[Action]:
    """Connects to lower hosts that are not here: they may be back."""
    here = {host.index for host in self._present()}
    lower = sorted(i for i in {0, *self._seen} - here if i < self.me.index)
    return [Connect(i, self._seen[i].address if i else None) for i in lower]

  def _all_are_there(self, generations: Iterable[Generation]) -> bool:
    """Returns whether all hosts of the run are present, on the machines of these generations."""
    names = {host.index: host.name for host in self._present()}
    known = [host for each in generations for host in each.members]
    return len(names) == self._host_count and all(names[h.index] == h.name for h in known)

  def _decide_first(self, now: float, asked: int) -> list[Action]:
    """Proposes the first generation once all hosts have come."""
    present = self._present()
    if asked:
      return self._finish(stop_code(asked), '')
    late = len(present) >= self._most and now >= self._since + SPARE_SECONDS
    if len(present) == self._host_count or late:
      hosts, spares = tuple(present[: self._most]), tuple(present[self._most :])
      first = Generation('', 0, hosts, spares, Restarts(self._allowed), (self._most,))
      return [*_of_one_host(first), *self._propose(first, now)]
    missing = sorted(set(range(self._host_count)) - {host.index for host in present})
    if now < self._since + self._start_seconds:
      return self._remind([f'host {index}' for index in missing], now)
    return self._finish(
      1,
      f'Only {len(present)} of {self._host_count} hosts came within {self._start_seconds:.0f} s. '
      f'Missing: host {number_ranges(missing, separator=", ")}.',
      'Start the same command on these hosts, each with its own --host_index and the same '
      '--coordinator_address.',
    )

  def _remind(self, missing: Sequence[Union[Host, str]], now: float) -> list[Action]:
    if now < self._remind_at or not missing:
      return []
    self._remind_at = now + REMIND_SECONDS
    return [Log(f'waiting for {", ".join(listed(list(map(str, missing)), 8))}.')]

  def _cause(
    self, last: Generation, reports: Mapping[int, HostReport], asked: int
  ) -> tuple[Ended, tuple[Blame, ...], Interruption]:
    """Returns how the last generation ended, which hosts caused it, and this for the record."""
    steps = [report.step for report in reports.values() if report.step is not None]
    step = max(steps, default=None)
    ended_at = min((report.ended_at for report in reports.values()), default=0.0)
    at = [r.stepped_at for r in reports.values() if r.step == step and r.stepped_at is not None]
    pause = 'the run was saved, to continue on more hosts'
    known = Interruption(
      last.number, interruptions.JOINED, pause, step, ended_at, max(at, default=None)
    )
    here = {host.incarnation for host in self._present()}  # some may have missed the start
    lost = [h for h in last.hosts if h.index not in reports and h.incarnation not in here]
    failed = {h.index: r for h in last.hosts if (r := reports.get(h.index)) and r.is_failure}
    first = self._first if self.started == last else None  # it may have missed the last one
    failed_before = ''
    if first is not None and first[0] in lost:
      if first[1] is not None:
        failed_before = self._failure_of(last, *first)
      first = (first[0], None)
    if first is None or (first[1] is not None and first[1].code in SHARED_CODES):
      own = [i for i, r in failed.items() if r.code not in SHARED_CODES]
      index = next(iter(own), None)
      if index is not None:
        first = (last.hosts[last.position(index)], failed[index])
      elif lost:
        first = (lost[0], None)
      elif first is None and failed:
        index = next(iter(failed))
        first = (last.hosts[last.position(index)], failed[index])
    is_asked = bool(asked) or any(report.asked for report in reports.values())
    if first is None:
      codes = [report.code for report in reports.values()]
      stopped = next(filter(None, codes), 0)
      if stopped or None not in codes:  # done, stopped or paused
        paused = stopped == EXIT_PREEMPTED and any(r.paused for r in reports.values())
        return Ended(stopped, step=step, asked=is_asked, paused=paused), (), known
      text = 'the hosts lost contact with their leader'
      cut = dataclasses.replace(known, kind=interruptions.CUT_NETWORK, cause=text)
      return Ended(LOST_CODE, step=step, asked=is_asked, is_lost=True), (), cut
    host, report = first
    if report is None:
      lost = lost or [self.me if self._was_away(last) else host]
      blamed = tuple(Blame(each.name, 0) for each in lost)
      text = f'{_names(lost)} {"was" if len(lost) == 1 else "were"} lost'
      gone = dataclasses.replace(
        known, kind=interruptions.LOST_HOST, cause=text, error=failed_before
      )
      return Ended(LOST_CODE, step=step, asked=is_asked, is_lost=True), blamed, gone
    failed = dataclasses.replace(
      known,
      kind=interruptions.kind_of(report.code),
      cause=self._failure_of(last, host, report),
      at=report.ended_at,
      error=report.error,
    )
    ended = Ended(report.code, self._stable(host, report.failed), step, is_asked)
    return ended, (Blame(host.name, 0),) if ended.culprits else (), failed

  def _failure_of(self, generation: Generation, host: Host, report: HostReport) -> str:
    """Returns 'process 6 on host 3 (gpu-3) failed (SIGBUS)'."""
    rank = generation.position(host.index) * self._per_host + min(report.failed, default=0)
    return f'process {rank} on {host} failed ({how_ended(report.code)})'

  def _was_away(self, generation: Generation) -> bool:
    """Returns whether this leader, not the others, was away: it lost most of them; all are back."""
    others = [host for host in generation.hosts if host != self.me]
    return 2 * sum(host.incarnation in self._away for host in others) > len(others) > 1

  def _suspects(
    self, last: Generation, ended: Ended, untried: Sequence[Host]
  ) -> tuple[Sequence[Host], str]:
    """Returns the hosts that may be the reason of a failure that ends the run, and what they did.

    This is the only host that caused both `ended` and the failure that it repeats; else the hosts
    that are new: the run has trained without them.
    """
    indices = {process // self._per_host for process in last.restarts.suspects(ended)}
    position = last.position(min(indices)) if len(indices) == 1 else None
    if position is not None:
      return [last.hosts[position]], 'failed twice in a row at the same step'
    return untried, 'joined, and the run failed before it got any further'

  def _stable(self, host: Host, local: Iterable[int]) -> frozenset[int]:
    """Returns numbers of processes that do not change with the hosts, as ranks do."""
    return frozenset(host.index * self._per_host + index for index in local)

  def _blamed(self, generation: Generation, now: float) -> tuple[Blame, ...]:
    """Returns the failures before `generation` that still count."""
    since = now - self._started_at if self.started == generation else 0.0
    ages = (dataclasses.replace(each, seconds=each.seconds + since) for each in generation.blamed)
    return tuple(each for each in ages if each.seconds < BAD_HOST_SECONDS)

  def _chosen(
    self, present: Sequence[Host], counts: Collection[int], blamed: Sequence[Blame]
  ) -> tuple[tuple[Host, ...], tuple[Host, ...]]:
    """Returns hosts with processes and spares; no hosts if the mesh fits none of `counts`.

    Bad hosts are spares, unless the mesh does not fit the others alone.
    """
    bad = [host for host in present if _why_bad(host, blamed)]
    good = [host for host in present if not _why_bad(host, blamed)]
    for most in (len(good), len(present)):
      if count := max((n for n in counts if n <= min(most, self._most)), default=0):
        chosen = frozenset((good + bad)[:count])
        hosts = tuple(host for host in present if host in chosen)
        return hosts, tuple(host for host in present if host not in chosen)
    return (), tuple(present)

  def _fits_without(
    self,
    suspects: Sequence[Host],
    present: Sequence[Host],
    counts: Collection[int],
    blamed: Sequence[Blame],
  ) -> bool:
    """Returns whether `_chosen` finds hosts, none of them one of the `suspects`."""
    hosts, _ = self._chosen(present, counts, blamed)
    return bool(suspects and hosts) and not {h.index for h in hosts} & {h.index for h in suspects}

  def _propose(self, made: Generation, now: float) -> list[Action]:
    """Proposes a generation; its run and number follow from what the agents know."""
    known = [g for hello in self._hellos() for g in (hello.started, *hello.accepted) if g]
    run = known[0].run if known else self.me.incarnation
    number = 1 + max((generation.number for generation in known), default=0)
    generation = dataclasses.replace(made, run=run, number=number)
    self._proposal, self._offers, self._proposed_at = generation, {}, now
    self._accepted.append(generation)
    return [
      Offer(number),
      *(Send(follower.link, Propose(generation)) for follower in self._followers.values()),
    ]

  def _take_offer(self, index: int, number: int, service: str, now: float) -> list[Action]:
    generation = self._proposal
    if generation is None or generation.number != number:
      return []
    self._offers[index] = service
    if self._offers.keys() != {host.index for host in generation.members}:
      return []
    address = self._offers[generation.hosts[0].index]
    self._proposal, self._offers = None, {}
    self._first, self._stopped_until, self._away = None, None, set()
    self._is_ending, self._is_pausing, self._joining = False, False, ()
    self._grow_at, self._find_at = now + GROW_SECONDS, now + FIND_SECONDS
    for follower in self._followers.values():
      follower.is_running = follower.host in generation.hosts
      follower.hello = dataclasses.replace(
        follower.hello, started=generation, accepted=(), report=None
      )
    return [
      *(Send(f.link, Start(number, address)) for f in self._followers.values()),
      *self._start(generation, address, now),
      *self._let_spares_leave(now),
    ]

  def _finish(self, code: int, reason: str, fix: str = '') -> list[Action]:
    self._is_over = True
    code = code if code >= 0 else 128 - code  # as shells show it
    return [
      *(Send(f.link, Finish(code, reason, fix)) for f in self._followers.values()),
      Exit(code, Problem(reason, fix) if reason else None),
    ]


def _new(hosts: Sequence[Host], last: Generation) -> list[Host]:
  """Returns the hosts that had no processes in `last`."""
  return [host for host in hosts if host not in last.hosts]


def _untried(last: Generation, step: Optional[int]) -> list[Host]:
  """Returns the hosts with which the run has not come further than without them.

  Args:
    last: a generation that has ended.
    step: the last step that it has finished; None before the first one.
  """
  before = max((i.step for i in last.interruptions if i.step is not None), default=-1)
  is_further = step is not None and step > before + STEPS_IN_FLIGHT
  return [] if is_further else [host for host in last.hosts if host.index in last.untried]


def _of_one_host(generation: Generation) -> list[Action]:
  """Returns a warning if the spares cannot take the place of a lost host."""
  if len(generation.hosts) > 1 or not generation.spares:
    return []
  text = 'they cannot know whether it still trains. Two hosts and a spare survive the loss of one'
  return [Log(f'if {generation.hosts[0]} is lost, the spares wait for it: {text}.')]


def _why_bad(host: Host, blamed: Sequence[Blame]) -> str:
  """Returns what the machine of this agent did that keeps it out of generations; '' if nothing."""
  own = [each for each in blamed if each.host == host.name]
  if reason := next((each.reason for each in own if each.reason), ''):
    return reason
  if len(own) >= BAD_HOST_FAILURES:
    return f'caused {BAD_HOST_FAILURES} failures within a day'
  return ''


def _give_up(
  last: Generation, present: Sequence[Host], counts: Collection[int], is_safe: bool, cause: str
) -> tuple[str, str]:
  """Returns why the run ends on these hosts, and what to do."""
  here = {host.index for host in present}
  lost = _names([host for host in last.hosts if host.index not in here])
  if not is_safe:
    left = [host for host in last.hosts if host in present]
    again = [h for h in present if h not in last.hosts and last.position(h.index) is not None]
    return (
      f'Of {len(last.hosts)} hosts, {_names(left) or "none"} can continue here: the others may '
      f'continue without {"it" if len(left) == 1 else "them"}.'
      + (f' Not reached: {lost}.' if lost else '')
      + (f' Started again, so they do not count: {_names(again)}.' if again else ''),
      'Look at the network between the hosts, and at the log of the others. If nothing runs any '
      'more, start the same command again.',
    )
  return (
    f'{_capital(cause)}, and {len(present)} hosts are left. The mesh fits '
    f'{number_ranges(sorted(counts), separator=", ")} hosts; waited {HOLD_SECONDS} s for {lost}.',
    'Start the same command on the missing hosts again, or on other hosts.',
  )


def _replaces(new: Host, old: Host) -> bool:
  """Returns whether an agent may have been started after another one on the same machine."""
  return new.name == old.name and new.incarnation != old.incarnation


def _names(hosts: Sequence[Host]) -> str:
  return ', '.join(listed(list(map(str, hosts)), 8))


def _capital(text: str) -> str:
  return text[0].upper() + text[1:]


_MESSAGES = {kind.__name__: kind for kind in typing.get_args(Message)}


def message_to_json(message: Message) -> JsonObject:
  """Returns a message as a value for JSON."""
  return {'kind': type(message).__name__, **to_json(message)}


def message_from_json(values: Json) -> Message:
  """Returns the message of `message_to_json`; raises ValueError, KeyError, ... for other values."""
  fields = dict(values)
  return from_json(_MESSAGES[fields.pop('kind')], fields)
