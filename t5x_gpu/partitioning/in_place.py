"""The loop over a block of layers that adds their gradients to earlier gradients, in place.

JAX's gradient of a loop fills a stack with zeros, copies each layer's gradient into it, and leaves
it to its caller to add the stack to the gradients of earlier microbatches: 24 bytes per parameter.
Here the backward loop adds each layer's gradient at its place in the earlier ones: 12 bytes. Nor
are the weights of a block copied out of the stack of a pipeline stage with several blocks.

`over_layers` calls the loop, `run_in_place`, for stacks of `InPlace` parameters.
"""

import dataclasses
import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal
from jax.tree_util import PyTreeDef

from t5x_gpu.partitioning.axis_rules import varying
from t5x_gpu.partitioning.layer_step import (
  LayerStep,
  chosen,
  entry,
  instantiated,
  is_zero,
  merged,
  numbers,
  opened,
  scan,
)
from t5x_gpu.partitioning.parameters import (
  Layer,
  Parameter,
  Remat,
  Weights,
  Wrapper,
  as_parameter,
  is_parameter,
  whole,
)
from t5x_gpu.partitioning.trees import DTypeLike, Index, Params, Tree, TreeFn


def run_in_place(
  layer: Layer,
  params: Params,
  carry: Tree,
  shared: Tree,
  *,
  dtype: DTypeLike,
  first_layer: Index,
  remat: Remat,
  unroll: int,
) -> Tree:
  """Returns `carry` after the layers of a block, as `over_layers`.

  Trained `params` are `InPlace`; others may be arrays.
  """
  leaves, treedef = jax.tree.flatten(params, is_leaf=is_parameter)
  block = next(leaf for leaf in leaves if isinstance(leaf, InPlace))
  loop = _Loop(layer, treedef, dtype, remat, unroll, block.size, block.in_tick)
  layers = jax.custom_vjp(loop.forward)
  layers.defvjp(loop.forward_and_kept, loop.backward, symbolic_zeros=True)
  places = jnp.asarray(block.start, jnp.int32), jnp.asarray(first_layer, jnp.int32)
  params = [leaf.param if isinstance(leaf, InPlace) else as_parameter(leaf) for leaf in leaves]
  return layers(params, carry, shared, places)


@flax.struct.dataclass
class InPlace(Wrapper):
  """A parameter of a block of layers, at its place in the stack.

  Its gradient has the shape of the whole stack, and contains `split.earlier` where that is given.
  Nothing is summed over devices.

  Attributes:
    param: the parameter, stacked over all layers of the stack.
    start: index of the block's first layer in the stack.
    size: number of layers of the block.
    in_tick: whether the loop is in a tick of a pipeline.
  """

  param: Parameter
  start: Index
  size: int = flax.struct.field(pytree_node=False)
  in_tick: bool = flax.struct.field(pytree_node=False, default=False)
  loop = staticmethod(run_in_place)
  adds_in_place = True

  @property
  def num_layers(self) -> int:
    return self.size

  def as_gradient(self, part: jax.Array, others: Tree) -> 'InPlace':
    return self.replace(param=self.param.as_gradient(part, others), start=None)

  def __mul__(self, factor: float) -> 'InPlace':
    return self.replace(param=self.param * factor)


# Index of the block's first layer in the stack, and its number in the model.
_Places = tuple[Index, Index]


@flax.struct.dataclass
class _Kept:
  """What the forward loops keep: their arguments, and per segment, with its own policy, the layer
  and its residuals [layers, ...].
  """

  leaves: list[Parameter]
  shared: list[jax.Array]
  places: _Places
  stored: list[Tree]
  steps: tuple[LayerStep, ...] = flax.struct.field(pytree_node=False)
  shared_tree: PyTreeDef = flax.struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True)
