"""The watchdog with a fake clock and store; real processes are in tests/cluster."""

import json
import threading
import time

import jax
import pytest

from t5x_gpu.errors import CheckpointError, ConfigError
from t5x_gpu.runtime import watchdog
from t5x_gpu.runtime.watchdog import (
  EXIT_ERROR,
  EXIT_RANK_DEAD,
  EXIT_STUCK,
  Beat,
  Watchdog,
  WatchdogConfig,
)
from tests.messages import raises


class Left(Exception):
  """Stands for the exit of the process."""


class DictStore:
  """The coordination service's store, in one process."""

  def __init__(self):
    self.values = {}
    self.reachable = True
    self.ended = False
    self.num_bytes = 0  # read
    self.barrier = threading.Barrier(2)

  def key_value_set(self, key, value, allow_overwrite=False):
    self._check()
    assert allow_overwrite or key not in self.values
    self.values[key] = value

  def key_value_dir_get(self, key):
    self._check()
    found = [(k, v) for k, v in self.values.items() if k.startswith(key)]
    self.num_bytes += sum(len(k) + len(v) for k, v in found)
    return found

  def wait_for_all(self, name, *, seconds):
    self.barrier.wait(seconds)

  def has_ended(self):
    return self.ended

  def _check(self):
    if not self.reachable:
      raise RuntimeError('UNAVAILABLE')

  def verdicts(self):
    return [json.loads(v) for k, v in self.values.items() if 'verdict' in k]


class Clock:
  now = 0.0

  def __call__(self):
    return self.now


@pytest.fixture
def clock():
  return Clock()


def make(clock, store=None, index=0, count=1, **config):
  def leave(code):
    raise Left(code)

  config = WatchdogConfig(**{'period_seconds': 0.001, **config})
  return Watchdog(
    config, process_index=index, process_count=count, store=store, leave=leave, clock=clock
  )


def poll(dog):
  """Runs both threads for one period."""
  if dog._store is not None:
    dog._talk()
  dog._watch()


def test_a_step_that_outlasts_its_deadline_ends_the_process_with_its_stacks(clock, capfd):
  dog = make(clock, step_seconds=10)
  dog.step_done(7)
  clock.now = 10
  poll(dog)
  clock.now = 10.5
  with pytest.raises(Left, match=str(EXIT_STUCK)):
    poll(dog)
  err = capfd.readouterr().err
  assert "in phase 'step' for 10 s" in err
  assert 'test_a_step_that_outlasts' in err  # the stack of the stuck thread


def test_the_stack_of_the_main_thread_is_printed_with_110_others(clock, capfd):
  ended = threading.Event()
  others = [threading.Thread(target=ended.wait) for _ in range(110)]
  for thread in others:
    thread.start()
  try:
    test_a_step_that_outlasts_its_deadline_ends_the_process_with_its_stacks(clock, capfd)
  finally:
    ended.set()
    for thread in others:
      thread.join()


def test_slow_steps_raise_the_deadline_of_the_next(clock):
  dog = make(clock, step_seconds=10, step_factor=20)
  for step in range(5):
    dog.step_done(step)
    clock.now += 2
  dog.step_done(5)
  clock.now += 39
  poll(dog)
  clock.now += 2
  with pytest.raises(Left):
    poll(dog)


def test_a_save_has_its_own_deadline_and_the_step_starts_again_after_it(clock):
  dog = make(clock, step_seconds=10, save_seconds=100)
  dog.step_done(1)
  with dog.phase('save'):
    clock.now += 90
    poll(dog)
  clock.now += 9
  poll(dog)
  clock.now += 2
  with pytest.raises(Left):
    poll(dog)


def test_the_time_of_a_suspended_process_does_not_count(clock):
  dog = make(clock, step_seconds=10, period_seconds=1)
  dog.step_done(7)
  for pause in (1, 1, 3600, 1, 1, 1, 1, 1, 1):  # Ctrl-Z and fg, or `scontrol suspend` and resume
    clock.now += pause
    dog._look()
  clock.now += 2  # after 11 seconds without the pause
  with pytest.raises(Left, match=str(EXIT_STUCK)):
    dog._look()


