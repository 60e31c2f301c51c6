"""Schedules at the steps where they turn."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from t5x_gpu.errors import ConfigError
from t5x_gpu.training import schedules
from tests.messages import raises


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
  with raises(ConfigError):
    schedules.replica_factor('linaer', 2)


@pytest.mark.parametrize(
  'factors, want',
  [
    ('constant', [2.0] * 6),
    ('constant * linear_warmup', [1e-8, 0.5, 1.5, 2.0, 2.0, 2.0]),
    ('constant * rsqrt_decay', [1.0, 1.0, 1.0, 1.0, 2 / 5**0.5, 0.2]),
    ('constant * rsqrt_normalized_decay', [2.0, 2.0, 2.0, 2.0, 4 / 5**0.5, 0.4]),
    ('linear_decay', [1e-8, 0.5, 1.5, 2.0, 1.8, 1e-8]),
    ('constant * decay_every', [2.0, 2.0, 2.0, 2.0, 0.2, 2e-8]),
    (
      'constant * cosine_decay',
      [2.0, 2.0, 2.0, 2.0, 1 + np.cos(np.pi / 10), 1 + np.cos(0.6 * np.pi)],
    ),
  ],
)
def test_factors_have_t5xs_values_where_they_turn(factors, want):
  schedule = schedules.factors(
    factors,
    base_learning_rate=2.0,
    warmup_steps=4,
    decay_factor=0.1,
    steps_per_decay=5,
    steps_per_cycle=10,
  )
  got = at(schedule, 0, 1, 3, 4, 5, 100)
  np.testing.assert_allclose(got[:5], want[:5], rtol=1e-6)
  np.testing.assert_allclose(got[5], want[5], rtol=1e-4, atol=1e-8)


def test_factors_count_from_their_offset_and_have_a_floor():
  schedule = schedules.factors(
    'constant * linear_warmup',
    base_learning_rate=1.0,
    warmup_steps=10,
    step_offset=100,
    min_learning_rate=0.25,
  )
  np.testing.assert_allclose(at(schedule, 0, 100, 101, 105, 110), [0.25, 0.25, 0.25, 0.5, 1.0])


def test_factor_that_does_not_exist_is_named():
  with pytest.raises(ConfigError) as e:
    schedules.factors('constant * rsqrt_decai')
  assert e.value.parameters == ('factors.factors',)
  assert "'rsqrt_decay'" in e.value.what


def test_what_a_custom_schedule_does_in_a_longer_run_is_unknown():
  ours = schedules.constant(0.1), schedules.rsqrt()
  assert [schedules.with_total_steps(schedule, 8) for schedule in ours] == list(ours)
  assert float(schedules.with_total_steps(schedules.linear(1.0, total_steps=4), 8)(4)) == 0.5
  assert schedules.with_total_steps(lambda step: 0.1, 8) is None


def warmup_stable_decay(step):
  return lambda step: 0.1


@pytest.mark.parametrize(
  'schedule',
  [
    warmup_stable_decay,
    lambda step: 0.1 if step < 100 else 0.01,
    lambda step: np.minimum(step, 100) * 0.1,
    lambda step: jnp.zeros((2,)),
    lambda step: None,
  ],
  ids=['no parentheses', 'if', 'numpy', 'vector', 'none'],
)
def test_a_learning_rate_other_than_a_number_is_refused(schedule):
  with raises(ConfigError, parameters=('train.learning_rate',)):
    jax.eval_shape(lambda step: schedules.checked_rate(schedule, step), jnp.int32(0))


def test_factors_without_a_warmup_have_t5xs_rates_after_the_first_step():
  settings = dict(
    base_learning_rate=2.0, warmup_steps=0, decay_factor=0.25, min_learning_rate=0.125
  )
  for factors, want in (
    ('constant * linear_warmup', [0.125, 2.0, 2.0]),
    ('constant * rsqrt_decay', [2.0, 2.0, 1.0]),
    ('linear_decay', [0.125, 1.5, 0.125]),
  ):
    np.testing.assert_allclose(at(schedules.factors(factors, **settings), 0, 1, 4), want)


@pytest.mark.parametrize(
  'factors, setting, value',
  [
    ('constant * linear_warmup', 'warmup_steps', -1),
    ('rsqrt_decay', 'warmup_steps', -1),
    ('constant * rsqrt_normalized_decay', 'warmup_steps', 0),
    ('decay_every', 'steps_per_decay', 0),
    ('cosine_decay', 'steps_per_cycle', 0),
    ('constant', 'base_learning_rate', float('inf')),
  ],
)
def test_a_factor_that_would_divide_by_zero_is_refused(factors, setting, value):
  with raises(ConfigError) as e:
    schedules.factors(factors, **{setting: value})
  assert e.value.parameters == (f'factors.{setting}',)
  unused = {'decay_every': 'constant', 'cosine_decay': 'constant'}.get(factors)
  if unused:
    schedules.factors(unused, **{setting: value})


rates = st.sampled_from((0.0, 1e-8, 0.5, 10.0, float('inf'), float('nan')))
steps = st.sampled_from((-1, 0, 1, 2, 10, 100))
SETTINGS = {
  schedules.constant: dict(learning_rate=rates, warmup_steps=steps),
  schedules.rsqrt: dict(base=rates, warmup_steps=steps),
  schedules.linear: dict(peak=rates, final=rates, warmup_steps=steps, total_steps=steps),
  schedules.cosine: dict(peak=rates, final=rates, warmup_steps=steps, total_steps=steps),
  schedules.factors: dict(
    factors=st.lists(st.sampled_from(schedules.FACTORS), min_size=1, max_size=3).map(' * '.join),
    base_learning_rate=rates,
    warmup_steps=steps,
    decay_factor=st.sampled_from((0.0, 0.5, 1.0, float('nan'))),
    steps_per_decay=steps,
    steps_per_cycle=steps,
    step_offset=st.sampled_from((-10, 0, 10)),
    min_learning_rate=rates,
  ),
}


@pytest.mark.parametrize('make', SETTINGS, ids=lambda make: make.__name__)
def test_any_settings_give_finite_rates_or_are_refused(make):
  outcomes = set()

  @settings(max_examples=40, deadline=None, derandomize=True, database=None)
  @given(st.fixed_dictionaries(SETTINGS[make]))
  def check(drawn):
    try:
      schedule = make(**drawn)
    except ConfigError as e:
      assert e.fix and e.parameters[0].startswith(f'{make.__name__}.')
      outcomes.add('refused')
      return
    found = at(schedule, 0, 1, 10, 100)
    assert np.isfinite(found).all() and min(found) >= 0, found
    outcomes.add('finite')

  check()
  assert outcomes == {'refused', 'finite'}
