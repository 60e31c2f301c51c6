"""The ledger of wall time: phases by a clock that the test moves; kills, damage, full disks."""

import json
import math
import threading

import pytest

from t5x_gpu.metrics import goodput as goodput_lib
from t5x_gpu.metrics.goodput import GOODPUT, Goodput
from t5x_gpu.reporting.interruptions import costs_of
from t5x_gpu.runtime import process_exit
from t5x_gpu.runtime.cluster import interruptions
from t5x_gpu.runtime.cluster.interruptions import Interruption
from tests.helpers_disk import small_disk


class Clock:
  """Seconds since 1970 and since boot at once."""

  def __init__(self):
    self.seconds = 1_000_000.0

  def __call__(self) -> float:
    return self.seconds

  def passes(self, seconds: float) -> None:
    self.seconds += seconds


@pytest.fixture
def clock():
  return Clock()


def started(clock, **options) -> Goodput:
  return Goodput(enabled=True, clock=clock, now=clock, period_seconds=1e6, **options)


def killed(goodput: Goodput) -> None:
  """The process is gone; of this object only what is on the disk counts."""
  process_exit.cancel_before_exit(goodput._left_at_once)


def trains(goodput, clock, folder, steps, *, first_step, init=3.0, save_every=None, facts=()):
  """A process that takes its steps, 2 s each, until something else happens to it."""
  clock.passes(init)
  with goodput.phase('compile'):
    clock.passes(10.0)
  goodput.open(folder, first_step=first_step, facts={'total_steps': 100, **dict(facts)})
  with goodput.phase('productive'):
    for step in range(first_step + 1, first_step + steps + 1):
      with goodput.phase('input_wait'):
        clock.passes(0.5)
      clock.passes(1.5)
      goodput.step_done(step)
      if save_every and step % save_every == 0:
        with goodput.phase('local_save'):
          clock.passes(1.0)
    goodput.write()


def accounts(folder) -> goodput_lib.Accounts:
  return goodput_lib.accounts_of(goodput_lib.read_ledger(folder / GOODPUT))


def test_phases_of_one_process_sum_to_its_wall_time(tmp_path, clock):
  begin = clock()
  with started(clock) as goodput:
    trains(goodput, clock, tmp_path, 10, first_step=0, save_every=5)
    goodput.ends('done')
    with goodput.phase('eval'):
      clock.passes(4.0)
  found = accounts(tmp_path)
  used = {name: seconds for name, seconds in found.seconds.items() if seconds}
  assert used == {
    'productive': 15.0, 'init': 3.0, 'compile': 10.0, 'input': 5.0, 'save': 2.0, 'eval': 4.0
  }  # fmt: skip
  assert found.wall_seconds == math.fsum(used.values()) == clock() - begin
  assert found.goodput == pytest.approx(15 / 39)
  assert found.processes[0].process.end == 'done'
  assert goodput_lib.summary(found) == (
    '38% of 0:00:39: compile 26%, input 13%, eval 10%, init 8%, save 5%'
  )
  assert goodput_lib.interruption(found) == ''


def test_a_wait_for_input_while_the_devices_are_busy_is_productive(tmp_path, clock):
  with started(clock) as goodput:
    goodput.open(tmp_path, first_step=0)
    with goodput.phase('productive'):
      for busy in (True, False):
        with goodput.phase('input_wait', unless=lambda busy=busy: busy):
          clock.passes(3.0 if busy else 5.0)
  assert accounts(tmp_path).seconds['input'] == 5.0
  assert accounts(tmp_path).seconds['productive'] == 3.0


