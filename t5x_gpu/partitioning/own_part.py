"""Calls of kernels that the compiler cannot split: each device computes its own part.

Along mesh axes that are already manual (partitioning/manual_region.py), arrays are local. The other
axes, usually only `model`, are automatic: XLA would gather every argument of a kernel on every
device. In attention, rows and heads are independent, so each part can be computed alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, Optional

import jax
from jax.sharding import PartitionSpec

from t5x_gpu.partitioning.axis_rules import Names, split_axes, varying


def on_own_part(
  function: Callable[..., Any], names: Sequence[Optional[Names]], out_names: Any
) -> Callable[..., Any]:
  """Returns `function` of whole arrays as a function that each device computes on its parts.

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

  def marked(*args: Any) -> Any:
    # A scan hoists work that depends only on its constants, also out of a nested region. The
    # hoisted residuals then have shardings that XLA refuses. The barrier ties all arguments
    # together.
    results = parts(*jax.lax.optimization_barrier(args))
    return jax.tree.map(lambda x: varying(x, manual), results)

  return marked


def unmarked(x: Any) -> Any:
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
