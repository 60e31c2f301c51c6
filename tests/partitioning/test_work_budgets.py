"""Computation and memory of one device in the partitioned program equal the formulas."""

import math

import pytest

from t5x_gpu.compiled import hlo_text
from t5x_gpu.compiled.collectives import flops_per_device
from tests.helpers_layouts import (
  BATCH,
  CASES,
  CONFIG,
  EXPERTS,
  LENGTH,
  busy,
  by_case,
  config_of,
  hlo,
  program,
  slots,
  ticks,
  timetable,
)

C = CONFIG
TOKENS = BATCH * LENGTH
HEADS = C.num_heads * C.head_dim
# Forward, of the whole batch: one layer, the head, and the one-hot product of the relative bias.
ATTENTION = 2 * TOKENS * LENGTH * HEADS  # of logits, and as much again of their use
LAYER = 2 * TOKENS * (4 * HEADS + 3 * C.mlp_dim) * C.embed_dim + 2 * ATTENTION
LAST_MATMUL = 2 * TOKENS * C.mlp_dim * C.embed_dim
HEAD = 2 * TOKENS * C.embed_dim * C.vocab_size
BIAS = 2 * C.num_heads * LENGTH**2 * C.num_relpos_buckets
IDEAL = 3 * (C.num_layers * LAYER + HEAD)
# Experts work on all of their slots; the router's logits in place of the dense MLP.
NUM_EXPERTS = EXPERTS['num_experts']
SLOTS = BATCH * NUM_EXPERTS * slots(config_of(CASES['one_device_experts']))
IDEAL_EXPERTS = IDEAL + 3 * C.num_layers * 2 * C.embed_dim * (
  3 * C.mlp_dim * (SLOTS - TOKENS) + TOKENS * NUM_EXPERTS
)

PIPELINES = [name for name, case in CASES.items() if 'stage' in case.partitioner]
REMAT = [name for name, case in CASES.items() if 'remat_policy' in case.config]
BY_LAYER = ['fsdp_4_microbatches', 'zero2_4_microbatches']
ONE_DEVICE = [name for name, case in CASES.items() if case.num_devices == 1]
GROUPED = [name for name, case in CASES.items() if 'num_kv_heads' in case.config]
OTHERS = [name for name in CASES if name not in PIPELINES + REMAT + ONE_DEVICE + BY_LAYER + GROUPED]


def has_experts(name):
  return config_of(CASES[name]).num_experts > 0


def ideal(name):
  return IDEAL_EXPERTS if has_experts(name) else IDEAL


def size(name, axis):
  return program(name).layout.mesh.shape[axis]


@by_case(ONE_DEVICE)
def test_one_device_computes_what_the_mathematics_needs(name):
  assert flops_per_device(hlo(name)) == ideal(name) + 2 * BIAS


@by_case(OTHERS)
def test_each_device_does_its_part_of_the_work(name):
  alone = 'one_device_experts' if has_experts(name) else 'one_device'
  assert flops_per_device(hlo(name)) == pytest.approx(flops_per_device(hlo(alone)) / 8, rel=0.03)


@by_case(name for name in OTHERS if 'context' not in CASES[name].partitioner)
def test_only_the_relative_bias_is_computed_by_every_replica(name):
  bias = 2 * BIAS // size(name, 'model') * CASES[name].num_microbatches
  assert flops_per_device(hlo(name)) == ideal(name) // 8 + bias


@by_case(['tp_grouped', 'tp_shared_kv'])
def test_grouped_keys_and_values_are_computed_once_or_once_per_device_where_they_are_shared(name):
  model = size(name, 'model')
  computed = max(config_of(CASES[name]).kv_heads, model) * C.head_dim
  saved = 3 * C.num_layers * 2 * TOKENS * 2 * (HEADS - computed) * C.embed_dim
  assert flops_per_device(hlo(name)) == (IDEAL - saved) // 8 + 2 * BIAS // model


