"""Experts split over devices: same training, 1/n of their memory, two all-to-alls each way."""

import functools

import jax
import pytest

from t5x_gpu.compiled.collectives import inventory, partitioned_hlo
from t5x_gpu.layers.moe import capacity
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.partitioning.expert_parallel import check, traffic_per_step
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.schedules import constant
from tests.helpers_collectives import chosen, count, total_bytes
from tests.helpers_parity import OPTIMIZER, assert_same_steps, recorded
from tests.helpers_programs import build_with
from tests.messages import record_message

BATCH, LENGTH, EXPERTS = 16, 16, 4
# As much room as evenly spread tokens need: some find none.
CONFIG = TransformerConfig(
  vocab_size=64,
  num_layers=2,
  embed_dim=16,
  num_heads=2,
  head_dim=8,
  mlp_dim=32,
  dropout_rate=0.1,
  num_experts=EXPERTS,
  expert_capacity_factor=1.0,
)
LAYOUTS = {
  'one': {},
  'data': dict(data=2, expert=4),
  'fsdp': dict(fsdp=4, expert=2),
  'model': dict(data=2, expert=2, num_partitions=2),
  'sequence': dict(fsdp=2, expert=2, num_partitions=2, sequence_parallel=True),
  'ring': dict(context=4, expert=2),
  'gather': dict(context=2, expert=2, fsdp=2, context_attention='gather'),
  'stage': dict(stage=2, expert=2, num_partitions=2),
}


@functools.cache
def program(name, optimizer=AdamW()):
  number = 1 if name == 'one' else 8
  return build_with(
    model=DecoderOnlyModel(CONFIG, z_loss=1e-3),
    optimizer=optimizer,
    learning_rate=constant(1e-2),
    partitioner=Partitioner(accumulate_by='microbatch', **LAYOUTS[name]),
    topology=Topology(1, number),
    devices=jax.devices()[:number],
    task_feature_lengths={'targets': LENGTH},
    batch_size=BATCH,
    pack=True,
    num_microbatches=2,
  )


@functools.cache
def collectives(name):
  p = program(name)
  return inventory(
    partitioned_hlo(p.train_step.lower(p.abstract_state, p.abstract_batch)), p.layout.mesh.shape
  )


# More layouts, and every gradient, in tests/parity/test_layouts.py, with room for nearly all.
@pytest.mark.slow
@pytest.mark.parametrize('name', ['ring', 'sequence', 'gather', 'stage'])
def test_rows_without_room_for_all_tokens_train_as_on_one_device(name):
  assert_same_steps(recorded(program(name, OPTIMIZER)), one_device(), num_steps=2)


@functools.cache
def one_device():
  return recorded(program('one', OPTIMIZER))


@pytest.mark.parametrize('name', [name for name in LAYOUTS if name != 'one'])
def test_a_device_keeps_its_own_experts_and_the_whole_router(name):
  p = program(name)
  ways, model = p.layout.mesh.shape['expert'], p.layout.mesh.shape['model']
  layers = CONFIG.num_layers // p.layout.mesh.shape['stage']
  embed = CONFIG.embed_dim // p.layout.mesh.shape['fsdp']
  moe = {
    path: a.sharding.shard_shape(a.shape)
    for path, a in p.abstract_state.params['layers']['moe'].items()
    for a in a.values()
  }
  assert moe == {
    'router': (layers, CONFIG.embed_dim, EXPERTS),
    'wi_0': (layers, EXPERTS // ways, embed, CONFIG.mlp_dim // model),
    'wi_1': (layers, EXPERTS // ways, embed, CONFIG.mlp_dim // model),
    'wo': (layers, EXPERTS // ways, CONFIG.mlp_dim // model, embed),
  }


@pytest.mark.slow
@pytest.mark.parametrize('name', ['sequence', 'data', 'fsdp'])
def test_a_layer_exchanges_tokens_twice_forward_and_twice_backward(name):
  found, mesh = collectives(name), program(name).layout.mesh.shape
  exchanges = chosen(found, kind='all-to-all', axis='expert')
  lookups = chosen(found, kind='all-to-all', axis='fsdp')
  axes = {('expert',), ('fsdp',)} if name == 'fsdp' else {('expert',)}
  assert {c.axes for c in found if c.kind == 'all-to-all'} == axes
  assert count(exchanges) == 4 * CONFIG.num_layers * 2  # microbatches
  # Rows of the token table cross fsdp once forward and once backward.
  assert count(lookups) == (2 * 2 if name == 'fsdp' else 0)
  rows = BATCH // (mesh['data'] * mesh['fsdp'] * mesh['expert'])
  want = traffic_per_step(
    batch=rows,
    num_experts=EXPERTS,
    embed_dim=CONFIG.embed_dim,
    num_layers=CONFIG.num_layers,
    capacity=capacity(LENGTH, num_experts=EXPERTS, experts_per_token=2, factor=1.0),
    expert=mesh['expert'],
    dtype_bytes=4,
  )
  assert total_bytes(exchanges) == want['all-to-all']
  # What else crosses `expert`: numbers of rows, for dropout, and sums over replicas, at the end.
  others = [c for c in chosen(found, axis='expert') if c.kind != 'all-to-all']
  assert {c.dtype for c in others if c.kind == 'all-gather'} == {'s32'}
  assert {c.kind for c in others} == {'all-gather', 'all-reduce'}
  # Gradients of layers once per layer, in the last microbatch.
  assert {c.count for c in others if c.kind == 'all-reduce'} <= {1, CONFIG.num_layers}


@pytest.mark.slow
@pytest.mark.parametrize('name', ['data', 'fsdp'])
def test_gradients_of_experts_are_not_reduced_over_expert(name):
  p = program(name)
  parts = [
    a.sharding.shard_shape(a.shape)
    for kind in ('wi_0', 'wi_1', 'wo')
    for a in p.abstract_state.params['layers']['moe'][kind].values()
  ]
  assert not [
    c for c in chosen(collectives(name), kind='all-reduce', axis='expert') if c.shape in parts
  ]


@pytest.mark.slow
def test_devices_of_model_route_alike_without_talking_about_it():
  of_moe = [c for c in chosen(collectives('sequence'), axis='model') if '/moe/' in c.op_name]
  sums = [c for c in of_moe if c.kind == 'all-reduce']
  # Reductions of the outputs of `wo`, and of the gradient of the inputs of `wi`; the last of two
  # microbatches is compiled separately.
  assert len(sums) == 2 * 2 and all('->' in c.op_name for c in sums)
  # The rest is what sequence parallelism splits between the matmuls, and numbers of rows.
  others = [c for c in of_moe if c not in sums and c.dtype != 's32']
  assert all(c.shape[-2:] == (LENGTH, CONFIG.embed_dim) for c in others)


@pytest.mark.parametrize('sizes, expert', [({'experts': 8}, 4), ({'experts': 8}, 8), ({}, 1)])
def test_experts_that_divide_are_fine(sizes, expert):
  assert check(sizes, {'data': 8 // expert, 'expert': expert}) == []


def test_experts_that_do_not_divide_are_a_problem_with_the_rule():
  [problem] = check({'experts': 6}, {'data': 2, 'expert': 4})
  record_message(problem.text())
  assert problem.parameters == ('TransformerConfig.num_experts', 'Partitioner.expert')


def test_an_expert_axis_of_a_dense_model_is_a_problem():
  [problem] = check({'mlp': 64}, {'data': 2, 'expert': 4})
  record_message(problem.text())