def test_conversion_lasts_as_long_as_it_progresses_and_the_others_wait_for_process_0(clock):
  converts, waits = (
    make(clock, DictStore(), index=i, count=2, convert_seconds=100, compile_seconds=10)
    for i in range(2)
  )
  with converts.phase('convert'), waits.phase('convert'):
    for _ in range(3):
      clock.now += 90
      converts.progress()
      poll(converts)
      poll(waits)
    clock.now += 101
    poll(waits)
    with pytest.raises(Left, match=str(EXIT_STUCK)):
      poll(converts)
  clock.now += 9
  poll(waits)  # the set-up has its whole deadline after the conversion


def test_a_rank_without_heartbeats_is_declared_dead_by_name_on_all(clock, capfd):
  store = DictStore()
  dogs = [make(clock, store, index=i, count=3, dead_seconds=15) for i in range(3)]
  for dog in dogs:
    dog.step_done(41)
    poll(dog)
  for _ in range(5):  # process 2 is silent from here on
    clock.now += 2
    poll(dogs[1])
    poll(dogs[0])
  clock.now += 10
  poll(dogs[1])
  with pytest.raises(Left, match=str(EXIT_RANK_DEAD)):
    poll(dogs[0])
  assert 'process 2 on' in capfd.readouterr().err
  with pytest.raises(Left, match=str(EXIT_RANK_DEAD)):
    poll(dogs[1])
  err = capfd.readouterr().err
  assert 'process 2 on' in err and "step 41 in phase 'step'" in err and 'process 1 on' not in err


def test_the_report_of_a_stuck_run_names_the_rank_that_is_behind(clock, capfd):
  store = DictStore()
  dogs = [make(clock, store, index=i, count=3, step_seconds=10) for i in range(3)]
  for i, dog in enumerate(dogs):
    dog.step_done(42 if i != 1 else 41)
    poll(dog)
  clock.now = 11
  with pytest.raises(Left, match=str(EXIT_STUCK)):
    poll(dogs[0])
  err = capfd.readouterr().err
  behind = next(line for line in err.splitlines() if line.startswith('Behind the others'))
  assert 'process 1 on' in behind and 'process 0' not in behind and 'process 2' not in behind


def test_the_first_verdict_is_the_verdict_of_all_and_process_0_alone_reads_the_heartbeats(
  clock, capfd
):
  store = DictStore()
  dogs = [make(clock, store, index=i, count=200, compile_seconds=100) for i in range(200)]
  for dog in dogs:
    dog._talk()
  clock.now = 101
  store.num_bytes = 0
  for dog in reversed(dogs):
    with pytest.raises(Left):
      dog._watch()
  err = capfd.readouterr().err
  assert len(store.verdicts()) == 1
  assert err.count('WATCHDOG: Process 199 on') == 200
  assert err.count('The output of process 0 has the heartbeats') == 199
  assert err.count('Heartbeats:\n') == 1
  assert store.num_bytes < 200 * 1000 + 200 * 500  # not 200 times 200 heartbeats


def test_more_ranks_beat_less_often(clock):
  config = WatchdogConfig()
  periods = [
    Watchdog(config, process_index=0, process_count=n, store=DictStore(), clock=clock)._period
    for n in (1, 512, 4096)
  ]
  assert periods == [1, 1, 8]


def test_a_rank_that_never_came_is_listed(clock, capfd):
  dog = make(clock, DictStore(), count=2, compile_seconds=5)
  poll(dog)
  clock.now = 6
  with pytest.raises(Left):
    poll(dog)
  assert 'Never heard from: process 1' in capfd.readouterr().err


