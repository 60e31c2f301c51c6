"""How much two trees of parameters (gradients, optimizer states) differ, and where.

A difference is divided by the largest absolute value of the whole array. Elementwise relative
differences would be meaningless: a gradient of 1e-9 among gradients of 1e-2 is the rounding error
of a sum of large terms, and adding in another order gives a different 1e-9.
"""

import dataclasses
from collections.abc import Iterator
from typing import Optional

import jax
import numpy as np

from t5x_gpu.tools.parity.layer_outputs import LayerOutputs, Tree

# Allowed rounding of an update, in ulps of the parameter's largest value: one for the addition, the
# rest because compilers fuse the preceding arithmetic differently.
UPDATE_ULPS = 4


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One array of a tree of parameters.

  Attributes:
    path: keys of the array, ('layers', 'mlp', 'wo', 'kernel').
    layers_axis: dimension on which layers are stacked; None for an array outside of the layers.
    num_layers: size of this dimension; 1 without it.
  """

  path: tuple[str, ...]
  layers_axis: Optional[int]
  num_layers: int

  @property
  def stack(self) -> tuple[str, ...]:
    """The part of the path that all arrays of a stack of layers share."""
    if self.layers_axis is None:
      return ()
    return self.path[: self.path.index('layers') + 1] if 'layers' in self.path else self.path[:1]

  def name(self, layer: Optional[int] = None) -> str:
    """Returns 'layers/mlp/wo/kernel', or 'layers/3/mlp/wo/kernel' for one layer."""
    if layer is None or self.layers_axis is None:
      return '/'.join(self.path)
    return '/'.join([*self.stack, str(layer), *self.path[len(self.stack) :]])

  def layer_of(self, x: np.ndarray, layer: int) -> np.ndarray:
    """Returns one layer's part of the array."""
    return x if self.layers_axis is None else np.take(x, layer, self.layers_axis)


@dataclasses.dataclass(frozen=True)
class ArrayDifference:
  """How much one array differs from its reference.

  Attributes:
    leaf: the array.
    by_layer: per layer, the largest difference divided by the largest value of the array; one
      number for an array outside of the layers. Infinite if a value is not finite.
  """

  leaf: Leaf
  by_layer: tuple[float, ...]

  @property
  def worst(self) -> float:
    return max(self.by_layer)

  @property
  def worst_layer(self) -> Optional[int]:
    """The layer with the worst difference; None for an array outside of the layers."""
    return None if self.leaf.layers_axis is None else self.by_layer.index(self.worst)

  @property
  def name(self) -> str:
    """Name of the worst layer's array: 'layers/3/mlp/wo/kernel'."""
    return self.leaf.name(self.worst_layer)


@dataclasses.dataclass(frozen=True)
class LayerDifference:
  """How much the output of a layer differs from its reference.

  Attributes:
    name: 'embed', 'layers/0' and so on ('encoder/layers/0' in one of several stacks), 'head'.
    output: largest difference of the layer's output divided by its largest value; for the head, the
      relative difference of the loss. Infinite if a value is not finite.
    gradient: the same for the gradient of the loss with respect to this output; 0 for the head.
  """

  name: str
  output: float
  gradient: float


def layer_differences(
  got: Optional[LayerOutputs], want: Optional[LayerOutputs]
) -> list[LayerDifference]:
  """Returns how much two runs differ after `embed`, every layer, and the head, in this order.

  Args:
    got, want: trees of numpy arrays; if one is None, the result is empty.
  """
  if got is None or want is None:
    return []

  def worst(got: Tree, want: Tree, layer: int) -> float:
    return max(
      _relative(a[layer], b[layer])
      for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )

  return [
    LayerDifference(
      name, worst(got.outputs, want.outputs, i), worst(got.gradients, want.gradients, i)
    )
    for i, name in enumerate(('embed', *want.layers))
  ] + [
    LayerDifference(
      'head', _relative(np.divide(*got.sums['loss']), np.divide(*want.sums['loss'])), 0.0
    )
  ]


def _relative(got: np.ndarray, want: np.ndarray) -> float:
  [error] = _by_layer(Leaf((), None, 1), abs(_wide(got) - _wide(want)), _largest(want))
  return error


def leaves(names: Tree, tree: Tree) -> list[Leaf]:
  """Returns the arrays of `tree`, in JAX's order.

  Args:
    names: tree of AxisNames.
    tree: arrays or their shapes, with the structure of `names`.
  """
  flat, _ = jax.tree_util.tree_flatten_with_path(names)
  found = []
  for (path, axis_names), x in zip(flat, jax.tree.leaves(tree), strict=True):
    axis = axis_names.names.index('layers') if 'layers' in axis_names.names else None
    found.append(
      Leaf(
        tuple(jax.tree_util.keystr((k,), simple=True) for k in path),
        axis,
        1 if axis is None else x.shape[axis],
      )
    )
  return found


def differences(got: Tree, want: Tree, *, names: Tree) -> list[ArrayDifference]:
  """Returns how much each array of `got` differs from `want`, in JAX's order.

  Args:
    got, want: trees of numpy arrays.
    names: tree of AxisNames.
  """
  return [
    ArrayDifference(leaf, tuple(_by_layer(leaf, abs(_wide(a) - _wide(b)), _largest(b))))
    for leaf, a, b in _zipped(got, want, names=names)
  ]


def update_differences(
  got: Tree, want: Tree, before: Tree, *, names: Tree
) -> list[ArrayDifference]:
  """Returns how much new parameters differ, relative to the update.

  Differences relative to the parameter would hide errors: the first step of a warm-up changes a
  parameter by 1e-5 of itself, so even a missing update would be within 1e-5. Rounding of a
  parameter's largest value (`UPDATE_ULPS`) is subtracted.

  Args:
    got, want: trees of numpy arrays, parameters after one update from `before`.
    before: the parameters before the update.
    names: tree of AxisNames.
  """
  olds = jax.tree.leaves(before)
  result = []
  for (leaf, a, b), old in zip(_zipped(got, want, names=names), olds, strict=True):
    rounding = UPDATE_ULPS * np.finfo(np.float32).eps * max(_largest(b), _largest(old))
    beyond = np.maximum(abs(_wide(a) - _wide(b)) - rounding, 0.0)
    result.append(ArrayDifference(leaf, tuple(_by_layer(leaf, beyond, _largest(_wide(b) - old)))))
  return result


def _zipped(got: Tree, want: Tree, *, names: Tree) -> Iterator[tuple[Leaf, np.ndarray, np.ndarray]]:
  assert jax.tree.structure(got) == jax.tree.structure(want), 'two different models'
  yield from zip(leaves(names, want), jax.tree.leaves(got), jax.tree.leaves(want), strict=True)


def _wide(x: np.ndarray) -> np.ndarray:
  return np.asarray(x, np.float64)


def _largest(x: np.ndarray) -> float:
  """Returns the largest absolute finite value."""
  return float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x)))


def _by_layer(leaf: Leaf, difference: np.ndarray, scale: float) -> Iterator[float]:
  for layer in range(leaf.num_layers):
    part = leaf.layer_of(difference, layer)
    largest = _largest(part)
    if not np.all(np.isfinite(part)) or (largest and not scale):
      yield float('inf')
    else:
      yield largest / scale if largest else 0.0
