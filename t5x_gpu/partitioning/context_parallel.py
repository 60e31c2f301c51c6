"""Context parallelism: the length of every sequence is split.

What is split: `length` of activations over `context`; parameters are whole. What moves: keys and
values of every layer, forward and backward, and their gradients. `ring_attention` sends them from
neighbor to neighbor, hidden behind the matmuls, and holds the logits of one block only.
`gathered_attention` gathers them first: fewer bytes, but not hidden, and it holds logits of all
local queries and all keys. When: the activations of one long sequence do not fit, or there are more
GPUs than rows. Use the ring for long sequences, gathering for short ones.
Source: Liu et al. 2023 (Ring Attention); Brandon et al. 2023 (Striped Attention), balanced causal
work; Llama Team 2024 (Llama 3), section 3.3.2: a chunk from both ends per device, and gathering.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.errors import Problem
from t5x_gpu.partitioning.axis_rules import AxisRules, split_axis
from t5x_gpu.partitioning.manual_collectives import InFloat32, all_gather
from t5x_gpu.partitioning.ring_attention import (
  BLOCK_LENGTH,
  LogitsFn,
  largest_block,
  to_query_heads,
)
from t5x_gpu.partitioning.trees import Tree

METHODS = ('ring', 'gather')


def rules(method: str = 'ring') -> AxisRules:
  """Returns the rules of context parallelism."""
  return AxisRules(
    activations={'length': ('context',), 'residual_length': ('context',)}, context_method=method
  )


def check(
  sizes: Mapping[str, int],
  mesh_shape: Mapping[str, int],
  *,
  method: str = 'ring',
  multiple_of: int = 1,
) -> list[Problem]:
  """Returns problems with splitting the length over `context`; [] if there are none.

  Args:
    sizes: array axis -> size; reads 'length'.
    mesh_shape: mesh axis -> size.
    method: 'ring' or 'gather'.
    multiple_of: another number that the length must be a multiple of.
  """
  ways, length = mesh_shape.get('context', 1), sizes.get('length', 0)
  if fits(length, ways, method):
    return []
  chunks = 2 * ways
  unit = chunks
  what = (
    f'does not divide over 2 x context={ways} (= {chunks}): each device takes one chunk from '
    'the front and one from the back, to balance the work of causal attention.'
  )
  if length > 0 and length % chunks == 0:
    what = (
      f'over 2 x context={ways} makes chunks of {length // chunks}, which ring attention '
      f'can only process in blocks of {largest_block(length // ways)}: far too slow.'
    )
    unit = chunks * BLOCK_LENGTH // 8  # such chunks have a large enough divisor: see `fits`
  return [
    Problem(
      f'length = {length} {what}',
      f'Set TASK_FEATURE_LENGTHS so that their sum is a multiple of {math.lcm(unit, multiple_of)}.',
      ('TASK_FEATURE_LENGTHS', 'Partitioner.context'),
    )
  ]


def fits(length: int, ways: int, method: str) -> bool:
  """Returns whether `length` can be split over `ways` devices without tiny blocks.

  A chunk with a large prime factor has only small divisors, so the ring would loop over positions.
  """
  if ways == 1:
    return True
  chunk = length // (2 * ways)
  return (
    length > 0
    and length % (2 * ways) == 0
    and (method != 'ring' or 8 * largest_block(2 * chunk) >= min(chunk, BLOCK_LENGTH))
  )


def length_order(length: int, ways: int) -> np.ndarray:
  """Returns int32 [length], the position at each place, in an order that balances causal work.

  Of 2 * ways chunks, device c holds chunks c and 2 * ways - 1 - c. Under a causal mask all devices
  then compute the same number of logits, also in each step of the ring. Reorder a batch on the host
  with `x[:, order]`. Losses are sums over tokens, so the order never has to be undone.
  """
  assert length % (2 * ways) == 0, (length, ways)
  chunks = np.arange(length, dtype=np.int32).reshape(2 * ways, -1)
  return np.stack([chunks[:ways], chunks[: ways - 1 : -1]], axis=1).reshape(-1)


def in_position_order(x: jax.Array, ways: int, *, dim: int) -> jax.Array:
  """Returns `x` with its dimension `dim` reordered from `length_order` to 0, 1, 2, ..."""
  before, after = x.shape[:dim], x.shape[dim + 1 :]
  front, back = jnp.moveaxis(x.reshape(*before, ways, 2, -1, *after), dim + 1, 0)
  return jnp.concatenate([front, jnp.flip(back, dim)], axis=dim).reshape(x.shape)


def num_before(position: jax.Array, local: jax.Array) -> jax.Array:
  """Returns how many of a device's positions come before each `position`.

  Args:
    position: int32, any shape.
    local: [length / ways], `local_positions` of a device: two chunks in order.
  """
  half = local.shape[0] // 2
  first, second = (jnp.clip(position - start, 0, half) for start in (local[0], local[half]))
  return first + second


def local_positions(length: int) -> jax.Array:
  """Returns int32 [length / ways], positions of this device's tokens, where 'context' is manual.

  Args:
    length: tokens of the whole sequence, in `length_order`.
  """
  ways, device = jax.lax.axis_size('context'), jax.lax.axis_index('context')
  chunk = length // (2 * ways)
  starts = chunk * jnp.stack([device, 2 * ways - 1 - device])
  return (starts[:, None] + jnp.arange(chunk)[None, :]).reshape(-1).astype(jnp.int32)


def traffic_per_step(
  *,
  batch: int,
  length: int,
  num_heads: int,
  head_dim: int,
  num_layers: int,
  context: int,
  dtype_bytes: int,
  method: str = 'ring',
  num_forwards: int = 1,
  info_bytes: int = 0,
) -> int:
  """Returns bytes that a device sends over `context` in one training step.

  Args:
    batch, num_heads, num_layers: rows, key and value heads, and layers of one device.
    length: tokens of the whole sequence.
    head_dim: features of a head.
    context: size of the axis.
    dtype_bytes: bytes per value of keys and values. Gradients travel as sums in float32, except
      that their first and last hop use this dtype.
    method: 'ring' or 'gather'.
    num_forwards: 2 if the backward pass recomputes layers, else 1. Over two devices, XLA merges the
      single hop of the keys and values with the recomputation's hop.
    info_bytes: bytes of one device's kv_info (positions, segment ids).
  """
  assert method in METHODS, method
  hops = context - 1
  elements = 2 * batch * (length // context) * num_heads * head_dim  # keys and values
  there = hops * (elements * dtype_bytes + info_bytes)
  if method == 'gather':
    return num_layers * (num_forwards * there + hops * elements * 4)
  if context == 1:
    return 0
  home = elements * (2 * dtype_bytes + 4 * (context - 2))
  times = 2 if (context, num_forwards) == (2, 2) else num_forwards + 1
  return num_layers * (times * there + home)


def gathered_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  logits_fn: LogitsFn,
  logits_params: Tree,
  q_info: Tree,
  kv_info: Tree,
  axis: str = 'context',
) -> jax.Array:
  """Returns attention output [batch, q_length, heads, kv] of the local queries.

  Gathers key, value and kv_info over `axis` and holds logits [batch, heads, q_length, length].
  Arguments as in `ring_attention`.
  """
  key, value = gather_length(axis, key), gather_length(axis, value)
  kv_info = gather_info(kv_info, axis)
  logits = logits_fn(logits_params, query, key, q_info, kv_info)
  weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
  return jnp.einsum('bhqk,bkhd->bqhd', weights, to_query_heads(value, query.shape[2]))


# Dimensions of [batch, length, heads, kv], counted from the last one.
_LENGTH, _HEADS = -3, -2


def _all_lengths(axis: str, x: jax.Array) -> jax.Array:
  return all_gather(x, axis, dim=_LENGTH, model_dim=_HEADS if split_axis('kv_heads') else None)


def _all_lengths_forward(axis: str, x: jax.Array) -> tuple[jax.Array, None]:
  return _all_lengths(axis, x), None


def _all_lengths_backward(axis: str, _: None, gradient: jax.Array) -> tuple[jax.Array]:
  model_dim = _HEADS if split_axis('kv_heads') else None
  part = InFloat32().psum_scatter(
    gradient.astype(jnp.float32), axis, dim=_LENGTH, model_dim=model_dim
  )
  return (part.astype(gradient.dtype),)


# (axis, [batch, length / ways, heads, kv]) -> [batch, length, heads, kv] in `length_order`.
gather_length = jax.custom_vjp(_all_lengths, nondiff_argnums=(0,))
gather_length.defvjp(_all_lengths_forward, _all_lengths_backward)


def gather_info(info: Tree, axis: str = 'context') -> Tree:
  """Returns arrays [..., local length] gathered to [..., length]."""
  return jax.tree.map(lambda x: jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True), info)
