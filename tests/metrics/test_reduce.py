"""Means are divided once, over all steps, and never hide what is wrong."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.metrics import reduce


def test_mean_over_steps_weighs_tokens_not_steps():
  acc = reduce.Accumulator()
  acc.add({'loss': (10.0, 1.0)})
  acc.add({'loss': (9.0, 9.0)})
  assert acc.means(prefix='train/').values == {'train/loss': 1.9}  # a mean of means would be 5.5


def test_jax_numpy_and_python_scalars_give_the_same_sums():
  acc = reduce.Accumulator()
  acc.add({'loss': (jnp.float32(1.5), jnp.int32(2))})
  acc.add({'loss': (np.float64(1.5), np.int64(2))})
  acc.add({'loss': (1.5, 2)})
  assert acc.sums() == {'loss': (4.5, 6.0)}
  assert all(type(x) is float for x in acc.sums()['loss'])


def test_sums_of_a_jitted_sharded_step_are_accepted():
  mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  x = jax.device_put(jnp.arange(16.0), jax.NamedSharding(mesh, jax.P('data')))
  sums = jax.jit(lambda x: {'loss': (x.sum(), jnp.float32(x.size))})(x)
  assert reduce.means(reduce.to_host(sums)).values == {'loss': 7.5}


def test_single_tokens_survive_beyond_the_precision_of_float32():
  acc = reduce.Accumulator()
  acc.add({'tokens': (float(2**24), 1.0)})
  for _ in range(3):
    acc.add({'tokens': (jnp.float32(1), jnp.float32(0))})
  assert acc.sums()['tokens'] == (2**24 + 3, 1.0)


def test_weight_zero_reports_the_name_without_a_value():
  result = reduce.means({'loss': (0.0, 0.0), 'accuracy': (1.0, 2.0)}, prefix='eval/')
  assert result.values == {'eval/accuracy': 0.5}
  assert result.empty == ('eval/loss',)


def test_nan_times_weight_zero_is_not_taken_for_missing_data():
  result = reduce.means({'loss': (math.nan, 0.0)})
  assert math.isnan(result.values['loss']) and result.empty == ()


def test_one_nan_step_makes_the_window_nan():
  acc = reduce.Accumulator()
  acc.add({'loss': (1.0, 1.0)})
  acc.add({'loss': (jnp.float32(jnp.nan), 1.0)})
  assert math.isnan(acc.means().values['loss'])


def test_thousands_of_steps_keep_few_pending_and_lose_none():
  acc = reduce.Accumulator()
  for i in range(1000):
    acc.add({'loss': (float(i), 1.0)})
    assert len(acc._pending) <= 256
  assert acc.sums() == {'loss': (499500.0, 1000.0)}


def test_reset_begins_a_new_window_and_a_name_may_appear_late():
  acc = reduce.Accumulator()
  acc.add({'loss': (1.0, 1.0)})
  acc.reset()
  acc.add({'loss': (3.0, 1.0)})
  acc.add({'loss': (3.0, 1.0), 'z_loss': (0.5, 1.0)})
  assert acc.means().values == {'loss': 3.0, 'z_loss': 0.5}


@pytest.mark.parametrize('bad', [(1.0,), (1.0, 2.0, 3.0), (np.ones(2), 1.0)])
def test_what_is_not_a_pair_of_scalars_is_refused_by_name(bad):
  with pytest.raises(ValueError, match='loss'):
    reduce.to_host({'loss': bad})
