"""Calls of kernels that the compiler cannot split: each device computes the part that it holds.

The mesh axes that are manual already (partitioning/manual_region.py) hold local arrays. The other
ones, usually only `model`, are automatic: XLA would gather every argument of a kernel on every
device. Rows and heads are independent in attention, so each part can be computed alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, Optional

import jax
from jax.sharding import AxisType, PartitionSpec

from t5x_gpu.partitioning.axis_rules import Names, split_axes, varying


def on_own_part(
  function: Callable[..., Any], names: Sequence[Optional[Names]], out_names: Any
) -> Callable[..., Any]:
  """Returns `function` of whole arrays, computed by each device on its parts of them.

  Call it only where it is not differentiated: in the two functions of a `jax.custom_vjp`. Results
  are marked as varying over all manual axes, because kernels lose the marks.

  Args:
    function: of arrays and Nones.
    names: axis names of each argument; None for an argument that is None.
    out_names: the same for the results, a tuple of Names.
  """
  mesh = jax.sharding.get_abstract_mesh()
  manual = tuple(mesh.manual_axes)
  automatic = tuple(
    axis
    for axis, kind in zip(mesh.axis_names, mesh.axis_types)
    if kind != AxisType.Manual and mesh.shape[axis] > 1
  )

  def marked(*args: Any) -> Any:
    here = manual + automatic
    # A constant, or an argument without marks, would not mix with results that have them.
    args = jax.tree.map(lambda x: varying(x, here), args)
    return jax.tree.map(lambda x: varying(x, here), function(*args))

  if not automatic:
    return marked if manual else function
  parts = jax.shard_map(
    marked,
    in_specs=tuple(_spec(of) for of in names),
    out_specs=tuple(_spec(of) for of in out_names),
    axis_names=set(automatic),
  )
  # A scan moves what depends only on its constants out of the loop, also out of a nested region,
  # whose residuals then have shardings that XLA refuses. The barrier ties all arguments together.
  return lambda *args: parts(*jax.lax.optimization_barrier(args))


def _spec(names: Optional[Names]) -> PartitionSpec:
  if names is None:
    return PartitionSpec()
  return PartitionSpec(*(split_axes(name) or None if name else None for name in names))
