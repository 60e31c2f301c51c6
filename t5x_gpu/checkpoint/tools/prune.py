"""Deletes the checkpoints that a rule does not keep, and nothing else.

Only folders with a committed t5x_gpu checkpoint count. checkpoint/storage/removal.py describes the
leftovers of a killed deletion.
"""

import dataclasses
from collections.abc import Callable

from t5x_gpu.checkpoint.model_dir import ModelDir
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.checkpoint.run_lock import RunLock
from t5x_gpu.checkpoint.saved_checkpoint import UNREADABLE, error_line
from t5x_gpu.checkpoint.storage.removal import finish_removals, remove_checkpoint
from t5x_gpu.checkpoint.tools.inspect import disk_bytes
from t5x_gpu.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class PrunePlan:
  """Which checkpoints of a MODEL_DIR to keep and which to remove.

  Attributes:
    model_dir: the open MODEL_DIR.
    kept: step -> reason.
    removed: step -> bytes on disk.
  """

  model_dir: ModelDir
  kept: dict[int, str]
  removed: dict[int, int]


def plan_prune(model_dir: ModelDir, keep: Keep) -> PrunePlan:
  """Returns which checkpoints of a folder would be removed; changes nothing.

  A folder that is not a readable checkpoint stays and is not counted.

  Raises:
    CheckpointError: there is no checkpoint, a step to keep is missing, or no checkpoint would stay.
  """
  folder = model_dir.path
  steps, values, kept = [], {}, {}
  for step in model_dir.steps:
    try:
      value = keep.value_of(model_dir.saved(step).manifest.get('metrics') or {})
      steps.append(step)
      if value is not None:
        values[step] = value
    except UNREADABLE as e:
      kept[step] = f'cannot be read as a checkpoint ({error_line(e)}), so it is left alone'
  if not steps:
    raise CheckpointError(
      f'{folder} has no checkpoint.',
      fix='Name the MODEL_DIR of a run: it contains checkpoint_<step>.',
    )
  missing = sorted(set(keep.steps) - set(steps))
  if missing:
    raise CheckpointError(
      f'{folder} has no checkpoint of step {", ".join(map(str, missing))}.',
      fix=f'Its steps are {", ".join(map(str, steps))}.',
    )
  removed, reasons = {}, keep.reasons(steps, values)
  kept |= reasons
  for step in steps:
    if step not in reasons:
      removed[step] = disk_bytes(model_dir.checkpoint(step))
  if len(removed) == len(steps):
    raise CheckpointError(
      f'This would delete all {len(steps)} checkpoints in {folder}.',
      fix=f'Keep at least one: --keep_last=1 keeps step {steps[-1]}.',
    )
  return PrunePlan(model_dir, dict(sorted(kept.items())), removed)


def prune(plan: PrunePlan, *, removed: Callable[[int], None]) -> None:
  """Removes the checkpoints of a plan, oldest first, and finishes removals that were interrupted.

  Args:
    plan: from `plan_prune`.
    removed: called with each step that was removed.
  Raises:
    CheckpointError: a run writes to the folder, or a file cannot be removed.
  """
  folder = plan.model_dir.path
  lock = RunLock(folder)
  try:
    finish_removals(folder)
    for step in sorted(plan.removed):
      remove_checkpoint(folder, step)
      plan.model_dir.removed(step)
      removed(step)
  except OSError as e:
    raise CheckpointError(
      f'{e.filename or folder} cannot be removed: {e.strerror or e}.',
      fix='Check the permissions of the folder. Only the checkpoints listed as removed are gone.',
    ) from e
  finally:
    lock.release()
