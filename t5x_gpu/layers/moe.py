"""A mixture of experts instead of an MLP: a router chooses a few experts for every token.

With a capacity factor, `route` gives an expert a fixed number of tokens of a row; later tokens of
the row skip the expert. Without, `route_all` gives experts all tokens that choose them. Either way
the result of a row depends only on the row, not on the mesh or microbatches.
Source: Shazeer et al. 2017; Lepikhin et al. 2020 (GShard), with groups of one row; for `route_all`,
Gale et al. 2022 (MegaBlocks).
"""

import dataclasses
import functools
import math
from typing import Optional

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from t5x_gpu.layers.dense import Initializer, fan_in_init
from t5x_gpu.layers.dropout import DropoutRng, dropout
from t5x_gpu.layers.grouped_matmul import Groups, grouped_matmul
from t5x_gpu.layers.mlp import MlpConfig, activated
from t5x_gpu.partitioning import expert_parallel
from t5x_gpu.partitioning.axis_rules import is_manual, local_ways, shard, sum_over, with_axes
from t5x_gpu.partitioning.context_parallel import length_order, local_positions

# Rows never compete for capacity. Filling experts in order of position keeps a causal model causal,
# and padding, which ends a row, does not take capacity from tokens.


def capacity(
  length: int, *, num_experts: int, experts_per_token: int, factor: Optional[float]
) -> int:
  """Returns the capacity of an expert: the most tokens that it takes from one row.

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
  counts = sum_over(counts, 'length')
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


# Dropless: choices are sorted by expert for `grouped_matmul`, so only chosen experts cost work.
# Under expert parallelism each device sends a buffer with room for all of its tokens to every other
# device, because array sizes must be static: transfers and buffers have the worst-case size;
# matmuls skip the empty part.

# Rows of a block: enough for a kernel's tile; fewer for few tokens, whose blocks would be empty.
_BLOCKS = (8, 128)


@flax.struct.dataclass
class Placement:
  """Maps choices (of experts by tokens) to slots, and back.

  Attributes:
    slots: [choices], slot of each choice; the number of slots if it has none.
    choices: [slots], choice in each slot; the number of choices if it is empty.
  """

  slots: jax.Array
  choices: jax.Array

  def put(self, x: jax.Array, *, per_token: int = 1) -> jax.Array:
    """Returns [slots, features] from `x` [choices / per_token, features]; 0 in empty slots."""
    back = self.slots.reshape(1, -1, per_token)
    return take(x[None], self.choices[None] // per_token, back)[0]

  def fetch(self, y: jax.Array) -> jax.Array:
    """Returns [choices, features] from `y` [slots, features]; 0 without a slot."""
    return take(y[None], self.slots[None], self.choices[None, :, None])[0]


@flax.struct.dataclass
class DroplessRouting:
  """Routes tokens to their experts and back.

  Attributes:
    gates: [batch, length, k], weight of each chosen expert, float32.
    own: placement of this device's choices: in blocks, or in the buffers sent along `expert`.
    received: placement of received buffers in blocks; None without expert parallelism.
    groups: rows of each local expert.
  """

  gates: jax.Array
  own: Placement
  received: Optional[Placement]
  groups: Groups

  def dispatch(self, x: jax.Array) -> jax.Array:
    """Returns [slots, embed], sorted by expert, from `x` [batch, length, embed]."""
    rows = self.own.put(x.reshape(-1, x.shape[-1]), per_token=self.gates.shape[-1])
    if self.received is not None:
      rows = self.received.put(expert_parallel.exchange(rows))
    return shard(rows, None, 'embed')

  def combine(self, y: jax.Array) -> jax.Array:
    """Returns [batch, length, embed], the weighted sum of the experts' outputs [slots, embed]."""
    if self.received is not None:
      y = expert_parallel.exchange(self.received.fetch(y))
    taken = self.own.fetch(y).reshape(*self.gates.shape, -1)
    return (taken * self.gates[..., None]).sum(2).astype(y.dtype)

  def dropout(self, hidden: jax.Array, rate: float, rng: Optional[DropoutRng]) -> jax.Array:
    """Returns `hidden` [slots, mlp] after dropout, with the mask of each token's row."""
    if rng is None or rate == 0.0:
      return hidden
    batch, length, k = self.gates.shape
    row = jnp.repeat(jnp.arange(batch), length * k)
    row = jnp.take(row, self.own.choices, mode='fill', fill_value=0)
    if self.received is not None:
      row = expert_parallel.exchange(row + batch * jax.lax.axis_index('expert'))
      row = jnp.take(row, self.received.choices, mode='fill', fill_value=0)
      rng = rng.replace(rows=expert_parallel.group_rows(rng.rows))
    masks = dropout(jnp.ones((rng.rows.shape[0], 1, hidden.shape[-1]), hidden.dtype), rate, rng)
    return hidden * masks[row, 0]


