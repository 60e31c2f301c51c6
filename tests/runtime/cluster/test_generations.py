"""Agents of a simulated network agree on generations when hosts are lost, cut off or restarted."""

import collections
import json
import random
from collections.abc import Sequence
from typing import Optional

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from t5x_gpu.runtime.cluster import generations as g
from t5x_gpu.runtime.cluster import interruptions
from t5x_gpu.runtime.cluster.links import SILENT_SECONDS

KILLED = -9
FACTS = {'--nproc': '2'}


class Network:
  """Agents, links between them with messages under way, and a clock. `cut` are pairs of hosts."""

  def __init__(
    self,
    num_hosts: int,
    *,
    restarts: int = 5,
    host_counts: tuple[int, ...] = (),
    spares: int = 0,
    seed: int = 0,
    num_listed: int = 1,
    ahead: Sequence[float] = (0.0,) * 9,
  ):
    self.spares, self.num_listed = spares, num_listed
    self.num_hosts, self.restarts, self.host_counts = num_hosts, restarts, host_counts
    self.random = random.Random(seed)
    self.now = 0.0
    self.ahead = ahead  # seconds by which the clock of each host differs
    self.agents: dict[int, g.Member] = {}
    self.running: dict[int, g.Generation] = {}
    self.exits: dict[int, g.Exit] = {}
    self.links: dict[int, tuple[int, int]] = {}  # link: from, to
    self.messages: dict[tuple[int, int], collections.deque] = {}  # (link, receiver)
    self.cut: set[frozenset[int]] = set()
    self.step: Optional[int] = None
    self.started: list[g.Generation] = []
    self.effective: list[int] = []
    self.log: list[str] = []
    self._events: list = []
    self._failed: list[tuple[g.Member, int]] = []
    self.unfit: set[int] = set()
    self.stuck: set[int] = set()  # hosts whose kernel does not end processes
    self._next_link = 0
    self._incarnations = 0
    for index in range(num_hosts):
      self.boot(index)

  def time(self, agent: g.Member) -> float:
    return self.now + self.ahead[agent.me.index]

  def boot(self, index: int, name: str = '') -> None:
    """Starts an agent; a former one of this host is gone."""
    self.kill(index)
    self.exits.pop(index, None)
    self._incarnations += 1
    me = g.Host(
      index, name or f'gpu-{index}', f'#{self._incarnations}', f'gpu-{index}:{self._incarnations}'
    )
    self.agents[index] = g.Member(
      me,
      host_count=self.num_hosts,
      spares=self.spares,
      restarts=self.restarts,
      processes_per_host=2,
      facts=FACTS,
      machine=f'machine {index}',
      start_seconds=100,
      num_listed=self.num_listed,
    )
    self.do(index, self.agents[index].start(self.time(self.agents[index])))

  def kill(self, index: int) -> None:
    """kill -9 of an agent with its processes."""
    if self.agents.pop(index, None) is not None:
      self.running.pop(index, None)
      for link, ends in list(self.links.items()):
        if index in ends:
          self.close(link, index)

  def vanish(self, index: int) -> list[int]:
    """A host loses power; returns its links, which the other ends still take for open."""
    del self.agents[index], self.running[index]
    return [link for link, ends in self.links.items() if index in ends]

  def silence(self, links: Sequence[int], seconds: float = SILENT_SECONDS) -> None:
    """Links have been silent for too long."""
    for link in links:
      for end in self.links.pop(link, ()):
        if end in self.agents:
          self._later(
            end,
            lambda agent, link=link: agent.link_closed(
              link, self.time(agent), silent_seconds=seconds
            ),
          )

  def close(self, link: int, by: int) -> None:
    """Closes one end. The other end still gets all messages, and then the news."""
    ends = self.links.pop(link, None)
    if ends is not None:
      other = ends[0] if ends[1] == by else ends[1]
      self.messages.setdefault((link, other), collections.deque()).append(None)
      self.messages.pop((link, by), None)

  def _later(self, index: int, event) -> None:
    agent = self.agents[index]
    self._events.append((index, agent, event))

  def do(self, index: int, actions: list[g.Action]) -> None:
    for action in actions:
      match action:
        case g.Send(link, message):
          if link in self.links:
            ends = self.links[link]
            other = ends[0] if ends[1] == index else ends[1]
            message = _through_json(message)
            self.messages.setdefault((link, other), collections.deque()).append(message)
        case g.Connect(other, address):
          self._later(index, lambda agent, other=other, a=address: self._connect(agent, other, a))
        case g.Drop(link):
          self.close(link, index)
        case g.Offer(number):
          if index in self.unfit:
            self._later(index, lambda agent: agent.unfit('it had 8 GPUs', self.time(agent)))
          else:
            self._later(index, lambda agent, n=number: agent.offered(n, 'a:1', self.time(agent)))
        case g.StartProcesses(generation, _):
          assert index not in self.running
          self.running[index] = generation
          # Agents that were all started again are another run, and count from 1 again.
          for known in self.started:
            same = known.number == generation.number and set(known.members) & set(
              generation.members
            )
            assert not same or known == generation, 'two agents disagree on a generation'
          self.started.append(generation)
          whole = {
            (g_.run, g_.number)
            for g_ in self.running.values()
            if all(self.running.get(h.index) == g_ for h in g_.hosts)
          }
          # Agents that were started again begin another run without their spares: see `run_lock`.
          is_one = len({run for run, _ in whole}) == len(whole) if self.spares else len(whole) <= 1
          assert is_one, f'split brain: {whole}'
          self.effective += sorted({number for _, number in whole} - set(self.effective))
        case g.EndProcesses():
          if index in self.stuck:
            continue
          self._later(index, lambda agent, n=self.running.get(index): self._ended(agent, n, None))
        case g.PauseProcesses():
          generation = self.running[index]
          self._later(index, lambda agent, n=generation: self._ended(agent, n, 85, paused=True))
        case g.Exit():
          self.exits[index] = action
          self.kill(index)
          return
        case g.Log(text):
          self.log.append(f'{index}: {text}')

  def _connect(self, agent: g.Member, other: int, address: Optional[str]) -> list[g.Action]:
    to = self.agents.get(other)
    is_there = to is not None and (address is None or to.me.address == address)
    if not is_there or frozenset({agent.me.index, other}) in self.cut:
      self._failed.append((agent, other))  # known with the next tick
      return []
    self._next_link += 1
    self.links[self._next_link] = (agent.me.index, other)
    return agent.linked(other, self._next_link, self.time(agent))

  def _ended(
    self, agent: g.Member, generation, code: Optional[int], asked: int = 0, paused: bool = False
  ):
    index = agent.me.index
    if generation is None or self.running.get(index) != generation:
      return []
    del self.running[index]
    failed = (0,) if code else ()
    counts = tuple(n for n in self.host_counts if n <= len(generation.hosts))  # as training does
    times = (1e9 + self.now, 1e9 + self.now - 2)
    error = 'ValueError: no' if code and code > 0 else ''
    report = g.HostReport(
      generation.number, code, failed, self.step, asked, counts, paused, *times, error
    )
    return agent.processes_ended(report, self.time(agent))

  def end(self, index: int, code: int, asked: int = 0) -> None:
    """Processes of a host end by themselves."""
    if index in self.running and index in self.agents:
      generation = self.running[index]
      self._later(index, lambda agent: self._ended(agent, generation, code, asked))

  def cut_off(self, indices: set[int]) -> None:
    """Cuts hosts off from the others, and from each other not."""
    for a in range(self.num_hosts):
      for b in range(a):
        if (a in indices) != (b in indices):
          self.cut.add(frozenset({a, b}))
    links = [link for link, ends in self.links.items() if frozenset(ends) in self.cut]
    for link in links:
      for end in self.links[link]:
        self.messages.pop((link, end), None)
    self.silence(links)  # each end finds it silent at its own time

  def run_some(self, count: int) -> bool:
    """Delivers `count` messages or other events in random order; False if there is none."""
    for _ in range(count):
      # Events of one agent stay in order; so do messages of a link.
      ready = {index: i for i, (index, _, _) in reversed(list(enumerate(self._events)))}
      keys = [key for key, queue in self.messages.items() if queue]
      choices = [*ready.values(), *keys]
      if not choices:
        return False
      choice = self.random.choice(choices)
      if isinstance(choice, int):
        index, agent, event = self._events.pop(choice)
        if self.agents.get(index) is agent:
          self.do(index, event(agent))
      else:
        link, receiver = choice
        message = self.messages[choice].popleft()
        agent = self.agents.get(receiver)
        if agent is not None and message is None:
          self.do(receiver, agent.link_closed(link, self.time(agent)))
        elif agent is not None:
          self.do(receiver, agent.received(link, message, self.time(agent)))
    return True

  def tick(self, seconds: float = 1.0) -> None:
    self.now += seconds
    failed, self._failed = self._failed, []
    for agent, other in failed:
      if self.agents.get(agent.me.index) is agent:
        self._later(
          agent.me.index, lambda agent, other=other: agent.unreachable(other, self.time(agent))
        )
    for index, agent in list(self.agents.items()):
      self._later(index, lambda agent: agent.tick(self.time(agent)))

  def settle(self, seconds: float = 0.0) -> None:
    """Delivers everything, while that much time passes."""
    end = self.now + seconds
    while True:
      for _ in range(20_000):
        if not self.run_some(1):
          break
      else:
        raise AssertionError('the agents never come to rest')
      if self.now >= end:
        return
      self.tick()

  def whole(self) -> Optional[g.Generation]:
    """Returns the generation that all its hosts run."""
    found = [
      each
      for each in self.running.values()
      if all(self.running.get(host.index) == each for host in each.hosts)
    ]
    return found[0] if found else None

  def hosts(self) -> list[int]:
    whole = self.whole()
    return [] if whole is None else [host.index for host in whole.hosts]


