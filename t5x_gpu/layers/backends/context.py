"""Attention by kernels over rows that are split over the mesh axis `context`.

A kernel gets whole arrays of queries and keys, and one range of keys per query. A query attends to
a range of positions, and positions are ordered on each device, so it also attends to a range of the
keys on one device. Ring: one call per device whose keys pass by; softmaxes are combined by their
maxima and sums. Gather: one call with the gathered keys, in the order of positions. No device
stores logits.
Source: Liu et al. 2023 (Ring Attention); Dao 2023 (FlashAttention-2), section 3.1.
"""

import dataclasses
import functools
from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from t5x_gpu.layers.backends.kinds import AttentionKind
from t5x_gpu.layers.backends.tokamax import KernelCall, attend
from t5x_gpu.layers.masks import KeyRanges, TokenInfo, key_ranges, longer
from t5x_gpu.layers.positions import RelativeBuckets
from t5x_gpu.partitioning.axis_rules import context_method, shard
from t5x_gpu.partitioning.context_parallel import (
  gather_info,
  gather_length,
  in_position_order,
  num_before,
)
from t5x_gpu.partitioning.ring_attention import (
  MASKED,
  RESULTS,
  full_like,
  per_row,
  send_around,
  visit_all,
)


@flax.struct.dataclass
class KernelContextAttention:
  """Attention over a part of each row by one kernel.

  Attributes:
    q_positions, kv_positions: [q_length], [kv_length], positions of the local queries and keys.
    ranges: positions of the keys that each local query attends to, without a window.
    kind: attention of the stack.
    kernel: as in TokamaxAttention.
    multiple: local parts are padded to a multiple of this length.
  """

  q_positions: jax.Array
  kv_positions: jax.Array
  ranges: KeyRanges
  kind: AttentionKind = flax.struct.field(pytree_node=False)
  kernel: str = flax.struct.field(pytree_node=False)
  multiple: int = flax.struct.field(pytree_node=False)

  def bias(self, table: jax.Array) -> jax.Array:
    return table

  def __call__(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: Optional[jax.Array],
    window: Optional[jax.Array] = None,
  ) -> jax.Array:
    ranges = self.ranges if window is None else self.ranges.in_window(window)
    ways, q_length = jax.lax.axis_size('context'), query.shape[1]
    part = _Part(
      KernelCall(self.kernel, False, self.kind.softcap),
      self.kind.buckets,
      max(q_length, key.shape[1]) * ways,
      self.multiple,
    )
    args = (
      part.longer(query * ranges.scale[:, :, None, None].astype(query.dtype)),
      key,
      value,
      bias,
      part.longer(self.q_positions, 0),
      self.kv_positions,
      part.longer(ranges.start),
      part.longer(ranges.end),
    )
    attention = _gathered if context_method() == 'gather' else _ring
    return attention(part, *args)[:, :q_length]


def kernel_context_attention(
  kind: AttentionKind,
  info: TokenInfo,
  kv_info: Optional[TokenInfo] = None,
  *,
  kernel: str,
  multiple: int = 1,
) -> KernelContextAttention:
  """Returns attention for a batch whose rows are split, computed by a Tokamax kernel.

  Args:
    kind, info, kv_info: as in `make_attention`, for the local positions.
    kernel: as in TokamaxAttention.
    multiple: as in KernelContextAttention.
  """
  kv, ways = info if kv_info is None else kv_info, jax.lax.axis_size('context')
  whole = jax.tree.map(lambda x: in_position_order(x, ways, dim=x.ndim - 1), gather_info(kv))
  num_others = None if kv_info is None else whole.segments.shape[-1]
  ranges = key_ranges(kind.mask(info, whole), num_others=num_others, places=info.positions)
  return KernelContextAttention(info.positions, kv.positions, ranges, kind, kernel, multiple)


