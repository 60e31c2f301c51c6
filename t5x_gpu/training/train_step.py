"""One update: (state, batch) -> (state, metrics). Pure; the partitioner jits it.

Losses are sums over target tokens. Gradients of the *sum* are accumulated over microbatches and
divided once by the weight of the whole global batch, so neither accumulation nor data parallelism
nor padding can change the answer.
"""

from collections.abc import Callable
from typing import Any, Optional

import jax
import jax.numpy as jnp

from t5x_gpu.errors import ConfigError
from t5x_gpu.models.losses import Sums
from t5x_gpu.partitioning.axis_rules import shard
from t5x_gpu.training.schedules import Schedule
from t5x_gpu.training.train_state import TrainState

Batch = Any
# Metric name -> (sum, weight); norms and the learning rate have weight 1.
StepFn = Callable[[TrainState, Batch], tuple[TrainState, Sums]]


def make_train_step(*, model: Any, optimizer: Any, schedule: Schedule, names: Any, seed: int,
                    num_microbatches: int = 1, max_grad_norm: Optional[float] = None,
                    loss_normalizing_factor: Optional[float] = None) -> StepFn:
  """Returns the function that makes one update.

  Args:
    model: has `loss(params, batch, dropout_rng=...) -> Sums`.
    optimizer: a training.optimizers.Optimizer.
    schedule: learning rate by step.
    names: tree of AxisNames of the parameters.
    seed: of dropout; the key of a step is fold_in(seed, step), on any topology and after a resume.
    num_microbatches: parts of the batch computed one after the other, to save memory.
    max_grad_norm: global norm to which gradients are clipped; None for never.
    loss_normalizing_factor: what the summed loss is divided by before gradients are used. None is
      the number of target tokens; 1.0 is T5X's default, where batches with more tokens weigh more.
  """
  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
    dropout_rng = jax.random.fold_in(jax.random.key(seed), state.step)
    grads, sums = _accumulate(model, state.params, batch, dropout_rng, num_microbatches)
    if loss_normalizing_factor is None:
      divisor = jnp.maximum(sums['loss'][1], 1.0)  # a batch of padding gives zeros, not NaN
    else:
      divisor = loss_normalizing_factor
    grads = jax.tree.map(lambda g: g / divisor, grads)
    grad_norm = _global_norm(grads)
    if max_grad_norm is not None:
      clip = jnp.minimum(1.0, max_grad_norm / jnp.maximum(grad_norm, 1e-12))
      grads = jax.tree.map(lambda g: g * clip, grads)
    learning_rate = jnp.asarray(schedule(state.step), jnp.float32)
    params, opt_state = optimizer.update(grads, state.opt_state, state.params, names=names,
                                         learning_rate=learning_rate, step=state.step)
    # Of the new parameters: an update that ruins them is noticed before it is saved.
    param_norm = _global_norm(params)
    one = jnp.ones(())
    sums = {**sums, 'grad_norm': (grad_norm, one), 'param_norm': (param_norm, one),
            'learning_rate': (learning_rate, one)}
    return TrainState(state.step + 1, params, opt_state), sums
  return train_step


def make_eval_step(*, model: Any) -> Callable[[Any, Batch], Sums]:
  """Returns the function (params, batch) -> sums, without dropout."""
  def eval_step(params: Any, batch: Batch) -> Sums:
    return model.loss(params, batch)
  return eval_step


def _global_norm(tree: Any) -> jax.Array:
  return jnp.sqrt(sum(jnp.sum(jax.lax.square(x)) for x in jax.tree.leaves(tree)))


def check_microbatches(batch_size: int, num_microbatches: int) -> None:
  """Raises ConfigError unless the batch divides into microbatches."""
  if num_microbatches < 1 or batch_size % num_microbatches:
    legal = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
    raise ConfigError(
        f'BATCH_SIZE = {batch_size} cannot be divided into num_microbatches = {num_microbatches}.',
        fix=f'Set train.num_microbatches to one of {", ".join(map(str, legal))}.',
        parameters=('train.num_microbatches', 'BATCH_SIZE'))


def _accumulate(model: Any, params: Any, batch: Batch, dropout_rng: jax.Array,
                num_microbatches: int) -> tuple[Any, Sums]:
  """Returns (gradients of the summed loss, sums) over all microbatches."""
  def loss_sum(params: Any, microbatch: Batch, rng: jax.Array) -> tuple[jax.Array, Sums]:
    sums = model.loss(params, microbatch, dropout_rng=rng)
    return sums['loss'][0], sums
  grad_fn = jax.grad(loss_sum, has_aux=True)
  if num_microbatches == 1:
    return grad_fn(params, batch, dropout_rng)

  def split(x: jax.Array) -> jax.Array:
    # Every n-th row to microbatch n: each device then takes part of its own rows, none travel.
    x = x.reshape((x.shape[0] // num_microbatches, num_microbatches) + x.shape[1:])
    x = jnp.swapaxes(x, 0, 1)
    return shard(x, None, 'batch', *('length',) * (x.ndim - 2))

  def body(carry: Any, xs: Any) -> tuple[Any, None]:
    index, microbatch = xs
    new = grad_fn(params, microbatch, jax.random.fold_in(dropout_rng, index))
    return jax.tree.map(jnp.add, carry, new), None

  microbatches = jax.tree.map(split, batch)
  first = jax.tree.map(lambda x: x[0], microbatches)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype),
                       jax.eval_shape(grad_fn, params, first, dropout_rng))
  total, _ = jax.lax.scan(body, zeros, (jnp.arange(num_microbatches), microbatches))
  return total