def test_steps_after_the_last_checkpoint_are_lost_if_a_kill_makes_a_restart_repeat_them(
  tmp_path, clock
):
  begin = clock()
  first = started(clock)
  trains(first, clock, tmp_path, 14, first_step=0, save_every=5)
  killed(first)
  clock.passes(60.0)
  with started(clock) as second:
    trains(second, clock, tmp_path, 10, first_step=10)
    text = second.interruption()
  found = accounts(tmp_path)
  assert found.lost_steps == 4 and found.processes[0].lost_steps == 4
  assert found.seconds['lost'] == pytest.approx(4 * 1.5)
  assert found.seconds['productive'] == pytest.approx((14 - 4 + 10) * 1.5)
  assert found.seconds['downtime'] == 60.0
  assert math.fsum(found.seconds.values()) == pytest.approx(clock() - begin)
  assert found.wall_seconds == pytest.approx(clock() - begin)
  assert found.processes[0].process.end is None
  assert text == (
    'The last interruption (killed) cost 0:01:19: 0:00:06 of training after step 10, '
    '0:01:00 between the two processes, 0:00:13 to start again.'
  )


def test_a_restart_from_an_older_checkpoint_also_loses_steps_of_earlier_processes(tmp_path, clock):
  for first_step, steps in ((0, 10), (10, 10), (5, 20)):
    with started(clock) as goodput:
      trains(goodput, clock, tmp_path, steps, first_step=first_step, save_every=5)
      goodput.ends('SIGTERM')
  found = accounts(tmp_path)
  assert [p.lost_steps for p in found.processes] == [5, 10, 0]
  assert found.seconds['lost'] == pytest.approx(15 * 1.5)
  assert found.seconds['productive'] == pytest.approx(25 * 1.5)


def test_time_after_a_finished_run_is_not_downtime(tmp_path, clock):
  for first_step in (0, 10):
    with started(clock) as goodput:
      trains(goodput, clock, tmp_path, 10, first_step=first_step)
      text = goodput.interruption()
    clock.passes(1e6)
  found = accounts(tmp_path)
  assert found.seconds['downtime'] == 0.0 and text == ''
  assert found.wall_seconds == pytest.approx(math.fsum(found.seconds.values()))


def test_a_half_written_line_costs_that_line_alone(tmp_path, clock):
  with started(clock) as goodput:
    trains(goodput, clock, tmp_path, 10, first_step=0, save_every=5)
  path = tmp_path / GOODPUT
  whole = accounts(tmp_path).seconds
  lines = path.read_bytes().splitlines(keepends=True)
  path.write_bytes(
    b''.join([lines[0], b'{"run": "x"}\n', b'\xff\x00\n', *lines[1:], lines[-1][:40]])
  )
  with started(clock) as goodput:
    trains(goodput, clock, tmp_path, 5, first_step=10)
  ledger = goodput_lib.read_ledger(path)
  assert ledger.damaged == [2, 3, len(lines) + 3]
  assert len(ledger.runs) == 2
  assert goodput_lib.accounts_of(ledger).processes[0].seconds == whole


def test_any_line_may_be_missing(tmp_path, clock):
  with started(clock) as goodput:
    trains(goodput, clock, tmp_path, 20, first_step=0, save_every=5)
  with started(clock) as goodput:
    trains(goodput, clock, tmp_path, 5, first_step=12)
  path = tmp_path / GOODPUT
  lines = path.read_bytes().splitlines(keepends=True)
  whole = accounts(tmp_path).seconds
  last = [i for i, line in enumerate(lines) if b'"end"' in line]
  for missing in set(range(len(lines))) - set(last):
    path.write_bytes(b''.join(line for i, line in enumerate(lines) if i != missing))
    assert accounts(tmp_path).seconds == pytest.approx(whole, abs=12 * 1.5), missing


def test_a_thread_writes_while_the_process_is_in_one_phase(tmp_path, clock):
  with Goodput(enabled=True, clock=clock, now=clock, period_seconds=0.001) as goodput:
    goodput.open(tmp_path, first_step=0)
    with goodput.phase('productive'), goodput.phase('eval'):
      clock.passes(7.0)
      arrived = threading.Event()
      for _ in range(10_000):
        if goodput_lib.read_ledger(tmp_path / GOODPUT).runs[0].last.seconds.get('eval') == 7:
          break
        arrived.wait(0.005)
      else:
        pytest.fail('no line')


