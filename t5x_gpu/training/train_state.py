"""What a step changes: the step count, the parameters, the optimizer state."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.partitioning.axis_rules import AxisNames


class TrainState(flax.struct.PyTreeNode):
  """Everything that a checkpoint of the model holds.

  Attributes:
    step: int32 scalar, updates done so far.
    params: tree of float32 parameters; layers are stacked on a leading `layers` axis.
    opt_state: the optimizer's own tree.
  """
  step: jax.Array
  params: Any
  opt_state: Any


def new_state(params: Any, optimizer: Any, names: Any) -> TrainState:
  """Returns the state before the first step."""
  return TrainState(step=jnp.zeros((), jnp.int32), params=params,
                    opt_state=optimizer.init(params, names))


def state_names(params: Any, optimizer: Any, names: Any) -> TrainState:
  """Returns a TrainState of AxisNames; `params` may be abstract."""
  return TrainState(step=AxisNames(()), params=names,
                    opt_state=optimizer.state_names(params, names))
