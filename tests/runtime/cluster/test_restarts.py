"""What follows when the processes of a run have ended."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from t5x_gpu.runtime.cluster.restarts import Ended, Restart, Restarts, Stop

KILLED = -9


def killed(*processes: int, step: int | None = 100) -> Ended:
  return Ended(KILLED, frozenset(processes), step)


def follow(allowed: int, *ends: Ended) -> Restart | Stop:
  """Returns what follows the last of `ends`; all before it must lead to a restart."""
  state = Restarts(allowed)
  for ended in ends[:-1]:
    state, then = state.after(ended)
    assert isinstance(then, Restart)
  return state.after(ends[-1])[1]


@pytest.mark.parametrize('code', [KILLED, -11, -6, 1, 86, 87, 139])
def test_a_failure_starts_the_run_again(code):
  assert follow(3, Ended(code, frozenset({1}), 100)) == Restart(1)
  assert follow(3, Ended(code, frozenset({1}), None)) == Restart(1)


@pytest.mark.parametrize('code', [0, 85, 130])
def test_a_run_that_is_done_or_was_asked_to_stop_ends_without_a_reason(code):
  assert follow(3, Ended(code)) == Stop()
  assert follow(3, Ended(KILLED, frozenset({0}), 5, asked=True)) == Stop()


@pytest.mark.parametrize('code', [2, 78])
def test_a_mistake_of_the_user_is_not_tried_again(code):
  assert 'the same error' in follow(3, Ended(code, frozenset({0}))).reason


def test_the_same_process_that_fails_at_the_same_step_again_ends_the_run():
  assert follow(9, killed(1), killed(1)) == Stop('it failed twice in a row after step 100')
  assert isinstance(follow(9, killed(1), killed(1, step=101)), Stop)
  assert follow(9, killed(1), killed(1, step=102)) == Restart(2)
  assert follow(9, killed(1, step=None), killed(1, step=None)) == Stop(
    'it failed twice in a row before the first step'
  )


def test_another_process_at_the_same_step_is_another_fault():
  assert follow(9, killed(1), killed(2)) == Restart(2)
  assert isinstance(follow(9, killed(1, 2), killed(2, 3)), Stop)


@pytest.mark.parametrize('code', [1, 86, 87])
def test_a_code_that_all_processes_share_does_not_distinguish_two_faults(code):
  assert isinstance(follow(9, Ended(code, frozenset({1}), 7), Ended(code, frozenset({2}), 7)), Stop)
  assert isinstance(follow(9, killed(1, step=7), Ended(code, frozenset({2}), 7)), Stop)


@pytest.mark.parametrize('code', [-11, -6, 7])
def test_all_processes_that_fail_with_the_same_code_at_the_same_step_have_the_same_fault(code):
  first, second = (Ended(code, frozenset({process}), 100) for process in (1, 2))
  assert isinstance(follow(9, first, second), Stop)
  assert follow(9, first, Ended(code, frozenset({2}), 140)) == Restart(2)
  assert follow(9, first, Ended(-7, frozenset({2}), 100)) == Restart(2)


def test_a_failure_that_left_out_a_host_ends_the_run_if_it_comes_again_elsewhere():
  state, _ = Restarts(9).after(killed(1))
  state, then = state.after(killed(1), leaves_out_hosts=True)
  assert then == Restart(2)
  assert state.after(killed(5, step=140))[1] == Restart(3)
  assert isinstance(state.after(killed(5))[1], Stop) and not state.suspects(killed(5))


def test_suspects_are_all_processes_that_caused_a_failure_that_repeats():
  state, _ = Restarts(9).after(killed(1, 2))
  assert state.suspects(killed(2, 3)) == {1, 2, 3}
  assert not state.suspects(killed(2, 3, step=140)) and not state.suspects(killed(4))
  assert not state.suspects(Ended(1, frozenset({1}), 100))


def test_a_fault_between_two_equal_ones_shows_that_they_do_not_repeat():
  assert follow(9, killed(1), killed(2, step=140), killed(1)) == Restart(3)


def test_restarts_are_counted_over_the_whole_run():
  faults = [killed(1, step=step) for step in (10, 20, 30)]
  assert follow(3, *faults) == Restart(3)
  assert follow(2, *faults) == Stop('--restarts=2 are used up')


ENDS = st.builds(
  Ended,
  code=st.sampled_from([KILLED, -11, 1, 2, 78, 85, 86, 87]),
  failed=st.frozensets(st.integers(0, 3), min_size=1),
  step=st.none() | st.integers(0, 1000),
  asked=st.booleans(),
)


# The pace of a loaded machine is not a failure.
@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 5), st.lists(ENDS, min_size=6, max_size=6))
def test_any_faults_lead_to_the_end_within_the_allowed_restarts(allowed, ends):
  state, numbers = Restarts(allowed), []
  for ended in ends:
    state, then = state.after(ended)
    if isinstance(then, Stop):
      break
    assert not ended.asked and ended.code not in (0, 2, 78, 85, 130)
    numbers.append(then.number)
  else:
    raise AssertionError('no end')
  assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) <= allowed