def test_other_processes_measure_and_write_nothing(tmp_path, clock):
  with Goodput(enabled=False, clock=clock, now=clock) as goodput:
    trains(goodput, clock, tmp_path, 3, first_step=0, save_every=1)
    assert goodput.summary() == goodput.interruption() == ''
  assert not list(tmp_path.iterdir())


def test_a_run_that_never_opens_its_folder_leaves_no_trace(tmp_path, clock):
  with pytest.raises(KeyError), started(clock):
    raise KeyError('x')
  assert not list(tmp_path.iterdir())


def test_a_full_disk_costs_lines_and_not_the_run(tmp_path, clock, caplog):
  with small_disk(tmp_path / 'disk', size='64k') as disk, started(clock) as goodput:
    trains(goodput, clock, disk, 2, first_step=0)
    filler = disk / 'filler'
    with open(filler, 'wb', buffering=0) as f:
      try:
        while f.write(b'x' * 512):
          pass
      except OSError:
        pass
    for _ in range(40):
      goodput.write()
    filler.unlink()
    clock.passes(5.0)
    goodput.ends('done')
    found = accounts(disk)
    assert found.processes[0].process.end == 'done'
    assert math.fsum(found.seconds.values()) == pytest.approx(clock() - 1_000_000)
  assert caplog.text.count('The run continues.') == 1


def test_an_error_is_how_the_run_ends(tmp_path, clock):
  with pytest.raises(ZeroDivisionError), started(clock) as goodput:
    trains(goodput, clock, tmp_path, 2, first_step=0)
    raise ZeroDivisionError
  assert accounts(tmp_path).processes[0].process.end == 'ZeroDivisionError'


def test_unknown_phases_of_a_later_version_are_other(tmp_path):
  record = {'run': 'a', 'at': 100.0, 'seconds': {'productive': 5.0, 'dreaming': 2.0}}
  (tmp_path / GOODPUT).write_text(json.dumps(record) + '\n')
  assert accounts(tmp_path).seconds['other'] == 2.0


def known(*found: Interruption) -> dict:
  """Returns the facts of a start that `launch` started after these interruptions."""
  return interruptions.facts(interruptions.variables('run1', found))


def test_launch_knows_the_last_steps_of_a_killed_process_and_when_it_noticed(tmp_path, clock):
  first = started(clock)
  trains(first, clock, tmp_path, 14, first_step=0, save_every=5)
  killed(first)
  clock.passes(8.0)  # four more steps, without a line
  stepped_at = clock()
  clock.passes(5.0)
  lost = Interruption(
    1, interruptions.LOST_HOST, 'host 2 (gpu-003) was lost', 18, clock(), stepped_at
  )
  clock.passes(11.0)
  with started(clock) as second:
    trains(second, clock, tmp_path, 10, first_step=10, facts=known(lost))
    text = second.interruption()
  found = accounts(tmp_path)
  (cost,) = costs_of(found)
  assert (cost.kind, cost.cause, cost.step) == ('host lost', 'host 2 (gpu-003) was lost', 18)
  assert cost.repeated_steps == found.lost_steps == 8
  assert cost.repeated == pytest.approx(4 * 1.5 + 8)
  assert (cost.noticing, cost.restarting) == (pytest.approx(5), pytest.approx(11 + 3 + 10))
  assert found.seconds['downtime'] == pytest.approx(5 + 11)
  assert math.fsum(found.seconds.values()) == pytest.approx(clock() - 1_000_000)
  assert 'The last interruption (host 2 (gpu-003) was lost) cost 0:00:43' in text


