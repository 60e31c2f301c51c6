"""Finds the files with documents: files that match a pattern, or the standard library."""

import glob
import hashlib
import logging
import os
import sysconfig
from collections.abc import Sequence
from typing import Any

from t5x_gpu.data.sources.file_digests import relative_names
from t5x_gpu.data.sources.file_patterns import find_files, unreadable
from t5x_gpu.errors import listed, task_error

# One in this many files goes to the validation split.
VALIDATION_ONE_IN = 20
_HEAD_BYTES = 65536
log = logging.getLogger(__name__)


def fingerprint(files: Sequence[str]) -> dict[str, Any]:
  """Returns number, total bytes and a hash of `files`; the same in any folder.

  The hash covers relative path, size and the first 64 KiB of each file.
  """
  digest, total = hashlib.sha256(), 0
  for name, path in relative_names(files).items():
    size = os.path.getsize(path)
    total += size
    digest.update(f'{name}\0{size}\0'.encode())
    try:
      with open(path, 'rb') as f:
        digest.update(f.read(_HEAD_BYTES))
    except OSError as e:
      raise unreadable(path, e) from e
  return {'files': len(files), 'bytes': total, 'hash': digest.hexdigest()[:16]}


def matching_files(pattern: str) -> list[str]:
  """Returns the sorted files that match `pattern`.

  `**` matches nested folders; a folder matches all files in it. Empty files are skipped. The part
  of the path that exists is taken literally: if a folder `set[1]` exists, it does not match `set1`.

  Raises:
    DataError: no file matches, all matching files are empty, or a file cannot be read.
  """
  expanded = os.path.expanduser(pattern)
  if os.path.isdir(expanded):
    files = find_files(os.path.join(glob.escape(expanded), '**'))
  else:
    files = find_files(_with_literal_folders(expanded))
  if not files:
    folder = expanded
    while folder and not os.path.isdir(folder):
      folder = os.path.dirname(folder)
    held = sorted(os.listdir(folder or '.'))
    raise task_error(
      f'No file matches {pattern!r} (working directory: {os.getcwd()}). '
      f'{os.path.abspath(folder or ".")} exists and holds '
      + (', '.join(listed(held, 8)) or 'nothing')
      + '.',
      fix='Correct the path after the colon of MIXTURE_OR_TASK_NAME; wildcards are *, ** and ?.',
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
    raise task_error(
      f'All {len(files)} files that match {pattern!r} are empty.',
      fix='Point MIXTURE_OR_TASK_NAME at files with text.',
    )
  return full


def _with_literal_folders(pattern: str) -> str:
  """Returns `pattern` with its longest part that exists escaped."""
  parts = pattern.split(os.sep)
  for i in range(len(parts), 0, -1):
    above = os.sep.join(parts[:i])
    if above and os.path.lexists(above):
      return os.sep.join([glob.escape(above), *parts[i:]])
  return pattern


# Tests, vendored packages and code tables: bulky, and not typical Python source.
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
  """Returns split -> .py files of the running interpreter's standard library.

  A hash of the relative path assigns the split: about 1 file in 20 goes to validation.

  Raises:
    DataError: the interpreter's library is not in source form.
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
    raise task_error(
      f"python_source reads the standard library's .py files, and {root} holds "
      f'{sum(map(len, files.values()))} of them.',
      fix='Use a Python with its library in source form, or set MIXTURE_OR_TASK_NAME = '
      "'text_files:FOLDER/**/*.py'.",
    )
  return files
