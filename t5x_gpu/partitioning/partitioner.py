"""From sizes in gin to shardings and jitted functions.

`Partitioner` is what gin configures; `Layout` is what it becomes on the devices of a run. The
layout sums the rules of every parallelism, turns axis names into shardings, and jits functions so
that the rules are entered inside the traced function and the mesh is set around the call: Flax's
rules context is no part of jit's cache key, and `with mesh:` drops every constraint.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_gpu.errors import MeshError, all_problems
from t5x_gpu.partitioning import data_parallel, fsdp, sequence_parallel, tensor_parallel
from t5x_gpu.partitioning.axis_rules import (
    AxisNames, AxisRules, Table, partition_spec, use_rules)
from t5x_gpu.partitioning.mesh import build_mesh, check_model_sizes, mesh_table
from t5x_gpu.partitioning.mesh_sizes import MeshSizes, resolve_mesh_sizes
from t5x_gpu.partitioning.region import Region
from t5x_gpu.runtime.topology import Device, Topology

# What a user sets to change the size of an array axis, for errors.
SET_BY = {'batch': 'BATCH_SIZE', 'length': 'TASK_FEATURE_LENGTHS',
          'heads': 'TransformerConfig.num_heads', 'mlp': 'TransformerConfig.mlp_dim',
          'embed': 'TransformerConfig.embed_dim', 'vocab': 'TransformerConfig.vocab_size'}


@dataclasses.dataclass(frozen=True)
class Partitioner:
  """How many ways each kind of parallelism splits the run. Sizes multiply to the device count.

  Attributes:
    num_partitions: size of the `model` axis (tensor parallelism); divides the devices of a host,
      or is a whole multiple of them.
    model_parallel_submesh: T5X's other way to say the same; not together with num_partitions.
    data: replicas; -1 takes what is left over.
    fsdp: parts of parameters and optimizer state.
    zero_stage: what `fsdp` splits: 1 the optimizer state, 2 gradients as well, 3 parameters as well.
    sequence_parallel: split norms and residuals over `model` by position.
    ici_mesh_shape: axis -> size inside a host, one may be -1; instead of the sizes above.
    dcn_mesh_shape: axis -> size across hosts, one may be -1.
  """
  num_partitions: Optional[int] = None
  model_parallel_submesh: Optional[Sequence[int]] = None
  data: int = -1
  fsdp: int = 1
  zero_stage: int = 3
  sequence_parallel: bool = False
  ici_mesh_shape: Optional[Mapping[str, int]] = None
  dcn_mesh_shape: Optional[Mapping[str, int]] = None

  def mesh_sizes(self, topology: Topology) -> MeshSizes:
    """Returns the sizes on `topology`; raises MeshError with the legal ones."""
    return resolve_mesh_sizes(
        topology, num_partitions=self.num_partitions,
        model_parallel_submesh=self.model_parallel_submesh, data=self.data, fsdp=self.fsdp,
        ici_mesh_shape=self.ici_mesh_shape, dcn_mesh_shape=self.dcn_mesh_shape)

  def rules(self) -> AxisRules:
    """Returns the sum of the rules of every parallelism in use."""
    rules = data_parallel.rules() + fsdp.rules(self.zero_stage) + tensor_parallel.rules()
    return rules + sequence_parallel.rules() if self.sequence_parallel else rules

  def lay_out(self, topology: Topology, devices: Sequence[Device], *,
              logical_sizes: Mapping[str, int]) -> 'Layout':
    """Returns the layout over `devices` (host-major, as `topology.discover` gives them).

    Args:
      topology: hosts and devices per host.
      devices: as many as the topology says.
      logical_sizes: axis name -> size of everything the mesh may split, the batch included.
    Raises:
      MeshError: sizes that do not fit the topology, or that do not divide `logical_sizes`.
    """
    sizes = self.mesh_sizes(topology)
    unknown = [axis for axis in ('stage', 'context', 'expert') if sizes.total[axis] > 1]
    if unknown:
      raise MeshError(
          f'{" and ".join(f"{a} = {sizes.total[a]}" for a in unknown)}: no rules split anything '
          'over these axes yet.', fix=f'Set {" and ".join(unknown)} to 1.',
          parameters=('Partitioner.ici_mesh_shape', 'Partitioner.dcn_mesh_shape'))
    rules = self.rules()
    problems = [problem for table in (rules.activations, rules.parameters)
                for problem in check_model_sizes(
                    sizes, logical_sizes, {name: table.get(name, ()) for name in logical_sizes},
                    parameter_names=SET_BY)]
    problems = list(dict.fromkeys(problems))  # an axis may be split alike in both tables
    if problems:
      raise MeshError(all_problems(problems, title='The model does not fit the mesh'),
                      parameters=('Partitioner.num_partitions', 'Partitioner.fsdp',
                                  'Partitioner.data', 'BATCH_SIZE'), docs='mesh.md#sizes')
    return Layout(mesh=build_mesh(sizes, topology, devices), rules=rules, sizes=sizes,
                  topology=topology, zero_stage=self.zero_stage)


@dataclasses.dataclass(frozen=True)
class Layout:
  """A mesh with rules: where every array of the run lives.

  Attributes:
    mesh: the devices, all axes of MESH_AXES.
    rules: which mesh axes split each array axis.
    sizes: where the mesh's shape comes from.
    topology: hosts and devices per host.
    zero_stage: see partitioning/fsdp.py.
  """
  mesh: Mesh
  rules: AxisRules
  sizes: MeshSizes
  topology: Topology
  zero_stage: int = 3

  @property
  def region(self) -> Region:
    """The region of a step in which collectives are written out."""
    return Region(self.rules, self.mesh.shape, self.zero_stage)

  @property
  def replicated(self) -> NamedSharding:
    return NamedSharding(self.mesh, PartitionSpec())

  @property
  def batch_parts(self) -> int:
    """In how many parts the rows of a batch are split; a batch's size is a multiple of it."""
    return math.prod(self.mesh.shape[a] for a in self.rules.activations['batch'])

  def shardings(self, abstract: Any, names: Any, table: Optional[Table] = None) -> Any:
    """Returns a tree of NamedSharding for arrays (or shapes) whose axes are called `names`.

    Args:
      abstract: arrays or shapes.
      names: tree of AxisNames.
      table: array axis -> mesh axes; that of parameters by default.
    """
    table = self.rules.parameters if table is None else table

    def sharding(path: Any, axis_names: AxisNames, array: Any) -> NamedSharding:
      what = jax.tree_util.keystr(path, simple=True, separator='/')
      return NamedSharding(self.mesh, partition_spec(
          axis_names.names, array.shape, table=table, mesh_shape=self.mesh.shape,
          what=what))
    return jax.tree_util.tree_map_with_path(sharding, names, abstract)

  def batch_shardings(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, NamedSharding]:
    """Returns feature name -> sharding of the global batch; dimensions are batch, length, ..."""
    def sharding(name: str, shape: Sequence[int]) -> NamedSharding:
      names = ('batch', 'length')[:len(shape)] + (None,) * (len(shape) - 2)
      return NamedSharding(self.mesh, partition_spec(
          names, shape, table=self.rules.activations, mesh_shape=self.mesh.shape, what=name))
    return {name: sharding(name, shape) for name, shape in shapes.items()}

  def put_batch(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Returns the global batch on devices; each process hands over only its devices' rows."""
    shardings = self.batch_shardings({name: x.shape for name, x in batch.items()})
    return {name: jax.make_array_from_callback(x.shape, shardings[name], x.__getitem__)
            for name, x in batch.items()}

  def jit(self, function: Callable[..., Any], **jit_options: Any) -> 'LaidOut':
    """Returns `function` jitted over this layout; options are jax.jit's."""
    @functools.wraps(function)
    def traced(*args: Any) -> Any:
      with use_rules(self.rules, self.mesh.shape):
        return function(*args)
    return LaidOut(self.mesh, jax.jit(traced, **jit_options))

  def table(self) -> str:
    """Returns the mesh as a small table for the log."""
    return mesh_table(self.sizes, self.topology)


@dataclasses.dataclass(frozen=True)
class LaidOut:
  """A jitted function that sets its mesh whenever it is called, lowered or evaluated."""
  mesh: Mesh
  jitted: Any

  def __call__(self, *args: Any) -> Any:
    with jax.set_mesh(self.mesh):
      return self.jitted(*args)

  def lower(self, *args: Any) -> Any:
    """Returns jax's lowered function; `.compile()` it for an executable."""
    with jax.set_mesh(self.mesh):
      return self.jitted.lower(*args)
