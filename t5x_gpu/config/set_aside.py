"""Damaged files of a run: renamed with a warning, so that a restart continues without them.

A file that cannot be opened is not a damaged file: too many open files, a missing right or a file
server that does not answer say nothing about its bytes. Such an error stops what needs the file.
"""

import errno
import logging
import os
import pathlib
import stat
from typing import Optional

from t5x_gpu.errors import AccessError

_log = logging.getLogger(__name__)
# There is no file: nothing, or a folder, a loop of links, a pipe (`json_schema.open_regular`), or a
# name longer than any file has.
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
  """Returns whether an error of the system says that there is no regular file at a path."""
  return isinstance(e, OSError) and (e.errno is None or e.errno in _NO_FILE)


def remedy(e: OSError) -> str:
  """Returns what helps against an error of the system."""
  return _REMEDIES.get(e.errno, 'Check the disk, the mount and the rights of that path.')


def reason_of(e: OSError) -> str:
  """Returns an error of the system as 'Too many open files (EMFILE)'."""
  return f'{e.strerror or e} ({errno.errorcode.get(e.errno, e.errno)})'


def access_error(e: OSError, path: str | os.PathLike = '') -> AccessError:
  """Returns the error for a file that cannot be opened or read now.

  Args:
    e: of the system.
    path: which file, if `e` does not name it.
  """
  return AccessError(
    f'{e.filename or path} cannot be read: {reason_of(e)}.',
    fix=f'{remedy(e)}\nThe file may be intact, so nothing was moved, removed or replaced: the same '
    'command continues once the file can be read. To continue without the file (of a checkpoint: '
    'without its folder), move it away.',
    docs='checkpoints.md#no-access',
  )


def check_not_refused(e: Exception, path: str | os.PathLike) -> None:
  """Raises AccessError if `e`, from reading a file, says nothing about its content."""
  if isinstance(e, OSError) and not is_missing(e):
    raise access_error(e, path) from e


def set_aside_damaged(path: pathlib.Path, e: Exception, consequence: str = '') -> None:
  """Renames a file whose content is bad, with a warning.

  Args:
    path: of the file.
    e: raised by reading it.
    consequence: of its loss, for the warning.
  Raises:
    AccessError: `e` says nothing about the content.
  """
  check_not_refused(e, path)
  set_aside(path, f'{e}{consequence}')


def set_aside(path: pathlib.Path, reason: str) -> pathlib.Path:
  """Renames a file (or folder, or link) to `corrupt_NAME` and warns; returns the new path.

  Args:
    path: what cannot be used.
    reason: why not.
  Raises:
    OSError: it cannot be renamed.
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
  """Renames what is at `path` unless that is missing or a file.

  Raises:
    OSError: the file cannot be read and written, which says nothing about its content.
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
  """Returns `path`, or `path.1`, `path.2`, ... if that exists."""
  count, name = 0, path
  while os.path.lexists(name):
    count += 1
    name = path.with_name(f'{path.name}.{count}')
  return name
