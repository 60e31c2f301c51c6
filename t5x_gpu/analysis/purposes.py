"""What a collective of a training step is for, from its shape and its place in the program."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from t5x_gpu.analysis.array_layout import ArrayLayout
from t5x_gpu.analysis.collectives import Collective

PARAMETER, GRADIENT, ACTIVATION = 'parameter gather', 'gradient reduction', 'activation'
OPTIMIZER, OTHER = 'optimizer', 'other'
PURPOSES = (PARAMETER, GRADIENT, ACTIVATION, OPTIMIZER, OTHER)


@dataclasses.dataclass(frozen=True)
class Match:
  """A parameter that has the shape of a collective's array.

  Attributes:
    parameter: its layout.
    is_layer: the array is one layer of it, not the whole stack.
    copies: how many arrays of this shape one device makes of it: its layers, or 1.
  """
  parameter: ArrayLayout
  is_layer: bool
  copies: int


class ParameterShapes:
  """Finds the parameters that an array may be: whole or split, all layers or one, transposed.

  Args:
    parameters: all of them.
    mesh_shape: mesh axis -> size.
  """

  def __init__(self, parameters: Sequence[ArrayLayout], mesh_shape: Mapping[str, int]):
    self._matches: dict[tuple[int, ...], dict[tuple[str, bool], Match]] = (
        collections.defaultdict(dict))
    for parameter in parameters:
      sizes = [sorted({size // math.prod(mesh_shape[a] for a in axes)
                       for n in range(len(split) + 1) for axes in itertools.combinations(split, n)})
               for size, split in zip(parameter.shape, parameter.split)]
      layers = parameter.names.index('layers') if 'layers' in parameter.names else None
      self._add(Match(parameter, False, 1), sizes)
      if layers is not None:
        copies = parameter.shape[layers] // parameter.parts[layers]
        self._add(Match(parameter, True, copies), sizes[:layers] + sizes[layers + 1:])

  def _add(self, match: Match, sizes: Sequence[Sequence[int]]) -> None:
    for shape in itertools.product(*sizes):
      # The first to come is kept: a stack of one layer is no layer of a stack.
      self._matches[key(shape)].setdefault((match.parameter.name, match.is_layer), match)

  def find(self, shape: Sequence[int]) -> list[Match]:
    """Returns the parameters with such a shape, in any order of its dimensions."""
    return list(self._matches.get(key(shape), {}).values())


def key(shape: Sequence[int]) -> tuple[int, ...]:
  """Returns what shapes have in common that differ by transposition and dimensions of size 1."""
  return tuple(sorted(size for size in shape if size > 1))


def purpose(collective: Collective, shapes: ParameterShapes) -> str:
  """Returns which of PURPOSES it most likely serves.

  Shapes can be mistaken in toy models, where an activation has the shape of a parameter.
  """
  name = collective.op_name
  backward = 'transpose(' in name
  in_loss = 'jvp(' in name or backward
  in_step = in_loss or 'shard_map' in name  # else it is the update
  if math.prod(collective.shape) == 1:
    return OTHER if in_step else OPTIMIZER
  if collective.kind == 'all-gather' and shapes.find(collective.shape):
    return PARAMETER
  if in_step and collective.kind in ('all-reduce', 'reduce-scatter') and (
      backward or not in_loss) and shapes.find(collective.shape) and (
          # Tensor parallelism sums activations, and gradients of norms only.
          collective.axes != ('model',) or len(key(collective.shape)) < 3):
    return GRADIENT
  return ACTIVATION if in_step else OPTIMIZER
