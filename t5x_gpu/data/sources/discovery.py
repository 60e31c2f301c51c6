"""The files of a source: which files a pattern matches, and their digests. No TensorFlow.

`matching_files` returns each real file once, also with loops of symbolic links.
`standard_library_files` returns Python source. `sample_digest` and `fingerprint` identify content.
"""

import functools
import glob
import hashlib
import logging
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence

from t5x_gpu.errors import DataError, listed, task_error
from t5x_gpu.storage.files import is_missing, reason_of, remedy
from t5x_gpu.storage.json_schema import JsonObject
from t5x_gpu.storage.user_paths import without_dots

_BLOCK_BYTES = 4096


def relative_names(paths: Iterable[str]) -> dict[str, str]:
  """Returns name -> path; names are relative to the common folder, so that copies have equal names.

  Objects in remote storage (`gs://...`) keep their full names.
  """
  paths = list(paths)
  if any('://' in path for path in paths):
    return {path: path for path in paths}
  root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths] or ['/'])
  return {os.path.relpath(path, root): path for path in paths}


def sha256_of(path: str | os.PathLike) -> str:
  """Returns the sha256 of all bytes of a file."""
  with open(path, 'rb', buffering=0) as f:
    return hashlib.file_digest(f, 'sha256').hexdigest()


