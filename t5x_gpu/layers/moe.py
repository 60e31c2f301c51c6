"""A mixture of experts instead of an MLP: a router chooses a few experts for every token.

An expert has room for a fixed number of tokens of a row; later tokens of the row skip it. Rows
never compete, so the result depends on the row only: not on the mesh, nor on microbatches. Filling
experts in order of position keeps a causal model causal, and padding, which ends a row, does not
take room from tokens.
Source: Shazeer et al. 2017; Lepikhin et al. 2020 (GShard), with groups of one row.
"""

import functools
import math
import operator
from typing import Any, Optional

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.layers.dense import Initializer, fan_in_init
from t5x_gpu.layers.dropout import DropoutRng, dropout
from t5x_gpu.layers.mlp import activation
from t5x_gpu.partitioning import expert_parallel
from t5x_gpu.partitioning.axis_rules import is_manual, shard, with_axes
from t5x_gpu.partitioning.context_parallel import length_order, local_positions


def capacity(
  length: int, *, num_experts: int, experts_per_token: int, factor: Optional[float]
) -> int:
  """Returns the tokens of a row that each expert has room for.

  Args:
    length: tokens of the whole row.
    num_experts, experts_per_token: of the layer.
    factor: 1 is exactly enough if the router spreads tokens evenly; None for room for all tokens.
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
    valid: [batch, length], 0 on padding, which is left out of the shares.
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
      the number of slots if there was no room.
    choices: [batch, slots], which of a row's length * k choices is in a slot; length * k if empty.
    num_experts: experts of the layer.
  """

  gates: jax.Array
  slots: jax.Array
  choices: jax.Array
  num_experts: int = flax.struct.field(pytree_node=False)

  def dispatch(self, x: jax.Array) -> jax.Array:
    """Returns [batch, experts, capacity, embed] from `x` [batch, length, embed]; 0 if empty."""
    taken = _take(x, self.choices // self.slots.shape[-1], self.slots)
    return taken.reshape(x.shape[0], self.num_experts, -1, x.shape[-1])

  def combine(self, y: jax.Array) -> jax.Array:
    """Returns [batch, length, embed], the weighted sum of the experts' outputs `y`.

    Args:
      y: [batch, experts, capacity, embed], in the order of `dispatch`.
    """
    batch, length, k = self.slots.shape
    flat = y.reshape(batch, -1, y.shape[-1])
    taken = _take(flat, self.slots.reshape(batch, -1), self.choices[..., None])
    taken = taken.reshape(batch, length, k, -1)
    return (taken * self.gates[..., None]).sum(2).astype(y.dtype)


def route(logits: jax.Array, *, experts_per_token: int, capacity: int) -> Routing:
  """Returns the routing of every token to the experts with its largest logits.

  Slots are found by sorting: one-hot matrices [batch, length, experts, capacity] would be larger
  than the activations.

  Args:
    logits: [batch, length, experts] in float32.
    experts_per_token: experts chosen per token, k.
    capacity: tokens of a row that each expert has room for; earlier tokens come first.
  """
  batch, length, experts = logits.shape
  probabilities = jax.nn.softmax(logits)
  ids = shard(jax.lax.top_k(logits, experts_per_token)[1], 'batch', 'length', None)
  gates = jnp.sum(jax.nn.one_hot(ids, experts) * probabilities[:, :, None], axis=-1)
  if experts_per_token > 1:  # a single gate would always be 1, with nothing to learn
    gates = gates / gates.sum(-1, keepdims=True)
  if is_manual('context'):
    ids = jnp.where(_ranks_in_split_row(ids, experts) < capacity, ids, experts)
    capacity = min(capacity, length)
  num_choices = length * experts_per_token
  ids = ids.reshape(batch, num_choices)
  order, ranks, starts = _grouped(ids, experts + 1)  # the last group has no room in the row
  kept = (ids < experts) & (ranks < capacity)
  slots = jnp.where(kept, ids * capacity + ranks, experts * capacity)
  places = starts[:, :-1, None] + jnp.arange(capacity)  # of each slot in `order`
  filled = places < starts[:, 1:, None]
  choices = jnp.take_along_axis(order, jnp.minimum(places, num_choices - 1).reshape(batch, -1), -1)
  return Routing(
    gates,
    slots.reshape(batch, length, experts_per_token),
    jnp.where(filled.reshape(batch, -1), choices, num_choices),
    experts,
  )


def _grouped(ids: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Groups equal `ids` [batch, n], keeping their order.

  Returns:
    [batch, n], the index of the id at each place, group after group; [batch, n], the rank of each
    id in its group; [batch, groups], the first place of each group.
  """
  order = jnp.argsort(ids, axis=-1, stable=True)
  places = jnp.argsort(order, axis=-1)  # the inverse permutation
  counts = jnp.sum(ids[:, :, None] == jnp.arange(num_groups), axis=1)
  starts = jnp.cumsum(counts, axis=-1) - counts
  return order, places - jnp.take_along_axis(starts, ids, axis=-1), starts


def _ranks_in_split_row(ids: jax.Array, num_experts: int) -> jax.Array:
  """Returns the rank of each of `ids` [batch, local length, k] among equal ones in its row."""
  batch, local, k = ids.shape
  length = local * jax.lax.axis_size('context')
  by_place = jax.lax.all_gather(ids, 'context', axis=1, tiled=True)
  places = np.argsort(length_order(length, length // local))  # of each position
  _, ranks, _ = _grouped(by_place[:, places].reshape(batch, -1), num_experts)
  return jnp.take(ranks.reshape(batch, length, k), local_positions(length), axis=1)


@jax.custom_vjp
def _take(x: jax.Array, index: jax.Array, back: jax.Array) -> jax.Array:
  """Returns x[b, index[b, i]] for all b and i; 0 where the index is beyond the end.

  Its gradient is a gather too: JAX's would be a scatter-add, which GPUs sum in any order.

  Args:
    x: [batch, n, features].
    index: [batch, m].
    back: [batch, n, k], places in `index` that hold n; m if there are fewer than k.
  """
  del back
  return _gather(x, index)


def _gather(x: jax.Array, index: jax.Array) -> jax.Array:
  return jax.vmap(lambda row, i: row.at[i].get(mode='fill', fill_value=0))(x, index)


def _take_backward(back: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None, None]:
  batch, n, k = back.shape
  taken = _gather(gradient, back.reshape(batch, n * k)).reshape(batch, n, k, -1)
  return taken.sum(2, dtype=jnp.float32).astype(gradient.dtype), None, None


_take.defvjp(lambda x, index, back: (_gather(x, index), back), _take_backward)


class MoeMlp(nn.Module):
  """An `Mlp` per expert; each token uses a few of them.

  Attributes:
    num_experts: experts of the layer, over all devices.
    experts_per_token: experts of each token; their gates add up to 1, a single gate is its
      probability.
    capacity_factor: room of the experts, as in `capacity`; None never drops a token.
    mlp_dim, activations, dropout_rate, dtype: of each expert, as in `Mlp`.
  """

  num_experts: int
  mlp_dim: int
  experts_per_token: int = 2
  capacity_factor: Optional[float] = 2.0
  activations: tuple[str, ...] = ('gelu', 'linear')
  dropout_rate: float = 0.0
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    *,
    valid: Optional[jax.Array] = None,
    dropout_rng: Optional[DropoutRng] = None,
  ) -> tuple[jax.Array, Optional[jax.Array]]:
    """Returns [batch, length, embed], and `router_charges` if `valid` is given.

    Args:
      x: [batch, length, embed].
      valid: [batch, length], 0 on padding.
      dropout_rng: None for no dropout.
    """
    embed_dim, local = x.shape[-1], expert_parallel.num_local(self.num_experts)
    # Whole rows from here to the result: if they were split by position, as the residual may be,
    # sorting would exchange them over `model` again and again.
    logits = shard(_Router(self.num_experts, name='router')(x), 'batch', 'length', None)
    routing = route(
      logits, experts_per_token=self.experts_per_token, capacity=self._capacity(x.shape[1])
    )
    tokens = shard(routing.dispatch(x.astype(self.dtype)), 'batch', 'experts', None, 'embed')
    tokens = expert_parallel.to_experts(tokens)
    names = (
      ['wi'] if len(self.activations) == 1 else [f'wi_{i}' for i in range(len(self.activations))]
    )
    # One matmul for all branches, so that the gradient of their input is reduced over `model` once.
    kernels = jnp.stack(
      [
        _ExpertKernel((local, embed_dim, self.mlp_dim), ('embed', 'mlp'), name=name)().astype(
          self.dtype
        )
        for name in names
      ],
      axis=2,
    )
    branches = shard(
      jnp.einsum('becd,edim->becim', tokens, kernels), 'batch', 'experts', None, None, 'mlp'
    )
    hidden = functools.reduce(
      operator.mul,
      (activation(name)(branches[..., i, :]) for i, name in enumerate(self.activations)),
    )
    hidden = self._dropout(shard(hidden, 'batch', 'experts', None, 'mlp'), dropout_rng)
    kernel = _ExpertKernel((local, self.mlp_dim, embed_dim), ('mlp', 'embed'), name='wo')()
    out = jnp.einsum('becm,emd->becd', hidden, kernel.astype(self.dtype))
    out = expert_parallel.from_experts(shard(out, 'batch', 'experts', None, 'embed'))
    out = shard(routing.combine(out), 'batch', 'length', 'embed')
    charges = (
      None
      if valid is None
      else router_charges(logits, experts_per_token=self.experts_per_token, valid=valid)
    )
    return shard(out, 'batch', 'residual_length', 'embed'), charges

  def _capacity(self, length: int) -> int:
    if is_manual('context'):
      length *= jax.lax.axis_size('context')
    return capacity(
      length,
      num_experts=self.num_experts,
      factor=self.capacity_factor,
      experts_per_token=self.experts_per_token,
    )

  def _dropout(self, hidden: jax.Array, rng: Optional[DropoutRng]) -> jax.Array:
    """Returns `hidden` [rows of the group, local experts, capacity, mlp] after dropout."""
    if rng is None or self.dropout_rate == 0.0:
      return hidden
    rng = rng.replace(rows=expert_parallel.group_rows(rng.rows))
    rows, experts, slots, features = hidden.shape
    flat = dropout(hidden.reshape(rows, experts * slots, features), self.dropout_rate, rng)
    return flat.reshape(hidden.shape)


class _Router(nn.Module):
  """The linear map to one logit per expert, always in float32.

  Its kernel has no axis names. Every device chooses among all experts for its own tokens, and
  `fsdp` would gather the kernel in the compute dtype, which would flip close choices.
  """

  num_experts: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    init = fan_in_init(num_in=1, distribution='truncated_normal')
    kernel = self.param(
      'kernel', with_axes(init, (None, None)), (x.shape[-1], self.num_experts), jnp.float32
    )
    return jnp.einsum(
      'bld,de->ble', x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST
    )


class _ExpertKernel(nn.Module):
  """Kernels [experts, inputs, features] of this device's experts, stored in float32."""

  shape: tuple[int, int, int]
  axes: tuple[str, str]

  @nn.compact
  def __call__(self) -> jax.Array:
    return self.param(
      'kernel', with_axes(_of_each_expert, ('experts', *self.axes)), self.shape, jnp.float32
    )


def _of_each_expert(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
  """Returns kernels [experts, inputs, features], each drawn like the kernel of an MLP."""
  init: Initializer = fan_in_init(num_in=1, distribution='truncated_normal')
  return jax.vmap(lambda k: init(k, shape[1:], dtype))(jax.random.split(key, shape[0]))
