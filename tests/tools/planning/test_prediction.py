"""The arithmetic of a prediction, by hand, and its formulas against compiled programs."""

import collections
import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from t5x_gpu.compiled.collectives import flops_per_device
from t5x_gpu.config import gin_loader
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.partitioning.mesh_sizes import resolve_mesh_sizes
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.planning import screen
from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.formulas import step_memory
from t5x_gpu.tools.planning.formulas import step_time as step_time_lib
from t5x_gpu.tools.planning.formulas.step_shape import step_shape
from t5x_gpu.tools.planning.formulas.step_time import part_time, step_time
from t5x_gpu.tools.planning.formulas.traffic import (
  CollectiveTraffic,
  busy_share,
  compiled_traffic,
  formula_traffic,
)
from t5x_gpu.tools.planning.formulas.work import (
  Work,
  elementwise_bytes,
  step_work,
  with_elementwise_bytes,
)
from t5x_gpu.tools.planning.gpu_targets import TARGETS, find_target
from t5x_gpu.tools.planning.prediction import predict
from t5x_gpu.training.program import build_program
from tests.aot.cases import CASES as AOT_CASES
from tests.aot.cases import Case
from tests.helpers_layouts import CASES, QUICK_CASES, by_case, collectives, config_of, hlo, program
from tests.helpers_train import REPOSITORY
from tests.helpers_xla import xla_flags

H100 = find_target('h100')
MULTIPLE = [name for name, case in CASES.items() if case.num_devices > 1]
RECORDED = json.loads((pathlib.Path(__file__).parents[2] / 'aot' / 'recorded.json').read_text())


def shape_of(name, **config):
  case = CASES[name]
  model = DecoderOnlyModel(dataclasses.replace(config_of(case), **config))
  return model, step_shape(program(name), model, num_microbatches=case.num_microbatches, gpu=H100)


# One kernel of each kind, and one collective: 989.4 TFLOP/s and 3352.32 GB/s.
GEMM = Work(part='MLP', kind='gemm', flops=9.894e13, num_bytes=1e6, recomputed_flops=2.4735e13)
COPY = Work(part='optimizer', kind='memory', num_bytes=3.35232e10, runs=2, in_layers=False)
EXACT = Assumptions(
  gemm_efficiency=0.5,
  memory_efficiency=0.5,
  nvlink_efficiency=1.0,
  network_efficiency=1.0,
  collective_seconds=1e-9,
  nvlink_hop_seconds=1e-9,
  network_hop_seconds=1e-9,
  busy_share=1.0,
)


def hybrid_sizes():
  return resolve_mesh_sizes(Topology(2, 8), ici_mesh_shape={'fsdp': 8}, dcn_mesh_shape={'data': 2})


def test_a_step_by_hand():
  # 0.1 s of FLOPs at half the peak; 10 ms of bytes at half the bandwidth; 45 GB over NVLink's
  # 450 GB/s, half of them hidden; 5 GB over a network of 50 GB/s, none of them hidden.
  sent = [
    CollectiveTraffic('all-gather', ('fsdp',), 4.5e10, 1, hidden_share=0.5),
    CollectiveTraffic('all-reduce', ('data',), 5e9, 1, hidden_share=0.0),
  ]
  time = step_time(
    [GEMM, COPY],
    sent,
    sizes=hybrid_sizes(),
    gpu=H100,
    dtype='bfloat16',
    assumed=EXACT,
    bubble_fraction=0.2,
  )
  gemm, copy = time.parts
  assert (gemm.seconds, gemm.bound) == (pytest.approx(0.2), 'compute')
  assert gemm.recomputed_seconds == pytest.approx(0.05)
  assert (copy.seconds, copy.bound) == (pytest.approx(0.02), 'memory')
  data, fsdp = time.collectives
  assert (data.link, data.exposed_seconds) == ('network', pytest.approx(0.1, rel=1e-4))
  assert (fsdp.link, fsdp.seconds) == ('NVLink', pytest.approx(0.1, rel=1e-4))
  assert fsdp.exposed_seconds == pytest.approx(0.05, rel=1e-4)
  assert time.bubble_seconds == pytest.approx(0.2 * 0.2 / 0.8)
  assert time.seconds == pytest.approx(0.2 + 0.02 + 0.1 + 0.05 + 0.05, rel=1e-4)