def _through_json(message: g.Message) -> g.Message:
  return g.message_from_json(json.loads(json.dumps(g.message_to_json(message))))


def network(num_hosts: int = 3, **options) -> Network:
  made = Network(num_hosts, **options)
  made.settle()
  assert made.hosts() == list(range(num_hosts))
  return made


ANY = tuple(range(1, 6))


def test_a_run_starts_once_all_hosts_have_come():
  made = Network(3)
  made.kill(2)
  made.settle(50)
  assert made.hosts() == [] and made.log == ['0: waiting for host 2.']
  made.boot(2)
  made.settle(2)
  assert made.hosts() == [0, 1, 2] and made.whole().number == 1


def test_hosts_that_do_not_come_are_named():
  made = Network(4)
  made.kill(1)
  made.kill(3)
  made.settle(102)
  assert 'Missing: host 1, 3.' in made.exits[0].problem.what
  assert made.exits[2].problem == made.exits[0].problem


def test_a_failed_process_starts_the_same_hosts_again_and_is_named():
  made = network()
  made.step = 120
  made.end(1, KILLED)
  made.settle()
  assert made.hosts() == [0, 1, 2]
  assert made.whole().cause == 'process 2 on host 1 (gpu-1) failed (SIGKILL) after step 120'
  assert made.whole().restarts.done == 1


@pytest.mark.parametrize('unfit', [0, 1, 2])
def test_a_host_that_is_unfit_leaves_and_all_agents_name_it(unfit):
  made = network(host_counts=ANY)
  made.step = 7
  made.unfit = {unfit}
  made.end(1, 1)
  made.settle(g.GRACE_SECONDS + 2)
  assert made.hosts() == sorted({0, 1, 2} - {unfit})
  (left,) = made.exits.values()
  assert left.code == 1 and left.problem.what == (
    f'Host {unfit} (gpu-{unfit}) leaves the run: it had 8 GPUs.'
  )
  named = [line for line in made.log if 'leaves the run: it had 8 GPUs.' in line]
  assert len(named) == (1 if unfit else 2), made.log
  made.unfit = set()
  made.boot(unfit)  # repaired
  made.settle(2 * g.GROW_SECONDS)
  assert made.hosts() == [0, 1, 2]


