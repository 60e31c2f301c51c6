"""The loop over the layers of a stack, with communication one layer away from computation.

While a layer computes, the next layer's parameters are gathered (ZeRO-3), forward and backward. In
the backward pass, the gradients of the layer that just finished are also summed over devices. No
layer waits for a collective; each collective overlaps with the matmuls of a whole layer. The price
is the memory of one layer's gathered parameters, in the compute dtype, and one layer's gradients,
in float32.

JAX's gradient of a loop would gather and sum inside the layer that needs the result, and compilers
seldom move a collective to another iteration, so the backward loop is written out here.
`over_layers` calls the loop, `run_ahead`, for stacks of `Ahead` parameters; `with_ports` sends the
first layer's gradients last.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

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
  is_primal,
  is_zero,
  merged,
  numbers,
  opened,
  scan,
)
from t5x_gpu.partitioning.parameters import (
  Dims,
  Layer,
  Parameter,
  Remat,
  Split,
  Weights,
  Wrapper,
  is_parameter,
  keep_activations_only,
  whole,
)
from t5x_gpu.partitioning.trees import DTypeLike, Gradients, Index, Params, Tree, TreeFn


@dataclasses.dataclass
class UsedAfter:
  """Parameters that are used after a loop.

  In the backward pass their gradients are known first. They pass through the loop, which sends them
  while the last layer computes; otherwise XLA sends them last, after all matmuls.

  Attributes:
    params: tree of parameters; the loop replaces it by the parameters that passed through.
  """

  params: Params


_used_after: contextvars.ContextVar[Optional[UsedAfter]] = contextvars.ContextVar(
  'used_after', default=None
)


@contextlib.contextmanager
def used_after(params: Params) -> Iterator[UsedAfter]:
  """Context for a loop; `params` are used after the loop."""
  after = UsedAfter(params)
  token = _used_after.set(after)
  try:
    yield after
  finally:
    _used_after.reset(token)


def run_ahead(
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
  """Returns `carry` after all layers, as `over_layers`; some of `params` are `Ahead`."""
  leaves, treedef = jax.tree.flatten(params, is_leaf=is_parameter)
  ports = [leaf.port if isinstance(leaf, Ahead) else None for leaf in leaves]
  in_tick = any(isinstance(leaf, Ahead) and leaf.in_tick for leaf in leaves)
  leaves = [leaf.param if isinstance(leaf, Ahead) else leaf for leaf in leaves]
  loop = _Loop(layer, treedef, dtype, remat, unroll, in_tick)

  @jax.custom_vjp
  def layers(
    leaves: _Leaves, ports: list, carry: Tree, shared: Tree, first: jax.Array, after: list
  ) -> tuple[Tree, list[jax.Array]]:
    del ports
    return loop.forward(leaves, carry, shared, first), after

  layers.defvjp(loop.forward_and_kept, loop.backward, symbolic_zeros=True)
  after = _used_after.get() or UsedAfter(())
  flat, after_tree = jax.tree.flatten(after.params, is_leaf=is_parameter)
  passes = [isinstance(x, Split) and x.is_gathered for x in flat]
  passed = chosen(passes, flat)
  carry, parts = layers(
    leaves, ports, carry, shared, jnp.asarray(first_layer, jnp.int32), [x.part for x in passed]
  )
  passed = [x.replace(part=part) for x, part in zip(passed, parts, strict=True)]
  after.params = jax.tree.unflatten(after_tree, merged(passes, passed, flat))
  return carry


@flax.struct.dataclass
class Ahead(Wrapper):
  """A stack of layers' parameters that the loop communicates one layer ahead.

  Attributes:
    param: the parameter.
    port: an array [of the whole parameter of one layer] that takes the gradient of the first layer
      before it is reduced (`with_ports`); its value is never read. None to reduce the first layer's
      gradient like the other layers' gradients.
    in_tick: whether the loop is in a tick of a pipeline. There, stacks without values take up to 5
      GiB more than stacks of zeros (docs/decisions.md).
  """

  param: Parameter
  port: Optional[jax.Array] = None
  in_tick: bool = flax.struct.field(pytree_node=False, default=False)
  loop = staticmethod(run_ahead)

  def as_gradient(self, part: jax.Array, others: Tree) -> 'Ahead':
    return self.replace(param=self.param.as_gradient(part, others), port=None)

  def __mul__(self, factor: float) -> 'Ahead':
    port = None if self.port is None else self.port * factor
    return self.replace(param=self.param * factor, port=port)


def with_ports(
  make: Callable[[Params], Params], parts: Params, first_stack: Tree, *, axes: tuple[str, ...]
) -> Params:
  """Returns `make(parts)`, where parameters of the first stack have a port (`Ahead.port`).

  Through its port, a first layer's gradient is summed over devices after all other gradients. The
  backward pass ends with the embeddings, whose table is often the largest array of a model. If the
  first layer's gradients were sent before the table's gradient, no matmul would be left to hide the
  table's collective. But the matmuls for the gradients of kernels can wait: nothing else needs
  their results. So `run_ahead` returns the first layer's gradients unreduced.

  Args:
    make: parts -> parameters for a model, whose backward pass reduces their gradients.
    parts: the differentiated parts.
    first_stack: tree of bools: whether a parameter belongs to the layers that run first.
    axes: all manual mesh axes.
  """
  leaves, treedef = jax.tree.flatten(parts)
  made = jax.tree.leaves(make(parts), is_leaf=is_parameter)
  in_stack = [i for i, first in enumerate(jax.tree.leaves(first_stack)) if first]
  at_end = _are_summed_at_end([made[i] for i in in_stack])
  layers = {
    i: jax.tree.map(lambda x: x[0], made[i].split)
    for i, late in zip(in_stack, at_end, strict=True)
    if isinstance(made[i], Ahead) and not late
  }
  ports = {i: _port(layer, axes) for i, layer in layers.items()}
  earlier = {i: layer.earlier for i, layer in layers.items()}
  dims = tuple((i, layer.dims) for i, layer in layers.items())
  leaves, ports = _open(dims, leaves, ports, earlier)
  made, made_tree = jax.tree.flatten(
    make(jax.tree.unflatten(treedef, leaves)), is_leaf=is_parameter
  )
  made = [x.replace(port=ports[i]) if i in ports else x for i, x in enumerate(made)]
  return jax.tree.unflatten(made_tree, made)


def _port(layer: Split, axes: tuple[str, ...]) -> jax.Array:
  """Returns zeros with the shape of the whole parameter of a layer."""
  shape = jax.eval_shape(lambda x: x.whole(jnp.float32), layer).shape
  return varying(jnp.zeros(shape, jnp.float32), axes)


# (place in the list of parts, how the part is split) of each parameter with a port.
_PortDims = tuple[tuple[int, Dims], ...]
# Place in the list of parts -> port, or gradient of earlier microbatches of the first layer.
_Ports = dict[int, Optional[jax.Array]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _open(
  dims: _PortDims, parts: list[jax.Array], ports: _Ports, earlier: _Ports
) -> tuple[list[jax.Array], _Ports]:
  """Returns `parts` and `ports`, whose gradients arrive together; only the ports' are not reduced.

  Args:
    dims: dimensions of the parameters with a port.
    parts: the differentiated parts.
    ports, earlier: port, and gradient of earlier microbatches, of the first layer.
  """
  del dims, earlier
  return parts, ports


def _open_forward(
  dims: _PortDims, parts: list[jax.Array], ports: _Ports, earlier: _Ports
) -> tuple[tuple[list[jax.Array], _Ports], _Ports]:
  return (parts, ports), earlier


def _open_backward(
  dims: _PortDims, earlier: _Ports, gradients: tuple[list[jax.Array], _Ports]
) -> tuple[list[jax.Array], None, None]:
  parts, ports = gradients
  # The barrier starts the first layer's collectives after the others are done. Where marks allow,
  # users of the other gradients wait too; otherwise XLA delays a large one to the end of the step.
  marks = jax.typeof(next(iter(ports.values()))).manual_axis_type if ports else None
  same = [i for i, x in enumerate(parts) if jax.typeof(x).manual_axis_type == marks]
  ports, late, _ = jax.lax.optimization_barrier((ports, [parts[i] for i in same], parts))
  for i, x in zip(same, late, strict=True):
    parts[i] = x
  for i, of_leaf in dims:
    first = of_leaf.reduced(ports[i], earlier[i])
    parts[i] = jax.lax.dynamic_update_index_in_dim(parts[i], first, 0, 0)
  return parts, None, None


_open.defvjp(_open_forward, _open_backward)


# A parameter, or an array.
_Leaf = Any
_Leaves = list[_Leaf]
# Layers with one policy: the layer, their numbers, whether they compute something again, residuals
# [layers, ...], and the parameters that the backward pass gathers.
_Segment = tuple[LayerStep, range, bool, Tree, _Leaves]


@flax.struct.dataclass
class _Kept:
  """What the forward loops keep: their arguments, the layer, and the residuals.

  Attributes:
    stored: per segment of layers with its own policy, residuals [layers, ...] of all layers but the
      last.
    stored_last, ahead_last: residuals and gathered weights of the last layer.
    has_port: per trained leaf: whether its first layer's gradient goes through a port
      (`with_ports`).
    steps: per segment: the layer.
    after_trained: per parameter of `UsedAfter`: whether it is differentiated.
    shared_tree: tree structure of `shared`.
  """

  leaves: _Leaves
  shared: list[jax.Array]
  first: jax.Array
  stored: list[Tree]
  stored_last: Tree
  ahead_last: list[Weights]
  steps: tuple[LayerStep, ...] = flax.struct.field(pytree_node=False)
  has_port: tuple[bool, ...] = flax.struct.field(pytree_node=False)
  after_trained: tuple[bool, ...] = flax.struct.field(pytree_node=False)
  shared_tree: PyTreeDef = flax.struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True)
class _Loop:
  layer: Layer
  treedef: PyTreeDef
  dtype: DTypeLike
  remat: Remat
  unroll: int
  in_tick: bool

  def forward(self, leaves: _Leaves, carry: Tree, shared: Tree, first: jax.Array) -> Tree:
    """Returns the output, without gradients."""

    def step(weights: Params, carry: Tree, number: jax.Array) -> tuple[Tree, Tree]:
      return self.layer(jax.tree.unflatten(self.treedef, weights), carry, shared, number), ()

    return self._forward(leaves, carry, first, [step] * len(self._segments(leaves)))[0]

  def forward_and_kept(
    self,
    leaves: _Leaves,
    ports: list,
    carry: Tree,
    shared: Tree,
    first: CustomVJPPrimal,
    after: list,
  ) -> Tree:
    """Returns ((output, after), _Kept); arguments are `CustomVJPPrimal`s."""
    has_port = [port is not None for port in ports]
    after_trained = tuple(x.perturbed for x in after)
    first, after = first.value, [x.value for x in after]
    num_layers = _num_layers(jax.tree.map(lambda x: x.value, leaves, is_leaf=is_primal))
    # Without a loop, `backward` has the barriers that keep it from being merged with this pass.
    steps, leaves, carry, flat, shared_tree = opened(
      self.layer,
      self.treedef,
      [policy or keep_activations_only for _, policy in self.remat.segments(num_layers)],
      leaves,
      carry,
      shared,
    )

    def forward(
      step: LayerStep, weights: Params, carry: Tree, number: jax.Array
    ) -> tuple[Tree, Tree]:
      return step.forward(weights, carry, flat, number)

    functions = [functools.partial(forward, step) for step in steps]
    output, *stored = self._forward(leaves, carry, first, functions)
    has_port = tuple(chosen(steps[0].trained, has_port))
    return (output, after), _Kept(
      leaves,
      flat,
      first,
      *stored,
      steps=steps,
      has_port=has_port,
      after_trained=after_trained,
      shared_tree=shared_tree,
    )

  def _forward(
    self, leaves: _Leaves, carry: Tree, first: jax.Array, steps: Sequence[TreeFn]
  ) -> Tree:
    """Returns (output, stacked residuals of all layers but the last, residuals of the last layer,
    gathered weights of the last layer).

    Args:
      leaves: parameters of all layers.
      carry: input of the first layer.
      first: number of the first layer.
      steps: per segment: (weights, carry, number) -> (carry, residuals).
    """

    def body(step: TreeFn, state: Tree, i: jax.Array) -> Tree:
      carry, ahead = state
      following = self._gathered(leaves, i + 1)
      carry, stored = step(self._weights(leaves, ahead, i), carry, first + i)
      return (carry, following), stored

    last = _num_layers(leaves) - 1
    state, stored = (carry, self._gathered(leaves, 0)), []
    for layers, step in zip(self._segments(leaves), steps, strict=True):
      layers = _without_last(layers, last + 1)
      state, of_segment = self._scan(functools.partial(body, step), state, layers)
      stored.append(of_segment)
    carry, ahead = state
    carry, stored_last = steps[-1](self._weights(leaves, ahead, last), carry, first + last)
    return carry, stored, stored_last, ahead

  def backward(self, kept: _Kept, gradients: tuple[Tree, list]) -> Tree:
    """Returns the gradients of the arguments."""
    gradient, of_after = gradients
    leaves, (step, *_), last = kept.leaves, kept.steps, _num_layers(kept.leaves) - 1

    def one(
      step: LayerStep, ahead: Tree, stored: Tree, gradient: Tree, i: Index
    ) -> tuple[Tree, list[Tree]]:
      """Returns ((gradients of trained leaves, of the carry, of `shared`), other gradients)."""
      weights = self._weights(leaves, ahead, i)
      of_weights, *rest = step.backward(weights, kept.shared, kept.first + i, stored, gradient)
      others = [_others(entry(leaf, i), x) for leaf, x in zip(trained, of_weights, strict=True)]
      return (list(map(_pending, trained, of_weights)), *rest), others

    def body(segment: _Segment, state: Tree, i: Index) -> Tree:
      step, layers, recomputes, stored, to_gather = segment
      ahead, (pending, gradient, of_shared), total = state
      stored = entry(stored, i - layers.start)
      if recomputes and to_gather is not leaves:
        # Not before the gradients of layer i + 2 are summed, as in a loop.
        gradient, _ = jax.lax.optimization_barrier((gradient, total))
        stored = _after(stored, gradient)
      following = self._gathered(to_gather, i - 1)
      total = self._with_layer(total, trained, at_end, pending, i + 1)
      (pending, gradient, more), others = one(step, ahead, stored, gradient, i)
      of_shared = jax.tree.map(jnp.add, of_shared, more)
      return (following, (pending, gradient, of_shared), total), others

    trained = chosen(step.trained, leaves)
    at_end = _are_summed_at_end(trained)
    total = [self._no_gradients(leaf, late) for leaf, late in zip(trained, at_end)]
    gradient = jax.tree.map(instantiated, gradient, is_leaf=is_zero)
    segments: list[_Segment] = [
      (
        step,
        layers,
        policy is not None,
        stored,
        _to_gather(leaves, gradient) if self._is_unrolled(layers, last + 1) else leaves,
      )
      for step, (layers, policy), stored in zip(
        kept.steps, self.remat.segments(last + 1), kept.stored, strict=True
      )
    ]
    ahead = self._gathered(segments[-1][-1], max(last - 1, 0))
    stored_last = _after(kept.stored_last, gradient)
    done, others = one(kept.steps[-1], kept.ahead_last, stored_last, gradient, last)
    is_sent = [t and not is_zero(x) for t, x in zip(kept.after_trained, of_after, strict=True)]
    sent = chosen(is_sent, of_after)
    if sent:
      done, sent = jax.lax.optimization_barrier((done, sent))
    of_after = merged(is_sent, sent, [None] * len(of_after))
    state = ahead, done, total
    found = [jax.tree.map(lambda x: x[None], others)]
    if last:
      for segment in reversed(segments):
        layers = _without_last(segment[1], last + 1)
        layers = range(max(layers.start, 1), layers.stop)
        if layers:
          of_layer = functools.partial(body, segment)
          state, of_segment = self._scan(of_layer, state, layers, reverse=True)
          found.append(of_segment)
      state, first = body(segments[0], state, 0)  # the weights gathered here are not used
      found.append(jax.tree.map(lambda x: x[None], first))
    others = jax.tree.map(lambda *parts: jnp.concatenate(parts), *reversed(found))
    _, (pending, gradient, of_shared), total = state
    # Otherwise XLA merges these collectives with the previous layer's, and hides neither.
    if not any(kept.has_port):
      pending, _ = jax.lax.optimization_barrier((pending, total))
    total = self._with_layer(total, trained, at_end, pending, 0, skip=kept.has_port)
    total = [_summed(leaf, x) if late else x for leaf, late, x in zip(trained, at_end, total)]
    gradients = list(map(_as_gradient, trained, total, others))
    ports = [
      _unreduced(leaf, x) if has else None
      for leaf, x, has in zip(trained, pending, kept.has_port, strict=True)
    ]
    return (
      merged(step.trained, gradients, [None] * len(leaves)),
      merged(step.trained, ports, [None] * len(leaves)),
      gradient,
      jax.tree.unflatten(
        kept.shared_tree, merged(step.differentiated, of_shared, [None] * len(kept.shared))
      ),
      None,
      of_after,
    )

  def _segments(self, leaves: _Leaves) -> list[range]:
    return [layers for layers, _ in self.remat.segments(_num_layers(leaves))]

  def _is_unrolled(self, layers: range, num_layers: int) -> bool:
    """Returns whether the layers of a segment run without a loop."""
    return self.unroll >= len(_without_last(layers, num_layers))

  def _with_layer(
    self,
    total: list[jax.Array],
    leaves: _Leaves,
    at_end: Sequence[bool],
    pending: list[Gradients],
    i: Index,
    *,
    skip: Optional[Sequence[bool]] = None,
  ) -> list[jax.Array]:
    """Returns stacked gradients with the gradients of layer `i` added at its index.

    They are summed over devices unless `at_end` marks the leaf. Leaves in `skip` are not changed.
    """

    def added(to: jax.Array, leaf: _Leaf, late: bool, x: Tree, skipped: bool) -> jax.Array:
      if skipped:
        return to
      x = x if late else _summed(entry(leaf, i), x)
      return jax.lax.dynamic_update_index_in_dim(to, x, i, 0)

    skip = skip or [False] * len(total)
    return [added(*of_leaf) for of_leaf in zip(total, leaves, at_end, pending, skip, strict=True)]

  def _gathered(self, leaves: _Leaves, i: Index) -> list[Weights]:
    """Returns the weights of layer `i` that need an all-gather, gathered."""
    return [whole(entry(p, i), self.dtype) for p in leaves if _is_gathered(p)]

  def _weights(self, leaves: _Leaves, ahead: list[Weights], i: Index) -> list[Weights]:
    """Returns all weights of layer `i`, `wide`, given the gathered ones from `_gathered`."""
    gathered = iter(ahead)
    return [
      next(gathered).astype(jnp.float32)
      if _is_gathered(p)
      else whole(entry(p, i), self.dtype, wide=True)
      for p in leaves
    ]

  def _no_gradients(self, leaf: _Leaf, at_end: bool) -> jax.Array:
    x, empty = _part(leaf), jnp.zeros if self.in_tick else jax.lax.empty
    axes = leaf.split.dims.sum_axes if at_end else ()
    axes = (*jax.typeof(x).manual_axis_type.varying, *axes)
    return varying(empty(x.shape, x.dtype), axes)

  def _scan(self, body: TreeFn, state: Tree, layers: range, **options: Any) -> Tree:
    unroll = max(1, min(self.unroll, len(layers)))
    loop = jax.lax.scan if self.in_tick else scan
    return loop(body, state, numbers(layers, unroll=unroll), unroll=unroll, **options)


def _are_summed_at_end(layers: _Leaves) -> list[bool]:
  """Returns, per parameter, whether the loop over layers sums its gradients after the loop.

  Unsplit parameters are a few kilobytes. Reducing them inside the loop would delay the large
  collectives, so the gradients of all layers are reduced once, after it.
  """
  if not any(map(_is_gathered, layers)):
    return [False] * len(layers)
  return [is_parameter(leaf) and leaf.split.dims.fsdp is None for leaf in layers]


def _is_gathered(leaf: _Leaf) -> bool:
  return is_parameter(leaf) and leaf.split.is_gathered


def _pending(leaf: _Leaf, gradient: Weights) -> jax.Array:
  """Returns a layer's gradient for the next iteration: in float32, the split dimension first.

  The matmul of the gradient writes it so. XLA would otherwise convert and transpose it in passes
  between the loop and the reduce-scatter.
  """
  if not is_parameter(leaf):
    return gradient
  gradient = leaf.unreduced(gradient)
  dim = leaf.split.dims.fsdp
  if dim != -1:
    return gradient if dim is None else jnp.moveaxis(gradient, dim, 0)
  by_feature = gradient.reshape(-1, gradient.shape[-1]).T  # a transposed matmul, not a transpose
  return by_feature.reshape(-1, *gradient.shape[:-1])


def _unreduced(leaf: _Leaf, pending: jax.Array) -> jax.Array:
  """Returns a layer's gradient from `_pending`, with the dimensions of the parameter."""
  is_moved = is_parameter(leaf) and leaf.split.dims.fsdp is not None
  return jnp.moveaxis(pending, 0, leaf.split.dims.fsdp) if is_moved else pending


