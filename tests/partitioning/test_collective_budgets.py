"""The traffic of a training step, counted in the partitioned program: no more than necessary.

Bytes are compared with the `traffic_per_step` of the parallelisms in use, for each set of mesh axes
that a collective crosses.
"""

import collections
import math

import numpy as np
import pytest

from t5x_gpu.compiled.collectives import inventory, partitioned_hlo
from t5x_gpu.partitioning import (
  context_parallel,
  data_parallel,
  expert_parallel,
  fsdp,
  sequence_parallel,
  tensor_parallel,
)
from t5x_gpu.partitioning import pipeline as pipeline_lib
from t5x_gpu.partitioning.array_layout import state_layouts
from t5x_gpu.tools.planning.sharding_lint import GRADIENT, ParameterShapes, gathered, purpose
from tests.helpers_collectives import chosen
from tests.helpers_layouts import (
  BATCH,
  CASES,
  CONFIG,
  EXPERTS,
  LENGTH,
  QUICK,
  Case,
  build,
  busy,
  by_case,
  collectives,
  config_of,
  program,
  slots,
  ticks,
)

# Axes that split rows or positions, and so make gradients that are sums. So does `expert`, of all
# but the experts.
TOKENS = ('data', 'context')
MESH = ('stage', 'data', 'fsdp', 'context', 'expert', 'model')


