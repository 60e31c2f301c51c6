"""A pipeline of two stacks; the second stack reads the output of the first."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from t5x_gpu.compiled.collectives import inventory, partitioned_hlo
from t5x_gpu.partitioning import pipeline as pipeline_lib
from t5x_gpu.partitioning.layer_stacks import ONLY, with_layers, with_member, without_layers
from t5x_gpu.partitioning.pipeline_schedules import Timetable
from tests.helpers_layouts import QUICK
from tests.parity.tolerances import MESH_GRADIENT

STACKS = ('reader', 'writer')
LAYERS = {'reader': 4, 'writer': 8}
LENGTHS = {'reader': 6, 'writer': 5}
ROWS, EMBED, MLP, VOCAB = 4, 8, 12, 24


def norm(x):
  # Without an epsilon, so that a layer or head that runs on zeros makes gradients NaN.
  return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))


class TwoStacks:
  """Residual MLPs that know their number; the writer's see the mean of what the reader returned."""

  stacks = STACKS
  gathers_layers = False

  def embed(self, params, microbatch):
    return tuple(params['table'][microbatch[stack]] for stack in STACKS)

  def run_layers(self, params, x, microbatch, first_layer, stack):
    read, written = x

    def layer(x, numbered):
      number, w = numbered
      h = norm(x)
      if stack == 'writer':
        h += (norm(read) * params['reader']['scale']).mean(axis=1, keepdims=True)
      keep = (microbatch['rows'][:, None] * 7 + number * 5 + jnp.arange(MLP)) % 4 > 0
      return x + (jnp.tanh(h @ w['wi']) * keep[:, None] * (1 + number / 8)) @ w['wo'], None

    layers = params[stack]['layers']
    numbers = first_layer + jnp.arange(layers['wi'].shape[0])
    if stack == 'reader':
      return jax.lax.scan(layer, read, (numbers, layers))[0], written
    return read, jax.lax.scan(layer, written, (numbers, layers))[0]

  def head(self, params, x, microbatch):
    log_p = jax.nn.log_softmax(norm(x[-1]) @ params['writer']['logits'])
    loss = -jnp.sum(log_p * jax.nn.one_hot(microbatch['targets'], VOCAB))
    return {'loss': (loss, jnp.float32(log_p.shape[0] * log_p.shape[1]))}


def toy_params():
  rng = np.random.default_rng(0)

  def draw(*shape):
    return rng.normal(size=shape).astype(np.float32) * np.float32(0.3)

  params = {
    stack: {
      'layers': {'wi': draw(LAYERS[stack], EMBED, MLP), 'wo': draw(LAYERS[stack], MLP, EMBED)}
    }
    for stack in STACKS
  }
  params['reader']['scale'], params['writer']['logits'] = 1 + draw(EMBED), draw(EMBED, VOCAB)
  return {**params, 'table': draw(VOCAB, EMBED)}


def toy_batch(num_microbatches):
  rng = np.random.default_rng(0)

  def draw(length):
    return rng.integers(VOCAB, size=(num_microbatches, ROWS, length))

  return {
    **{stack: draw(LENGTHS[stack]) for stack in STACKS},
    'targets': draw(LENGTHS['writer']),
    'rows': np.arange(num_microbatches * ROWS).reshape(num_microbatches, ROWS),
  }


@functools.cache
def sequential(num_microbatches):
  """Returns (gradients, sums) on one device, all microbatches at once."""
  model, batch = (
    TwoStacks(),
    jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), toy_batch(num_microbatches)),
  )

  def loss(params):
    x = model.embed(params, batch)
    for stack in STACKS:
      x = model.run_layers(params, x, batch, 0, stack)
    sums = model.head(params, x, batch)
    return sums['loss'][0], sums

  return jax.jit(jax.grad(loss, has_aux=True))(toy_params())


def in_memory_order(params, stages, repeats):
  for stack in STACKS:
    order = pipeline_lib.layer_order(LAYERS[stack], stages, repeats)
    params = with_layers(params, stack, jax.tree.map(lambda w: w[order], params[stack]['layers']))
  return params


def pipeline(schedule, num_microbatches, *, repeats=1, train=True, **sizes):
  """Returns (jitted function of parameters in memory order and microbatches, its mesh)."""
  devices = np.array(jax.devices()[: np.prod(list(sizes.values()))])
  mesh = Mesh(
    devices.reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
  )
  manual = mesh.axis_names
  specs = {
    'table': P(),
    'reader': {'layers': P('stage'), 'scale': P()},
    'writer': {'layers': P('stage'), 'logits': P()},
  }
  specs = jax.tree.map(
    lambda spec, p: jax.tree.map(lambda _: spec, p),
    specs,
    toy_params(),
    is_leaf=lambda x: isinstance(x, P),
  )
  batch = jax.tree.map(lambda _: P(None, 'data' if 'data' in sizes else None), toy_batch(1))
  table = Timetable(schedule, sizes['stage'], num_microbatches, repeats, num_stacks=2)

  def missing(spec):
    return tuple(a for a in manual if a not in tuple(spec))

  def body(params, microbatches):
    params, microbatches = jax.tree.map(
      lambda x, spec: jax.lax.pcast(x, missing(spec), to='varying') if missing(spec) else x,
      (params, microbatches),
      (specs, batch),
    )
    if not train:
      return jax.lax.psum(
        pipeline_lib.forward(TwoStacks(), params, microbatches, table, varying_axes=manual), manual
      )
    grads, sums = pipeline_lib.value_and_grad(
      TwoStacks(), params, microbatches, table, varying_axes=manual
    )
    grads = jax.tree.map(lambda g, spec: jax.lax.psum(g, missing(spec)), grads, specs)
    return grads, jax.lax.psum(sums, manual)

  return jax.jit(
    jax.shard_map(
      body, mesh=mesh, in_specs=(specs, batch), out_specs=(specs, P()) if train else P()
    )
  ), mesh


