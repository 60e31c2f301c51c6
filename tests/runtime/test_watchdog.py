"""The watchdog with a clock and a store of our own; real processes are in tests/cluster."""

import jax
import pytest

from t5x_gpu.errors import ConfigError
from t5x_gpu.runtime.watchdog import EXIT_RANK_DEAD, EXIT_STUCK, Watchdog, WatchdogConfig


class Left(Exception):
  """Stands for the exit of the process."""


class DictStore:
  """The coordination service's store, in one process."""

  def __init__(self):
    self.values = {}
    self.reachable = True

  def key_value_set(self, key, value, allow_overwrite=False):
    self._check()
    assert allow_overwrite or key not in self.values
    self.values[key] = value

  def key_value_dir_get(self, key):
    self._check()
    return [(k, v) for k, v in self.values.items() if k.startswith(key)]

  def _check(self):
    if not self.reachable:
      raise RuntimeError('UNAVAILABLE')


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
  return Watchdog(config, process_index=index, process_count=count, store=store, leave=leave,
                  clock=clock)


def test_a_step_that_outlasts_its_deadline_ends_the_process_with_its_stacks(clock, capfd):
  dog = make(clock, step_seconds=10)
  dog.step_done(7)
  clock.now = 10
  dog._poll()
  clock.now = 10.5
  with pytest.raises(Left, match=str(EXIT_STUCK)):
    dog._poll()
  err = capfd.readouterr().err
  assert "in phase 'step' for 10 s" in err
  assert 'test_a_step_that_outlasts' in err  # the stack of the stuck thread


def test_slow_steps_raise_the_deadline_of_the_next(clock):
  dog = make(clock, step_seconds=10, step_factor=20)
  for step in range(5):
    dog.step_done(step)
    clock.now += 2
  dog.step_done(5)
  clock.now += 39
  dog._poll()
  clock.now += 2
  with pytest.raises(Left):
    dog._poll()


def test_a_save_has_its_own_deadline_and_the_step_starts_anew_after_it(clock):
  dog = make(clock, step_seconds=10, save_seconds=100)
  dog.step_done(1)
  with dog.phase('save'):
    clock.now += 90
    dog._poll()
  clock.now += 9
  dog._poll()
  clock.now += 2
  with pytest.raises(Left):
    dog._poll()


def test_a_rank_without_heartbeats_is_declared_dead_by_name_on_all(clock, capfd):
  store = DictStore()
  dogs = [make(clock, store, index=i, count=3, dead_seconds=15) for i in range(3)]
  for dog in dogs:
    dog.step_done(41)
    dog._poll()
  for _ in range(5):  # process 2 is silent from here on
    clock.now += 2
    dogs[1]._poll()
    dogs[0]._poll()
  clock.now += 10
  dogs[1]._poll()
  with pytest.raises(Left, match=str(EXIT_RANK_DEAD)):
    dogs[0]._poll()
  assert 'process 2 on' in capfd.readouterr().err
  with pytest.raises(Left, match=str(EXIT_RANK_DEAD)):
    dogs[1]._poll()
  err = capfd.readouterr().err
  assert 'process 2 on' in err and "step 41 in phase 'step'" in err and 'process 1 on' not in err


def test_the_report_of_a_stuck_run_names_the_rank_that_is_behind(clock, capfd):
  store = DictStore()
  dogs = [make(clock, store, index=i, count=3, step_seconds=10) for i in range(3)]
  for i, dog in enumerate(dogs):
    dog.step_done(42 if i != 1 else 41)
    dog._poll()
  clock.now = 11
  with pytest.raises(Left, match=str(EXIT_STUCK)):
    dogs[0]._poll()
  err = capfd.readouterr().err
  behind = next(line for line in err.splitlines() if line.startswith('Behind the others'))
  assert 'process 1 on' in behind and 'process 0' not in behind and 'process 2' not in behind


def test_a_rank_that_never_came_is_listed(clock, capfd):
  dog = make(clock, DictStore(), count=2, compile_seconds=5)
  dog._poll()
  clock.now = 6
  with pytest.raises(Left):
    dog._poll()
  assert 'Never heard of: process 1' in capfd.readouterr().err


def test_process_zero_out_of_reach_ends_the_others(clock, capfd):
  store = DictStore()
  dog = make(clock, store, index=1, count=2, dead_seconds=15)
  dog._poll()
  store.reachable = False
  dog._poll()
  clock.now = 14
  dog._poll()
  clock.now = 16
  with pytest.raises(Left, match=str(EXIT_RANK_DEAD)):
    dog._poll()
  assert 'has not reached process 0 for 16 s' in capfd.readouterr().err


def test_a_rank_that_said_goodbye_is_not_declared_dead(clock):
  store = DictStore()
  dogs = [make(clock, store, index=i, count=2, dead_seconds=15) for i in range(2)]
  for dog in dogs:
    dog._poll()
  with dogs[1]:
    pass
  for _ in range(4):
    dogs[0]._poll()
    clock.now += 10


def test_a_failure_is_told_to_the_others_with_its_reason(clock, capfd):
  store = DictStore()
  dogs = [make(clock, store, index=i, count=2) for i in range(2)]
  dogs[1].step_done(5)
  with pytest.raises(ValueError):
    with dogs[1]:
      raise ValueError('no such file\nand more')
  with pytest.raises(Left, match=str(EXIT_RANK_DEAD)):
    dogs[0]._poll()
  err = capfd.readouterr().err
  assert 'Process 1 on' in err and 'failed at step 5: ValueError: no such file' in err


def test_a_broken_collective_waits_for_the_name_of_the_dead_rank(clock):
  store = DictStore()
  dog = make(clock, store, index=1, count=3, dead_seconds=0.01)
  with pytest.raises(jax.errors.JaxRuntimeError):
    with dog:
      raise jax.errors.JaxRuntimeError('UNKNOWN: Gloo all-reduce failed: Connection closed by peer')
  assert not [key for key in store.values if 'verdict' in key]


def test_the_thread_polls_by_itself_and_stops_with_the_run():
  codes = []
  config = WatchdogConfig(period_seconds=0.01, compile_seconds=0.05)
  with Watchdog(config, process_index=0, process_count=1, leave=codes.append) as dog:
    dog._thread.join(timeout=0.5)
  assert codes and set(codes) == {EXIT_STUCK}
  assert not dog._thread.is_alive()


def test_deadlines_must_be_positive():
  with pytest.raises(ConfigError, match='WatchdogConfig.step_seconds = 0'):
    WatchdogConfig(step_seconds=0)
