"""Parses a field of a row as a text, a label, labels or a number.

Errors (DataError) name the row and the column.
"""

import math
from typing import Any, NoReturn

from t5x_gpu.data.features import SCORE_UNIT
from t5x_gpu.data.sources.rows import NAME
from t5x_gpu.errors import DataError

LARGEST_SCORE = 200_000  # in ten-thousandths, fits into 4 bytes
_SEPARATOR = ','  # between the labels in a field of .csv and .tsv


def refuse(what: str, *, fix: str) -> NoReturn:
  raise DataError(what, fix=fix, parameters=NAME, docs='tasks.md#your-own-classification-data')


def cell_listed(value: Any, column: str, where: str) -> list[Any]:
  """Returns a list of labels: a list, or names separated by commas, as in .csv."""
  value = value.decode() if isinstance(value, bytes) else value
  if isinstance(value, str):
    return [name for name in value.split(_SEPARATOR) if name.strip()]
  if isinstance(value, list):
    return value
  refuse(
    f'{where} has {str(value)[:40]} in {column!r}, which is not a list of labels.',
    fix='Write a list of names; in .csv and .tsv, names separated by commas. An empty list is a '
    'row without a label.',
  )


def cell_text(value: Any, column: str, where: str) -> str:
  """Returns a non-empty text."""
  value = value.decode() if isinstance(value, bytes) else value
  if value is None or isinstance(value, str) and not value.strip():
    refuse(f'{where} has no text in {column!r}.', fix='Fill it in, or remove the row.')
  if not isinstance(value, str):
    refuse(
      f'{where} has {type(value).__name__} {str(value)[:40]!r} in {column!r}, not a text.',
      fix='Name the columns after the pattern: #text=COLUMN,label=COLUMN.',
    )
  return _checked(value, column, where)


def _checked(value: str, column: str, where: str) -> str:
  """Returns a text that UTF-8 can encode."""
  try:
    value.encode()
  except UnicodeEncodeError as e:
    refuse(
      f'{where} has half of a surrogate pair in {column!r}, which is not a character: {e}.',
      fix='Correct or remove that row.',
    )
  return value


def cell_label(value: Any, column: str, where: str) -> str:
  """Returns the name of a class: words unchanged, whole numbers as digits, true or false."""
  value = value.decode() if isinstance(value, bytes) else value
  if value is None or value != value or isinstance(value, str) and not value.strip():  # NaN
    refuse(
      f'{where} has no label in {column!r}.',
      fix='Fill it in, or remove the row. Leave files without labels out of the pattern.',
    )
  if isinstance(value, str):
    return _checked(value.strip(), column, where)
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, int) or isinstance(value, float) and value.is_integer():
    return str(int(value))
  refuse(
    f'{where} has {str(value)[:40]} in {column!r}; a class is a word or a whole number.',
    fix='Choose the column with the classes, or turn its values into classes.',
  )


def cell_score(value: Any, column: str, where: str, *, least: int = 0) -> str:
  """Returns a number from `least` to `LARGEST_SCORE`, in ten-thousandths."""
  value = value.decode() if isinstance(value, bytes) else value
  try:
    number = math.nan if isinstance(value, bool) else float(value)
  except (TypeError, ValueError, OverflowError):
    number = math.nan
  if not least <= number <= LARGEST_SCORE:  # NaN fails
    refuse(
      f'{where} has {str(value)[:40]!r} in {column!r}, not a number from {least:,} to '
      f'{LARGEST_SCORE:,}.',
      fix='Correct it, or scale all numbers.'
      if least
      else 'Give a score that is higher for more similar texts.',
    )
  return str(round(number * SCORE_UNIT))
