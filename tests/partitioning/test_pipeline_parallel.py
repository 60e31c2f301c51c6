"""Every pipeline schedule equals the sequential model, and its cost equals its formulas."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_gpu.compiled.collectives import inventory, partitioned_hlo
from t5x_gpu.errors import Problem
from t5x_gpu.partitioning import pipeline as pipeline_lib
from t5x_gpu.partitioning.layer_stacks import ONLY
from t5x_gpu.partitioning.pipeline_schedules import Timetable
from tests.parity.tolerances import MESH_GRADIENT

LAYERS, ROWS, LENGTH, EMBED, MLP, VOCAB = 8, 4, 8, 16, 32, 24
TOLERANCE = MESH_GRADIENT
SCHEDULES = [('gpipe', 1), ('1f1b', 1), ('circular', 2)]
# Toy programs: most of the time would go into optimizing them.
QUICK = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}


def norm(x):
  # Without an epsilon, so that a layer or head that runs on zeros makes gradients NaN.
  return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))


@dataclasses.dataclass(frozen=True)
class Toy:
  """A residual MLP with what real models have: a table, a parameter that all layers and the head
  share, layers that know their number, masks that are functions of layer and row."""

  gather_over: str = ''  # the layers' embed dimension is split over this axis, gathered per layer
  mix: str = ''  # halves of the sequence change places: by a permute over 'context', or 'locally'
  dtype: Any = jnp.float32  # of activations and layers
  stacks = (ONLY,)
  gathers_layers = False

  def embed(self, params, microbatch):
    return (params['table'][microbatch['tokens']] + params['shared']).astype(self.dtype)

  def run_layers(self, params, x, microbatch, first_layer):
    def layer(x, numbered):
      number, w = numbered
      if self.gather_over:
        w = jax.tree.map(lambda a: jax.lax.all_gather(a, self.gather_over, axis=0, tiled=True), w)
      keep = (microbatch['rows'][:, None] * 7 + number * 5 + jnp.arange(MLP)) % 4 > 0
      w = jax.tree.map(lambda a: a.astype(self.dtype), w)
      h = jnp.tanh(norm(x) @ w['wi']) * (keep[:, None] * (1 + number / LAYERS)).astype(self.dtype)
      if self.mix == 'locally':
        h += jnp.roll(h, LENGTH // 2, axis=1)
      elif self.mix:
        h += jax.lax.ppermute(h, self.mix, [(0, 1), (1, 0)])
      y = jnp.einsum('blf,ef->ble', h, w['wo']) * params['shared'].astype(self.dtype)
      return x + y, None

    numbers = first_layer + jnp.arange(params['layers']['wi'].shape[0])
    return jax.lax.scan(jax.checkpoint(layer), x, (numbers, params['layers']))[0]

  def head(self, params, x, microbatch):
    log_p = jax.nn.log_softmax((norm(x) * params['shared']) @ params['logits'])
    is_target = jax.nn.one_hot(microbatch['targets'], VOCAB)
    weights = microbatch['weights']
    right = (log_p.argmax(-1) == microbatch['targets']).astype(jnp.float32)
    return {
      'loss': (-jnp.sum(log_p * is_target * weights[..., None]), weights.sum()),
      'accuracy': (jnp.sum(right * weights), weights.sum()),
    }


def toy_params():
  rng = np.random.default_rng(0)

  def draw(*shape):
    return rng.normal(size=shape).astype(np.float32) * np.float32(0.1)

  return {
    'table': draw(VOCAB, EMBED),
    'shared': 1 + draw(EMBED),
    'logits': draw(EMBED, VOCAB),
    'layers': {'wi': draw(LAYERS, EMBED, MLP), 'wo': draw(LAYERS, EMBED, MLP)},
  }


def toy_batch(num_microbatches, rows=ROWS):
  rng = np.random.default_rng(0)
  shape = (num_microbatches, rows, LENGTH)
  return {
    'tokens': rng.integers(VOCAB, size=shape),
    'targets': rng.integers(VOCAB, size=shape),
    'rows': np.arange(num_microbatches * rows).reshape(shape[:2]),
    'weights': (rng.random(shape) < 0.8).astype(np.float32),
  }


@functools.cache
def sequential(num_microbatches, model=Toy()):
  """Returns (gradients, sums) on one device, all microbatches at once."""
  batch = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), toy_batch(num_microbatches))

  def loss(params):
    x = model.run_layers(params, model.embed(params, batch), batch, 0)
    sums = model.head(params, x, batch)
    return sums['loss'][0], sums

  return jax.jit(jax.grad(loss, has_aux=True))(toy_params())


def make_mesh(**sizes):
  devices = np.array(jax.devices()[: np.prod(list(sizes.values()))])
  return Mesh(
    devices.reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
  )


def pipeline(
  mesh, schedule, num_microbatches, *, repeats=1, model=Toy(), skip_idle=True, train=True
):
  """Returns the jitted function (params in memory order, microbatches) -> ([grads,] sums)."""
  manual = tuple(a for a in mesh.axis_names if a != 'model')
  rows = tuple(a for a in manual if a in ('data', 'fsdp'))
  split = 'fsdp' if model.gather_over else None
  length = 'context' if 'context' in manual else None
  specs = {
    'table': P(),
    'shared': P(),
    'logits': P(),
    'layers': {'wi': P('stage', split, None), 'wo': P('stage', split, None)},
  }
  batch = {
    name: P(None, rows or None, *(length,) * (name != 'rows'))
    for name in ('tokens', 'targets', 'rows', 'weights')
  }
  table = Timetable(schedule, mesh.shape['stage'], num_microbatches, repeats, skip_idle=skip_idle)
  options = dict(table=table, varying_axes=manual)

  def missing(spec):
    return tuple(a for a in manual if a not in jax.tree.leaves(tuple(spec)))

  def vary(x, spec):
    return jax.lax.pcast(x, missing(spec), to='varying') if missing(spec) else x

  def body(params, microbatches):
    params, microbatches = jax.tree.map(vary, (params, microbatches), (specs, batch))
    if not train:
      return jax.lax.psum(pipeline_lib.forward(model, params, microbatches, **options), manual)
    grads, sums = pipeline_lib.value_and_grad(model, params, microbatches, **options)
    grads = jax.tree.map(lambda g, spec: jax.lax.psum(g, missing(spec)), grads, out_specs[0])
    return grads, jax.lax.psum(sums, manual)

  out_specs = (specs, P()) if train else P()
  mapped = jax.shard_map(
    body, mesh=mesh, in_specs=(specs, batch), out_specs=out_specs, axis_names=set(manual)
  )
  if 'model' not in mesh.axis_names:
    return jax.jit(mapped)
  by_columns = NamedSharding(mesh, P('stage', None, 'model'))
  whole = NamedSharding(mesh, P())
  shardings = {
    'table': whole,
    'shared': whole,
    'layers': {'wi': by_columns, 'wo': by_columns},
    'logits': NamedSharding(mesh, P(None, 'model')),
  }
  return jax.jit(mapped, in_shardings=(shardings, None))


def in_memory_order(params, order):
  return {**params, 'layers': jax.tree.map(lambda w: w[order], params['layers'])}


def assert_equal(found, expected, path):
  scale = np.abs(expected).max()
  np.testing.assert_allclose(
    found / scale, expected / scale, rtol=0, atol=TOLERANCE, err_msg=jax.tree_util.keystr(path)
  )


def assert_matches_sequential(
  mesh, schedule, num_microbatches, *, repeats=1, reference=Toy(), train=True, **options
):
  order = pipeline_lib.layer_order(LAYERS, mesh.shape['stage'], repeats)
  step = pipeline(mesh, schedule, num_microbatches, repeats=repeats, train=train, **options)
  args = in_memory_order(toy_params(), order), toy_batch(num_microbatches)
  found = step.lower(*args).compile(compiler_options=QUICK)(*args)
  grads, sums = sequential(num_microbatches, reference)
  grads = in_memory_order(grads, order)
  expected = (grads, sums) if train else sums
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  jax.tree.map_with_path(lambda path, a, b: assert_equal(a, b, path), found, expected)


# As many microbatches as stages, more, and a multiple; those without another code path are slow.
@pytest.mark.quick_cases('1f1b-1-5', 'circular-2-5')
@pytest.mark.parametrize(
  'schedule, repeats, num_microbatches',
  [
    ('gpipe', 1, 5),
    ('1f1b', 1, 5),
    ('circular', 2, 5),
    *(
      pytest.param(schedule, repeats, number, marks=pytest.mark.slow)
      for schedule, repeats in SCHEDULES
      for number in (4, 8)
    ),
  ],
)
def test_four_stages_equal_the_sequential_model(schedule, repeats, num_microbatches):
  assert_matches_sequential(make_mesh(stage=4), schedule, num_microbatches, repeats=repeats)


@pytest.mark.slow
@pytest.mark.parametrize('schedule, repeats', SCHEDULES)
@pytest.mark.parametrize('mesh', [dict(stage=2, data=2), dict(stage=2, model=2)], ids=str)
def test_two_stages_with_data_or_model_equal_the_sequential_model(mesh, schedule, repeats):
  assert_matches_sequential(make_mesh(**mesh), schedule, 4, repeats=repeats)


@pytest.mark.parametrize('schedule', ['1f1b', pytest.param('gpipe', marks=pytest.mark.slow)])
def test_three_axes_with_gathered_parameters_equal_the_sequential_model(schedule):
  assert_matches_sequential(
    make_mesh(stage=2, fsdp=2, model=2), schedule, 3, model=Toy(gather_over='fsdp')
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  'schedule, repeats',
  [
    case if case[0] == '1f1b' else pytest.param(*case, marks=pytest.mark.slow) for case in SCHEDULES
  ],
)
def test_layers_with_a_permute_equal_the_sequential_model_where_idle_ticks_are_computed(
  schedule, repeats
):
  # The norm has no epsilon: discarded work on zeros would make gradients NaN.
  assert_matches_sequential(
    make_mesh(stage=2, context=2),
    schedule,
    3,
    repeats=repeats,
    model=Toy(mix='context'),
    reference=Toy(mix='locally'),
    skip_idle=False,
  )


@pytest.mark.parametrize(
  'schedule, repeats', [('1f1b', 1), pytest.param('circular', 4, marks=pytest.mark.slow)]
)
def test_forward_gives_the_sums_alone(schedule, repeats):
  assert_matches_sequential(make_mesh(stage=2), schedule, 3, repeats=repeats, train=False)


@pytest.mark.slow
@pytest.mark.parametrize(
  'schedule, repeats', [('1f1b', 1), pytest.param('circular', 2, marks=pytest.mark.slow)]
)
def test_bfloat16_activations_leave_gradients_in_float32(schedule, repeats):
  step = pipeline(
    make_mesh(stage=2, model=2), schedule, 4, repeats=repeats, model=Toy(dtype=jnp.bfloat16)
  )
  order = pipeline_lib.layer_order(LAYERS, 2, repeats)
  args = in_memory_order(toy_params(), order), toy_batch(4)
  grads, sums = step.lower(*args).compile(compiler_options=QUICK)(*args)
  expected_grads, expected = sequential(4)
  assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype('float32')}
  assert float(sums['loss'][0]) == pytest.approx(float(expected['loss'][0]), rel=1e-3)
  wi = in_memory_order(expected_grads, order)['layers']['wi']
  assert np.abs(grads['layers']['wi'] - wi).max() < 0.05 * np.abs(wi).max()


def lowered(mesh, schedule, num_microbatches, **options):
  return pipeline(mesh, schedule, num_microbatches, **options).lower(
    toy_params(), toy_batch(num_microbatches)
  )


@pytest.mark.quick_cases('1f1b-1-*')
@pytest.mark.parametrize(
  'schedule, repeats, mesh',
  [
    ('gpipe', 1, dict(stage=4)),
    ('circular', 2, dict(stage=4)),
    ('1f1b', 1, dict(stage=2, data=2, model=2)),
    pytest.param('1f1b', 1, dict(stage=4), marks=pytest.mark.slow),
    pytest.param('gpipe', 1, dict(stage=2, data=2, model=2), marks=pytest.mark.slow),
  ],
)
def test_one_activation_moves_per_tick_and_nothing_else(schedule, repeats, mesh):
  m, mesh = 5, make_mesh(**mesh)
  stages = mesh.shape['stage']
  program = partitioned_hlo(lowered(mesh, schedule, m, repeats=repeats))
  found = [c for c in inventory(program, mesh.shape) if 'stage' in c.axes]
  activation = (ROWS // mesh.shape.get('data', 1), LENGTH, EMBED)
  table = Timetable(schedule, stages, m, repeats)
  permutes = [c for c in found if c.kind == 'collective-permute']
  assert not any(c.in_branch for c in permutes)
  assert [(c.shape, c.count) for c in permutes if c.trip_counts] == [(activation, table.ticks)] * 2
  dealt_out = [] if schedule == '1f1b' else [(table.head_share, *activation)] * 2 * (stages - 1)
  assert [c.shape for c in permutes if not c.trip_counts] == dealt_out
  expected = pipeline_lib.traffic_per_step(
    table,
    activation_bytes=4 * int(np.prod(activation)),
    shared_gradient_bytes=4 * (2 * VOCAB * EMBED + EMBED),
  )
  sent = dict.fromkeys((c.kind for c in found), 0)
  for c in found:
    if c.bytes_per_device > 64:  # else the sums of the loss
      sent[c.kind] += c.bytes_per_call
  assert set(sent) == {'collective-permute', 'all-reduce'}
  if mesh.size > stages:  # then the caller reduces gradients over other axes too
    del sent['all-reduce'], expected['all-reduce']
  assert sent == expected


def temp_bytes(schedule, num_microbatches):
  return (
    lowered(make_mesh(stage=4), schedule, num_microbatches)
    .compile(compiler_options=QUICK)
    .memory_analysis()
    .temp_size_in_bytes
  )


@pytest.mark.slow
def test_memory_of_1f1b_does_not_grow_with_microbatches_and_that_of_gpipe_does():
  activation = 4 * ROWS * LENGTH * EMBED
  assert temp_bytes('1f1b', 32) == pytest.approx(temp_bytes('1f1b', 8), abs=activation / 4)
  assert temp_bytes('gpipe', 32) >= temp_bytes('gpipe', 8) + 24 * activation


def timeline(table):
  """Returns what each stage does in each slot, (direction, unit) or None: [slots][stages].

  A tick of 1f1b is two slots, forward and backward. Slots in which all stages idle cost nothing.
  """

  def row(direction, unit_of, tick):
    units = [unit_of(tick, s) for s in range(table.num_stages)]
    return [(direction, u) if 0 <= u < table.num_units else None for u in units]

  if table.schedule == '1f1b':
    slots = [
      row(*which, t)
      for t in range(table.interleaved_ticks)
      for which in (('f', table.forward_unit), ('b', table.backward_unit))
    ]
  else:
    forward = [row('f', table.forward_unit, t) for t in range(table.forward_ticks)]
    slots = forward + [[c and ('b', c[1]) for c in slot] for slot in reversed(forward)]
  return [slot for slot in slots if any(slot)]


TABLES = [
  Timetable(schedule, s, m, r)
  for s in (2, 3, 4, 8)
  for m in (s, s + 1, 4 * s)
  for schedule, r in [('gpipe', 1), ('1f1b', 1), ('circular', 2), ('circular', 3)]
]


@pytest.mark.parametrize('table', TABLES, ids=str)
def test_bubble_fraction_is_the_part_of_slots_that_are_idle(table):
  slots = timeline(table)
  idle = sum(cell is None for slot in slots for cell in slot) / (len(slots) * table.num_stages)
  assert table.bubble_fraction == pytest.approx(idle)


@pytest.mark.parametrize('table', TABLES, ids=str)
def test_every_unit_follows_the_one_that_it_needs(table):
  s, m = table.num_stages, table.num_microbatches
  done = {}
  for time, slot in enumerate(timeline(table)):
    for stage, cell in enumerate(slot):
      if cell:
        direction, unit = cell
        block = unit // m * s + stage
        assert (direction, block, unit % m) not in done
        if direction == 'f':
          needs = ('f', block - 1)
        elif block == s * table.repeats - 1:
          needs = ('f', block)
        else:
          needs = ('b', block + 1)
        assert needs == ('f', -1) or done[*needs, unit % m] < time
        done[direction, block, unit % m] = time
  assert len(done) == 2 * s * table.num_units


def test_1f1b_never_holds_more_inputs_than_it_keeps():
  table = Timetable('1f1b', 4, 20)
  for stage in range(4):
    waits = [
      next(t for t in range(99) if table.backward_unit(t, stage) == unit)
      - next(t for t in range(99) if table.forward_unit(t, stage) == unit)
      for unit in range(20)
    ]
    assert max(waits) < table.kept_inputs == 7


def test_computed_idle_ticks_make_the_bubble_of_1f1b_larger():
  assert Timetable('1f1b', 4, 12).bubble_fraction == pytest.approx(3 / 15)
  assert Timetable('1f1b', 4, 12, skip_idle=False).bubble_fraction == pytest.approx(6 / 18)


@pytest.mark.parametrize('stages', [2, 3, 4])
@pytest.mark.parametrize('repeats', [1, 2, 3])
def test_layer_order_gives_stages_their_blocks(stages, repeats):
  size = 2
  order = pipeline_lib.layer_order(stages * repeats * size, stages, repeats)
  assert sorted(order) == list(range(stages * repeats * size))
  for s, mine in enumerate(order.reshape(stages, repeats, size)):
    for r, block in enumerate(mine):
      assert block.tolist() == [(r * stages + s) * size, (r * stages + s) * size + 1]
  if repeats == 1:
    assert order.tolist() == list(range(stages * size))


def problems(layers=12, batch=32, stage=4, **options):
  return pipeline_lib.check(
    {'layers': layers, 'batch': batch},
    {'stage': stage, 'data': 2},
    **{'schedule': 'gpipe', 'num_pipeline_microbatches': 4, 'batch_parts': 2, **options},
  )


def test_check_finds_nothing_where_all_divides_or_there_is_no_pipeline():
  assert problems() == []
  assert problems(schedule='circular', repeats=3) == []
  assert problems(stage=1, layers=7, schedule='?', num_pipeline_microbatches=99) == []


NUM_LAYERS, STAGE = 'TransformerConfig.num_layers', 'Partitioner.stage'
SCHEDULE, REPEATS = 'Partitioner.pipeline_schedule', 'Partitioner.pipeline_repeats'
MICROBATCHES = 'Partitioner.num_pipeline_microbatches'


@pytest.mark.parametrize(
  'options, problem',
  [
    (
      dict(layers=14),
      Problem(
        'layers = 14 does not divide over stage=4.',
        'Set Partitioner.stage to a number that divides 14.',
        (NUM_LAYERS, STAGE),
      ),
    ),
    (
      dict(layers=20, schedule='circular', repeats=2),
      Problem(
        'layers = 20 does not divide over stage=4 x 2 blocks each (= 8).',
        'Set Partitioner.stage and Partitioner.pipeline_repeats so that their product divides 20.',
        (NUM_LAYERS, STAGE, REPEATS),
      ),
    ),
    (
      dict(num_pipeline_microbatches=6),
      Problem(
        'batch = 32: the 16 rows of each of 2 parts cannot be cut into '
        'Partitioner.num_pipeline_microbatches = 6.',
        'Set Partitioner.num_pipeline_microbatches to a number that divides 16.',
        ('BATCH_SIZE', MICROBATCHES),
      ),
    ),
    (
      dict(num_pipeline_microbatches=0),
      Problem(
        'Partitioner.num_pipeline_microbatches = 0 must be at least 1.',
        'Set Partitioner.num_pipeline_microbatches to a number that divides 16.',
        ('BATCH_SIZE', MICROBATCHES),
      ),
    ),
    (
      dict(schedule='circular', repeats=3, num_pipeline_microbatches=2),
      Problem(
        'Partitioner.num_pipeline_microbatches = 2 is fewer than the 4 stages: under the circular '
        'schedule the first microbatch would return to stage 0 before the last has started.',
        'Set Partitioner.num_pipeline_microbatches to a number that divides 16 and is at least 4.',
        ('BATCH_SIZE', MICROBATCHES),
      ),
    ),
    (
      dict(schedule='circular'),
      Problem(
        'The circular schedule with Partitioner.pipeline_repeats = 1 is gpipe: each microbatch '
        'passes the 4 stages once.',
        "Set Partitioner.pipeline_schedule = 'gpipe'.",
        (SCHEDULE, REPEATS),
      ),
    ),
    (
      dict(repeats=3),
      Problem(
        'Partitioner.pipeline_repeats = 3, but under gpipe each microbatch passes the 4 stages '
        'once.',
        "Set Partitioner.pipeline_schedule = 'circular'.",
        (REPEATS, SCHEDULE),
      ),
    ),
  ],
  ids=lambda value: '' if isinstance(value, dict) else value.what[:24],
)
def test_check_finds_each_problem_with_its_rule(options, problem):
  assert problems(**options) == [problem]


def test_check_reports_all_problems_at_once():
  assert len(problems(layers=14, num_pipeline_microbatches=6, repeats=2)) == 3


def test_rules_split_layers_over_stage():
  assert pipeline_lib.rules().parameters == {'layers': ('stage',)}
