"""Adafactor equals T5X's for all sizes: on scanned parameters, on layers one by one, and with
heads joined with their features."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.checkpoint.manifest import differences, make_manifest
from t5x_gpu.errors import ConfigError
from t5x_gpu.partitioning.axis_rules import AxisNames
from t5x_gpu.training.adafactor import Adafactor
from tests.messages import raises
from tests.training.t5x_adafactor import T5xParameter

STEPS, LEARNING_RATE = 4, 0.1
# Every operation rounds by half a unit, and a second moment of this length goes through about 30 of
# them per step; an update is at most 20 times its root mean square here.
TOLERANCE = STEPS * (1 + 30 * 20 * LEARNING_RATE) * np.finfo(np.float32).eps

NUM_LAYERS = 3
SMALL = dict(vocab=50, embed=24, mlp=40, heads=3, kv=8, joined_kv=24, relpos_buckets=32)
LARGE = dict(vocab=160, embed=132, mlp=128, heads=4, kv=34, joined_kv=136, relpos_buckets=32)
SIZES = {'small': SMALL, 'large': LARGE, 'narrow_mlp': {**LARGE, 'mlp': 127, 'vocab': 100}}
OUTSIDE = {
  'embedding': 'vocab embed',
  'logits': 'embed vocab',
  'norm': 'embed',
  'shared_bias': 'heads relpos_buckets',
}
# Axes of the parameters in T5X.
MODELS = {
  'scanned': {
    'query': 'embed layers heads kv',
    'out': 'heads layers kv embed',
    'joined_query': 'embed layers joined_kv',
    'joined_out': 'joined_kv layers embed',
    'wi': 'embed layers mlp',
    'wo': 'mlp layers embed',
    'wi_on_axis_0': 'layers embed mlp',
    'layer_norm': 'embed layers',
    'bias': 'heads layers relpos_buckets',
  },
  'separate': {
    'query': 'embed heads kv',
    'out': 'heads kv embed',
    'wi': 'embed mlp',
    'wo': 'mlp embed',
    'layer_norm': 'embed',
    'bias': 'heads relpos_buckets',
  },
  'joined_heads': {
    'query': 'embed joined_kv',
    'out': 'joined_kv embed',
    'wi': 'embed mlp',
    'wo': 'mlp embed',
    'layer_norm': 'embed',
    'bias': 'heads relpos_buckets',
  },
}


def parameters(model, sizes, **settings):
  """Returns name -> its parameters in T5X: one, or one for each layer."""
  sizes = {**sizes, 'layers': NUM_LAYERS}
  out = {}
  for name, axes in {**MODELS[model], **OUTSIDE}.items():
    names = tuple(axes.split())
    parameter = T5xParameter(names, tuple(sizes[n] for n in names), **settings)
    apart = name in MODELS[model] and model != 'scanned'
    out[name] = [parameter] * (NUM_LAYERS if apart else 1)
  return out


def our_names(parts):
  (part, *others) = parts
  names = [n for axis in part.axes for n in (('heads', 'kv') if axis == 'joined_kv' else (axis,))]
  if others:
    names.insert(0, 'layers')
  if 'layers' in names:
    names.remove('layers')
    names.insert(0, 'layers')
  return AxisNames(tuple(names))


def ours(parts, arrays, sizes):
  """Returns our array of a parameter: layers in front, heads apart."""
  out = np.stack(arrays) if len(parts) > 1 else arrays[0]
  axes = [*(['layers'] if len(parts) > 1 else []), *parts[0].axes]
  if 'layers' in axes:
    out = np.moveaxis(out, axes.index('layers'), 0)
    axes.remove('layers')
    axes.insert(0, 'layers')
  if 'joined_kv' in axes:
    at = axes.index('joined_kv')
    out = out.reshape(*out.shape[:at], sizes['heads'], sizes['kv'], *out.shape[at + 1 :])
  return out


def drawn(rng, shape):
  """Returns gradients whose rows and columns differ in size: factoring them changes the update."""
  out = rng.normal(size=shape)
  for dim, size in enumerate(shape):
    scale = np.exp(rng.normal(size=size))
    out = out * np.expand_dims(scale, [i for i in range(len(shape)) if i != dim])
  return out.astype(np.float32)


def compare(optimizer, model, sizes, **settings):
  """Runs both, and compares the parameters after every step; `settings` are T5X's."""
  params, rng = parameters(model, sizes, **settings), np.random.default_rng(0)
  names = {name: our_names(parts) for name, parts in params.items()}
  theirs = {
    name: [(rng.normal(size=p.shape).astype(np.float32), p.new_state()) for p in parts]
    for name, parts in params.items()
  }

  def as_ours(arrays):
    return {name: ours(params[name], list(a), sizes) for name, a in arrays.items()}

  values = as_ours({name: [value for value, _ in pairs] for name, pairs in theirs.items()})
  state = optimizer.init(values, names)
  update = jax.jit(
    lambda g, s, p, i: optimizer.update(
      g, s, p, names=names, learning_rate=jnp.float32(LEARNING_RATE), step=i
    )
  )
  for step in range(STEPS):
    grads = {name: [drawn(rng, p.shape) for p in parts] for name, parts in params.items()}
    values, state = update(as_ours(grads), state, values, jnp.int32(step))
    for name, parts in params.items():
      theirs[name] = [
        p.update(value, grad, s, step=step, learning_rate=LEARNING_RATE)
        for p, (value, s), grad in zip(parts, theirs[name], grads[name])
      ]
    want = as_ours({name: [value for value, _ in pairs] for name, pairs in theirs.items()})
    for name, value in want.items():
      scale = np.abs(value).max()
      np.testing.assert_allclose(values[name], value, rtol=0, atol=TOLERANCE * scale, err_msg=name)
  return {name: state[name].full is None for name in params}


