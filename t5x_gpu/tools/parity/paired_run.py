"""The same training steps on a mesh and on one device, and their differences.

At every step one device starts from the mesh's state, so rounding does not accumulate and each step
is compared separately; by induction the whole runs are then equal. A step is compared in three
parts: the output of every layer and its gradient; the gradients of the parameters, which the
optimizer `Recording` stores; the update. For the update, one device's optimizer gets the *mesh's*
gradient: Adam turns the rounding of a tiny gradient into a full step, which a comparison of
independent updates would report.
"""

import dataclasses
from collections.abc import Mapping
from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.data.batches import Batch
from t5x_gpu.partitioning.context_parallel import length_order
from t5x_gpu.tools.parity.compare import (
  ArrayDifference,
  LayerDifference,
  Leaf,
  differences,
  layer_differences,
  update_differences,
)
from t5x_gpu.tools.parity.layer_outputs import LayerOutputs, Tree, has_layers, make_layer_outputs
from t5x_gpu.training.optimizers import Optimizer
from t5x_gpu.training.program import Program
from t5x_gpu.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class StepResult:
  """The result of one step, on the host.

  Attributes:
    state: state after the step, with the inner optimizer's `opt_state`.
    metrics: name -> sum / weight.
    weights: name -> weight.
    gradient: the optimizer's input.
    unclipped: the gradient before clipping by the global norm.
  """

  state: TrainState
  metrics: Mapping[str, float]
  weights: Mapping[str, float]
  gradient: Tree
  unclipped: Tree


class RecordedRun:
  """Training steps of a program with states on the host, where layers are in the model's order.

  Args:
    program: built with `Recording` around its optimizer.
    compiler_options: XLA options of the step.
    layers: also run the model layer by layer, if it can be.
  """

  def __init__(
    self,
    program: Program,
    *,
    compiler_options: Optional[Mapping[str, str | bool | int]] = None,
    layers: bool = True,
  ):
    self.program, config = program, program.config
    self._max_grad_norm = config.max_grad_norm
    options = None if compiler_options is None else dict(compiler_options)
    state, batch = program.abstract_state, program.abstract_batch
    self._init = program.init.lower().compile(compiler_options=options)
    self._step = program.train_step.lower(state, batch).compile(compiler_options=options)
    self._layers = None
    if layers and has_layers(config.model, state.params):
      function = make_layer_outputs(
        model=config.model,
        region=program.layout.region,
        names=program.names.params,
        seed=config.random_seed,
      )
      self._layers = (
        program.layout.jit(function)
        .lower(state.params, batch, state.step)
        .compile(compiler_options=options)
      )

  def init(self) -> TrainState:
    """Returns the state before the first step."""
    return _without_recording(self._from_mesh(self._init()))

  def step(self, state: TrainState, batch: Batch) -> StepResult:
    """Returns the result of one step from `state`, which is not changed."""
    abstract = self.program.abstract_state
    zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), abstract.opt_state.gradient)
    recorded = state.replace(
      opt_state=abstract.opt_state.replace(optimizer=state.opt_state, gradient=zeros)
    )
    new, sums = self._step(
      self._to_mesh(recorded, abstract, self.program.names), self.program.put_batch(batch)
    )
    new, sums = self._from_mesh(new), _to_host(sums)
    metrics = {name: float(np.divide(*pair)) for name, pair in sums.items()}
    gradient = new.opt_state.gradient
    return StepResult(
      _without_recording(new),
      metrics,
      {name: float(weight) for name, (_, weight) in sums.items()},
      gradient,
      self._unclip(gradient, metrics['grad_norm']),
    )

  def layers(self, state: TrainState, batch: Batch) -> Optional[LayerOutputs]:
    """Returns the output of every layer for `batch`; None for a model without layers."""
    if self._layers is None:
      return None
    abstract, names = self.program.abstract_state, self.program.names
    ways, rows = self.program.layout.mesh.shape['context'], self.program.spec.batch_size
    found = _to_host(
      self._layers(
        self._to_mesh(state.params, abstract.params, names.params),
        self.program.put_batch(batch),
        self._to_mesh(state.step, abstract.step, names.step),
      )
    )

    def in_order(x: np.ndarray) -> np.ndarray:
      x = x[:, :rows]  # without rows that fill the batch
      return x if ways == 1 else np.take(x, np.argsort(length_order(x.shape[2], ways)), axis=2)

    return found.replace(
      outputs=jax.tree.map(in_order, found.outputs),
      gradients=jax.tree.map(in_order, found.gradients),
    )

  def _to_mesh(self, tree: Tree, abstract: Tree, names: Tree) -> Tree:
    """Returns a copy on the mesh: the step donates its argument."""
    tree = self.program.layout.in_run_order(tree, names)
    return jax.tree.map(
      lambda x, a: jax.device_put(_in_shape(x, a.shape), a.sharding), tree, abstract
    )

  def _from_mesh(self, state: TrainState) -> TrainState:
    state = self.program.layout.in_model_order(_to_host(state), self.program.names)
    return jax.tree.map(lambda x, a: _in_shape(x, a.shape), state, self.program.abstract_saved)

  def _unclip(self, gradient: Tree, norm: float) -> Tree:
    if self._max_grad_norm is None or not norm > self._max_grad_norm:
      return gradient
    return jax.tree.map(lambda g: g * np.float32(norm / self._max_grad_norm), gradient)


