"""One layer with its residuals and its backward pass, for loops whose backward pass is written out.

`run_ahead` (overlap.py) communicates one layer ahead of the computation, and `run_in_place`
(in_place.py) adds gradients to earlier ones. Both store the residuals of `LayerStep.forward`.
"""

import operator
from collections.abc import Sequence
from typing import Any, Optional, TypeVar, Union

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.extend.core import jaxpr_as_fun
from jax.tree_util import PyTreeDef

from t5x_gpu.partitioning.axis_rules import varying
from t5x_gpu.partitioning.parameters import Layer, Policy
from t5x_gpu.partitioning.trees import Gradients, Index, Params, Tree, TreeFn

T = TypeVar('T')


class LayerStep:
  """A layer on flat arrays, and its backward pass. Traced at the first call only.

  Some of the arrays that JAX's backward pass needs are inputs, such as weights. Only the others,
  and the layer's input, must be stored.

  Attributes:
    trained: per weight: whether it is differentiated.
    differentiated: per array of `shared`: whether it is differentiated.
  """

  def __init__(
    self, function: TreeFn, *, trained: Sequence[bool], differentiated: Sequence[bool], **remat: Any
  ):
    self._function, self._remat, self._traced = function, remat, None
    self.trained, self.differentiated = trained, differentiated

  def forward(
    self, weights: list[Params], carry: Tree, shared: list[jax.Array], number: jax.Array
  ) -> tuple[Tree, list[jax.Array]]:
    """Returns (carry, arrays to be stored for the backward pass)."""
    inputs = (weights, shared, number, carry)
    if self._traced is None:
      self._trace(inputs)
    results = self._traced(*jax.tree.leaves(inputs))
    outputs, needed = results[: self._output.num_leaves], results[self._output.num_leaves :]
    stored = [x for x, source in zip(needed, self._sources, strict=True) if source is None]
    return jax.tree.unflatten(self._output, outputs), stored

  def backward(
    self,
    weights: list[Params],
    shared: list[jax.Array],
    number: jax.Array,
    stored: list[jax.Array],
    gradient: Tree,
  ) -> tuple[list[Gradients], Tree, list[jax.Array]]:
    """Returns the gradients of (trained weights, carry, differentiated arrays of `shared`)."""
    fixed, stored = jax.tree.leaves((weights, shared, number)), iter(stored)
    needed = [next(stored) if i is None else fixed[i] for i in self._sources]
    return jax.tree.unflatten(self._pull, needed)(gradient)

  def _trace(self, inputs: tuple) -> None:
    def forward(weights: Params, shared: Tree, number: Index, carry: Tree) -> Tree:
      def layer(trained: Tree, carry: Tree, differentiated: Tree) -> Tree:
        whole = merged(self.trained, trained, weights)
        return self._function(
          whole, carry, merged(self.differentiated, differentiated, shared), number
        )

      output, pull = jax.vjp(
        jax.checkpoint(layer, **self._remat),
        chosen(self.trained, weights),
        carry,
        chosen(self.differentiated, shared),
      )
      self._output, self._pull = jax.tree.structure(output), jax.tree.structure(pull)
      return jax.tree.leaves(output) + jax.tree.leaves(pull)

    closed = jax.make_jaxpr(forward)(*inputs)
    fixed = closed.jaxpr.invars[: len(jax.tree.leaves(inputs[:3]))]
    needed = closed.jaxpr.outvars[self._output.num_leaves :]
    self._sources = [next((i for i, x in enumerate(fixed) if x is need), None) for need in needed]
    self._traced = jaxpr_as_fun(closed)


def chosen(which: Sequence[bool], items: Sequence[T]) -> list[T]:
  """Returns the `items` that `which` marks."""
  return [item for item, chosen in zip(items, which, strict=True) if chosen]


def merged(which: Sequence[bool], chosen: Sequence[T], others: Sequence[T]) -> list[T]:
  """Returns `others` with the marked members replaced, in turn, by the members of `chosen`."""
  chosen = iter(chosen)
  return [next(chosen) if marked else x for marked, x in zip(which, others, strict=True)]


