"""AdamW against optax, Adafactor against its definition on separate matrices."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t5x_gpu.checkpoint.checkpointer import Checkpointer
from t5x_gpu.checkpoint.manifest import make_manifest
from t5x_gpu.data.synthetic import uneven_batches
from t5x_gpu.errors import ConfigError
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.partitioning.axis_rules import AxisNames
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.adafactor import Adafactor
from t5x_gpu.training.optimizers import (
  AdamW,
  Optax,
  check_optimizer,
  check_state_names,
  checked_update,
  stochastically_rounded,
)
from t5x_gpu.training.program import bytes_per_device
from t5x_gpu.training.schedules import constant
from tests import helpers_layouts
from tests.helpers_programs import build_with
from tests.messages import raises

NAMES = {'kernel': AxisNames(('layers', 'embed', 'mlp')), 'scale': AxisNames(('layers', 'embed'))}


def arrays(seed, shapes):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda shape: rng.normal(size=shape).astype(np.float32),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def run(optimizer, params, names, *, steps=3, learning_rate=0.1):
  """Returns parameters after `steps` updates with the same sequence of gradients."""
  shapes = {name: p.shape for name, p in params.items()}
  state = optimizer.init(params, names)
  update = jax.jit(
    lambda g, s, p, i: optimizer.update(
      g, s, p, names=names, learning_rate=jnp.float32(learning_rate), step=i
    )
  )
  for i in range(steps):
    params, state = update(arrays(i + 1, shapes), state, params, jnp.int32(i))
  return params


def test_adamw_is_optax_adamw_with_decay_on_matrices_only():
  names = {
    **NAMES,
    'query': {
      'kernel': AxisNames(('embed', 'heads', 'kv')),
      'bias': AxisNames(('layers', 'heads', 'kv')),
    },
  }
  shapes = {'kernel': (2, 4, 6), 'scale': (2, 4), 'query': {'kernel': (4, 2, 3), 'bias': (2, 2, 3)}}
  tx = optax.adamw(
    0.1,
    0.9,
    0.95,
    1e-8,
    weight_decay=0.3,
    mask={'kernel': True, 'scale': False, 'query': {'kernel': True, 'bias': False}},
  )
  grads = [arrays(i, shapes) for i in range(4)]
  got = want = grads[0]
  optimizer = AdamW(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.3)
  state, want_state = optimizer.init(got, names), tx.init(want)
  for i in range(1, 4):
    got, state = optimizer.update(
      grads[i], state, got, names=names, learning_rate=jnp.float32(0.1), step=jnp.int32(i)
    )
    updates, want_state = tx.update(grads[i], want_state, want)
    want = optax.apply_updates(want, updates)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, want)


@pytest.mark.parametrize(
  'transformations, reference',
  [
    ((optax.clip(0.5), optax.lion), optax.chain(optax.clip(0.5), optax.lion(0.1))),
    ((optax.adamw,), optax.adamw(0.1)),
    (
      (optax.clip_by_global_norm(1.0), functools.partial(optax.sgd, momentum=0.9)),
      optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
    ),
  ],
  ids=['clip_lion', 'adamw', 'global_norm_momentum'],
)
def test_transformations_of_optax_give_optaxs_updates(transformations, reference):
  shapes = {'kernel': (2, 4, 6), 'scale': (2, 4)}
  params = arrays(0, shapes)
  got = run(Optax(transformations), params, NAMES)
  want, state = params, reference.init(params)
  for i in range(3):
    updates, state = reference.update(arrays(i + 1, shapes), state, want)
    want = optax.apply_updates(want, updates)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), got, want)


def test_transformations_without_a_learning_rate_are_refused():
  with pytest.raises(ConfigError) as e:
    Optax([optax.clip(1.0), optax.scale_by_adam()])
  with raises(ConfigError):
    Optax([optax.clip, optax.lion])
  assert e.value.parameters == ('Optax.transformations',)


def test_state_that_is_not_shaped_like_the_parameters_is_refused():
  with pytest.raises(ConfigError) as e:
    Optax([optax.adafactor]).state_names(arrays(0, {'kernel': (2, 4, 6), 'scale': (2, 4)}), NAMES)
  assert 'cannot be split' in e.value.what


def test_optax_on_a_mesh_that_splits_its_state_equals_one_device():
  split, alone = (
    build_with(
      model=DecoderOnlyModel(dataclasses.replace(helpers_layouts.CONFIG, num_layers=1)),
      optimizer=Optax((optax.clip(0.5), functools.partial(optax.sgd, momentum=0.9))),
      learning_rate=constant(1e-2),
      partitioner=Partitioner(**axes),
      topology=Topology(1, devices),
      devices=jax.devices()[:devices],
      batch_size=8,
      task_feature_lengths={'targets': 8},
      pack=False,
    )
    for devices, axes in ((4, dict(fsdp=2, num_partitions=2)), (1, {}))
  )
  per_device = [bytes_per_device(p.abstract_state.opt_state) for p in (split, alone)]
  assert per_device[0] < 0.4 * per_device[1]
  states = []
  for program in (split, alone):
    state = program.init()
    for batch in uneven_batches(program.spec, seed=1, num_batches=2):
      state, _ = program.train_step(state, program.layout.put_batch(batch))
    states.append(jax.device_get(state.params))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *states)


def reference_adafactor(param, grads, *, learning_rate, factored):
  """One parameter through Shazeer and Stern's algorithm 4, in float64, dimension by dimension."""
  rows, cols = param.shape if factored else (0, 0)
  r, c, v = np.zeros(rows), np.zeros(cols), np.zeros(param.shape)
  for t, grad in enumerate(grads, 1):
    beta = 1 - t**-0.8
    square = grad.astype(np.float64) ** 2 + 1e-30
    if factored:
      r = beta * r + (1 - beta) * square.mean(1)
      c = beta * c + (1 - beta) * square.mean(0)
      update = grad / np.sqrt(np.outer(r, c) / r.mean())
    else:
      v = beta * v + (1 - beta) * square
      update = grad / np.sqrt(v)
    update /= max(1.0, np.sqrt((update**2).mean()))
    param = param - learning_rate * max(np.sqrt((param**2).mean()), 1e-3) * update
  return param


