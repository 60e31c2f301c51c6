"""Variants of a run that `plan --search` compares: layouts, microbatches, remat and precision.

All compute the same step, except variants in another precision.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Optional

from t5x_gpu.errors import MeshError
from t5x_gpu.models.model import config_of
from t5x_gpu.models.precision import FP8_CAPABILITY
from t5x_gpu.models.remat import REPEATS_MATMULS
from t5x_gpu.partitioning.mesh_sizes import divisors
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.planning.gpu_targets import GpuTarget
from t5x_gpu.tools.planning.prediction import PlanConfig, Setting
from t5x_gpu.tools.planning.remat_costs import with_config
from t5x_gpu.tools.planning.remedies import SIZES

# Without 'offload': transfers to the host are not modelled.
POLICIES = ('none', 'dots', 'minimal', 'attention', 'full')
MICROBATCHES = (1, 2, 4, 8, 16, 32)
# Factors by which the loss may have fewer chunks than by default: each chunk reads and writes the
# gradient of the head's kernel.
_TIMES_FEWER = (4, 16)
# `full_layers` are in these parts of all layers, and at most so many are tried.
_PARTS, _FEWER_PARTS = 8, 3
# Blocks of layers per stage: more of them shorten the bubble, but send more.
_MOST_REPEATS = 8
# Smallest number of a row's positions on a device under `context`.
_LEAST_LENGTH = 2048

# Parameters of TransformerConfig that variants differ in.
_OF_MODEL = ('remat_policy', 'dtype', 'loss_chunks', 'full_remat_layers', 'scan_unroll')

# (parameter of Partitioner, value) for all values that differ from the default
Layout = tuple[tuple[str, Setting], ...]


@dataclasses.dataclass(frozen=True)
class Variant:
  """One way to compute the step of a run.

  Attributes:
    layout: parameters of Partitioner.
    num_microbatches: microbatches of gradient accumulation.
    remat_policy, dtype, loss_chunks, full_remat_layers, scan_unroll: of the model; None for the
      run's own.
  """

  layout: Layout
  num_microbatches: int = 1
  remat_policy: Optional[str] = None
  dtype: Optional[str] = None
  loss_chunks: Optional[int] = None
  full_remat_layers: Optional[int] = None
  scan_unroll: Optional[int] = None

  def applied(self, config: PlanConfig) -> PlanConfig:
    """Returns the run `config`, computed as this variant."""
    of_model = {name: value for name in _OF_MODEL if (value := getattr(self, name)) is not None}
    return dataclasses.replace(
      config,
      partitioner=Partitioner(
        **dict(self.layout), gradient_dtype=config.partitioner.gradient_dtype
      ),
      num_microbatches=self.num_microbatches,
      model=with_config(config.model, **of_model) if of_model else config.model,
    )

  def is_of(self, config: PlanConfig, topology: Topology) -> bool:
    """Returns whether the run `config` is already computed as this variant."""
    if self.num_microbatches != config.num_microbatches:
      return False
    if _is_by_layer(dict(self.layout), self.num_microbatches):
      config = _without_void_settings(config)
    ours, theirs = self.applied(config), config.partitioner
    try:
      if ours.partitioner.mesh_sizes(topology) != theirs.mesh_sizes(topology):
        return False
    except MeshError:
      return False
    sizes = {name: getattr(theirs, name) for name in SIZES}
    same = dataclasses.replace(ours.partitioner, **sizes)
    return dataclasses.replace(ours, partitioner=same) == config


def precisions(config: PlanConfig, gpu: GpuTarget) -> tuple[Optional[str], ...]:
  """Returns values of TransformerConfig.dtype: the run's own, and FP8 if it can replace it."""
  of_model = config_of(config.model)
  if of_model is None:
    return (None,)
  if of_model.dtype == 'bfloat16' and float(gpu.compute_capability) >= FP8_CAPABILITY:
    return 'bfloat16', 'fp8'
  return (of_model.dtype,)


def policies(
  config: PlanConfig, layout: Layout, num_microbatches: int
) -> tuple[Optional[str], ...]:
  """Returns values of TransformerConfig.remat_policy that make a difference."""
  if config_of(config.model) is None:
    return (None,)
  return REPEATS_MATMULS if _is_by_layer(dict(layout), num_microbatches) else POLICIES


def full_layers(num_layers: int, needed: int, needed_if_full: int, pool: int) -> tuple[int, ...]:
  """Returns values of TransformerConfig.full_remat_layers with which a large policy may fit.

  The first fits by formula, the others if a step takes less memory as compiled: as they often do.

  Args:
    num_layers: number of layers of the model.
    needed: bytes that the policy needs by formula.
    needed_if_full: bytes that 'full' needs.
    pool: bytes of a GPU.
  """
  if not needed_if_full <= pool < needed:
    return ()
  least = math.ceil((needed - pool) / (needed - needed_if_full) * _PARTS)
  parts = range(least, max(least - _FEWER_PARTS, 0), -1)
  numbers = dict.fromkeys(math.ceil(num_layers * part / _PARTS) for part in parts)
  return tuple(number for number in numbers if number < num_layers)