def test_compiled_bytes_take_the_place_of_the_formula_in_each_part():
  dense = Work(part='attention', kind='attention', flops=1e9, num_bytes=1e9, backend='dense')
  norms = Work(part='norms', kind='memory', num_bytes=3e9, recomputed_bytes=1e9)
  formula = [GEMM, dense, norms, norms]
  assert elementwise_bytes(formula) == {'attention': 1e9, 'norms': 6e9}
  compiled = {'norms': 3e9, 'copies': 2e9}
  found = with_elementwise_bytes(formula, compiled)
  assert elementwise_bytes(found) == compiled
  assert found[0] == GEMM
  assert [w.num_bytes for w in found[1:]] == [0, 1.5e9, 1.5e9, 2e9]
  assert [w.recomputed_bytes for w in found[1:]] == [0, 0.5e9, 0.5e9, 0]


def test_hidden_time_is_at_most_that_of_matrix_kernels():
  sent = [CollectiveTraffic('all-gather', ('fsdp',), 4.5e11, 1, hidden_share=0.9)]  # a second
  time = step_time([GEMM], sent, sizes=hybrid_sizes(), gpu=H100, dtype='bfloat16', assumed=EXACT)
  assert time.exposed_seconds == pytest.approx(1.0 - 0.2, rel=1e-4)


@pytest.mark.parametrize(
  'kind, axes, bandwidth',
  [
    ('all-gather', ('fsdp',), 450e9),
    # One adapter of 50 GB/s for each of the eight groups of two; all eight for one group of 16.
    ('all-reduce', ('data',), 50e9),
    ('all-reduce', ('data', 'fsdp'), 400e9),
    # Of gradients, which the GPUs of a host add first.
    ('all-to-all', ('data', 'fsdp'), 400e9),
    ('collective-permute', ('data',), 50e9),
  ],
)
def test_a_group_has_the_adapters_of_its_gpus(kind, axes, bandwidth):
  link = step_time_lib.link_of(kind, axes, hybrid_sizes(), H100, EXACT)
  assert link.bandwidth == pytest.approx(bandwidth)


def test_tokens_leave_the_host_over_the_adapter_of_their_gpu():
  sizes = resolve_mesh_sizes(
    Topology(2, 8), ici_mesh_shape={'expert': 8}, dcn_mesh_shape={'expert': 2}
  )
  link = step_time_lib.link_of('all-to-all', ('expert',), sizes, H100, EXACT)
  assert link.bandwidth == pytest.approx(50e9 * 15 / 8)  # of 15 parts, 8 leave


def test_a_half_empty_wave_of_tiles_costs_a_whole_one():
  def seconds(rows):
    work = Work(part='MLP', kind='gemm', flops=1e12 * rows, size=(rows, 4096, 128))
    return part_time(work, gpu=H100, dtype='bfloat16', assumed=EXACT).seconds

  assert H100.num_cores == 132
  assert seconds(128 * 132) == pytest.approx(1e12 * 128 * 132 / 989.4e12 / 0.5)
  assert seconds(128 * 132 + 128) == pytest.approx(2 * seconds(128 * 132))


@pytest.mark.parametrize('name', TARGETS)
def test_every_target_has_peaks(name):
  gpu = TARGETS[name]
  assert gpu.peak_flops('bfloat16') > gpu.peak_flops('float32') > 0
  times = 2 if gpu.has_fp8 else 1
  assert gpu.peak_flops('fp8') == pytest.approx(times * gpu.peak_flops('bfloat16'), rel=0.01)


@by_case(MULTIPLE)
def test_what_is_sent_is_what_the_formulas_say(name):
  _, shape = shape_of(name)
  sums = []
  busy = busy_share(program(name))
  for sent in (
    formula_traffic(program(name), shape),
    compiled_traffic(collectives(name), busy=busy),
  ):
    sums.append(collections.Counter())
    for s in sent:
      sums[-1][s.axes] += s.num_bytes
  by_formula, compiled = sums
  assert by_formula == pytest.approx(compiled, rel=0.02)


@by_case(name for name in CASES if not CASES[name].partitioner.keys() & {'stage', 'context'})
def test_flops_are_those_of_the_partitioned_program(name):
  # The program is for CPUs: a kernel would compute the causal half of the pairs.
  model, shape = shape_of(name, attention='dense')
  flops = math.fsum(w.flops for w in step_work(shape, program(name), model))
  assert flops == pytest.approx(flops_per_device(hlo(name)), rel=0.05)


@pytest.mark.quick_cases('fsdp')
@pytest.mark.parametrize('name', ['fsdp', 'tp'])
def test_the_state_takes_the_memory_that_was_predicted(name):
  assert name in QUICK_CASES
  p = program(name)
  _, shape = shape_of(name)
  use = step_memory.memory_use(p, shape, gpu=H100, preset='default', assumed=Assumptions())
  state = p.init()
  device = p.layout.mesh.devices.flat[0]

  def held(tree):
    shards = [s for a in jax.tree.leaves(tree) for s in a.addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device == device)

  assert use.components[step_memory.PARAMETERS] == held(state.params)
  assert use.components[step_memory.OPTIMIZER] == held((state.opt_state, state.step))


