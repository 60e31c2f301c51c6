"""Files of this machine: writes that are safe against interruptions, and reads that fail.

`atomic_write` replaces a file: readers see the old file or the complete new file. `append_line`
appends to a file of lines. `access_error` is the error for a file that cannot be opened, which says
nothing about its bytes; `set_aside_damaged` renames a damaged file, so that a restart continues
without it.
"""

import contextlib
import errno
import fcntl
import logging
import os
import pathlib
import shutil
import stat
import tempfile
from collections.abc import Iterator
from typing import IO, Optional

from t5x_gpu.errors import AccessError
from t5x_gpu.terminal.console import show

_log = logging.getLogger(__name__)

_SOME_BYTES = 100_000_000  # a disk with less free space counts as full, for any file size


@contextlib.contextmanager
def atomic_write(
  path: str | os.PathLike, *, sync: bool = False, suffix: str = '.tmp'
) -> Iterator[pathlib.Path]:
  """Yields a temporary path next to `path`; the file replaces `path` when the block ends.

  If the block raises, `path` is unchanged and the temporary file is removed.

  Args:
    path: path of the file; its folder exists.
    sync: also survive a crash of the machine, at the cost of waiting for the disk.
    suffix: suffix of the temporary file. Include the process id if several processes may write the
      same file concurrently.
  """
  path = pathlib.Path(path)
  temporary = path.with_name(path.name + suffix)
  try:
    yield temporary
    if sync:
      _sync(temporary)
    os.replace(temporary, path)
  except BaseException:
    with contextlib.suppress(OSError):
      temporary.unlink(missing_ok=True)
    raise


def sync_folder(folder: str | os.PathLike, *, leave_out: str = '') -> None:
  """Makes everything below a folder survive a crash of the machine.

  Args:
    folder: the folder.
    leave_out: folders whose name begins with this are left out, if it is not ''.
  Raises:
    OSError: a file cannot be written to the disk.
  """
  with os.scandir(folder) as entries:
    for entry in entries:
      if not entry.is_dir(follow_symlinks=False):
        _sync_where_possible(entry.path)
      elif not (leave_out and entry.name.startswith(leave_out)):
        sync_folder(entry.path, leave_out=leave_out)
  sync_names(folder)


def sync_names(folder: str | os.PathLike) -> None:
  """Makes the names in a folder survive a crash, on the file systems that can do it.

  Raises:
    OSError: they cannot be written to the disk.
  """
  _sync_where_possible(folder)


# Some FUSE, 9p and CIFS mounts cannot sync a folder, or a file that is open for reading. A file of
# NFS may be gone: it renames a file that is deleted while it is open.
_NO_SYNC = frozenset(
  {
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EBADF,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EISDIR,
    errno.ENOENT,
  }
)


def _sync_where_possible(path: str | os.PathLike) -> None:
  try:
    _sync(path)
  except OSError as e:
    if e.errno not in _NO_SYNC:
      raise


def _sync(path: str | os.PathLike) -> None:
  number = os.open(path, os.O_RDONLY)
  try:
    os.fsync(number)
  finally:
    os.close(number)


_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # Lustre without `flock`, some NFS


def lock_file(file: IO[str]) -> None:
  """Locks an open file until it is closed, if its file system has locks.

  Raises:
    BlockingIOError: another process holds the lock.
    OSError: the file cannot be locked, for another reason.
  """
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as e:
    if e.errno not in _NO_LOCKS:
      raise


def append_line(path: str | os.PathLike, line: str) -> None:
  """Appends a line in one system call; begins a new line if the last line is incomplete.

  Args:
    path: path of the file; its folder exists.
    line: text without its newline.
  Raises:
    OSError: the file cannot be written, or only a part of the line was written.
  """
  with open(path, 'ab+', buffering=0) as f:
    size = f.seek(0, os.SEEK_END)
    if size:
      f.seek(size - 1)
      if f.read(1) != b'\n':
        line = '\n' + line
    data = line.encode() + b'\n'
    if f.write(data) != len(data):
      raise OSError('only a part of a line was written')


def write_atomically(
  path: str | os.PathLike, text: str, *, sync: bool = False, suffix: str = '.tmp'
) -> None:
  """Writes `text` as UTF-8; arguments as for `atomic_write`."""
  with atomic_write(path, sync=sync, suffix=suffix) as new:
    new.write_text(text, 'utf-8')


def free_bytes(folder: pathlib.Path) -> Optional[int]:
  """Returns the free bytes of the disk of `folder`, which need not exist; None if unknown.

  Does not see quotas.
  """
  try:
    usage = shutil.disk_usage(next(f for f in (folder, *folder.parents) if f.exists()))
  except OSError:  # some file systems cannot tell
    return None
  return usage.free if usage.total else None  # others report zeros


def write_problem(e: OSError, folder: str | os.PathLike) -> str:
  """Returns why a file in `folder` could not be written.

  For a folder that cannot be created, names the file in its place; for a full disk, the resource
  that ran out. "No space left" may also mean that all inodes are used, or that a quota is
  exhausted.
  """
  text = e.strerror or str(e)
  if e.errno in (errno.EEXIST, errno.ENOTDIR):
    above = pathlib.Path(folder)
    file = next((path for path in (above, *above.parents) if path.is_file()), None)
    return f'{file} is a file, not a folder' if file else text
  if e.errno == errno.EDQUOT:
    return f'{text}: the quota of this user or project has run out, not the disk (quota -s)'
  if e.errno != errno.ENOSPC:
    return text
  try:
    stats = os.statvfs(folder)
  except OSError:
    return text
  free_bytes = stats.f_bavail * stats.f_frsize
  free = show(free_bytes, GB='.2f')
  if stats.f_files and not stats.f_favail:
    return f'{text}: all {stats.f_files:,} inodes are used; {free} are free (df -i)'
  if free_bytes < _SOME_BYTES:
    return f'{text}: {free} are free (df -h)'
  return (
    f'{text}, although {free} and {stats.f_favail:,} inodes are free: the file was larger, '
    'or a limit of this user, project or job (of its memory, in /dev/shm) ended'
  )


