"""Damaged files of a run: renamed with a warning, so that a restart continues without them."""

import logging
import os
import pathlib

_log = logging.getLogger(__name__)


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
  """Renames what is at `path` unless that is missing or a readable and writable file."""
  if os.path.lexists(path) and not (os.path.isfile(path) and os.access(path, os.R_OK | os.W_OK)):
    set_aside(
      path,
      'it is a broken link'
      if path.is_symlink() and not os.path.exists(path)
      else 'it is not a file'
      if not os.path.isfile(path)
      else 'it is not readable and writable',
    )


def free_name(path: pathlib.Path) -> pathlib.Path:
  """Returns `path`, or `path.1`, `path.2`, ... if that exists."""
  count, name = 0, path
  while os.path.lexists(name):
    count += 1
    name = path.with_name(f'{path.name}.{count}')
  return name