def test_process_zero_out_of_reach_ends_the_others(clock, capfd):
  store = DictStore()
  dogs = [make(clock, store, index=i, count=2, dead_seconds=15) for i in range(2)]
  dogs[0].step_done(7)
  for dog in dogs:
    poll(dog)
  store.reachable = False
  clock.now = 14
  poll(dogs[1])
  clock.now = 16
  with pytest.raises(Left, match=str(EXIT_RANK_DEAD)):
    poll(dogs[1])
  err = capfd.readouterr().err
  assert 'has not reached process 0 on' in err and 'last seen at step 7' in err
  assert 'for 16 s: UNAVAILABLE' in err


def test_the_end_of_process_zero_is_reported_at_once_by_name(clock, capfd):
  store = DictStore()
  dogs = [make(clock, store, index=i, count=2, period_seconds=0.5) for i in range(2)]
  for dog in dogs:
    poll(dog)
  store.reachable, store.ended = False, True
  poll(dogs[1])
  clock.now = 2
  with pytest.raises(Left, match=str(EXIT_RANK_DEAD)):
    poll(dogs[1])
  assert 'Lost process 0 on' in capfd.readouterr().err


def test_a_request_that_never_returns_does_not_keep_the_watch_from_ending_the_process(clock):
  """What a stopped or cut-off process 0 does to the others: no error, no answer."""

  class Silent(DictStore):
    def key_value_set(self, key, value, allow_overwrite=False):
      never.wait()

  never = threading.Event()
  codes = []
  with Watchdog(
    WatchdogConfig(period_seconds=0.01, dead_seconds=0.2),
    process_index=1,
    process_count=2,
    store=Silent(),
    leave=codes.append,
  ) as dog:
    deadline = time.monotonic() + 20
    while not codes and time.monotonic() < deadline:
      time.sleep(0.01)
    dog._stop.set()
    never.set()
    dog._store.barrier.abort()
  assert codes[0] == EXIT_RANK_DEAD


@pytest.mark.slow
def test_the_block_ends_together_and_nobody_is_declared_dead_meanwhile():
  store, left, ends, saved = DictStore(), [], [], []
  config = WatchdogConfig(period_seconds=0.01, dead_seconds=1.5)

  def run(index, seconds):
    with Watchdog(
      config, process_index=index, process_count=2, store=store, leave=left.append
    ) as dog:
      dog.step_done(1)
      with dog.phase('save'):
        time.sleep(seconds)
        saved.append(time.monotonic())
    ends.append(time.monotonic())

  threads = [threading.Thread(target=run, args=pair) for pair in ((0, 0), (1, 3))]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not left and min(ends) >= max(saved)


def test_a_failure_reaches_the_others_with_its_reason(clock, capfd):
  store = DictStore()
  dogs = [make(clock, store, index=i, count=2) for i in range(2)]
  dogs[1].step_done(5)
  with pytest.raises(ValueError):
    with dogs[1]:
      raise ValueError('no such file\nand more')
  with pytest.raises(Left, match=str(EXIT_ERROR)):
    poll(dogs[0])
  err = capfd.readouterr().err
  assert 'Process 1 on' in err and 'failed after step 5: ValueError: no such file' in err


def test_an_interrupted_process_does_not_count_as_silent(clock):
  store = DictStore()
  with pytest.raises(KeyboardInterrupt):
    with make(clock, store, index=1, count=2):
      raise KeyboardInterrupt
  assert store.verdicts()[0]['text'].endswith('KeyboardInterrupt')


