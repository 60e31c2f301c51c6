"""Adafactor: second moments kept as a row and a column instead of a matrix.

Axis names decide which dimensions are rows and which are columns, so that a stack of layers, or
heads in a separate dimension, trains exactly like separate matrices.
Source: Shazeer and Stern 2018, algorithm 4; hyper-parameters as T5 (Raffel et al. 2020) and T5X.
"""

import dataclasses
import math
from typing import Any, Optional

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.partitioning.axis_rules import AxisNames

ROWS = frozenset({'embed'})
COLUMNS = frozenset({'vocab', 'mlp', 'heads', 'kv_heads', 'kv'})
STACKS = frozenset({'layers', 'experts'})  # each slice is a separate parameter


class FactoredMoment(flax.struct.PyTreeNode):
  """Second moment of one parameter: `row` and `column` if factored, else `full`."""

  row: Optional[Any] = None
  column: Optional[Any] = None
  full: Optional[Any] = None


@dataclasses.dataclass(frozen=True)
class _Dims:
  """Dimensions of a parameter by role; `factored` if both sides are large enough."""

  stack: tuple[int, ...]
  rows: tuple[int, ...]
  columns: tuple[int, ...]
  rank: int
  factored: bool

  @property
  def own(self) -> tuple[int, ...]:
    """Dimensions of one slice of the stack."""
    return tuple(i for i in range(self.rank) if i not in self.stack)


@dataclasses.dataclass(frozen=True)
class Adafactor:
  """T5's optimizer.

  Attributes:
    decay_rate: the second moment decays with 1 - (step + 1)^-decay_rate.
    clipping_threshold: root mean square above which an update is scaled down; None for never.
    multiply_by_parameter_scale: make the update relative to the parameter's root mean square.
    min_dim_size_to_factor: parameters with a smaller side keep the full second moment.
    epsilon1: added to squared gradients.
    epsilon2: smallest parameter scale.
  """

  decay_rate: float = 0.8
  clipping_threshold: Optional[float] = 1.0
  multiply_by_parameter_scale: bool = True
  min_dim_size_to_factor: int = 128
  epsilon1: float = 1e-30
  epsilon2: float = 1e-3

  def _dims(self, shape: tuple[int, ...], names: AxisNames) -> _Dims:
    def where(role: frozenset[str]) -> tuple[int, ...]:
      return tuple(i for i, name in enumerate(names.names) if name in role)

    stack, rows, columns = where(STACKS), where(ROWS), where(COLUMNS)
    side = min(math.prod(shape[i] for i in dims) if dims else 0 for dims in (rows, columns))
    complete = len(stack) + len(rows) + len(columns) == len(shape)
    return _Dims(stack, rows, columns, len(shape), complete and side >= self.min_dim_size_to_factor)

  def init(self, params: Any, names: Any) -> Any:
    def moment(param: jax.Array, axis_names: AxisNames) -> FactoredMoment:
      dims = self._dims(param.shape, axis_names)
      if not dims.factored:
        return FactoredMoment(full=jnp.zeros(param.shape, jnp.float32))
      return FactoredMoment(
        row=jnp.zeros(_without(param.shape, dims.columns), jnp.float32),
        column=jnp.zeros(_without(param.shape, dims.rows), jnp.float32),
      )

    return jax.tree.map(moment, params, names)

  def state_names(self, params: Any, names: Any) -> Any:
    def moment(param: jax.Array, axis_names: AxisNames) -> FactoredMoment:
      dims = self._dims(param.shape, axis_names)
      if not dims.factored:
        return FactoredMoment(full=axis_names)
      return FactoredMoment(
        row=AxisNames(_without(axis_names.names, dims.columns)),
        column=AxisNames(_without(axis_names.names, dims.rows)),
      )

    return jax.tree.map(moment, params, names)

  def update(
    self,
    grads: Any,
    state: Any,
    params: Any,
    *,
    names: Any,
    learning_rate: jax.Array,
    step: jax.Array,
  ) -> tuple[Any, Any]:
    decay = 1.0 - (step.astype(jnp.float32) + 1.0) ** -self.decay_rate

    def new_moment(grad: jax.Array, moment: FactoredMoment, axis_names: AxisNames):
      dims = self._dims(grad.shape, axis_names)
      square = jax.lax.square(grad.astype(jnp.float32)) + self.epsilon1

      def decayed(old: jax.Array, new: jax.Array) -> jax.Array:
        return decay * old + (1.0 - decay) * new

      if not dims.factored:
        return FactoredMoment(full=decayed(moment.full, square))
      return FactoredMoment(
        row=decayed(moment.row, jnp.mean(square, dims.columns)),
        column=decayed(moment.column, jnp.mean(square, dims.rows)),
      )

    def new_param(
      param: jax.Array, grad: jax.Array, moment: FactoredMoment, axis_names: AxisNames
    ) -> jax.Array:
      dims = self._dims(grad.shape, axis_names)
      update = grad.astype(jnp.float32) * _inverse_root(moment, dims)
      if self.clipping_threshold is not None:
        update /= jnp.maximum(1.0, _rms(update, dims.own) / self.clipping_threshold)
      scale = learning_rate
      if self.multiply_by_parameter_scale:
        scale = scale * jnp.maximum(_rms(param, dims.own), self.epsilon2)
      return param - (scale * update).astype(param.dtype)

    moments = jax.tree.map(new_moment, grads, state, names)
    return jax.tree.map(new_param, params, grads, moments, names), moments


def _inverse_root(moment: FactoredMoment, dims: _Dims) -> jax.Array:
  """Returns 1 / sqrt(second moment), broadcastable to the parameter."""
  if not dims.factored:
    return jax.lax.rsqrt(moment.full)
  row = jnp.expand_dims(moment.row, dims.columns)
  column = jnp.expand_dims(moment.column, dims.rows)
  # The rank-1 estimate is row x column / mean(row): equation 4 of the paper, with means for sums.
  return jax.lax.rsqrt(row / jnp.mean(row, dims.rows, keepdims=True)) * jax.lax.rsqrt(column)


def _rms(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
  return jnp.sqrt(jnp.mean(jax.lax.square(x), dims, keepdims=True))


def _without(items: tuple[Any, ...], dims: tuple[int, ...]) -> tuple[Any, ...]:
  return tuple(item for i, item in enumerate(items) if i not in dims)