@pytest.mark.quick_cases('joined_heads-large', 'scanned-narrow_mlp', 'separate-narrow_mlp')
@pytest.mark.parametrize('sizes', SIZES)
@pytest.mark.parametrize('model', MODELS)
def test_updates_equal_t5x(model, sizes):
  factored = compare(Adafactor(layers=model), model, SIZES[sizes])
  of_rules = {
    'scanned': {'query', 'out', 'joined_query', 'joined_out', 'wi', 'wo', 'wi_on_axis_0'},
    'separate': {'query', 'out'},
    'joined_heads': set(),
  }[model]
  by_size = {
    'small': set(),
    'large': {'query', 'out', 'wi', 'wo', 'embedding', 'logits'},
    'narrow_mlp': {'query', 'out'},
  }[sizes]
  assert {name for name, is_factored in factored.items() if is_factored} == of_rules | by_size & (
    factored.keys() if model != 'scanned' else OUTSIDE.keys()
  )


@pytest.mark.quick_cases('scanned')
@pytest.mark.parametrize('model', MODELS)
def test_updates_without_factoring_equal_t5x(model):
  optimizer = Adafactor(layers=model, factored=False)
  factored = compare(optimizer, model, SIZES['narrow_mlp'], is_factored=False)
  assert not any(factored.values())


@pytest.mark.quick_cases('separate')
@pytest.mark.parametrize('model', MODELS)
def test_momentum_and_weight_decay_equal_t5x(model):
  settings = {'beta1': 0.9, 'weight_decay_rate': 0.01}
  compare(Adafactor(layers=model, **settings), model, SIZES['narrow_mlp'], **settings)


def test_matrices_outside_of_the_layers_are_factored_by_size_whatever_their_axes():
  params = {'positions': jnp.ones((130, 128)), 'few': jnp.ones((127, 128))}
  names = {name: AxisNames((None, 'embed')) for name in params}
  state = Adafactor().init(params, names)
  assert state['positions'].row.shape == (130,) and state['positions'].column.shape == (128,)
  assert state['few'].full.shape == (127, 128)
  # The rule before `layers` existed, for checkpoints of that time.
  assert Adafactor(layers='joined_heads').init(params, names)['positions'].row is None


def test_the_table_of_roles_decides():
  params, names = {'p': jnp.ones((2, 8, 4))}, {'p': AxisNames(('layers', 'embed', 'mlp'))}
  plain = Adafactor().init(params, names)['p']
  assert plain.row.shape == (2, 8) and plain.column.shape == (2, 4)
  other = Adafactor(logical_factor_rules={'mlp': 'row', 'embed': 'column'}).init(params, names)['p']
  assert other.row.shape == (2, 4) and other.column.shape == (2, 8)
  none = Adafactor(logical_factor_rules={'mlp': 'none'}).init(params, names)['p']
  assert none.row is None and none.full.shape == (2, 8, 4)


def test_settings_that_cannot_be_are_refused_together():
  with raises(ConfigError):
    Adafactor(
      layers='scaned',
      logical_factor_rules={'mlpp': 'row', 'embed': 'col'},
      beta1=1.0,
      weight_decay_rate=-0.1,
    )


def test_an_older_checkpoint_names_the_setting_that_continues_it():
  params, names = {'p': jnp.ones((2, 8, 4))}, {'p': AxisNames(('layers', 'embed', 'mlp'))}

  def state(**settings):
    return {'params': params, 'opt_state': Adafactor(**settings).init(params, names)}

  old = make_manifest(state(layers='joined_heads'), mesh_shape={}, data={}, next_batch_hash='')
  lines = '\n'.join(differences(old, state()))
  assert 'opt_state/p/full float32[2, 8, 4]: in the checkpoint' in lines
  assert """--gin.Adafactor.layers="'joined_heads'" continues checkpoints""" in lines
  assert not differences(old, state(layers='joined_heads'))
  lines = '\n'.join(differences(old, state(layers='joined_heads', beta1=0.9)))
  assert 'Adafactor.beta1 decides' in lines and 'min_dim_size_to_factor' not in lines