def fewer_chunks(config: PlanConfig, chosen: int) -> tuple[int, ...]:
  """Returns values of TransformerConfig.loss_chunks that make larger chunks than the default.

  Args:
    config: the run; () if it sets the number itself.
    chosen: number of chunks by default; 0 if the logits are stored.
  """
  of_model = config_of(config.model)
  if of_model is None or of_model.loss_chunks is not None or chosen < 2:
    return ()
  return tuple(dict.fromkeys(max(chosen // times, 1) for times in _TIMES_FEWER))


def layouts(config: PlanConfig, topology: Topology) -> Iterator[Layout]:
  """Yields layouts of all devices, legal or not for the sizes of the model and the batch.

  `model`, `context` and `expert` stay inside a host; stages span whole hosts.
  """
  of_model = config_of(config.model)
  each = topology.devices_per_host
  length = max(config.train_dataset_cfg.task_feature_lengths.values())
  sizes_of_model = config.model.logical_sizes()
  layers = math.gcd(*(sizes_of_model.get(name, 0) for name in ('layers', 'encoder_layers')))
  for model in divisors(each):
    for expert in divisors(each // model) if of_model and of_model.num_experts else (1,):
      for context in divisors(each // model // expert):
        if context > 1 and length < context * _LEAST_LENGTH:
          continue
        sizes = dict(num_partitions=model, expert=expert, context=context)
        left = topology.num_devices // (model * expert * context)
        if model > 1:
          sizes['sequence_parallel'] = True
        for of_replicas in _replicas(left):
          yield _layout(**sizes, **of_replicas)
        for of_stages in _stages(topology, left, layers):
          yield _layout(**sizes, **of_stages)


def _replicas(number: int) -> Iterator[dict[str, Setting]]:
  """Yields ways in which `number` devices share the batch: replicas of groups with fsdp."""
  for fsdp in divisors(number):
    yield dict(data=number // fsdp, fsdp=fsdp)
    if fsdp > 1:
      yield dict(data=number // fsdp, fsdp=fsdp, zero_stage=1)


def _stages(topology: Topology, left: int, layers: int) -> Iterator[dict[str, Setting]]:
  """Yields pipelines across hosts, on `left` devices, of stacks whose layers `layers` divides."""
  for stage in divisors(topology.num_hosts)[1:]:
    rest = left // stage
    inside = max(left // topology.num_hosts, 1)
    for fsdp in sorted({1, inside}):
      sizes = dict(stage=stage, data=rest // fsdp, fsdp=fsdp)
      for schedule in (dict(), *_circular(layers, stage)):
        for number in (None, 8 * stage, 16 * stage):
          yield dict(sizes, **schedule, num_pipeline_microbatches=number)


def _circular(layers: int, stage: int) -> Iterator[dict[str, Setting]]:
  """Yields circular schedules: with every number of blocks per stage that divides `layers`."""
  for repeats in divisors(layers // stage) if layers % stage == 0 else ():
    if 1 < repeats <= _MOST_REPEATS:
      yield dict(pipeline_schedule='circular', pipeline_repeats=repeats)


def microbatches(layout: Layout) -> Iterator[tuple[Layout, int]]:
  """Yields `layout` with numbers of microbatches; a pipeline has its own microbatches."""
  sizes = dict(layout)
  yield layout, 1
  if 'stage' in sizes:
    return
  for number in MICROBATCHES[1:]:
    yield layout, number
    if sizes.get('fsdp', 1) > 1 and sizes.get('zero_stage', 3) > 1:
      yield _layout(**sizes, accumulate_by='microbatch'), number


def with_overlap(variant: Variant) -> Optional[Variant]:
  """Returns `variant` with overlap_layers; None if that changes nothing."""
  sizes = dict(variant.layout)
  sends = sizes.get('fsdp', 1) > 1 or sizes.get('data', 1) > 1
  if not sends or 'stage' in sizes or _is_by_layer(sizes, variant.num_microbatches):
    return None
  return dataclasses.replace(variant, layout=_layout(**sizes, overlap_layers=True))


def _is_by_layer(sizes: dict[str, Setting], num_microbatches: int) -> bool:
  """Returns whether gradients accumulate by layer, which recomputes layers with every policy."""
  return (
    num_microbatches > 1
    and sizes.get('fsdp', 1) > 1
    and sizes.get('zero_stage', 3) > 1
    and sizes.get('accumulate_by') != 'microbatch'
    and 'stage' not in sizes
  )


def _without_void_settings(config: PlanConfig) -> PlanConfig:
  """Returns a run that recomputes layers with every policy, as this module writes such runs."""
  partitioner, model = dataclasses.replace(config.partitioner, overlap_layers=False), config.model
  of_model = config_of(model)
  if of_model is not None:
    policy = of_model.remat_policy if of_model.remat_policy in REPEATS_MATMULS else 'full'
    model = with_config(model, remat_policy=policy, full_remat_layers=0)
  return dataclasses.replace(config, partitioner=partitioner, model=model)


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Partitioner)} | {
  'num_partitions': 1
}


def _layout(**sizes: Setting) -> Layout:
  return tuple(
    (name, value)
    for name, value in sorted(sizes.items())
    if name in ('data', 'fsdp') or value != _DEFAULTS[name]
  )