def opened(
  layer: Layer,
  treedef: PyTreeDef,
  policies: Sequence[Policy],
  leaves: list[Tree],
  carry: Tree,
  shared: Tree,
  *,
  prevent_cse: Optional[Sequence[bool]] = None,
) -> tuple[tuple[LayerStep, ...], list[Tree], Tree, list[jax.Array], PyTreeDef]:
  """Returns (steps, leaves, carry, leaves of `shared`, structure of `shared`) for a forward pass.

  Args:
    layer: computes one layer.
    treedef: structure of a layer's parameters.
    policies: per step: its policy.
    leaves: parameters of all layers; they and the next two arguments hold `CustomVJPPrimal`s.
    carry: input of the first layer.
    shared: arrays that all layers share.
    prevent_cse: per step: whether neither a loop nor its caller separates its forward from its
      backward pass. XLA would then merge the recomputation with the forward pass, and save nothing.
  """
  trained = [any(x.perturbed for x in jax.tree.leaves(p, is_leaf=is_primal)) for p in leaves]
  flat, shared_tree = jax.tree.flatten(shared, is_leaf=is_primal)
  differentiated = [x.perturbed for x in flat]
  leaves, carry, flat = jax.tree.map(lambda x: x.value, (leaves, carry, flat), is_leaf=is_primal)

  def function(weights: Params, carry: Tree, shared: list[jax.Array], number: jax.Array) -> Tree:
    shared = jax.tree.unflatten(shared_tree, shared)
    return layer(jax.tree.unflatten(treedef, weights), carry, shared, number)

  steps = tuple(
    LayerStep(
      function, trained=trained, differentiated=differentiated, policy=policy, prevent_cse=prevent
    )
    for policy, prevent in zip(policies, prevent_cse or [False] * len(policies), strict=True)
  )
  return steps, leaves, carry, flat, shared_tree


def entry(tree: Tree, i: Index) -> Tree:
  """Returns entry `i` of every array [layers, ...]."""
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def scan(
  body: TreeFn, carry: Tree, xs: Tree, *, unroll: int = 1, reverse: bool = False
) -> tuple[Tree, Tree]:
  """As `jax.lax.scan`, but the stacks of its results start without values.

  JAX fills them with zeros. XLA writes these zeros, and copies them for every further stack of the
  same shape. The result has no gradient. Without a loop (`unroll` is the number of iterations), XLA
  drops stacks that another call takes apart by `numbers`. JAX stacks results in host memory.
  """
  size = len(jax.tree.leaves(xs)[0])
  if not size:
    return jax.lax.scan(body, carry, xs)
  traced, (_, results) = jax.make_jaxpr(
    lambda carry, xs: body(carry, entry(xs, 0)), return_shape=True
  )(carry, xs)
  of_layer = traced.out_avals[len(jax.tree.leaves(carry)) :]
  if any(x.memory_space == jax.memory.Space.Host for x in of_layer):  # 'offload'
    return jax.lax.scan(body, carry, xs, unroll=unroll, reverse=reverse)
  if unroll >= size:
    results: list[Tree] = [None] * size
    for i in reversed(range(size)) if reverse else range(size):
      carry, results[i] = body(carry, jax.tree.map(operator.itemgetter(i), xs))
    return carry, jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *results)

  def step(state: Tree, of_layer: Tree) -> tuple[Tree, None]:
    (carry, stacks), (i, x) = state, of_layer
    carry, results = body(carry, x)
    stacks = jax.tree.map(
      lambda stack, result: jax.lax.dynamic_update_index_in_dim(stack, result, i, 0),
      stacks,
      results,
    )
    return (carry, stacks), None

  stacks = jax.tree.unflatten(
    jax.tree.structure(results), [_empty_stack(size, x) for x in of_layer]
  )
  state, of_layers = (carry, stacks), (jnp.arange(size), xs)
  return jax.lax.scan(step, state, of_layers, unroll=unroll, reverse=reverse)[0]


def numbers(layers: range, *, unroll: int) -> Union[np.ndarray, jax.Array]:
  """Returns the numbers of `layers` for `scan`; without a loop, numbers that are known when traced.

  In a loop, XLA hides fewer gathers if they are constants (75 to 53% of Llama-3 8B's in FP8).
  """
  module = np if unroll >= len(layers) else jnp
  return module.arange(layers.start, layers.stop)


def _empty_stack(size: int, of_layer: jax.core.ShapedArray) -> jax.Array:
  stack = jax.lax.empty((size, *of_layer.shape), of_layer.dtype)
  manual = of_layer.manual_axis_type  # None outside of manual regions
  return varying(stack, tuple(manual.varying)) if manual else stack


def is_primal(x: object) -> bool:
  return isinstance(x, CustomVJPPrimal)


def is_zero(x: object) -> bool:
  return isinstance(x, SymbolicZero)


def instantiated(x: Union[jax.Array, SymbolicZero]) -> jax.Array:
  if not is_zero(x):
    return x
  zeros = jnp.zeros(x.aval.shape, x.aval.dtype)
  return varying(zeros, tuple(x.aval.manual_axis_type.varying))
