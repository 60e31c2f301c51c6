"""Copies of parameters, one for each device along `model`, while a step lasts.

`model` is the compiler's (partitioning/manual_region.py). Of a parameter that every device keeps
whole and uses on its own part of the activations, it would sum the gradient at each use: for every
layer, microbatch and tick of a pipeline. A copy that is the device's own has a gradient that is its
own, and the copies' are summed once. There are two kinds:

- what acts on each position or head alone (`AxisNames.along`): [copies, ...] of [...];
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
class Copies:
  """Which parameters come in copies.

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
    """Returns where copies stand, counted from the last dimension; None without any."""
    names = axis_names.names
    if self.count > 1 and 'model' in self.rules.activations.get(axis_names.along, ()):
      return -1 - sum(name != 'layers' for name in names)
    if self.count > 1 and _HEADS in names and 'model' not in self.rules.parameters.get(_HEADS, ()):
      return names.index(_HEADS) - len(names)
    return None

  def make(self, axis_names: AxisNames, x: jax.Array) -> jax.Array:
    """Returns copies of the parameter `x`, each on its device; `x` itself if it has none."""
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
    """Returns the sum over copies of `gradient`, of the shape of the parameter `like`."""
    dim = self.dim(axis_names)
    if dim is None:
      return gradient
    if axis_names.along is not None:
      return gradient.sum(dim)
    at = gradient.ndim + dim
    return gradient.reshape(
      *gradient.shape[:at], like.shape[at], -1, *gradient.shape[at + 1 :]
    ).sum(at + 1)
