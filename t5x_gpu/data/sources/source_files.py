"""The files that a streaming run reads, and whether any byte of them has changed since it began.

At its start a run records size, times and some blocks of every file in MODEL_DIR/source_files.json.
While it trains, a thread of process 0 adds the sha256 of all bytes. A restart compares: a file with
the same size, times and blocks is taken to be the same; one with other times is read in full and
compared with its sha256.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.config.atomic_write import atomic_write
from t5x_gpu.data.sources.file_patterns import unreadable
from t5x_gpu.errors import DataError

NAME = 'source_files.json'
_VERSION = 1
# Smaller files are hashed in full at the start; of others, this many blocks spread over the file.
_WHOLE_BYTES = 64 * 1024
_SAMPLES, _SAMPLE_BYTES = 8, 4096
# Opening files takes a round trip each on a network file system.
_THREADS = 16
_READ_BYTES = 1 << 20
# In the background: 4% of a core that hashes 1.8 GB/s, and little of what a disk gives.
_BYTES_PER_SECOND = 64 * 2**20
_SECONDS_BETWEEN_WRITES = 30.0
_JOIN_SECONDS = 10.0
NOT_COMPARED = (
  'Without it a restart compares only names, sizes and the first 64 KiB of the '
  'files, and the next batch.'
)
_LISTED = 5
_TASK = ('DatasetConfig.mixture_or_task_name',)
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SourceFile:
  """A file as it was at one moment.

  Attributes:
    size: in bytes.
    modified_ns, changed_ns: mtime and ctime; 0 where a storage has none.
    sample: hash of some blocks; empty for objects in remote storage.
    sha256: of all bytes; empty until it is known.
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
  """Returns a local file as it is now. Raises DataError if it cannot be read."""
  try:
    with open(path, 'rb', buffering=0) as f:
      stat = os.fstat(f.fileno())
      if stat.st_size <= _WHOLE_BYTES:
        sha256 = hashlib.sha256(f.read(_WHOLE_BYTES)).hexdigest()
        return _of_stat(stat, sample=sha256[:16], sha256=sha256)
      digest, last = hashlib.sha256(), stat.st_size - _SAMPLE_BYTES
      for i in range(_SAMPLES):
        digest.update(os.pread(f.fileno(), _SAMPLE_BYTES, last * i // (_SAMPLES - 1)))
      return _of_stat(stat, sample=digest.hexdigest()[:16])
  except OSError as e:
    raise unreadable(path, e) from e


def _of_stat(stat: os.stat_result, **hashes: str) -> SourceFile:
  return SourceFile(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, **hashes)


def _blocks(path: str) -> Iterator[bytes]:
  with open(path, 'rb', buffering=0) as f:
    while block := f.read(_READ_BYTES):
      yield block


def _sha256(path: str) -> str:
  digest = hashlib.sha256()
  try:
    for block in _blocks(path):
      digest.update(block)
  except OSError as e:
    raise unreadable(path, e) from e
  return digest.hexdigest()


class SourceFiles:
  """The files of all tasks of a run; none for data that has no files.

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
      (task, name): path for task, some in paths.items() for name, path in _names(some).items()
    }
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      self.files = dict(zip(self._paths, pool.map(look, self._paths.values())))
    self._stop = threading.Event()

  def to_json(self) -> bytes:
    """Returns the record that `check` takes."""
    tasks: dict[str, dict[str, Any]] = {}
    for (task, name), file in list(self.files.items()):
      tasks.setdefault(task, {})[name] = dataclasses.astuple(file)
    return json.dumps({'version': _VERSION, 'tasks': tasks}).encode()

  def check(self, record: bytes, *, where: str) -> None:
    """Raises DataError unless all files are as they were when `record` was written.

    Files that only one side has are left to the fingerprint of the data, which covers all names.

    Args:
      record: what `to_json` returned.
      where: the file that it comes from, for messages.
    """
    try:
      before = _parse(record)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
      log.warning('%s is damaged (%s). %s', where, e, NOT_COMPARED)
      return
    changed: list[str] = []
    unknown: list[str] = []
    to_hash: dict[tuple[str, str], str] = {}
    for key in before.keys() & self.files.keys():
      was, now, path = before[key], self.files[key], self._paths[key]
      if was.size != now.size:
        changed.append(f'{path}: {was.size:,} bytes then, {now.size:,} now')
      elif was.sample != now.sample or was.sha256 and now.sha256 not in ('', was.sha256):
        changed.append(f'{path}: same size, other bytes')
      elif was.same_times(now):
        self.files[key] = was
      elif now.sha256:
        continue  # of few bytes, all of which are compared already
      elif was.sha256:
        to_hash[key] = path
      elif was.modified_ns != now.modified_ns:
        unknown.append(path)
      # Else only the ctime differs, as after `cp -a`, `chmod` or in another copy of a container.
    self._compare(to_hash, before, changed)
    if changed:
      raise DataError(
        f'The text that this run is trained on has changed since {where} was written:'
        + _lines(changed),
        fix='Bring back the files as they were, or start a new run in another MODEL_DIR.',
        parameters=_TASK,
        docs='data.md#changed-source-files',
      )
    if unknown:
      raise DataError(
        f'{len(unknown)} source files have been written or copied since this run began:'
        + _lines(unknown)
        + f'\n{where} has no sha256 of them: a run computes it in the '
        'background, and never for remote storage. So a changed byte might not be seen.',
        fix='Bring back the files with their modification times; cp -a, rsync -a and tar keep '
        f'them.\nIf you are sure that they hold the same bytes, delete {where}: then only '
        'names, sizes and the first 64 KiB are compared.\nOr start a new run in another '
        'MODEL_DIR.',
        parameters=_TASK,
        docs='data.md#changed-source-files',
      )

  def _compare(
    self,
    to_hash: Mapping[tuple[str, str], str],
    before: Mapping[tuple[str, str], SourceFile],
    changed: list[str],
  ) -> None:
    """Hashes all bytes of the local files `to_hash`; adds those that differ to `changed`."""
    if changed or not to_hash:
      return
    total = sum(self.files[key].size for key in to_hash)
    log.warning(
      '%d source files (%.3g GB) have other times than in the record of this run; '
      'comparing all of their bytes',
      len(to_hash),
      total / 1e9,
    )
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      for (key, path), sha256 in zip(to_hash.items(), pool.map(_sha256, to_hash.values())):
        self.files[key] = dataclasses.replace(self.files[key], sha256=sha256)
        if sha256 != before[key].sha256:
          changed.append(f'{path}: same size, other bytes')

  @contextlib.contextmanager
  def kept_in(self, folder: pathlib.Path) -> Iterator[None]:
    """Within, keeps the record in `folder` and hashes the files in the background."""
    if not self.files:
      yield
      return
    self._write(folder)
    thread = threading.Thread(target=self._hash_all, args=(folder,), daemon=True, name='hash_files')
    thread.start()
    try:
      yield
    finally:
      self._stop.set()
      thread.join(_JOIN_SECONDS)  # it looks at `_stop` after every block
      self._write(folder)

  def _write(self, folder: pathlib.Path) -> None:
    try:
      with atomic_write(folder / NAME) as new:
        new.write_bytes(self.to_json())
    except OSError as e:  # the run has checkpoints to write there, and fails with those
      log.warning('%s cannot be written: %s. %s', folder / NAME, e.strerror, NOT_COMPARED)

  def _hash_all(self, folder: pathlib.Path) -> None:
    if sys.platform == 'linux':  # there of this thread alone; elsewhere the id may be a process's
      with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    known: dict[str, str] = {}  # several tasks may read one file
    written, pause = time.monotonic(), _SECONDS_BETWEEN_WRITES
    for key, path in self._paths.items():
      if self.files[key].sha256 or '://' in path:
        continue
      if path not in known:
        known[path] = self._hash_slowly(path, self.files[key])
      if self._stop.is_set():
        return
      self.files[key] = dataclasses.replace(self.files[key], sha256=known[path])
      if time.monotonic() - written > pause:
        start = time.monotonic()
        self._write(folder)
        written = time.monotonic()
        pause = max(_SECONDS_BETWEEN_WRITES, 100 * (written - start))
    self._write(folder)

  def _hash_slowly(self, path: str, at_start: SourceFile) -> str:
    """Returns the sha256 of a file, empty if the run ends first or the file has changed."""
    digest = hashlib.sha256()
    try:
      begin = time.monotonic()
      for block in _blocks(path):
        digest.update(block)
        if self._stop.wait(max(0.0, len(block) / _BYTES_PER_SECOND - time.monotonic() + begin)):
          return ''
        begin = time.monotonic()
      if _of_stat(os.stat(path)).same_times(at_start):
        return digest.hexdigest()
      log.warning('%s has been written to since this run began. A restart will refuse it.', path)
    except OSError as e:
      log.warning('%s can no longer be read: %s', path, e.strerror)
    return ''


def _names(paths: Sequence[str]) -> dict[str, str]:
  """Returns name -> path; names are relative to the common folder, the same wherever it lies."""
  if any('://' in path for path in paths):
    return {path: path for path in paths}
  root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths] or ['/'])
  return {os.path.relpath(path, root): path for path in paths}


def _lines(texts: Sequence[str]) -> str:
  shown = sorted(texts)[:_LISTED]
  more = [f'and {len(texts) - len(shown)} more'] if len(texts) > len(shown) else []
  return ''.join(f'\n  {text}' for text in [*shown, *more])


def _parse(record: bytes) -> dict[tuple[str, str], SourceFile]:
  """Returns what `to_json` wrote; raises ValueError, TypeError, ... for anything else."""
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
