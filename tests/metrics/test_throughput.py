"""StepTimer against a clock that the test moves."""

import logging

import pytest

from t5x_gpu.metrics import throughput


class Clock:
  now = 100.0

  def __call__(self) -> float:
    return self.now

  def sleep(self, seconds: float) -> None:
    self.now += seconds


def _timer(**kwargs):
  clock = Clock()
  return throughput.StepTimer(
    kwargs.pop('total_steps', 10), clock=clock, tokens_per_step=1000, **kwargs
  ), clock


def _step(timer, clock, seconds, wait=0.0):
  with timer.input_wait():
    clock.sleep(wait)
  clock.sleep(seconds - wait)
  return timer.step_done()


def test_speed_is_the_mean_over_the_steps_of_a_window():
  timer, clock = _timer()
  _step(timer, clock, 2.0)
  _step(timer, clock, 4.0)
  times = timer.window()
  assert times.step_seconds == 3.0
  assert times.tokens_per_second == pytest.approx(2000 / 6)


def test_median_ignores_one_slow_step():
  timer, clock = _timer()
  for seconds in (1.0, 1.0, 10.0):
    _step(timer, clock, seconds)
  times = timer.window()
  assert times.median_step_seconds == 1.0 and times.step_seconds == 4.0


def test_input_wait_is_a_share_of_the_step():
  timer, clock = _timer()
  _step(timer, clock, 2.0, wait=0.5)
  _step(timer, clock, 2.0, wait=0.5)
  assert timer.window().input_wait_fraction == 0.25


def test_pauses_count_for_no_step_and_are_reported_by_name():
  timer, clock = _timer()
  _step(timer, clock, 2.0)
  with timer.pause('save'):
    clock.sleep(7.0)
  with timer.pause('eval'):
    clock.sleep(5.0)
  with timer.pause('save'):
    clock.sleep(1.0)
  _step(timer, clock, 2.0)
  times = timer.window()
  assert times.step_seconds == 2.0 and times.tokens_per_second == 500.0
  assert times.pauses == {'save': 8.0, 'eval': 5.0}
  assert timer.window().pauses == {}


def test_pause_and_wait_are_kept_when_they_raise():
  timer, clock = _timer()
  with pytest.raises(StopIteration):
    with timer.pause('eval'):
      clock.sleep(3.0)
      raise StopIteration
  _step(timer, clock, 2.0)
  assert timer.window().step_seconds == 2.0


def test_nested_pauses_are_refused_and_leave_the_timer_usable():
  timer, clock = _timer()
  with pytest.raises(ValueError, match='save.*eval'):
    with timer.pause('eval'):
      clock.sleep(1.0)
      with timer.pause('save'):
        pass
  _step(timer, clock, 2.0)
  times = timer.window()
  assert times.step_seconds == 2.0 and times.pauses == {'eval': 1.0}


def test_eta_counts_the_remaining_steps_and_the_usual_pauses():
  timer, clock = _timer(total_steps=10, first_step=4)
  assert timer.eta_seconds() is None
  _step(timer, clock, 2.0)
  assert timer.eta_seconds() == 5 * 2.0
  with timer.pause('save'):
    clock.sleep(2.0)
  _step(timer, clock, 2.0)
  assert timer.eta_seconds() == 4 * 3.0  # (2 + 2 + 2) / 2 seconds each
  for _ in range(4):
    _step(timer, clock, 2.0)
  assert timer.eta_seconds() == 0.0


def test_window_without_a_step_has_no_speed():
  timer, _ = _timer()
  times = timer.window()
  assert times.step_seconds is None and times.tokens_per_second is None and times.metrics() == {}


def test_metrics_have_the_names_of_the_metrics_file():
  timer, clock = _timer()
  _step(timer, clock, 2.0, wait=1.0)
  assert timer.window().metrics() == {
    'train/step_seconds': 2.0,
    'train/step_seconds_median': 2.0,
    'train/tokens_per_second': 500.0,
    'train/input_wait_fraction': 0.5,
    'train/dispatch_seconds': 0.0,
    'train/host_seconds': 2.0,
  }


def test_parts_of_a_step_are_means_of_the_window():
  timer, clock = _timer()
  for _ in range(2):
    with timer.dispatch():
      clock.sleep(1.0)
    with timer.device_wait():
      clock.sleep(4.0)
    timer.step_done()
  times = timer.window()
  assert (times.step_seconds, times.dispatch_seconds, times.host_seconds) == (5.0, 1.0, 1.0)


def test_restart_forgets_set_up_time():
  timer, clock = _timer()
  clock.sleep(60.0)
  timer.restart()
  _step(timer, clock, 1.0)
  assert timer.window().step_seconds == 1.0


def test_mfu_is_flops_over_peak():
  assert throughput.mfu(1e12, step_seconds=2.0, peak_flops=1e12) == 0.5


def test_mfu_is_unknown_without_a_peak():
  assert throughput.mfu(1e12, step_seconds=2.0, peak_flops=None) is None


def test_mfu_above_one_is_unknown_and_says_why(caplog):
  with caplog.at_level(logging.WARNING):
    assert throughput.mfu(5e12, step_seconds=1.0, peak_flops=1e12) is None
  assert '500%' in caplog.text and 'pairs of causal attention that kernels skip' in caplog.text


def test_a_step_is_slow_against_the_median_of_the_last_200():
  timer, clock = _timer()
  for _ in range(199):
    _step(timer, clock, 1.0)
  _step(timer, clock, 1.4)
  assert not timer.last_is_slow(1.5)
  _step(timer, clock, 1.6)
  assert timer.last_is_slow(1.5) and not timer.last_is_slow(2.0)
