"""Gradients of a stage's layers, summed over devices while its last backward tick computes.

Every tick contributes to the gradients of layers. After the last tick, in which stage 0 works
alone, the network would sum all gradients with no computation left to hide it. So the last tick
adds the gradients of earlier ticks, and sums each layer's gradients while it computes the next
layer (layer_loop.py).

All stages compute the last tick, so that all send the same arrays at the same time. The other
stages discard their results; they would wait for stage 0 anyway.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Optional

import jax
import jax.numpy as jnp

from t5x_gpu.partitioning import fsdp
from t5x_gpu.partitioning.axis_rules import varying
from t5x_gpu.partitioning.pipeline.pipeline_run import AXIS, PipelineRun, Tree, where


@dataclasses.dataclass(frozen=True)
class LayerSums:
  """How the last tick reduces gradients.

  Attributes:
    dims: per parameter: how a layer's gradient is split and summed; None for parameters outside of
      layers, whose gradients the caller reduces.
    axes: all manual mesh axes.
  """

  dims: Sequence[Optional[fsdp.Dims]]
  axes: Sequence[str]

  def inputs(self, params: Tree) -> Tree:
    """Returns the arrays to differentiate: ports for layers, the parameters themselves elsewhere.

    A port has the shape of a reduced gradient and takes it; its value is never read.
    """

    def port(dims: fsdp.Dims, param: jax.Array) -> jax.Array:
      shape = jax.eval_shape(lambda x: fsdp.reduced(x, dims), param)
      axes = tuple(a for a in self.axes if a not in dims.sums)
      return varying(jnp.zeros(shape.shape, shape.dtype), axes)

    return self._on_layers(port, lambda param: param, params)

  def parameters(self, inputs: Tree, params: Tree, earlier: Tree) -> Tree:
    """Returns parameters whose gradients reach `inputs`.

    Args:
      inputs: from `inputs`.
      params: whole parameters.
      earlier: gradients of earlier ticks; they are added to the gradients of layers.
    """
    return self._on_layers(
      lambda dims, port, param, before: fsdp.Split(port, param, dims, before),
      lambda param, *_: param,
      inputs,
      params,
      earlier,
    )

  def total(self, grads: Tree, earlier: Tree) -> Tree:
    """Returns the gradients of `inputs`, plus earlier ticks' gradients outside of layers."""
    return self._on_layers(lambda dims, own, before: own, jnp.add, grads, earlier)

  def _on_layers(
    self, of_layer: Callable[..., Any], of_other: Callable[..., Any], *trees: Tree
  ) -> Tree:
    leaves, treedefs = zip(*map(jax.tree.flatten, trees))
    return jax.tree.unflatten(
      treedefs[0],
      [
        of_other(*of_leaf) if dims is None else of_layer(dims, *of_leaf)
        for dims, *of_leaf in zip(self.dims, *leaves, strict=True)
      ],
    )


def first_tick(run: PipelineRun, params: Tree) -> Tree:
  """Returns the output of the first tick, in which stage 0 works alone."""
  stage = jax.lax.axis_index(AXIS)

  def block(_: Tree) -> Tree:
    return run.run_block(params, run.embed(params, run.microbatch(0)), 0, stage)

  x = run.first_activation(params)
  return jax.lax.cond(stage == 0, block, lambda x: x, x) if run.skip_idle else block(x)


def last_tick(
  run: PipelineRun, params: Tree, dx: Tree, unit: int, grads: Tree, layer_sums: LayerSums
) -> Tree:
  """Returns the gradients after the last backward tick, in which stage 0 works alone.

  Args:
    run: the pipeline.
    params: parameters of the model.
    dx: gradients of the stages' inputs in the previous tick.
    unit: the microbatch of stage 0.
    grads: gradients of earlier ticks.
    layer_sums: reduces the gradients of layers.
  """
  stage, dy = jax.lax.axis_index(AXIS), run.shift(dx, back=True)
  # Otherwise XLA computes these activations before the other ticks, and keeps them.
  microbatch, _ = jax.lax.optimization_barrier((run.microbatch(unit), dx))

  def output(inputs: Tree) -> Tree:
    summing = layer_sums.parameters(inputs, params, grads)
    return run.run_block(summing, run.embed(summing, microbatch), unit, stage)

  _, transpose = jax.vjp(output, layer_sums.inputs(params))
  found = transpose(where(stage == 0, dy, jax.tree.map(jnp.zeros_like, dy)))[0]
  return layer_sums.total(found, grads)
