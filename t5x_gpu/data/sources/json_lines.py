"""A line of JSON lines as an object, or as its texts. Errors name file and line. No TF."""

import json
from collections.abc import Sequence
from typing import Any

from t5x_gpu.errors import DataError


def _fix(keys: Sequence[str]) -> str:
  needed = f' with the string key{"s"[: len(keys) - 1]} {" and ".join(map(repr, keys))}'
  return f'Correct or remove that line; each line is one JSON object{needed if keys else ""}.'


def json_object(line: bytes | str, *, where: str, keys: Sequence[str] = ()) -> dict[str, Any]:
  """Returns the object in `line`. Raises DataError, naming `where` (file:line), for all else.

  Args:
    line: of the file.
    where: file and line, for errors.
    keys: string keys that the object should have; only errors use them.
  """
  fix = _fix(keys)
  try:
    record = json.loads(line)
  except (ValueError, RecursionError) as e:
    reason = 'it is nested too deeply' if isinstance(e, RecursionError) else e
    raise DataError(
      f'{where} is not JSON: {reason}. The line begins {line[:60]!r}.', fix=fix
    ) from e
  if not isinstance(record, dict):
    raise DataError(f'{where} holds a JSON {type(record).__name__}, not an object.', fix=fix)
  return record


def json_fields(line: bytes, *, keys: Sequence[str], where: str) -> list[bytes]:
  """Returns the UTF-8 of the string fields `keys`. Raises DataError, naming `where`."""
  record, fix = json_object(line, where=where, keys=keys), _fix(keys)
  for key in keys:
    if not isinstance(record.get(key), str):
      there = (
        f'it is {json.dumps(record[key])[:60]}'
        if key in record
        else f'it has {", ".join(sorted(record)) or "no keys"}'
      )
      raise DataError(f'{where} has no text under key {key!r}: {there}.', fix=fix)
  try:
    return [record[key].encode() for key in keys]
  except UnicodeEncodeError as e:
    raise DataError(
      f'{where} holds half of a surrogate pair, which is not a character: {e}.', fix=fix
    ) from e
