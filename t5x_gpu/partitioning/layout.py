"""The sharding of every array of a run, and functions jitted with it.

A layout maps axis names to shardings. Its jitted functions enter the rules inside the traced
function and set the mesh around the call: Flax's rules context is not in jit's cache key, and
`with mesh:` drops every constraint.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_gpu.partitioning import context_parallel, fsdp, pipeline
from t5x_gpu.partitioning.axis_rules import AxisNames, AxisRules, Table, partition_spec, use_rules
from t5x_gpu.partitioning.fsdp import own_table
from t5x_gpu.partitioning.manual_collectives import InBfloat16, InFloat32
from t5x_gpu.partitioning.mesh import mesh_table
from t5x_gpu.partitioning.mesh_sizes import MeshSizes
from t5x_gpu.partitioning.pipeline_schedules import Timetable
from t5x_gpu.partitioning.region import Region
from t5x_gpu.partitioning.trees import ArrayLike, ParamNames, Path, Shapes, Tree, TreeFn, name_of
from t5x_gpu.runtime.topology import Topology


@dataclasses.dataclass(frozen=True)
class Layout:
  """A mesh and rules, which define the sharding of every array of a run.

  Attributes:
    mesh: the devices, with all axes of MESH_AXES.
    rules: which mesh axes split each array axis.
    sizes: sizes of the mesh.
    topology: hosts and devices per host.
    zero_stage: see partitioning/fsdp.py.
    pipeline: schedule of the stages; None without a pipeline.
    accumulate_by, overlap_layers: see partitioning/region.py.
    gradient_dtype: dtype in which gradients are sent, 'float32' or 'bfloat16'.
    fills_batch: whether rows of weight 0 fill a batch that the mesh does not divide.
    notes: notes for the user, one line each.
  """

  mesh: Mesh
  rules: AxisRules
  sizes: MeshSizes
  topology: Topology
  zero_stage: int = 3
  pipeline: Optional[Timetable] = None
  accumulate_by: str = 'layer'
  overlap_layers: bool = False
  gradient_dtype: str = 'float32'
  fills_batch: bool = False
  notes: tuple[str, ...] = ()

  @property
  def region(self) -> Region:
    """The region of a step with explicit collectives."""
    inside = tuple((a, self.sizes.ici[a]) for a, hosts in self.sizes.dcn.items() if hosts > 1)
    return Region(
      self.rules,
      self.mesh.shape,
      self.zero_stage,
      self.pipeline,
      self.accumulate_by,
      self.overlap_layers,
      InBfloat16(inside) if self.gradient_dtype == 'bfloat16' else InFloat32(),
    )

  @property
  def replicated(self) -> NamedSharding:
    return NamedSharding(self.mesh, PartitionSpec())

  @property
  def for_decoding(self) -> 'Layout':
    """The same mesh for decoding, where the length is one token and cannot be split.

    Devices along `context` then repeat each other's work. All stages take part in every layer;
    XLA moves the layer's parameters to them.
    """
    split = {
      name: axes
      for name, axes in self.rules.activations.items()
      if name not in ('length', 'residual_length')
    }
    rules = dataclasses.replace(self.rules, activations=split, context_method=None)
    return dataclasses.replace(self, rules=rules, pipeline=None)

  @property
  def batch_parts(self) -> int:
    """Parts into which the rows of a batch are split; divides the batch size."""
    return math.prod(self.mesh.shape[a] for a in self.rules.activations['batch'])

  def filled_rows(self, rows: int, *, num_microbatches: Optional[int] = None) -> int:
    """Returns the rows of a batch on the devices: `rows`, or more if `fills_batch` adds some.

    Args:
      rows: rows of the data.
      num_microbatches: parts of a training batch that are computed in turn; None for an evaluation.
    """
    if not self.fills_batch:
      return rows
    if num_microbatches is None:
      least = 1 if self.pipeline is None else self.pipeline.least_rows
      return self.batch_parts * max(-(-rows // self.batch_parts), least)
    in_turn = num_microbatches * (1 if self.pipeline is None else self.pipeline.num_microbatches)
    unit = self.batch_parts * in_turn
    return -(-rows // unit) * unit

  def shardings(self, abstract: Shapes, names: ParamNames, table: Optional[Table] = None) -> Tree:
    """Returns a tree of NamedSharding for arrays (or shapes) with axes `names`.

    Arrays that `fsdp` divides only with padding are split over a factor of `fsdp`.

    Args:
      abstract: arrays or shapes, without padding.
      names: tree of AxisNames.
      table: array axis -> mesh axes; by default the table of parameters.
    """
    table = self.rules.parameters if table is None else table

    def sharding(path: Path, axis_names: AxisNames, array: ArrayLike) -> NamedSharding:
      axis_names = self._chosen(axis_names, array)
      padding = self._padding(axis_names, table)
      mesh = fsdp.without_padding(self.mesh, padding)
      return self._sharding(path, axis_names, array.shape, table, mesh)

    return jax.tree_util.tree_map_with_path(sharding, names, abstract)

  def stored(self, abstract: Shapes, names: ParamNames, table: Optional[Table] = None) -> Tree:
    """Returns shapes with shardings of arrays as a run stores them, with padding.

    Args:
      abstract: arrays or shapes, without padding.
      names: tree of AxisNames.
      table: array axis -> mesh axes; by default the table of parameters.
    """
    table = self.rules.parameters if table is None else table

    def array_of(path: Path, axis_names: AxisNames, array: ArrayLike) -> jax.ShapeDtypeStruct:
      axis_names = self._chosen(axis_names, array)
      padding = self._padding(axis_names, table)
      shape = array.shape if padding is None else padding.shape(array.shape)
      sharding = self._sharding(path, axis_names, shape, table, self.mesh)
      return jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(array_of, names, abstract)

  def chosen(self, names: ParamNames, abstract: Shapes) -> ParamNames:
    """Returns `names` with the dimension of each array that `fsdp` splits."""
    return jax.tree.map(self._chosen, names, abstract)

  def padded(self, tree: Tree, names: ParamNames, table: Table) -> Tree:
    """Returns global arrays with the padding of `stored`; to be traced."""
    options = dict(table=table, mesh_shape=self.mesh.shape)
    return jax.tree.map(lambda n, x: fsdp.padded(x, n, **options), names, tree)

  def unpadded(self, tree: Tree, names: ParamNames, table: Table) -> Tree:
    """Returns global arrays in their true shapes, split in unequal parts; to be traced."""
    options = dict(table=table, mesh_shape=self.mesh.shape)
    return jax.tree.map(lambda n, x: fsdp.unpadded(x, n, **options), names, tree)

  def _chosen(self, axis_names: AxisNames, array: ArrayLike) -> AxisNames:
    return fsdp.choose_dim(axis_names, array.shape, rules=self.rules, mesh_shape=self.mesh.shape)

  def _padding(self, axis_names: AxisNames, table: Table) -> Optional[fsdp.Padding]:
    return fsdp.padding_of(axis_names, table=table, mesh_shape=self.mesh.shape)

  def _sharding(
    self, path: Path, axis_names: AxisNames, shape: Sequence[int], table: Table, mesh: Mesh
  ) -> NamedSharding:
    own, what = own_table(axis_names, table), name_of(path)
    spec = partition_spec(axis_names.names, shape, table=own, mesh_shape=mesh.shape, what=what)
    return NamedSharding(mesh, spec)

  def batch_shardings(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, NamedSharding]:
    """Returns feature name -> sharding of the global batch; dimensions are batch, length, ..."""

    def sharding(name: str, shape: Sequence[int]) -> NamedSharding:
      names = ('batch', 'length')[: len(shape)] + (None,) * (len(shape) - 2)
      return NamedSharding(
        self.mesh,
        partition_spec(
          names, shape, table=self.rules.activations, mesh_shape=self.mesh.shape, what=name
        ),
      )

    return {name: sharding(name, shape) for name, shape in shapes.items()}

  def put(
    self, batch: Mapping[str, np.ndarray], *, rows: Optional[int] = None
  ) -> dict[str, jax.Array]:
    """Returns the global batch on devices, for decoding; each process uploads only its rows.

    Args:
      batch: feature name -> [rows of the data, ...].
      rows: rows of the global batch, the last of them zeros; None for the rows of the data.
    """
    shapes = {name: (rows or x.shape[0], *x.shape[1:]) for name, x in batch.items()}
    shardings = self.batch_shardings(shapes)
    return {
      name: jax.make_array_from_callback(
        shapes[name], shardings[name], functools.partial(_with_zero_rows, x, shapes[name][0])
      )
      for name, x in batch.items()
    }

  def put_batch(
    self, batch: Mapping[str, np.ndarray], *, num_microbatches: Optional[int] = None
  ) -> dict[str, jax.Array]:
    """Returns a batch for a step on devices: as `put`, with positions in the order of `context`.

    Args:
      batch: feature name -> [rows, ...].
      num_microbatches: as in `filled_rows`.
    """
    ways = self.mesh.shape['context']
    if ways > 1:
      batch = {
        name: x[:, context_parallel.length_order(x.shape[1], ways)] if x.ndim > 1 else x
        for name, x in batch.items()
      }
    rows = next(iter(batch.values())).shape[0]
    return self.put(batch, rows=self.filled_rows(rows, num_microbatches=num_microbatches))

  def jit(self, function: TreeFn, **jit_options: Any) -> 'OnMesh':
    """Returns `function` jitted over this layout; options are jax.jit's."""

    @functools.wraps(function)
    def traced(*args: Tree) -> Tree:
      with use_rules(self.rules, self.mesh.shape):
        return function(*args)

    return OnMesh(self.mesh, jax.jit(traced, **jit_options))

  @property
  def reorders_layers(self) -> bool:
    """Whether layers are stored stage by stage instead of in the model's order."""
    return self.pipeline is not None and self.pipeline.repeats > 1

  def in_run_order(self, tree: Tree, names: ParamNames) -> Tree:
    """Returns a tree with its layers moved from the model's order to the run's order."""
    return self._reordered(tree, names, lambda order: order)

  def in_model_order(self, tree: Tree, names: ParamNames) -> Tree:
    """Returns a tree with its layers moved from the run's order to the model's order."""
    return self._reordered(tree, names, np.argsort)

  def _reordered(
    self, tree: Tree, names: ParamNames, of_order: Callable[[np.ndarray], np.ndarray]
  ) -> Tree:
    if not self.reorders_layers:
      return tree

    def reorder(axis_names: AxisNames, x: jax.Array) -> jax.Array:
      if 'layers' not in axis_names.names:
        return x
      axis = axis_names.names.index('layers')
      order = pipeline.layer_order(x.shape[axis], self.pipeline.num_stages, self.pipeline.repeats)
      return jnp.take(x, of_order(order), axis=axis)

    return jax.tree.map(reorder, names, tree)

  def table(self) -> str:
    """Returns a small table of the mesh and the pipeline, for the log."""
    lines = [mesh_table(self.sizes, self.topology, zero_stage=self.zero_stage)]
    if self.pipeline is not None:
      lines.append(
        f'  pipeline: {self.pipeline.schedule}, {self.pipeline.num_microbatches} '
        f'microbatches, bubble {self.pipeline.bubble_fraction:.1%} of the time of the layers'
      )
    return '\n'.join([*lines, *(f'  {note}' for note in self.notes)])


