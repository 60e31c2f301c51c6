"""A forward and a backward pass that keep what every layer returns, and its gradient.

A training step shows what goes in and what comes out. To see where two runs part, the same model is
run in the same region, split in the same way, one layer after the other: with the rows of all
microbatches at once, and in a pipeline without turns, where the stage that has a layer runs it and
hands the result to all others. How microbatches and ticks take turns changes no layer; whether it
is right shows in the gradients of the step.
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from t5x_gpu.models.losses import Sums
from t5x_gpu.partitioning import pipeline_parallel
from t5x_gpu.partitioning.region import Region

Batch = Mapping[str, jax.Array]
Tree = Any
PARTS = ('embed', 'run_layers', 'head')


class LayerOutputs(flax.struct.PyTreeNode):
  """What the layers of a model returned.

  Attributes:
    outputs: [1 + layers, batch, length, ...], what `embed` returned and then each layer.
    gradients: of the summed loss with respect to `outputs`.
    sums: of the head.
  """
  outputs: Tree
  gradients: Tree
  sums: Sums


def has_layers(model: Any, params: Any) -> bool:
  """Returns whether `model` comes in the parts of a pipeline, so that it can be run by layer."""
  return all(hasattr(model, part) for part in PARTS) and 'layers' in params


def make_layer_outputs(*, model: Any, region: Region, names: Any, seed: int
                       ) -> Callable[[Any, Batch, jax.Array], LayerOutputs]:
  """Returns the function (params, batch, step) -> LayerOutputs of global arrays.

  Args:
    model: has `embed`, `run_layers` and `head`, as models/decoder_only.py.
    region: how a step is split.
    names: tree of AxisNames of the parameters.
    seed: of dropout, as in `make_train_step`.
  """
  def of_stage(tree: Tree, stage: Any) -> Tree:
    """Returns on all stages what `stage` has."""
    if 'stage' not in region.axes:
      return tree
    here = jax.lax.axis_index('stage') == stage
    return jax.tree.map(lambda x: jax.lax.psum(
        region.varying(jnp.where(here, x, jnp.zeros_like(x))), 'stage'), tree)

  def varying(tree: Tree) -> Tree:
    return jax.tree.map(region.varying, tree)

  def local(kept: Any, batch: Batch, dropout_key: jax.Array, places: Any) -> LayerOutputs:
    params = (region.parameters(kept, kept, names) if region.pipeline is None else
              region.whole(kept, names))

    def run(x: Tree, place: Any) -> Tree:
      number, _, index = place
      layer = jax.tree.map(lambda w: jax.lax.dynamic_slice_in_dim(w, index, 1), params['layers'])
      return varying(model.run_layers({**params, 'layers': layer}, x, batch,
                                      dropout_key=dropout_key, first_layer=number))

    def forward(x: Tree, place: Any) -> tuple[Tree, Tree]:
      y = of_stage(run(x, place), place[1])
      return varying(y), (x, y)

    def loss(x: Tree) -> tuple[jax.Array, Sums]:
      sums = varying(model.head(params, x, batch, dropout_key=dropout_key))
      return sums['loss'][0], sums

    def backward(dy: Tree, of_layer: Any) -> tuple[Tree, Tree]:
      x, place = of_layer
      _, transpose = jax.vjp(lambda x: run(x, place), x)
      dx = of_stage(transpose(dy)[0], place[1])
      return varying(dx), dx

    x = of_stage(varying(model.embed(params, batch, dropout_key=dropout_key)), 0)
    y, (inputs, ys) = jax.lax.scan(forward, varying(x), places)
    dy, sums = jax.grad(loss, has_aux=True)(y)
    dy, sums = of_stage(dy, 0), of_stage(sums, 0)
    _, dxs = jax.lax.scan(backward, varying(dy), (inputs, places), reverse=True)
    # The head is computed by every stage, but counts once.
    others = tuple(a for a in region.axes if a != 'stage')
    return LayerOutputs(
        outputs=jax.tree.map(lambda x, ys: jnp.concatenate([x[None], ys]), x, ys),
        gradients=jax.tree.map(lambda dxs, dy: jnp.concatenate([dxs, dy[None]]), dxs, dy),
        sums=jax.lax.psum(sums, others) if others else sums)

  def layer_outputs(params: Any, batch: Batch, step: jax.Array) -> LayerOutputs:
    batch = region.with_rows(batch)
    places = _places(jax.tree.leaves(params['layers'])[0].shape[0], region)
    of_layers = PartitionSpec(None, *region.spec(('batch', 'length'), region.rules.activations))
    return region.map(
        local, in_specs=(region.kept_specs(names), region.batch_specs(batch), PartitionSpec(),
                         PartitionSpec()),
        out_specs=LayerOutputs(of_layers, of_layers, PartitionSpec()))(
            params, batch, jax.random.fold_in(jax.random.key(seed), step), places)
  return layer_outputs


def _places(num_layers: int, region: Region) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns of each layer, in the order of the model, its number, its stage, its index there."""
  numbers, pipeline = np.arange(num_layers), region.pipeline
  if pipeline is None:
    return jnp.asarray(numbers), jnp.zeros_like(numbers), jnp.asarray(numbers)
  order = pipeline_parallel.layer_order(num_layers, pipeline.num_stages, pipeline.repeats)
  stage, index = np.divmod(np.argsort(order), num_layers // pipeline.num_stages)
  return jnp.asarray(numbers), jnp.asarray(stage), jnp.asarray(index)