@pytest.mark.parametrize('unfit', [0, 3])
def test_the_failure_of_a_host_that_is_then_unfit_stays_the_cause(unfit):
  made = network(4, host_counts=ANY)
  made.step = 1000
  made.unfit = {unfit}
  made.end(unfit, -7)
  made.settle(g.GRACE_SECONDS + 2)
  (found,) = made.whole().interruptions
  assert found.kind == interruptions.KILLED and found.step == 1000
  assert found.cause == f'process {2 * unfit} on host {unfit} (gpu-{unfit}) failed (SIGBUS)'
  assert found.error == f'host {unfit} (gpu-{unfit}) left the run: it had 8 GPUs'
  assert [each.host for each in made.whole().blamed] == [f'gpu-{unfit}']


def test_the_failure_of_another_host_stays_the_cause_if_a_host_is_unfit():
  made = network(4, host_counts=ANY)
  made.unfit = {2}
  made.end(3, 7)
  made.settle(2)
  (found,) = made.whole().interruptions
  assert found.cause == 'process 6 on host 3 (gpu-3) failed (exit code 7)'
  assert found.error == 'ValueError: no; host 2 (gpu-2) left the run: it had 8 GPUs'


def test_a_host_that_is_lost_after_its_process_failed_keeps_the_signal():
  made = network(4, host_counts=ANY)
  made.end(3, -7)
  made.run_some(2)  # the leader knows
  made.kill(3)
  made.settle(g.GRACE_SECONDS + 2)
  (found,) = made.whole().interruptions
  assert (found.kind, found.cause) == (interruptions.LOST_HOST, 'host 3 (gpu-3) was lost')
  assert found.error == 'process 6 on host 3 (gpu-3) failed (SIGBUS)'


def test_an_unfit_follower_costs_no_wait():
  made = network(host_counts=ANY)
  made.unfit = {2}
  made.end(1, KILLED)
  made.settle()
  assert made.hosts() == [0, 1]


def test_a_generation_knows_all_interruptions_before_it():
  made = network(host_counts=ANY)
  made.step = 120
  made.end(1, 7)
  made.settle(20)
  made.step = 150
  made.kill(2)
  made.settle(g.GRACE_SECONDS + 2)
  made.boot(2)
  made.settle(g.GROW_SECONDS)
  crashed, lost, joined = made.whole().interruptions
  assert crashed == interruptions.Interruption(
    1,
    interruptions.CRASHED,
    'process 2 on host 1 (gpu-1) failed (exit code 7)',
    120,
    1e9,
    1e9 - 2,
    'ValueError: no',
  )
  assert lost == interruptions.Interruption(
    2, interruptions.LOST_HOST, 'host 2 (gpu-2) was lost', 150, 1e9 + 20, 1e9 + 18
  )
  assert (joined.number, joined.kind, joined.cause, joined.error) == (
    3,
    interruptions.JOINED,
    'host 2 (gpu-2) joins',
    '',
  )


def test_a_host_that_comes_back_soon_takes_part_again():
  made = network(host_counts=ANY)
  made.kill(2)
  made.settle(5)
  assert made.hosts() == []
  made.boot(2)
  made.settle()
  assert made.hosts() == [0, 1, 2]


@pytest.mark.parametrize('lost', [0, 1, 2])
def test_the_run_continues_without_a_host_that_is_lost_for_longer(lost):
  made = network(host_counts=ANY)
  made.step = 7
  made.kill(lost)
  made.settle(g.GRACE_SECONDS + 2)
  assert made.hosts() == sorted({0, 1, 2} - {lost})
  assert made.whole().cause == f'host {lost} (gpu-{lost}) was lost after step 7'


def test_a_leader_that_was_frozen_does_not_take_the_others_for_lost():
  made = network(4, host_counts=ANY)
  frozen = made.agents.pop(0)
  links = [link for link, ends in made.links.items() if 0 in ends]
  made.silence(links)
  made.settle(3)
  made.agents[0] = frozen  # it continues, and finds that its links are closed
  for link in links:
    made._later(0, lambda agent, link=link: agent.link_closed(link, made.time(agent)))
  made.settle(2 * g.PROBE_SECONDS)
  assert made.hosts() == [0, 1, 2, 3]
  assert made.whole().cause == 'host 0 (gpu-0) was lost before the first step'
  assert [each.host for each in made.whole().blamed] == ['gpu-0']


def test_hosts_that_missed_a_start_are_not_lost():
  made = network(4, host_counts=ANY)
  made.end(3, KILLED)
  while sum(each.number == 2 for each in made.running.values()) < 2:
    if not made.run_some(1):
      made.tick()
  assert {made.running[i].number if i in made.running else 0 for i in range(4)} == {0, 2}
  links = made.vanish(0)  # before its last messages have left
  for key in [key for key in made.messages if key[0] in links]:
    del made.messages[key]
  made.silence(links)
  made.settle(g.GRACE_SECONDS + 2)
  assert made.hosts() == [1, 2, 3]
  assert 'host 0 (gpu-0) was lost' in made.whole().cause
  assert [each.host for each in made.whole().blamed] == ['gpu-3', 'gpu-0']


@pytest.mark.parametrize('silent', [0, 1, 2])
def test_a_host_that_beats_but_does_not_answer_a_proposal_is_left_out(silent):
  made = network(host_counts=ANY)
  made.agents[silent].offered = lambda *_: []
  made.end(1 if silent else 2, KILLED)
  made.settle(g.OFFER_SECONDS - 5)
  assert made.hosts() == []
  made.settle(10)
  assert made.hosts() == sorted({0, 1, 2} - {silent})
  assert made.exits[silent].code == 1
  assert 'has not looked at its GPUs within 60 s' in made.exits[silent].problem.what
  assert any('leaves the run: it has not looked' in line for line in made.log)


@pytest.mark.parametrize('stuck', [0, 1])
def test_a_host_that_cannot_end_its_processes_is_left_out(stuck):
  made = network(host_counts=ANY)
  made.stuck = {stuck}
  made.end(2, KILLED)
  made.settle(g.ENDING_SECONDS - 2)
  assert made.hosts() == []
  made.settle(g.GRACE_SECONDS + 4)
  assert made.hosts() == sorted({0, 1, 2} - {stuck})
  assert any('could not end its processes within 60 s' in line for line in made.log)


