"""The optimizer interface, AdamW, and any optimizer of optax.

An optimizer gets each step's learning rate, so the logged rate is the rate that was used. It also
gets axis names, so its state is split over the mesh like the parameters.
"""

import dataclasses
import inspect
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol, Union

import jax
import jax.numpy as jnp
import optax

from t5x_gpu.errors import ConfigError, Problem, array_text, did_you_mean, listed
from t5x_gpu.partitioning.axis_rules import AxisNames
from t5x_gpu.partitioning.trees import OptState, ParamNames, Params, Path, Tree, by_name

MOMENT_DTYPES = ('float32', 'bfloat16')


class Optimizer(Protocol):
  """Parameters and gradients in, new parameters and state out. `names` is a tree of AxisNames."""

  def init(self, params: Params, names: ParamNames) -> OptState:
    """Returns the state before the first step."""

  def update(
    self,
    grads: Params,
    state: OptState,
    params: Params,
    *,
    names: ParamNames,
    learning_rate: jax.Array,
    step: jax.Array,
  ) -> tuple[Params, OptState]:
    """Returns (new parameters, new state). `step` counts from 0."""

  def state_names(self, params: Params, names: ParamNames) -> Tree:
    """Returns the state's tree with an AxisNames for each array; `params` may be abstract."""


METHODS = ('init', 'update', 'state_names')


def check_optimizer(optimizer: Optimizer) -> None:
  """Raises ConfigError if the optimizer is a class, or lacks a method of `Optimizer`."""
  if inspect.isclass(optimizer):
    raise _wrong(
      f'{optimizer.__name__} is a class; train.optimizer takes an object.',
      'Add parentheses in the gin file: OPTIMIZER = @my_module.MyOptimizer()',
    )
  lacking = [name for name in METHODS if not callable(getattr(optimizer, name, None))]
  if lacking:
    own = [name for name in dir(optimizer) if not name.startswith('_')]
    hint = ''.join(did_you_mean(name, own) for name in lacking)
    raise _wrong(
      f'The optimizer {type(optimizer).__name__} has no {" and no ".join(lacking)}.{hint}',
      f'An optimizer has the methods {", ".join(METHODS)}.',
    )


def check_state_names(optimizer: Optimizer, names: Tree, state: OptState) -> None:
  """Raises ConfigError if `names`, from `state_names`, is not the tree of `state`, from `init`."""
  of_init, of_names = (
    by_name(tree, is_leaf=lambda x: isinstance(x, AxisNames)) for tree in (state, names)
  )
  wrong = sorted(path for path, x in of_names.items() if type(x) is not AxisNames)
  if of_init.keys() == of_names.keys() and not wrong:
    return
  missing = sorted(of_init.keys() - of_names.keys())
  others = sorted(of_names.keys() - of_init.keys())
  found = (('lacks', missing), ('also has', others), ('has no AxisNames at', wrong))
  what = '; it '.join(f'{verb} {", ".join(listed(paths, 3))}' for verb, paths in found if paths)
  raise _wrong(
    f'state_names of {type(optimizer).__name__} returned another tree than init: it {what}.',
    'Return the tree of init with an AxisNames in place of each array; AxisNames(()) for a scalar.',
  )


def checked_update(
  optimizer: Optimizer, updated: object, *, params: Params, state: OptState
) -> tuple[Params, OptState]:
  """Returns `updated`; raises ConfigError unless it can replace `params` and `state`."""
  name = type(optimizer).__name__
  if not isinstance(updated, (tuple, list)) or len(updated) != 2:
    raise _wrong(
      f'update of {name} returned {array_text(updated)}; it returns (new parameters, new state).',
      'End it with: return new_params, new_state',
    )
  for what, old, new in zip(('parameters', 'state'), (params, state), updated):
    before, after = (by_name(jax.tree.map(_as_array_text, tree)) for tree in (old, new))
    if before == after:
      continue
    path = sorted(p for p in before.keys() | after.keys() if before.get(p) != after.get(p))[0]
    raise _wrong(
      f'update of {name} returned other {what} than it got, such as {path}: '
      f'{before.get(path, "nothing")} before, {after.get(path, "nothing")} after.',
      'Return (new parameters, new state), each with the tree, shapes and dtypes of the old one.',
    )
  return updated[0], updated[1]


