"""The state that a step changes: step count, parameters and optimizer state."""

import dataclasses
from typing import Any, Optional

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.partitioning.axis_rules import AxisNames
from t5x_gpu.training.fp8_history import Fp8History, history_names
from t5x_gpu.training.optimizers import Optimizer
from t5x_gpu.training.trainable import Trained


class TrainState(flax.struct.PyTreeNode):
  """Everything in a checkpoint of the model.

  Attributes:
    step: int32 scalar, updates so far.
    params: tree of float32 parameters; layers are stacked on a leading `layers` axis.
    opt_state: the optimizer's tree, for the trained parameters.
    fp8_history: largest values of earlier steps (training/fp8_history.py); empty if not used.
    grad_norms: gradient norms of recent steps, for guards/spikes.py; None if not used. A checkpoint
      stores them in its manifest.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  fp8_history: Any = flax.struct.field(default_factory=dict)
  grad_norms: Any = None

  def saved(self) -> dict[str, Any]:
    """Returns field -> tree as checkpoints store it: no `grad_norms`, no empty `fp8_history`."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    del fields['grad_norms']
    return {name: tree for name, tree in fields.items() if name != 'fp8_history' or tree}


def new_state(
  params: Any,
  optimizer: Optimizer,
  names: Any,
  *,
  trained: Trained = Trained(),
  history: Optional[Fp8History] = None,
) -> TrainState:
  """Returns the state before the first step."""
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(trained.split(params)[0], trained.split(names)[0]),
    fp8_history={} if history is None else history.new(params),
  )


def state_names(
  params: Any,
  optimizer: Optimizer,
  names: Any,
  *,
  trained: Trained = Trained(),
  history: Optional[Fp8History] = None,
) -> TrainState:
  """Returns a TrainState of AxisNames; `params` may be abstract."""
  abstract = {} if history is None else jax.eval_shape(history.new, params)
  return TrainState(
    step=AxisNames(()),
    params=names,
    opt_state=optimizer.state_names(trained.split(params)[0], trained.split(names)[0]),
    fp8_history=history_names(abstract),
  )
