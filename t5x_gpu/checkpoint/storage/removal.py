"""Deletes checkpoints on a disk so that a kill cannot leave half of one.

A checkpoint is renamed to `.removed_checkpoint_<step>` first. No reader takes that for a
checkpoint, and whoever holds the lock of MODEL_DIR next finishes the deletion.
"""

import logging
import os
import pathlib
import re
import shutil
from collections.abc import Sequence

from t5x_gpu.checkpoint.model_dir import PREFIX, checkpoint_path, is_real_folder

_log = logging.getLogger(__name__)

REMOVED = '.removed_'


def remove_checkpoint(folder: pathlib.Path, step: int) -> None:
  """Deletes `checkpoint_<step>`; raises OSError if part of it stays."""
  aside = folder / f'{REMOVED}{PREFIX}_{step}'
  os.rename(checkpoint_path(folder, step), aside)
  shutil.rmtree(aside)


def finish_removals(folder: pathlib.Path) -> None:
  """Deletes what a kill has left of checkpoints that were being deleted, with a log line for each.

  The caller holds the lock of `folder`.
  """
  for path in sorted(folder.glob(f'{REMOVED}{PREFIX}_*')):
    if re.fullmatch(rf'{re.escape(REMOVED)}{PREFIX}_[0-9]+', path.name) and is_real_folder(path):
      name = path.name.removeprefix(REMOVED)
      try:
        shutil.rmtree(path)
        _log.info('Deleted the rest of %s: an earlier process ended while deleting it.', name)
      except OSError as e:
        _log.warning('%s, the rest of %s, could not be deleted: %s.', path, name, e.strerror or e)


class RenamingDeleter:
  """What Orbax's CheckpointManager deletes old checkpoints with.

  Orbax's own deleter either deletes in place or renames without deleting (`todelete_subdir`).

  Args:
    folder: MODEL_DIR.
    is_main: whether this process deletes; the others leave it to that one.
  """

  def __init__(self, folder: pathlib.Path, *, is_main: bool):
    self._folder, self._is_main = folder, is_main

  def delete(self, step: int) -> None:
    """Deletes a checkpoint. A failure is only logged: the run has lost nothing by it."""
    if self._is_main:
      try:
        remove_checkpoint(self._folder, step)
      except OSError as e:
        _log.warning('checkpoint_%d could not be deleted: %s.', step, e.strerror or e)

  def delete_steps(self, steps: Sequence[int]) -> None:
    for step in steps:
      self.delete(step)

  def close(self) -> None:
    """Does nothing: every deletion is over when `delete` returns."""