def test_a_suspended_process_that_continues_after_the_next_start_changes_no_sum(tmp_path, clock):
  first = started(clock)
  trains(first, clock, tmp_path, 14, first_step=0, save_every=5, facts=known())
  clock.passes(8.0)  # four more steps, without a line
  stepped_at = clock()  # and its host is stopped
  clock.passes(5.0)
  lost = Interruption(1, interruptions.LOST_HOST, 'host 0 was lost', 18, clock(), stepped_at)
  clock.passes(11.0)
  with started(clock) as second:
    clock.passes(2.0)
    first.write()  # it continues, until its agent ends it
    trains(second, clock, tmp_path, 5, first_step=10, facts=known(lost))
    first.ends('TrainingError')
  killed(first)
  found = accounts(tmp_path)
  (cost,) = costs_of(found)
  assert cost.repeated_steps == found.lost_steps == 8
  assert cost.repeated == pytest.approx(4 * 1.5 + 8)
  assert (cost.noticing, cost.restarting) == (pytest.approx(5), pytest.approx(11 + 2 + 13))
  total = pytest.approx(clock() - 1_000_000)
  assert math.fsum(found.seconds.values()) == found.wall_seconds == total


def test_a_process_that_writes_only_after_the_next_start_counts_as_a_start_that_failed(
  tmp_path, clock
):
  first = started(clock)
  trains(first, clock, tmp_path, 4, first_step=0, facts=known())
  killed(first)
  failures = [Interruption(1, 'process killed', 'process 1 failed', 4, clock(), clock())]
  late = started(clock)
  clock.passes(5.0)  # its host is stopped before its first line
  failures.append(Interruption(2, interruptions.LOST_HOST, 'host 0 was lost', None, clock()))
  clock.passes(6.0)
  with started(clock) as third:
    trains(late, clock, tmp_path, 0, first_step=4, facts=known(failures[0]))
    trains(third, clock, tmp_path, 4, first_step=4, facts=known(*failures))
  killed(late)
  found = accounts(tmp_path)
  assert len(found.processes) == 2
  assert [cost.cause for cost in costs_of(found)] == ['process 1 failed', 'host 0 was lost']
  total = pytest.approx(clock() - 1_000_000)
  assert math.fsum(found.seconds.values()) == found.wall_seconds == total


def test_a_start_that_waits_for_another_launch_hides_no_line_of_it(tmp_path, clock):
  first, second = started(clock), started(clock)
  trains(first, clock, tmp_path, 4, first_step=0, facts=known())
  first.ends('SIGTERM')
  killed(first)
  other = interruptions.facts(interruptions.variables('run2', ()))
  with second:
    trains(second, clock, tmp_path, 4, first_step=4, facts=other)
  found = accounts(tmp_path)
  assert found.processes[0].process.end == 'SIGTERM'
  assert found.seconds['productive'] == pytest.approx(8 * 1.5)


def test_starts_that_failed_before_their_first_line_have_their_own_costs(tmp_path, clock):
  first = started(clock)
  trains(first, clock, tmp_path, 4, first_step=0)
  killed(first)
  clock.passes(1.0)
  failures = [Interruption(1, 'process killed', 'process 1 failed (SIGKILL)', 4, clock(), clock())]
  for number in (2, 3):
    clock.passes(20.0)
    error = 'OSError: no'
    failures.append(
      Interruption(number, 'process crashed', 'process 0 failed', None, clock(), None, error)
    )
  clock.passes(7.0)
  with started(clock) as second:
    trains(second, clock, tmp_path, 4, first_step=0, facts=known(*failures))
  with started(clock) as third:  # has the older ones as well
    clock.passes(2.0)
    joined = Interruption(4, interruptions.JOINED, 'host 2 joins', 4, clock(), clock())
    trains(third, clock, tmp_path, 4, first_step=4, facts=known(*failures, joined))
  costs = costs_of(accounts(tmp_path))
  assert [(c.kind, c.error) for c in costs] == [
    ('process killed', ''),
    ('process crashed', 'OSError: no'),
    ('process crashed', 'OSError: no'),
    ('host joined', ''),
  ]
  assert [c.restarting for c in costs[:3]] == pytest.approx([20, 20, 7 + 13])
  assert [c.repeated_steps for c in costs] == [4, 0, 0, 0]
  assert [c.noticing for c in costs[1:3]] == [None, None]


