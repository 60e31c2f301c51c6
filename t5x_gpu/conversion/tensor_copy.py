"""Converts tensors through a name table: matches names, copies in pieces, reads back.

At most one piece of a tensor is in memory.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np

from t5x_gpu.checkpoint.params_files import ParamsReader, tree_problems
from t5x_gpu.checkpoint.store import Place, StateReader
from t5x_gpu.conversion.hf.names import Family
from t5x_gpu.conversion.name_table import Table, Tensors, rows_per_piece
from t5x_gpu.conversion.safetensors_io import SafetensorsWriter
from t5x_gpu.errors import CheckpointError

FLOATS = {
  name: np.dtype(dtype)
  for name, dtype in (
    ('float32', np.float32),
    ('bfloat16', ml_dtypes.bfloat16),
    ('float16', np.float16),
  )
}

Advance = Callable[[int], None]  # takes the number of bytes done since the last call
# Path of a t5x_gpu parameter, slices, values, and the number of bytes read for them.
OurPiece = tuple[str, Place, np.ndarray, int]


@dataclasses.dataclass(frozen=True)
class Names:
  """Maps the tensor names of files to the family's table.

  Attributes:
    of_table: name in the table -> name in the files.
    copies: name in the files -> name of an equal tensor.
    unused: names of tensors that are not weights, or that the user dropped.
  """

  of_table: Mapping[str, str]
  copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
  unused: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ForeignWeights:
  """Tensors in files of another format.

  Attributes:
    table: maps the tensors to t5x_gpu parameters.
    tensors: the files.
    names: how the files name the tensors of the table.
  """

  table: Table
  tensors: Tensors
  names: Names

  @property
  def num_bytes(self) -> int:
    return sum(
      math.prod(self.tensors.shapes[n]) * self.tensors.dtypes[n].itemsize
      for n in self.names.of_table.values()
    )

  def our_pieces(self) -> Iterator[OurPiece]:
    """Yields all pieces of the t5x_gpu parameters, in float32."""
    for name in self.table.uses:
      for piece in self.table.pieces(name):
        rows = self.tensors.read(self.names.of_table[name], piece.start, piece.stop)
        for path, value in self.table.to_ours(name, rows, piece).items():
          yield path, piece.slices[path], value, rows.nbytes // len(piece.slices)

  def check(self, *, what: str, fix: str) -> None:
    """Raises CheckpointError unless the files have exactly the table's tensors, all floats.

    Args:
      what: first words of the error, 'The tensors of FOLDER do not match a llama model'.
      fix: what the user should do.
    """
    have = {name: self.tensors.shapes[actual] for name, actual in self.names.of_table.items()}
    problems = tree_problems(
      self.table.their_shapes, have, wanted_by='the model', had_by='the files'
    )
    if problems:
      raise CheckpointError(
        f'{what}:\n  ' + '\n  '.join(problems), fix=fix, docs='convert.md#refused'
      )
    wrong = [
      f'{name}: {self.tensors.dtypes[name]}'
      for name in self.names.of_table.values()
      if self.tensors.dtypes[name] not in FLOATS.values()
    ]
    if wrong:
      raise CheckpointError(
        f'{what}: {len(wrong)} tensors are not of {", ".join(FLOATS)}:\n  '
        + '\n  '.join(wrong[:5]),
        fix='Use weights in one of these dtypes; our parameters are float32.',
      )


def match_names(source: Tensors, family: Family, *, drop: Sequence[str] = ()) -> Names:
  """Returns how the tensors of `source` map to the table of `family`.

  Args:
    source: the files.
    family: the family of the model.
    drop: patterns of names to leave out.
  """

  def matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)

  canonical: dict[str, str] = {}
  unused: list[str] = []
  for name in source.shapes:
    table_name = name
    for pattern, replacement in family.renamed:
      table_name = re.sub(pattern, replacement, table_name)
    if matches_any(table_name, family.nothing) or matches_any(name, drop):
      unused.append(name)
    else:
      canonical[table_name] = name
  copies = {
    canonical[a]: canonical[b]
    for a, b in family.same
    if a in canonical and b in canonical and _equal(source, canonical[a], canonical[b])
  }
  return Names(canonical, copies, tuple(unused))


def without_copies(names: Names, table: Table) -> Names:
  """Returns `names` without copies, except copies that the table needs as separate tensors."""
  copies = {
    a: b
    for a, b in names.copies.items()
    if next(k for k, v in names.of_table.items() if v == a) not in table.their_shapes
  }
  return Names({k: v for k, v in names.of_table.items() if v not in copies}, copies, names.unused)


def _equal(source: Tensors, a: str, b: str) -> bool:
  """Returns whether two tensors have the same bytes."""
  if source.shapes[a] != source.shapes[b] or source.dtypes[a] != source.dtypes[b]:
    return False
  num_rows, *row_shape = source.shapes[a] or (1,)
  step = rows_per_piece(tuple(row_shape))
  return all(
    _same_bits(*(source.read(name, i, min(i + step, num_rows)) for name in (a, b)))
    for i in range(0, num_rows, step)
  )


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
  a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
  return np.array_equal(a, b)


def copy_to_ours(
  pieces: Iterable[OurPiece],
  write: Callable[[str, Place, np.ndarray], None],
  *,
  advance: Advance = lambda size: None,
) -> None:
  """Passes all pieces to `write`."""
  for path, place, value, size in pieces:
    write(path, place, value)
    advance(size)


def compare_with_ours(
  pieces: Iterable[OurPiece],
  reader: ParamsReader | StateReader,
  *,
  advance: Advance = lambda size: None,
) -> None:
  """Raises CheckpointError unless the written t5x_gpu checkpoint equals `pieces` bit for bit."""
  for path, place, value, size in pieces:
    if not _same_bits(reader.read_at(path, place), value):
      raise CheckpointError(
        f'{path} was read back from {reader.path} with values that differ from those written.',
        fix='Check the disk, then convert again.',
      )
    advance(size)


def _their_pieces(reader: ParamsReader, table: Table) -> Iterator[tuple[str, int, np.ndarray]]:
  """Yields (name in the table, first row, rows in float32) for every piece of foreign tensors."""
  for name in table.uses:
    for piece in table.pieces(name):
      ours = {path: reader.read_at(path, place) for path, place in piece.slices.items()}
      yield name, piece.start, table.to_theirs(name, ours, num_rows=piece.stop - piece.start)


def copy_to_theirs(
  reader: ParamsReader, table: Table, names: Names, writer: SafetensorsWriter, *, advance: Advance
) -> list[str]:
  """Writes all tensors; returns the names of tensors that a narrower dtype has rounded.

  Raises:
    CheckpointError: a value is too large for the dtype.
  """
  copies_of: dict[str, list[str]] = {}
  for copy, name in names.copies.items():
    copies_of.setdefault(name, []).append(copy)
  rounded = set()
  for name, start, exact in _their_pieces(reader, table):
    actual = names.of_table[name]
    for target in (actual, *copies_of.get(actual, ())):
      with np.errstate(over='ignore'):
        rows = exact.astype(writer.tensors[target][0])
      back = rows.astype(np.float32)
      if not _same_bits(back, exact):
        rounded.add(target)
        if np.any(np.isinf(back) & ~np.isinf(exact)):
          raise CheckpointError(
            f'{target} has values beyond the range of {rows.dtype}.',
            fix='Set --dtype=bfloat16 or --dtype=float32.',
          )
      writer.write(target, start, rows)
      advance(rows.nbytes)
  return sorted(rounded)


def compare_with_theirs(reader: ParamsReader, written: ForeignWeights, *, advance: Advance) -> None:
  """Raises CheckpointError unless `written`, read back, equals the checkpoint in its dtypes."""
  tensors, names = written.tensors, written.names
  for name, start, exact in _their_pieces(reader, written.table):
    actual = names.of_table[name]
    rows = tensors.read(actual, start, start + len(exact))
    if not _same_bits(rows, exact.astype(rows.dtype)):
      raise CheckpointError(
        f'{actual} was read back with values that differ from those written.',
        fix='Check the disk, then convert again.',
      )
    advance(rows.nbytes)
  wrong = [copy for copy, name in names.copies.items() if not _equal(tensors, copy, name)]
  assert not wrong, f'copies that differ: {wrong}'
