"""Detects changes of the files that a streaming run reads, since the run began.

At startup a run records size, times and some blocks of every file in MODEL_DIR/source_files.json.
During training, a thread of process 0 adds the sha256 of all bytes. A restart compares: a file with
the same size, times and blocks counts as unchanged; a file with different times is read in full and
compared with its sha256.

A changed file of an evaluation is a warning, because the training can continue.

`FileWatch` checks the files during training.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Optional, TypeVar

from t5x_gpu.data.sources.discovery import relative_names, sample_digest, sha256_of, unreadable
from t5x_gpu.errors import DataError, listed, task_error
from t5x_gpu.storage.files import atomic_write, set_aside_damaged
from t5x_gpu.storage.json_schema import JsonObject, read_bytes
from t5x_gpu.terminal.console import show

NAME = 'source_files.json'
_VERSION = 1
# Files up to this size are hashed in full at startup; larger files only in sampled blocks.
_WHOLE_BYTES = 64 * 1024
_SAMPLES = 8
# On a network file system, opening each file takes a round trip.
_THREADS = 16
_READ_BYTES = 1 << 20
# Limit in the background: 4% of a core that hashes 1.8 GB/s, and little of a disk's bandwidth.
_BYTES_PER_SECOND = 64 * 2**20
_SECONDS_BETWEEN_WRITES = 30.0
_JOIN_SECONDS = 10.0
# Up to this many files are checked before every step. Checks of more files may take this share of
# the time.
_FEW = 8
_SHARE_OF_LOOKS = 0.003
NOT_COMPARED = (
  'Without it a restart compares only names, sizes and the first 64 KiB of the '
  'files, and the next batch.'
)
_LISTED = 5
_EVALUATION = 'evaluation of '
_DAMAGED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_Identity = tuple[int, int, int]  # size, mtime, inode
_Key = tuple[str, str]  # task, name relative to the folder common to its files
_T = TypeVar('_T')
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SourceFile:
  """The state of a file at one moment.

  Attributes:
    size: size in bytes.
    modified_ns, changed_ns: mtime and ctime; 0 if the storage does not have them.
    sample: hash of some blocks; '' for objects in remote storage.
    sha256: sha256 of all bytes; '' until it is known.
  """

  size: int
  modified_ns: int
  changed_ns: int = 0
  sample: str = ''
  sha256: str = ''

  def same_times(self, other: 'SourceFile') -> bool:
    return (self.size, self.modified_ns, self.changed_ns) == (
      other.size,
      other.modified_ns,
      other.changed_ns,
    )


def scan(path: str) -> SourceFile:
  """Returns the current state of a local file. Raises DataError if it cannot be read."""
  try:
    stat = os.stat(path)
    if stat.st_size <= _WHOLE_BYTES:
      sha256 = sha256_of(path)
      return _of_stat(stat, sample=sha256[:16], sha256=sha256)
    return _of_stat(stat, sample=sample_digest(path, num_blocks=_SAMPLES)[:16])
  except OSError as e:
    raise unreadable(path, e) from e


def _of_stat(stat: os.stat_result, **hashes: str) -> SourceFile:
  return SourceFile(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, **hashes)


def _sha256(path: str) -> str:
  try:
    return sha256_of(path)
  except OSError as e:
    raise unreadable(path, e) from e


class SourceFiles:
  """The files of all tasks of a run; empty for data without files.

  Args:
    paths: task -> its files.
    stat_remote: returns size and modification time of an object in remote storage (`gs://...`).
  Raises:
    DataError: a file cannot be read.
  """

  def __init__(
    self,
    paths: Mapping[str, Sequence[str]],
    *,
    stat_remote: Optional[Callable[[str], SourceFile]] = None,
  ):
    def look(path: str) -> SourceFile:
      return stat_remote(path) if '://' in path else scan(path)

    self._paths = {
      (task, name): path
      for task, some in paths.items()
      for name, path in relative_names(some).items()
    }
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      self.files = dict(zip(self._paths, pool.map(look, self._paths.values())))
    self._stop = threading.Event()

  def add_evaluation(self, evaluated: 'SourceFiles') -> None:
    """Adds the files of an evaluation that training does not read; see `changed_evaluation`."""
    known = set(self._paths.values())
    for (task, name), path in evaluated._paths.items():
      if path not in known:
        key = (_EVALUATION + task, name)
        self._paths[key], self.files[key] = path, evaluated.files[task, name]

  def to_json(self) -> bytes:
    """Returns the record for `check` and `changed_evaluation`."""
    tasks: dict[str, JsonObject] = {}
    for (task, name), file in list(self.files.items()):
      tasks.setdefault(task, {})[name] = dataclasses.astuple(file)
    return json.dumps({'version': _VERSION, 'tasks': tasks}).encode()

  def check(self, record: bytes, *, where: str) -> None:
    """Raises DataError if a file has changed since `record` was written.

    Added and removed files are not compared here, because the fingerprint of the data covers the
    names of all files.

    Args:
      record: result of `to_json`.
      where: file of the record, for messages.
    """
    try:
      before = _parse(record)
    except _DAMAGED as e:
      log.warning('%s is damaged (%s). %s', where, e, NOT_COMPARED)
      return
    changed, unknown = self._changes(before, _of_training(before.keys() & self.files.keys()))
    if changed:
      raise task_error(
        f'The training text has changed since {where} was written:' + _lines(changed),
        fix='Restore the original files, or start a new run in another MODEL_DIR.',
        docs='data.md#changed-source-files',
      )
    if unknown:
      raise task_error(
        f'{len(unknown)} source files have been written or copied since this run began:'
        + _lines(unknown)
        + f'\n{where} does not have their sha256: a run computes it in the background, and never '
        'for remote storage. So a changed byte could go unnoticed.',
        fix='Restore the files with their modification times; cp -a, rsync -a and tar keep '
        f'them.\nIf you are sure that their bytes are the same, delete {where}: then only '
        'names, sizes and the first 64 KiB are compared.\nOr start a new run in another '
        'MODEL_DIR.',
        docs='data.md#changed-source-files',
      )

  def changed_evaluation(self, record: bytes) -> list[str]:
    """Returns a line for each file of an evaluation that has changed since `record` was written.

    Added and removed files count if `record` has other files of the same task.
    """
    try:
      before = _parse(record)
    except _DAMAGED:  # `check` reports it
      return []
    then, now = (
      {key for key in some if key[0].startswith(_EVALUATION)} for some in (before, self.files)
    )
    tasks = {task for task, _ in then} & {task for task, _ in now}
    changed, unknown = self._changes(before, then & now)
    changed += [f'{path}: written or copied, perhaps with the same bytes' for path in unknown]
    changed += [f'{self._paths[key]}: new' for key in now - then if key[0] in tasks]
    changed += [f'{key[1]}: no longer there' for key in then - now if key[0] in tasks]
    return sorted(changed)

  def _changes(
    self, before: Mapping[_Key, SourceFile], keys: Iterable[_Key]
  ) -> tuple[list[str], list[str]]:
    """Returns a line for each of `keys` that has changed, and the paths that may have changed."""
    changed: list[str] = []
    unknown: list[str] = []
    to_hash: dict[_Key, str] = {}
    for key in keys:
      was, now, path = before[key], self.files[key], self._paths[key]
      if was.size != now.size:
        changed.append(f'{path}: {was.size:,} bytes then, {now.size:,} now')
      elif was.sample != now.sample or was.sha256 and now.sha256 not in ('', was.sha256):
        changed.append(f'{path}: same size, different bytes')
      elif was.same_times(now):
        self.files[key] = was
      elif now.sha256:
        continue  # a small file, already compared in full
      elif was.sha256:
        to_hash[key] = path
      elif was.modified_ns != now.modified_ns:
        unknown.append(path)
      # Otherwise only the ctime differs: after `cp -a`, `chmod`, or in another copy of a container.
    self._compare(to_hash, before, changed)
    return changed, unknown

  def _compare(
    self, to_hash: Mapping[_Key, str], before: Mapping[_Key, SourceFile], changed: list[str]
  ) -> None:
    """Hashes the local files `to_hash` in full; adds files that differ to `changed`."""
    if changed or not to_hash:
      return
    total = sum(self.files[key].size for key in to_hash)
    log.warning(
      '%d source files (%s) have modification times that differ from the record of this run; '
      'comparing all their bytes',
      len(to_hash),
      show(total, GB='.3g'),
    )
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      for (key, path), sha256 in zip(to_hash.items(), pool.map(_sha256, to_hash.values())):
        self.files[key] = dataclasses.replace(self.files[key], sha256=sha256)
        if sha256 != before[key].sha256:
          changed.append(f'{path}: same size, different bytes')

  @contextlib.contextmanager
  def kept_in(self, folder: pathlib.Path) -> Iterator[None]:
    """Keeps the record in `folder` up to date, and hashes the files in the background.

    Renames a damaged record, with a warning.
    """
    if not self.files:
      yield
      return
    _set_aside_if_damaged(folder / NAME)
    self._write(folder)
    thread = threading.Thread(target=self._hash_all, args=(folder,), daemon=True, name='hash_files')
    thread.start()
    try:
      yield
    finally:
      self._stop.set()
      thread.join(_JOIN_SECONDS)  # it checks `_stop` after every block
      self._write(folder)

  def _write(self, folder: pathlib.Path) -> None:
    try:
      with atomic_write(folder / NAME) as new:
        new.write_bytes(self.to_json())
    except OSError as e:  # the run will fail when it writes a checkpoint to the folder
      log.warning('%s cannot be written: %s. %s', folder / NAME, e.strerror, NOT_COMPARED)

  def _hash_all(self, folder: pathlib.Path) -> None:
    if sys.platform == 'linux':  # on other systems the id may refer to the process
      with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    known: dict[str, str] = {}  # several tasks may read the same file
    written, pause = time.monotonic(), _SECONDS_BETWEEN_WRITES
    for key, path in self._paths.items():
      if self.files[key].sha256 or '://' in path:
        continue
      if path not in known:
        known[path] = self._hash_slowly(key)
      if self._stop.is_set():
        return
      self.files[key] = dataclasses.replace(self.files[key], sha256=known[path])
      if time.monotonic() - written > pause:
        start = time.monotonic()
        self._write(folder)
        written = time.monotonic()
        pause = max(_SECONDS_BETWEEN_WRITES, 100 * (written - start))
    self._write(folder)

  def _hash_slowly(self, key: _Key) -> str:
    """Returns the sha256 of a file; '' if the run ends first or the file has changed."""
    path, at_start, digest = self._paths[key], self.files[key], hashlib.sha256()
    try:
      with open(path, 'rb', buffering=0) as f:
        begin = time.monotonic()
        while block := f.read(_READ_BYTES):
          digest.update(block)
          if self._stop.wait(max(0.0, len(block) / _BYTES_PER_SECOND - time.monotonic() + begin)):
            return ''
          begin = time.monotonic()
      if _of_stat(os.stat(path)).same_times(at_start):
        return digest.hexdigest()
      if _of_training([key]):  # the next evaluation reports its files
        log.warning('%s has changed since this run began. A restart will refuse it.', path)
    except OSError as e:
      log.warning('%s can no longer be read: %s', path, e.strerror)
    return ''


class FileWatch:
  """Reports files whose size, mtime or inode has changed since this object was created.

  If only the inode has changed, the sampled blocks decide: FUSE mounts (sshfs, gcsfuse, rclone)
  give an unchanged file a new inode after evicting it from their cache.

  Args:
    paths: local files.
  """

  def __init__(self, paths: Iterable[str] = ()):
    self._paths = tuple(dict.fromkeys(path for path in paths if '://' not in path))
    self._before: dict[str, Optional[_Identity]] = {}
    self._before = self._each(self._identity)
    self._samples = self._each(_sample)
    self._next_look = 0.0
    self._changed: list[str] = []
    self.unchanged_at = -1

  def look(self, step: int, *, now: bool = False) -> list[str]:
    """Returns a line for each file that has changed.

    Args:
      step: step of the last batch read; `unchanged_at` becomes this step if no file has changed.
      now: always check, not only if the last check was long enough ago.
    """
    start = time.monotonic()
    if self._changed or not (now or start >= self._next_look):
      return self._changed
    self._changed = [
      f'{path}: {_difference(self._before[path], found)}'
      for path, found in self._each(self._identity).items()
      if found != self._before[path] and not self._has_only_another_inode(path, found)
    ]
    if not self._changed:
      self.unchanged_at = step
    end = time.monotonic()
    if len(self._paths) > _FEW:
      self._next_look = end + (end - start) / _SHARE_OF_LOOKS
    return self._changed

  def _each(self, look: Callable[[str], _T]) -> dict[str, _T]:
    if len(self._paths) <= _THREADS:
      return {path: look(path) for path in self._paths}
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      return dict(zip(self._paths, pool.map(look, self._paths)))

  def _has_only_another_inode(self, path: str, now: Optional[_Identity]) -> bool:
    before = self._before[path]
    if before is None or now is None or before[:2] != now[:2]:
      return False
    sample = _sample(path)
    if sample is None:  # an outage: the next check compares again
      return True
    if sample != self._samples[path]:
      return False
    self._before[path] = now
    return True

  def _identity(self, path: str) -> Optional[_Identity]:
    try:
      stat = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
      return None
    except OSError:  # during an outage of the storage, the file may be unchanged
      return self._before.get(path)
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _sample(path: str) -> Optional[str]:
  try:
    return scan(path).sample
  except DataError:
    return None


def _difference(before: Optional[_Identity], now: Optional[_Identity]) -> str:
  if before is None or now is None:
    return 'it no longer exists' if now is None else 'it exists again'
  if before[0] != now[0]:
    return f'{before[0]:,} bytes at the start, {now[0]:,} now'
  return 'written during the run' if before[1] != now[1] else 'replaced by another file'


def _set_aside_if_damaged(path: pathlib.Path) -> None:
  if not os.path.lexists(path):
    return
  with contextlib.suppress(OSError):  # if renaming fails, the first write will warn
    try:
      _parse(read_bytes(path))
    except (OSError, *_DAMAGED) as e:
      set_aside_damaged(path, e)


def _of_training(keys: Iterable[_Key]) -> list[_Key]:
  return [key for key in keys if not key[0].startswith(_EVALUATION)]


def _lines(texts: Sequence[str]) -> str:
  return ''.join(f'\n  {text}' for text in listed(sorted(texts), _LISTED))


def _parse(record: bytes) -> dict[_Key, SourceFile]:
  """Parses the result of `to_json`. Raises ValueError, TypeError, ... for other bytes."""
  content = json.loads(record)
  if content['version'] != _VERSION:
    raise ValueError(f'version {content["version"]!r}')
  types = (int, int, int, str, str)
  found = {}
  for task, files in content['tasks'].items():
    for name, values in files.items():
      if [type(value) for value in values] != list(types):
        raise ValueError(f'the entry of {name!r}')
      found[task, name] = SourceFile(*values)
  return found
