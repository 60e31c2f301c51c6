"""The bytes that one device sends in a step, by mesh axes: by formula, or from a compiled program.

The formulas are `traffic_per_step` of each parallelism (partitioning/), applied to a model.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Optional

from t5x_gpu.compiled.collectives import Collective
from t5x_gpu.layers import embedding
from t5x_gpu.layers.moe import capacity
from t5x_gpu.partitioning import (
  context_parallel,
  data_parallel,
  expert_parallel,
  sequence_parallel,
  tensor_parallel,
)
from t5x_gpu.partitioning import fsdp as fsdp_lib
from t5x_gpu.partitioning import pipeline as pipeline_lib
from t5x_gpu.partitioning.array_layout import ArrayLayout, array_layouts
from t5x_gpu.partitioning.layer_stacks import is_reference
from t5x_gpu.partitioning.mesh_sizes import MESH_AXES
from t5x_gpu.partitioning.parameters import in_bfloat16
from t5x_gpu.partitioning.trees import by_name
from t5x_gpu.tools.planning.formulas.step_shape import StepShape
from t5x_gpu.tools.planning.gpu_compile import Overlap
from t5x_gpu.training.program import Program

_KERNELS_IN_8_BITS = ('query', 'key', 'value', 'out', 'wi', 'wi_0', 'wi_1', 'wo')


@dataclasses.dataclass(frozen=True)
class CollectiveTraffic:
  """Collectives of one kind over the same mesh axes.

  Attributes:
    kind: one of `collectives.COLLECTIVE_KINDS`.
    axes: mesh axes, in the order of the mesh.
    num_bytes: bytes that a device sends in a step, in a ring.
    calls: number of collectives in a step.
    hidden_share: share of the bytes behind matrix kernels in XLA's schedule; None if unknown.
  """

  kind: str
  axes: tuple[str, ...]
  num_bytes: float
  calls: float
  hidden_share: Optional[float] = None


def compiled_traffic(
  collectives: Sequence[Collective], overlaps: Sequence[Overlap] = (), *, busy: float = 1.0
) -> list[CollectiveTraffic]:
  """Returns the traffic of a compiled program.

  Args:
    collectives: `inventory` of the program.
    overlaps: overlaps of the same program, if it was compiled for GPUs.
    busy: share of a pipeline's ticks in which a stage has work (collectives in branches).
  """
  share = {(o.kind, o.axes): o.share for o in overlaps}
  num_bytes, calls = collections.Counter(), collections.Counter()
  for c in collectives:
    runs = busy if c.in_branch else 1.0
    num_bytes[c.kind, c.axes] += runs * c.bytes_per_call
    calls[c.kind, c.axes] += runs * c.count
  return [
    CollectiveTraffic(*key, sent, calls[key], share.get(key))
    for key, sent in num_bytes.most_common()
  ]


def busy_share(program: Program) -> float:
  """Returns the share of a pipeline's ticks in which a stage has work; 1 without a pipeline."""
  pipeline = program.layout.pipeline
  return 1.0 if pipeline is None else pipeline.busy_share


def formula_traffic(program: Program, shape: StepShape) -> list[CollectiveTraffic]:
  """Returns the traffic of a step by formula; exact except for scalars such as the loss."""
  totals, calls = collections.Counter(), collections.Counter()
  for axes, traffic, runs in (*_of_parameters(program, shape), *_of_activations(program, shape)):
    axes = tuple(a for a in MESH_AXES if a in axes and program.layout.mesh.shape[a] > 1)
    for kind, num_bytes in traffic.items():
      if axes and num_bytes:
        totals[kind, axes] += num_bytes
        calls[kind, axes] += runs
  return [CollectiveTraffic(*key, num_bytes, calls[key]) for key, num_bytes in totals.most_common()]


# (mesh axes, collective -> bytes, number of calls)
_Traffic = Iterator[tuple[Sequence[str], Mapping[str, float], float]]