def route_all(
  logits: jax.Array, *, experts_per_token: int, normalize: Optional[bool] = None
) -> DroplessRouting:
  """Returns the routing of every token to the experts with its largest logits.

  Args:
    logits: [batch, length, experts] in float32.
    experts_per_token: experts chosen per token, k.
    normalize: whether gates are normalized, as in `choose`.
  """
  num_experts = logits.shape[-1]
  ids, gates = choose(logits, experts_per_token=experts_per_token, normalize=normalize)
  ids = ids.reshape(-1)
  if not is_manual('expert'):
    own, groups = _in_blocks(ids, num_experts)
    return DroplessRouting(gates, own, None, groups)
  local = expert_parallel.num_local(num_experts)
  room = ids.shape[0] // experts_per_token * min(experts_per_token, local)
  order = _sorted(ids, num_experts)
  devices = num_experts // local
  counts = order.counts.reshape(devices, local)
  starts = room * jnp.arange(devices)[:, None] + jnp.cumsum(counts, axis=1) - counts
  own = order.place(starts.reshape(-1), devices * room)
  # The received buffer of each device is sorted by expert, too.
  ends = jnp.cumsum(expert_parallel.exchange(counts), axis=1)
  arrived = jnp.sum(jnp.arange(room)[:, None] >= ends[:, None], axis=-1).reshape(-1)
  received, groups = _in_blocks(arrived, local)
  return DroplessRouting(gates, own, received, groups)


@flax.struct.dataclass
class _Sorted:
  """Choices sorted by group.

  Attributes:
    ids: [choices], group of each choice; the number of groups if it has none.
    order: [choices], indices of the choices, sorted by group.
    ranks: [choices], rank of each choice in its group.
    firsts, counts: [groups], first index in `order` and size of each group.
  """

  ids: jax.Array
  order: jax.Array
  ranks: jax.Array
  firsts: jax.Array
  counts: jax.Array

  def place(self, starts: jax.Array, num_slots: int) -> Placement:
    """Returns the placement in which the slots of each group begin at `starts`, in order."""
    num_groups, num_choices = self.counts.shape[0], self.ids.shape[0]
    start = jnp.take(starts, self.ids, mode='fill', fill_value=0)
    slots = jnp.where(self.ids < num_groups, start + self.ranks, num_slots)
    slot = jnp.arange(num_slots)
    group = jnp.sum(slot[:, None] >= starts, axis=1) - 1
    rank = slot - starts[group]
    place = jnp.minimum(self.firsts[group] + rank, num_choices - 1)
    return Placement(slots, jnp.where(rank < self.counts[group], self.order[place], num_choices))


def _sorted(ids: jax.Array, num_groups: int) -> _Sorted:
  order, ranks, firsts = (x[0] for x in grouped(ids[None], num_groups + 1))
  return _Sorted(ids, order, ranks, firsts[:-1], jnp.diff(firsts))