@pytest.mark.parametrize('lost', [0, 2])
def test_a_host_has_its_grace_from_its_last_sign_of_life(lost):
  made = network(host_counts=ANY)
  made.silence(made.vanish(lost), g.GRACE_SECONDS - 4)
  made.settle(3)
  assert made.hosts() == []
  made.settle(3)
  assert made.hosts() == sorted({0, 1, 2} - {lost})


def test_only_as_many_hosts_train_as_the_mesh_fits_and_the_others_are_spares():
  made = network(5, host_counts=(1, 2, 4))
  made.kill(1)
  made.settle(g.GRACE_SECONDS + 2)
  assert made.hosts() == [0, 2, 3, 4]
  made.kill(2)
  made.settle(g.GRACE_SECONDS + 2)
  assert made.hosts() == [0, 3]
  assert [host.index for host in made.whole().spares] == [4]
  made.kill(3)
  made.settle(g.GRACE_SECONDS + 2)
  assert made.hosts() == [0, 4]


def test_a_spare_takes_the_place_of_a_lost_host_at_once():
  made = Network(4, host_counts=ANY, spares=1)
  made.settle()
  assert made.hosts() == [0, 1, 2] and made.whole().spares[0].index == 3
  made.kill(1)
  made.settle(1)  # less than the time for the lost host
  assert made.hosts() == [0, 2, 3]
  made.boot(1)
  made.settle(2 * g.GROW_SECONDS)
  assert made.hosts() == [0, 2, 3] and made.whole().number == 2


def with_spares(num_hosts: int, spares: int) -> Network:
  made = Network(num_hosts + spares, host_counts=tuple(range(1, num_hosts + 1)), spares=spares)
  made.settle()
  assert made.hosts() == list(range(num_hosts))
  made.step = 100
  return made


@pytest.mark.parametrize(
  'num_hosts, spares, lost, left',
  [
    (2, 1, {0}, [1, 2]),
    (2, 1, {1}, [0, 2]),
    (4, 2, {0, 1}, [2, 3, 4, 5]),
    (4, 2, {0, 1, 4}, []),  # half of each, without the first host
    (4, 2, {2, 3, 4}, [0, 1, 5]),
    (4, 2, {2, 4, 5}, [0, 1, 3]),  # spares decide only between halves
    (1, 2, {1, 2}, [0]),
    (1, 2, {0}, []),  # it may still train
  ],
)
def test_spares_decide_between_two_halves_of_the_hosts(num_hosts, spares, lost, left):
  made = with_spares(num_hosts, spares)
  for index in lost:
    made.kill(index)
  made.settle(g.GRACE_SECONDS + 2)
  if 0 in left:
    made.end(0, KILLED)  # a loss of spares alone starts nothing
    made.settle(2)
  assert made.hosts() == left
  made.settle(g.HOLD_SECONDS)
  assert bool(made.exits) == (not left)


@pytest.mark.parametrize(
  'num_hosts, spares, cut_off, left',
  [
    (2, 1, {0}, [1, 2]),
    (2, 3, {2, 3, 4}, [0, 1]),  # spares alone do not know whether the others train
    (4, 2, {0, 1, 4}, [0, 1, 4]),
    (4, 2, {0, 1}, [2, 3, 4, 5]),
  ],
)
def test_of_a_cut_network_one_part_continues_and_spares_count_in_halves(
  num_hosts, spares, cut_off, left
):
  made = with_spares(num_hosts, spares)
  made.cut_off(cut_off)
  made.settle(g.HOLD_SECONDS + 5)
  assert made.hosts() == left and made.exits.keys() == set(range(num_hosts + spares)) - set(left)


def test_a_run_of_one_host_says_that_spares_cannot_replace_it():
  made = with_spares(1, 1)
  assert any('if host 0 (gpu-0) is lost, the spares wait for it' in line for line in made.log)


def test_a_run_does_not_wait_long_for_its_spares():
  made = Network(4, spares=1)
  made.kill(3)
  made.settle(g.SPARE_SECONDS - 2)
  assert made.hosts() == []
  made.settle(4)
  assert made.hosts() == [0, 1, 2]


def test_a_mesh_that_fits_no_fewer_hosts_waits_and_then_ends_the_run():
  made = network(3)
  made.kill(1)
  made.settle(g.HOLD_SECONDS - 1)
  assert made.hosts() == [] and not made.exits
  assert '0: waiting for host 1 (gpu-1).' in made.log
  made.settle(3)
  assert 'host 1 (gpu-1)' in made.exits[0].problem.what and made.exits[2].code == 1


def test_of_a_cut_network_the_larger_part_continues():
  made = network(5, host_counts=ANY)
  made.cut_off({0, 3})
  made.settle(g.GRACE_SECONDS + 2)
  assert made.hosts() == [1, 2, 4] and not {0, 3} & made.running.keys()
  made.settle(g.HOLD_SECONDS)
  assert 'the others may continue' in made.exits[0].problem.what
  assert made.exits.keys() == {0, 3}


@pytest.mark.parametrize('lost', [0, 1, 3])
def test_a_host_that_was_cut_off_for_minutes_is_taken_in_again(lost):
  made = network(4, host_counts=ANY)
  made.cut_off({lost})
  made.settle(g.HOLD_SECONDS / 2)
  assert made.hosts() == sorted({0, 1, 2, 3} - {lost})
  made.cut.clear()
  made.settle(g.GRACE_SECONDS + g.FIND_SECONDS + 5)
  assert made.hosts() == [0, 1, 2, 3] and made.whole().restarts.done == 1 and not made.exits


def test_a_leader_finds_all_lower_hosts_that_were_cut_off():
  made = network(5, host_counts=ANY)
  made.kill(0)
  made.settle(g.GRACE_SECONDS + 2)
  made.cut_off({1})
  made.settle(g.GRACE_SECONDS + 2)
  assert made.hosts() == [2, 3, 4]
  made.cut.clear()
  made.settle(2 * g.GROW_SECONDS)
  assert made.hosts() == [1, 2, 3, 4] and not made.exits


def test_of_two_halves_the_one_with_the_first_host_continues():
  made = network(4, host_counts=ANY)
  made.cut_off({2, 3})
  made.settle(g.HOLD_SECONDS + 2)
  assert made.hosts() == [0, 1] and made.exits.keys() == {2, 3}


