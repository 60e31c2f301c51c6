"""Dropless experts: every token reaches its experts, sorted by expert for `grouped_matmul`.

Each expert takes all tokens that choose it, so only chosen experts cost work. Rows are mixed, but
the result of a token depends only on the token. Under expert parallelism each device sends a buffer
with room for all of its tokens to every other device, because array sizes must be static: transfers
and buffers have the worst-case size; matmuls skip the empty part.
Source: Gale et al. 2022 (MegaBlocks).
"""

from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.layers.dropout import DropoutRng, dropout
from t5x_gpu.layers.grouped_matmul import Groups
from t5x_gpu.layers.routing import choose, grouped, take
from t5x_gpu.partitioning import expert_parallel
from t5x_gpu.partitioning.axis_rules import is_manual, shard

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
    """Returns `hidden` [slots, mlp] after dropout, whose mask belongs to the row of a token."""
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
  """Returns the placement in which every group begins with a block, and the groups."""
  block, most = _BLOCKS
  while block < most and 2 * block * num_groups <= ids.shape[0]:
    block *= 2
  order = _sorted(ids, num_groups)
  sizes = -(-order.counts // block) * block
  num_blocks = (ids.shape[0] + num_groups * (block - 1)) // block
  return order.place(jnp.cumsum(sizes) - sizes, num_blocks * block), Groups(sizes, block)
