"""Assigns tokens to experts and their slots, with a fixed capacity or for all tokens.

Source: Shazeer et al. 2017; Lepikhin et al. 2020 (GShard), with groups of one row.
"""

import math
from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.partitioning.axis_rules import is_manual, shard
from t5x_gpu.partitioning.context_parallel import length_order, local_positions


def capacity(
  length: int, *, num_experts: int, experts_per_token: int, factor: Optional[float]
) -> int:
  """Returns the capacity of each expert: the number of tokens of a row that it takes.

  Args:
    length: number of tokens of the whole row.
    num_experts, experts_per_token: settings of the layer.
    factor: 1 is exactly enough if the router spreads tokens evenly; None for all tokens.
  """
  if factor is None:
    return length
  return min(length, math.ceil(length * experts_per_token / num_experts * factor))


def router_charges(logits: jax.Array, *, experts_per_token: int, valid: jax.Array) -> jax.Array:
  """Returns float32 [batch, length, 2], the contribution of each token to two router losses.

  The first is num_experts * sum over experts of (share of the row's choices) * (probability). Its
  mean over a row is 1 if tokens are spread evenly, and larger otherwise. The second is
  log(sum of exponentials)^2, which keeps the logits small.

  Args:
    logits: [batch, length, experts] in float32.
    experts_per_token: experts chosen per token, k.
    valid: [batch, length], 0 on padding, which does not count.
  Source: Fedus et al. 2021 (Switch), eq. 4 to 6; Zoph et al. 2022 (ST-MoE), eq. 5.
  """
  num_experts = logits.shape[-1]
  chosen = jax.lax.top_k(logits, experts_per_token)[1]
  counts = jnp.einsum('blke,bl->be', jax.nn.one_hot(chosen, num_experts), valid.astype(jnp.float32))
  if is_manual('context'):
    counts = jax.lax.psum(counts, 'context')
  shares = jax.lax.stop_gradient(counts / jnp.maximum(counts.sum(-1, keepdims=True), 1.0))
  balance = num_experts * jnp.einsum('ble,be->bl', jax.nn.softmax(logits), shares)
  z = jax.lax.square(jax.nn.logsumexp(logits, axis=-1))
  return shard(jnp.stack([balance, z], axis=-1), 'batch', 'length', None)


