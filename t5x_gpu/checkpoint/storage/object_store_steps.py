"""Lists, begins, commits and removes checkpoints in object storage.

Objects cannot be renamed, so a checkpoint is written under its final name. The last object,
`commit_success.txt` (Orbax's name), commits it. The first object, `under_way.json`, names the
writer: it distinguishes leftovers of a killed process from other users' objects, and a removal
deletes it last. All other objects are the same as the files of a checkpoint on disk.
"""

import json
import os
import re
import socket
import time

from t5x_gpu.checkpoint.storage.paths import RemotePath
from t5x_gpu.errors import CheckpointError

COMMIT, UNDER_WAY, SET_ASIDE = 'commit_success.txt', 'under_way.json', 'cannot_be_read.txt'
_PREFIX = 'checkpoint_'
_AFTER_PREFIX = 'checkpoint`'  # the next character after '_'


def _marks(folder: RemotePath) -> dict[int, set[str]]:
  """Returns step -> the markers (names above) in its folder, committed or not."""
  found: dict[int, set[str]] = {}
  for name in folder.files(first=_PREFIX, stop=_AFTER_PREFIX):
    match = re.fullmatch(rf'{_PREFIX}(0|[1-9][0-9]*)/(.*)', name)
    if match:
      found.setdefault(int(match[1]), set()).update({match[2]} & {COMMIT, UNDER_WAY, SET_ASIDE})
  return found


def remote_steps(folder: RemotePath) -> list[int]:
  """Returns the steps of the committed checkpoints in `folder`, oldest first."""
  return sorted(
    step for step, marks in _marks(folder).items() if COMMIT in marks and SET_ASIDE not in marks
  )


def remove_left_over(folder: RemotePath) -> list[int]:
  """Finishes saves and removals that were killed, by removing their objects; returns the steps.

  The caller holds the lock of `folder`.
  """
  left = sorted(
    step for step, marks in _marks(folder).items() if UNDER_WAY in marks and COMMIT not in marks
  )
  for step in left:
    (folder / f'{_PREFIX}{step}').remove_tree(last=[UNDER_WAY])
  return left


def begin(path: RemotePath) -> None:
  """Marks `path` as a checkpoint that is being written.

  Replaces a checkpoint that was set aside as unreadable.

  Raises:
    CheckpointError: the folder has a checkpoint or other objects.
  """
  names = set(path.files())
  if names and not names & {UNDER_WAY, SET_ASIDE}:
    raise CheckpointError(
      f'{path} '
      + (
        'exists and was not overwritten.'
        if COMMIT in names
        else f'has {len(names)} objects, but is not a checkpoint: {COMMIT} is missing. '
        'Nothing was overwritten.'
      ),
      fix='Continue from the latest checkpoint, move that one away, or set another MODEL_DIR.',
      parameters=('MODEL_DIR',),
    )
  _claim(path)
  path.joinpath(COMMIT).unlink(missing_ok=True)
  if names:
    for name in sorted(names - {UNDER_WAY, COMMIT}):
      path.joinpath(name).unlink(missing_ok=True)


def _claim(path: RemotePath) -> None:
  about = {'host': socket.gethostname(), 'pid': os.getpid(), 'since': _now()}
  (path / UNDER_WAY).write_text(json.dumps(about) + '\n')


def commit(path: RemotePath) -> None:
  """Commits a checkpoint; all other objects must be written by now."""
  (path / COMMIT).write_text(f'Committed {_now()}.\n')
  (path / UNDER_WAY).unlink(missing_ok=True)


def remove(path: RemotePath) -> None:
  """Removes a checkpoint. Uncommits it first: `remove_left_over` finishes a killed removal."""
  _claim(path)
  (path / COMMIT).unlink(missing_ok=True)
  path.remove_tree(last=[UNDER_WAY])


def set_aside(path: RemotePath, reason: str) -> None:
  """Uncommits an unreadable checkpoint; its objects stay until its step is saved again."""
  (path / SET_ASIDE).write_text(f'{_now()}: {reason}\n')


def _now() -> str:
  return time.strftime('%Y-%m-%d %H:%M:%S %Z')