def test_adafactor_counts_its_decay_from_the_offset():
  shapes = {'kernel': (2, 4, 6), 'scale': (2, 4)}
  params, grads = arrays(0, shapes), arrays(1, shapes)

  def updated(optimizer, first):
    state, new = optimizer.init(params, NAMES), params
    for step in (first, first + 1):
      new, state = optimizer.update(
        grads, state, new, names=NAMES, learning_rate=jnp.float32(0.1), step=jnp.int32(step)
      )
    return new

  got, want = updated(Adafactor(step_offset=1000), 1000), updated(Adafactor(), 0)
  jax.tree.map(np.testing.assert_array_equal, got, want)
  late = updated(Adafactor(), 1000)
  assert not np.array_equal(late['kernel'], want['kernel'])


@pytest.mark.parametrize('shape, factored', [((128, 160), True), ((128, 96), False)], ids=str)
def test_adafactor_of_a_stack_is_adafactor_of_each_layer(shape, factored):
  shapes = {'kernel': (3, *shape), 'scale': (3, shape[0])}
  params = arrays(0, shapes)
  got = run(Adafactor(layers='separate'), params, NAMES)
  grads = [arrays(i + 1, shapes) for i in range(3)]
  for layer in range(3):
    want = reference_adafactor(
      params['kernel'][layer],
      [g['kernel'][layer] for g in grads],
      learning_rate=0.1,
      factored=factored,
    )
    np.testing.assert_allclose(got['kernel'][layer], want, rtol=1e-4, atol=1e-6)
    want = reference_adafactor(
      params['scale'][layer], [g['scale'][layer] for g in grads], learning_rate=0.1, factored=False
    )
    np.testing.assert_allclose(got['scale'][layer], want, rtol=1e-4, atol=1e-6)


