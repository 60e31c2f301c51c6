"""Name tables: map t5x_gpu parameters ("ours") to tensors of another format ("theirs").

A table is a list of `Rule`s. Rules work in both directions: tensors that are read through a table
and written through it again are bit-identical. Converting in pieces bounds the memory.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Optional, Protocol

import numpy as np

from t5x_gpu.partitioning.trees import Shape

PIECE_BYTES = 32 << 20


class Tensors(Protocol):
  """Named tensors on disk, read in slices of their first dimension."""

  @property
  def shapes(self) -> Mapping[str, Shape]:
    """Returns name -> shape."""

  @property
  def dtypes(self) -> Mapping[str, np.dtype]:
    """Returns name -> dtype."""

  def read(self, name: str, start: int = 0, stop: Optional[int] = None) -> np.ndarray:
    """Returns rows `start` to `stop` of a tensor, in its stored dtype."""


@dataclasses.dataclass(frozen=True)
class Rule:
  """Maps one t5x_gpu parameter to the foreign tensors that hold it.

  Attributes:
    ours: '/'-joined path of the parameter.
    theirs: name of the foreign tensor; '{}' stands for the number of a layer or expert, which the
      parameter stacks.
    axes: 'heads.kv embed -> embed heads kv': dimensions of the foreign tensor, each a product of
      axes joined by '.', then dimensions of the parameter without stacked axes. Without an arrow,
      both have the same dimensions.
    stack: names of the parameter's stacked axes, one for each '{}': 'layers', or 'layers experts'.
    part: (axis, index) if the foreign tensor has an axis that the parameter lacks: where query, key
      and value are one tensor, each parameter is one index of that axis.
    block: position of the parameter if several parameters follow each other in the rows of one
      foreign tensor: where queries, keys and values of different sizes are one tensor. `axes` then
      describe the block of this parameter.
  """

  ours: str
  theirs: str
  axes: str
  stack: str = 'layers'
  part: Optional[tuple[str, int]] = None
  block: Optional[int] = None

  @functools.cached_property
  def their_axes(self) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(d.split('.')) for d in self.axes.split('->')[0].split())

  @functools.cached_property
  def our_axes(self) -> tuple[str, ...]:
    return tuple(self.axes.split('->')[-1].split())

  @property
  def is_stacked(self) -> bool:
    return '{}' in self.theirs

  @property
  def stacks(self) -> tuple[str, ...]:
    """The parameter's stacked axes; () if none."""
    return tuple(self.stack.split()) if self.is_stacked else ()

  def is_part_of(self, axis: str) -> bool:
    return self.part is not None and self.part[0] == axis


@dataclasses.dataclass(frozen=True)
class RuleUse:
  """A rule applied to one layer, or to one expert of a layer.

  Attributes:
    rule: the rule.
    numbers: indices along `rule.stacks`.
  """

  rule: Rule
  numbers: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TensorSlice:
  """A row range of a foreign tensor and its destination slices.

  Attributes:
    start, stop: rows of the foreign tensor.
    slices: path -> the slice of the parameter that these rows hold.
  """

  start: int
  stop: int
  slices: Mapping[str, tuple[slice | int, ...]]


