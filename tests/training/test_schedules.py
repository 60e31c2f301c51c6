"""Schedules at the steps where they turn."""

import numpy as np
import pytest

from t5x_gpu.errors import ConfigError
from t5x_gpu.training import schedules


def at(schedule, *steps):
  return [float(schedule(step)) for step in steps]


def test_constant_warms_up_and_the_first_step_already_learns():
  np.testing.assert_allclose(
    at(schedules.constant(2.0, warmup_steps=4), 0, 1, 3, 4, 99), [0.5, 1.0, 2.0, 2.0, 2.0]
  )
  assert at(schedules.constant(2.0), 0) == [2.0]


def test_rsqrt_is_flat_for_its_warmup_then_falls_with_the_root_as_t5x():
  np.testing.assert_allclose(
    at(schedules.rsqrt(1.0, warmup_steps=100), 0, 100, 400), [0.1, 0.1, 0.05]
  )


def test_linear_ends_at_its_final_value_and_stays_there():
  schedule = schedules.linear(1.0, total_steps=110, warmup_steps=10, final=0.2)
  np.testing.assert_allclose(
    at(schedule, 9, 10, 60, 110, 500), [1.0, 1.0, 0.6, 0.2, 0.2], rtol=1e-6
  )


def test_cosine_is_half_way_at_half_time():
  schedule = schedules.cosine(1.0, total_steps=110, warmup_steps=10)
  np.testing.assert_allclose(
    at(schedule, 4, 10, 60, 110, 500), [0.5, 1.0, 0.5, 0.0, 0.0], atol=1e-6
  )


@pytest.mark.parametrize('make', [schedules.linear, schedules.cosine])
def test_a_run_shorter_than_its_warmup_stays_in_it(make):
  np.testing.assert_allclose(
    at(make(1.0, total_steps=5, warmup_steps=10), 0, 4), [0.1, 0.5], rtol=1e-6
  )


@pytest.mark.parametrize('scaling, factor', [(None, 1.0), ('linear', 16.0), ('sqrt', 4.0)])
def test_learning_rate_grows_with_the_replicas_as_asked(scaling, factor):
  assert schedules.replica_factor(scaling, 16) == factor


def test_an_unknown_scaling_is_refused_with_the_nearest_one():
  with pytest.raises(ConfigError, match="'linaer' is not one of .* Did you mean 'linear'"):
    schedules.replica_factor('linaer', 2)