def test_adafactor_takes_heads_and_their_features_for_one_dimension():
  flat = arrays(0, {'kernel': (128, 128)})
  apart = {'kernel': flat['kernel'].reshape(128, 8, 16)}
  grads = arrays(1, {'kernel': (128, 128)})['kernel']

  def step(params, names, grad):
    return Adafactor().update(
      {'kernel': grad},
      Adafactor().init(params, names),
      params,
      names=names,
      learning_rate=jnp.float32(0.1),
      step=jnp.int32(0),
    )[0]['kernel']

  want = step(flat, {'kernel': AxisNames(('embed', 'mlp'))}, grads)
  got = step(apart, {'kernel': AxisNames(('embed', 'heads', 'kv'))}, grads.reshape(128, 8, 16))
  np.testing.assert_allclose(got.reshape(128, 128), want, rtol=1e-6)


def test_adafactor_keeps_a_row_and_a_column_where_adamw_keeps_two_matrices():
  params = arrays(0, {'kernel': (2, 256, 512), 'scale': (2, 256)})

  def size(optimizer):
    return sum(x.size for x in jax.tree.leaves(optimizer.init(params, NAMES)))

  assert size(Adafactor()) == 2 * (256 + 512) + 2 * 256
  assert size(AdamW()) > 2 * 2 * 256 * 512
  assert size(Adafactor(beta1=0.9)) == size(Adafactor()) + 2 * 256 * 512 + 2 * 256


@pytest.mark.parametrize(
  'optimizer', [AdamW(), Adafactor(), Adafactor(beta1=0.9)], ids=['adamw', 'adafactor', 'momentum']
)
def test_state_names_have_the_tree_and_ranks_of_the_state(optimizer):
  params = arrays(0, {'kernel': (2, 256, 512), 'scale': (2, 256)})
  state, names = optimizer.init(params, NAMES), optimizer.state_names(params, NAMES)
  assert jax.tree.structure(state) == jax.tree.structure(names)
  assert [x.ndim for x in jax.tree.leaves(state)] == [len(n.names) for n in jax.tree.leaves(names)]


def adam_state(optimizer, grad, steps):
  """Returns optax's state of Adam after `steps` updates with one gradient."""
  names = {'p': AxisNames((None,))}
  params = {'p': jnp.zeros_like(grad)}

  def body(carry, _):
    params, state = carry
    rest = dict(names=names, learning_rate=jnp.float32(0.0), step=jnp.int32(0))
    return optimizer.update({'p': grad}, state, params, **rest), None

  start = (params, optimizer.init(params, names))
  return jax.jit(lambda: jax.lax.scan(body, start, length=steps)[0][1][0])()


def test_a_second_moment_in_bfloat16_follows_the_one_in_float32():
  """A step adds 0.1% of it at most: rounding to the nearest, 0.4%, would not let it grow."""
  grad = jnp.linspace(0.5, 2.0, 512)
  exact = adam_state(AdamW(b2=0.999), grad, 1500).nu['p']
  adam = adam_state(AdamW(b2=0.999, mu_dtype='bfloat16', nu_dtype='bfloat16'), grad, 1500)
  assert adam.mu['p'].dtype == adam.nu['p'].dtype == jnp.bfloat16
  error = np.asarray(adam.nu['p'].astype(jnp.float32) / exact - 1)
  assert np.abs(error.mean()) < 0.01 and np.abs(error).max() < 0.2, error

  nearest = jax.lax.fori_loop(
    0,
    1500,
    lambda _, nu: (0.999 * nu.astype(jnp.float32) + 0.001 * grad**2).astype(jnp.bfloat16),
    jnp.zeros_like(grad, jnp.bfloat16),
  )
  assert np.mean(nearest.astype(jnp.float32) / exact) < 0.7


def test_stochastic_rounding_is_exact_on_average_and_never_off_by_more_than_a_step():
  x = jnp.full(20_000, 1.0 + 0.3 * 2**-7)
  rounded = stochastically_rounded(x, jax.random.key(0))
  assert set(np.unique(rounded.astype(jnp.float32))) == {1.0, 1.0 + 2**-7}
  np.testing.assert_allclose(rounded.astype(jnp.float32).mean(), x[0], rtol=1e-4)
  whole = jnp.asarray([0.0, 1.0, -2.5, 2.0**100, jnp.inf])
  np.testing.assert_array_equal(stochastically_rounded(whole, jax.random.key(1)), whole)