@dataclasses.dataclass(frozen=True)
class _Part:
  """The static arguments of a call.

  Attributes:
    call: the kernels.
    buckets: buckets of the relative bias.
    length: length of whole rows.
    multiple: as in KernelContextAttention.
  """

  call: KernelCall
  buckets: RelativeBuckets
  length: int
  multiple: int

  def longer(self, x: jax.Array, dimension: int = 1) -> jax.Array:
    length = x.shape[dimension]
    return longer(x, -(-length // self.multiple) * self.multiple, dimension=dimension)

  def bias(
    self, table: Optional[jax.Array], q_positions: jax.Array, kv_positions: jax.Array
  ) -> Optional[jax.Array]:
    """Returns [1, heads, q_length, kv_length] for padded lengths."""
    if table is None:
      return None
    kv_positions = self.longer(kv_positions, 0)
    return self.buckets.bias_between(table, q_positions, kv_positions, length=self.length)

  def ranges(
    self, start: jax.Array, end: jax.Array, kv_positions: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (start, end, whether the range has a key) among the keys of one device.

    Kernels need a key: a query without keys gets the nearest key, and its result is not used.
    """
    start, end = num_before(start, kv_positions), num_before(end, kv_positions)
    sees = start < end
    start = jnp.where(sees, start, jnp.minimum(start, kv_positions.shape[0] - 1))
    return start, jnp.where(sees, end, start + 1), sees


def _gathered(part: _Part, query, key, value, table, q_positions, _, start, end) -> jax.Array:
  ways = jax.lax.axis_size('context')
  key, value = (in_position_order(gather_length('context', x), ways, dim=1) for x in (key, value))
  bias = part.bias(table, q_positions, jnp.arange(key.shape[1], dtype=jnp.int32))
  return attend(part.call, query, part.longer(key), part.longer(value), bias, start, end)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(part: _Part, query, key, value, table, q_positions, kv_positions, start, end):
  return _ring_forward(part, query, key, value, table, q_positions, kv_positions, start, end)[0]


def _ring_forward(part: _Part, query, key, value, table, q_positions, kv_positions, start, end):
  """Returns (output, residuals for the backward pass)."""

  def meet(sums, visitor):
    mix, total = sums
    key, value, positions = visitor
    first, after, sees = part.ranges(start, end, positions)
    bias = part.bias(table, q_positions, positions)
    out, row_max, row_sum = part.call.forward(
      query, part.longer(key), part.longer(value), bias, first, after
    )
    out = jnp.where(sees[:, :, None, None], out.astype(jnp.float32), 0.0)
    more = jnp.where(sees[:, None], row_max + jnp.log(row_sum), MASKED)
    both = jnp.logaddexp(total, more)
    mix = mix * per_row(jnp.exp(total - both)) + out * per_row(jnp.exp(more - both))
    return mix, both

  sums = (
    full_like(shard(query, None, None, 'heads', None), 0.0),
    full_like(shard(query[..., 0].swapaxes(1, 2), None, 'heads', None), MASKED),
  )
  mix, total = visit_all('context', meet, sums, (key, value, kv_positions))
  out, total = checkpoint_name((mix.astype(query.dtype), total), RESULTS)
  return out, (query, key, value, table, q_positions, kv_positions, start, end, out, total)


def _ring_backward(part: _Part, saved, dout):
  """Returns the gradients of all arguments except positions and ranges."""
  query, key, value, table, q_positions, kv_positions, start, end, out, total = saved

  def meet(grads, visitor):
    """Adds to (dquery, dtable); returns them and this part's (dkey, dvalue)."""
    dquery, dtable = grads
    key, value, positions = visitor
    first, after, sees = part.ranges(start, end, positions)
    bias, pull = jax.vjp(lambda table: part.bias(table, q_positions, positions), table)
    # exp(logit - row_max) is 0 for a query that attends to none of these keys.
    row_max = jnp.where(sees[:, None], total, -MASKED)
    args = query, part.longer(key), part.longer(value), bias, first, after
    dq, dk, dv, dbias = part.call.backward((*args, out, row_max, full_like(total, 1.0)), dout)
    dkv = tuple(x[:, : key.shape[1]].astype(jnp.float32) for x in (dk, dv))
    if table is not None:
      dtable += pull(dbias.astype(bias.dtype))[0].astype(jnp.float32)
    return (dquery + dq.astype(jnp.float32), dtable), dkv

  grads = (
    full_like(shard(query, None, None, 'heads', None), 0.0),
    None if table is None else full_like(table, 0.0),
  )
  (dquery, dtable), (dkey, dvalue) = send_around('context', meet, grads, (key, value, kv_positions))
  if table is not None:
    dtable = dtable.astype(table.dtype)
  dquery, dkey, dvalue = (
    d.astype(x.dtype) for d, x in ((dquery, query), (dkey, key), (dvalue, value))
  )
  return dquery, dkey, dvalue, dtable, None, None, None, None


_ring.defvjp(_ring_forward, _ring_backward)
