"""Adafactor: second moments kept as a row and a column instead of a matrix.

T5X's rules: axis names decide which dimensions are rows, columns or a stack of separate parameters.
Size decides only for parameters that T5X holds as plain matrices.
Source: Shazeer and Stern 2018, algorithm 4; hyper-parameters as T5 (Raffel et al. 2020); rules of
t5x/adafactor.py.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Optional

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.errors import ConfigError, Problem, did_you_mean
from t5x_gpu.partitioning.axis_rules import AXES, AxisNames
from t5x_gpu.partitioning.trees import Gradients, OptState, ParamNames, Params, Tree

ROLES = {
  'row': 'kept in the row moment, averaged in the column moment',
  'column': 'kept in the column moment, averaged in the row moment',
  'batch': 'each index is a separate parameter',
  'none': 'not factored',
}
# How T5X stores the layers of a model, which decides which kernels are plain matrices.
LAYERS = {
  'scanned': 'in one array (scan_layers): kernels of layers are factored at any size',
  'separate': 'one by one: kernels of a layer with two dimensions are factored by size',
  'joined_heads': 'one by one, heads and features in one dimension: all kernels by size',
}


def standard_logical_factor_rules() -> dict[str, str]:
  """Returns axis name -> role, a key of `ROLES`: T5X's table for our axes."""
  return {
    'vocab': 'column',
    'embed': 'row',
    'mlp': 'column',
    'heads': 'column',
    'kv_heads': 'column',
    'kv': 'column',
    'relpos_buckets': 'none',
    'layers': 'batch',
    'experts': 'batch',
  }


