"""Rematerialization policies by name: what a layer stores for its backward pass.

| name | stored per layer | recomputed |
|---|---|---|
| `none` | everything | nothing |
| `dots` | the layer's input and outputs of all matmuls and kernels | norms, activations, softmax |
| `minimal` | the layer's input and outputs of matmuls with weights | also attention and experts |
| `offload` | as `minimal`, in host memory | as `minimal` |
| `attention` | the layer's input and attention's output | everything but attention |
| `full` | the layer's input | the whole layer |

`TransformerConfig.full_remat_layers` is the number of first layers under `full`.
Gathered FSDP weights are never stored: `parameters.keep_policy`.
In FP8, every policy also stores the scales of matmul operands, a number each.
Source: Chen et al. 2016 (arXiv:1604.06174); `minimal` and `full` are the same as in T5X.
"""

from collections.abc import Callable, Sequence
from typing import Any, Optional

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

from t5x_gpu.layers.fp8 import PRODUCT, SCALE
from t5x_gpu.partitioning.parameters import Remat
from t5x_gpu.partitioning.ring_attention import RESULTS

# (primitive, *arguments, **parameters) -> whether, or where, to store the results.
Policy = Callable[..., object]
LAYER_INPUT = 'layer_input'
# Matrix products, and kernels, which contain them.
_DOTS = frozenset({'dot_general', 'ragged_dot_general', 'ragged_dot', 'pallas_call', 'run_state'})

_DEVICE_TO_HOST = dict(offload_src='device', offload_dst='pinned_host')
_offload_dots = jax.checkpoint_policies.offload_dot_with_no_batch_dims(**_DEVICE_TO_HOST)
_offload_inputs = jax.checkpoint_policies.save_and_offload_only_these_names(
  names_which_can_be_saved=(SCALE,),
  names_which_can_be_offloaded=(LAYER_INPUT, PRODUCT),
  **_DEVICE_TO_HOST,
)
_dots_with_weights = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
# Attention has a name: loops and nested regions hide its matrix products and kernels.
_named_results = jax.checkpoint_policies.save_only_these_names(RESULTS, PRODUCT, SCALE)
_named_products = jax.checkpoint_policies.save_only_these_names(PRODUCT, SCALE)


def _lacks_scale(primitive: Primitive, args: Sequence[Any]) -> bool:
  """Returns whether this is a product of 8-bit operands, whose scaled result has a name."""
  return primitive.name == 'dot_general' and args[0].dtype.itemsize == 1


def _all_dots(primitive: Primitive, *args: Any, **params: object) -> bool:
  is_dot = primitive.name in _DOTS and not _lacks_scale(primitive, args)
  return is_dot or _named_results(primitive, *args, **params)


def _minimal(primitive: Primitive, *args: Any, **params: object) -> bool:
  if primitive.name == 'dot_general' and not _lacks_scale(primitive, args):
    return _dots_with_weights(primitive, *args, **params)
  return _named_products(primitive, *args, **params)


def _offload(primitive: Primitive, *args: Any, **params: object) -> object:
  if primitive.name == 'dot_general' and not _lacks_scale(primitive, args):
    return _offload_dots(primitive, *args, **params)
  return _offload_inputs(primitive, *args, **params)


POLICIES: dict[str, Optional[Policy]] = {
  'none': None,
  'minimal': _minimal,
  'dots': _all_dots,
  'attention': jax.checkpoint_policies.save_only_these_names(RESULTS, SCALE),
  'full': jax.checkpoint_policies.save_only_these_names(SCALE),
  'offload': _offload,
}


# Policies ordered by device memory, largest first.
BY_MEMORY = ('none', 'dots', 'minimal', 'attention', 'full', 'offload')


def remat_of(policy: str, full_layers: int, *, num_layers: int, of_stack: int) -> Remat:
  """Returns what the layers of a block store: of a stack, or of a stage of a pipeline.

  Args:
    policy: name of the policy.
    full_layers: how many first layers of the stack store only their input.
    num_layers, of_stack: number of layers in this block, and in the stack that it is part of.
  """
  first = num_full(full_layers, num_layers=num_layers, of_stack=of_stack)
  return Remat(POLICIES[policy], first, POLICIES['full'])


def num_full(full_layers: int, *, num_layers: int, of_stack: int) -> int:
  """Returns how many of `num_layers` layers have the policy 'full'.

  Each block of a pipeline has its share of them, rounded down. So has accumulation by layer, whose
  blocks are layers: none.
  """
  return min(full_layers, of_stack) * num_layers // of_stack


# Policies with which a layer computes its matmuls again. Accumulation by layer does so anyway; the
# other policies only decide what one layer stores while its own backward pass runs.
REPEATS_MATMULS = ('attention', 'full')


def named_input(x: jax.Array) -> jax.Array:
  """Returns the input of a layer, [batch, length, embed], with the name that policies look for."""
  return checkpoint_name(x, LAYER_INPUT)
