"""The table of array axis names, and how layers touch sharding: by these names.

`shard(x, *names)` constrains an activation; `with_axes(init, names)` names the axes of a parameter,
which `whole` (parameters.py) gathers. `split_ways`, `local_ways`, `sum_over` and `gather_over` are
for code that counts or adds along a split axis. All use the names in `AXES`. The active `AxisRules`
(the sum of the rules of all parallelism files) map a name to the mesh axes that split it. An
unknown name, two dimensions on one mesh axis, and a size that does not divide are errors. Flax's
own rules accept all three silently and then train replicated. `on_each_device` calls kernels that
the compiler cannot split, each device on its own part.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional

import flax.linen as nn
import flax.struct
import jax
from jax.sharding import PartitionSpec

from t5x_gpu.errors import MeshError, ShapeError, did_you_mean
from t5x_gpu.partitioning.trees import ParamNames, Params, Tree, TreeFn, by_name

# The one vocabulary for shapes in docstrings, parameters and rules.
AXES: dict[str, str] = {
  'batch': 'examples of the global batch',
  'length': 'positions of a sequence',
  'residual_length': 'positions between the matmuls: of norms, dropout and residuals',
  'embed': 'features of the residual stream',
  'mlp': 'hidden features of the MLP',
  'heads': 'attention heads',
  'kv_heads': 'key and value heads (fewer than heads under grouped queries)',
  'kv': 'features of one head',
  'vocab': 'token ids',
  'layers': 'layers of a stack',
  'experts': 'experts of a mixture-of-experts MLP',
  'relpos_buckets': 'buckets of the relative position bias',
}

# An axis name, or None for a dimension that is never split.
Names = Sequence[Optional[str]]
# Array axis -> the mesh axes that split it, outermost first.
Table = Mapping[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class AxisRules:
  """Which mesh axes split each array axis.

  Attributes:
    parameters: rules for parameters; FSDP splits their `embed`.
    activations: rules for activations; FSDP splits their `batch`.
    optimizer: additional rules for optimizer state (ZeRO-1).
    context_method: how attention works over a split length, 'ring' or 'gather'.
  """

  parameters: Table = dataclasses.field(default_factory=dict)
  activations: Table = dataclasses.field(default_factory=dict)
  optimizer: Table = dataclasses.field(default_factory=dict)
  context_method: Optional[str] = None

  def __add__(self, other: 'AxisRules') -> 'AxisRules':
    return AxisRules(
      _joined(self.parameters, other.parameters),
      _joined(self.activations, other.activations),
      _joined(self.optimizer, other.optimizer),
      self.context_method or other.context_method,
    )

  @property
  def state(self) -> Table:
    """Array axis -> mesh axes of the optimizer's state."""
    return _joined(self.parameters, self.optimizer)


def _joined(a: Table, b: Table) -> Table:
  return {name: a.get(name, ()) + b.get(name, ()) for name in [*a, *(n for n in b if n not in a)]}


def check_names(names: Names, *, rank: int, what: str) -> None:
  """Raises ShapeError unless all `names` are known and there is one per dimension."""
  if len(names) != rank:
    raise ShapeError(
      f'{what} has {rank} dimensions but {len(names)} axis names {tuple(names)}.',
      fix='Give one name (or None) per dimension.',
    )
  for name in names:
    if name is not None and name not in AXES:
      raise ShapeError(
        f'{what} has the unknown axis name {name!r}.{did_you_mean(name, AXES)}',
        fix=f'Known names: {", ".join(AXES)} (partitioning/axis_rules.py).',
      )


