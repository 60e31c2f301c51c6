"""Parameters that act on each position or head separately: scales of norms, and biases.

If `model` splits positions (sequence parallelism) or heads, each device has only its part of the
gradient. A training step then passes these parameters as [copies, ...], one copy per device along
`model`, and sums the gradients of the copies once (partitioning/arrays/per_device_copies.py).
"""

from collections.abc import Callable, Sequence
from typing import Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_gpu.partitioning.axis_rules import with_axes
from t5x_gpu.partitioning.quantized import is_quantized


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

  Returns a `Quantized` kernel unchanged.

  Args:
    module: the module that owns it, while it is called.
    name: name of the parameter.
    init: (key, shape, dtype) -> values.
    axes: names of its dimensions.
    shape: shape of one copy.
    along: activation axis whose parts use separate copies of the parameter, or None. A `kv_heads`
      dimension may also hold several copies of each head.
  """
  if module.has_variable('params', name):
    value = module.get_variable('params', name)
    if along is not None or 'kv_heads' in axes or is_quantized(value):
      return value  # `module.param` would refuse copies, and kernels in 8 bits
  return module.param(name, with_axes(init, axes, along=along), tuple(shape), jnp.float32)


def combine(
  operation: Callable[[jax.Array, jax.Array], jax.Array],
  x: jax.Array,
  parameter: jax.Array,
  *,
  rank: int = 1,
) -> jax.Array:
  """Returns `operation(x, parameter)`; each part of `x` uses its own copy of the parameter.

  Args:
    operation: (x, parameter) -> [..., positions or heads, features], elementwise such as
      `jnp.multiply`, or `jnp.matmul` for a parameter of rank 2.
    x: [..., positions or heads, features].
    parameter: parameter with `rank` dimensions, or [copies, ...].
    rank: number of dimensions of one copy.
  """
  if parameter.ndim == rank:
    return operation(x, parameter)
  copies = parameter.shape[0]
  if x.ndim < 3 or x.shape[-2] % copies:
    return operation(x, parameter[0])  # not split here: correct, but its gradient is summed here
  parts = x.reshape(*x.shape[:-2], copies, -1, x.shape[-1])
  y = operation(parts, parameter[:, None] if rank == 1 else parameter)
  return y.reshape(*x.shape[:-1], -1)
