"""Each rule of the lint finds its mistake in a compiled program and is silent without it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_gpu.compiled.collectives import Collective, inventory, partitioned_hlo
from t5x_gpu.partitioning.array_layout import array_layouts, part_held
from t5x_gpu.partitioning.axis_rules import AxisNames
from t5x_gpu.tools.planning.sharding_lint import (
  ACTIVATION,
  GRADIENT,
  OPTIMIZER,
  OTHER,
  PARAMETER,
  ParameterShapes,
  gathered,
  purpose,
  repeated,
  replicated,
)

SHAPE = {'data': 2, 'fsdp': 2, 'model': 2}
LAYERS, EMBED, MLP, VOCAB, BATCH = 6, 8, 20, 48, 64


@functools.cache
def mesh() -> Mesh:
  return Mesh(
    np.array(jax.devices()[:8]).reshape(2, 2, 2), tuple(SHAPE), axis_types=(AxisType.Auto,) * 3
  )


def struct(shape, *spec):
  return jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(mesh(), P(*spec)))


def put(x, *spec):
  return jax.lax.with_sharding_constraint(x, P(*spec))


# name -> (shape, axis names, how it is split)
PARAMETERS = {
  'embedding': ((VOCAB, EMBED), ('vocab', 'embed'), ('model', 'fsdp')),
  'layers/w': ((LAYERS, EMBED, MLP), ('layers', 'embed', 'mlp'), (None, 'fsdp', 'model')),
  'scale': ((EMBED,), ('embed',), ('fsdp',)),
}


def layouts(parameters=None):
  parameters = PARAMETERS if parameters is None else parameters
  return array_layouts(
    {k: struct(shape, *spec) for k, (shape, _, spec) in parameters.items()},
    {k: AxisNames(names) for k, (_, names, _) in parameters.items()},
  )


def shapes():
  return ParameterShapes(layouts(), SHAPE)


def found_in(function, *args, **jit_options):
  with jax.set_mesh(mesh()):
    return inventory(partitioned_hlo(jax.jit(function, **jit_options).lower(*args)), SHAPE)


W = struct((LAYERS, EMBED, MLP), None, 'fsdp', 'model')
X = struct((BATCH, EMBED), ('data', 'fsdp'))


# ---- What a collective is for -------------------------------------------------------------------


@pytest.mark.parametrize(
  'kind, axes, shape, op_name, expected',
  [
    ('all-gather', ('fsdp',), (EMBED, MLP // 2), 'jit(f)/jvp()/while/body/dot', PARAMETER),
    ('all-gather', ('fsdp',), (1, MLP // 2, EMBED), 'jit(f)/transpose(jvp())/dot', PARAMETER),
    ('all-gather', ('fsdp',), (VOCAB // 2, EMBED), 'jit(f)/convert', PARAMETER),
    ('all-gather', ('model',), (4, 16, EMBED), 'jit(f)/shard_map/jvp()/norm', ACTIVATION),
    ('reduce-scatter', ('fsdp',), (MLP // 2, EMBED), 'jit(f)/transpose(jvp())/dot', GRADIENT),
    ('all-reduce', ('data',), (VOCAB // 2, EMBED // 2), 'jit(f)/shard_map/psum', GRADIENT),
    ('all-reduce', ('data', 'fsdp'), (), 'jit(f)/shard_map/psum', OTHER),
    ('all-reduce', ('fsdp',), (), 'jit(f)/reduce_sum', OPTIMIZER),
    ('all-reduce', ('fsdp',), (LAYERS, EMBED), 'jit(f)/reduce_sum', OPTIMIZER),
    ('all-reduce', ('model',), (8, 16, EMBED), 'jit(f)/jvp()/mlp/wo/dot', ACTIVATION),
    ('all-reduce', ('model',), (LAYERS, EMBED, MLP), 'jit(f)/transpose(jvp())/dot', ACTIVATION),
    ('collective-permute', ('stage',), (8, 16, EMBED), 'jit(f)/shard_map/ppermute', ACTIVATION),
  ],
)
def test_purposes_follow_from_shape_and_place(kind, axes, shape, op_name, expected):
  c = Collective(kind, axes, 'f32', shape, bytes_per_device=1, op_name=op_name)
  assert purpose(c, shapes()) == expected


def test_a_stack_and_one_of_its_layers_are_distinguished():
  (layer,) = shapes().find((MLP, EMBED))
  assert (layer.parameter.name, layer.is_layer, layer.copies) == ('layers/w', True, LAYERS)
  (stack,) = shapes().find((LAYERS, EMBED // 2, MLP))
  assert (stack.is_layer, stack.copies) == (False, 1)
  assert shapes().find((7, 7)) == []


def test_devices_hold_the_parts_that_their_arrays_say():
  for layout, (shape, _, spec) in zip(layouts(), PARAMETERS.values()):
    sharding = NamedSharding(mesh(), P(*spec))
    for place, device in np.ndenumerate(mesh().devices):
      at = dict(zip(SHAPE, place))
      slices = sharding.devices_indices_map(shape)[device]
      sizes = sharding.shard_shape(shape)
      assert part_held(layout, at, SHAPE) == tuple(
        (s.start or 0) // n for s, n in zip(slices, sizes)
      ), (layout.name, at)


# ---- Replicated ---------------------------------------------------------------------------------


MEANT = {'fsdp': ['embed'], 'model': ['mlp', 'vocab']}
FSDP = {'parameter': MEANT, 'optimizer state': MEANT}
WHOLE = dict.fromkeys('ab', ((1024, 1024), (None, None), ()))


def test_a_large_unsplit_array_among_split_ones_is_found():
  large = {**PARAMETERS, 'table': ((1024, 1024), (None, None), ())}
  (finding,) = replicated(layouts(large), [], SHAPE, rules=FSDP)
  assert finding.rule == 'replicated' and finding.num_bytes == 2**21
  assert 'parameter table [1024 x 1024] (4 MiB' in finding.what
  assert 'fsdp = 2 could split it' in finding.what and "named 'embed'" in finding.fix


def test_whole_arrays_are_found_if_the_layout_means_to_split_them_and_none_is():
  assert len(replicated(layouts(WHOLE), layouts(WHOLE), SHAPE, rules=FSDP)) == 4
  data_parallel = {'parameter': {}, 'optimizer state': {}}
  assert replicated(layouts(WHOLE), layouts(WHOLE), SHAPE, rules=data_parallel) == []
  one_device = dict.fromkeys(SHAPE, 1)
  assert replicated(layouts(WHOLE), layouts(WHOLE), one_device, rules=FSDP) == []


def test_whole_arrays_are_fine_when_small():
  small = {**PARAMETERS, 'table': ((64, 64), (None, None), ())}
  assert replicated(layouts(small), [], SHAPE, rules=FSDP) == []


def test_optimizer_state_alone_is_meant_to_be_split_by_zero_1():
  state = {
    'mu/a': ((1024, 1024), ('embed', None), ('fsdp',)),
    'mu/b': ((1024, 1024), (None, None), ()),
  }
  (finding,) = replicated(
    layouts(WHOLE),
    layouts(state),
    SHAPE,
    rules={'parameter': {}, 'optimizer state': {'fsdp': ['embed']}},
  )
  assert 'optimizer state mu/b' in finding.what


# ---- Gathered -----------------------------------------------------------------------------------


def loss_of_logits(x, table, *, whole):
  logits = put(x @ table.T, ('data', 'fsdp'), 'model')
  if whole:
    logits = put(jnp.tanh(logits), ('data', 'fsdp'), None)
  return jnp.sum(jax.nn.logsumexp(logits, axis=-1))


def test_gathered_logits_are_found():
  table = struct((VOCAB, EMBED), 'model')
  for whole in (True, False):
    found = found_in(functools.partial(loss_of_logits, whole=whole), X, table)
    findings = gathered(found, layouts(), [], SHAPE)
    assert len(findings) == int(whole)
  whole = found_in(functools.partial(loss_of_logits, whole=True), X, table)
  (finding,) = gathered(whole, layouts(), [], SHAPE)
  assert 'Logits' in finding.what and f'[{BATCH // 4} x {VOCAB}]' in finding.what
  assert 'test_sharding_lint.py:' in finding.what and 'losses.py' in finding.fix


def test_a_stack_that_is_gathered_before_the_loop_is_found():
  def f(w, x, whole):
    if whole:
      w = put(w, None, None, 'model')
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ put(w, None, 'model')) @ w.T, None), x, w)[0]

  args = (W, X)
  (finding,) = gathered(found_in(lambda w, x: f(w, x, True), *args), layouts(), [], SHAPE)
  assert 'All layers of layers/w are gathered at once' in finding.what
  per_layer = found_in(lambda w, x: f(w, x, False), *args)
  assert any(c.kind == 'all-gather' and c.count == LAYERS for c in per_layer)
  assert gathered(per_layer, layouts(), [], SHAPE) == []


def test_a_gather_of_rows_over_data_is_found():
  found = found_in(lambda x: put(jnp.tanh(x), 'fsdp') + 1, X)
  (finding,) = gathered(found, layouts(), [], SHAPE)
  assert 'Only the batch is split over data' in finding.what


# ---- Repeated -----------------------------------------------------------------------------------


def gradients(w, x, *, steps):
  def loss(w, x):
    def layer(x, w):
      return x + jnp.sum(jnp.tanh(x @ w), axis=-1, keepdims=True), None

    return jnp.sum(jax.lax.scan(layer, x, w)[0])

  if steps == 1:
    return jax.grad(loss)(w, x)

  def body(total, x):
    return total + jax.grad(loss)(w, x), None

  xs = put(x.reshape(steps, -1, EMBED), None, ('data', 'fsdp'))
  return jax.lax.scan(body, jnp.zeros_like(w), xs)[0]


def test_gradients_that_a_loop_reduces_each_time_are_found():
  once, often = (
    found_in(functools.partial(gradients, steps=n), W, X, out_shardings=W.sharding) for n in (1, 4)
  )
  assert any(purpose(c, shapes()) == GRADIENT and c.count == LAYERS for c in once)
  assert repeated(once, layouts(), SHAPE) == []
  findings = repeated(often, layouts(), SHAPE)
  assert findings and all('4 times per step' in finding.what for finding in findings)
  assert 'layers/w' in findings[0].what and 'NUM_MICROBATCHES' in findings[0].fix


def test_two_alternating_layers_do_not_count_as_repetition():
  c = Collective(
    'all-reduce',
    ('data',),
    'f32',
    (EMBED, MLP),
    bytes_per_device=8,
    count=LAYERS // 2,
    op_name='jit(f)/transpose(jvp())/while/body/dot',
  )
  assert repeated([c, c], layouts(), SHAPE) == []
  assert repeated([c, c, c], layouts(), SHAPE)[0].num_bytes == 24  # of 72