@flax.struct.dataclass
class Routing:
  """The assignment of tokens to slots of experts.

  Attributes:
    gates: [batch, length, k], weight of each chosen expert, float32.
    slots: [batch, length, k], the token's slot among the slots of all experts, ordered by expert;
      the number of slots if the expert was full.
    choices: [batch, slots], index of the choice (of a row's length * k choices) in each slot;
      length * k if empty.
    num_experts: number of experts of the layer.
  """

  gates: jax.Array
  slots: jax.Array
  choices: jax.Array
  num_experts: int = flax.struct.field(pytree_node=False)

  def dispatch(self, x: jax.Array) -> jax.Array:
    """Returns [batch, experts, capacity, embed] from `x` [batch, length, embed]; 0 if empty."""
    taken = take(x, self.choices // self.slots.shape[-1], self.slots)
    return taken.reshape(x.shape[0], self.num_experts, -1, x.shape[-1])

  def combine(self, y: jax.Array) -> jax.Array:
    """Returns [batch, length, embed], the weighted sum of the experts' outputs `y`.

    Args:
      y: [batch, experts, capacity, embed], in the order of `dispatch`.
    """
    batch, length, k = self.slots.shape
    flat = y.reshape(batch, -1, y.shape[-1])
    taken = take(flat, self.slots.reshape(batch, -1), self.choices[..., None])
    taken = taken.reshape(batch, length, k, -1)
    return (taken * self.gates[..., None]).sum(2).astype(y.dtype)


def choose(
  logits: jax.Array, *, experts_per_token: int, normalize: Optional[bool] = None
) -> tuple[jax.Array, jax.Array]:
  """Returns the experts of each token and their weights, [batch, length, k].

  Args:
    logits: [batch, length, experts] in float32.
    experts_per_token: experts chosen per token, k.
    normalize: whether the gates of a token are divided by their sum, instead of being probabilities
      among all experts. None means k > 1: a single gate would always be 1 and not learn.
  """
  probabilities = jax.nn.softmax(logits)
  ids = shard(jax.lax.top_k(logits, experts_per_token)[1], 'batch', 'length', None)
  gates = jnp.sum(jax.nn.one_hot(ids, logits.shape[-1]) * probabilities[:, :, None], axis=-1)
  if experts_per_token > 1 if normalize is None else normalize:
    gates = gates / gates.sum(-1, keepdims=True)
  return ids, gates


def route(
  logits: jax.Array, *, experts_per_token: int, capacity: int, normalize: Optional[bool] = None
) -> Routing:
  """Returns the routing of every token to the experts with its largest logits.

  Slots are found by sorting: one-hot matrices [batch, length, experts, capacity] would be larger
  than the activations.

  Args:
    logits: [batch, length, experts] in float32.
    experts_per_token: experts chosen per token, k.
    capacity: number of tokens of a row that each expert takes; earlier tokens come first.
    normalize: whether gates are normalized, as in `choose`.
  """
  batch, length, experts = logits.shape
  ids, gates = choose(logits, experts_per_token=experts_per_token, normalize=normalize)
  if is_manual('context'):
    ids = jnp.where(_ranks_in_split_row(ids, experts) < capacity, ids, experts)
    capacity = min(capacity, length)
  num_choices = length * experts_per_token
  ids = ids.reshape(batch, num_choices)
  order, ranks, starts = grouped(ids, experts + 1)  # the last group: dropped choices
  kept = (ids < experts) & (ranks < capacity)
  slots = jnp.where(kept, ids * capacity + ranks, experts * capacity)
  places = starts[:, :-1, None] + jnp.arange(capacity)  # index in `order` of each slot
  filled = places < starts[:, 1:, None]
  choices = jnp.take_along_axis(order, jnp.minimum(places, num_choices - 1).reshape(batch, -1), -1)
  return Routing(
    gates,
    slots.reshape(batch, length, experts_per_token),
    jnp.where(filled.reshape(batch, -1), choices, num_choices),
    experts,
  )


def grouped(ids: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Groups equal `ids` [batch, n], keeping their order.

  Returns:
    [batch, n], indices of the ids sorted by group; [batch, n], the rank of each id in its group;
    [batch, groups], the first index of each group in that order.
  """
  order = jnp.argsort(ids, axis=-1, stable=True)
  places = jnp.argsort(order, axis=-1)  # the inverse permutation
  counts = jnp.sum(ids[:, :, None] == jnp.arange(num_groups), axis=1)
  starts = jnp.cumsum(counts, axis=-1) - counts
  return order, places - jnp.take_along_axis(starts, ids, axis=-1), starts


def _ranks_in_split_row(ids: jax.Array, num_experts: int) -> jax.Array:
  """Returns the rank of each id in `ids` [batch, local length, k] among equal ids in its row."""
  batch, local, k = ids.shape
  length = local * jax.lax.axis_size('context')
  by_place = jax.lax.all_gather(ids, 'context', axis=1, tiled=True)
  places = np.argsort(length_order(length, length // local))  # index of each position
  _, ranks, _ = grouped(by_place[:, places].reshape(batch, -1), num_experts)
  return jnp.take(ranks.reshape(batch, length, k), local_positions(length), axis=1)


@jax.custom_vjp
def take(x: jax.Array, index: jax.Array, back: jax.Array) -> jax.Array:
  """Returns x[b, index[b, i]] for all b and i; 0 where the index is beyond the end.

  The gradient is also a gather: JAX's default is a scatter-add, which GPUs sum in any order.

  Args:
    x: [batch, n, features].
    index: [batch, m].
    back: [batch, n, k], where `index` refers to n; padded with m.
  """
  del back
  return _gather(x, index)


def _gather(x: jax.Array, index: jax.Array) -> jax.Array:
  return jax.vmap(lambda row, i: row.at[i].get(mode='fill', fill_value=0))(x, index)


def _take_backward(back: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None, None]:
  batch, n, k = back.shape
  taken = _gather(gradient, back.reshape(batch, n * k)).reshape(batch, n, k, -1)
  return taken.sum(2, dtype=jnp.float32).astype(gradient.dtype), None, None


take.defvjp(lambda x, index, back: (_gather(x, index), back), _take_backward)