# There is no regular file: the path does not exist, is a folder, a loop of links or a pipe
# (`json_schema.open_regular`), or its name is too long.
_NO_FILE = (
  errno.ENOENT,
  errno.ENOTDIR,
  errno.EISDIR,
  errno.ELOOP,
  errno.EINVAL,
  errno.ENXIO,
  errno.ENAMETOOLONG,
)
_MANY_FILES = 'Allow more open files: ulimit -n 65536, or LimitNOFILE= of the service.'
_RIGHTS = 'Check who may read it and the folders above it: namei -l PATH.'
_REMEDIES = {
  errno.EMFILE: _MANY_FILES,
  errno.ENFILE: 'The machine has too many open files: raise fs.file-max, or end other processes.',
  errno.EACCES: _RIGHTS,
  errno.EPERM: _RIGHTS,
  errno.ENOMEM: 'The host has no memory left: give the job more, or end other processes.',
  errno.ESTALE: 'The file server has forgotten the file: mount the file system again.',
  errno.EIO: 'The disk or the file server failed: dmesg names the reason.',
}


def is_missing(e: BaseException) -> bool:
  """Returns whether a system error means that there is no regular file at a path."""
  return isinstance(e, OSError) and (e.errno is None or e.errno in _NO_FILE)


def remedy(e: OSError) -> str:
  """Returns the fix for a system error."""
  return _REMEDIES.get(e.errno, 'Check the disk, the mount and the rights of that path.')


def reason_of(e: OSError) -> str:
  """Returns a system error as 'Too many open files (EMFILE)'."""
  return f'{e.strerror or e} ({errno.errorcode.get(e.errno, e.errno)})'


def is_refused(e: BaseException) -> bool:
  """Returns whether an error of the system names a file whose content may be intact."""
  return isinstance(e, OSError) and e.filename is not None and e.errno in _REMEDIES


def access_error(e: OSError, path: str | os.PathLike = '') -> AccessError:
  """Returns the error for a file that cannot be opened or read now.

  Args:
    e: the system error.
    path: the file, if `e` does not name it.
  """
  return AccessError(
    f'{e.filename or path} cannot be read: {reason_of(e)}.',
    fix=f'{remedy(e)}\nThe file may be intact, so nothing was moved, removed or replaced: the same '
    'command continues once the file can be read. To continue without it, move the file away (for '
    'a checkpoint: its folder).',
    docs='checkpoints.md#no-access',
  )


def check_temporary_folder() -> None:
  """Raises AccessError if there is no folder for temporary files, which every library needs."""
  try:
    tempfile.gettempdir()
  except FileNotFoundError as e:
    raise AccessError(
      f'{e.strerror}.',
      fix='Free space in one of them, or set the environment variable TMPDIR to another folder.',
    ) from e


def check_not_refused(e: Exception, path: str | os.PathLike) -> None:
  """Raises AccessError if `e`, from reading a file, is unrelated to its content."""
  if isinstance(e, OSError) and not is_missing(e):
    raise access_error(e, path) from e


def set_aside_damaged(path: pathlib.Path, e: Exception, consequence: str = '') -> None:
  """Renames a damaged file, with a warning.

  Args:
    path: path of the file.
    e: error from reading the file.
    consequence: consequence of the loss, for the warning.
  Raises:
    AccessError: `e` is unrelated to the content.
  """
  check_not_refused(e, path)
  set_aside(path, f'{e}{consequence}')


def set_aside(path: pathlib.Path, reason: str) -> pathlib.Path:
  """Renames a file (or folder, or link) to `corrupt_NAME` and warns; returns the new path.

  Args:
    path: the file that cannot be used.
    reason: why it cannot be used.
  Raises:
    OSError: the file cannot be renamed.
  """
  aside = free_name(path.with_name(f'corrupt_{path.name}'))
  os.rename(path, aside)
  _log.warning(
    '%s cannot be read (%s) and is kept as %s. The run continues without it.',
    path,
    reason,
    aside.name,
  )
  return aside


def set_aside_unless_file(path: pathlib.Path) -> None:
  """Renames `path` if it exists and is not a file.

  Raises:
    OSError: the file cannot be read and written; its content may be intact.
  """
  if not os.path.lexists(path):
    return
  problem: Optional[str] = None
  try:
    if not stat.S_ISREG(os.stat(path).st_mode):
      problem = 'it is not a file'
  except OSError as e:
    if not is_missing(e):
      raise
    problem = 'it is a broken link'
  if problem:
    set_aside(path, problem)
  elif not os.access(path, os.R_OK | os.W_OK):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def free_name(path: pathlib.Path) -> pathlib.Path:
  """Returns the first of `path`, `path.1`, `path.2`, ... that does not exist."""
  count, name = 0, path
  while os.path.lexists(name):
    count += 1
    name = path.with_name(f'{path.name}.{count}')
  return name
