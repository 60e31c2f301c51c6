"""Names of the trees that a step passes on, of the functions on them, and of their leaves.

JAX cannot type a tree by its leaves, so the names of types are for readers.
"""

from collections.abc import Callable, Mapping
from typing import Any, Optional, Union

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


def name_of(path: Path) -> str:
  """Returns the '/'-joined path of a leaf: 'layers/mlp/wo/kernel'."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def by_name(tree: Tree, *, is_leaf: Optional[Callable[[Any], bool]] = None) -> dict[str, Any]:
  """Returns the leaves of `tree` by their names, see `name_of`; `is_leaf` as in jax.tree.map."""
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
  return {name_of(path): x for path, x in leaves}


def as_tree(leaves: Mapping[str, Any]) -> dict[str, Tree]:
  """Returns nested dictionaries, the inverse of `by_name`. Unlike flax's, it needs no Flax."""
  tree: dict[str, Tree] = {}
  for name, x in leaves.items():
    *outer, last = name.split('/')
    node = tree
    for key in outer:
      node = node.setdefault(key, {})
    node[last] = x
  return tree


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
  'as_tree',
  'by_name',
  'name_of',
]
