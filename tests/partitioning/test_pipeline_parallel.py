"""Every pipeline schedule equals the sequential model, and costs what its formulas say."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from t5x_gpu.partitioning import pipeline_parallel as pp
from t5x_gpu.partitioning.pipeline_schedules import Timetable

LAYERS, ROWS, LENGTH, EMBED, MLP, VOCAB = 8, 4, 8, 16, 32, 24
TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True)
class Toy:
  """A residual MLP with what real models have: a table, a parameter that all layers and the head
  share, a layer that knows its number, and masks that are functions of layer and row."""
  gather_over: str = ''  # layers' embed dimension is split over this axis and gathered per layer
  rotate_over: str = ''  # mixes positions over this axis with a permute, as ring attention does

  def embed(self, params, microbatch):
    return params['table'][microbatch['tokens']] + params['shared']

  def run_layers(self, params, x, microbatch, first_layer):
    def layer(x, numbered):
      number, w = numbered
      if self.gather_over:
        w = jax.tree.map(lambda a: jax.lax.all_gather(a, self.gather_over, axis=0, tiled=True), w)
      keep = (microbatch['rows'][:, None] * 7 + number * 5 + jnp.arange(MLP)) % 4 > 0
      h = jnp.tanh(x @ w['wi']) * keep[:, None] * (1 + number / LAYERS)
      if self.rotate_over:
        n = jax.lax.axis_size(self.rotate_over)
        h += jax.lax.ppermute(h, self.rotate_over, [(i, (i + 1) % n) for i in range(n)])
      return x + jax.lax.dot_general(h, w['wo'], (((2,), (1,)), ((), ()))) * params['shared'], None
    numbers = first_layer + jnp.arange(params['layers']['wi'].shape[0])
    return jax.lax.scan(jax.checkpoint(layer), x, (numbers, params['layers']))[0]

  def head(self, params, x, microbatch):
    logp = jax.nn.log_softmax((x * params['shared']) @ params['logits'])
    is_target = jax.nn.one_hot(microbatch['targets'], VOCAB)
    weights = microbatch['weights']
    right = (logp.argmax(-1) == microbatch['targets']).astype(jnp.float32)
    return {'loss': (-jnp.sum(logp * is_target * weights[..., None]), weights.sum()),
            'accuracy': (jnp.sum(right * weights), weights.sum())}


def toy_params():
  rng = np.random.default_rng(0)
  def draw(*shape):
    return rng.normal(size=shape).astype(np.float32) * np.float32(0.1)
  return {'table': draw(VOCAB, EMBED), 'shared': 1 + draw(EMBED), 'logits': draw(EMBED, VOCAB),
          'layers': {'wi': draw(LAYERS, EMBED, MLP), 'wo': draw(LAYERS, EMBED, MLP)}}


def toy_batch(num_microbatches, rows=ROWS):
  rng = np.random.default_rng(0)
  shape = (num_microbatches, rows, LENGTH)
  return {'tokens': rng.integers(VOCAB, size=shape), 'targets': rng.integers(VOCAB, size=shape),
          'rows': np.arange(num_microbatches * rows).reshape(shape[:2]),
          'weights': (rng.random(shape) < 0.8).astype(np.float32)}


@functools.cache
def sequential(num_microbatches):
  """Returns (gradients, sums) on one device, all microbatches at once."""
  model = Toy()
  batch = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), toy_batch(num_microbatches))
  def loss(params):
    x = model.run_layers(params, model.embed(params, batch), batch, 0)
    sums = model.head(params, x, batch)
    return sums['loss'][0], sums
  return jax.jit(jax.grad(loss, has_aux=True))(toy_params())


def make_mesh(**sizes):
  devices = np.array(jax.devices()[:np.prod(list(sizes.values()))])
  return Mesh(devices.reshape(*sizes.values()), tuple(sizes),
              axis_types=(AxisType.Auto,) * len(sizes))


def pipeline(mesh, schedule, num_microbatches, *, repeats=1, model=Toy(), skip_idle=True,
             train=True):
  """Returns the jitted function (params in memory order, microbatches) -> ([grads,] sums)."""
  manual = tuple(a for a in mesh.axis_names if a != 'model')
  rows = tuple(a for a in manual if a in ('data', 'fsdp'))
  split = 'fsdp' if model.gather_over else None
  length = 'context' if 'context' in manual else None
  layers = {'wi': P('stage', split, None), 'wo': P('stage', split, None)}
  specs = {'table': P(), 'shared': P(), 'logits': P(), 'layers': layers}
  batch = {name: P(None, rows or None, *(length,) * (name != 'rows'))
           for name in ('tokens', 'targets', 'rows', 'weights')}
  options = dict(schedule=schedule, num_stages=mesh.shape['stage'], repeats=repeats,
                 num_microbatches=num_microbatches, varying_axes=manual, skip_idle=skip_idle)

  def vary(tree, specs):
    def one(x, spec):
      missing = tuple(a for a in manual if a not in jax.tree.leaves(tuple(spec)))
      return jax.lax.pcast(x, missing, to='varying') if missing else x
    return jax.tree.map(one, tree, specs)

  def reduce(x, spec):
    return jax.lax.psum(x, tuple(a for a in manual if a not in jax.tree.leaves(tuple(spec))))

  def body(params, microbatches):
    params, microbatches = vary(params, specs), vary(microbatches, batch)
    if not train:
      return jax.lax.psum(pp.forward(model, params, microbatches, **options), manual)
    grads, sums = pp.value_and_grad(model, params, microbatches, **options)
    return jax.tree.map(reduce, grads, specs), jax.lax.psum(sums, manual)

  mapped = jax.shard_map(body, mesh=mesh, in_specs=(specs, batch), axis_names=set(manual),
                         out_specs=(specs, P()) if train else P())
  if 'model' not in mesh.axis_names:
    return jax.jit(mapped)
  by_columns = NamedSharding(mesh, P('stage', None, 'model'))
  whole = NamedSharding(mesh, P())
  shardings = {'table': whole, 'shared': whole, 'layers': {'wi': by_columns, 'wo': by_columns},
               'logits': NamedSharding(mesh, P(None, 'model'))}
  return jax.jit(mapped, in_shardings=(shardings, None))


def in_memory_order(params, order):
  return {**params, 'layers': jax.tree.map(lambda w: w[order], params['layers'])}


def assert_equal(found, expected, what):
  scale = np.abs(expected).max()
  np.testing.assert_allclose(found / scale, expected / scale, atol=TOLERANCE, err_msg=what)


def assert_matches_sequential(mesh, schedule, num_microbatches, *, repeats=1, **options):
  order = pp.layer_order(LAYERS, mesh.shape['stage'], repeats)
  step = pipeline(mesh, schedule, num_microbatches, repeats=repeats, **options)
  grads, sums = step(in_memory_order(toy_params(), order), toy_batch(num_microbatches))
  expected_grads, expected_sums = sequential(num_microbatches)
  jax.tree.map_with_path(lambda path, a, b: assert_equal(a, b, jax.tree_util.keystr(path)),
                         (grads, sums), (in_memory_order(expected_grads, order), expected_sums))


SCHEDULES = [('gpipe', 1), ('1f1b', 1), ('circular', 2)]


@pytest.mark.parametrize('num_microbatches', [4, 8, 5])
@pytest.mark.parametrize('schedule, repeats', SCHEDULES)
def test_four_stages_equal_the_sequential_model(schedule, repeats, num_microbatches):
  assert_matches_sequential(make_mesh(stage=4), schedule, num_microbatches, repeats=repeats)


@pytest.mark.parametrize('schedule, repeats', SCHEDULES)
@pytest.mark.parametrize('mesh', [dict(stage=2, data=2), dict(stage=2, model=2)], ids=str)
def test_two_stages_with_data_or_model_equal_the_sequential_model(mesh, schedule, repeats):
  assert_matches_sequential(make_mesh(**mesh), schedule, 4, repeats=repeats)


@pytest.mark.parametrize('schedule', ['gpipe', '1f1b'])
def test_three_axes_with_gathered_parameters_equal_the_sequential_model(schedule):
  assert_matches_sequential(make_mesh(stage=2, fsdp=2, model=2), schedule, 3,
                            model=Toy(gather_over='fsdp'))
