"""Finding and judging the files that documents come from: names, bytes and JSON, no TF."""

import hashlib
import json
import logging
import os
import sysconfig
from collections.abc import Sequence
from typing import Any

from t5x_gpu.data.sources.file_patterns import find_files, unreadable
from t5x_gpu.data.sources.rows import open_text
from t5x_gpu.errors import DataError

# One file in this many goes to the validation split.
VALIDATION_ONE_IN = 20
_HEAD_BYTES = 65536
log = logging.getLogger(__name__)


def fingerprint(files: Sequence[str]) -> dict[str, Any]:
  """Returns number, total bytes and a hash of `files`, the same wherever they lie.

  The hash covers relative path, size and the first 64 KiB of each file.
  """
  digest, total = hashlib.sha256(), 0
  # With the common folder cut off, the same files elsewhere are the same data.
  root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in files] or ['/'])
  for path in files:
    size = os.path.getsize(path)
    total += size
    digest.update(f'{os.path.relpath(path, root)}\0{size}\0'.encode())
    try:
      with open(path, 'rb') as f:
        digest.update(f.read(_HEAD_BYTES))
    except OSError as e:
      raise unreadable(path, e) from e
  return {'files': len(files), 'bytes': total, 'hash': digest.hexdigest()[:16]}


def json_fields(line: bytes, *, keys: Sequence[str], where: str) -> list[bytes]:
  """Returns the UTF-8 of the string fields `keys`. Raises DataError naming `where` (file:line)."""
  fix = (
    'Mend or remove that line; each line is one JSON object with the string '
    + ('key ' if len(keys) == 1 else 'keys ')
    + ' and '.join(repr(key) for key in keys)
    + '.'
  )
  try:
    record = _json(line)
  except ValueError as e:
    raise DataError(f'{where} is not JSON: {e}. The line begins {line[:60]!r}.', fix=fix) from e
  if not isinstance(record, dict):
    raise DataError(f'{where} holds a JSON {type(record).__name__}, not an object.', fix=fix)
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
      f'{where} holds half of a surrogate pair, which is no character: {e}.', fix=fix
    ) from e


def _json(line: bytes) -> Any:
  """Returns what a line of JSON says; raises ValueError if it is none that Python can read."""
  try:
    return json.loads(line)
  except RecursionError as e:
    raise ValueError('it is nested too deeply') from e


def first_line(path: str) -> tuple[int, bytes]:
  """Returns number and bytes of the first line that is not blank, or (0, b'')."""
  try:
    with open_text(path) as f:
      return next(((i, line) for i, line in enumerate(f, 1) if line.strip()), (0, b''))
  except (OSError, EOFError) as e:
    raise DataError(
      f'{path} cannot be read: {e}.',
      fix='Get the file anew, or leave it out of the pattern.',
      parameters=('DatasetConfig.mixture_or_task_name',),
    ) from e


def json_keys(path: str) -> list[str]:
  """Returns the keys of texts in the first object of a file of JSON lines; none if it is none."""
  try:
    record = _json(first_line(path)[1] or b'null')
  except ValueError:
    return []
  return (
    [key for key, value in record.items() if isinstance(value, str)]
    if isinstance(record, dict)
    else []
  )


def jsonl_keys(path: str) -> dict[str, str]:
  """Returns JSON key -> feature, judged by the first line of the file at `path`.

  {'inputs', 'targets'} make a supervised task; 'text' or 'targets' alone a language-model task.
  """
  number, line = first_line(path)
  if line:
    where = f'{path}:{number}'
    try:
      record = _json(line)
    except ValueError:
      record = {}
      json_fields(line, keys=['text'], where=where)  # Raises with the reason.
    keys = record if isinstance(record, dict) else {}
    if 'inputs' in keys and 'targets' in keys:
      return {'inputs': 'inputs', 'targets': 'targets'}
    if 'targets' in keys and 'text' not in keys:
      return {'targets': 'targets'}
    json_fields(line, keys=['text'], where=where)
    return {'text': 'targets'}
  raise DataError(
    f'{path} is empty.',
    fix='Point jsonl: at a file with a JSON object per line.',
    parameters=('DatasetConfig.mixture_or_task_name',),
  )


def matching_files(pattern: str) -> list[str]:
  """Returns the sorted files that match `pattern`: `**` goes into folders, a folder is all in it.

  Raises:
    DataError: no file matches, all that match are empty, or one cannot be read.
  """
  expanded = os.path.expanduser(pattern)
  if os.path.isdir(expanded):
    expanded = os.path.join(expanded, '**')
  files = find_files(expanded)
  if not files:
    folder = expanded
    while folder and not os.path.isdir(folder):
      folder = os.path.dirname(folder)
    held = sorted(os.listdir(folder or '.'))
    raise DataError(
      f'No file matches {pattern!r} (looked from {os.getcwd()}). '
      f'{os.path.abspath(folder or ".")} exists and holds '
      + (', '.join(held[:8]) + (', ...' if len(held) > 8 else '') if held else 'nothing')
      + '.',
      fix='Correct the path after the colon of MIXTURE_OR_TASK_NAME; wildcards are *, ** and ?.',
      parameters=('DatasetConfig.mixture_or_task_name',),
    )
  full = [path for path in files if os.path.getsize(path)]
  if full and len(full) < len(files):
    log.warning(
      '%d of the %d files that match %r are empty and are skipped',
      len(files) - len(full),
      len(files),
      pattern,
    )
  if not full:
    raise DataError(
      f'All {len(files)} files that match {pattern!r} are empty.',
      fix='Point MIXTURE_OR_TASK_NAME at files with text.',
      parameters=('DatasetConfig.mixture_or_task_name',),
    )
  return full


# Tests, vendored packages and tables of codes: bulky, and not what people mean by Python source.
_SKIPPED_FOLDERS = {
  'test',
  'tests',
  'idlelib',
  'idle_test',
  'site-packages',
  'dist-packages',
  'lib2to3',
  '__pycache__',
  'ensurepip',
  'turtledemo',
  'pydoc_data',
  'encodings',
}


def standard_library_files() -> dict[str, list[str]]:
  """Returns the running interpreter's library, .py files by split.

  A hash of the path relative to the library decides: about 1 in 20 goes to validation.

  Raises:
    DataError: an interpreter without its library in source form.
  """
  root = sysconfig.get_paths()['stdlib']
  files: dict[str, list[str]] = {'train': [], 'validation': []}
  for folder, folders, names in os.walk(root):
    folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
    for name in sorted(names):
      path = os.path.join(folder, name)
      if name.endswith('.py') and os.path.getsize(path):
        relative = os.path.relpath(path, root).replace(os.sep, '/')
        number = int.from_bytes(hashlib.sha256(relative.encode()).digest()[:4], 'big')
        files['train' if number % VALIDATION_ONE_IN else 'validation'].append(path)
  if not files['train'] or not files['validation']:
    raise DataError(
      f"python_source reads the standard library's .py files, and {root} holds "
      f'{sum(map(len, files.values()))} of them.',
      fix='Use a Python with its library in source form, or set MIXTURE_OR_TASK_NAME = '
      "'text_files:FOLDER/**/*.py'.",
      parameters=('DatasetConfig.mixture_or_task_name',),
    )
  return files
