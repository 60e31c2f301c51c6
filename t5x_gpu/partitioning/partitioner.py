"""What gin configures: how many ways each kind of parallelism splits a run.

The sum of the rules of every parallelism in use, and all checks of sizes against them, before
anything compiles. `layout` is what it becomes on the devices of a run.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Optional

from t5x_gpu.errors import MeshError, all_problems, did_you_mean
from t5x_gpu.partitioning import (
    context_parallel, data_parallel, expert_parallel, fsdp, pipeline_parallel, sequence_parallel,
    tensor_parallel)
from t5x_gpu.partitioning.axis_rules import AxisRules
from t5x_gpu.partitioning.layout import Layout
from t5x_gpu.partitioning.mesh import build_mesh, check_model_sizes
from t5x_gpu.partitioning.mesh_problems import divisors
from t5x_gpu.partitioning.mesh_sizes import MeshSizes, resolve_mesh_sizes
from t5x_gpu.partitioning.region import Pipeline
from t5x_gpu.runtime.topology import Device, Topology

# What a user sets to change the size of an array axis, for errors.
SET_BY = {'batch': 'BATCH_SIZE', 'length': 'TASK_FEATURE_LENGTHS',
          'residual_length': 'TASK_FEATURE_LENGTHS',
          'heads': 'TransformerConfig.num_heads', 'mlp': 'TransformerConfig.mlp_dim',
          'embed': 'TransformerConfig.embed_dim', 'vocab': 'TransformerConfig.vocab_size',
          'experts': 'TransformerConfig.num_experts'}
# Axes with checks of their own.
OWN_CHECKS = ('layers', 'length')


@dataclasses.dataclass(frozen=True)
class Partitioner:
  """How many ways each kind of parallelism splits the run. Sizes multiply to the device count.

  Attributes:
    num_partitions: size of the `model` axis (tensor parallelism); divides the devices of a host,
      or is a whole multiple of them.
    model_parallel_submesh: T5X's other way to say the same; not together with num_partitions.
    data: replicas; -1 takes what is left over.
    fsdp: parts of parameters and optimizer state.
    zero_stage: what `fsdp` splits: 1 the optimizer state, 2 gradients as well, 3 parameters too.
    sequence_parallel: split norms, dropout and residuals over `model` by position.
    context: parts of the length of a sequence.
    context_attention: 'ring' sends keys and values around, 'gather' collects them.
    stage: pipeline stages, each with some of the layers.
    pipeline_schedule: '1f1b', 'gpipe' or 'circular'.
    num_pipeline_microbatches: parts of a device's rows that follow each other through the stages;
      None for four per stage, or as many as there are rows.
    pipeline_repeats: blocks of layers per stage under 'circular'.
    expert: parts of the experts of a mixture-of-experts MLP; also splits the batch.
    ici_mesh_shape: axis -> size inside a host, one may be -1; instead of the sizes above.
    dcn_mesh_shape: axis -> size across hosts, one may be -1.
  """
  num_partitions: Optional[int] = None
  model_parallel_submesh: Optional[Sequence[int]] = None
  data: int = -1
  fsdp: int = 1
  zero_stage: int = 3
  sequence_parallel: bool = False
  context: int = 1
  context_attention: str = 'ring'
  stage: int = 1
  pipeline_schedule: str = '1f1b'
  num_pipeline_microbatches: Optional[int] = None
  pipeline_repeats: int = 1
  expert: int = 1
  ici_mesh_shape: Optional[Mapping[str, int]] = None
  dcn_mesh_shape: Optional[Mapping[str, int]] = None

  def __post_init__(self) -> None:
    for name, legal in (('zero_stage', (1, 2, 3)), ('context_attention', context_parallel.METHODS)):
      value = getattr(self, name)
      if value not in legal:
        hint = did_you_mean(value, legal) if isinstance(value, str) else ''
        raise MeshError(f'Partitioner.{name} = {value!r} is not one of '
                        f'{", ".join(map(repr, legal))}.{hint}',
                        fix=f'Set Partitioner.{name} to one of them.',
                        parameters=(f'Partitioner.{name}',), docs='parallelism.md')

  def mesh_sizes(self, topology: Topology) -> MeshSizes:
    """Returns the sizes on `topology`; raises MeshError with the legal ones."""
    return resolve_mesh_sizes(
        topology, num_partitions=self.num_partitions,
        model_parallel_submesh=self.model_parallel_submesh, stage=self.stage, data=self.data,
        fsdp=self.fsdp, context=self.context, expert=self.expert,
        ici_mesh_shape=self.ici_mesh_shape, dcn_mesh_shape=self.dcn_mesh_shape)

  def rules(self) -> AxisRules:
    """Returns the sum of the rules of every parallelism."""
    rules = (pipeline_parallel.rules() + data_parallel.rules() + fsdp.rules(self.zero_stage)
             + context_parallel.rules(self.context_attention) + expert_parallel.rules()
             + tensor_parallel.rules())
    return rules + sequence_parallel.rules() if self.sequence_parallel else rules

  def lay_out(self, topology: Topology, devices: Sequence[Device], *,
              logical_sizes: Mapping[str, int]) -> Layout:
    """Returns the layout over `devices` (host-major, as `topology.discover` gives them).

    Args:
      topology: hosts and devices per host.
      devices: as many as the topology says.
      logical_sizes: axis name -> size of everything the mesh may split, the batch included.
    Raises:
      MeshError: sizes that do not fit the topology, or that do not divide `logical_sizes`.
    """
    sizes = self.mesh_sizes(topology)
    rules = self.rules()
    batch_parts = math.prod(sizes.total[axis] for axis in rules.activations['batch'])
    pipeline = self._pipeline(sizes, logical_sizes['batch'] // batch_parts)
    problems = self._problems(sizes, rules, logical_sizes, pipeline, batch_parts)
    if problems:
      raise MeshError(all_problems(problems, title='The model does not fit the mesh'),
                      parameters=('Partitioner.num_partitions', 'Partitioner.fsdp',
                                  'Partitioner.data', 'Partitioner.stage', 'Partitioner.context',
                                  'Partitioner.expert', 'BATCH_SIZE'), docs='mesh.md#sizes')
    return Layout(mesh=build_mesh(sizes, topology, devices), rules=rules, sizes=sizes,
                  topology=topology, zero_stage=self.zero_stage, pipeline=pipeline)

  def _pipeline(self, sizes: MeshSizes, rows: int) -> Optional[Pipeline]:
    stages = sizes.total['stage']
    if stages == 1:
      return None
    count = self.num_pipeline_microbatches
    if count is None:
      legal = divisors(max(rows, 1))
      count = next((n for n in legal if n >= 4 * stages), legal[-1])
    # A ring needs all devices in every step, those of an idle stage as well.
    ring = sizes.total['context'] > 1 and self.context_attention == 'ring'
    return Pipeline(self.pipeline_schedule, stages, count, self.pipeline_repeats, not ring)

  def _problems(self, sizes: MeshSizes, rules: AxisRules, logical_sizes: Mapping[str, int],
                pipeline: Optional[Pipeline], batch_parts: int) -> list[str]:
    """Returns everything in which the model does not fit the mesh, a sentence each."""
    generic = {name: size for name, size in logical_sizes.items() if name not in OWN_CHECKS}
    if 'length' in logical_sizes and self.sequence_parallel:
      generic['residual_length'] = logical_sizes['length']
    problems = [problem for table in (rules.activations, rules.parameters)
                for problem in check_model_sizes(
                    sizes, generic, {name: table.get(name, ()) for name in generic},
                    parameter_names=SET_BY)]
    problems += context_parallel.check(logical_sizes, sizes.total, parameter=SET_BY['length'])
    if pipeline is not None:
      problems += pipeline_parallel.check(
          logical_sizes, sizes.total, schedule=pipeline.schedule, repeats=pipeline.repeats,
          num_pipeline_microbatches=pipeline.num_microbatches, batch_parts=batch_parts)
    return list(dict.fromkeys(problems))  # an axis may be split alike in both tables