# As many microbatches as stages, more, and a multiple.
@pytest.mark.quick_cases('circular-2-5-sizes1-*')
@pytest.mark.parametrize(
  'schedule, repeats, num_microbatches, sizes, train',
  [
    ('gpipe', 1, 3, dict(stage=2, data=2), True),
    ('circular', 2, 5, dict(stage=2), False),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        ('circular', 2, 5, dict(stage=2), True),
        ('gpipe', 1, 4, dict(stage=4), True),
        ('gpipe', 1, 6, dict(stage=4), True),
        ('circular', 2, 2, dict(stage=2, data=2), True),
      )
    ),
  ],
)
def test_a_pipeline_of_two_stacks_equals_the_sequential_model(
  schedule, repeats, num_microbatches, sizes, train
):
  step, mesh = pipeline(schedule, num_microbatches, repeats=repeats, train=train, **sizes)
  args = in_memory_order(toy_params(), sizes['stage'], repeats), toy_batch(num_microbatches)
  found = step.lower(*args).compile(compiler_options=QUICK)(*args)
  grads, sums = sequential(num_microbatches)
  expected = (in_memory_order(grads, sizes['stage'], repeats), sums) if train else sums
  assert jax.tree.structure(found) == jax.tree.structure(expected)

  def compare(path, a, b):
    scale = np.abs(b).max()
    np.testing.assert_allclose(
      a / scale, b / scale, rtol=0, atol=MESH_GRADIENT, err_msg=jax.tree_util.keystr(path)
    )

  jax.tree.map_with_path(compare, found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
  'schedule, repeats, num_microbatches',
  [('gpipe', 1, 5), pytest.param('circular', 2, 4, marks=pytest.mark.slow)],
)
def test_what_both_stacks_have_moves_once_per_tick_and_to_other_heads_the_seconds_alone(
  schedule, repeats, num_microbatches
):
  step, mesh = pipeline(schedule, num_microbatches, repeats=repeats, stage=2)
  program = partitioned_hlo(step.lower(toy_params(), toy_batch(num_microbatches)))
  found = [c for c in inventory(program, mesh.shape) if c.kind == 'collective-permute']
  assert not any(c.in_branch for c in found)
  table = Timetable(schedule, 2, num_microbatches, repeats, num_stacks=2)
  assert table.forward_ticks == 2 * repeats * num_microbatches + 1
  shapes = {stack: (ROWS, LENGTHS[stack], EMBED) for stack in STACKS}
  assert sorted((c.shape, c.count) for c in found if c.trip_counts) == sorted(
    (shape, table.forward_ticks) for shape in shapes.values() for _ in range(2)
  )
  dealt_out = [c.shape for c in found if not c.trip_counts]
  assert dealt_out == [(table.head_share, *shapes['writer'])] * 2
  sizes = {stack: 4 * int(np.prod(shape)) for stack, shape in shapes.items()}
  expected = pipeline_lib.traffic_per_step(
    table, activation_bytes=sum(sizes.values()), output_bytes=sizes['writer']
  )
  assert sum(c.bytes_per_call for c in found) == expected['collective-permute']


@pytest.mark.parametrize(
  'table',
  [
    Timetable(schedule, s, m, r, num_stacks=2)
    for s in (2, 3, 4)
    for m in (s, s + 1, 4 * s)
    for schedule, r in (('gpipe', 1), ('circular', 2))
  ],
  ids=str,
)
def test_two_stacks_halve_the_bubble_and_no_unit_starts_before_its_input_is_there(table):
  s, m = table.num_stages, table.num_microbatches
  assert table.bubble_fraction == pytest.approx((s - 1) / (2 * table.repeats * m + s - 1))
  done = {}
  for tick in range(table.forward_ticks):
    for stage in range(s):
      unit = table.forward_unit(tick, stage)
      if 0 <= unit < table.num_units:
        block = unit // m * s + stage  # of both stacks, one after the other
        assert block == 0 or done[block - 1, unit % m] < tick
        done[block, unit % m] = tick
  assert len(done) == 2 * table.repeats * s * m


def test_layers_of_a_stack_are_put_where_they_were_taken():
  params = toy_params()
  taken = without_layers(params, STACKS)
  assert 'layers' not in taken['reader'] and 'scale' in taken['reader']
  for stack in STACKS:
    taken = with_layers(taken, stack, params[stack]['layers'])
  assert jax.tree.structure(taken) == jax.tree.structure(params)
  one = {'layers': 1, 'table': 2}
  assert with_layers(without_layers(one, (ONLY,)), ONLY, 1) == one
  assert with_member((1, 2), STACKS, 'writer', 3) == (1, 3)
  assert with_member(1, (ONLY,), ONLY, 3) == 3