def _with_zero_rows(x: np.ndarray, rows: int, index: tuple[slice, ...]) -> np.ndarray:
  """Returns `x[index]`, where `x` has zeros after its last row, `rows` rows in all."""
  start, stop, _ = index[0].indices(rows)
  if stop <= x.shape[0]:
    return x[index]
  part = x[(slice(min(start, x.shape[0]), x.shape[0]), *index[1:])]
  zeros = np.zeros((stop - start - part.shape[0], *part.shape[1:]), part.dtype)
  return np.concatenate([part, zeros])


@dataclasses.dataclass(frozen=True)
class OnMesh:
  """A jitted function that sets its mesh when it is called or lowered."""

  mesh: Mesh
  jitted: Any

  def __call__(self, *args: Tree) -> Tree:
    with jax.set_mesh(self.mesh):
      return self.jitted(*args)

  def trace(self, *args: Tree) -> Any:
    """Returns JAX's traced function, which has made all choices that depend on shapes."""
    with jax.set_mesh(self.mesh):
      return self.jitted.trace(*args)

  def lower(self, *args: Tree) -> jax.stages.Lowered:
    """Returns JAX's lowered function; call `.compile()` on it for an executable.

    The mesh may have GPUs that this machine lacks; enter `gpu_targets.kernels_for` first.
    """
    with jax.set_mesh(self.mesh):
      return self.jitted.lower(*args)