@pytest.mark.parametrize('lost', [{0}, {0, 3}, {1, 3}, {0, 1, 2}])
def test_agents_that_start_again_continue_the_run_once_all_hosts_are_there(lost):
  made = network(4, host_counts=ANY)
  made.step = 7
  for index in lost:
    made.kill(index)
  made.settle(5)
  for index in lost:
    made.boot(index)
  made.settle(3)
  assert made.hosts() == [0, 1, 2, 3] and made.whole().number == 2
  assert made.whole().cause.endswith('lost after step 7')


def test_a_machine_that_takes_the_place_of_a_lost_one_does_not_prove_that_it_has_ended():
  made = network(4, host_counts=ANY)
  for index in (0, 3):
    made.kill(index)
  made.boot(0, name='gpu-9')
  made.boot(3)
  made.settle(g.HOLD_SECONDS + 10)
  assert (
    made.effective == [1]
    and 'do not count: host 0 (gpu-9), host 3 (gpu-3).' in made.exits[1].problem.what
  )


def test_an_agent_that_starts_again_does_not_count_while_another_host_is_not_reached():
  made = network(4, host_counts=ANY)
  made.cut_off({0, 3})
  made.settle(g.GRACE_SECONDS + 2)
  assert made.hosts() == [0, 3]
  made.kill(3)
  made.settle(g.GRACE_SECONDS + 2)
  assert made.hosts() == [0]
  made.cut.clear()
  made.cut_off({0})
  made.boot(3)
  made.settle(2)
  assert made.hosts() == [0] and made.running.keys() == {0}


def test_a_short_cut_costs_a_restart_and_no_host():
  made = network(3, host_counts=ANY)
  made.cut_off({0})
  made.settle(3)
  assert made.hosts() == []
  made.cut.clear()
  made.settle(4)
  assert made.hosts() == [0, 1, 2] and made.whole().number == 2


def shrunken(lost: int, num_hosts: int = 3, **options) -> Network:
  """Returns a run that continues without host `lost`."""
  made = network(num_hosts, host_counts=tuple(range(1, num_hosts + 1)), **options)
  made.step = 7
  made.kill(lost)
  made.settle(g.GRACE_SECONDS + 2)
  assert lost not in made.hosts()
  return made


@pytest.mark.parametrize('lost', [0, 1, 2])
def test_a_host_that_comes_back_later_is_taken_in_after_a_save_that_costs_no_restart(lost):
  made = shrunken(lost)
  made.boot(lost)
  made.settle(g.GROW_SECONDS - g.GRACE_SECONDS)
  assert lost not in made.hosts()  # two starts in a row would cost more than they bring
  made.settle(g.GRACE_SECONDS + 2)
  assert made.hosts() == [0, 1, 2] and made.whole().restarts.done == 1
  assert made.whole().cause == f'host {lost} (gpu-{lost}) joins' and not made.whole().is_restart
  made.settle(10 * g.GROW_SECONDS)
  assert made.whole().number == 3  # it starts no further one


def joined(**options) -> Network:
  """Returns a run that has just taken host 2 in again, after step 7."""
  made = shrunken(2, **options)
  made.boot(2)
  made.settle(2 * g.GROW_SECONDS)
  assert made.hosts() == [0, 1, 2]
  return made


JOINED = 'joined, and the run failed before it got any further'


@pytest.mark.parametrize('step', [None, 7, 8])
@pytest.mark.parametrize('ends', [[(2, 78)], [(2, 1)] * 2, [(0, 86)] * 2, [(1, -6), (0, -6)]])
def test_a_host_that_joins_and_ends_the_run_is_left_out(step, ends):
  made = joined()
  made.step = step
  for index, code in ends:
    assert made.hosts() == [0, 1, 2]
    made.end(index, code)
    made.settle(3)
  assert made.hosts() == [0, 1] and not made.exits
  assert f'0: host 2 (gpu-2) {JOINED}; the run continues without it.' in made.log
  assert f'2: host 2 (gpu-2) waits as a spare: it {JOINED}.' in made.log
  made.boot(2)  # the same machine
  made.settle(2 * g.GROW_SECONDS)
  assert made.hosts() == [0, 1]


def test_a_spare_that_takes_a_place_and_ends_the_run_is_left_out():
  made = with_spares(3, 1)
  made.kill(1)
  made.settle(2)
  assert made.hosts() == [0, 2, 3]
  made.step = None
  failed_twice(made, 3, 1)
  assert made.hosts() == [0, 2] and not made.exits


@pytest.mark.parametrize('code', [78, 1])
def test_a_failure_that_comes_without_the_new_host_too_ends_the_run(code):
  made = joined()
  made.step = None
  for _ in range(3):
    if made.hosts():
      made.end(made.hosts()[-1], code)
      made.settle(3)
  assert {exit.code for exit in made.exits.values()} == {code} and len(made.exits) == 3


@pytest.mark.parametrize('first', [False, True])
def test_a_host_with_which_the_run_has_come_further_is_not_blamed_for_its_errors(first):
  made = network(host_counts=ANY) if first else joined()
  made.step = None if first else 9
  failed_twice(made, 2, 1)
  assert {exit.code for exit in made.exits.values()} == {1} and len(made.exits) == 3


def test_a_host_that_is_gone_whenever_the_run_was_saved_for_it_stays_out():
  made = shrunken(2, restarts=1)
  for _ in range(g.BAD_HOST_FAILURES):
    made.boot(2)
    made.settle(2)
    for _ in range(2 * g.GROW_SECONDS):
      if 'the run is saved' in made.log[-1]:
        break
      made.tick()
      while 'the run is saved' not in made.log[-1] and made.run_some(1):
        pass
    made.log.append('')
    made.kill(2)
    made.settle(2)
    assert made.hosts() == [0, 1]
  number = made.whole().number
  made.boot(2)
  made.settle(5 * g.GROW_SECONDS)
  assert made.hosts() == [0, 1] and made.whole().number == number


