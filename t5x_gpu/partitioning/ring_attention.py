"""Attention over a sequence whose length is split: keys and values travel to the queries.

Call `ring_attention` where `axis` is manual (inside `jax.shard_map`), with the local part of every
Call `ring_attention` where `axis` is manual (inside `jax.shard_map`), with the local part of every
array. It returns the local part of dense attention over the whole length. Keys and values pass from
neighbor to neighbor during the computation; a device holds at most two parts of them. The caller
defines mask and bias: `logits_fn` gets one block of queries and one of keys, with information per
position (`q_info`, `kv_info`); positions may be in any order.

Do not call it in a branch of a conditional that only some devices take: a collective-permute waits
for the whole mesh. `gathered_attention` waits for its group only (a pipeline stage, for example).

Without an axis, nothing travels: attention over whole rows, block by block.

Source: Liu et al. 2023 (Ring Attention); Dao 2023 (FlashAttention-2) for the running softmax and
its backward pass.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from t5x_gpu.partitioning.axis_rules import shard
from t5x_gpu.partitioning.mesh_sizes import divisors
from t5x_gpu.partitioning.trees import Gradients, Index, Tree, TreeFn

# Largest block of local queries or keys, in positions.
BLOCK_LENGTH = 1024
# Vanishes in a float32 softmax. Finite, so that a row that attends to no key stays finite too.
MASKED = -1e10
# Name of the results that attention stores for its backward pass, for `jax.checkpoint`.
RESULTS = 'attention_results'

# (logits_params, query [batch, q, heads, kv], key [batch, k, kv_heads, kv], q_info, kv_info) ->
# float32 [batch, heads, q, k], exactly MASKED where attention is not allowed.
LogitsFn = Callable[[Any, jax.Array, jax.Array, Any, Any], jax.Array]
# (q_info, kv_info) -> boolean scalar; False only if every logit of the block is MASKED.
MayAttendFn = Callable[[Any, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class _Ring:
  """The static arguments of a call, hashable for custom_vjp."""

  logits_fn: LogitsFn
  may_attend: Optional[MayAttendFn]
  axis: Optional[str]
  block_length: int


def ring_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  logits_fn: LogitsFn,
  logits_params: Tree,
  q_info: Tree,
  kv_info: Tree,
  axis: Optional[str] = 'context',
  may_attend: Optional[MayAttendFn] = None,
  block_length: int = BLOCK_LENGTH,
) -> jax.Array:
  """Returns attention output [batch, q_length, heads, kv] of the local queries.

  Equals dense attention, including gradients, also for a row that may attend to no key: its softmax
  over MASKED is uniform over the whole length. The backward pass keeps the arguments, the output,
  and the maximum and sum of each row's softmax. (Not their logsumexp: in float32, -1e10 + log(sum)
  is -1e10.)

  Args:
    query: [batch, q_length, heads, kv], local; like all arguments, varying over the manual axes.
    key, value: [batch, kv_length, kv_heads, kv], local; with grouped queries only kv_heads travel.
    logits_fn: computes logits of one block; must not close over traced values.
    logits_params: floating point arrays for `logits_fn`, such as a bias table; may be None.
    q_info, kv_info: arrays whose last dimension is the length (positions [length], segment ids
      [batch, length], ...), not differentiated; `kv_info` travels with the keys.
    axis: manual mesh axis that splits the length; None if the length is whole.
    may_attend: allows skipping blocks; its result must not depend on an automatic mesh axis.
    block_length: largest block of local queries or keys, in positions. A block never crosses the
      middle, where the chunks of `context_parallel.length_order` join.
  """
  ring = _Ring(logits_fn, may_attend, axis, block_length)
  return _ring(ring, query, key, value, logits_params, q_info, kv_info)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: _Ring, query, key, value, logits_params, q_info, kv_info):
  return _forward(ring, query, key, value, logits_params, q_info, kv_info)[0]


def _forward(ring: _Ring, query, key, value, logits_params, q_info, kv_info):
  """Returns (output, residuals for the backward pass)."""
  heads = query.shape[2]

  def meet(sums, visitor):
    def block(sums, q, k):
      old_max, old_total, old_mix = q(sums[0], -1), q(sums[1], -1), q(sums[2], 1)
      visiting_value = to_query_heads(k(visitor[1], 1), heads)
      infos = q(q_info, -1), k(visitor[2], -1)

      def attend():
        logits = ring.logits_fn(logits_params, q(query, 1), k(visitor[0], 1), *infos)
        new_max = jnp.maximum(old_max, logits.max(-1))
        weights = jnp.exp(logits - new_max[..., None])
        mix = jnp.einsum(
          'bhqk,bkhd->bqhd',
          weights.astype(value.dtype),
          visiting_value,
          preferred_element_type=jnp.float32,
        )
        return new_max, weights.sum(-1), mix

      def skip():  # same result: every logit is MASKED
        weight = jnp.exp(MASKED - old_max)
        mix = per_row(weight) * visiting_value.sum(1, keepdims=True, dtype=jnp.float32)
        return old_max, weight * visiting_value.shape[1], mix

      new_max, total, mix = _attend_or_skip(ring, infos, attend, skip)
      keep = jnp.exp(old_max - new_max)
      return (
        q.put(sums[0], new_max, -1),
        q.put(sums[1], old_total * keep + total, -1),
        q.put(sums[2], old_mix * per_row(keep) + mix, 1),
      )

    return _for_pairs(ring, block, sums, query.shape[1], key.shape[1])

  rows = shard(query[..., 0].swapaxes(1, 2), None, 'heads', None)
  sums = (
    full_like(rows, MASKED),
    full_like(rows, 0.0),
    full_like(shard(query, None, None, 'heads', None), 0.0),
  )
  row_max, row_total, mix = visit_all(ring.axis, meet, sums, (key, value, kv_info))
  out = (mix / per_row(row_total)).astype(value.dtype)
  out, row_max, row_total = checkpoint_name((out, row_max, row_total), RESULTS)
  saved = (query, key, value, logits_params, q_info, kv_info, out, row_max, row_total)
  return out, saved


def _backward(ring: _Ring, saved, dout):
  """Returns the gradients of all arguments except the infos."""
  query, key, value, logits_params, q_info, kv_info, out, row_max, row_total = saved
  delta = jnp.einsum('bqhd,bqhd->bhq', dout, out, preferred_element_type=jnp.float32)
  heads, kv_heads = query.shape[2], key.shape[2]

  def meet(grads, visitor):
    """Adds to (dquery, dparams); returns them and this part's (dkey, dvalue)."""

    def block(carry, q, k):
      dquery, dparams, dkey, dvalue = carry
      dout_block, visiting_value = q(dout, 1), to_query_heads(k(visitor[1], 1), heads)
      block_max, block_total = q(row_max, -1), q(row_total, -1)
      q_block, k_block = q(query, 1), k(visitor[0], 1)
      infos = q(q_info, -1), k(visitor[2], -1)

      def attend():
        logits, pull = jax.vjp(
          lambda *of: ring.logits_fn(*of, *infos), logits_params, q_block, k_block
        )
        weights = jnp.exp(logits - block_max[..., None]) / block_total[..., None]
        dv = jnp.einsum(
          'bhqk,bqhd->bkhd',
          weights.astype(value.dtype),
          dout_block,
          preferred_element_type=jnp.float32,
        )
        dweights = jnp.einsum(
          'bqhd,bkhd->bhqk', dout_block, visiting_value, preferred_element_type=jnp.float32
        )
        dp, dq, dk = pull(weights * (dweights - q(delta, -1)[..., None]))
        return (*jax.tree.map(lambda x: x.astype(jnp.float32), (dq, dp, dk)), dv)

      def skip():
        weight = jnp.exp(MASKED - block_max) / block_total
        dv = (per_row(weight) * dout_block).sum(1, keepdims=True)
        return (
          full_like(q_block, 0.0),
          jax.tree.map(lambda x: full_like(x, 0.0), logits_params),
          full_like(k_block, 0.0),
          jnp.broadcast_to(dv, visiting_value.shape),
        )

      dq, dp, dk, dv = _attend_or_skip(ring, infos, attend, skip)
      return (
        q.add(dquery, dq, 1),
        jax.tree.map(jnp.add, dparams, dp),
        k.add(dkey, dk, 1),
        k.add(dvalue, _of_kv_heads(dv, kv_heads), 1),
      )

    zeros = full_like(visitor[0], 0.0), full_like(visitor[1], 0.0)
    dquery, dparams, *dkv = _for_pairs(ring, block, (*grads, *zeros), query.shape[1], key.shape[1])
    return (dquery, dparams), tuple(dkv)

  grads = (
    full_like(shard(query, None, None, 'heads', None), 0.0),
    jax.tree.map(lambda x: full_like(x, 0.0), logits_params),
  )
  (dquery, dparams), (dkey, dvalue) = send_around(ring.axis, meet, grads, (key, value, kv_info))
  return (
    dquery.astype(query.dtype),
    dkey.astype(key.dtype),
    dvalue.astype(value.dtype),
    jax.tree.map(lambda d, p: d.astype(p.dtype), dparams, logits_params),
    None,
    None,
  )