@pytest.mark.slow
def test_moments_in_bfloat16_do_not_depend_on_the_layout(tmp_path):
  changed = dict(mu_dtype='bfloat16', nu_dtype='bfloat16')
  split, alone = (
    build_with(
      model=DecoderOnlyModel(dataclasses.replace(helpers_layouts.CONFIG, num_layers=1)),
      optimizer=AdamW(**changed),
      learning_rate=constant(1e-2),
      partitioner=Partitioner(**axes),
      topology=Topology(1, devices),
      devices=jax.devices()[:devices],
      batch_size=8,
      task_feature_lengths={'targets': 8},
      pack=False,
    )
    for devices, axes in ((4, dict(fsdp=2, num_partitions=2)), (1, {}))
  )
  assert bytes_per_device(split.abstract_state.opt_state) < 1.1 * bytes_per_device(
    split.abstract_state.params
  )
  states = []
  for program in (split, alone):
    state = program.init()
    for batch in uneven_batches(program.spec, seed=1, num_batches=1):
      state, _ = program.train_step(state, program.layout.put_batch(batch))
    states.append(state)
  got, want = (jax.device_get(state.opt_state[0]) for state in states)
  for moment in ('mu', 'nu'):
    for a, b in zip(*(jax.tree.leaves(getattr(adam, moment)) for adam in (got, want))):
      assert a.dtype == jnp.bfloat16
      a, b = a.astype(np.float32), b.astype(np.float32)
      # Where gradients differ in the last bits, some values are rounded to the neighbor.
      np.testing.assert_allclose(a, b, rtol=2**-6, atol=1e-3 * np.abs(b).max())
      assert np.mean(a == b) > 0.95

  with contextlib.closing(Checkpointer(str(tmp_path / 'model'))) as checkpointer:
    manifest = make_manifest(
      states[0], mesh_shape=split.layout.mesh.shape, data={'task': 'none'}, next_batch_hash=''
    )
    checkpointer.save(1, states[0], data_state=b'', manifest=manifest)
    checkpointer.wait()
    restored = checkpointer.restore_latest(alone.abstract_state).state
  jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (restored, states[0])))


def test_a_dtype_of_moments_that_cannot_be_is_refused():
  with raises(ConfigError):
    AdamW(nu_dtype='bfloat61')


class Momentum:
  """A user's optimizer."""

  def init(self, params, names): ...
  def update(self, grads, state, params, *, names, learning_rate, step): ...
  def state_name(self, params, names): ...


@pytest.mark.parametrize('optimizer', [Momentum, Momentum()], ids=['class', 'typo'])
def test_an_optimizer_without_its_methods_is_refused(optimizer):
  with raises(ConfigError, parameters=('train.optimizer',)):
    check_optimizer(optimizer)


@pytest.mark.parametrize(
  'names',
  [
    {'m': AxisNames(('embed',))},
    {'m': AxisNames(('embed',)), 'count': AxisNames(()), 'v': AxisNames(())},
    {'m': AxisNames(('embed',)), 'count': 'embed'},
    None,
  ],
  ids=['lacks', 'more', 'text', 'none'],
)
def test_names_that_are_not_the_tree_of_the_state_are_refused(names):
  state = {'m': jnp.zeros(4), 'count': jnp.zeros((), jnp.int32)}
  with raises(ConfigError):
    check_state_names(Momentum(), names, state)


PARAMS, STATE = {'w': jnp.zeros((4, 2))}, {'m': jnp.zeros((4, 2))}


@pytest.mark.parametrize(
  'updated',
  [
    PARAMS,
    None,
    (STATE, PARAMS),
    ({'w': jnp.zeros((4, 2), jnp.bfloat16)}, STATE),
    (PARAMS, {'m': jnp.zeros((2, 4))}),
    (PARAMS, {**STATE, 'count': jnp.zeros(())}),
  ],
  ids=['one', 'none', 'swapped', 'dtype', 'shape', 'tree'],
)
def test_an_update_that_cannot_replace_the_old_state_is_refused(updated):
  with raises(ConfigError):
    checked_update(Momentum(), updated, params=PARAMS, state=STATE)


def test_an_update_may_return_a_list_and_python_numbers():
  params, state = {'w': jnp.ones(2)}, {'count': jnp.int32(0)}
  updated = checked_update(Momentum(), [params, {'count': 1}], params=params, state=state)
  assert updated == (params, {'count': 1})
