"""The state as a run stores it between steps: padded where `fsdp` does not divide an array."""

import dataclasses

import jax

from t5x_gpu.partitioning.arrays import fsdp_dims
from t5x_gpu.partitioning.layout import Layout
from t5x_gpu.training.guards.spikes import SpikeConfig
from t5x_gpu.training.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class StoredState:
  """Adds and removes the padding of a state (arrays/fsdp_dims.py), inside a traced function.

  Attributes:
    layout: mesh and rules.
    names: TrainState of AxisNames from `Layout.chosen`.
    spikes: whether the state has a history of gradient norms.
  """

  layout: Layout
  names: TrainState
  spikes: SpikeConfig = SpikeConfig()

  def first(self, state: TrainState) -> TrainState:
    """Returns the first state, padded as the run stores it."""
    return self.padded(state).replace(grad_norms=self.spikes.no_norms())

  def padded(self, state: TrainState) -> TrainState:
    """Returns a state with padding."""
    layout, names = self.layout, self.names
    return state.replace(
      params=layout.padded(state.params, names.params, layout.rules.parameters),
      opt_state=layout.padded(state.opt_state, names.opt_state, layout.rules.state),
    )

  def unpadded(self, state: TrainState) -> TrainState:
    """Returns a stored state in its true shapes."""
    layout, names = self.layout, self.names
    return state.replace(
      params=layout.unpadded(state.params, names.params, layout.rules.parameters),
      opt_state=layout.unpadded(state.opt_state, names.opt_state, layout.rules.state),
    )

  def abstract(self, shapes: TrainState) -> TrainState:
    """Returns shapes with shardings of a state as the run stores it."""
    layout, names = self.layout, self.names
    step = jax.ShapeDtypeStruct(shapes.step.shape, shapes.step.dtype, sharding=layout.replicated)
    return TrainState(
      step=step,
      params=layout.stored(shapes.params, names.params),
      opt_state=layout.stored(shapes.opt_state, names.opt_state, layout.rules.state),
      fp8_history=layout.stored(shapes.fp8_history, names.fp8_history),
      grad_norms=self.spikes.abstract_norms(layout.replicated),
    )

  def abstract_saved(self, shapes: TrainState) -> TrainState:
    """Returns shapes with shardings of a state as checkpoints store it, without padding."""
    layout, names = self.layout, self.names
    shardings = TrainState(
      step=layout.replicated,
      params=layout.shardings(shapes.params, names.params),
      opt_state=layout.shardings(shapes.opt_state, names.opt_state, layout.rules.state),
      fp8_history=layout.shardings(shapes.fp8_history, names.fp8_history),
    )
    return jax.tree.map(
      lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings
    )

  def with_costs(self, shapes: TrainState) -> Layout:
    """Returns the layout, with notes on the cost of arrays that `fsdp` does not divide."""
    costs = fsdp_dims.cost_lines(
      self.abstract(shapes).replace(grad_norms=None),
      self.abstract_saved(shapes),
      self.names,
      ways=self.layout.mesh.shape['fsdp'],
    )
    return dataclasses.replace(self.layout, notes=(*self.layout.notes, *costs))
