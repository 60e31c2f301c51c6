"""Calls of kernels that the compiler cannot split: each device computes the part that it holds.

The mesh axes that are manual already (partitioning/manual_region.py) hold local arrays. The other
ones, usually only `model`, are automatic: XLA would gather every argument of a kernel on every
device. Rows and heads are independent in attention, so each part can be computed alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, Optional

import jax
from jax.sharding import PartitionSpec

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
  automatic = [axis for axis in mesh.axis_names if axis not in manual]
  if not automatic:
    assert not manual, mesh  # `model` never is
    return function
  # Without the check of marks: a kernel has none on its results.
  parts = jax.shard_map(
    lambda *args: function(*unmarked(args)),
    in_specs=tuple(_spec(of) for of in names),
    out_specs=tuple(_spec(of) for of in out_names),
    axis_names=set(automatic),
    check_vma=False,
  )

  def marked(*args: Any) -> Any:
    # A scan moves what depends only on its constants out of the loop, also out of a nested region,
    # whose residuals then have shardings that XLA refuses. The barrier ties all arguments together.
    results = parts(*jax.lax.optimization_barrier(args))
    return jax.tree.map(lambda x: varying(x, manual), results)

  return marked


def unmarked(x: Any) -> Any:
  """Returns the arrays of a tree without their marks; call it in a region that checks none.

  Since jax 0.11 such a region keeps the marks of its arguments, and kernels of Pallas refuse them.
  The result of any operation there has none; this one costs nothing in the compiled program. Its
  gradient is zero, so call it only in the two functions of a `jax.custom_vjp`.
  """
  return jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, x.dtype), x)


def _spec(names: Optional[Names]) -> PartitionSpec:
  if names is None:
    return PartitionSpec()
  return PartitionSpec(*(split_axes(name) or None if name else None for name in names))