def _as_array_text(x: object) -> str:
  """Returns `array_text` of `x`; of Python numbers, the text of the arrays of jit."""
  return f'{jnp.result_type(x)}[]' if isinstance(x, (bool, int, float)) else array_text(x)


def _wrong(what: str, fix: str) -> ConfigError:
  return ConfigError(what, fix=fix, parameters=('train.optimizer',), docs='add_an_optimizer.md')


@dataclasses.dataclass(frozen=True)
class AdamW:
  """Adam with decoupled weight decay.

  Attributes:
    b1, b2: decay of the first and second moment.
    eps: added to the root of the second moment.
    weight_decay: times the learning rate, per step; for matrices, not for norm scales or biases.
    mu_dtype, nu_dtype: dtype in which the first and second moment are stored, 'float32' or
      'bfloat16'; the arithmetic is in float32. The second moment is rounded stochastically:
      adjacent bfloat16 values differ by 0.4 to 0.8%, so rounding to the nearest would lose a step's
      change, which is a fraction 1 - b2.
  Source: Loshchilov and Hutter 2019, algorithm 2; the arithmetic is optax's. Stochastic rounding:
    Zamirai et al. 2020 (arXiv:2010.06192).
  """

  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.0
  mu_dtype: str = 'float32'
  nu_dtype: str = 'float32'

  def __post_init__(self) -> None:
    problems = [
      Problem(
        f'AdamW.{name} = {value!r} is not one of {", ".join(MOMENT_DTYPES)}.'
        + did_you_mean(value, MOMENT_DTYPES),
        parameters=(f'AdamW.{name}',),
      )
      for name in ('mu_dtype', 'nu_dtype')
      if (value := getattr(self, name)) not in MOMENT_DTYPES
    ]
    if problems:
      raise ConfigError(
        'The optimizer cannot be built',
        problems=problems,
        fix='Set them with --gin.AdamW.NAME=VALUE.',
        docs='performance.md#moments-in-bfloat16',
      )

  def _transformation(self, names: ParamNames) -> optax.GradientTransformation:
    decays = jax.tree_util.tree_map_with_path(_decays, names)
    return optax.chain(
      optax.scale_by_adam(self.b1, self.b2, self.eps),
      optax.add_decayed_weights(self.weight_decay, mask=decays),
    )

  def init(self, params: Params, names: ParamNames) -> OptState:
    return self._stored(self._transformation(names).init(params), names)

  def update(
    self,
    grads: Params,
    state: OptState,
    params: Params,
    *,
    names: ParamNames,
    learning_rate: jax.Array,
    step: jax.Array,
  ) -> tuple[Params, OptState]:
    del step  # optax keeps its own step count
    updates, state = self._transformation(names).update(grads, _widened(state), params)
    params = jax.tree.map(lambda p, u: p - learning_rate * u, params, updates)
    return params, self._stored(state, names)

  def state_names(self, params: Params, names: ParamNames) -> Tree:
    return _optax_names(self._transformation(names), params, names)

  def _stored(self, state: OptState, names: ParamNames) -> OptState:
    """Returns optax's `state` with the moments in the dtypes in which they are stored."""
    adam, *rest = state
    mu, nu = adam.mu, adam.nu
    if self.mu_dtype != 'float32':
      mu = jax.tree.map(lambda x: x.astype(self.mu_dtype), mu)
    if self.nu_dtype != 'float32':
      keys = _keys(names, adam.count)
      nu = jax.tree.map(lambda x, key: stochastically_rounded(x, key), nu, keys)
    return adam._replace(mu=mu, nu=nu), *rest


# A transformation of optax, or a function that makes one from `learning_rate`.
Transformation = Union[optax.GradientTransformation, Callable[..., optax.GradientTransformation]]


