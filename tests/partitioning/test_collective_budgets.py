"""What a training step sends, counted in the partitioned program: as often as it must, no more.

Bytes are compared with the `traffic_per_step` of the parallelisms in use, for each set of mesh axes
that a collective crosses.
"""

import collections
import math

import pytest

from t5x_gpu.models.config import DTYPES
from t5x_gpu.partitioning import (
    context_parallel, data_parallel, fsdp, pipeline_parallel, sequence_parallel, tensor_parallel)
from t5x_gpu.partitioning.collectives import count, total_bytes

from tests.helpers_layouts import (
    BATCH, CASES, LENGTH, build, collectives, config_of, program, ticks, timetable)

# Axes that split rows or positions, and so make gradients that are sums.
TOKENS = ('data', 'context')
MESH = ('stage', 'data', 'fsdp', 'context', 'expert', 'model')


def expected_bytes(name):
  """Returns mesh axes -> bytes that a device sends over them, from the formulas of each file."""
  case, c = CASES[name], config_of(CASES[name])
  partitioner, n = program(name).layout, program(name).layout.mesh.shape
  stage = partitioner.zero_stage
  dtype_bytes = DTYPES[c.dtype].dtype.itemsize
  num_layers = c.num_layers // n['stage']
  # Elements that one device holds, whole over fsdp.
  kernels = (4 * c.num_heads * c.head_dim + 3 * c.mlp_dim) * c.embed_dim // n['model']
  layers = num_layers * (kernels + 2 * c.embed_dim)
  ends = 2 * c.vocab_size * c.embed_dim // n['model'] + c.embed_dim
  bias = c.num_heads * c.num_relpos_buckets // n['model']
  rows, length = BATCH // n['data'] // n['fsdp'], LENGTH // n['context']
  expected = collections.Counter()

  def add(axes, traffic):
    if axes and traffic:
      expected[tuple(a for a in MESH if a in axes and n[a] > 1)] += sum(traffic.values())

  def all_reduced(size, *more_axes):
    axes = [a for a in (*TOKENS, *more_axes) if n[a] > 1]
    add(axes, data_parallel.traffic_per_step(
        gradient_bytes=4 * size, replicas=math.prod(n[a] for a in axes)))
  all_reduced(layers // n['fsdp'])
  all_reduced(ends // n['fsdp'], 'stage')
  all_reduced(bias, 'stage', 'fsdp')
  pipeline = partitioner.pipeline
  microbatches = case.num_microbatches * (pipeline.num_microbatches if pipeline else 1)
  if n['fsdp'] > 1:
    add(['fsdp'], fsdp.traffic_per_step(
        layers_size=layers, other_size=ends, fsdp=n['fsdp'], zero_stage=stage,
        dtype_bytes=dtype_bytes, num_microbatches=microbatches, num_gathers=3 if pipeline else 2))
  if n['model'] > 1:
    sizes = dict(batch=rows, length=length, embed_dim=c.embed_dim, num_layers=num_layers,
                 model=n['model'], dtype_bytes=dtype_bytes,
                 recomputed=2 if pipeline else 1 if c.remat_policy == 'full' else 0)
    split = case.partitioner.get('sequence_parallel', False)
    add(['model'], sequence_parallel.traffic_per_step(num_microbatches=microbatches, **sizes)
        if split else tensor_parallel.traffic_per_step(**sizes))
  if pipeline:
    activation = rows // pipeline.num_microbatches * length * c.embed_dim * dtype_bytes
    between = n['model'] if case.partitioner.get('sequence_parallel') else 1
    add(['stage'], pipeline_parallel.traffic_per_step(
        schedule=pipeline.schedule, num_stages=n['stage'], repeats=pipeline.repeats,
        num_microbatches=pipeline.num_microbatches, activation_bytes=activation // between))
  if n['context'] > 1:
    add(['context'], {'': context_parallel.traffic_per_step(
        batch=rows, length=LENGTH, num_heads=c.num_heads // n['model'], head_dim=c.head_dim,
        num_layers=num_layers, context=n['context'], dtype_bytes=dtype_bytes,
        method=partitioner.rules.context_method, info_bytes=4 * (rows + 1) * length)})
  return dict(expected)


def sent_bytes(name):
  """Returns mesh axes -> bytes that the program sends over them.

  A stage of a pipeline idles in some ticks: what it does only if it has work counts as often as
  there are microbatches.
  """
  busy = timetable(name).num_microbatches / ticks(name) if program(name).layout.pipeline else 1
  sent = collections.Counter()
  for c in collectives(name):
    sent[c.axes] += c.bytes_per_call * (busy if c.in_branch else 1)
  return dict(sent)


@pytest.mark.parametrize('name', [name for name in CASES if name != 'one_device'])
def test_bytes_are_what_the_formulas_say(name):
  sent, expected = sent_bytes(name), expected_bytes(name)
  assert sent == pytest.approx(expected, rel=0.05)
