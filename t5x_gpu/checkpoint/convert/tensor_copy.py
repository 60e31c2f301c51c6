"""Tensors on their way through a table of names: matched, copied in pieces, read again.

Nothing here holds more than a piece of a tensor.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np

from t5x_gpu.checkpoint.arrays.params_files import ParamsReader, ParamsWriter, tree_problems
from t5x_gpu.checkpoint.convert.hf_names import Family
from t5x_gpu.checkpoint.convert.name_table import Table, Tensors, rows_per_piece
from t5x_gpu.checkpoint.convert.safetensors_io import SafetensorsWriter
from t5x_gpu.errors import CheckpointError

FLOATS = {
  name: np.dtype(dtype)
  for name, dtype in (
    ('float32', np.float32),
    ('bfloat16', ml_dtypes.bfloat16),
    ('float16', np.float16),
  )
}

Step = Callable[[int], None]  # told of bytes that have been dealt with


@dataclasses.dataclass(frozen=True)
class Names:
  """How the names of some files read in the family's table.

  Attributes:
    of_table: name in the table -> name in the files.
    copies: name in the files -> that of the tensor which it equals.
    unused: names in the files of tensors without weights, or that were to be dropped.
  """

  of_table: Mapping[str, str]
  copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
  unused: tuple[str, ...] = ()


def match_names(source: Tensors, family: Family, *, drop: Sequence[str] = ()) -> Names:
  """Returns how the tensors of `source` read in the table of `family`.

  Args:
    source: the files.
    family: of their model.
    drop: patterns of names to leave out.
  """

  def is_one_of(name: str, patterns: Sequence[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)

  canonical: dict[str, str] = {}
  unused: list[str] = []
  for name in source.shapes:
    read_as = name
    for pattern, replacement in family.renamed:
      read_as = re.sub(pattern, replacement, read_as)
    if is_one_of(read_as, family.nothing) or is_one_of(name, drop):
      unused.append(name)
    else:
      canonical[read_as] = name
  copies = {
    canonical[a]: canonical[b]
    for a, b in family.same
    if a in canonical and b in canonical and equal(source, canonical[a], canonical[b])
  }
  return Names(canonical, copies, tuple(unused))


def without_copies(names: Names, table: Table) -> Names:
  """Returns `names` as `table` has them: a copy is a tensor of its own if the table asks for it."""
  copies = {
    a: b
    for a, b in names.copies.items()
    if next(k for k, v in names.of_table.items() if v == a) not in table.their_shapes
  }
  return Names({k: v for k, v in names.of_table.items() if v not in copies}, copies, names.unused)


def equal(source: Tensors, a: str, b: str) -> bool:
  """Returns whether two tensors have the same bytes."""
  if source.shapes[a] != source.shapes[b] or source.dtypes[a] != source.dtypes[b]:
    return False
  num_rows, *row_shape = source.shapes[a] or (1,)
  step = rows_per_piece(tuple(row_shape))
  return all(
    np.array_equal(*(_bits(source.read(name, i, min(i + step, num_rows))) for name in (a, b)))
    for i in range(0, num_rows, step)
  )


def _bits(array: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def check_tensors(source: Tensors, table: Table, names: Names, *, what: str, fix: str) -> None:
  """Raises CheckpointError unless the files have the table's tensors, no others, all floats.

  Args:
    source: the files.
    table: of their model.
    names: how they read in it.
    what: begins the error: 'The tensors of FOLDER are not those of a llama model'.
    fix: what to do, should they not be.
  """
  have = {read_as: source.shapes[name] for read_as, name in names.of_table.items()}
  problems = tree_problems(table.their_shapes, have, wanted_by='the model', had_by='the files')
  if problems:
    raise CheckpointError(
      f'{what}:\n  ' + '\n  '.join(problems), fix=fix, docs='convert.md#refused'
    )
  wrong = [
    f'{name}: {source.dtypes[name]}'
    for name in names.of_table.values()
    if source.dtypes[name] not in FLOATS.values()
  ]
  if wrong:
    raise CheckpointError(
      f'{what}: {len(wrong)} tensors are not of {", ".join(FLOATS)}:\n  ' + '\n  '.join(wrong[:5]),
      fix='Take the weights in one of them; parameters are float32 here.',
    )


def _float32_pieces(
  source: Tensors, table: Table, names: Names
) -> Iterator[tuple[str, tuple, np.ndarray, int]]:
  """Yields (our path, where, value, bytes read for it) for every piece of every tensor."""
  for name in table.uses:
    for piece in table.pieces(name):
      rows = source.read(names.of_table[name], piece.start, piece.stop)
      for path, value in table.to_ours(name, rows).items():
        yield path, piece.slices[path], value, rows.nbytes // len(piece.slices)


def copy_to_ours(
  source: Tensors, table: Table, names: Names, writer: ParamsWriter, *, step: Step
) -> None:
  """Writes all parameters."""
  for path, place, value, size in _float32_pieces(source, table, names):
    writer.write(path, place, value)
    step(size)


def compare_with_ours(
  source: Tensors, table: Table, names: Names, reader: ParamsReader, *, step: Step
) -> None:
  """Raises CheckpointError unless our checkpoint, read again, has what `source` has, to the bit."""
  for path, place, value, size in _float32_pieces(source, table, names):
    if not np.array_equal(_bits(reader.read_at(path, place)), _bits(value)):
      raise CheckpointError(
        f'{path} was read back from {reader.path} with other values than were written.',
        fix='Look at the disk; then convert again.',
      )
    step(size)


def copy_to_theirs(
  reader: ParamsReader, table: Table, names: Names, writer: SafetensorsWriter, *, step: Step
) -> list[str]:
  """Writes all tensors; returns the names of those whose values a narrower dtype has rounded.

  Raises:
    CheckpointError: a value is too large for the dtype.
  """
  copies_of: dict[str, list[str]] = {}
  for copy, name in names.copies.items():
    copies_of.setdefault(name, []).append(copy)
  rounded = set()
  for name in table.uses:
    actual = names.of_table[name]
    for piece in table.pieces(name):
      ours = {path: reader.read_at(path, place) for path, place in piece.slices.items()}
      exact = table.to_theirs(name, ours, num_rows=piece.stop - piece.start)
      for target in (actual, *copies_of.get(actual, ())):
        with np.errstate(over='ignore'):
          rows = exact.astype(writer.tensors[target][0])
        back = rows.astype(np.float32)
        if not np.array_equal(_bits(back), _bits(exact)):
          rounded.add(target)
          if np.any(np.isinf(back) & ~np.isinf(exact)):
            raise CheckpointError(
              f'{target} has values beyond the range of {rows.dtype}.',
              fix='Take --dtype=bfloat16 or --dtype=float32.',
            )
        writer.write(target, piece.start, rows)
        step(rows.nbytes)
  return sorted(rounded)


def compare_with_theirs(
  reader: ParamsReader, table: Table, names: Names, written: Tensors, *, step: Step
) -> None:
  """Raises CheckpointError unless `written`, read again, has what our checkpoint has, rounded to
  its dtypes.
  """
  for name in table.uses:
    actual = names.of_table[name]
    for piece in table.pieces(name):
      ours = {path: reader.read_at(path, place) for path, place in piece.slices.items()}
      exact = table.to_theirs(name, ours, num_rows=piece.stop - piece.start)
      rows = written.read(actual, piece.start, piece.stop)
      if not np.array_equal(_bits(rows), _bits(exact.astype(rows.dtype))):
        raise CheckpointError(
          f'{actual} was read back with other values than were written.',
          fix='Look at the disk; then convert again.',
        )
      step(rows.nbytes)
  wrong = [copy for copy, name in names.copies.items() if not equal(written, copy, name)]
  assert not wrong, f'copies that differ: {wrong}'