@dataclasses.dataclass(frozen=True)
class Optax:
  """Optax transformations, applied in order; their states must be shaped like the parameters.

  In gin: `Optax.transformations = [@optax.clip(), @optax.lion]`, after `import optax`.

  Attributes:
    transformations: transformations, or functions that make one from `learning_rate` (written
      without parentheses in gin). These functions get the learning rate of each step. At least one
      is needed, so that the logged rate is the rate that was used.
  Raises:
    ConfigError: a function does not take the learning rate; there is no function; or a state is not
      shaped like the parameters.
  """

  transformations: Sequence[Transformation]

  def __post_init__(self) -> None:
    if not any(map(callable, self.transformations)):
      raise ConfigError(
        'No transformation of Optax.transformations takes the learning rate of the step.',
        fix='Name one without parentheses: Optax.transformations = [@optax.clip(), @optax.adamw]',
        parameters=('Optax.transformations',),
        docs='add_an_optimizer.md',
      )
    for made in filter(callable, self.transformations):
      if not _takes_rate(made):
        name = getattr(made, '__name__', made)
        raise ConfigError(
          f'{name} in Optax.transformations does not take a learning_rate.',
          fix=f'Add parentheses in the gin file: @optax.{name}()',
          parameters=('Optax.transformations',),
          docs='add_an_optimizer.md',
        )

  def _transformation(self, learning_rate: Union[float, jax.Array]) -> optax.GradientTransformation:
    return optax.chain(
      *(t(learning_rate=learning_rate) if callable(t) else t for t in self.transformations)
    )

  def init(self, params: Params, names: ParamNames) -> OptState:
    del names
    return self._transformation(0.0).init(params)

  def update(
    self,
    grads: Params,
    state: OptState,
    params: Params,
    *,
    names: ParamNames,
    learning_rate: jax.Array,
    step: jax.Array,
  ) -> tuple[Params, OptState]:
    del names, step  # optax keeps its own step count
    updates, state = self._transformation(learning_rate).update(grads, state, params)
    return optax.apply_updates(params, updates), state

  def state_names(self, params: Params, names: ParamNames) -> Tree:
    return _optax_names(self._transformation(0.0), params, names)


def _takes_rate(function: Callable[..., optax.GradientTransformation]) -> bool:
  parameters = inspect.signature(function).parameters
  takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  return takes_any or 'learning_rate' in parameters


def _optax_names(
  transformation: optax.GradientTransformation, params: Params, names: ParamNames
) -> Tree:
  """Returns the state's tree with an AxisNames for each array."""

  def of_parameter(array: jax.ShapeDtypeStruct, axis_names: AxisNames) -> AxisNames:
    if array.ndim != len(axis_names.names):
      raise ConfigError(
        f'An optax optimizer keeps an array {array.shape} for a parameter with axes '
        f'{axis_names.names}, so it cannot be split like the parameter.',
        fix='Use adafactor.Adafactor, or your own optimizer that names its state.',
        parameters=('train.optimizer',),
        docs='add_an_optimizer.md',
      )
    return axis_names

  return optax.tree_map_params(
    transformation,
    of_parameter,
    jax.eval_shape(transformation.init, params),  # dtypes do not matter here
    names,
    transform_non_params=lambda x: AxisNames((None,) * x.ndim),
  )


def stochastically_rounded(x: jax.Array, key: jax.Array) -> jax.Array:
  """Returns `x`, finite and float32, rounded up or down to bfloat16 so that the mean is exact."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
  kept = (bits + noise) & jnp.uint32(0xFFFF0000)
  return jax.lax.bitcast_convert_type(kept, jnp.float32).astype(jnp.bfloat16)


def _widened(state: OptState) -> OptState:
  """Returns optax's `state` with float32 moments."""
  adam, *rest = state
  mu, nu = (jax.tree.map(lambda x: x.astype(jnp.float32), m) for m in (adam.mu, adam.nu))
  return adam._replace(mu=mu, nu=nu), *rest


def _keys(names: ParamNames, step: jax.Array) -> Tree:
  """Returns a key per parameter for one step, the same on any mesh."""
  key = jax.random.fold_in(jax.random.key(0), step)
  return jax.tree_util.tree_map_with_path(
    lambda path, _: jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode())), names
  )


def _decays(path: Path, names: AxisNames) -> bool:
  """Returns whether weight decay applies to a parameter.

  It applies to matrices; biases of heads, which also have two axes, are excluded.
  """
  return path[-1].key != 'bias' and len([x for x in names.names if x != 'layers']) >= 2
