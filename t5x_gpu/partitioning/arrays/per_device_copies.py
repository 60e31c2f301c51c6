"""Copies of parameters during a step, one per device along `model`.

The compiler handles `model` (partitioning/manual_region.py). If every device holds a parameter
whole and uses it on its part of the activations, the compiler would sum its gradient at each use:
for every layer, microbatch and pipeline tick. With a copy per device, each copy has a local
gradient, and these are summed once. There are two kinds:

- parameters that act on each position or head separately (`AxisNames.along`): [copies, ...];
- keys and values of fewer heads than devices: [..., copies of each head, kv] of [..., heads, kv].
"""

import dataclasses
from collections.abc import Mapping
from typing import Optional

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from t5x_gpu.partitioning.axis_rules import AxisNames, AxisRules

_HEADS = 'kv_heads'


@dataclasses.dataclass(frozen=True)
class PerDeviceCopies:
  """Makes copies of parameters, and sums their gradients.

  Attributes:
    rules: which mesh axes split each array axis.
    mesh_shape: mesh axis -> size.
  """

  rules: AxisRules
  mesh_shape: Mapping[str, int]

  @property
  def count(self) -> int:
    return self.mesh_shape.get('model', 1)

  def dim(self, axis_names: AxisNames) -> Optional[int]:
    """Returns the dimension of the copies, counted from the last one (-1); None without copies."""
    names = axis_names.names
    if self.count > 1 and 'model' in self.rules.activations.get(axis_names.along, ()):
      return -1 - sum(name != 'layers' for name in names)
    if self.count > 1 and _HEADS in names and 'model' not in self.rules.parameters.get(_HEADS, ()):
      return names.index(_HEADS) - len(names)
    return None

  def make(self, axis_names: AxisNames, x: jax.Array) -> jax.Array:
    """Returns copies of the parameter `x`, one per device; `x` itself if it needs none."""
    dim = self.dim(axis_names)
    if dim is None:
      return x
    if axis_names.along is not None:
      x = jnp.expand_dims(x, dim)
    x = jnp.repeat(x, self.count // x.shape[dim], axis=dim)
    return jax.lax.with_sharding_constraint(
      x, PartitionSpec(*('model' if i == x.ndim + dim else None for i in range(x.ndim)))
    )

  def total(self, axis_names: AxisNames, gradient: jax.Array, like: jax.Array) -> jax.Array:
    """Returns `gradient` summed over copies, in the shape of the parameter `like`."""
    dim = self.dim(axis_names)
    if dim is None:
      return gradient
    if axis_names.along is not None:
      return gradient.sum(dim)
    at = gradient.ndim + dim
    return gradient.reshape(
      *gradient.shape[:at], like.shape[at], -1, *gradient.shape[at + 1 :]
    ).sum(at + 1)
