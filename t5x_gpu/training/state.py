"""The state that a step changes: step count, parameters, optimizer state, history of FP8 scales.

`Trained` splits off frozen parameters, `Fp8History` implements delayed scaling, and `RunForm` is
the form of a state in memory: padded where `fsdp` does not divide an array.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Optional

import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp

from t5x_gpu.errors import ModelError
from t5x_gpu.layers.fp8 import Operand
from t5x_gpu.models.model import Model, config_of, fp8_scaling_of
from t5x_gpu.models.precision import amaxes_like
from t5x_gpu.partitioning import fsdp
from t5x_gpu.partitioning.axis_rules import AxisNames
from t5x_gpu.partitioning.layer_stacks import ONLY, layers_of
from t5x_gpu.partitioning.layout import Layout
from t5x_gpu.partitioning.region import Region
from t5x_gpu.partitioning.trees import OptState, ParamNames, Params, Tree
from t5x_gpu.training.optimizers import Optimizer
from t5x_gpu.training.spikes import SpikeConfig

# Largest values of activations, kernels and gradients in the first step. A guess that is 2^10 times
# too large costs no precision, because 8-bit values have exponents; a guess too small clips.
_FIRST = (32.0, 4.0, 64.0)


@dataclasses.dataclass(frozen=True)
class Fp8History:
  """Delayed scaling: the largest values of recent steps, [layers, Operand, length] per kernel.

  Every matmul in FP8 has a history. It is part of the state but not of the parameters, so the
  optimizer, clipping, weight decay and the averaging of checkpoints ignore it. In a step the model
  gets one number per operand (`Quantized.amax`), and the "gradient" of this number is the largest
  value of the step: the maximum, not the sum, over microbatches and devices.
  Source: Micikevicius et al. 2022 (FP8 formats for deep learning); NVIDIA Transformer Engine,
  `recipe.DelayedScaling` with amax_compute_algo='max'.

  Histories are stored in a tree as 'layers/mlp/wo/amax', like the kernel's path. 0 stands for a
  step without a value.

  Attributes:
    length: number of steps.
    margin: scales leave room for values 2^margin times as large.
    stacks: names of the model's stacks.
  """

  length: int
  margin: int = 0
  stacks: tuple[str, ...] = (ONLY,)

  def new(self, params: Params) -> Tree:
    """Returns the history before the first step."""

    def zeros(kernel: jax.Array) -> jax.Array:
      return jnp.zeros((kernel.shape[0], len(Operand), self.length), jnp.float32)

    history: dict[str, Any] = {}
    for stack in self.stacks:
      layers = {'layers': amaxes_like(layers_of(params, stack), zeros)}
      history |= layers if stack == ONLY else {stack: layers}
    return history

  def amaxes(self, history: Tree) -> Tree:
    """Returns the values that set the scales of this step, [layers, Operand] for each kernel."""

    def amax(values: jax.Array) -> jax.Array:
      largest = jnp.max(values, axis=-1)
      return jnp.where(largest == 0, jnp.asarray(_FIRST), largest) * 2.0**self.margin

    return jax.tree.map(amax, history)

  def after(self, history: Tree, seen: Tree) -> Tree:
    """Returns the history with this step's largest values in place of the oldest ones."""
    return jax.tree.map(
      lambda values, new: jnp.concatenate([new[..., None], values[..., :-1]], axis=-1),
      history,
      seen,
    )


def history_of(model: Model, region: Optional[Region] = None) -> Optional[Fp8History]:
  """Returns the history of a model with delayed scaling; None for others.

  Raises:
    ModelError: `region`, the step's region, is a pipeline.
  """
  if fp8_scaling_of(model) != 'delayed':
    return None
  if region is not None and region.pipeline is not None:
    raise ModelError(
      "TransformerConfig.fp8_scaling = 'delayed' does not work in a pipeline: its backward pass "
      'sums over microbatches, but delayed scaling needs their maximum.',
      fix="Set TransformerConfig.fp8_scaling = 'current', or Partitioner.stage = 1.",
      parameters=('TransformerConfig.fp8_scaling', 'Partitioner.stage'),
      docs='precision.md#delayed-scaling',
    )
  config = config_of(model)
  return Fp8History(config.fp8_history, config.fp8_margin, tuple(model.stacks))