@by_case(BY_LAYER)
def test_accumulation_by_layer_computes_everything_again_but_the_embedding(name):
  assert flops_per_device(hlo(name)) == pytest.approx(4 / 3 * IDEAL / 8, rel=0.03)


@pytest.mark.slow
def test_a_ring_computes_the_logits_again_in_the_backward_pass_and_gathering_does_not():
  again = C.num_layers * ATTENTION // 8
  assert flops_per_device(hlo('cp')) - IDEAL // 8 == pytest.approx(again, rel=0.1)
  assert flops_per_device(hlo('cp_gather')) - IDEAL // 8 < 0.1 * again


def of_a_block(table):
  """Returns FLOPs of a block's layers: forward, again, and back (twice), for the whole batch.

  A block of one layer has no loop, so XLA does not compute again what nothing reads.
  """
  layers = C.num_layers // (table.num_stages * table.repeats)
  return 4 * layers * LAYER - (LAST_MATMUL if layers == 1 else 0)


@by_case(PIPELINES)
def test_a_stage_computes_its_layers_again_and_nothing_else_beyond_its_part(name):
  # For each tick, the program's text has the most expensive branch: a unit forward, again, and back
  # (twice).
  table, model = timetable(name), size(name, 'model')
  microbatches = table.num_microbatches * 8 // table.num_stages
  layers = of_a_block(table) // microbatches
  bias = 3 * BIAS // model
  if table.schedule == '1f1b':  # the last stage's head; its layers it computes but thrice
    done = ticks(name) * (layers + 3 * HEAD // microbatches + bias)
  else:  # every stage's share of the heads
    done = ticks(name) * (layers + bias) + table.head_share * 3 * HEAD // microbatches
  assert flops_per_device(hlo(name)) == done


@by_case(['pp', 'pp_16_microbatches', 'pp_gpipe', 'pp_circular', '3d'])
def test_without_idle_ticks_a_pipeline_computes_four_thirds_of_its_layers(name):
  table = timetable(name)
  layers = of_a_block(table) * table.num_stages * table.repeats / 8
  # Under 1f1b a middle stage has no head; the text has the last stage's.
  head = 3 * HEAD / 8 * (table.num_stages if table.schedule == '1f1b' else 1)
  assert busy(name) * flops_per_device(hlo(name)) == pytest.approx(layers + head, rel=0.03)


def state_bytes(name):
  """Returns bytes of parameters and AdamW's two moments on one device, from sizes alone."""
  n = program(name).layout.mesh.shape
  mlp = 3 * C.mlp_dim * (NUM_EXPERTS // n['expert'] if has_experts(name) else 1)
  kv_heads = config_of(CASES[name]).kv_heads
  keys = 2 * kv_heads * C.head_dim // (1 if kv_heads < n['model'] else n['model'])
  layers = C.num_layers * C.embed_dim // n['stage'] * ((2 * HEADS + mlp) // n['model'] + keys)
  scales = 2 * C.num_layers * C.embed_dim // n['stage'] + C.embed_dim
  tables = 2 * C.vocab_size * C.embed_dim // n['model']
  whole = C.num_heads * C.num_relpos_buckets // n['model']
  whole += C.num_layers * C.embed_dim * NUM_EXPERTS if has_experts(name) else 0  # the router
  split = layers + scales + tables
  parameters = split if program(name).layout.zero_stage < 3 else split // n['fsdp']
  return 4 * (parameters + whole) + 2 * 4 * (split // n['fsdp'] + whole)


@by_case(CASES)
def test_each_device_keeps_its_part_of_parameters_and_optimizer_state(name):
  module = hlo_text.parse(hlo(name))
  kept = sum(
    i.arrays[0].num_bytes
    for i in module.computations[module.entry].instructions.values()
    if i.opcode == 'parameter'
  )
  rows = math.prod(size(name, axis) for axis in ('data', 'fsdp', 'context', 'expert'))
  batch = 4 * 4 * TOKENS // rows  # inputs, targets, weights, segment ids
  assert kept - batch == pytest.approx(state_bytes(name), rel=0.001)
