"""One update: (state, batch) -> (state, metrics). A pure function, jitted by the layout.

Gradients of the *summed* loss are divided once, by the weight of the whole global batch.
"""

from collections.abc import Callable
from typing import Any, Optional

import jax
import jax.numpy as jnp

from t5x_gpu.errors import ConfigError
from t5x_gpu.models.losses import Sums
from t5x_gpu.training.fp8_history import Fp8History
from t5x_gpu.training.gradients import GradientsFn
from t5x_gpu.training.guards.spikes import SpikeConfig, group_norms
from t5x_gpu.training.optimizers import Optimizer
from t5x_gpu.training.schedules import Schedule
from t5x_gpu.training.stored_state import StoredState
from t5x_gpu.training.train_state import TrainState
from t5x_gpu.training.trainable import Trained

Batch = Any
# Metric name -> (sum, weight); norms and the learning rate have weight 1.
StepFn = Callable[[TrainState, Batch], tuple[TrainState, Sums]]


def make_train_step(
  *,
  gradients: GradientsFn,
  optimizer: Optimizer,
  schedule: Schedule,
  names: Any,
  seed: int,
  max_grad_norm: Optional[float] = None,
  loss_normalizing_factor: Optional[float] = None,
  trained: Trained = Trained(),
  form: Optional[StoredState] = None,
  history: Optional[Fp8History] = None,
  spikes: SpikeConfig = SpikeConfig(),
) -> StepFn:
  """Returns the function that makes one update.

  Args:
    gradients: from `make_gradients`.
    optimizer: a training.optimizers.Optimizer.
    schedule: step -> learning rate.
    names: tree of AxisNames of the parameters.
    seed: seed of dropout; a step's key is fold_in(seed, step), on any topology and after a resume.
    max_grad_norm: global norm to which gradients are clipped; None for no clipping.
    loss_normalizing_factor: divisor of the summed loss and its gradients. None divides by the
      number of target tokens. 1.0, which is T5X's None, keeps the sum: batches with more tokens
      weigh more.
    trained: which parameters are trained, the same as for `gradients`.
    form: how the state is stored between steps; None for its true shapes.
    history: FP8 history of a model with delayed scaling; None without.
    spikes: which steps to skip.
  """
  names, _ = trained.split(names)

  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
    dropout_key = jax.random.fold_in(jax.random.key(seed), state.step)
    amaxes = {} if history is None else history.amaxes(state.fp8_history)
    grads, sums, amaxes = gradients(state.params, amaxes, batch, dropout_key)
    if loss_normalizing_factor is None:
      divisor = jnp.maximum(sums['loss'][1], 1.0)  # a batch of padding gives zeros, not NaN
    else:
      divisor = loss_normalizing_factor
    grads = jax.tree.map(lambda g: g / divisor, grads)
    grad_norm = _global_norm(grads)
    groups = group_norms(grads, spikes.group_depth)
    if max_grad_norm is not None:
      clip = jnp.minimum(1.0, max_grad_norm / jnp.maximum(grad_norm, 1e-12))
      grads = jax.tree.map(lambda g: g * clip, grads)
    learning_rate = jnp.asarray(schedule(state.step), jnp.float32)
    state = state if form is None else form.unpadded(state)
    params, frozen = trained.split(state.params)
    old = params, state.opt_state, state.fp8_history
    params, opt_state = optimizer.update(
      grads, state.opt_state, params, names=names, learning_rate=learning_rate, step=state.step
    )
    new = params, opt_state, old[2] if history is None else history.after(old[2], amaxes)
    (params, opt_state, fp8_history), norms, skipped = spikes.chosen(
      old, new, loss=sums['loss'][0], grad_norm=grad_norm, norms=state.grad_norms
    )
    # Norm of the new parameters, so that an update that ruins them is noticed before it is saved.
    norms_now = {'grad_norm': grad_norm, 'param_norm': _global_norm(params)}
    numbers = {**norms_now, 'learning_rate': learning_rate, **groups, **skipped}
    sums = {**sums, **{name: (value, jnp.ones(())) for name, value in numbers.items()}}
    params = trained.join(params, frozen)
    new = TrainState(state.step + 1, params, opt_state, fp8_history, norms)
    return new if form is None else form.padded(new), sums

  return train_step


def _global_norm(tree: Any) -> jax.Array:
  return jnp.sqrt(sum(jnp.sum(jax.lax.square(x)) for x in jax.tree.leaves(tree)))


def check_microbatches(batch_size: int, num_microbatches: int) -> None:
  """Raises ConfigError unless the batch divides into microbatches."""
  if num_microbatches < 1 or batch_size % num_microbatches:
    raise ConfigError(
      f'BATCH_SIZE = {batch_size} cannot be divided into num_microbatches = {num_microbatches}.',
      fix=f'Set train.num_microbatches to a number that divides {batch_size}.',
      parameters=('BATCH_SIZE', 'train.num_microbatches'),
    )