_ring.defvjp(_forward, _backward)


def visit_all(axis: Optional[str], meet: TreeFn, sums: Tree, visitor: Tree) -> Tree:
  """Returns `sums` after `sums = meet(sums, visitor)` with the `visitor` of every device of `axis`.

  Each device begins with its own visitor. With axis None there are no others.
  """

  def step(carry, _):
    sums, visitor = carry
    arriving = _pass_on(visitor, axis)  # independent of the matmuls, so it overlaps them
    return (meet(sums, visitor), arriving), None

  if axis is not None:
    (sums, visitor), _ = jax.lax.scan(step, (sums, visitor), length=jax.lax.axis_size(axis) - 1)
  return meet(sums, visitor)


def send_around(
  axis: Optional[str], meet: TreeFn, grads: Gradients, visitor: Tree
) -> tuple[Tree, Tree]:
  """Returns `grads` after `meet(grads, visitor)` with every device's keys, and (dkey, dvalue).

  The gradients of keys and values travel with them around the ring, back to their device.
  """

  def step(carry, _):
    grads, visitor, dkv = carry
    arriving, dkv = _pass_on(visitor, axis), _pass_on(dkv, axis)
    grads, more = meet(grads, visitor)
    return (grads, arriving, jax.tree.map(jnp.add, dkv, more)), None

  ways = 1 if axis is None else jax.lax.axis_size(axis)
  if ways == 1:
    return meet(grads, visitor)
  # The first and last step are outside of the loop, so that neither zeros nor unused keys travel.
  arriving = _pass_on(visitor, axis)
  grads, dkv = meet(grads, visitor)
  (grads, visitor, dkv), _ = jax.lax.scan(step, (grads, arriving, dkv), length=ways - 2)
  dkv = _pass_on(dkv, axis)
  grads, more = meet(grads, visitor)
  key, value, _ = visitor
  # The caller rounds to these dtypes; rounding before the last hop sends fewer bytes.
  dkv = jax.tree.map(lambda a, b, x: (a + b).astype(x.dtype), dkv, more, (key, value))
  return grads, _pass_on(dkv, axis)