@pytest.mark.parametrize('num_listed, finds', [(1, False), (2, True), (4, True)])
def test_a_new_agent_finds_the_run_while_host_0_is_away(num_listed, finds):
  made = shrunken(0, 4, num_listed=num_listed)
  made.kill(3)
  made.settle(g.GRACE_SECONDS + 2)
  assert made.hosts() == [1, 2]
  made.boot(3)
  made.settle(g.GROW_SECONDS + 2)
  assert made.hosts() == ([1, 2, 3] if finds else [1, 2])
  made.boot(0)
  made.settle(2 * g.GROW_SECONDS)
  assert made.hosts() == [0, 1, 2, 3]


def test_all_hosts_that_come_back_find_a_run_whose_leader_is_another_one():
  made = shrunken(0, num_hosts=4)
  made.kill(3)
  made.settle(g.GRACE_SECONDS + 2)
  assert made.hosts() == [1, 2]
  made.boot(3)  # it knows host 0 alone, which is not there
  made.settle(5)
  made.boot(0)
  made.settle(g.GROW_SECONDS + g.FIND_SECONDS + 5)
  assert made.hosts() == [0, 1, 2, 3]


def test_a_run_that_is_asked_to_stop_takes_in_no_host():
  made = shrunken(2)
  made.boot(2)
  made.settle(5)
  made.do(1, made.agents[1].asked(15, made.now))
  made.settle(2 * g.GROW_SECONDS)  # the processes save
  assert made.hosts() == [0, 1]
  for index in (0, 1):
    made.end(index, 85, asked=15)
  made.settle(2)
  assert {index: made.exits[index].code for index in range(3)} == {0: 85, 1: 85, 2: 85}


def test_a_leader_that_is_lost_in_a_pause_costs_a_restart():
  made = shrunken(3, num_hosts=4)
  for index in (1, 2):
    made.do(index, [g.PauseProcesses()])
  made.kill(0)
  made.settle(g.GRACE_SECONDS + 2)
  assert made.hosts() == [1, 2] and made.whole().restarts.done == 2


def test_a_host_that_fails_often_stays_out_for_a_day():
  made = network(3, host_counts=ANY, restarts=20)
  for failure in range(1, g.BAD_HOST_FAILURES + 1):
    made.step = 10 * failure
    made.end(1, KILLED)
    made.settle(2)
  assert made.hosts() == [0, 2] and [host.index for host in made.whole().spares] == [1]
  assert (
    '0: host 1 (gpu-1) caused 3 failures within a day; the run continues without it.' in made.log
  )
  made.boot(1)  # the same machine
  made.settle(2 * g.GROW_SECONDS)
  assert made.hosts() == [0, 2]
  made.now += g.BAD_HOST_SECONDS
  made.settle(2)
  assert made.hosts() == [0, 1, 2]


def led_by_a_spare() -> Network:
  """Returns a run whose host 0 leads and is bad."""
  made = network(3, host_counts=ANY, restarts=20)
  for failure in range(1, g.BAD_HOST_FAILURES + 1):
    made.step = 10 * failure
    made.end(0, KILLED)
    made.settle(2)
  assert made.hosts() == [1, 2] and not made.exits
  return made


@pytest.mark.parametrize('number, code', [(2, 130), (15, 85)])
def test_a_spare_that_leads_leaves_when_it_is_asked_to_and_costs_no_restart(number, code):
  made = led_by_a_spare()
  made.do(0, made.agents[0].asked(number, made.now))
  made.settle(3)
  assert made.exits == {0: g.Exit(code)} and made.hosts() == [1, 2]
  assert made.whole().restarts.done == 3 and not made.whole().is_restart
  assert made.whole().cause == 'the run was saved for a change of its hosts'
  assert any('asked to stop: the run is saved, to continue without it' in line for line in made.log)
  made.end(1, KILLED)
  made.settle(2)
  assert made.hosts() == [1, 2] and made.exits.keys() == {0}


@pytest.mark.parametrize('leads', [False, True])
def test_a_spare_that_is_asked_to_stop_while_a_start_is_proposed_leaves_alone(leads):
  made, spare = (led_by_a_spare(), 0) if leads else (with_spares(3, 1), 3)
  made.step = 100
  made.end(1, KILLED)
  while made.agents[0]._proposal is None:
    assert made.run_some(1)
  made.do(spare, made.agents[spare].asked(15, made.now))
  made.settle(3)
  hosts = [1, 2] if leads else [0, 1, 2]
  assert made.exits == {spare: g.Exit(85)} and made.hosts() == hosts
  made.step = 5000
  made.end(1, KILLED)
  made.settle(3)
  assert made.hosts() == hosts and made.exits.keys() == {spare}


def test_all_hosts_that_are_asked_to_stop_end_the_run_if_a_spare_leads():
  made = led_by_a_spare()
  for index in (0, 1, 2):
    made.do(index, made.agents[index].asked(15, made.now))
  for index in (1, 2):
    made.end(index, 85, asked=15)
  made.settle(3)
  assert made.exits == {index: g.Exit(85) for index in range(3)} and made.started[-1].number == 4


def test_a_run_that_is_done_before_its_leading_spare_has_left_ends_with_its_code():
  made = led_by_a_spare()
  for index in (1, 2):
    made.end(index, 0)
  made.run_some(1)
  made.do(0, made.agents[0].asked(15, made.now))
  made.settle(3)
  assert made.exits == {index: g.Exit(0) for index in range(3)}


def test_a_host_that_fails_often_is_used_if_the_mesh_needs_it():
  made = network(2, restarts=20)
  for failure in range(1, g.BAD_HOST_FAILURES + 2):
    made.step = 10 * failure
    made.end(1, KILLED)
    made.settle(2)
  assert made.hosts() == [0, 1]


# Also on the hosts whose processes did not fail.
TWICE = 'it failed twice in a row after step 5; process 2 on host 1 (gpu-1) failed ({})'


def test_the_same_failure_twice_ends_the_run_on_all_hosts_with_its_code():
  made = network()
  made.step = 5
  made.end(1, 7)
  made.settle()
  made.end(1, 7)
  made.settle()
  assert {index: made.exits[index].code for index in range(3)} == {0: 7, 1: 7, 2: 7}
  assert made.exits[2].problem.what == TWICE.format('exit code 7')


