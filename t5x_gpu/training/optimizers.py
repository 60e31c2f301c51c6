"""The optimizer interface, and AdamW.

An optimizer gets the learning rate of each step, so the logged rate is the one that was used, and
axis names, so its state is split over the mesh like the parameters.
"""

import dataclasses
from typing import Any, Protocol

import jax
import optax

from t5x_gpu.partitioning.axis_rules import AxisNames

Params = Any
OptState = Any


class Optimizer(Protocol):
  """Parameters and gradients in, new parameters and state out. `names` is a tree of AxisNames."""

  def init(self, params: Params, names: Any) -> OptState:
    """Returns the state before the first step."""

  def update(
    self,
    grads: Params,
    state: OptState,
    params: Params,
    *,
    names: Any,
    learning_rate: jax.Array,
    step: jax.Array,
  ) -> tuple[Params, OptState]:
    """Returns (new parameters, new state). `step` counts from 0."""

  def state_names(self, params: Params, names: Any) -> Any:
    """Returns the state's tree with an AxisNames for each array; `params` may be abstract."""


@dataclasses.dataclass(frozen=True)
class AdamW:
  """Adam with decoupled weight decay.

  Attributes:
    b1, b2: decay of the first and second moment.
    eps: added to the root of the second moment.
    weight_decay: times the learning rate, per step; for matrices, not for norm scales or biases.
  Source: Loshchilov and Hutter 2019, algorithm 2; the arithmetic is optax's.
  """

  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.0

  def _transformation(self, names: Any) -> optax.GradientTransformation:
    decays = jax.tree_util.tree_map_with_path(_decays, names)
    return optax.chain(
      optax.scale_by_adam(self.b1, self.b2, self.eps),
      optax.add_decayed_weights(self.weight_decay, mask=decays),
    )

  def init(self, params: Params, names: Any) -> OptState:
    return self._transformation(names).init(params)

  def update(
    self,
    grads: Params,
    state: OptState,
    params: Params,
    *,
    names: Any,
    learning_rate: jax.Array,
    step: jax.Array,
  ) -> tuple[Params, OptState]:
    del step  # optax counts its own
    updates, state = self._transformation(names).update(grads, state, params)
    return jax.tree.map(lambda p, u: p - learning_rate * u, params, updates), state

  def state_names(self, params: Params, names: Any) -> Any:
    transformation = self._transformation(names)
    state = jax.eval_shape(transformation.init, params)
    return optax.tree_map_params(
      transformation,
      lambda _, n: n,
      state,
      names,
      transform_non_params=lambda x: AxisNames((None,) * x.ndim),
    )


def _decays(path: Any, names: AxisNames) -> bool:
  """Returns whether a parameter is a matrix; biases of heads have two axes too."""
  return path[-1].key != 'bias' and len([x for x in names.names if x != 'layers']) >= 2