@pytest.mark.quick_cases('error0-*')
@pytest.mark.parametrize(
  'error, waits',
  [
    (jax.errors.JaxRuntimeError('UNKNOWN: Gloo all-reduce failed: Connection closed'), True),
    (CheckpointError('checkpoint_3: JaxRuntimeError: DEADLINE_EXCEEDED: Barrier timed out.'), True),
    (jax.errors.JaxRuntimeError('INTERNAL: CpuCallback error: ValueError: boom'), False),
    (jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory'), False),
  ],
)
def test_a_broken_collective_waits_for_the_name_of_the_dead_rank(clock, error, waits):
  store = DictStore()
  dog = make(clock, store, index=1, count=3, dead_seconds=2)
  started = time.monotonic()
  with pytest.raises(type(error)):
    with dog:
      raise error
  assert (time.monotonic() - started > 2) == waits
  assert store.verdicts()[0]['kind'] == 'failed'  # no rank was declared dead: this rank failed


def test_an_own_user_error_on_its_way_wins_over_the_verdict_of_another_process(clock, capfd):
  store = DictStore()
  first, second = [make(clock, store, index=i, count=2, dead_seconds=5) for i in (1, 0)]
  with raises(ConfigError):
    with first:
      raise ConfigError('Wrong.')
  raising = threading.Event()

  def slower():
    second._main_thread = threading.get_ident()
    try:
      raise ConfigError('Wrong.')
    except ConfigError as e:
      raising.set()
      time.sleep(0.3)  # a checkpointer that commits, say
      second._explain(e)

  thread = threading.Thread(target=slower)
  thread.start()
  raising.wait()
  second._talk()
  second._watch()
  thread.join()
  assert 'WATCHDOG' not in capfd.readouterr().err


def test_when_collectives_have_broken_the_silent_one_is_named_sooner(clock, capfd):
  """On CPU devices gloo aborts the whole process some seconds after it has lost another."""
  store = DictStore()
  dogs = [make(clock, store, index=i, count=3, dead_seconds=15, period_seconds=1) for i in range(3)]
  for dog in dogs:
    dog._talk()
  for _ in range(3):
    clock.now += 2
    dogs[0]._talk()
  assert not store.verdicts()
  try:
    raise jax.errors.JaxRuntimeError('UNKNOWN: Gloo all-reduce failed: Connection closed by peer')
  except jax.errors.JaxRuntimeError:
    dogs[1]._talk()
  dogs[0]._talk()
  assert 'No sign of life for 4 s from process 2 on' in store.verdicts()[0]['text']
  assert 'process 1' not in store.verdicts()[0]['text']


def beat(rank, step=5, **values):
  return Beat(
    **{
      'rank': rank,
      'host': 'h',
      'pid': 10 + rank,
      'count': 1,
      'step': step,
      'phase': 'step',
      'seconds': 9,
      'where': 'reduce.py:48 (to_host)',
      'waits': True,
      **values,
    }
  )


@pytest.mark.parametrize(
  'beats, late',
  [
    ([beat(0), beat(1), beat(2, step=4)], [2]),
    ([beat(0), beat(1, waits=False), beat(2)], [1]),
    ([beat(0, step=4), beat(1, step=4, waits=False), beat(2)], [1]),
    ([beat(0, waits=False, broken=True), beat(1, waits=False), beat(2)], [1]),
    ([beat(0), beat(1)], []),
    ([], []),
  ],
)
def test_behind_are_those_whom_the_others_wait_for(beats, late):
  assert [b.rank for b in watchdog.processes_behind(beats)] == late


def test_a_heartbeat_says_where_its_thread_is():
  ready, go = threading.Event(), threading.Event()

  def wait():
    ready.set()
    go.wait()

  thread = threading.Thread(target=wait)
  thread.start()
  ready.wait()
  where, waits = watchdog.place_in_code(thread.ident)
  assert where.startswith('threading.py') and not waits
  go.set()
  thread.join()


def test_the_table_of_a_big_run_is_short():
  text = watchdog.heartbeats_table(
    {i: beat(i, waits=i != 700) for i in range(1000)}, process_count=1001
  )
  assert len(text.splitlines()) < 40
  assert 'Behind the others: process 700 on h' in text and 'Never heard from: process 1000' in text


def test_the_thread_polls_by_itself_and_stops_with_the_run():
  codes = []
  config = WatchdogConfig(period_seconds=0.01, compile_seconds=0.05)
  with Watchdog(config, process_index=0, process_count=1, leave=codes.append) as dog:
    deadline = time.monotonic() + 30
    while not codes and time.monotonic() < deadline:
      time.sleep(0.01)
  assert codes and set(codes) == {EXIT_STUCK}
  assert not dog._threads[0].is_alive()


def test_deadlines_must_be_positive():
  with raises(ConfigError):
    WatchdogConfig(step_seconds=0)