@pytest.mark.parametrize(
  'code, text', [(-9, 'SIGKILL'), (-40, 'signal 40'), (-34, 'SIGRTMIN'), (7, 'exit code 7')]
)
def test_every_signal_that_ends_a_process_is_named(code, text):
  made = network()
  made.end(1, code)
  made.settle()
  assert made.whole().cause == f'process 2 on host 1 (gpu-1) failed ({text}) before the first step'


def failed_twice(made: Network, index: int, code: int = -11) -> Network:
  for _ in range(2):
    made.end(index, code)
    made.settle(2)
  return made


@pytest.mark.parametrize('step', [None, 5000])
def test_a_spare_takes_the_place_of_a_host_that_fails_twice_in_a_row(step):
  made = Network(4, host_counts=ANY, spares=1)
  made.settle()
  made.step = step
  failed_twice(made, 2)
  assert made.hosts() == [0, 1, 3] and [host.index for host in made.whole().spares] == [2]
  reason = 'failed twice in a row at the same step'
  assert f'0: host 2 (gpu-2) {reason}; the run continues without it.' in made.log
  assert f'2: host 2 (gpu-2) waits as a spare: it {reason}.' in made.log
  made.settle(2 * g.GROW_SECONDS)
  assert made.hosts() == [0, 1, 3]


def test_a_host_that_fails_twice_in_a_row_is_left_out_if_the_mesh_fits_the_others():
  made = Network(8, host_counts=tuple(range(1, 9)))
  made.settle()
  made.step = 5000
  failed_twice(made, 5, -7)
  assert made.hosts() == [0, 1, 2, 3, 4, 6, 7] and made.whole().restarts.done == 2


def test_the_same_failure_on_another_host_then_ends_the_run():
  made = network(4, host_counts=ANY)
  made.step = 5
  failed_twice(made, 2)
  made.end(1, -11)
  made.settle(2)
  assert {exit.code for exit in made.exits.values()} == {139} and len(made.exits) == 4
  assert made.exits[2].problem.what == TWICE.format('SIGSEGV')


@pytest.mark.parametrize('seed', range(4))
def test_a_crash_of_all_processes_at_the_same_step_ends_the_run_after_at_most_two_restarts(seed):
  made = network(4, host_counts=ANY, restarts=20, seed=seed)
  made.step = 500
  for _ in range(3):
    for host in random.Random(seed + made.now).sample(made.hosts(), len(made.hosts())):
      made.end(host, -11)
    made.settle(3)
  assert {exit.code for exit in made.exits.values()} == {139} and len(made.exits) == 4


def test_a_second_host_that_fails_twice_in_a_row_is_left_out_too():
  made = network(4, host_counts=ANY)
  made.step = 5
  failed_twice(made, 2)
  made.step = 50
  failed_twice(made, 1)
  assert made.hosts() == [0, 3] and not made.exits


def failed_twice_beside_a_lost_host(lost: int, host_counts: tuple[int, ...]) -> Network:
  """Returns a run whose host 1 failed for the second time just before host `lost` was lost."""
  made = network(3, host_counts=host_counts)
  made.step = 5
  made.end(1, -11)
  made.settle(2)
  made.end(1, -11)
  made.run_some(2)  # the leader knows of it
  made.kill(lost)
  made.settle(3)
  return made


@pytest.mark.parametrize('lost', [0, 2])
def test_a_lost_host_has_its_grace_to_replace_a_host_that_failed_twice_in_a_row(lost):
  made = failed_twice_beside_a_lost_host(lost, host_counts=(2, 3))
  assert not made.exits
  made.boot(lost)
  made.settle(4)
  assert made.hosts() == [0, 2] and not made.exits


@pytest.mark.parametrize('host_counts, waited', [((2, 3), g.GRACE_SECONDS), ((3,), 0)])
def test_a_repeated_failure_ends_the_run_once_no_lost_host_can_help(host_counts, waited):
  made = failed_twice_beside_a_lost_host(2, host_counts=host_counts)
  made.settle(max(0, waited - 6))
  assert bool(made.exits) != bool(waited)
  made.settle(5)
  assert {index: made.exits[index].code for index in range(2)} == {0: 139, 1: 139}
  assert made.exits[0].problem.what == TWICE.format('SIGSEGV')


@pytest.mark.parametrize('lost', [0, 2])
def test_a_host_that_is_lost_again_at_the_same_step_does_not_end_the_run(lost):
  made = network(3, host_counts=ANY)
  for number in (2, 3):
    made.kill(lost)
    made.settle(2)
    made.boot(lost)
    made.settle(3)
    assert made.hosts() == [0, 1, 2] and made.whole().number == number


def test_short_cuts_in_a_row_do_not_end_the_run():
  made = network(3, host_counts=ANY)
  for number in (2, 3):
    made.cut_off({0})
    made.settle(3)
    made.cut.clear()
    made.settle(4)
    assert made.hosts() == [0, 1, 2] and made.whole().number == number


def test_a_leader_that_has_missed_a_generation_does_not_explain_its_end():
  made = network(3, host_counts=ANY)
  made.end(0, KILLED)
  made.run_some(1)  # the leader knows who failed
  made.cut_off({0})
  made.settle(g.GRACE_SECONDS + 2)
  assert made.hosts() == [1, 2]
  made.kill(2)
  made.settle(1)
  made.cut.clear()
  made.settle(g.GRACE_SECONDS + 2)
  assert made.hosts() == [0, 1]
  assert made.whole().cause == 'host 2 (gpu-2) was lost before the first step'


def test_an_agent_that_is_back_before_its_predecessor_is_missed_takes_part():
  made = network(3, host_counts=ANY)
  links = made.vanish(2)
  made.boot(2)
  made.settle(g.PREDECESSOR_SECONDS - 1)
  assert not made.exits
  made.silence(links)
  made.settle(1)
  assert made.hosts() == [0, 1, 2] and made.whole().number == 2
  assert made.whole().cause == 'host 2 (gpu-2) was lost before the first step'


def test_a_second_agent_of_a_host_is_refused_if_the_first_one_lives():
  made = network(3, host_counts=ANY)
  second = g.Hello(g.Host(2, 'gpu-2', 'new', 'gpu-2:2'), FACTS, 'machine 2')
  made.do(0, made.agents[0].received(99, second, made.now))
  made.now += g.PREDECESSOR_SECONDS
  (sent,) = [a for a in made.agents[0].tick(made.now) if isinstance(a, g.Send)]
  assert sent.link == 99 and sent.message.is_final and 'Two agents' in sent.message.reason
  assert made.hosts() == [0, 1, 2]