QUICK_STEPS = ('llama3_2_1b fsdp h100 1x8', 'decoder_base dp h100 1x8', 't5_1_1_base fsdp h100 1x8')
MEMORY, TRAFFIC = 0.1, 0.02
LEAST_BYTES = 2**20  # less is norms and sums of the loss
# XLA pipelines the reduce-scatters of the backward pass. With full remat it then computes and
# scatters the output of attention twice: 8% more bytes than the traced program asks for.
# With overlap_layers, the last tick of 1f1b has no forward pass: `by_formula` counts one.
# In a pipeline without `model`, summing in the last tick takes more copies of the gradients.
# In FP8, a pipeline also keeps its kernels in 8 bits. For A100 and for 8 hosts, XLA keeps the whole
# gradient of the tied table while the last layer computes. With `dots`, the loss keeps a chunk
# after its loop.
# In `dp` by microbatch, the reason is not known.
# By layer, with one short row per microbatch, XLA keeps less than all gradients of a layer.
MEMORY_OF = {
  'decoder_base fsdp h100 1x8 dots': 0.15,
  'decoder_base pp h100 1x8 overlap_layers': 0.15,
  'decoder_base dp h100 1x8 by microbatch': 0.15,
  'decoder_base 3d h100 1x8 fp8': 0.15,
  'decoder_base hsdp h100 2x8 by layer': 0.25,
  'llama3_2_1b fsdp a100-80 1x8': 0.15,
  'llama3_2_1b fsdp h100 8x8': 0.15,
}
TRAFFIC_OF = {
  'llama3_2_1b tp_sp h100 1x8': 0.085,
  'decoder_base 3d h100 1x8': 0.025,
  'decoder_base 3d h100 1x8 fp8': 0.04,  # XLA all-reduces what it scatters in bfloat16
}
# Bytes that elementwise kernels read and write. With four microbatches, the relative bias is
# computed four times, which counts in a small model, most with one short row per microbatch; layers
# of a loop or a pipeline store its buckets, which are as large as five activations then. With 4,096
# tokens per GPU, XLA splits the sums of the kernels' gradients over more cores and adds the parts,
# more on larger GPUs; with 16,384 tokens the formula is exact.
ELEMENTWISE = 0.14
ELEMENTWISE_OF = {
  'decoder_base fsdp h100 1x8': 0.18,
  'decoder_base fsdp h200 1x8': 0.2,
  'decoder_base fsdp b200 1x8': 0.28,
  'decoder_base dp h100 1x8': 0.18,  # XLA copies gradients into and out of combined all-reduces
  't5_1_1_base fsdp h100 1x8': 0.2,
  'decoder_base fsdp h100 1x8 by microbatch': 0.25,
  'decoder_base dp h100 1x8 by microbatch': 0.2,
  'decoder_base dp h100 1x8 by microbatch, in a loop': 0.28,
  'decoder_base hsdp h100 2x8 by layer': 0.65,
  'decoder_base pp h100 1x8': 0.2,
  'decoder_base pp h100 1x8 overlap_layers': 0.2,
  'decoder_base 3d h100 1x8': 0.25,
  'decoder_base 3d h100 1x8 fp8': 0.25,
}
# Of one step, compiled for GPUs, and by formula (tests/aot/cases.py and recorded.json).
PREDICT = """
import json, sys
import jax
from tests.tools.planning.test_prediction import by_formula, case_named
print(json.dumps([by_formula(case_named(name), jax.devices()) for name in sys.argv[1:]]))
"""


def case_named(name):
  return next(case for case in AOT_CASES if case.name == name)


def by_formula(case, devices):
  """Returns bytes: arguments, the batch among them, all, elementwise kernels', sent by axes."""
  config = case.config()
  topology = Topology(case.hosts, case.gpus_per_host)
  p = build_program(config, topology=topology, devices=devices[: topology.num_devices])
  prediction = predict(p, config, gpu=find_target(case.gpu), assumed=Assumptions())
  sent = collections.Counter()
  for s in prediction.formula_sent:
    # Compiled, every tick of a pipeline counts, those without work too.
    in_branch = p.layout.pipeline and s.axes == ('model',)
    sent['+'.join(s.axes)] += s.num_bytes / (busy_share(p) if in_branch else 1.0)
  use = prediction.memory
  batch = use.components[step_memory.BATCH]
  moved = prediction.formula_elementwise_bytes / busy_share(p)
  return use.argument_bytes, batch, use.formula_bytes, moved, sent


