"""Requests to stop in one process; several agree in cluster/test_processes.py."""

import os
import signal

import pytest

from t5x_gpu.runtime import preemption


@pytest.fixture(autouse=True)
def no_end():
  yield
  preemption.expect_end(None)


@pytest.mark.parametrize(
  'number, code',
  [(signal.SIGINT, 130), (signal.SIGTERM, 85), (signal.SIGUSR1, 85), (signal.SIGHUP, 85)],
)
def test_a_signal_is_remembered_until_the_step_is_done(number, code):
  with preemption.StopRequest() as stop:
    assert not stop.reached() and stop.exit_code == 0
    os.kill(os.getpid(), number)
    assert stop.reached()
  assert stop.signal == number and stop.exit_code == code


def test_a_second_ctrl_c_interrupts():
  with pytest.raises(KeyboardInterrupt):
    with preemption.StopRequest():
      os.kill(os.getpid(), signal.SIGINT)
      os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def handlers():
  before = {n: signal.getsignal(n) for n in preemption.PREEMPTION_SIGNALS}
  yield
  for number, handler in before.items():
    signal.signal(number, handler)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_during_set_up_stops_the_run_after_its_first_step(number, handlers):
  preemption.catch_early()
  os.kill(os.getpid(), number)
  with preemption.StopRequest() as stop:
    assert stop.reached() and stop.exit_code == 85


def test_a_second_hang_up_during_set_up_changes_nothing(handlers):  # shell and kernel send one each
  preemption.catch_early()
  os.kill(os.getpid(), signal.SIGHUP)
  os.kill(os.getpid(), signal.SIGHUP)
  with preemption.StopRequest() as stop:
    assert stop.reached() and stop.exit_code == 85


def test_a_hang_up_that_nohup_ignores_stays_ignored(handlers):
  signal.signal(signal.SIGHUP, signal.SIG_IGN)
  preemption.catch_early()
  with preemption.StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGHUP)
    assert not stop.reached()
  assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_the_time_limit_of_the_job_asks_to_stop_in_time_to_save(capfd):
  preemption.expect_end(1000.0)
  times = iter([800.0, 899.0, 901.0])
  with preemption.StopRequest(before_end_seconds=100, now=lambda: next(times)) as stop:
    assert [stop.reached() for _ in range(4)] == [False, False, True, True]
  assert stop.exit_code == 85
  assert capfd.readouterr().err.count('The time limit of the job is near') == 1


def test_a_request_prints_its_text_once(capfd):
  with preemption.StopRequest() as stop:
    stop.request('The text has changed: stopping without saving.')
    stop.request('again')
    assert stop.reached() and stop.exit_code == 85
  assert capfd.readouterr().err == '\nThe text has changed: stopping without saving.\n'


def test_without_a_known_end_there_is_no_time_limit():
  with preemption.StopRequest(before_end_seconds=100, now=lambda: 1e12) as stop:
    assert not stop.reached()
