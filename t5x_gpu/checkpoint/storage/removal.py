"""Deletes checkpoints on a disk so that a kill cannot leave half of one.

A checkpoint is first renamed to `.removed_checkpoint_<step>`, which readers ignore. The next run
that locks MODEL_DIR finishes the deletion.
"""

import logging
import os
import pathlib
import re
import shutil
from collections.abc import Sequence

from t5x_gpu.checkpoint.saved_checkpoint import PREFIX, checkpoint_path, is_real_folder

_log = logging.getLogger(__name__)

REMOVED = '.removed_'


def remove_checkpoint(folder: pathlib.Path, step: int) -> None:
  """Deletes `checkpoint_<step>`; raises OSError if part of it remains."""
  aside = folder / f'{REMOVED}{PREFIX}_{step}'
  os.rename(checkpoint_path(folder, step), aside)
  shutil.rmtree(aside)


def finish_removals(folder: pathlib.Path) -> list[int]:
  """Finishes deletions that were killed; returns the steps.

  The caller holds the lock of `folder`.
  """
  steps = []
  for path in sorted(folder.glob(f'{REMOVED}{PREFIX}_*')):
    match = re.fullmatch(rf'{re.escape(REMOVED)}{PREFIX}_([0-9]+)', path.name)
    if match and is_real_folder(path):
      try:
        shutil.rmtree(path)
        steps.append(int(match[1]))
      except OSError as e:
        _log.warning('%s could not be deleted: %s.', path, e.strerror or e)
  return steps


class RenamingDeleter:
  """Deletes old checkpoints for Orbax's CheckpointManager (see `orbax_internals.set_deleter`).

  Args:
    folder: MODEL_DIR.
    is_main: whether this is the process that deletes.
  """

  def __init__(self, folder: pathlib.Path, *, is_main: bool):
    self._folder, self._is_main = folder, is_main

  def delete(self, step: int) -> None:
    """Deletes a checkpoint. A failure is only logged, because it does not harm the run."""
    if self._is_main:
      try:
        remove_checkpoint(self._folder, step)
      except OSError as e:
        _log.warning('checkpoint_%d could not be deleted: %s.', step, e.strerror or e)

  def delete_steps(self, steps: Sequence[int]) -> None:
    for step in steps:
      self.delete(step)

  def close(self) -> None:
    """Does nothing: `delete` returns when the deletion is done."""
