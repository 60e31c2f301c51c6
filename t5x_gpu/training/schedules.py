"""Learning-rate schedules: plain functions of the step, with linear warm-up.

Each returns `schedule(step) -> float32 scalar`; `step` counts from 0, as in T5X. A run that is
shorter than its warm-up never finishes warming up.
"""

import functools
import math
from collections.abc import Callable
from typing import Optional, Union

import jax
import jax.numpy as jnp

from t5x_gpu.errors import ConfigError, array_text, did_you_mean

Schedule = Callable[[jax.Array], jax.Array]
_NEEDS_A_VALUE = (
  jax.errors.ConcretizationTypeError,
  jax.errors.TracerArrayConversionError,
  jax.errors.TracerIntegerConversionError,
)


def checked_rate(schedule: Schedule, step: jax.Array) -> Union[float, jax.Array]:
  """Returns the rate of `schedule` at a traced `step`; raises ConfigError unless it is a number."""
  name = getattr(schedule, '__name__', type(schedule).__name__)
  try:
    rate = schedule(step)
  except _NEEDS_A_VALUE as e:
    raise _wrong(
      f'The learning rate ({name}) needs the value of `step` in Python, as `if` and `float` do; '
      'inside the compiled step there is none.',
      'Use jnp.where(step < 100, a, b) in place of `if`, and jnp in place of numpy and math.',
    ) from e
  if callable(rate):
    raise _wrong(
      f'train.learning_rate = {name} returns a function: it makes a schedule.',
      f'Call it in the gin file: train.learning_rate = @my_module.{name}()',
    )
  if not isinstance(rate, (int, float)) and getattr(rate, 'shape', None) != ():
    raise _wrong(
      f'The learning rate ({name}) is {array_text(rate)}.',
      'A schedule takes the step, an int32 scalar, and returns a float32 scalar.',
    )
  return rate


def _wrong(what: str, fix: str) -> ConfigError:
  return ConfigError(
    what, fix=fix, parameters=('train.learning_rate',), docs='add_an_optimizer.md#the-schedule'
  )


def constant(learning_rate: float, *, warmup_steps: int = 0) -> Schedule:
  """Returns a constant `learning_rate` after a linear warm-up from 0."""
  _check_finite('constant', learning_rate=learning_rate)
  return lambda step: learning_rate * _warmup(step, warmup_steps)


def rsqrt(base: float = 1.0, *, warmup_steps: int = 10_000) -> Schedule:
  """Returns base / sqrt(max(step, warmup_steps)): flat first, then falling.

  This is T5X's 'constant * rsqrt_decay'. Source: Raffel et al. 2020, section 3.1.2.
  """
  _check_finite('rsqrt', base=base)
  return lambda step: base / jnp.sqrt(jnp.maximum(_float(step), max(warmup_steps, 1)))


