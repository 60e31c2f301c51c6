"""A forward and a backward pass that keep the output of every layer, and its gradient.

To find where two runs diverge, the model runs in the same region with the same splits, one layer at
a time. The rows of all microbatches run together. In a pipeline there is no schedule: the stage
that holds a layer runs it and sends the result to all others. Microbatches and schedules do not
change what a layer computes; the gradients of the training step show whether they are correct.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from t5x_gpu.models.losses import Sums
from t5x_gpu.models.model import Model, Params, compute_dtype, is_layered
from t5x_gpu.partitioning import pipeline as pipeline_lib
from t5x_gpu.partitioning.layer_stacks import (
  ONLY,
  layers_of,
  num_layers,
  prefix_of,
  run_layers,
  with_layers,
)
from t5x_gpu.partitioning.region import Region

Batch = Mapping[str, jax.Array]
Tree = Any  # arrays of a model, or their AxisNames, in nested dictionaries
# (number, stage, index in the stage) of a layer: numbers, or arrays [layers] for all layers.
Place = tuple[jax.Array, jax.Array, jax.Array]


class LayerOutputs(flax.struct.PyTreeNode):
  """Outputs of all layers of a model.

  Attributes:
    outputs: [1 + layers, batch, length, ...], the output of `embed` and of each layer, stack after
      stack.
    gradients: gradients of the summed loss with respect to `outputs`.
    sums: sums of the head.
    layers: names of the layers: 'layers/0', or 'encoder/layers/0' with several stacks.
  """

  outputs: Tree
  gradients: Tree
  sums: Sums
  layers: tuple[str, ...] = flax.struct.field(pytree_node=False)


def has_layers(model: Model, params: Params) -> bool:
  """Returns whether `model` can be run layer by layer."""
  return is_layered(model) and all(
    'layers' in (params if stack == ONLY else params.get(stack, {})) for stack in model.stacks
  )


def make_layer_outputs(
  *, model: Model, region: Region, names: Tree, seed: int
) -> Callable[[Params, Batch, jax.Array], LayerOutputs]:
  """Returns the function (params, batch, step) -> LayerOutputs of global arrays.

  Args:
    model: a model for which `has_layers` is true.
    region: how a step is split.
    names: tree of AxisNames of the parameters.
    seed: seed of dropout, as in `make_train_step`.
  """
  stacks = tuple(model.stacks)

  def local(
    kept: Params, batch: Batch, dropout_key: jax.Array, places: tuple[Place, ...]
  ) -> tuple[Tree, Tree, Sums]:
    params = (
      region.parameters(kept, kept, names)
      if region.pipeline is None
      else region.gathered(kept, names, compute_dtype(model))
    )
    return _LayerByLayer(model, region, params, batch, dropout_key).outputs(places)

  def layer_outputs(params: Params, batch: Batch, step: jax.Array) -> LayerOutputs:
    batch = region.with_rows(batch)
    counts = {stack: num_layers(params, stack) for stack in stacks}
    places = tuple(_places(count, region) for count in counts.values())
    of_layers = PartitionSpec(None, *region.spec(('batch', 'length'), region.rules.activations))
    found = region.map(
      local,
      in_specs=(
        region.kept_specs(names),
        region.batch_specs(batch),
        PartitionSpec(),
        PartitionSpec(),
      ),
      out_specs=(of_layers, of_layers, PartitionSpec()),
    )(params, batch, jax.random.fold_in(jax.random.key(seed), step), places)
    return LayerOutputs(
      *found,
      layers=tuple(
        f'{prefix_of(stack)}/{i}' for stack, count in counts.items() for i in range(count)
      ),
    )

  return layer_outputs


@dataclasses.dataclass(frozen=True)
class _LayerByLayer:
  """Runs a model one layer at a time. A `place` is a layer's (number, stage, index in the stage).

  Attributes:
    model: the model.
    region: the region in which the methods are called.
    params: parameters as the model gets them in the region.
    batch: local rows.
    dropout_key: key of the step.
  """

  model: Model
  region: Region
  params: Params
  batch: Batch
  dropout_key: jax.Array

  def outputs(self, places: Sequence[Place]) -> tuple[Tree, Tree, Sums]:
    """Returns (outputs, gradients, sums) as in `LayerOutputs`.

    Args:
      places: a `place` with arrays [layers] for each stack.
    """
    stacks = tuple(self.model.stacks)
    embedded = self.model.embed(self.params, self.batch, dropout_key=self.dropout_key)
    x = self._from_stage(self._varying(embedded), 0)
    y, inputs, outputs = self._varying(x), [], [jax.tree.map(lambda x: x[None], x)]
    for stack, of_layers in zip(stacks, places, strict=True):
      y, (xs, ys) = jax.lax.scan(functools.partial(self._forward, stack), y, of_layers)
      inputs.append(xs)
      outputs.append(ys)
    dy, sums = jax.grad(self._loss, has_aux=True)(y)
    dy, sums = self._from_stage(dy, 0), self._from_stage(sums, 0)
    gradients, dy = [jax.tree.map(lambda dy: dy[None], dy)], self._varying(dy)
    for stack, xs, of_layers in reversed(list(zip(stacks, inputs, places))):
      backward = functools.partial(self._backward, stack)
      dy, dxs = jax.lax.scan(backward, dy, (xs, of_layers), reverse=True)
      gradients.insert(0, dxs)
    # Every stage computes the head, but only one result counts.
    others = tuple(a for a in self.region.axes if a != 'stage')
    return _joined(outputs), _joined(gradients), jax.lax.psum(sums, others) if others else sums

  def _run(self, stack: str, x: Tree, place: Place) -> Tree:
    """Returns `x` after one layer; valid only on the stage that holds the layer."""
    number, _, index = place
    layer = jax.tree.map(
      lambda w: jax.lax.dynamic_slice_in_dim(w, index, 1), layers_of(self.params, stack)
    )
    return self._varying(
      run_layers(
        self.model,
        with_layers(self.params, stack, layer),
        x,
        self.batch,
        stack=stack,
        dropout_key=self.dropout_key,
        first_layer=number,
      )
    )

  def _forward(self, stack: str, x: Tree, place: Place) -> tuple[Tree, Tree]:
    y = self._from_stage(self._run(stack, x, place), place[1])
    return self._varying(y), (x, y)

  def _loss(self, x: Tree) -> tuple[jax.Array, Sums]:
    sums = self._varying(self.model.head(self.params, x, self.batch, dropout_key=self.dropout_key))
    return sums['loss'][0], sums

  def _backward(self, stack: str, dy: Tree, of_layer: tuple[Tree, Place]) -> tuple[Tree, Tree]:
    x, place = of_layer
    _, transpose = jax.vjp(lambda x: self._run(stack, x, place), x)
    dx = self._from_stage(transpose(dy)[0], place[1])
    return self._varying(dx), dx

  def _from_stage(self, tree: Tree, stage: jax.Array | int) -> Tree:
    """Returns, on all stages, the values of `stage`."""
    if 'stage' not in self.region.axes:
      return tree
    here = jax.lax.axis_index('stage') == stage
    return jax.tree.map(
      lambda x: jax.lax.psum(self.region.varying(jnp.where(here, x, jnp.zeros_like(x))), 'stage'),
      tree,
    )

  def _varying(self, tree: Tree) -> Tree:
    return jax.tree.map(self.region.varying, tree)


def _joined(trees: Sequence[Tree]) -> Tree:
  return jax.tree.map(lambda *parts: jnp.concatenate(parts), *trees)


def _places(num_layers: int, region: Region) -> Place:
  """Returns (number, stage, index in the stage) of each layer, arrays [layers] in model order."""
  numbers, pipeline = np.arange(num_layers), region.pipeline
  if pipeline is None:
    return jnp.asarray(numbers), jnp.zeros_like(numbers), jnp.asarray(numbers)
  order = pipeline_lib.layer_order(num_layers, pipeline.num_stages, pipeline.repeats)
  stage, index = np.divmod(np.argsort(order), num_layers // pipeline.num_stages)
  return jnp.asarray(numbers), jnp.asarray(stage), jnp.asarray(index)