def sample_digest(path: str | os.PathLike, *, num_blocks: int = 16) -> str:
  """Returns the sha256 of evenly spaced 4 KiB blocks of a file, including the first and last."""
  size, digest = os.path.getsize(path), hashlib.sha256()
  starts = {max(0, size - _BLOCK_BYTES) * i // (num_blocks - 1) for i in range(num_blocks)}
  with open(path, 'rb') as f:
    for start in sorted(starts):
      f.seek(start)
      digest.update(f.read(_BLOCK_BYTES))
  return digest.hexdigest()


_LISTED = 3
log = logging.getLogger(__name__)
_Inode = tuple[int, int]  # device and number
# Every ext4 volume has this folder; only root may read it, and it never holds a data set.
_LOST_AND_FOUND = 'lost+found'


def unreadable(path: str, e: OSError) -> DataError:
  """Returns the error for a file or folder that cannot be opened or read now."""
  return task_error(
    f'{path} cannot be read: {reason_of(e)}.', fix=f'{remedy(e)}\nOr leave it out of the pattern.'
  )


def find_files(pattern: str) -> list[str]:
  """Returns the files that `pattern` matches, sorted; `**` matches nested folders.

  A file with several names (same device and inode) is listed once. A name with an extension is
  preferred (Hugging Face's cache links to blobs without extensions), then a name without links. The
  log lists skipped links. No path has `..`.

  Raises:
    DataError: a file or folder cannot be read.
  """
  skipped: list[str] = []
  paths: dict[tuple[int, ...], str] = {}
  for path in sorted(_matches(pattern, skipped), key=_preference):
    if not _is_file(path):
      if os.path.islink(path) and not os.path.exists(path):
        skipped.append(path)
      continue
    if not os.access(path, os.R_OK, effective_ids=True):
      _check_opens(path)
    if paths.setdefault(_identity(path), path) != path:
      skipped.append(path)
  if skipped:
    shown = [
      f'{path} -> {os.readlink(path)}' if os.path.islink(path) else path
      for path in sorted(set(skipped))
    ]
    log.warning(
      '%r: skipped %d names that are broken links, or link to files and folders already listed: %s',
      pattern,
      len(shown),
      ', '.join(listed(shown, _LISTED)),
    )
  resolved = functools.cache(without_dots)  # many files share a folder
  split = map(os.path.split, sorted(paths.values()))
  return [os.path.join(resolved(folder), name) for folder, name in split]


def _matches(pattern: str, skipped: list[str]) -> Iterator[str]:
  """Yields the same as `glob.glob(pattern, recursive=True)`, but visits folders below `**` once."""
  parts = pattern.split(os.sep)
  if '**' not in parts:
    _check_folders(parts)
    yield from glob.glob(pattern)
    return
  at = parts.index('**')
  above, below = os.sep.join(parts[:at]), os.sep.join(parts[at + 1 :]) or '*'
  _check_folders(parts[:at])
  roots = glob.glob(above + os.sep) if above or at else [os.curdir]
  for folder in _folders(sorted(roots), skipped):
    # As in glob, names relative to the current folder do not start with './'.
    inside = '' if folder == os.curdir else os.path.join(glob.escape(folder), '')
    yield from _matches(inside + below, skipped)


def _check_folders(parts: list[str]) -> None:
  """Raises DataError for an unreadable folder in the pattern's path, which glob would skip."""
  for i in range(1, len(parts)):
    lists = glob.has_magic(parts[i])
    for folder in glob.glob(os.sep.join(parts[:i]) + os.sep):
      try:
        _enter(folder)
        if lists:
          os.scandir(folder).close()
      except OSError as e:
        if os.path.basename(folder.rstrip(os.sep)) != _LOST_AND_FOUND:
          raise unreadable(folder.rstrip(os.sep), e) from e


def _enter(folder: str) -> None:
  """Raises OSError without permission to search `folder`."""
  os.stat(os.path.join(folder, os.curdir))


def _is_file(path: str) -> bool:
  """Returns os.path.isfile(path); raises DataError if the system denies access."""
  return stat.S_ISREG(_mode(path))


def _mode(path: str | os.PathLike) -> int:
  """Returns the mode of a file; 0 for a broken link.

  Raises DataError if the file server does not answer: the file must not silently leave the data.
  """
  try:
    return os.stat(path).st_mode
  except OSError as e:
    if not is_missing(e):
      raise unreadable(os.fspath(path), e) from e
    return 0


def _folders(roots: list[str], skipped: list[str]) -> Iterator[str]:
  """Yields `roots` and all folders in them, each real folder once; links come last."""
  seen: set[_Inode] = set()
  todo, links = roots[::-1], []
  while todo or links:
    folder = todo.pop() if todo else links.pop(0)
    if _inode(folder) in seen:
      skipped.append(folder.rstrip(os.sep))
      continue
    seen.add(_inode(folder))
    yield folder
    try:
      with os.scandir(folder) as entries:
        # Not DirEntry.is_dir, which raises on a link to itself.
        inner = sorted(
          (
            entry
            for entry in entries
            if not entry.name.startswith('.') and stat.S_ISDIR(_mode(entry))
          ),
          key=lambda entry: entry.name,
          reverse=True,
        )
      _enter(folder)
    except OSError as e:
      if os.path.basename(folder.rstrip(os.sep)) == _LOST_AND_FOUND:
        continue
      raise unreadable(folder, e) from e
    for entry in inner:
      path = entry.name if folder == os.curdir else entry.path
      (links if entry.is_symlink() else todo).append(path)


def _check_opens(path: str) -> None:
  """Raises DataError unless the file opens: some containers forbid `os.access` but not reading."""
  try:
    with open(path, 'rb'):
      pass
  except OSError as e:
    raise unreadable(path, e) from e


def _identity(path: str) -> tuple[int, ...]:
  """Returns the identity of a file, also for FUSE file systems that reuse inodes."""
  status = os.stat(path)
  return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _inode(path: str) -> _Inode:
  status = os.stat(path)
  return status.st_dev, status.st_ino


def _preference(path: str) -> tuple[bool, bool, str]:
  has_link = os.path.realpath(path) != os.path.abspath(path)
  return not os.path.splitext(path)[1], has_link, path


# One in this many files goes to the validation split.
VALIDATION_ONE_IN = 20
_HEAD_BYTES = 65536


def fingerprint(files: Sequence[str]) -> JsonObject:
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
      f'{os.path.abspath(without_dots(folder) or ".")} exists and holds '
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