def linear(peak: float, *, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> Schedule:
  """Returns a linear rise to `peak`, then a linear fall to `final` at `total_steps`."""
  _check_finite('linear', peak=peak, final=final)

  def schedule(step: jax.Array) -> jax.Array:
    decay = 1 - _progress(step, warmup_steps, total_steps)
    return (final + (peak - final) * decay) * _warmup(step, warmup_steps)

  schedule.remake = functools.partial(linear, peak, warmup_steps=warmup_steps, final=final)
  return schedule


def cosine(peak: float, *, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> Schedule:
  """Returns a linear rise to `peak`, then half a cosine down to `final` at `total_steps`.

  Source: Loshchilov and Hutter 2017 (SGDR), without restarts.
  """
  _check_finite('cosine', peak=peak, final=final)

  def schedule(step: jax.Array) -> jax.Array:
    cosine_decay = 0.5 * (1 + jnp.cos(jnp.pi * _progress(step, warmup_steps, total_steps)))
    return (final + (peak - final) * cosine_decay) * _warmup(step, warmup_steps)

  schedule.remake = functools.partial(cosine, peak, warmup_steps=warmup_steps, final=final)
  return schedule


FACTORS = (
  'constant',
  'linear_warmup',
  'linear_decay',
  'rsqrt_decay',
  'rsqrt_normalized_decay',
  'decay_every',
  'cosine_decay',
)


def factors(
  factors: str = 'constant * linear_warmup * rsqrt_decay',
  *,
  base_learning_rate: float = 0.5,
  warmup_steps: int = 1000,
  decay_factor: float = 0.5,
  steps_per_decay: int = 20_000,
  steps_per_cycle: int = 100_000,
  step_offset: int = 0,
  min_learning_rate: float = 1e-8,
) -> Schedule:
  """Returns the product of named factors, with T5X's names, formulas and defaults.

  Args:
    factors: names of `FACTORS`, joined by '*'. `linear_warmup` is step / warmup_steps, so the first
      step has rate `min_learning_rate`; the other schedules here warm up one step earlier.
      `linear_decay` includes the base rate and a warm-up.
    base_learning_rate: the value of `constant`.
    warmup_steps: steps of every warm-up, and steps before `rsqrt_decay` and `cosine_decay` fall.
      With 0, steps from 1 on have T5X's rates; T5X's rate of step 0 is not a number.
    decay_factor: slope of `linear_decay` per step; the factor of each step of `decay_every`.
    steps_per_decay: length of a step of `decay_every`.
    steps_per_cycle: period of `cosine_decay`, which starts again after each.
    step_offset: subtracted from the step.
    min_learning_rate: smallest rate.
  Raises:
    ConfigError: an unknown factor, or a setting by which a factor cannot divide.
  Source: create_learning_rate_scheduler of t5x/utils.py.
  """
  names = [name.strip() for name in factors.split('*')]
  unknown = [name for name in names if name not in FACTORS]
  if unknown:
    raise ConfigError(
      f'schedules.factors: {unknown[0]!r} is not a factor.{did_you_mean(unknown[0], FACTORS)}',
      fix=f'Join some of these by *: {", ".join(FACTORS)}',
      parameters=('factors.factors',),
    )

  _check_finite(
    'factors',
    base_learning_rate=base_learning_rate,
    decay_factor=decay_factor,
    min_learning_rate=min_learning_rate,
  )
  for name in names:
    setting, value, least = {
      'linear_warmup': ('warmup_steps', warmup_steps, 0),
      'linear_decay': ('warmup_steps', warmup_steps, 0),
      'rsqrt_decay': ('warmup_steps', warmup_steps, 0),
      'rsqrt_normalized_decay': ('warmup_steps', warmup_steps, 1),
      'decay_every': ('steps_per_decay', steps_per_decay, 1),
      'cosine_decay': ('steps_per_cycle', steps_per_cycle, 1),
    }.get(name, ('', 0, 0))
    if not value >= least:
      raise ConfigError(
        f'factors.{setting} = {value!r} must be at least {least}: {name} divides by it.',
        fix=f'Set factors.{setting} to {least} or more, or remove {name} from factors.factors.',
        parameters=(f'factors.{setting}',),
      )

  def risen(step: jax.Array) -> jax.Array:
    return step / warmup_steps if warmup_steps else jnp.where(step > 0, jnp.inf, 0.0)

  def factor(name: str, step: jax.Array) -> jax.Array:
    match name:
      case 'constant':
        return base_learning_rate
      case 'linear_warmup':
        return jnp.minimum(1.0, risen(step))
      case 'linear_decay':
        falling = 1.0 + decay_factor * (warmup_steps - step)
        return base_learning_rate * jnp.minimum(risen(step), falling)
      case 'rsqrt_decay':
        return 1 / jnp.sqrt(jnp.maximum(step, warmup_steps or 1))
      case 'rsqrt_normalized_decay':
        return jnp.sqrt(warmup_steps / jnp.maximum(step, warmup_steps))
      case 'decay_every':
        return decay_factor ** (step // steps_per_decay)
      case 'cosine_decay':
        cycle = jnp.maximum(0.0, (step - warmup_steps) / steps_per_cycle) % 1.0
        return 0.5 * (1 + jnp.cos(jnp.pi * cycle))

  def schedule(step: jax.Array) -> jax.Array:
    counted = jnp.maximum(0.0, _float(step) - step_offset)
    rate = jnp.float32(1.0)
    for name in names:
      rate *= factor(name, counted)
    return jnp.maximum(rate, min_learning_rate).astype(jnp.float32)

  return schedule


def with_total_steps(schedule: Schedule, total_steps: int) -> Optional[Schedule]:
  """Returns the schedule for a run of `total_steps`; None for a custom schedule: it is unknown."""
  remake = getattr(schedule, 'remake', None)
  if remake is not None:
    return remake(total_steps=total_steps)
  return schedule if getattr(schedule, '__module__', '') == __name__ else None


def _check_finite(schedule: str, **values: float) -> None:
  """Raises ConfigError if a setting of `schedule` is infinite or not a number."""
  for name, value in values.items():
    if not math.isfinite(value):
      raise ConfigError(
        f'{schedule}.{name} = {value!r} is not a finite number.',
        fix=f'Set {schedule}.{name} to a number.',
        parameters=(f'{schedule}.{name}',),
      )


def _float(step: jax.Array) -> jax.Array:
  return jnp.asarray(step, jnp.float32)


def replica_factor(scaling: Optional[str], num_replicas: int) -> float:
  """Returns the factor of the learning rate for a number of replicas.

  Args:
    scaling: None for 1, 'linear' for the number of replicas, 'sqrt' for its square root.
    num_replicas: data x fsdp x expert, the parts of the global batch.
  Raises:
    ConfigError: unknown scaling.
  Source: Goyal et al. 2017 (linear, for SGD); Krizhevsky 2014 and Malladi et al. 2022 (root, which
    suits Adam).
  """
  factors = {None: 1.0, 'linear': float(num_replicas), 'sqrt': num_replicas**0.5}
  if scaling not in factors:
    raise ConfigError(
      f"train.learning_rate_scaling = {scaling!r} is not one of None, 'linear', 'sqrt'."
      f'{did_you_mean(str(scaling), ("linear", "sqrt"))}',
      fix='Set train.learning_rate_scaling to one of them.',
      parameters=('train.learning_rate_scaling',),
    )
  return factors[scaling]


def _warmup(step: jax.Array, warmup_steps: int) -> jax.Array:
  """Returns 1/warmup at step 0 and 1 from step warmup-1 on, so the first step already learns."""
  return jnp.minimum(1.0, (_float(step) + 1) / max(warmup_steps, 1))


def _progress(step: jax.Array, warmup_steps: int, total_steps: int) -> jax.Array:
  """Returns 0 at the end of the warm-up, 1 at `total_steps`."""
  return jnp.clip((_float(step) - warmup_steps) / max(total_steps - warmup_steps, 1), 0.0, 1.0)
