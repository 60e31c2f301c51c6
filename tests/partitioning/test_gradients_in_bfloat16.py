"""Gradients sent in bfloat16: how far from exact sums, and the same on every replica."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from t5x_gpu.data.synthetic import uneven_batches
from t5x_gpu.errors import MeshError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.partitioning.manual_collectives import InBfloat16
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.schedules import constant
from tests.helpers_layouts import QUICK
from tests.helpers_parity import OPTIMIZER
from tests.helpers_programs import build_with
from tests.messages import raises

# Largest relative error of one rounding to bfloat16, whose significand has 8 bits.
ROUNDING = 2.0**-8
# Relative to the sum of absolute terms: sums in float32 in another order.
FLOAT32 = 2e-6
AXES = ('data', 'fsdp')
FROM_ALL = PartitionSpec(AXES)


def on_mesh(function, out, *terms):
  """Returns `function` of the terms [8, ...] of the devices, on a mesh of 2 x 4."""
  mesh = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)
  local = jax.shard_map(
    lambda *xs: function(*(x[0] for x in xs)), mesh=mesh, in_specs=FROM_ALL, out_specs=out
  )
  return jax.jit(local)(*terms)


@pytest.mark.parametrize('inside', [{}, {'data': 1}, {'fsdp': 2}])
def test_sums_are_rounded_once_per_term_host_and_result(inside):
  terms = np.random.default_rng(0).standard_normal((8, 3, 8)).astype(np.float32)
  sent = InBfloat16(tuple(inside.items()))

  def sums(x):
    return sent.psum(x, AXES), sent.psum_scatter(x, 'fsdp', dim=-1)

  out = (PartitionSpec(), PartitionSpec('data', 'fsdp'))
  total, scattered = on_mesh(sums, out, terms)
  replicas = [np.asarray(shard.data) for shard in total.addressable_shards]
  assert len(replicas) == 8
  assert all((replica == replicas[0]).all() for replica in replicas)

  def is_near(got, parts, times, axis):
    bound = ((1 + ROUNDING) ** times - 1 + FLOAT32) * np.abs(parts).sum(axis)
    error = np.abs(np.asarray(got) - parts.sum(axis))
    assert (error <= bound).all() and error.max() > ROUNDING / 8

  is_near(total, terms, 3 if inside else 2, 0)
  by_replica = terms.reshape(2, 4, 3, 8)
  is_near(
    np.asarray(scattered).reshape(2, 3, 8), by_replica, 2 if inside == {'fsdp': 2} else 1, axis=1
  )


def test_terms_are_added_in_float32():
  # In bfloat16, 256 + 0.5 is 256, so seven small terms would be lost.
  terms = np.full((8, 16), 0.5, np.float32)
  terms[0] = 256
  total = on_mesh(lambda x: InBfloat16().psum(x, AXES), PartitionSpec(), terms)
  np.testing.assert_array_equal(total, jnp.float32(jnp.bfloat16(259.5)))
  assert float(total[0]) == 260


CONFIG = TransformerConfig(
  vocab_size=64, num_layers=2, embed_dim=16, num_heads=4, head_dim=4, mlp_dim=32
)
ODD = dict(embed_dim=12, mlp_dim=36, vocab_size=60)  # 8 divides none of them
FP8 = dict(dtype='fp8_float32')
# (arguments of Partitioner, changes of CONFIG, hosts, microbatches, roundings)
LAYOUTS = {
  'data': (dict(data=8), {}, 1, 1, 2),
  'data_of_hosts': (dict(data=8), {}, 2, 2, 3),
  'data_overlap': (dict(data=8, overlap_layers=True), {}, 1, 2, 2),
  'zero1': (dict(fsdp=8, zero_stage=1), {}, 1, 1, 2),
  'zero2': (dict(fsdp=8, zero_stage=2), {}, 1, 1, 2),
  'zero3': (dict(fsdp=8), {}, 1, 1, 2),
  'zero3_of_hosts': (dict(fsdp=8, overlap_layers=True), {}, 2, 1, 3),
  'zero3_padded': (dict(fsdp=8), ODD, 1, 2, 2),
  'hsdp': (dict(fsdp=4), {}, 1, 1, 3),
  'hsdp_overlap': (dict(fsdp=4, overlap_layers=True), {}, 2, 1, 3),
  'hsdp_overlap_fp8': (dict(fsdp=4, overlap_layers=True), FP8, 1, 1, 3),
  'pipeline': (dict(stage=2), {}, 1, 1, 2),
  'pipeline_fsdp': (dict(stage=2, fsdp=2), {}, 1, 1, 3),
  'pipeline_overlap': (dict(stage=2, fsdp=2, overlap_layers=True), {}, 1, 2, 3),
  'model': (dict(num_partitions=2, sequence_parallel=True), {}, 1, 1, 2),
  'model_shared_heads': (dict(fsdp=2, num_partitions=4), dict(num_kv_heads=2), 1, 1, 2),
}
FAST = ('hsdp_overlap',)


def model_of(name):
  return DecoderOnlyModel(dataclasses.replace(CONFIG, relative_bias='none', **LAYOUTS[name][1]))


def build(name, optimizer, **partitioner):
  own, _, hosts, num_microbatches, _ = LAYOUTS[name]
  return build_with(
    model=model_of(name),
    optimizer=optimizer,
    learning_rate=constant(1.0),
    partitioner=Partitioner(**own, **partitioner),
    topology=Topology(hosts, 8 // hosts),
    devices=jax.devices()[:8],
    task_feature_lengths={'targets': 16},
    batch_size=16,
    pack=True,
    num_microbatches=num_microbatches,
  )


def terms_of(model, params, batch):
  """Returns path -> [devices, ...], gradients of the mean loss from the rows of each device."""
  weight = max(float(batch['decoder_loss_weights'].sum()), 1.0)

  @jax.jit
  def gradients(params, rows):
    return jax.grad(lambda p: model.loss(p, rows)['loss'][0] / weight)(params)

  found = collections.defaultdict(list)
  for rows in np.split(np.arange(16), 8):
    part = {name: x[rows] for name, x in batch.items()}
    for path, x in leaves(gradients(params, {**part, 'rows': rows})):
      found[path].append(np.asarray(x))
  return {path: np.stack(parts) for path, parts in found.items()}


def leaves(tree):
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  return [(jax.tree_util.keystr(path, simple=True, separator='/'), x) for path, x in flat]


def one_step(program, batch):
  batch = program.layout.put_batch(batch)
  state = program.init.lower().compile(compiler_options=QUICK)()
  params = jax.tree.map(np.asarray, program.in_saved_form(state).params)
  step = program.train_step.lower(program.abstract_state, batch).compile(compiler_options=QUICK)
  return params, step(state, batch)[0]


@pytest.mark.parametrize(
  'name', [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_gradients_are_exact_but_for_their_roundings(name):
  program = build(name, OPTIMIZER, gradient_dtype='bfloat16')
  [batch] = uneven_batches(program.spec, seed=1, num_batches=1)
  params, state = one_step(program, batch)
  replicas_are_equal(state)
  got = dict(leaves(program.in_saved_form(state).opt_state.gradient))
  terms = terms_of(model_of(name), params, batch)
  assert got.keys() == terms.keys()
  exact = {path: parts.sum(0) for path, parts in terms.items()}
  more = 1.0
  # A mesh scales the FP8 kernels of a group alike, so terms differ a little.
  if LAYOUTS[name][1] is FP8:
    of_float32 = build(name, OPTIMIZER)
    state = of_float32.in_saved_form(one_step(of_float32, batch)[1])
    exact = dict(leaves(state.opt_state.gradient))
    more = 1.2
  relative = []
  for path, parts in terms.items():
    sums = more * np.abs(parts).sum(0)
    bound, largest = ((1 + ROUNDING) ** LAYOUTS[name][-1] - 1) * sums, sums.max()
    error = np.abs(np.asarray(got[path]) - exact[path])
    assert (error <= bound + 1e-5 * largest).all(), path
    relative.append(error.max() / largest)
  assert max(relative) > ROUNDING / 16, 'nothing was rounded'


@pytest.mark.parametrize(
  'name', [pytest.param(name, marks=pytest.mark.slow) for name in ('data', 'zero1', 'hsdp')]
)
def test_every_replica_has_the_same_parameters_after_a_step(name):
  program = build(name, AdamW(), gradient_dtype='bfloat16')
  [batch] = uneven_batches(program.spec, seed=1, num_batches=1)
  _, state = one_step(program, batch)
  replicas_are_equal(state)


def replicas_are_equal(tree):
  for path, x in leaves(tree):
    of_index = {}
    for shard in x.addressable_shards:
      first = of_index.setdefault(str(shard.index), np.asarray(shard.data))
      assert np.array_equal(first, np.asarray(shard.data)), path


def test_other_dtypes_are_refused():
  with raises(MeshError):
    Partitioner(gradient_dtype='bflaot16')
