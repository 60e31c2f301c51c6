"""How far two trees of parameters (gradients, optimizer states) are apart, and where.

A difference is divided by the largest absolute value of the whole array. Divided element by element
it would mean nothing: a gradient of 1e-9 among gradients of 1e-2 is the rounding of a sum of large
terms, and another order of that sum gives another 1e-9.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Optional

import jax
import numpy as np

from t5x_gpu.training.parity.layer_outputs import LayerOutputs

# Units in the last place of a parameter's largest value that an update may be rounded by: one when
# it is added, the rest because compilers fuse the arithmetic before differently.
UPDATE_ULPS = 4


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One array of a tree of parameters.

  Attributes:
    path: its keys, ('layers', 'mlp', 'wo', 'kernel').
    layers_axis: dimension on which layers are stacked; None for what belongs to no layer.
    num_layers: size of that dimension, 1 without it.
  """

  path: tuple[str, ...]
  layers_axis: Optional[int]
  num_layers: int

  @property
  def stack(self) -> tuple[str, ...]:
    """The part of the path that all arrays of a stack of layers have in common."""
    if self.layers_axis is None:
      return ()
    return self.path[: self.path.index('layers') + 1] if 'layers' in self.path else self.path[:1]

  def name(self, layer: Optional[int] = None) -> str:
    """Returns 'layers/mlp/wo/kernel', or 'layers/3/mlp/wo/kernel' for one layer of it."""
    if layer is None or self.layers_axis is None:
      return '/'.join(self.path)
    return '/'.join([*self.stack, str(layer), *self.path[len(self.stack) :]])

  def layer_of(self, x: np.ndarray, layer: int) -> np.ndarray:
    """Returns the part of the array that belongs to one layer."""
    return x if self.layers_axis is None else np.take(x, layer, self.layers_axis)


@dataclasses.dataclass(frozen=True)
class Difference:
  """How far one array is from what it should be.

  Attributes:
    leaf: which array.
    by_layer: largest difference of each layer over the largest value of the array; one number for
      an array of no layer. Infinite where a value is not finite.
  """

  leaf: Leaf
  by_layer: tuple[float, ...]

  @property
  def worst(self) -> float:
    return max(self.by_layer)

  @property
  def worst_layer(self) -> Optional[int]:
    """The layer of it; None for an array of no layer."""
    return None if self.leaf.layers_axis is None else self.by_layer.index(self.worst)

  @property
  def name(self) -> str:
    """Where the worst is: 'layers/3/mlp/wo/kernel'."""
    return self.leaf.name(self.worst_layer)


@dataclasses.dataclass(frozen=True)
class LayerDifference:
  """How far what a layer returns is from what it should be.

  Attributes:
    name: 'embed', 'layers/0' and so on ('encoder/layers/0' in one of several stacks), 'head'.
    output: largest difference of the layer's output over its largest value; of the head, the
      difference of the loss. Infinite where a value is not finite.
    gradient: likewise of the gradient of the loss with respect to this output; 0 of the head.
  """

  name: str
  output: float
  gradient: float


def layer_differences(
  got: Optional[LayerOutputs], want: Optional[LayerOutputs]
) -> list[LayerDifference]:
  """Returns how far apart two runs are after `embed`, every layer, and the head, in this order.

  Args:
    got, want: trees of numpy arrays; None gives no differences.
  """
  if got is None or want is None:
    return []

  def worst(got: Any, want: Any, layer: int) -> float:
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


def leaves(names: Any, tree: Any) -> list[Leaf]:
  """Returns what `tree` holds, in jax's order.

  Args:
    names: tree of AxisNames.
    tree: arrays or their shapes, of the same structure.
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


def differences(got: Any, want: Any, *, names: Any) -> list[Difference]:
  """Returns how far each array of `got` is from that of `want`, in jax's order.

  Args:
    got, want: trees of numpy arrays.
    names: tree of AxisNames.
  """
  return [
    Difference(leaf, tuple(_by_layer(leaf, abs(_wide(a) - _wide(b)), _largest(b))))
    for leaf, a, b in _zipped(got, want, names=names)
  ]


def update_differences(got: Any, want: Any, before: Any, *, names: Any) -> list[Difference]:
  """Returns how far new parameters are from what they should be, relative to the update.

  Relative to the parameter it would not show: a first step of a warm-up changes a parameter by
  1e-5 of itself, so even no update at all would be within 1e-5. What rounding of a parameter's
  largest value can do (`UPDATE_ULPS`) does not count.

  Args:
    got, want: trees of numpy arrays, parameters after one update from `before`.
    before: the parameters before it.
    names: tree of AxisNames.
  """
  olds = jax.tree.leaves(before)
  result = []
  for (leaf, a, b), old in zip(_zipped(got, want, names=names), olds, strict=True):
    rounding = UPDATE_ULPS * np.finfo(np.float32).eps * max(_largest(b), _largest(old))
    beyond = np.maximum(abs(_wide(a) - _wide(b)) - rounding, 0.0)
    result.append(Difference(leaf, tuple(_by_layer(leaf, beyond, _largest(_wide(b) - old)))))
  return result


def _zipped(got: Any, want: Any, *, names: Any) -> Iterator[tuple[Leaf, np.ndarray, np.ndarray]]:
  assert jax.tree.structure(got) == jax.tree.structure(want), 'two different models'
  yield from zip(leaves(names, want), jax.tree.leaves(got), jax.tree.leaves(want), strict=True)


def _wide(x: np.ndarray) -> np.ndarray:
  return np.asarray(x, np.float64)


def _largest(x: np.ndarray) -> float:
  """Returns the largest absolute value of those that are finite."""
  return float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x)))


def _by_layer(leaf: Leaf, difference: np.ndarray, scale: float) -> Iterator[float]:
  for layer in range(leaf.num_layers):
    part = leaf.layer_of(difference, layer)
    largest = _largest(part)
    if not np.all(np.isfinite(part)) or (largest and not scale):
      yield float('inf')
    else:
      yield largest / scale if largest else 0.0