def partition_spec(
  names: Names,
  shape: Sequence[int],
  *,
  table: Table,
  mesh_shape: Mapping[str, int],
  what: str = 'array',
) -> PartitionSpec:
  """Returns the PartitionSpec of an array.

  Args:
    names: axis name per dimension.
    shape: size per dimension.
    table: array axis -> mesh axes; other names are not split.
    mesh_shape: mesh axis -> size.
    what: the array's name, for errors.
  Raises:
    ShapeError: an unknown name or a wrong rank.
    MeshError: one mesh axis would split two dimensions, or a size does not divide.
  """
  check_names(names, rank=len(shape), what=what)
  taken: dict[str, Optional[str]] = {}
  entries: list[Any] = []
  for name, size in zip(names, shape):
    axes = tuple(a for a in table.get(name, ()) if mesh_shape.get(a, 1) > 1) if name else ()
    for axis in axes:
      if axis in taken:
        raise MeshError(
          f'{what} {tuple(names)}: both {taken[axis]!r} and {name!r} are split over '
          f'mesh axis {axis!r}.',
          fix='One mesh axis can split one dimension only.',
        )
      taken[axis] = name
    parts = math.prod(mesh_shape[a] for a in axes)
    if size % parts:
      split = ' x '.join(f'{a}={mesh_shape[a]}' for a in axes)
      raise MeshError(
        f'{what}: {name} = {size} cannot be split {parts} ways ({split}).',
        fix=f'Set its {name} to a multiple of {parts}, or name the dimension None to keep it whole '
        'on every device.',
      )
    entries.append(axes[0] if len(axes) == 1 else axes or None)
  return PartitionSpec(*entries)


@dataclasses.dataclass(frozen=True)
class _Active:
  rules: AxisRules
  mesh_shape: Mapping[str, int]
  manual_axes: tuple[str, ...]


_active: contextvars.ContextVar[Optional[_Active]] = contextvars.ContextVar(
  'axis_rules', default=None
)


@contextlib.contextmanager
def use_rules(
  rules: AxisRules, mesh_shape: Mapping[str, int], *, manual_axes: Sequence[str] = ()
) -> Iterator[None]:
  """Makes `shard` follow `rules`. Enter it inside the traced function: jit's cache ignores it.

  Args:
    rules: sum of the rules of every parallelism.
    mesh_shape: mesh axis -> size.
    manual_axes: mesh axes along which arrays are already local (partitioning/region.py).
  """
  automatic = {axis: size for axis, size in mesh_shape.items() if axis not in manual_axes}
  token = _active.set(_Active(rules, automatic, tuple(manual_axes)))
  try:
    yield
  finally:
    _active.reset(token)


def shard(x: jax.Array, *names: Optional[str]) -> jax.Array:
  """Returns `x`, split over the mesh by its axis names; unchanged without active rules.

  If the rows of a residual divide, `model` splits them instead of its positions (`splits_rows`).
  """
  active = _active.get()
  if active is None:
    check_names(names, rank=x.ndim, what='activation')
    return x
  table = active.rules.activations
  if names[:2] == ('batch', 'residual_length') and splits_rows(x.shape):
    others = tuple(a for a in table['residual_length'] if a != 'model')
    table = {**table, 'batch': (*table.get('batch', ()), 'model'), 'residual_length': others}
  spec = partition_spec(
    names, x.shape, table=table, mesh_shape=active.mesh_shape, what='activation'
  )
  return jax.lax.with_sharding_constraint(x, spec)


def splits_rows(shape: Sequence[int]) -> bool:
  """Returns whether `model` splits the rows of a residual, not its positions, under these rules.

  A gather or sum along another dimension than the first one transposes the whole activation. Each
  device has as many tokens either way.

  Args:
    shape: [batch, length, ...] of the residual; rows are local in a region with explicit
      collectives. Elsewhere, other mesh axes may split the rows, and `model` splits positions.
  """
  return (
    'model' in split_axes('residual_length')
    and not split_axes('batch')
    and shape[0] % _active.get().mesh_shape['model'] == 0
  )


def split_axes(name: str) -> tuple[str, ...]:
  """Returns the mesh axes over which the active rules split activations along `name`."""
  active = _active.get()
  return (
    ()
    if active is None
    else tuple(
      axis for axis in active.rules.activations.get(name, ()) if active.mesh_shape.get(axis, 1) > 1
    )
  )


def split_axis(name: str) -> Optional[str]:
  """Returns the one mesh axis that splits activations along `name`, or None."""
  axes = split_axes(name)
  assert len(axes) <= 1, (name, axes)
  return axes[0] if axes else None