def _summed(leaf: _Leaf, pending: jax.Array) -> jax.Array:
  """Returns the gradient of a parameter (of one layer, or of all) summed over devices."""
  if not is_parameter(leaf):
    return pending
  return leaf.split.dims.reduced(_unreduced(leaf, pending), leaf.split.earlier)


def _part(leaf: _Leaf) -> jax.Array:
  """Returns the differentiated array of a parameter, or of its gradient."""
  return leaf.split.part if is_parameter(leaf) else leaf


def _others(leaf: _Leaf, gradient: Weights) -> Tree:
  return leaf.others(gradient) if is_parameter(leaf) else None


def _as_gradient(leaf: _Leaf, part: jax.Array, others: Tree) -> Tree:
  return leaf.as_gradient(part, others) if is_parameter(leaf) else part


def _without_last(layers: range, num_layers: int) -> range:
  """Returns the layers of a segment that run in its loop: all but the last of `num_layers`."""
  return range(layers.start, min(layers.stop, num_layers - 1))


def _num_layers(leaves: _Leaves) -> int:
  return jax.tree.leaves(leaves)[0].shape[0]


def _to_gather(leaves: _Leaves, gradient: Tree) -> _Leaves:
  """Returns `leaves`, to be gathered only once `gradient` is known.

  Without a loop, XLA would keep what the forward pass gathers: the weights of all layers.
  """
  first = jax.tree.leaves(gradient)[0]
  axes = tuple(jax.typeof(first).manual_axis_type.varying)

  def behind(leaf: _Leaf) -> _Leaf:
    if not _is_gathered(leaf):
      return leaf
    leaf = jax.tree.map(lambda x: varying(x, axes), leaf)
    return jax.lax.optimization_barrier((leaf, first))[0]

  return list(map(behind, leaves))


def _after(arrays: list[jax.Array], gradient: Tree) -> list[jax.Array]:
  """Returns `arrays`, available only once `gradient` is.

  The forward and the backward pass of the last layer are not in loops. Without this barrier, XLA
  would merge the recomputation with the forward pass, and keep its activations during the loss.
  """
  first = jax.tree.leaves(gradient)[0]
  marks = jax.typeof(first).manual_axis_type
  late = [x for x in arrays if jax.typeof(x).manual_axis_type == marks]
  late, _ = jax.lax.optimization_barrier((late, first))
  return merged([jax.typeof(x).manual_axis_type == marks for x in arrays], late, arrays)