def _in_blocks(ids: jax.Array, num_groups: int) -> tuple[Placement, Groups]:
  """Returns (placement in which every group starts at a block boundary, the groups)."""
  block, most = _BLOCKS
  while block < most and 2 * block * num_groups <= ids.shape[0]:
    block *= 2
  order = _sorted(ids, num_groups)
  sizes = -(-order.counts // block) * block
  num_blocks = (ids.shape[0] + num_groups * (block - 1)) // block
  return order.place(jnp.cumsum(sizes) - sizes, num_blocks * block), Groups(sizes, block)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig(MlpConfig):
  """Settings of a mixture of experts; each expert is an MLP with these settings.

  Attributes:
    num_experts: number of experts, over all devices, that replace each MLP (a mixture of experts);
      0 for a dense MLP.
    num_experts_per_token: number of experts that each token uses.
    expert_capacity_factor: capacity of each expert for the tokens of a row; 1 is exactly enough if
      tokens are spread evenly. Tokens beyond the capacity skip the experts. None is dropless: every
      expert takes all tokens that choose it, sorted by expert.
    normalize_gates: True divides the gates of a token's experts by their sum (Mixtral); False uses
      the probabilities among all experts. None is True for more than one expert per token.
  """

  num_experts: int = 0
  num_experts_per_token: int = 2
  expert_capacity_factor: Optional[float] = 2.0
  normalize_gates: Optional[bool] = None

  @property
  def gates_add_up(self) -> bool:
    """Whether the gates of a token's experts are divided by their sum."""
    several = self.num_experts_per_token > 1
    return several if self.normalize_gates is None else self.normalize_gates


class MoeMlp(nn.Module):
  """An `Mlp` per expert; each token uses a few experts."""

  config: MoeConfig

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
    c = self.config
    # Whole rows from here to the result: if rows were split by position, as the residual may be,
    # sorting would exchange them over `model` repeatedly.
    router = _Router(c.num_experts, c.kernel_init, name='router')
    logits = shard(router(x), 'batch', 'length', None)
    x = x.astype(c.compute_dtype)
    kernels = self._kernels(x.shape[-1])
    if c.expert_capacity_factor is None:
      out = self._dropless(x, logits, *kernels, dropout_rng)
    else:
      out = self._with_capacity(x, logits, *kernels, dropout_rng)
    charges = (
      None
      if valid is None
      else router_charges(logits, experts_per_token=c.num_experts_per_token, valid=valid)
    )
    return shard(out, 'batch', 'residual_length', 'embed'), charges

  def _kernels(self, embed_dim: int) -> tuple[jax.Array, jax.Array]:
    """Returns [experts, embed, branches, mlp] and [experts, mlp, embed] of this device's experts.

    One matmul computes all branches, so that their input's gradient is reduced over `model` once.
    """
    c, local = self.config, expert_parallel.num_local(self.config.num_experts)

    def kernel(name: str, shape: tuple[int, int], axes: tuple[str, str]) -> jax.Array:
      param = _ExpertKernel((local, *shape), axes, c.kernel_init, name=name)
      return param().astype(c.compute_dtype)

    branches = [kernel(name, (embed_dim, c.mlp_dim), ('embed', 'mlp')) for name in c.branches]
    out = kernel('wo', (c.mlp_dim, embed_dim), ('mlp', 'embed'))
    return jnp.stack(branches, axis=2), out

  def _activated(self, branches: jax.Array) -> jax.Array:
    """Returns [..., mlp] from [..., branches, mlp]."""
    return activated(self.config, (branches[..., i, :] for i in range(branches.shape[-2])))

  def _dropless(
    self, x: jax.Array, logits: jax.Array, wi: jax.Array, wo: jax.Array, rng: Optional[DropoutRng]
  ) -> jax.Array:
    """Returns [batch, length, embed], with capacity for all tokens in every expert."""
    c = self.config
    routing = route_all(logits, experts_per_token=c.num_experts_per_token, normalize=c.gates_add_up)
    rows = routing.dispatch(x)
    branches = shard(grouped_matmul(rows, wi, routing.groups), None, None, 'mlp')
    hidden = routing.dropout(self._activated(branches), c.dropout('mlp'), rng)
    hidden = shard(hidden, None, 'mlp')
    out = shard(grouped_matmul(hidden, wo, routing.groups, split='inputs'), None, 'embed')
    return shard(routing.combine(out), 'batch', 'length', 'embed')

  def _with_capacity(
    self, x: jax.Array, logits: jax.Array, wi: jax.Array, wo: jax.Array, rng: Optional[DropoutRng]
  ) -> jax.Array:
    """Returns [batch, length, embed], with fixed capacity for a row's tokens in every expert."""
    c = self.config
    routing = route(
      logits,
      experts_per_token=c.num_experts_per_token,
      capacity=self._capacity(x.shape[1]),
      normalize=c.gates_add_up,
    )
    tokens = shard(routing.dispatch(x), 'batch', 'experts', None, 'embed')
    tokens = expert_parallel.to_experts(tokens)
    branches = shard(
      jnp.einsum('becd,edim->becim', tokens, wi), 'batch', 'experts', None, None, 'mlp'
    )
    hidden = shard(self._activated(branches), 'batch', 'experts', None, 'mlp')
    out = jnp.einsum('becm,emd->becd', self._dropout(hidden, rng), wo)
    out = expert_parallel.from_experts(shard(out, 'batch', 'experts', None, 'embed'))
    return shard(routing.combine(out), 'batch', 'length', 'embed')

  def _capacity(self, length: int) -> int:
    c = self.config
    return capacity(
      length * local_ways('length'),
      num_experts=c.num_experts,
      factor=c.expert_capacity_factor,
      experts_per_token=c.num_experts_per_token,
    )

  def _dropout(self, hidden: jax.Array, rng: Optional[DropoutRng]) -> jax.Array:
    """Returns `hidden` [rows of the group, local experts, capacity, mlp] after dropout."""
    rate = self.config.dropout('mlp')
    if rng is None or rate == 0.0:
      return hidden
    rng = rng.replace(rows=expert_parallel.group_rows(rng.rows))
    rows, experts, slots, features = hidden.shape
    flat = dropout(hidden.reshape(rows, experts * slots, features), rate, rng)
    return flat.reshape(hidden.shape)


class _Router(nn.Module):
  """The linear map to one logit per expert, always in float32.

  Its kernel has no axis names. Every device chooses among all experts for its own tokens, and
  `fsdp` would gather the kernel in the compute dtype, which would flip close choices.
  """

  num_experts: int
  kernel_init: Optional[Initializer]

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    init = self.kernel_init or fan_in_init(num_in=1, distribution='truncated_normal')
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
  kernel_init: Optional[Initializer]

  @nn.compact
  def __call__(self) -> jax.Array:
    init = functools.partial(
      _of_each_expert, self.kernel_init or fan_in_init(num_in=1, distribution='truncated_normal')
    )
    return self.param('kernel', with_axes(init, ('experts', *self.axes)), self.shape, jnp.float32)


def _of_each_expert(
  init: Initializer, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
) -> jax.Array:
  """Returns kernels [experts, inputs, features], each initialized like the kernel of an MLP."""
  return jax.vmap(lambda k: init(k, shape[1:], dtype))(jax.random.split(key, shape[0]))