def with_kernel_amaxes(params: Params, amaxes: Tree) -> Params:
  """Returns `params` with the arrays of `amaxes` next to the kernels."""
  result = copy.copy(params)
  for name, inner in amaxes.items():
    result[name] = with_kernel_amaxes(params[name], inner) if isinstance(inner, Mapping) else inner
  return result


@dataclasses.dataclass(frozen=True)
class Trained:
  """Which parameters are trained.

  Frozen parameters have no gradient, optimizer state, update or weight decay. A model with a method
  `is_trained(path)`, such as LoraModel, chooses; other models train all parameters.

  Attributes:
    is_trained: predicate on the '/'-joined path of a parameter; None trains everything.
  """

  is_trained: Optional[Callable[[str], bool]] = None

  def split(self, tree: Tree) -> tuple[Tree, Tree]:
    """Returns (trained, frozen) leaves of a tree with one leaf per parameter."""
    if self.is_trained is None:
      return tree, {}
    trained, frozen = {}, {}
    for path, leaf in flax.traverse_util.flatten_dict(tree).items():
      (trained if self.is_trained('/'.join(path)) else frozen)[path] = leaf
    return (flax.traverse_util.unflatten_dict(trained), flax.traverse_util.unflatten_dict(frozen))

  def join(self, trained: Tree, frozen: Tree) -> Tree:
    """Returns the tree with both parts, the inverse of `split`."""
    if self.is_trained is None:
      return trained
    return flax.traverse_util.unflatten_dict(
      {**flax.traverse_util.flatten_dict(trained), **flax.traverse_util.flatten_dict(frozen)}
    )


def trained_of(model: Model) -> Trained:
  """Returns the trained parameters of a model."""
  return Trained(model.is_trained)


class TrainState(flax.struct.PyTreeNode):
  """Everything in a checkpoint of the model.

  Attributes:
    step: int32 scalar, updates so far.
    params: tree of float32 parameters; layers are stacked on a leading `layers` axis.
    opt_state: the optimizer's tree, for the trained parameters.
    fp8_history: largest values of earlier steps (training/state.py); empty if not used.
    grad_norms: gradient norms of recent steps, for training/spikes.py; None if not used. A
      checkpoint stores them in its manifest.
  """

  step: jax.Array
  params: Params
  opt_state: OptState
  fp8_history: Tree = flax.struct.field(default_factory=dict)
  grad_norms: Optional[jax.Array] = None

  def saved(self) -> dict[str, Any]:
    """Returns field -> tree as checkpoints store it: no `grad_norms`, no empty `fp8_history`."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    del fields['grad_norms']
    return {name: tree for name, tree in fields.items() if name != 'fp8_history' or tree}


def new_state(
  params: Params,
  optimizer: Optimizer,
  names: ParamNames,
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
  params: Params,
  optimizer: Optimizer,
  names: ParamNames,
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
    fp8_history=jax.tree.map(lambda _: AxisNames((None, None, None)), abstract),  # unsplit
  )


@dataclasses.dataclass(frozen=True)
class RunForm:
  """The form of a state between the steps of a run: arrays may have padding (`fsdp.Padding`).

  Models, optimizers and checkpoints see the true shapes. `padded` and `unpadded` are for traced
  functions.

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
    costs = fsdp.cost_lines(
      self.abstract(shapes).replace(grad_norms=None),
      self.abstract_saved(shapes),
      self.names,
      ways=self.layout.mesh.shape['fsdp'],
    )
    return dataclasses.replace(self.layout, notes=(*self.layout.notes, *costs))
