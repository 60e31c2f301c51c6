"""A mixture of experts instead of an MLP: a router chooses a few experts for every token.

An expert has capacity for a fixed number of tokens of a row; later tokens of the row skip the
expert. Rows never compete, so the result depends only on the row, not on the mesh or microbatches.
Filling experts in order of position keeps a causal model causal, and padding, which ends a row,
does not take capacity from tokens. Without a capacity factor, experts take all tokens
(layers/dropless.py).
Source: Shazeer et al. 2017; Lepikhin et al. 2020 (GShard), with groups of one row.
"""

import functools
import operator
from typing import Any, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_gpu.layers.dense import Initializer, fan_in_init
from t5x_gpu.layers.dropless import route_all
from t5x_gpu.layers.dropout import DropoutRng, dropout
from t5x_gpu.layers.grouped_matmul import grouped_matmul
from t5x_gpu.layers.mlp import activation
from t5x_gpu.layers.routing import capacity, route, router_charges
from t5x_gpu.partitioning import expert_parallel
from t5x_gpu.partitioning.axis_rules import is_manual, shard, with_axes


class MoeMlp(nn.Module):
  """An `Mlp` per expert; each token uses a few experts.

  Attributes:
    num_experts: number of experts of the layer, over all devices.
    experts_per_token: number of experts that each token uses.
    capacity_factor: capacity of the experts, as in `capacity`; None never drops a token.
    mlp_dim, activations, dropout_rate, dtype: as in `Mlp`, for each expert.
    normalize_gates: whether the gates of a token are divided by their sum, as in `choose`.
    kernel_init: initializer of the experts' and router's kernels; None for T5's initializers.
  """

  num_experts: int
  mlp_dim: int
  experts_per_token: int = 2
  capacity_factor: Optional[float] = 2.0
  activations: tuple[str, ...] = ('gelu', 'linear')
  dropout_rate: float = 0.0
  dtype: Any = jnp.float32
  normalize_gates: Optional[bool] = None
  kernel_init: Optional[Initializer] = None

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
    # Whole rows from here to the result: if rows were split by position, as the residual may be,
    # sorting would exchange them over `model` repeatedly.
    router = _Router(self.num_experts, self.kernel_init, name='router')
    logits = shard(router(x), 'batch', 'length', None)
    x = x.astype(self.dtype)
    kernels = self._kernels(x.shape[-1])
    if self.capacity_factor is None:
      out = self._dropless(x, logits, *kernels, dropout_rng)
    else:
      out = self._with_capacity(x, logits, *kernels, dropout_rng)
    charges = (
      None
      if valid is None
      else router_charges(logits, experts_per_token=self.experts_per_token, valid=valid)
    )
    return shard(out, 'batch', 'residual_length', 'embed'), charges

  def _kernels(self, embed_dim: int) -> tuple[jax.Array, jax.Array]:
    """Returns [experts, embed, branches, mlp] and [experts, mlp, embed] of this device's experts.

    One matmul computes all branches, so that their input's gradient is reduced over `model` once.
    """
    local, number = expert_parallel.num_local(self.num_experts), len(self.activations)
    shape = (local, embed_dim, self.mlp_dim)
    branches = [
      _ExpertKernel(shape, ('embed', 'mlp'), self.kernel_init, name=name)().astype(self.dtype)
      for name in (['wi'] if number == 1 else [f'wi_{i}' for i in range(number)])
    ]
    shape = (local, self.mlp_dim, embed_dim)
    out = _ExpertKernel(shape, ('mlp', 'embed'), self.kernel_init, name='wo')()
    return jnp.stack(branches, axis=2), out.astype(self.dtype)

  def _activated(self, branches: jax.Array) -> jax.Array:
    """Returns [..., mlp] from [..., branches, mlp]."""
    return functools.reduce(
      operator.mul,
      (activation(name)(branches[..., i, :]) for i, name in enumerate(self.activations)),
    )

  def _dropless(
    self, x: jax.Array, logits: jax.Array, wi: jax.Array, wo: jax.Array, rng: Optional[DropoutRng]
  ) -> jax.Array:
    """Returns [batch, length, embed], with capacity for all tokens in every expert."""
    routing = route_all(
      logits, experts_per_token=self.experts_per_token, normalize=self.normalize_gates
    )
    rows = routing.dispatch(x)
    branches = shard(grouped_matmul(rows, wi, routing.groups), None, None, 'mlp')
    hidden = routing.dropout(self._activated(branches), self.dropout_rate, rng)
    hidden = shard(hidden, None, 'mlp')
    out = shard(grouped_matmul(hidden, wo, routing.groups, split='inputs'), None, 'embed')
    return shard(routing.combine(out), 'batch', 'length', 'embed')

  def _with_capacity(
    self, x: jax.Array, logits: jax.Array, wi: jax.Array, wo: jax.Array, rng: Optional[DropoutRng]
  ) -> jax.Array:
    """Returns [batch, length, embed], with fixed capacity for a row's tokens in every expert."""
    routing = route(
      logits,
      experts_per_token=self.experts_per_token,
      capacity=self._capacity(x.shape[1]),
      normalize=self.normalize_gates,
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
  init: Initializer, key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32
) -> jax.Array:
  """Returns kernels [experts, inputs, features], each initialized like the kernel of an MLP."""
  return jax.vmap(lambda k: init(k, shape[1:], dtype))(jax.random.split(key, shape[0]))
