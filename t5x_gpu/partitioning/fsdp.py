"""Fully sharded data parallelism (ZeRO): optimizer state, gradients and parameters are split too.

What is split: `batch` of activations over `fsdp`, and by `zero_stage` also `embed` of
  1. the optimizer state: gradients are reduce-scattered once per step, the updated parameters
     gathered once;
  2. and gradients: each layer's are reduce-scattered as soon as the backward pass has made them;
  3. and parameters: each layer's are gathered before use, forward and again backward.
What moves, per device and step, for P bytes of parameters over n devices: (n - 1) / n x 2 P for
stages 1 and 2 (as plain data parallelism does), x 3 P for stage 3; stages 2 and 3 do it for every
microbatch. When: parameters and optimizer state do not fit on one GPU; before tensor parallelism.
Source: Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (PyTorch FSDP).
"""

from collections.abc import Callable
from typing import Any, Optional

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.partitioning.axis_rules import AxisRules

SPLIT = {'embed': ('fsdp',)}


def rules(zero_stage: int = 3) -> AxisRules:
  """Returns what FSDP adds to the table."""
  return AxisRules(parameters=SPLIT if zero_stage == 3 else {},
                   optimizer={} if zero_stage == 3 else SPLIT,
                   activations={'batch': ('fsdp',)})


@flax.struct.dataclass
class Split:
  """A parameter inside the region where `fsdp` is manual.

  Attributes:
    part: this device's part; what is differentiated.
    full: the whole parameter where every device has it (stage 2), else None.
    dim: the dimension that is split, counted from the last one (-1), as a scan takes the first.
  """
  part: jax.Array
  full: Optional[jax.Array]
  dim: int = flax.struct.field(pytree_node=False)


def is_split(x: Any) -> bool:
  """Returns whether `x` is a parameter in parts; an `is_leaf` for tree maps."""
  return isinstance(x, Split)


def whole(tree: Any, dtype: Any) -> Any:
  """Returns `tree` with every `Split` made whole, in `dtype`; other leaves as they are.

  Models call it as late as they can: once per layer, so that one layer's parameters are whole at a
  time. The gradient of a part is the sum over `fsdp`, in float32.

  Args:
    tree: parameters as a model's `loss` gets them.
    dtype: of the computation; half as many bytes travel in bfloat16.
  """
  return jax.tree.map(lambda x: _use(dtype, x.dim, x.part, x.full) if is_split(x) else x, tree,
                      is_leaf=is_split)


def _gather(dtype: Any, dim: int, part: jax.Array, full: Optional[jax.Array]) -> jax.Array:
  if full is not None:
    return full.astype(dtype)
  return jax.lax.all_gather(part.astype(dtype), 'fsdp', axis=part.ndim + dim, tiled=True)


def _use_forward(dtype: Any, dim: int, part: jax.Array, full: Optional[jax.Array]) -> Any:
  return _gather(dtype, dim, part, full), full


def _use_backward(dtype: Any, dim: int, full: Optional[jax.Array], gradient: jax.Array) -> Any:
  del dtype
  gradient = gradient.astype(jnp.float32)
  part = jax.lax.psum_scatter(gradient, 'fsdp', scatter_dimension=gradient.ndim + dim, tiled=True)
  return part, None if full is None else jnp.zeros_like(full)


_use = jax.custom_vjp(_gather, nondiff_argnums=(0, 1))
_use.defvjp(_use_forward, _use_backward)

# Primitives that make a layer's weights from its parameters. Their results are not worth keeping
# for the backward pass: kept, all layers would be whole at once.
_MOVES = frozenset({'all_gather', 'concatenate', 'convert_element_type', 'reshape', 'transpose',
                    'broadcast_in_dim', 'squeeze', 'sharding_constraint'})


def keep_activations_only(primitive: Any, *_: Any, **__: Any) -> bool:
  """A policy for `jax.checkpoint` that stores everything but gathered parameters."""
  return primitive.name not in _MOVES


def keep_policy(policy: Optional[Callable[..., bool]], params: Any
                ) -> Optional[Callable[..., bool]]:
  """Returns a remat policy under which a layer with `params` gathers them again."""
  has_split = any(is_split(x) and x.full is None
                  for x in jax.tree.leaves(params, is_leaf=is_split))
  return keep_activations_only if policy is None and has_split else policy
