"""An optimizer that stores its gradient, to inspect a training step."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.training.optimizers import Optimizer


class RecordedState(flax.struct.PyTreeNode):
  """State of `Recording`: the inner optimizer's state, and the gradient of the last update."""

  optimizer: Any
  gradient: Any


@dataclasses.dataclass(frozen=True)
class Recording:
  """Updates like `optimizer`, and stores the gradient, split like the parameters.

  The stored gradient is the optimizer's input: divided by the loss's weight, and clipped if the
  step clips.
  """

  optimizer: Optimizer

  def init(self, params: Any, names: Any) -> RecordedState:
    return RecordedState(self.optimizer.init(params, names), jax.tree.map(jnp.zeros_like, params))

  def update(
    self,
    grads: Any,
    state: RecordedState,
    params: Any,
    *,
    names: Any,
    learning_rate: jax.Array,
    step: jax.Array,
  ) -> tuple[Any, RecordedState]:
    params, inner = self.optimizer.update(
      grads, state.optimizer, params, names=names, learning_rate=learning_rate, step=step
    )
    return params, RecordedState(inner, grads)

  def state_names(self, params: Any, names: Any) -> RecordedState:
    return RecordedState(self.optimizer.state_names(params, names), names)