def _of_parameters(program: Program, shape: StepShape) -> _Traffic:
  """Yields the gathers of parameters and the reductions of gradients."""
  layout, mesh = program.layout, program.layout.mesh.shape
  saved, names = program.abstract_saved.params, program.names.params
  stage = 1 if layout.pipeline else layout.zero_stage
  trained = by_name(program.trained.split(saved)[0])
  sizes, sends_bfloat16 = _LayerSizes(), layout.gradient_dtype == 'bfloat16'
  # The optimizer state's table has the dimension that fsdp splits, for every ZeRO stage.
  arrays = list(array_layouts(layout.stored(saved, names, layout.rules.state), names))
  # The tables of tokens and logits; BERT's 'mlm' always ties them.
  tables = [p for p in arrays if {'vocab', 'embed'} <= set(p.names)]
  tied = shape.num_outcomes > 0 and len(tables) == 1
  for p in arrays:
    in_layers = 'layers' in p.names
    split = 'fsdp' in p.mesh_axes
    own = math.prod(p.shape) / math.prod(p.parts) * (mesh['fsdp'] if split else 1)
    half = sends_bfloat16 and in_bfloat16(p.names)
    if split:
      gathers = 1.0
      if in_layers and not is_reference(p.name):
        # Forward and backward; a loop that communicates one layer ahead keeps the last layer.
        gathers = 2 - (1 / p.shape[p.names.index('layers')] if layout.region.layers_ahead else 0)
      of_element = gathers * _in_8_bits(p, shape)
      gathered = of_element if stage == 3 else 4 if p.name in trained else 0
      uses = 1
      if shape.config is not None and p.name.split('/')[-2:] == ['token_embedder', 'embedding']:
        in_parts = len(shape.ids_in_parts)
        uses = len(shape.stacks) + tied - in_parts
        yield ['fsdp'], _of_rows(shape, mesh['fsdp'], p.name in trained), 3 * in_parts
      sizes.gathered_bytes += own * gathered if uses else 0
      # XLA merges the reduce-scatters of an embedding table, but not the all-to-alls.
      separate = uses if half and stage == 3 else min(uses, 1)
      sizes.scattered[half] += separate * own if p.name in trained else 0
    if p.name in trained:
      axes = [a for a in ('stage', 'data', 'context', 'expert') if a not in p.mesh_axes]
      axes = [a for a in axes if a != 'stage' or not in_layers]
      axes += [] if split else ['fsdp']
      axes = tuple(a for a in axes if mesh[a] > 1)
      sizes.reduced[axes, half] += own / (mesh['fsdp'] if split else 1)
  layers = sum(stack.num_layers for stack in shape.stacks) or 1
  passes = shape.passes if layout.accumulate_by == 'microbatch' and not layout.pipeline else 1
  if mesh['fsdp'] > 1:
    repeats = passes if stage > 1 else 1
    whole = fsdp_lib.traffic_per_step(
      layers_size=0, other_size=1, fsdp=mesh['fsdp'], zero_stage=1, dtype_bytes=1
    )
    per_byte = whole['all-gather'] / 4
    runs = (2 * layers + 2) * repeats if stage == 3 else 1
    yield ['fsdp'], {'all-gather': per_byte * sizes.gathered_bytes * repeats}, runs
    runs = 1 if layout.pipeline else (layers + 2) * repeats
    for half, size in sizes.scattered.items():
      kind, num_bytes = ('all-to-all', 2) if half else ('reduce-scatter', 4)
      yield ['fsdp'], {kind: per_byte * num_bytes * size * repeats}, runs
  for (axes, half), size in sizes.reduced.items():
    ways = math.prod(mesh[a] for a in axes)
    if ways > 1:
      runs = layers if shape.passes == 1 else 1
      of_step = data_parallel.traffic_per_step(
        gradient_bytes=4 * size, replicas=ways, in_bfloat16=half
      )
      yield axes, of_step, runs


class _LayerSizes:
  """Sums over parameters, in elements or bytes of one device.

  Attributes:
    gathered_bytes: bytes gathered over fsdp.
    scattered: whether gradients are sent in bfloat16 -> elements, whole over fsdp.
    reduced: (mesh axes, whether in bfloat16) -> elements.
  """

  def __init__(self) -> None:
    self.gathered_bytes = 0.0
    self.scattered: collections.Counter[bool] = collections.Counter()
    self.reduced: collections.Counter[tuple[tuple[str, ...], bool]] = collections.Counter()


def _of_rows(shape: StepShape, fsdp: int, trained: bool) -> dict[str, float]:
  """Returns the bytes of a table's rows that are looked up in parts."""
  return embedding.traffic_per_step(
    [n * shape.passes for n in shape.ids_in_parts],
    embed_dim=shape.config.embed_dim,
    fsdp=fsdp,
    dtype_bytes=shape.item_bytes,
    trained=trained,
  )


