"""Which parameters are trained.

Frozen parameters have no gradient, optimizer state, update or weight decay. A model with a method
`is_trained(path)`, such as LoraModel, chooses; other models train all parameters.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Optional

import flax.traverse_util

from t5x_gpu.models.model import Model, OptionalMembers


@dataclasses.dataclass(frozen=True)
class Trained:
  """Which parameters are trained.

  Attributes:
    is_trained: predicate on the '/'-joined path of a parameter; None trains everything.
  """

  is_trained: Optional[Callable[[str], bool]] = None

  def split(self, tree: Any) -> tuple[Any, Any]:
    """Returns (trained, frozen) leaves of a tree with one leaf per parameter."""
    if self.is_trained is None:
      return tree, {}
    trained, frozen = {}, {}
    for path, leaf in flax.traverse_util.flatten_dict(tree).items():
      (trained if self.is_trained('/'.join(path)) else frozen)[path] = leaf
    return (flax.traverse_util.unflatten_dict(trained), flax.traverse_util.unflatten_dict(frozen))

  def join(self, trained: Any, frozen: Any) -> Any:
    """Returns the tree with both parts, the inverse of `split`."""
    if self.is_trained is None:
      return trained
    return flax.traverse_util.unflatten_dict(
      {**flax.traverse_util.flatten_dict(trained), **flax.traverse_util.flatten_dict(frozen)}
    )


def trained_of(model: Model) -> Trained:
  """Returns the trained parameters of a model."""
  return Trained(OptionalMembers(model).is_trained)