def test_codes_of_hosts_that_only_lost_another_do_not_hide_the_lost_host():
  made = network(3, host_counts=ANY)
  made.step = 5
  made.end(0, 87)
  made.run_some(1)  # the leader's own processes have ended
  made.kill(2)
  made.settle(g.GRACE_SECONDS + 2)
  assert made.hosts() == [0, 1]
  assert made.whole().cause == 'host 2 (gpu-2) was lost after step 5'


@pytest.mark.parametrize('code, asked', [(0, 0), (85, 15), (130, 2)])
def test_a_run_that_is_done_or_stopped_ends_with_its_code(code, asked):
  made = network()
  for index in range(3):
    made.end(index, code, asked)
  made.settle()
  assert [made.exits[i] for i in range(3)] == [g.Exit(code)] * 3


def test_a_signal_between_two_generations_ends_the_run_on_all_hosts():
  made = network(3, host_counts=ANY)
  made.kill(2)
  made.settle(2)
  made.do(1, made.agents[1].asked(15, made.now))
  made.settle()
  assert made.exits == {0: g.Exit(85), 1: g.Exit(85)}


@pytest.mark.parametrize(
  'change',
  [
    {'facts': {'--nproc': '4'}},
    {'machine': 'machine 0'},
    {'host': g.Host(1, 'gpu-9', 'new', 'gpu-9:1')},
    {'host': g.Host(7, 'gpu-7', 'new', 'gpu-7:1')},
  ],
)
def test_an_agent_that_does_not_belong_to_the_run_is_refused_by_name(change):
  made = Network(3)
  made.kill(2)
  made.settle()
  hello = g.Hello(g.Host(2, 'gpu-2', 'new', 'gpu-2:1'), FACTS, 'machine 2')
  values = {**vars(hello), **change}
  actions = made.agents[0].received(99, g.Hello(**values), made.now)
  (refused,) = [a.message for a in actions if isinstance(a, g.Send)]
  assert isinstance(refused, g.Refusal) and refused.is_final
  assert values['host'].name in refused.reason


def test_agents_whose_clocks_differ_agree_as_usual():
  made = network(3, host_counts=ANY, ahead=(0.0, -86400.0, 1e9))
  made.kill(0)
  made.settle(40)
  assert made.hosts() == [1, 2]
  made.boot(0)
  made.settle(120)
  assert made.hosts() == [0, 1, 2]
  assert made.whole().restarts.done == 1 and not made.exits


FAULTS = st.lists(
  st.tuples(
    st.sampled_from(['kill', 'boot', 'cut', 'heal', 'fail', 'end', 'asked', 'wait', 'step']),
    st.integers(0, 4),
    st.integers(0, 40),
  ),
  max_size=25,
)


def happen(made: Network, faults: Sequence[tuple[str, int, int]]) -> None:
  for kind, index, amount in faults:
    index %= made.num_hosts
    match kind:
      case 'kill':
        made.kill(index)
      case 'boot':
        if index not in made.agents and index not in made.exits:
          made.boot(index)
      case 'cut':
        made.cut_off({i for i in range(made.num_hosts) if amount >> i & 1})
      case 'heal':
        made.cut.clear()
      case 'fail':
        made.end(index, [KILLED, 1, 7, 87][amount % 4])
      case 'end':
        made.end(index, 0)
      case 'wait':
        made.tick(3 * amount)
      case 'asked':
        if index in made.agents:
          made.do(index, made.agents[index].asked(15, made.time(made.agents[index])))
      case 'step':
        made.step = (made.step or 0) + 10
    made.run_some(amount)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
  st.integers(1, 5),
  st.integers(0, 4),
  FAULTS,
  st.integers(0, 2**16),
  st.booleans(),
  st.integers(1, 5),
  st.integers(0, 3),
)
def test_whatever_happens_no_two_generations_train_and_the_run_ends(
  num_hosts, restarts, faults, seed, is_elastic, num_listed, spares
):
  made = Network(
    num_hosts,
    restarts=restarts,
    host_counts=tuple(range(1, num_hosts + 1)) if is_elastic else (),
    spares=min(spares, num_hosts - 1),
    seed=seed,
    num_listed=min(num_listed, num_hosts),
  )
  happen(made, faults)
  made.cut.clear()
  for _ in range(100):
    made.settle(30)
    if not made.agents:
      break
    for index in list(made.running):
      made.end(index, 0)
  else:
    raise AssertionError(f'agents {list(made.agents)} never end: {made.log}')
  restarted = {g_.number for g_ in made.started if g_.is_restart}
  assert len(restarted.intersection(made.effective)) <= restarts + 1


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
  st.integers(2, 5), FAULTS, st.integers(0, 2**16), st.integers(1, 5), st.sampled_from([0, 0, 1, 3])
)
# Host 3 is cut off after it has accepted the first generation, and then finds host 2 before host 0.
@example(5, [('step', 0, 26), ('cut', 0, 5)], 0, 1, 0)
def test_whatever_happens_all_hosts_train_soon_after_all_of_them_are_there(
  num_hosts, faults, seed, num_listed, spares
):
  spares = min(spares, num_hosts - 1)
  made = Network(
    num_hosts,
    restarts=1000,
    host_counts=tuple(range(1, num_hosts + 1)),
    spares=spares,
    seed=seed,
    num_listed=min(num_listed, num_hosts),
  )
  happen(made, [fault for fault in faults if fault[0] not in ('end', 'asked')])
  made.cut.clear()
  made.now += g.BAD_HOST_SECONDS  # no host is bad any more
  deadline = made.now + 2 * g.GROW_SECONDS + 4 * g.GRACE_SECONDS
  while len(made.hosts()) != num_hosts - spares:
    assert made.now < deadline, (made.log, made.exits)
    for index in set(range(num_hosts)) - made.agents.keys():
      made.boot(index)  # as a supervisor does
    made.step = (made.step or 0) + 10
    made.settle(5)