def split_ways(name: str) -> int:
  """Returns the number of parts into which the active rules split activations along `name`."""
  return math.prod(_active.get().mesh_shape[axis] for axis in split_axes(name))


def is_manual(axis: str) -> bool:
  """Returns whether arrays are local along mesh axis `axis` here, so layers call collectives."""
  active = _active.get()
  return active is not None and axis in active.manual_axes


def manual_axes(name: str) -> tuple[str, ...]:
  """Returns the mesh axes that split activations along `name` and along which arrays are local."""
  active = _active.get()
  axes = active.rules.activations.get(name, ()) if active is not None else ()
  return tuple(axis for axis in axes if axis in active.manual_axes)


def sum_over(x: Tree, name: str) -> Tree:
  """Returns local arrays summed over the devices that split activations along `name`."""
  axes = manual_axes(name)
  return jax.lax.psum(x, axes) if axes else x


def gather_over(x: jax.Array, name: str, *, dim: int) -> jax.Array:
  """Returns a local array, gathered along `dim` from the devices that split `name`."""
  axes = manual_axes(name)
  return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def local_ways(name: str) -> int:
  """Returns the number of devices that share the positions of a local array along `name`."""
  return math.prod(map(jax.lax.axis_size, manual_axes(name)))


def context_method() -> Optional[str]:
  """Returns the attention method if the length is split here, 'ring' or 'gather'; else None."""
  return _active.get().rules.context_method if is_manual('context') else None


def varying(x: jax.Array, axes: Sequence[str]) -> jax.Array:
  """Returns `x`, marked as different on every device of the manual mesh axes `axes`.

  The gradient of a marked array stays local: JAX does not add a collective.
  """
  missing = tuple(a for a in axes if a not in jax.typeof(x).manual_axis_type.varying)
  return jax.lax.pcast(x, missing, to='varying') if missing else x


@flax.struct.dataclass
class NamedParam(nn.meta.AxisMetadata):
  """A parameter together with its axis names, as `init` returns it."""

  value: Any
  names: tuple[Optional[str], ...] = flax.struct.field(pytree_node=False)
  along: Optional[str] = flax.struct.field(pytree_node=False, default=None)

  def unbox(self) -> Any:
    return self.value

  def replace_boxed(self, val: Any) -> 'NamedParam':
    return self.replace(value=val)

  def add_axis(self, index: int, params: dict[Any, Any]) -> 'NamedParam':
    names = list(self.names)
    names.insert(index, params[nn.PARTITION_NAME])
    return self.replace(names=tuple(names))

  def remove_axis(self, index: int, params: dict[Any, Any]) -> 'NamedParam':
    names = list(self.names)
    removed = names.pop(index)
    assert removed == params[nn.PARTITION_NAME], (removed, params)
    return self.replace(names=tuple(names))


def with_axes(
  init: Callable[..., jax.Array], names: Names, *, along: Optional[str] = None
) -> Callable[..., NamedParam]:
  """Returns an initializer whose parameter carries `names`.
  Args:
    init: (key, shape, ...) -> values.
    names: axis name per dimension.
    along: the activation axis if the parameter acts on its parts separately and its module accepts
      copies of the parameter (layers/dense.py).
  """

  def named_init(key: jax.Array, shape: Sequence[int], *args: Any) -> NamedParam:
    check_names(names, rank=len(shape), what=f'A parameter of shape {list(shape)}')
    return NamedParam(init(key, shape, *args), tuple(names), along)

  return named_init


def is_named(x: object) -> bool:
  """Returns whether `x` is a parameter with axis names; an `is_leaf` for tree maps."""
  return isinstance(x, NamedParam)


@dataclasses.dataclass(frozen=True)
class FsdpDim:
  """The axis of an array that `fsdp` splits, and its true size (`fsdp.choose_dim`)."""

  name: str
  size: int