def _to_host(tree: Tree) -> Tree:
  """Returns a copy on the host: a view would change when the device reuses its memory."""
  return jax.tree.map(np.array, jax.device_get(tree))


def _in_shape(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Returns a copy of `x` with the padding of a stored array, or without it."""
  kept = x[tuple(slice(0, n) for n in shape)]
  out = np.zeros(shape, x.dtype)
  out[tuple(slice(0, n) for n in kept.shape)] = kept
  return out


def _without_recording(state: TrainState) -> TrainState:
  return state.replace(opt_state=state.opt_state.optimizer)


@dataclasses.dataclass(frozen=True)
class StepDifferences:
  """Relative differences in one step (see compare.py).

  Attributes:
    step: counted from 1.
    mesh, one: metrics on the mesh and on one device.
    layers: outputs of the layers in order of the forward pass, then the head's loss; empty for a
      model without layers.
    metrics: name -> relative difference, of `JUDGED_METRICS` and the weight of the loss.
    gradient: gradients of the parameters, before clipping.
    update: parameters after the update, for equal inputs of the optimizer.
    optimizer_state: optimizer state after the update, for equal inputs.
    drift: parameters of two runs that are independent from the start.
  """

  step: int
  mesh: Mapping[str, float]
  one: Mapping[str, float]
  layers: list[LayerDifference]
  metrics: Mapping[str, float]
  gradient: list[ArrayDifference]
  update: list[ArrayDifference]
  optimizer_state: list[ArrayDifference]
  drift: list[ArrayDifference]


# Other metrics may jump: rounding can flip the prediction of a token, which changes the accuracy.
JUDGED_METRICS = ('loss', 'grad_norm', 'learning_rate')
# Number of random draws: in a single draw, a gradient of a few numbers may hardly change by chance.
ROUNDING_DRAWS = 4


@dataclasses.dataclass(frozen=True)
class Rounding:
  """Relative changes on one device when every parameter moves by one ulp.

  Attributes:
    gradient: array -> change of its gradient.
    layers: changes of the outputs of all layers and of the head's loss, in forward order, then of
      the gradients of these outputs, in backward order.
  """

  gradient: Mapping[Leaf, float]
  layers: list[float]


class TwoRuns:
  """A run on a mesh and the same run on one device.

  Args:
    mesh, one: runs of the same model, optimizer, schedule and seed.
  """

  def __init__(self, mesh: RecordedRun, one: RecordedRun):
    self.mesh, self.one = mesh, one
    optimizer, schedule = one.program.config.optimizer.optimizer, one.program.config.learning_rate
    self.names = dataclasses.replace(
      one.program.names, opt_state=one.program.names.opt_state.optimizer
    )
    trained = one.program.trained
    self._gradient_names, _ = trained.split(self.names.params)

    def update(state: TrainState, gradient: Tree) -> tuple[Tree, Tree]:
      params, frozen = trained.split(state.params)
      params, opt_state = optimizer.update(
        gradient,
        state.opt_state,
        params,
        names=self._gradient_names,
        step=state.step,
        learning_rate=jnp.asarray(schedule(state.step), jnp.float32),
      )
      return trained.join(params, frozen), opt_state

    self._update = one.program.layout.jit(update)

  def init(self) -> tuple[TrainState, list[ArrayDifference]]:
    """Returns the mesh's state before the first step, and differences of the initial parameters."""
    state = self.mesh.init()
    return state, differences(state.params, self.one.init().params, names=self.names.params)

  def rounding(self, state: TrainState, batch: Batch) -> Rounding:
    """Returns the effect of rounding the parameters on one device.

    Two correct runs may differ by this much, for example in a gradient that is zero except for
    rounding, such as the gradient of a bias of attention keys.
    """
    random = np.random.default_rng(0)

    def moved(x: np.ndarray) -> np.ndarray:
      up = random.random(x.shape) < 0.5
      return np.nextafter(x, np.where(up, np.inf, -np.inf).astype(x.dtype))

    was, was_layers = self.one.step(state, batch), self.one.layers(state, batch)
    gradient: dict[Leaf, float] = {}
    layers = []
    for _ in range(ROUNDING_DRAWS):
      moved_state = state.replace(params=jax.tree.map(moved, state.params))
      now = self.one.step(moved_state, batch)
      for d in differences(now.unclipped, was.unclipped, names=self._gradient_names):
        gradient[d.leaf] = max(gradient.get(d.leaf, 0.0), d.worst)
      found = layer_differences(self.one.layers(moved_state, batch), was_layers)
      layers.append([d.output for d in found] + [d.gradient for d in found[-2::-1]])
    return Rounding(gradient, [max(errors) for errors in zip(*layers)])

  def step(
    self, number: int, state: TrainState, alone: TrainState, batch: Batch
  ) -> tuple[StepDifferences, TrainState, TrainState]:
    """Returns the differences in a step, and the next states of the mesh and of one device.

    Args:
      number: number of the step, from 1.
      state: the mesh's state before the step.
      alone: state of a run on one device that is independent of the mesh.
      batch: batch for all three runs.
    """
    mesh, one = self.mesh.step(state, batch), self.one.step(state, batch)
    params, opt_state = _to_host(self._update(state, mesh.gradient))
    alone = self.one.step(alone, batch).state
    metrics = {name: _relative(mesh.metrics[name], one.metrics[name]) for name in JUDGED_METRICS}
    metrics['loss weight'] = _relative(mesh.weights['loss'], one.weights['loss'])
    return (
      StepDifferences(
        step=number,
        mesh=mesh.metrics,
        one=one.metrics,
        metrics=metrics,
        layers=layer_differences(self.mesh.layers(state, batch), self.one.layers(state, batch)),
        gradient=differences(mesh.unclipped, one.unclipped, names=self._gradient_names),
        update=update_differences(mesh.state.params, params, state.params, names=self.names.params),
        optimizer_state=differences(mesh.state.opt_state, opt_state, names=self.names.opt_state),
        drift=differences(mesh.state.params, alone.params, names=self.names.params),
      ),
      mesh.state,
      alone,
    )


def _relative(got: float, want: float) -> float:
  if got == want:
    return 0.0
  difference = abs(got - want)
  return difference / abs(want) if np.isfinite(difference) and want else float('inf')


class RecordedState(flax.struct.PyTreeNode):
  """State of `Recording`: the inner optimizer's state, and the gradient of the last update."""

  optimizer: Tree
  gradient: Tree


@dataclasses.dataclass(frozen=True)
class Recording:
  """Updates like `optimizer`, and stores the gradient, split like the parameters.

  The stored gradient is the optimizer's input: divided by the loss's weight, and clipped if the
  step clips.
  """

  optimizer: Optimizer

  def init(self, params: Tree, names: Tree) -> RecordedState:
    return RecordedState(self.optimizer.init(params, names), jax.tree.map(jnp.zeros_like, params))

  def update(
    self,
    grads: Tree,
    state: RecordedState,
    params: Tree,
    *,
    names: Tree,
    learning_rate: jax.Array,
    step: jax.Array,
  ) -> tuple[Tree, RecordedState]:
    params, inner = self.optimizer.update(
      grads, state.optimizer, params, names=names, learning_rate=learning_rate, step=step
    )
    return params, RecordedState(inner, grads)

  def state_names(self, params: Tree, names: Tree) -> RecordedState:
    return RecordedState(self.optimizer.state_names(params, names), names)
