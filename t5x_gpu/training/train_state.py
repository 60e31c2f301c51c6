"""The state that a step changes: step count, parameters and optimizer state."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.partitioning.axis_rules import AxisNames
from t5x_gpu.training.trainable import Trained


class TrainState(flax.struct.PyTreeNode):
  """Everything in a checkpoint of the model.

  Attributes:
    step: int32 scalar, updates so far.
    params: tree of float32 parameters; layers are stacked on a leading `layers` axis.
    opt_state: the optimizer's tree, for the trained parameters.
  """

  step: jax.Array
  params: Any
  opt_state: Any


def new_state(
  params: Any, optimizer: Any, names: Any, *, trained: Trained = Trained()
) -> TrainState:
  """Returns the state before the first step."""
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(trained.split(params)[0], trained.split(names)[0]),
  )


def state_names(
  params: Any, optimizer: Any, names: Any, *, trained: Trained = Trained()
) -> TrainState:
  """Returns a TrainState of AxisNames; `params` may be abstract."""
  return TrainState(
    step=AxisNames(()),
    params=names,
    opt_state=optimizer.state_names(trained.split(params)[0], trained.split(names)[0]),
  )
