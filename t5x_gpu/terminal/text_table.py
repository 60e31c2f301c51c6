"""Formats rows of cells as aligned columns."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
  """Returns rows as aligned columns; the columns numbered in `right` are right-aligned."""
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  return '\n'.join(
    '  '.join(
      cell.rjust(width) if i in right else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(row, widths))
    ).rstrip()
    for row in rows
  )