def check_formulas(case, argument_bytes, batch_bytes, formula_bytes, elementwise_bytes, sent):
  recorded = RECORDED['0.10.2'][case.name]
  # Compiled, a step drops the features of the batch that it does not read.
  assert argument_bytes == pytest.approx(recorded['argument_bytes'], abs=batch_bytes)
  compiled = sum(recorded[f'{part}_bytes'] for part in ('argument', 'temporary', 'output'))
  assert formula_bytes == pytest.approx(compiled, rel=MEMORY_OF.get(case.name, MEMORY))
  if 'moe' not in case.model:  # experts' tokens that are sorted are not counted
    assert elementwise_bytes == pytest.approx(
      recorded['traffic']['other_bytes'], rel=ELEMENTWISE_OF.get(case.name, ELEMENTWISE)
    )
  compiled_sent = collections.Counter()
  for row, counts in recorded['sent'].items():
    compiled_sent[row.split()[1]] += counts['bytes']
  for axes in compiled_sent.keys() | sent.keys():
    expected = pytest.approx(
      compiled_sent[axes], rel=TRAFFIC_OF.get(case.name, TRAFFIC), abs=LEAST_BYTES
    )
    assert sent.get(axes, 0) == expected, axes


@pytest.mark.parametrize(
  'case',
  [
    case if case.name in QUICK_STEPS else pytest.param(case, marks=pytest.mark.slow)
    for case in AOT_CASES
    # With 'max_overlap', XLA replaces permutes by sends, which `Collective` does not count in full.
    if case.hosts == 1 and case.label != 'max_overlap'
  ],
  ids=lambda case: case.name,
)
def test_memory_and_traffic_are_those_of_steps_compiled_for_gpus(case):
  check_formulas(case, *by_formula(case, jax.devices()))


@pytest.mark.slow
def test_memory_and_traffic_on_64_gpus_are_those_of_compiled_steps():
  cases = [case for case in AOT_CASES if case.hosts > 1]
  done = subprocess.run(
    [sys.executable, '-c', PREDICT, *(case.name for case in cases)],
    cwd=REPOSITORY,
    env={**os.environ, 'XLA_FLAGS': xla_flags(64), 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout.splitlines()[-1])
  assert len(found) == len(cases) > 1
  for case, numbers in zip(cases, found):
    check_formulas(case, *numbers)


@pytest.mark.parametrize(
  'layout, bindings, advice',
  [
    ('fsdp', (), 'a remat_policy that stores more'),
    ('pp', (), 'a layout without pipeline stages'),
    ('fsdp', ('NUM_MICROBATCHES = 4',), "Partitioner.accumulate_by = 'microbatch'"),
  ],
)
def test_the_remedy_for_recomputation_is_what_causes_it(layout, bindings, advice):
  remat = "REMAT_POLICY = 'full'"
  case = Case(model='decoder_base', layout=layout, batch=(64, 512), bindings=(remat, *bindings))
  config, topology = case.config(), Topology(1, 8)
  p = build_program(config, topology=topology, devices=jax.devices())
  prediction = predict(p, config, gpu=H100, assumed=Assumptions())
  again = [c for c in screen.costs(prediction) if c.what.startswith('Computing layers again')]
  assert again and advice in again[0].remedy
  parts = prediction.params_by_part
  assert sum(parts.values()) == prediction.num_params
  # 12 layers; keys, values, queries and outputs are 768 x 768.
  assert parts['layers/self_attention'] == 12 * 4 * 768 * 768
  shown = screen.tables(prediction)
  assert re.search(r'layers/self_attention +28,311,552 +21%', shown)


def test_what_is_left_is_counted_against_the_pool_of_xla():
  _, shape = shape_of('fsdp')
  use = step_memory.memory_use(
    program('fsdp'), shape, gpu=H100, preset='default', assumed=Assumptions(fragmentation=0.5)
  )
  assert use.pool_bytes == int(0.9 * H100.memory_bytes)
  temporary = use.formula_bytes - use.argument_bytes
  assert use.needed_bytes == use.formula_bytes + temporary // 2
  assert use.left_bytes == use.pool_bytes - use.needed_bytes and use.fits


def test_the_shipped_assumptions_are_the_defaults():
  entry = 't5x_gpu.tools.planning.assumptions.Assumptions'
  loaded = gin_loader.load(['gin_configs/plan/assumptions.gin'], entry=entry)
  assert gin_loader.configured(loaded, Assumptions, entry=entry) == Assumptions()
