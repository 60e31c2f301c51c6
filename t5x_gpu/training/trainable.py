"""Which parameters a step changes; the others stay as they are.

What stays has no gradient, no optimizer state, no update and no weight decay. A model says it by a
method `is_trained(path)`, as models/lora.py; all parameters of other models are trained.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Optional

import flax.traverse_util

from t5x_gpu.models.model import Model


@dataclasses.dataclass(frozen=True)
class Trained:
  """Which parameters are trained.

  Attributes:
    is_trained: '/'-joined path of a parameter -> whether it is; None for all.
  """

  is_trained: Optional[Callable[[str], bool]] = None

  def split(self, tree: Any) -> tuple[Any, Any]:
    """Returns (the parameters that are trained, the others) of a tree with a leaf for each."""
    if self.is_trained is None:
      return tree, {}
    trained, frozen = {}, {}
    for path, leaf in flax.traverse_util.flatten_dict(tree).items():
      (trained if self.is_trained('/'.join(path)) else frozen)[path] = leaf
    return (flax.traverse_util.unflatten_dict(trained), flax.traverse_util.unflatten_dict(frozen))

  def join(self, trained: Any, frozen: Any) -> Any:
    """Returns the tree whose two parts these are."""
    if self.is_trained is None:
      return trained
    return flax.traverse_util.unflatten_dict(
      {**flax.traverse_util.flatten_dict(trained), **flax.traverse_util.flatten_dict(frozen)}
    )


def trained_of(model: Model) -> Trained:
  """Returns which parameters of a model are trained."""
  return Trained(getattr(model, 'is_trained', None))