@dataclasses.dataclass(frozen=True)
class AxisNames:
  """The axis names of one parameter; a leaf in trees, where a plain tuple would be a branch.

  Attributes:
    names: one per dimension.
    along: the activation axis if the parameter acts on its parts separately, else None.
    fsdp: the axis that `fsdp` splits instead of the axis in the rules; None for the axis in the
      rules.
  """

  names: tuple[Optional[str], ...]
  along: Optional[str] = None
  fsdp: Optional[FsdpDim] = None


def split_names(boxed: Params) -> tuple[Params, ParamNames]:
  """Returns (values, tree of AxisNames) of a tree of `NamedParam`.

  Raises:
    ShapeError: parameters without axis names; the message lists all of them.
  """
  leaves = by_name(boxed, is_leaf=is_named)
  bare = {name: leaf for name, leaf in leaves.items() if not is_named(leaf)}
  if bare:
    listed = ', '.join(f'{path} {list(x.shape)}' for path, x in bare.items())
    name = next(iter(bare)).split('/')[-1]
    raise ShapeError(
      f'Parameters without axis names: {listed}. The mesh cannot split them.',
      fix="Name every dimension where the module creates it (a stack adds 'layers' itself):\n"
      '  from t5x_gpu.partitioning.axis_rules import with_axes\n'
      f'  self.param({name!r}, with_axes(init, NAMES), shape)\n'
      'NAMES has one name per dimension of shape, or None for one that is never split: '
      f"{', '.join(AXES)}. A matrix of an MLP has ('embed', 'mlp').",
      docs='parallelism.md#writing-a-layer-or-a-model-that-works-everywhere',
    )
  return (
    jax.tree.map(lambda p: p.value, boxed, is_leaf=is_named),
    jax.tree.map(lambda p: AxisNames(p.names, p.along), boxed, is_leaf=is_named),
  )


def on_each_device(
  function: TreeFn, names: Sequence[Optional[Names]], out_names: Sequence[Names]
) -> TreeFn:
  """Returns a function of whole arrays; each device applies `function` to its own parts.

  Along mesh axes that are already manual (region.py), arrays are local. The other axes, usually
  only `model`, are automatic: XLA would gather every argument of a kernel on every device. In
  attention, rows and heads are independent, so each part can be computed alone.

  Call it only where it is not differentiated: in the two functions of a `jax.custom_vjp`. Results
  are marked as varying over all manual axes, because kernels lose the marks.

  Args:
    function: function of arrays and Nones.
    names: axis names of each argument; None for an argument that is None.
    out_names: axis names of the results, a tuple of Names.
  """
  mesh = jax.sharding.get_abstract_mesh()
  manual = tuple(mesh.manual_axes)
  automatic = [axis for axis in mesh.axis_names if axis not in manual]
  if not automatic:
    assert not manual, mesh  # `model` never is
    return function
  # Marks are not checked: the results of a kernel have none.
  parts = jax.shard_map(
    lambda *args: function(*unmarked(args)),
    in_specs=tuple(_spec(of) for of in names),
    out_specs=tuple(_spec(of) for of in out_names),
    axis_names=set(automatic),
    check_vma=False,
  )

  def marked(*args: Tree) -> Tree:
    # A scan hoists work that depends only on its constants, also out of a nested region. The
    # hoisted residuals then have shardings that XLA refuses. The barrier ties all arguments
    # together.
    results = parts(*jax.lax.optimization_barrier(args))
    return jax.tree.map(lambda x: varying(x, manual), results)

  return marked


def unmarked(x: Tree) -> Tree:
  """Returns a tree's arrays without their marks; call it in a region that does not check marks.

  Since jax 0.11 such a region keeps the marks of its arguments, and Pallas kernels refuse them. The
  result of any operation in the region has no marks; the operation used here costs nothing in the
  compiled program. Its gradient is zero, so call it only in the two functions of a
  `jax.custom_vjp`.
  """
  return jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, x.dtype), x)


def _spec(names: Optional[Names]) -> PartitionSpec:
  if names is None:
    return PartitionSpec()
  return PartitionSpec(*(split_axes(name) or None if name else None for name in names))
