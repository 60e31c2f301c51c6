"""A folder that appears whole or not at all."""

import contextlib
import logging
import os
import pathlib
import re
import shutil
import socket
from collections.abc import Iterator

from t5x_gpu.errors import CheckpointError

_PARTIAL = '.partial-'
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def new_folder(target: str | os.PathLike, *, num_bytes: int) -> Iterator[pathlib.Path]:
  """Yields an empty folder beside `target`, which becomes `target` if all goes well.

  If not, it is removed; what a killed process has left is removed by the next one on its host.

  Args:
    target: must not exist, or be empty.
    num_bytes: about what will be written.
  Raises:
    CheckpointError: it exists, it cannot be written, or the disk is too small.
  """
  target = pathlib.Path(target).absolute()
  if target.exists() and (not target.is_dir() or any(target.iterdir())):
    raise CheckpointError(f'{target} exists and is not empty; nothing is overwritten.',
                          fix='Name another folder with --to, or remove this one.')
  staging = target.with_name(f'.{target.name}{_PARTIAL}{socket.gethostname()}-{os.getpid()}')
  made = [f for f in (target.parent, *target.parent.parents) if not f.exists()]
  try:
    staging.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(target)
    staging.mkdir()
  except OSError as e:
    raise CheckpointError(f'{target} cannot be written: {e.strerror or e}.',
                          fix='Name a folder of yours with --to.') from e
  try:
    free = shutil.disk_usage(staging).free
    if free < num_bytes:
      raise CheckpointError(
          f'{target} would take about {num_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free.',
          fix='Name a folder on a larger disk with --to, or make room.')
    yield staging
    if target.exists():
      target.rmdir()
    os.rename(staging, target)
  except OSError as e:
    raise CheckpointError(f'{target} could not be written: {e.strerror or e}. Nothing of it is '
                          'left.', fix='Name a folder with free space with --to.') from e
  finally:
    shutil.rmtree(staging, ignore_errors=True)
    for folder in made:
      with contextlib.suppress(OSError):  # not empty: it has the target
        folder.rmdir()


def _remove_left_over(target: pathlib.Path) -> None:
  """Removes what processes of this host that no longer exist have left of this target."""
  start = f'.{target.name}{_PARTIAL}'
  for path in target.parent.iterdir():
    made_by = re.fullmatch(rf'{re.escape(start)}(.*)-(\d+)', path.name)
    if made_by is None:
      continue
    if made_by[1] != socket.gethostname():
      _log.warning('%s is of process %s on %s, which may be at work; it stays. Remove it if not.',
                   path, made_by[2], made_by[1])
    elif not pathlib.Path(f'/proc/{made_by[2]}').exists():
      shutil.rmtree(path, ignore_errors=True)
