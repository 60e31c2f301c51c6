"""Parses a line of JSON lines into an object or its texts. Errors name file and line. No TF."""

import json
from collections.abc import Sequence

from t5x_gpu.errors import DataError
from t5x_gpu.storage.json_schema import MOST_DEPTH, JsonObject, JsonValue, is_deeper


def _fix(keys: Sequence[str]) -> str:
  needed = f' with the string key{"s"[: len(keys) - 1]} {" and ".join(map(repr, keys))}'
  return f'Correct or remove that line; each line is one JSON object{needed if keys else ""}.'


def json_value(text: bytes | str) -> JsonValue:
  """Returns the value of JSON text.

  Raises:
    ValueError: the text is not JSON or is nested more than `MOST_DEPTH` levels deep, or an object
      has different values under one key.
  """
  try:
    value = json.loads(text, object_pairs_hook=_object)
  except RecursionError:
    raise ValueError('it is nested too deeply') from None
  marks = (b'[', b'{') if isinstance(text, bytes) else ('[', '{')
  # Later readers of the value recurse, too.
  if sum(map(text.count, marks)) > MOST_DEPTH and is_deeper(value, MOST_DEPTH):
    raise ValueError(f'it is nested more than {MOST_DEPTH} levels deep')
  return value


def _object(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
  found = dict(pairs)
  if len(found) < len(pairs):
    for key, value in pairs:
      if found[key] != value:
        raise ValueError(f'an object has the key {key!r} twice, with different values')
  return found


def json_object(line: bytes | str, *, where: str, keys: Sequence[str] = ()) -> JsonObject:
  """Returns the object in `line`. Raises DataError, naming `where` (file:line), if it has none.

  Args:
    line: a line of the file.
    where: file and line, for errors.
    keys: string keys that the object should have; only errors use them.
  """
  fix = _fix(keys)
  try:
    record = json_value(line)
  except ValueError as e:
    raise DataError(f'{where} is not JSON: {e}. The line begins {line[:60]!r}.', fix=fix) from e
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
