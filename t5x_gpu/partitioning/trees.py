"""Names of the trees that a step passes on, and of the functions on them.

JAX cannot type a tree by its leaves, so these names are for readers.
"""

from collections.abc import Callable, Mapping
from typing import Any, Union

import jax
import numpy as np
from jax.typing import DTypeLike

# Any nest of dictionaries, tuples and dataclasses whose leaves are arrays or None.
Tree = Any
# The leaves are parameters: arrays, or `parameters.Parameter` inside the region.
Params = Any
# The optimizer's state; its leaves are arrays.
OptState = Any
# One leaf per parameter: its gradient; its AxisNames; its PartitionSpec.
Gradients = Any
ParamNames = Any
Specs = Any
# The leaves are arrays, or jax.ShapeDtypeStruct in their place.
Shapes = Any
# An array, or what stands for it: jax.ShapeDtypeStruct, numpy.ndarray.
ArrayLike = Any
# The same where only the shape, the dtype and the sharding are read.
Array = Union[jax.Array, np.ndarray, jax.ShapeDtypeStruct]
Shape = tuple[int, ...]
# Feature -> array [batch, length, ...] or [batch].
Batch = Mapping[str, jax.Array]
# A Python integer, or a traced one.
Index = Any
# Path of a leaf, from jax.tree_util.tree_map_with_path.
Path = Any
# A function of trees.
TreeFn = Callable[..., Any]

__all__ = [
  'Array',
  'ArrayLike',
  'Batch',
  'DTypeLike',
  'Gradients',
  'Index',
  'OptState',
  'ParamNames',
  'Params',
  'Path',
  'Shape',
  'Shapes',
  'Specs',
  'Tree',
  'TreeFn',
]