def test_a_failure_before_the_first_line_of_the_run_is_known(tmp_path, clock):
  failure = Interruption(1, 'process killed', 'process 1 failed (SIGKILL)', None, clock(), None)
  clock.passes(6.0)
  with started(clock) as goodput:
    trains(goodput, clock, tmp_path, 4, first_step=0, facts=known(failure))
  (cost,) = costs_of(accounts(tmp_path))
  assert (cost.restarting, cost.step, cost.total) == (6.0, None, 6.0)


@pytest.mark.parametrize('ahead', [-1e5, 1e5])
def test_the_clock_of_another_host_changes_no_sum(tmp_path, clock, ahead):
  first = started(clock)
  trains(first, clock, tmp_path, 4, first_step=0)
  killed(first)
  clock.passes(10.0)
  at = clock() + ahead
  failure = Interruption(1, 'process killed', 'process 1 failed (SIGKILL)', 9, at, at - 3)
  with started(clock) as second:
    trains(second, clock, tmp_path, 4, first_step=2, facts=known(failure))
  found = accounts(tmp_path)
  (cost,) = costs_of(found)
  assert cost.total == pytest.approx(2 * 1.5 + 10 + 13) and found.lost_steps == 2
  assert math.fsum(found.seconds.values()) == pytest.approx(clock() - 1_000_000)


@pytest.mark.parametrize(
  'end, facts, again, want',
  [
    (None, {}, {}, ('unknown', 'killed, cause unknown')),
    (
      None,
      {'job': '81'},
      {'job': '81', 'job_attempt': '1'},
      ('unknown', 'killed, cause unknown; the scheduler started job 81 again'),
    ),
    (None, {'job': '81'}, {'job': '81'}, ('unknown', 'killed, cause unknown')),
    ('SIGINT', {}, {}, ('stopped', 'stopped by Ctrl-C')),
    (
      'SIGTERM',
      {'job': '81'},
      {'job': '82', 'job_attempt': '1'},
      ('stopped', 'stopped by SIGTERM'),
    ),
    (
      'SIGTERM',
      {'job': '81'},
      {'job': '81', 'job_attempt': '1'},
      ('stopped', 'stopped by SIGTERM; the scheduler started job 81 again'),
    ),
    (
      'SIGUSR1',
      {'job': '81', 'job_end': 1_000_200.0},
      {'job': '81', 'job_attempt': '1'},
      (
        'stopped',
        'stopped by SIGUSR1, at the time limit of the job; the scheduler started job 81 again',
      ),
    ),
    ('TrainingError', {}, {}, ('process crashed', 'ended by TrainingError')),
  ],
)
def test_without_launch_the_ledger_names_what_is_known(tmp_path, clock, end, facts, again, want):
  first = started(clock)
  trains(first, clock, tmp_path, 4, first_step=0, facts=facts)
  if end is not None:
    first.ends(end)
  killed(first)
  clock.passes(10.0)
  with started(clock) as second:
    trains(second, clock, tmp_path, 4, first_step=4, facts=again)
  (cost,) = costs_of(accounts(tmp_path))
  assert (cost.kind, cost.cause) == want
  assert (cost.noticing, cost.restarting) == (None, pytest.approx(10 + 13))


def test_the_error_of_a_process_is_in_the_ledger(tmp_path, clock):
  with pytest.raises(ValueError), started(clock) as goodput:
    trains(goodput, clock, tmp_path, 2, first_step=0)
    raise ValueError('the reason\nand more')
  with started(clock) as goodput:
    trains(goodput, clock, tmp_path, 2, first_step=0)
  (cost,) = costs_of(accounts(tmp_path))
  assert (cost.cause, cost.error) == ('ended by ValueError', 'ValueError: the reason')


@pytest.mark.parametrize('fact', [None, [], {}, {'run': 'a', 'interruptions': [{'number': 1}]}])
def test_damaged_facts_of_launch_are_left_out(tmp_path, clock, fact):
  for first_step in (0, 2):
    with started(clock) as goodput:
      trains(goodput, clock, tmp_path, 2, first_step=first_step, facts={'launch': fact})
      goodput.ends('SIGTERM')
  assert [c.cause for c in costs_of(accounts(tmp_path))] == ['stopped by SIGTERM']
