"""Shared by the schedules of `pipeline_parallel`: the model's parts, and sends between stages."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Optional, Protocol

import jax
import jax.numpy as jnp

from t5x_gpu.partitioning.axis_rules import varying
from t5x_gpu.partitioning.layer_stacks import (
  layers_of,
  num_layers,
  part_of,
  run_layers,
  with_layers,
  with_part,
)
from t5x_gpu.partitioning.pipeline.pipeline_schedules import Timetable

Tree = Any
AXIS = 'stage'


class Pieces(Protocol):
  """A model in three parts; the caller has bound the arguments of dropout.

  Its collectives stay inside one stage (`model`, `fsdp`, ...), never over `stage`. A
  collective-permute (ring attention) needs all devices at once: use `skip_idle=False`.
  """

  @property
  def stacks(self) -> tuple[str, ...]:
    """Names of the stacks of layers in the order in which they run; (ONLY,) for one stack."""

  def embed(self, params: Tree, microbatch: Tree) -> Tree:
    """Returns the activation that enters the first layer."""

  def run_layers(self, params: Tree, x: Tree, microbatch: Tree, first_layer: jax.Array) -> Tree:
    """Returns x after params['layers'], which start at layer `first_layer` of the model.

    With several stacks it also takes `stack`, and `first_layer` counts within that stack.
    """

  def head(self, params: Tree, x: Tree, microbatch: Tree) -> dict[str, tuple[Any, Any]]:
    """Returns name -> (sum, weight); the sum of 'loss' is differentiated."""


@dataclasses.dataclass(frozen=True)
class PipelineRun:
  """Everything that stays the same from tick to tick.

  Attributes:
    pieces: the model.
    microbatches: arrays [num_microbatches, rows, ...].
    table: the timetable.
    varying_axes: all manual mesh axes.
    skip_idle: whether a stage without work skips its layers; otherwise it computes and discards.
    complete: differentiated parameters -> all parameters.
  """

  pieces: Pieces
  microbatches: Tree
  table: Timetable
  varying_axes: tuple[str, ...]
  skip_idle: bool = True
  complete: Callable[[Tree], Tree] = lambda params: params

  def __post_init__(self) -> None:
    assert len(self.stacks) == self.table.num_stacks, (self.stacks, self.table)
    # The stack to run is chosen by a branch, which must not contain a collective-permute.
    assert len(self.stacks) == 1 or self.skip_idle, self.stacks

  @property
  def stacks(self) -> tuple[str, ...]:
    return self.pieces.stacks

  def microbatch(self, index: jax.Array) -> Tree:
    """Returns the microbatch [rows, ...]."""
    return at(self.microbatches, index)

  def varying(self, tree: Tree) -> Tree:
    """Returns `tree` marked as varying, so that loop carries and branches of a cond agree."""
    return jax.tree.map(lambda x: varying(x, self.varying_axes), tree)

  def zeros(self, like: Tree, *, stack: Optional[int] = None) -> Tree:
    """Returns zeros in the shapes of `like`, with a leading dimension `stack` if given."""
    count = () if stack is None else (stack,)
    return self.varying(jax.tree.map(lambda a: jnp.zeros((*count, *a.shape), a.dtype), like))

  def embed(self, params: Tree, microbatch: Tree) -> Tree:
    """Returns the activation that enters the first layer."""
    return self.varying(self.pieces.embed(self.complete(params), microbatch))

  def output(self, x: Tree) -> Tree:
    """Returns the part of the activation that the head reads: the last stack's."""
    return part_of(x, self.stacks, self.stacks[-1])

  def head(self, params: Tree, output: Tree, microbatch: Tree) -> tuple[jax.Array, Tree]:
    """Returns (summed loss, sums)."""
    x = with_part([None] * len(self.stacks), self.stacks, self.stacks[-1], output)
    sums = self.varying(self.pieces.head(self.complete(params), x, microbatch))
    return sums['loss'][0], sums

  def run_block(self, params: Tree, x: Tree, unit: jax.Array, stage: jax.Array) -> Tree:
    """Returns x after the block of layers of `unit`."""
    table, params = self.table, self.complete(params)
    microbatch = self.microbatch(unit % table.num_microbatches)
    block = unit // table.num_microbatches
    block_of_stack = block if len(self.stacks) == 1 else block % table.repeats

    def of_stack(stack: str) -> Tree:
      size, own = num_layers(params, stack) // table.repeats, params
      if table.repeats > 1:
        own = with_layers(
          params,
          stack,
          jax.tree.map(
            lambda w: jax.lax.dynamic_slice_in_dim(w, block_of_stack * size, size),
            layers_of(params, stack),
          ),
        )
      return self.varying(
        run_layers(
          self.pieces,
          own,
          x,
          microbatch,
          stack=stack,
          first_layer=(block_of_stack * table.num_stages + stage) * size,
        )
      )

    runs = [functools.partial(of_stack, stack) for stack in self.stacks]
    return runs[0]() if len(runs) == 1 else jax.lax.switch(block // table.repeats, runs)

  def first_activation(self, params: Tree) -> Tree:
    """Returns the activation that stages hold before they have received one."""
    microbatch = self.microbatch(0)
    if self.skip_idle:
      return self.zeros(jax.eval_shape(self.embed, params, microbatch))
    # Discarded work runs on a real activation: on zeros, layers have huge derivatives (a norm's is
    # 1/sqrt(epsilon)), and a discarded 0 * inf is NaN.
    return jax.lax.stop_gradient(self.embed(params, microbatch))

  def shift(self, x: Tree, *, back: bool = False) -> Tree:
    """Returns the `x` of the previous stage (of the next stage if `back`)."""
    last = self.table.num_stages - 1
    pairs = [(s, s + 1) for s in range(last)]
    if back:
      pairs = [(to, source) for source, to in pairs]
    elif self.table.num_blocks > 1:
      pairs.append((last, 0))
    return jax.tree.map(lambda a: jax.lax.ppermute(a, AXIS, pairs), x)


def at(tree: Tree, index: jax.Array) -> Tree:
  """Returns entry `index` of every leaf [count, ...]."""
  return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, keepdims=False), tree)


def put(tree: Tree, entry: Tree, index: jax.Array) -> Tree:
  """Returns `tree` with entry `index` of every leaf replaced."""
  return jax.tree.map(lambda a, x: jax.lax.dynamic_update_index_in_dim(a, x, index, 0), tree, entry)


def add(a: Tree, b: Tree) -> Tree:
  """Returns a + b."""
  return jax.tree.map(jnp.add, a, b)


def where(condition: Any, a: Tree, b: Tree) -> Tree:
  """Returns `a` if `condition`, a Python bool or a traced one, else `b`."""
  if condition is True:
    return a
  return jax.tree.map(functools.partial(jnp.where, condition), a, b)
