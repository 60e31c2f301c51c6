"""Deletes checkpoints that nobody wants to keep, and nothing else.

Only folders that hold a committed checkpoint of ours count. checkpoint/storage/removal.py says what
a kill leaves of one that is being deleted.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable

from t5x_gpu.checkpoint.model_dir import (
  UNREADABLE,
  checkpoint_path,
  committed_steps,
  read_saved,
  why,
)
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.checkpoint.run_lock import RunLock
from t5x_gpu.checkpoint.storage.paths import local_path
from t5x_gpu.checkpoint.storage.removal import finish_removals, remove_checkpoint
from t5x_gpu.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is to happen to the checkpoints of a MODEL_DIR.

  Attributes:
    folder: MODEL_DIR.
    kept: step -> why.
    removed: step -> bytes on disk.
  """

  folder: pathlib.Path
  kept: dict[int, str]
  removed: dict[int, int]


def plan_prune(model_dir: str | os.PathLike, keep: Keep) -> Plan:
  """Returns which checkpoints would go; changes nothing.

  A folder that cannot be read as a checkpoint stays, and counts for nothing.

  Raises:
    CheckpointError: there is none, a step to keep is not there, or none would stay.
  """
  folder = local_path(model_dir, what='prune')
  steps, values, kept = [], {}, {}
  for step in committed_steps(folder):
    try:
      value = keep.value_of(read_saved(folder, step).manifest.get('metrics') or {})
      steps.append(step)
      if value is not None:
        values[step] = value
    except UNREADABLE as e:
      kept[step] = f'cannot be read as a checkpoint ({why(e)}), so it is left alone'
  if not steps:
    raise CheckpointError(
      f'{folder} has no checkpoint.',
      fix='Give the MODEL_DIR of a run, which has checkpoint_<step> in it.',
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
      removed[step] = sum(
        p.stat().st_size for p in checkpoint_path(folder, step).rglob('*') if p.is_file()
      )
  if len(removed) == len(steps):
    raise CheckpointError(
      f'None of the {len(steps)} checkpoints in {folder} would stay.',
      fix=f'Keep one at least: --keep_last=1 keeps step {steps[-1]}.',
    )
  return Plan(folder, dict(sorted(kept.items())), removed)


def prune(plan: Plan, *, done: Callable[[int], None]) -> None:
  """Removes the checkpoints of a plan, oldest first, and what a kill has left of removed ones.

  Args:
    plan: of `plan_prune`.
    done: told of each step that is gone.
  Raises:
    CheckpointError: a run writes there, or something cannot be removed.
  """
  lock = RunLock(plan.folder)
  try:
    finish_removals(plan.folder)
    for step in sorted(plan.removed):
      remove_checkpoint(plan.folder, step)
      done(step)
  except OSError as e:
    raise CheckpointError(
      f'{e.filename or plan.folder} cannot be removed: {e.strerror or e}.',
      fix='Look at the permissions of the folder; what is listed as removed '
      'is gone, the rest is there.',
    ) from e
  finally:
    lock.release()
