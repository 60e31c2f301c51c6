"""Parameters that act on every position, or every head, alone: norms' scales, biases.

Where `model` splits positions (sequence parallelism) or heads, each device sees only its part of
the gradient. A training step hands such a parameter over as [copies, ...], a copy for each device
along `model`, and sums the gradients of the copies once (partitioning/per_device_copies.py).
"""

from collections.abc import Callable, Sequence
from typing import Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_gpu.partitioning.axis_rules import with_axes


def param_along(
  module: nn.Module,
  name: str,
  init: Callable[..., jax.Array],
  *,
  axes: Sequence[Optional[str]],
  shape: Sequence[int],
  along: Optional[str] = None,
) -> jax.Array:
  """Returns the float32 parameter `name` of a module, of `shape` or [copies, *shape].

  Args:
    module: that is being called.
    name: of the parameter.
    init: (key, shape, dtype) -> values.
    axes: names of its dimensions.
    shape: of one copy.
    along: name of the dimension of activations along which it acts on each part alone, or None.
      Those of `kv_heads` may come with copies of each head in its place.
  """
  if (along is not None or 'kv_heads' in axes) and module.has_variable('params', name):
    return module.get_variable('params', name)  # `module.param` would refuse copies
  return module.param(name, with_axes(init, axes, along=along), tuple(shape), jnp.float32)


def combine(
  operation: Callable[[jax.Array, jax.Array], jax.Array],
  x: jax.Array,
  parameter: jax.Array,
  *,
  rank: int = 1,
) -> jax.Array:
  """Returns `operation(x, parameter)`, with its own copy for each part of `x`.

  Args:
    operation: (x, parameter) -> [..., positions or heads, features], one by one, as `jnp.multiply`,
      or `jnp.matmul` for a parameter of rank 2.
    x: [..., positions or heads, features].
    parameter: of `rank` dimensions, or [copies, ...].
    rank: dimensions of one copy.
  """
  if parameter.ndim == rank:
    return operation(x, parameter)
  copies = parameter.shape[0]
  if x.ndim < 3 or x.shape[-2] % copies:
    return operation(x, parameter[0])  # not split here: right, but summed at this use
  parts = x.reshape(*x.shape[:-2], copies, -1, x.shape[-1])
  y = operation(parts, parameter[:, None] if rank == 1 else parameter)
  return y.reshape(*x.shape[:-1], -1)