def _in_8_bits(p: ArrayLayout, shape: StepShape) -> int:
  """Returns the bytes in which an element of a parameter is gathered."""
  parts = p.name.split('/')
  c = shape.config
  in_8_bits = c is not None and c.fp8 and c.fp8_scaling != 'mxfp8' and 'moe' not in parts
  if in_8_bits and parts[-1] == 'kernel' and parts[-2] in _KERNELS_IN_8_BITS:
    return 1
  return shape.item_bytes


def _of_activations(program: Program, shape: StepShape) -> _Traffic:
  """Yields the traffic of layers, ends and stages; nothing for a model without a config."""
  c, layout, mesh = shape.config, program.layout, program.layout.mesh.shape
  if c is None:
    return
  for stack in shape.stacks:
    again = 1 if shape.recomputes else stack.full_share
    forwards = 1 + again + shape.references
    of_stack = dict(batch=shape.rows, num_layers=stack.num_layers, dtype_bytes=shape.item_bytes)
    length = stack.length // mesh['context']
    if mesh['model'] > 1:
      recomputed = shape.repeats(stack) + (layout.pipeline is not None)
      sizes = dict(of_stack, length=length, embed_dim=c.embed_dim, model=mesh['model'])
      function = sequence_parallel if shape.sequence_parallel else tensor_parallel
      runs = round((4 + recomputed + 2 * shape.references) * stack.num_layers * shape.passes)
      sizes['references'] = shape.references
      more = {'shared_kv_size': _shared_kv(shape, stack.num_layers)}
      if shape.sequence_parallel:
        more = {'chunked_loss': shape.loss_chunks > 0 and stack is shape.stacks[-1]}
      yield ['model'], function.traffic_per_step(**sizes, **more, recomputed=recomputed), runs
    if mesh['context'] > 1:
      method = layout.rules.context_method
      of_attention = forwards
      if method == 'ring':  # a gather is repeated for its keys and values
        of_attention -= again - min(again, shape.repeats_attention(stack))
      sent = context_parallel.traffic_per_step(
        **of_stack,
        length=stack.length,
        num_heads=max(c.kv_heads // mesh['model'], 1),
        head_dim=c.head_dim,
        context=mesh['context'],
        method=method,
        num_forwards=of_attention,
        info_bytes=4 * (shape.rows + 1) * length,
      )
      kind = 'collective-permute' if method == 'ring' else 'all-gather'
      runs = round((of_attention + 2) * stack.num_layers * mesh['context'] * shape.passes)
      yield ['context'], {kind: sent}, runs
    if mesh['expert'] > 1 and c.num_experts:
      sent = expert_parallel.traffic_per_step(
        **of_stack,
        num_experts=c.num_experts,
        capacity=_slots(shape, stack.length, mesh['expert']),
        embed_dim=c.embed_dim,
        expert=mesh['expert'],
        num_forwards=forwards,
      )
      yield ['expert'], sent, round((2 * forwards + 2) * stack.num_layers * shape.passes)
  pipeline = layout.pipeline
  if pipeline:
    between = mesh['model'] if shape.sequence_parallel else 1
    activations = [
      shape.rows
      // pipeline.num_microbatches
      * (stack.length // mesh['context'])
      * c.embed_dim
      * shape.item_bytes
      // between
      for stack in shape.stacks
    ]
    sent = pipeline_lib.traffic_per_step(
      pipeline,
      activation_bytes=sum(activations),
      output_bytes=activations[-1],
      sums_in_last_tick=layout.region.sums_in_last_tick,
    )
    yield ['stage'], sent, 2 * (shape.passes + pipeline.num_stages)


def _shared_kv(shape: StepShape, num_layers: int) -> int:
  """Returns the elements of key and value kernels that all devices of `model` hold."""
  c = shape.config
  return 2 * num_layers * c.embed_dim * c.kv_heads * c.head_dim if shape.model > c.kv_heads else 0


def _slots(shape: StepShape, length: int, expert: int) -> float:
  """Returns the token slots per row of an expert; the average if the expert takes all tokens."""
  c = shape.config
  if c.expert_capacity_factor is None:
    own = c.num_experts // expert
    return length * min(c.num_experts_per_token, own) / own
  return capacity(
    length,
    num_experts=c.num_experts,
    factor=c.expert_capacity_factor,
    experts_per_token=c.num_experts_per_token,
  )