@dataclasses.dataclass(frozen=True)
class _Block:
  """One block of positions: cuts it out of arrays, and writes results back."""

  start: Index
  length: int

  def __call__(self, tree: Tree, dimension: int) -> Tree:
    return jax.tree.map(
      lambda x: jax.lax.dynamic_slice_in_dim(x, self.start, self.length, dimension % x.ndim), tree
    )

  def put(self, x: jax.Array, update: jax.Array, dimension: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, update, self.start, dimension % x.ndim)

  def add(self, x: jax.Array, more: jax.Array, dimension: int) -> jax.Array:
    return self.put(x, self(x, dimension) + more, dimension)


def _for_pairs(ring: _Ring, block: TreeFn, carry: Tree, q_length: int, kv_length: int) -> Tree:
  """Returns `carry` after block(carry, queries, keys) for every pair of blocks."""
  q_block, kv_block = (largest_block(length, ring.block_length) for length in (q_length, kv_length))
  per_row = kv_length // kv_block

  def body(n, carry):
    return block(
      carry, _Block(n // per_row * q_block, q_block), _Block(n % per_row * kv_block, kv_block)
    )

  return jax.lax.fori_loop(0, q_length // q_block * per_row, body, carry)


def largest_block(length: int, at_most: int = BLOCK_LENGTH) -> int:
  """Returns the largest size up to `at_most` that divides both halves of `length`."""
  chunk = length if length % 2 else length // 2
  return max(size for size in divisors(chunk) if size <= max(at_most, 1))


def _attend_or_skip(
  ring: _Ring, infos: tuple[Any, Any], attend: Callable[[], Any], skip: Callable[[], Any]
) -> Tree:
  if ring.may_attend is None:
    return attend()
  return jax.lax.cond(ring.may_attend(*infos), attend, skip)


def _pass_on(tree: Tree, axis: str) -> Tree:
  """Returns the `tree` of the previous device; every device sends its own to the next."""
  ways = jax.lax.axis_size(axis)
  hops = [(device, (device + 1) % ways) for device in range(ways)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, hops), tree)


def to_query_heads(x: jax.Array, heads: int) -> jax.Array:
  """Returns keys or values [batch, length, heads, kv], each head repeated for its queries."""
  return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)


def _of_kv_heads(gradient: jax.Array, kv_heads: int) -> jax.Array:
  """Returns the gradient of x from the gradient of `to_query_heads(x)`."""
  batch, length, heads, kv = gradient.shape
  if heads == kv_heads:
    return gradient
  return gradient.reshape(batch, length, kv_heads, heads // kv_heads, kv).sum(3)


def per_row(x: jax.Array) -> jax.Array:
  """Returns [batch, q_length, heads, 1] from [batch, heads, q_length]."""
  return x.swapaxes(1, 2)[..., None]


def full_like(x: jax.Array, fill: float) -> jax.Array:
  """Returns float32 `fill`s that vary over the same mesh axes as `x`, as loop carries must."""
  return jnp.where(False, x.astype(jnp.float32), fill)
