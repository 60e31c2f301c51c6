"""Names of the trees that a step passes on, and of the functions on them.

JAX cannot type a tree by its leaves, so these names are for readers.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.typing import DTypeLike

# Any nest of dictionaries, tuples and dataclasses whose leaves are arrays or None.
Tree = Any
# The leaves are parameters: arrays, or `parameters.Parameter` inside the region.
Params = Any
# One leaf per parameter: its gradient; its AxisNames; its PartitionSpec.
Gradients = Any
Names = Any
Specs = Any
# Arrays, or jax.ShapeDtypeStruct in their place.
Shapes = Any
# Feature -> array [batch, length, ...] or [batch].
Batch = Mapping[str, jax.Array]
# A Python integer, or a traced one.
Index = Any

__all__ = ['Batch', 'DTypeLike', 'Gradients', 'Index', 'Names', 'Params', 'Shapes', 'Specs', 'Tree']
