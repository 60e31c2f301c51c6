"""Where two runs begin to differ: the first layer, found by switching layers off.

One mistake in a forward pass changes every activation after it, hence every gradient: the list of
gradients that differ does not say where it is. But a residual layer whose parameters are all zero
passes its input on unchanged. So the later layers are switched off, on both sides alike, as far as
the two runs agree; the next layer has the mistake, and its modules are switched off in turn. The
compiled steps are those of the comparison: nothing is compiled for it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from t5x_gpu.data.batches import Batch
from t5x_gpu.training.compare import Difference, Leaf, leaves
from t5x_gpu.training.train_state import TrainState
from t5x_gpu.training.two_runs import TwoRuns


@dataclasses.dataclass(frozen=True)
class Found:
  """The first divergence.

  Attributes:
    name: 'layers/2/mlp/wo/kernel': the array in the first layer that differs, and its module that
      is to blame, whose gradient differs most.
    error: of its gradient, relative.
    how: sentences that say how it was found.
  """
  name: str
  error: float
  how: str


# (array, layer of it) -> whether its parameters stay as they are.
_IsOn = Callable[[Leaf, int], bool]
# Stack and number of a layer.
_Place = tuple[tuple[str, ...], int]


def find_layer(runs: TwoRuns, state: TrainState, batch: Batch, *, gradient: list[Difference],
               limits: Mapping[Leaf, float]) -> Found:
  """Returns where the gradients of `runs` begin to differ.

  Args:
    runs: two runs whose gradients differ.
    state, batch: before the step where they do.
    gradient: the differences there.
    limits: array -> up to which its gradients agree.
  """
  all_leaves = leaves(runs.names.params, state.params)
  places = _forward_order(all_leaves)

  def failing(is_on: _IsOn) -> tuple[list[Difference], Any]:
    params = _switched(state.params, all_leaves, is_on)
    _, one, found = runs.gradient(state.replace(params=params), batch)
    # What is off has a gradient all the same, but no say.
    found = [dataclasses.replace(d, by_layer=tuple(
        error if is_on(d.leaf, layer) else 0.0 for layer, error in enumerate(d.by_layer)))
             for d in found]
    return [d for d in found if d.worst > limits[d.leaf]], one.unclipped

  def first_layers_on(count: int) -> _IsOn:
    on = set(places[:count])
    return lambda leaf, layer: leaf.layers_axis is None or (leaf.stack, layer) in on

  worst = max(gradient, key=lambda d: d.worst / limits[d.leaf])
  without, unclipped = failing(first_layers_on(0)) if places else ([], None)
  if not places or not _signal_passes(all_leaves, unclipped):
    return Found(worst.name, worst.worst,
                 'The model has no layers that can be switched off, so this is the array that '
                 'differs most; the mistake may be elsewhere.')
  if without:
    outside = max(without, key=lambda d: d.worst / limits[d.leaf])
    also = [d.name for d in without if d is not outside]
    return Found(outside.name, outside.worst,
                 'The gradients differ even with all layers switched off'
                 + (f', as do those of {", ".join(also)}' if also else '')
                 + ': look at embedding, head and loss.')
  agree, differ = 0, len(places)
  while differ - agree > 1:
    middle = (agree + differ) // 2
    agree, differ = ((agree, middle) if failing(first_layers_on(middle))[0] else (middle, differ))
  place = places[differ - 1]
  found, _ = failing(first_layers_on(differ))

  def heals(module: str) -> bool:
    before = first_layers_on(differ)
    return not failing(lambda leaf, layer: before(leaf, layer) and not (
        (leaf.stack, layer) == place and leaf.module == module))[0]
  healing = [module for module in _modules(all_leaves, state.params, place) if heals(module)]
  return _name(gradient, found or gradient, place, healing, limits)


def _forward_order(all_leaves: list[Leaf]) -> list[_Place]:
  """Returns the layers of all stacks; an encoder's are before a decoder's."""
  places = {(leaf.stack, layer) for leaf in all_leaves if leaf.layers_axis is not None
            for layer in range(leaf.num_layers)}
  return sorted(places, key=lambda place: ('decoder' in '/'.join(place[0]), place))


def _switched(params: Any, all_leaves: list[Leaf], is_on: _IsOn) -> Any:
  """Returns copies of the parameters in which those that are off are zero."""
  flat, structure = jax.tree.flatten(params)
  result = []
  for leaf, x in zip(all_leaves, flat, strict=True):
    x = np.array(x)
    for layer in range(leaf.num_layers):
      if not is_on(leaf, layer):
        index = (slice(None),) * (leaf.layers_axis or 0) + (layer,)
        x[index if leaf.layers_axis is not None else ...] = 0
    result.append(x)
  return jax.tree.unflatten(structure, result)


def _signal_passes(all_leaves: list[Leaf], gradient: Any) -> bool:
  """Returns whether the model still computes something with all layers off.

  Where a norm follows the residual sum, a norm of zeros ends everything.
  """
  outside = [g for leaf, g in zip(all_leaves, jax.tree.leaves(gradient), strict=True)
             if leaf.layers_axis is None]
  return bool(outside) and bool(np.any(max(outside, key=np.size)))


def _modules(all_leaves: list[Leaf], params: Any, place: _Place) -> list[str]:
  """Returns the modules of a layer, those with most parameters first; none if there is but one."""
  sizes: dict[str, int] = {}
  for leaf, x in zip(all_leaves, jax.tree.leaves(params), strict=True):
    if leaf.stack == place[0]:
      sizes[leaf.module] = sizes.get(leaf.module, 0) + x.size
  return sorted(sizes, key=lambda module: -sizes[module]) if len(sizes) > 1 else []


def _name(gradient: list[Difference], found: list[Difference], place: _Place,
          healing: list[str], limits: Mapping[Leaf, float]) -> Found:
  """Returns the array of `place` to name, with its error in the whole model."""
  stack, layer = place
  here = [d for d in found if d.leaf.stack == stack and d.by_layer[layer] > limits[d.leaf]]
  chosen = max([d for d in here if d.leaf.module in healing[:1]] or here or found,
               key=lambda d: d.by_layer[layer] if d in here else d.worst)
  where = '/'.join([*stack, str(layer)])
  how = (f'With the layers from {where} on switched off the gradients agree; with {where} '
         'they do not.')
  if healing:
    how += f' Without {" or ".join(healing)} of {where} they agree.'
  at = layer if chosen in here else chosen.worst_layer
  whole = next(d for d in gradient if d.leaf == chosen.leaf)
  return Found(whole.leaf.name(at), whole.by_layer[at or 0], how)