class FactoredMoment(flax.struct.PyTreeNode):
  """Moments of one parameter.

  The second moment is `row` and `column` if it is factored, else `full`; `momentum` is the mean of
  past updates, with `Adafactor.beta1`.
  """

  row: Optional[Any] = None
  column: Optional[Any] = None
  full: Optional[Any] = None
  momentum: Optional[Any] = None


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
    decay_rate: the second moment decays with 1 - (step - step_offset + 1)^-decay_rate.
    step_offset: step at which the decay starts: the step of a pretrained checkpoint, if the run
      starts from its parameters with fresh moments.
    clipping_threshold: root mean square above which an update is scaled down; None for never.
    multiply_by_parameter_scale: make the update relative to the parameter's root mean square.
    min_dim_size_to_factor: matrices with a smaller side keep the full second moment, where the size
      decides (`layers`).
    epsilon1: added to squared gradients.
    epsilon2: smallest parameter scale.
    logical_factor_rules: axis name -> role, a key of `ROLES`, where it differs from the standard
      rules; None for the standard ones. A kernel is factored if it has rows and columns and no
      dimension is 'none'.
    layers: how T5X would hold the layers, a key of `LAYERS`; t5x_gpu always stacks them. Matrices
      outside of the layers are factored by size in any case. None is 'scanned', except that a run
      that continues from a checkpoint keeps the checkpoint's factoring (run/check.py).
    beta1: decay of the momentum, which averages the updates, learning rate included; it needs one
      more float32 array per parameter. None for no momentum.
    factored: False keeps the full second moment of every parameter. As in T5X, an array then has
      one root mean square for clipping and scale: all layers together if `layers` is 'scanned'.
    weight_decay_rate: share of every parameter, biases and norms included, that a step removes. It
      is not multiplied by the learning rate. None for no decay.
  Raises:
    ConfigError: an unknown axis, role or `layers`; a rate below 0, or of 1 and above.
  """

  decay_rate: float = 0.8
  clipping_threshold: Optional[float] = 1.0
  multiply_by_parameter_scale: bool = True
  min_dim_size_to_factor: int = 128
  epsilon1: float = 1e-30
  epsilon2: float = 1e-3
  logical_factor_rules: Optional[Mapping[str, str]] = dataclasses.field(default=None, hash=False)
  layers: Optional[str] = None
  step_offset: int = 0
  beta1: Optional[float] = None
  weight_decay_rate: Optional[float] = None
  factored: bool = True

  def __post_init__(self) -> None:
    rules = self.logical_factor_rules or {}
    rules_of, layers_of = 'Adafactor.logical_factor_rules', 'Adafactor.layers'
    problems = [
      Problem(
        f'{rules_of}: {name!r} is not an axis.{did_you_mean(name, AXES)}', parameters=(rules_of,)
      )
      for name in rules
      if name not in AXES
    ]
    problems += [
      Problem(
        f'{rules_of}: {name!r} has the role {role!r}, not one of {", ".join(ROLES)}.'
        + did_you_mean(role, ROLES),
        parameters=(rules_of,),
      )
      for name, role in rules.items()
      if role not in ROLES
    ]
    if self.layers is not None and self.layers not in LAYERS:
      problems.append(
        Problem(
          f'{layers_of} = {self.layers!r} is not one of {", ".join(LAYERS)}.'
          + did_you_mean(self.layers, LAYERS),
          parameters=(layers_of,),
        )
      )
    problems += [
      Problem(
        f'Adafactor.{name} = {rate!r} is neither None nor a share from 0 to below 1.',
        parameters=(f'Adafactor.{name}',),
      )
      for name in ('beta1', 'weight_decay_rate')
      if (rate := getattr(self, name)) is not None and not 0 <= rate < 1
    ]
    if problems:
      raise ConfigError(
        'The optimizer cannot be built',
        problems=problems,
        fix='Set them with --gin.Adafactor.NAME=VALUE.',
      )

  def _dims(self, shape: tuple[int, ...], names: AxisNames) -> _Dims:
    rules = {**standard_logical_factor_rules(), **(self.logical_factor_rules or {})}
    roles = [rules.get(name, 'none') for name in names.names]

    def where(role: str) -> tuple[int, ...]:
      return tuple(i for i, r in enumerate(roles) if r == role)

    stack, rows, columns = where('batch'), where('row'), where('column')
    if not self.factored:
      one_by_one = self.layers in ('separate', 'joined_heads')
      stack = tuple(i for i, name in enumerate(names.names) if one_by_one and name == 'layers')
      return _Dims(stack, (), (), len(shape), factored=False)
    factored = bool(rows and columns) and 'none' not in roles
    if self.layers == 'joined_heads':
      sides = (math.prod(shape[i] for i in dims) for dims in (rows, columns))
      factored = factored and min(sides) >= self.min_dim_size_to_factor
    else:
      one_by_one = ('layers',) if self.layers == 'separate' else ()
      matrix = [i for i, name in enumerate(names.names) if name not in one_by_one]
      if len(matrix) == 2 and not set(matrix) & set(stack):
        if not factored:
          rows, columns = ((i,) for i in matrix)
        factored = min(shape[i] for i in matrix) >= self.min_dim_size_to_factor
    return _Dims(stack, rows, columns, len(shape), factored)

  def init(self, params: Params, names: ParamNames) -> Tree:
    def moment(param: jax.Array, axis_names: AxisNames) -> FactoredMoment:
      dims = self._dims(param.shape, axis_names)
      momentum = None if self.beta1 is None else jnp.zeros(param.shape, jnp.float32)
      if not dims.factored:
        return FactoredMoment(full=jnp.zeros(param.shape, jnp.float32), momentum=momentum)
      return FactoredMoment(
        row=jnp.zeros(_without(param.shape, dims.columns), jnp.float32),
        column=jnp.zeros(_without(param.shape, dims.rows), jnp.float32),
        momentum=momentum,
      )

    return jax.tree.map(moment, params, names)

  def state_names(self, params: Params, names: ParamNames) -> Tree:
    def moment(param: jax.Array, axis_names: AxisNames) -> FactoredMoment:
      dims = self._dims(param.shape, axis_names)
      momentum = None if self.beta1 is None else axis_names
      if not dims.factored:
        return FactoredMoment(full=axis_names, momentum=momentum)
      return FactoredMoment(
        row=AxisNames(_without(axis_names.names, dims.columns)),
        column=AxisNames(_without(axis_names.names, dims.rows)),
        momentum=momentum,
      )

    return jax.tree.map(moment, params, names)

  def update(
    self,
    grads: Gradients,
    state: OptState,
    params: Params,
    *,
    names: ParamNames,
    learning_rate: jax.Array,
    step: jax.Array,
  ) -> tuple[Params, OptState]:
    counted = step.astype(jnp.float32)
    if self.step_offset:
      counted = jnp.maximum(counted - self.step_offset, 0.0)
    decay = 1.0 - (counted + 1.0) ** -self.decay_rate

    def new_moment(grad: jax.Array, moment: FactoredMoment, axis_names: AxisNames):
      dims = self._dims(grad.shape, axis_names)
      square = jax.lax.square(grad.astype(jnp.float32)) + self.epsilon1

      def decayed(old: jax.Array, new: jax.Array) -> jax.Array:
        return decay * old + (1.0 - decay) * new

      if not dims.factored:
        return moment.replace(full=decayed(moment.full, square))
      return moment.replace(
        row=decayed(moment.row, jnp.mean(square, dims.columns)),
        column=decayed(moment.column, jnp.mean(square, dims.rows)),
      )

    def new_update(
      param: jax.Array, grad: jax.Array, moment: FactoredMoment, axis_names: AxisNames
    ) -> jax.Array:
      dims = self._dims(grad.shape, axis_names)
      update = grad.astype(jnp.float32) * _inverse_root(moment, dims)
      if self.clipping_threshold is not None:
        update /= jnp.maximum(1.0, _rms(update, dims.own) / self.clipping_threshold)
      scale = learning_rate
      if self.multiply_by_parameter_scale:
        scale = scale * jnp.maximum(_rms(param, dims.own), self.epsilon2)
      return scale * update

    def new_param(param: jax.Array, update: jax.Array) -> jax.Array:
      if self.weight_decay_rate is not None:
        param = (1.0 - self.weight_decay_rate) * param
      return param - update.astype(param.dtype)

    moments = jax.tree.map(new_moment, grads, state, names)
    updates = jax.tree.map(new_update, params, grads, moments, names)
    if self.beta1 is not None:
      moments = jax.tree.map(
        lambda u, m: m.replace(momentum=self.beta1 * m.momentum + (1.0 - self.beta1) * u),
        updates,
        moments,
      )
      updates = jax.tree.map(lambda u, m: m.momentum, updates, moments)
    return jax.tree.map(new_param, params, updates), moments


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