class Table:
  """Converts between all parameters of a model and the tensors of the other format.

  Args:
    rules: the rules of one model.
    sizes: axis -> size.
  Attributes:
    our_shapes, their_shapes: name -> shape, of parameters and of foreign tensors.
    uses: name of a foreign tensor -> the rules that read it.
  """

  def __init__(self, rules: Sequence[Rule], sizes: Mapping[str, int]):
    self._sizes = dict(sizes)
    self.our_shapes: dict[str, Shape] = {}
    self.their_shapes: dict[str, Shape] = {}
    self.uses: dict[str, list[RuleUse]] = {}
    for rule in rules:
      shape = tuple(sizes[axis] for axis in rule.our_axes)
      stacked = tuple(sizes[axis] for axis in rule.stacks)
      assert rule.ours not in self.our_shapes, f'two rules for {rule.ours}'
      self.our_shapes[rule.ours] = (*stacked, *shape)
      for numbers in np.ndindex(stacked):
        self.uses.setdefault(rule.theirs.format(*numbers), []).append(RuleUse(rule, numbers))
    for name, uses in self.uses.items():
      uses.sort(key=lambda use: use.rule.block or 0)
      rows, *others = map(self._product, uses[0].rule.their_axes)
      if uses[0].rule.block is not None:
        rows = sum(self._product(use.rule.their_axes[0]) for use in uses)
      self.their_shapes[name] = (rows, *others)

  def _product(self, axes: Sequence[str]) -> int:
    return math.prod(self._sizes[axis] for axis in axes)

  def pieces(self, name: str) -> Iterator[TensorSlice]:
    """Yields the pieces of a foreign tensor, at most PIECE_BYTES each, in row order."""
    uses, offset = self.uses[name], 0
    blocks = [uses] if uses[0].rule.block is None else [[use] for use in uses]
    for of_block in blocks:
      first = of_block[0].rule.their_axes[0][0]  # all parts of one tensor have the same axes
      size = self._product(of_block[0].rule.their_axes[0])
      count = 1 if of_block[0].rule.is_part_of(first) else self._sizes[first]
      rows = size // count
      most = rows_per_piece((rows * math.prod(self.their_shapes[name][1:]),))
      step = math.ceil(count / math.ceil(count / most))  # pieces of about equal size
      for start in range(0, count, step):
        stop = min(start + step, count)
        yield TensorSlice(
          offset + start * rows,
          offset + stop * rows,
          {use.rule.ours: self._place(use, first, slice(start, stop)) for use in of_block},
        )
      offset += size

  def _place(self, use: RuleUse, first: str, chosen: slice) -> tuple[slice | int, ...]:
    inner = tuple(
      chosen if axis == first else slice(0, self._sizes[axis]) for axis in use.rule.our_axes
    )
    return (*use.numbers, *inner)

  def chunks(self) -> dict[str, Shape]:
    """Returns path -> chunk shape on disk, chosen so that each piece fills whole chunks."""
    out: dict[str, Shape] = {}
    for name, uses in self.uses.items():
      for piece in self.pieces(name):
        if all(use.rule.ours in out for use in uses):
          break
        for path, place in piece.slices.items():
          out.setdefault(path, tuple(1 if isinstance(s, int) else s.stop - s.start for s in place))
    return out

  def to_ours(self, name: str, rows: np.ndarray, piece: TensorSlice) -> dict[str, np.ndarray]:
    """Returns path -> float32 values of the parameters that `rows`, a foreign piece, hold."""
    out = {}
    for use in self.uses[name]:
      if use.rule.ours not in piece.slices:
        continue
      rule, flat = use.rule, _flat(use.rule)
      x = rows.reshape(self._split(rule, rows.shape))
      if rule.part is not None:
        axis, index = rule.part
        x = x.take(index, flat.index(axis))
        flat = tuple(a for a in flat if a != axis)
      out[rule.ours] = x.transpose([flat.index(a) for a in rule.our_axes]).astype(np.float32)
    return out

  def to_theirs(self, name: str, ours: Mapping[str, np.ndarray], *, num_rows: int) -> np.ndarray:
    """Returns rows of a foreign tensor from the parameter slices that `pieces` named."""
    out = np.empty((num_rows, *self.their_shapes[name][1:]), np.float32)
    for use in self.uses[name]:
      rule, flat = use.rule, _flat(use.rule)
      if rule.ours not in ours:
        continue
      target = out.reshape(self._split(rule, out.shape))  # a view
      if rule.part is not None:
        axis, index = rule.part
        target = np.moveaxis(target, flat.index(axis), 0)[index]
        flat = tuple(a for a in flat if a != axis)
      target[...] = ours[rule.ours].transpose([rule.our_axes.index(a) for a in flat])
    return out

  def _split(self, rule: Rule, shape: Shape) -> Shape:
    """Returns the shape of foreign rows with a separate dimension for each axis."""
    inner = tuple(self._sizes[axis] for axis in _flat(rule))
    others = math.prod(self._sizes[axis] for axis in rule.their_axes[0][1:])
    return (shape[0] // others, *inner[1:])  # only these rows of the first axis


def rows_per_piece(row_shape: Shape) -> int:
  """Returns how many float32 rows of this shape fit into a piece."""
  return max(PIECE_BYTES // max(4 * math.prod(row_shape), 1), 1)


def _flat(rule: Rule) -> tuple[str, ...]:
  return tuple(axis for d in rule.their_axes for axis in d)