class _Loop:
  layer: Layer
  treedef: PyTreeDef
  dtype: DTypeLike
  remat: Remat
  unroll: int
  size: int
  in_tick: bool

  @property
  def _segments(self) -> list[range]:
    return [layers for layers, _ in self.remat.segments(self.size)]

  def forward(self, leaves: list[Parameter], carry: Tree, shared: Tree, places: _Places) -> Tree:
    """Returns the output, without gradients."""

    def body(carry: Tree, i: jax.Array) -> tuple[Tree, None]:
      weights = jax.tree.unflatten(self.treedef, self._weights(leaves, places[0] + i))
      return self.layer(weights, carry, shared, places[1] + i), None

    return jax.lax.scan(body, carry, jnp.arange(self.size), unroll=self.unroll)[0]

  def forward_and_kept(
    self,
    leaves: list[Parameter],
    carry: Tree,
    shared: Tree,
    places: tuple[CustomVJPPrimal, CustomVJPPrimal],
  ) -> tuple[Tree, _Kept]:
    """Returns (output, _Kept); arguments hold `CustomVJPPrimal`s."""
    places = places[0].value, places[1].value
    everything = jax.checkpoint_policies.everything_saveable
    segments = self.remat.segments(self.size)
    steps, leaves, carry, flat, shared_tree = opened(
      self.layer,
      self.treedef,
      [p or everything for _, p in segments],
      leaves,
      carry,
      shared,
      # Without remat there is no recomputation to keep apart.
      prevent_cse=[p is not None and self.unroll >= len(layers) for layers, p in segments],
    )

    def body(step: LayerStep, carry: Tree, i: jax.Array) -> tuple[Tree, Tree]:
      return step.forward(self._weights(leaves, places[0] + i), carry, flat, places[1] + i)

    stored: list[Tree] = []
    for step, (layers, policy) in zip(steps, segments, strict=True):
      # XLA allocates stacks without values at the start of a step: for the loop over microbatches
      # and for the microbatch outside of it, at the same time. Without remat, they are the peak. A
      # pipeline's ticks are one loop, and would move 12% more with zeros.
      loop = scan if policy or self.in_tick else jax.lax.scan
      carry, of_segment = self._scan(functools.partial(body, step), carry, layers, loop=loop)
      stored.append(of_segment)
    return carry, _Kept(leaves, flat, places, stored, steps=steps, shared_tree=shared_tree)

  def backward(self, kept: _Kept, gradient: Tree) -> Tree:
    """Returns the gradients of the arguments."""
    (step, *_), (start, first) = kept.steps, kept.places
    trained = chosen(step.trained, kept.leaves)

    def body(
      step: LayerStep, state: Tree, of_layer: tuple[jax.Array, Tree]
    ) -> tuple[Tree, list[Tree]]:
      (gradient, of_shared, totals), (i, stored) = state, of_layer
      weights = self._weights(kept.leaves, start + i)
      of_weights, gradient, more = step.backward(weights, kept.shared, first + i, stored, gradient)
      grads = [p.unreduced(g) for p, g in zip(trained, of_weights, strict=True)]
      totals = [_added(total, g, start + i) for total, g in zip(totals, grads, strict=True)]
      others = [entry(p, start + i).others(g) for p, g in zip(trained, of_weights, strict=True)]
      return (gradient, jax.tree.map(jnp.add, of_shared, more), totals), others

    state = (
      jax.tree.map(instantiated, gradient, is_leaf=is_zero),
      [_zeros(x) for x in chosen(step.differentiated, kept.shared)],
      [_zeros(p.split.part) if p.split.earlier is None else p.split.earlier for p in trained],
    )
    found: list[list[Tree]] = []
    for step, layers, stored in reversed([*zip(kept.steps, self._segments, kept.stored)]):
      one = functools.partial(body, step)
      state, of_segment = self._scan(one, state, layers, stored, reverse=True)
      found.append(of_segment)
    gradient, of_shared, totals = state
    others = jax.tree.map(lambda *parts: jnp.concatenate(parts), *reversed(found))
    gradients = [p.as_gradient(*x) for p, *x in zip(trained, totals, others, strict=True)]
    of_shared = merged(step.differentiated, of_shared, [None] * len(kept.shared))
    return (
      merged(step.trained, gradients, [None] * len(kept.leaves)),
      gradient,
      jax.tree.unflatten(kept.shared_tree, of_shared),
      None,
    )

  def _scan(
    self,
    body: TreeFn,
    state: Tree,
    layers: range,
    *xs: Tree,
    loop: Callable[..., tuple[Tree, Tree]] = scan,
    **options: bool,
  ) -> Tree:
    unroll = min(self.unroll, len(layers))
    counted = numbers(layers, unroll=unroll)
    return loop(body, state, (counted, *xs) if xs else counted, unroll=unroll, **options)

  def _weights(self, leaves: list[Parameter], i: Index) -> list[Weights]:
    return [whole(entry(p, i), self.dtype, wide=True) for p in leaves]


def _added(total: jax.Array, gradient: jax.Array, i: Index) -> jax.Array:
  # The entry keeps its dimensions: XLA then reads it in the kernel that writes it.
  before = jax.lax.dynamic_slice_in_dim(total, i, 1)
  return jax.lax.dynamic_update_slice_in_dim(total, before + gradient[None], i, 0)


def _zeros(like: jax.Array) -> jax.Array:
  axes = tuple(jax.typeof(like).manual_axis_type.varying)
  return varying(jnp.zeros(like.shape, like.dtype), axes)
