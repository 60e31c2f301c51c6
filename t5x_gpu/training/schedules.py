"""Learning-rate schedules: plain functions of the step, with linear warm-up.

Each returns `schedule(step) -> float32 scalar`; `step` counts from 0, as in T5X. A run that is
shorter than its warm-up never finishes warming up.
"""

import functools
from collections.abc import Callable
from typing import Optional

import jax
import jax.numpy as jnp

from t5x_gpu.errors import ConfigError, did_you_mean

Schedule = Callable[[jax.Array], jax.Array]


def constant(learning_rate: float, *, warmup_steps: int = 0) -> Schedule:
  """Returns a constant `learning_rate` after a linear warm-up from 0."""
  return lambda step: learning_rate * _warmup(step, warmup_steps)


def rsqrt(base: float = 1.0, *, warmup_steps: int = 10_000) -> Schedule:
  """Returns base / sqrt(max(step, warmup_steps)): flat first, then falling.

  This is T5X's 'constant * rsqrt_decay'. Source: Raffel et al. 2020, section 3.1.2.
  """
  return lambda step: base / jnp.sqrt(jnp.maximum(_float(step), max(warmup_steps, 1)))


def linear(peak: float, *, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> Schedule:
  """Returns a linear rise to `peak`, then a linear fall to `final` at `total_steps`."""

  def schedule(step: jax.Array) -> jax.Array:
    decay = 1 - _progress(step, warmup_steps, total_steps)
    return (final + (peak - final) * decay) * _warmup(step, warmup_steps)

  schedule.remake = functools.partial(linear, peak, warmup_steps=warmup_steps, final=final)
  return schedule


def cosine(peak: float, *, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> Schedule:
  """Returns a linear rise to `peak`, then half a cosine down to `final` at `total_steps`.

  Source: Loshchilov and Hutter 2017 (SGDR), without restarts.
  """

  def schedule(step: jax.Array) -> jax.Array:
    cosine_decay = 0.5 * (1 + jnp.cos(jnp.pi * _progress(step, warmup_steps, total_steps)))
    return (final + (peak - final) * cosine_decay) * _warmup(step, warmup_steps)

  schedule.remake = functools.partial(cosine, peak, warmup_steps=warmup_steps, final=final)
  return schedule


def with_total_steps(schedule: Schedule, total_steps: int) -> Schedule:
  """Returns the schedule for a run of `total_steps`, or `schedule` if the total does not matter.

  Custom schedules are assumed not to depend on the total.
  """
  remake = getattr(schedule, 'remake', None)
  return schedule if remake is None else remake(total_steps=total_steps)


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