def expected_bytes(name):
  """Returns mesh axes -> bytes that a device sends over them, from the formulas of each file."""
  case, c = CASES[name], config_of(CASES[name])
  partitioner, n = program(name).layout, program(name).layout.mesh.shape
  stage, in_bfloat16 = partitioner.zero_stage, partitioner.gradient_dtype == 'bfloat16'
  dtype_bytes = np.dtype(c.compute_dtype).itemsize
  num_layers = c.num_layers // n['stage']
  # Elements that one device holds, whole over fsdp.
  mlp = num_layers * 3 * c.mlp_dim * c.embed_dim // n['model']
  experts, router = mlp * c.num_experts // n['expert'], num_layers * c.embed_dim * c.num_experts
  shares_kv = n['model'] > c.kv_heads
  keys = 2 * c.kv_heads * c.head_dim // (1 if shares_kv else n['model'])
  others = num_layers * (2 * c.num_heads * c.head_dim // n['model'] + keys + 2) * c.embed_dim
  others += 0 if c.num_experts else mlp
  ends = 2 * c.vocab_size * c.embed_dim // n['model'] + c.embed_dim
  bias = c.num_heads * c.num_relpos_buckets // n['model']
  rows, length = BATCH // n['data'] // n['fsdp'] // n['expert'], LENGTH // n['context']
  expected = collections.Counter()

  def add(axes, traffic):
    if axes and traffic:
      expected[tuple(a for a in MESH if a in axes and n[a] > 1)] += sum(traffic.values())

  def all_reduced(size, *more_axes):
    axes = [a for a in (*TOKENS, *more_axes) if n[a] > 1]
    add(
      axes,
      data_parallel.traffic_per_step(
        gradient_bytes=4 * size, replicas=math.prod(n[a] for a in axes), in_bfloat16=in_bfloat16
      ),
    )

  all_reduced(experts // n['fsdp'])
  all_reduced(others // n['fsdp'], 'expert')
  all_reduced(ends // n['fsdp'], 'expert', 'stage')
  all_reduced(router, 'expert', 'fsdp')
  all_reduced(bias, 'expert', 'stage', 'fsdp')
  pipeline = partitioner.pipeline
  if n['fsdp'] > 1:
    add(
      ['fsdp'],
      fsdp.traffic_per_step(
        layers_size=experts + others,
        other_size=ends,
        fsdp=n['fsdp'],
        zero_stage=stage,
        dtype_bytes=dtype_bytes,
        in_pipeline=pipeline is not None,
        in_bfloat16=in_bfloat16,
      ),
    )
  if n['model'] > 1:
    sizes = dict(
      batch=rows,
      length=length,
      embed_dim=c.embed_dim,
      num_layers=num_layers,
      model=n['model'],
      dtype_bytes=dtype_bytes,
      recomputed=2 if pipeline else 1 if c.remat_policy == 'full' else 0,
    )
    split = case.partitioner.get('sequence_parallel', False)
    shared_kv_size = num_layers * keys * c.embed_dim if shares_kv else 0
    add(
      ['model'],
      sequence_parallel.traffic_per_step(**sizes)
      if split
      else tensor_parallel.traffic_per_step(shared_kv_size=shared_kv_size, **sizes),
    )
  if n['expert'] > 1:
    add(
      ['expert'],
      expert_parallel.traffic_per_step(
        batch=rows,
        num_experts=c.num_experts,
        capacity=slots(c),
        embed_dim=c.embed_dim,
        num_layers=num_layers,
        expert=n['expert'],
        dtype_bytes=dtype_bytes,
      ),
    )
  if pipeline:
    activation = rows // pipeline.num_microbatches * length * c.embed_dim * dtype_bytes
    between = n['model'] if case.partitioner.get('sequence_parallel') else 1
    add(['stage'], pipeline_lib.traffic_per_step(pipeline, activation_bytes=activation // between))
  if n['context'] > 1:
    add(
      ['context'],
      {
        '': context_parallel.traffic_per_step(
          batch=rows,
          length=LENGTH,
          num_heads=c.kv_heads // n['model'],
          head_dim=c.head_dim,
          num_layers=num_layers,
          context=n['context'],
          dtype_bytes=dtype_bytes,
          method=partitioner.rules.context_method,
          info_bytes=4 * (rows + 1) * length,
        )
      },
    )
  return dict(expected)


def sent_bytes(name):
  """Returns mesh axes -> bytes that the program sends over them.

  A stage of a pipeline idles in some ticks: what it does only if it has work counts as often as
  it has.
  """
  taken = busy(name) if program(name).layout.pipeline else 1
  sent = collections.Counter()
  for c in collectives(name):
    sent[c.axes] += c.bytes_per_call * (taken if c.in_branch else 1)
  return dict(sent)


@by_case(
  name for name, case in CASES.items() if case.num_devices > 1 and name != 'fsdp_by_4_microbatches'
)
def test_bytes_are_what_the_formulas_say(name):
  sent, expected = sent_bytes(name), expected_bytes(name)
  assert sent == pytest.approx(expected, rel=0.05)


@by_case(name for name in CASES if name.endswith('gradients_in_bfloat16'))
def test_gradients_in_bfloat16_are_named_so_and_explained(name):
  p = program(name)
  parameters, optimizer = state_layouts(p.abstract_state, p.names)
  shapes = ParameterShapes(parameters, p.layout.mesh.shape)
  exchanges = chosen(collectives(name), kind='all-to-all')
  assert exchanges and {c.dtype for c in exchanges} == {'bf16'}
  assert {purpose(c, shapes) for c in exchanges} == {GRADIENT}
  assert gathered(collectives(name), parameters, optimizer, p.layout.mesh.shape) == []


# One layer's parameters, parameters outside of layers, and a parameter that fsdp does not split.
NORM = (32,)
LAYER = [NORM, NORM, *[(32, 8, 8)] * 3, (8, 8, 32), (32, 96), (32, 96), (96, 32)]
STACKED = [(4, *shape) for shape in LAYER]
ENDS = [(160, 32), (32, 160), NORM]
BIAS = [(8, 32)]
EMBED_DIM, LAYERS = 32, 4


def found(name, kind, axis=None):
  """Returns the shapes of what runs, sorted, each as often as it runs."""
  return sorted(
    c.shape for c in chosen(collectives(name), kind=kind, axis=axis) for _ in range(c.count)
  )


def kinds(name, **of):
  return {c.kind for c in chosen(collectives(name), **of)}


@by_case(['dp', 'dp_4_microbatches'])
def test_data_parallel_sums_every_gradient_once_whatever_the_microbatches(name):
  assert found(name, 'all-reduce') == sorted(LAYERS * LAYER + ENDS + BIAS)
  assert kinds(name) == {'all-reduce'}


@by_case(['zero1', 'zero1_4_microbatches'])
def test_zero1_scatters_every_gradient_and_gathers_every_new_parameter_once(name):
  assert found(name, 'reduce-scatter') == sorted(LAYERS * LAYER + ENDS)
  assert found(name, 'all-gather') == sorted(STACKED + ENDS)
  assert found(name, 'all-reduce') == BIAS
  assert not any('shard_map' in c.op_name for c in chosen(collectives(name), kind='all-gather'))


@by_case(['fsdp', 'fsdp_4_microbatches'])
def test_zero3_gathers_layers_twice_and_scatters_once_whatever_the_microbatches(name):
  assert found(name, 'all-gather') == sorted(2 * LAYERS * LAYER + ENDS)
  assert found(name, 'reduce-scatter') == sorted(LAYERS * LAYER + ENDS)
  assert found(name, 'all-reduce') == BIAS


@pytest.mark.slow
def test_zero3_by_microbatch_gathers_and_scatters_for_each():
  name = 'fsdp_by_4_microbatches'
  assert found(name, 'all-gather') == sorted((2 * LAYERS * LAYER + ENDS) * 4)
  assert found(name, 'reduce-scatter') == sorted((LAYERS * LAYER + ENDS) * 4)


@pytest.mark.slow
def test_a_pipeline_makes_the_parameters_of_a_stage_whole_once():
  of_stage = [(2, *shape) for shape in LAYER]
  assert found('fsdp_pp', 'all-gather', 'fsdp') == sorted(of_stage + ENDS)
  assert found('fsdp_pp', 'reduce-scatter', 'fsdp') == sorted(of_stage + ENDS)


@by_case(['fsdp', 'fsdp_4_microbatches', 'hsdp', 'fsdp_tp'])
def test_zero3_never_gathers_a_stack_of_layers(name):
  p = program(name)
  layers = CONFIG.num_layers // p.layout.mesh.shape['stage']
  gathered = found(name, 'all-gather', 'fsdp')
  assert gathered and not any(
    len(shape) > 1
    and shape[0] == layers
    and shape[1:] in {*LAYER, *[(s[0], s[1] // 2, *s[2:]) for s in LAYER if len(s) > 1]}
    for shape in gathered
  )


@pytest.mark.slow
def test_zero3_does_not_have_all_layers_whole_at_once():
  sizes = dict(vocab_size=64, embed_dim=64, num_heads=4, head_dim=16, mlp_dim=512)
  layer_bytes = 4 * (4 * 64 * 64 + 3 * 64 * 512)

  def temp_layers(num_layers):
    p = build(
      Case(dict(fsdp=8), dict(sizes, num_layers=num_layers)),
      batch_size=8,
      task_feature_lengths={'targets': 8},
    )
    compiled = p.train_step.lower(p.abstract_state, p.abstract_batch).compile(
      compiler_options=QUICK
    )
    return compiled.memory_analysis().temp_size_in_bytes / layer_bytes

  # The parts (an eighth each) of a gradient, two moments and the parameter; never a whole layer.
  assert temp_layers(8) - temp_layers(4) < 4 * 0.55


@pytest.mark.slow
def test_hybrid_sharding_sends_only_parts_between_hosts():
  parts = [
    tuple(size // 4 if size == EMBED_DIM else size for size in shape)
    for shape in LAYERS * LAYER + ENDS
  ]
  assert found('hsdp', 'all-reduce', 'data') == sorted(parts + BIAS)
  assert kinds('hsdp', axis='data') == {'all-reduce'}
  assert found('hsdp', 'all-gather') == sorted(2 * LAYERS * LAYER + ENDS)


ACTIVATION, PER_TOKEN = (BATCH, LENGTH, EMBED_DIM), (BATCH, LENGTH)
VOCABULARY = (CONFIG.vocab_size, CONFIG.vocab_size // 2, CONFIG.vocab_size // 8)


def where(name, kind, shape=ACTIVATION):
  """Returns (in the loop over layers, backward) -> how many per layer, or in all outside of it."""
  return dict(
    collections.Counter(
      (bool(c.trip_counts), 'transpose(' in c.op_name)
      for c in collectives(name)
      if (c.kind, c.shape) == (kind, shape)
    )
  )


FORWARD, BACKWARD = (True, False), (True, True)
EMBEDDING, LOGITS = (False, False), (False, True)


def test_a_tensor_parallel_layer_has_two_all_reduces_forward_and_two_backward():
  assert where('tp', 'all-reduce') == {FORWARD: 2, BACKWARD: 2, EMBEDDING: 1, LOGITS: 1}
  # The largest logit, the sum of exponentials, the target's logit.
  assert where('tp', 'all-reduce', PER_TOKEN) == {(False, False): 3}
  assert kinds('tp') == {'all-reduce'}
  assert len(collectives('tp')) == 9


@pytest.mark.slow
def test_full_remat_sums_one_of_the_two_outputs_again():
  assert where('tp_full_remat', 'all-reduce') == {FORWARD: 2, BACKWARD: 3, EMBEDDING: 1, LOGITS: 1}


def test_sequence_parallel_gathers_and_scatters_in_place_of_all_reduces():
  # What a norm returns is gathered as the parts for which it has copies of its scale.
  of_norms = (8, BATCH // 8, LENGTH, EMBED_DIM)
  assert where('tp_sp', 'all-gather', of_norms) == {FORWARD: 2, EMBEDDING: 1}
  assert where('tp_sp', 'all-gather') == {BACKWARD: 2, LOGITS: 1}
  assert where('tp_sp', 'reduce-scatter') == {FORWARD: 2, BACKWARD: 2, EMBEDDING: 1, LOGITS: 1}
  assert where('tp_sp', 'all-reduce') == {}
  assert where('tp_sp', 'all-reduce', PER_TOKEN) == {(False, False): 3}


@pytest.mark.parametrize('rows, shape', [(16, (8, 2, LENGTH)), (12, (12, 8, LENGTH // 8))])
def test_sequence_parallelism_splits_rows_if_they_divide_else_positions(rows, shape):
  p = build(Case(dict(num_partitions=8, sequence_parallel=True)), batch_size=rows)
  text = partitioned_hlo(p.train_step.lower(p.abstract_state, p.abstract_batch))
  sent = inventory(text, p.layout.mesh.shape)
  assert (*shape, EMBED_DIM) in [c.shape for c in sent if c.kind == 'all-gather']
  assert not [c for c in sent if c.kind == 'all-reduce' and math.prod(c.shape) > rows * LENGTH]


_1F1B = dict(stage=2, pipeline_schedule='1f1b')
_POSITIONED = dict(
  norm='layer', attention_bias='all', mlp_bias=True, num_positions=LENGTH, relative_bias='none'
)


@pytest.mark.slow
@pytest.mark.parametrize(
  'case, count',
  [
    # Scale and bias of two norms, and the biases of two projections out of a layer; the last norm;
    # and for each microbatch the positions, whose rows are split.
    pytest.param(
      Case(dict(num_partitions=4, sequence_parallel=True), _POSITIONED, num_microbatches=2),
      6 + 2 + 2,
      marks=pytest.mark.slow,
    ),
    pytest.param(
      Case(
        dict(fsdp=2, num_partitions=4, sequence_parallel=True),
        dict(qk_norm=True),
        num_microbatches=2,
      ),
      2 + 2 + 1,
      marks=pytest.mark.slow,
    ),
    pytest.param(
      Case(dict(_1F1B, num_partitions=2, sequence_parallel=True), dict(qk_norm=True)),
      2 + 2 + 1,
      marks=pytest.mark.slow,
    ),
    # Kernels and biases of keys and values of which there are fewer than devices.
    (
      Case(
        dict(fsdp=2, num_partitions=4, sequence_parallel=True),
        dict(num_kv_heads=2, attention_bias='qkv'),
        num_microbatches=2,
      ),
      4 + 2 + 1,
    ),
  ],
  ids=['layer_norm', 'qk_norm_fsdp', 'qk_norm_1f1b', 'shared_kv_heads'],
)
def test_parameters_of_positions_and_heads_are_summed_over_model_once(case, count):
  p = build(case, batch_size=64)
  sent = [
    c
    for c in inventory(
      partitioned_hlo(p.train_step.lower(p.abstract_state, p.abstract_batch)), p.layout.mesh.shape
    )
    if c.axes == ('model',) and math.prod(c.shape) > 1
  ]
  sums = [c for c in sent if c.kind == 'all-reduce']
  losses = [c for c in sums if 'models/losses.py' in c.source]
  assert len([c for c in sums if c.count == 1 and c not in losses]) == count
  assert all(c.count == 1 or c in losses for c in sums)
  # Gradients of what a layer gets are scattered, not summed whole (what a bias wants as well).
  assert any(c.kind == 'reduce-scatter' and 'transpose(' in c.op_name for c in sent)


def test_a_layer_sends_as_many_bytes_with_sequence_parallelism_as_without():
  def of_layers(name):
    return sum(c.bytes_per_call for c in collectives(name) if c.trip_counts and c.shape != NORM)

  assert of_layers('tp') == of_layers('tp_sp') > 0


@by_case(name for name, case in CASES.items() if 'num_partitions' in case.partitioner)
def test_neither_logits_nor_tables_are_gathered_over_model(name):
  assert not [
    c
    for c in chosen(collectives(name), axis='model')
    if c.kind == 'all-gather' and set(c.shape) & set(VOCABULARY)
  ]


@pytest.mark.parametrize(
  'name, activation',
  [
    ('pp', (16, 16, 32)),
    pytest.param('pp_16_microbatches', (8, 16, 32), marks=pytest.mark.slow),
    pytest.param('3d', (16, 16, 32), marks=pytest.mark.slow),
    pytest.param('fsdp_pp', (16, 16, 32), marks=pytest.mark.slow),
  ],
)
def test_a_pipeline_moves_one_activation_per_tick_and_direction(name, activation):
  assert found(name, 'collective-permute') == [activation] * 2 * ticks(name)
  assert kinds(name, axis='stage') == {'collective-permute', 'all-reduce'}


@by_case(['pp', 'pp_16_microbatches', 'pp_gpipe', 'pp_circular'])
def test_a_pipeline_sums_every_gradient_once_whatever_the_microbatches(name):
  of_stage = [(2, *shape) for shape in LAYER]
  assert found(name, 'all-reduce') == sorted(of_stage + ENDS + BIAS)
  assert found(name, 'all-reduce', 'stage') == sorted(ENDS + BIAS)


@pytest.mark.slow
def test_a_ring_sends_keys_and_values_context_minus_one_times_and_gradients_home():
  ways, visitor = 4, (BATCH // 2, LENGTH // 4, 8, 8)
  sent = found('cp', 'collective-permute')
  # Forward, again backward; gradients travel one hop more, back to where they belong.
  assert sent.count(visitor) == LAYERS * 2 * ((ways - 1) + (ways - 1) + ways)
  assert kinds('cp') == {'collective-permute', 'all-reduce'}
  assert found('cp', 'all-reduce') == sorted(LAYERS * LAYER + ENDS + BIAS)


@pytest.mark.slow
def test_gathered_attention_gathers_keys_and_values_and_scatters_their_gradients_once():
  whole = (BATCH // 2, LENGTH, 8, 8)
  for kind in ('all-gather', 'reduce-scatter'):
    assert found('cp_gather', kind).count(whole) == 2 * LAYERS


@pytest.mark.slow
def test_with_model_fsdp_moves_only_the_local_part():
  halves = {
    (32, 8, 8): (32, 4, 8),
    (8, 8, 32): (4, 8, 32),
    (32, 96): (32, 48),
    (96, 32): (48, 32),
    (160, 32): (80, 32),
    (32, 160): (32, 80),
    NORM: NORM,
  }
  assert found('fsdp_tp', 'all-gather') == sorted(
    halves[shape] for shape in 2 * LAYERS * LAYER + ENDS
  )
  assert where('fsdp_tp', 'all-reduce', (BATCH // 4, LENGTH, EMBED_DIM)) == {
    FORWARD: 2,
    BACKWARD: 2,
    EMBEDDING: 1,
    LOGITS: 1,
  }


@pytest.mark.slow
def test_gradients_of_parts_are_summed_over_context_once():
  parts = [
    tuple(size // 4 if size == EMBED_DIM else size for size in shape)
    for shape in LAYERS * LAYER + ENDS
  ]
  assert found('fsdp_cp', 'all-reduce', 'context') == sorted(parts + BIAS)


@pytest.mark.slow
def test_experts_exchange_tokens_twice_each_way_and_every_gradient_is_summed_once():
  exchanged = [c for c in collectives('ep') if c.kind == 'all-to-all']
  assert sum(c.count for c in exchanged) == 4 * LAYERS
  assert {math.prod(c.shape) for c in exchanged} == {
    BATCH // 8 * EXPERTS['num_experts'] * slots(config_of(CASES['ep'])) * EMBED_DIM
  }
  own = LAYERS * [(1, 32, 96), (1, 32, 96), (1, 96, 32)]  # of the one expert of each device
  shared = LAYERS * [shape for shape in LAYER if 96 not in shape] + LAYERS * [(32, 4)] + ENDS + BIAS
  reduced = {
    axes: sorted(
      c.shape
      for c in collectives('ep')
      if c.axes == axes and c.kind == 'all-reduce'
      for _ in range(c.count)
    )
    for axes in (('data',), ('data', 'expert'))
  }
  assert reduced == {('data',): sorted(own), ('data', 'expert'): sorted(shared)}
  assert kinds('ep') == {'all-to-all', 'all-reduce'}


@pytest.mark.slow
def test_in_3d_every_gradient_is_summed_once_over_data():
  reduced = list(chosen(collectives('3d'), axis='data'))
  assert all(c.count == 1 and c.kind == 'all-reduce' for c in reduced)
  assert len(reduced) == len(LAYER + ENDS + BIAS)
  assert sorted(len(c.axes) for c in reduced) == [1] * len(LAYER) + [2] * len(ENDS + BIAS)
