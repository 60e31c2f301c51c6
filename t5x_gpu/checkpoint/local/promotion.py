"""At a restart, promotes the newest complete local checkpoint to a checkpoint in MODEL_DIR.

The processes exchange lists of the parts they find. If the newest local checkpoint with all parts
is newer than the last readable checkpoint, it is written into MODEL_DIR as checkpoint_<step>. So it
restores onto any mesh and any number of processes, with the same checks.
"""

import pathlib
import shutil
from collections.abc import Sequence
from typing import Any, Optional

from t5x_gpu.checkpoint.local.assembly import STAGING, Assembly
from t5x_gpu.checkpoint.local.inventory import Candidate, LocalFiles, candidates, find_local_files
from t5x_gpu.checkpoint.local.local_tier import LocalTier, NoLocalTier
from t5x_gpu.checkpoint.local.run_id import read_run_id
from t5x_gpu.checkpoint.local.settings import DIR
from t5x_gpu.checkpoint.model_dir import ModelDir, check_model_dir
from t5x_gpu.checkpoint.saved_checkpoint import UNREADABLE, Saved, is_real_folder
from t5x_gpu.errors import AccessError, listed
from t5x_gpu.runtime import distributed


def check_with_local(
  model_dir: ModelDir, local: LocalTier | NoLocalTier, *, target: Any, dry_run: bool
) -> Optional[Saved]:
  """Returns the latest checkpoint, as `check_model_dir`, after promoting a newer local checkpoint.

  Locks MODEL_DIR, so that the answer stays true until the run releases it.

  Args:
    model_dir: need not exist.
    local: local checkpoints of this run.
    target: the TrainState (or its shapes) of this run.
    dry_run: only log and return the checkpoint that would be promoted; change and lock nothing.
  Raises:
    CheckpointError: as `check_model_dir`; or a local checkpoint cannot be written to MODEL_DIR.
  """
  if not dry_run:
    model_dir.lock(wait=True)
  promoted = None
  if isinstance(local, LocalTier):
    promoted = _promote(model_dir, local.folder, target, dry_run)
  saved = check_model_dir(model_dir, target=target)
  return promoted if dry_run and promoted else saved


def promote_newer(
  local: LocalTier | NoLocalTier, model_dir: ModelDir, newer_than: Optional[int], *, target: Any
) -> Optional[int]:
  """Promotes the newest complete local checkpoint and returns its step; None if there is none.

  For a run that has locked MODEL_DIR and finds a damaged checkpoint when it reads the arrays.

  Args:
    local: local checkpoints of this run.
    model_dir: MODEL_DIR of this run.
    newer_than: the step of the next older checkpoint; None if there is none.
    target: the TrainState (or its shapes) of this run.
  Raises:
    CheckpointError: a local checkpoint cannot be written to MODEL_DIR.
  """
  if not isinstance(local, LocalTier):
    return None
  run = None
  with distributed.errors_together():
    run = read_run_id(model_dir.path) if distributed.is_main_process() else None
  run = distributed.broadcast_json(run)
  if run is None:
    return None
  found = _find(local.folder, run, newer_than)
  saved = _first_complete(model_dir, found, candidates(found), target, durable=newer_than)
  return None if saved is None else saved.step


def _find(local: pathlib.Path, run: str, newer_than: Optional[int]) -> LocalFiles:
  return find_local_files(local / run, run=run, newer_than=-1 if newer_than is None else newer_than)


def _first_complete(
  model_dir: ModelDir,
  found: LocalFiles,
  waiting: Sequence[Candidate],
  target: Any,
  *,
  durable: Optional[int],
  dry_run: bool = False,
) -> Optional[Saved]:
  """Promotes and returns the first candidate of `waiting` that is complete; None if none is.

  Raises:
    AccessError: parts of a newer candidate cannot be opened, but may be intact.
  """
  fallback = 'the seed' if durable is None else f'checkpoint_{durable}'

  def check_none_refused(step: int, reasons: Sequence[str], instead: str) -> None:
    if reasons:
      raise AccessError(
        f'Local checkpoint {step} is newer than {instead}, but parts of it cannot be opened:\n  '
        + '\n  '.join(listed(reasons, 4)),
        fix='The parts may be intact, so nothing was moved or removed: the same command continues '
        f'once they can be read. To continue from {instead} without them, remove these files.',
        parameters=(DIR,),
        docs='checkpoints.md#local-checkpoints',
      )

  def check_newer(step: int, instead: str) -> None:
    newest = max((s for s, _ in found.refused if s > step), default=step)
    check_none_refused(newest, [what for s, what in found.refused if s == newest > step], instead)

  for candidate in waiting:
    check_newer(candidate.step, f'local checkpoint {candidate.step}')
    assembly = Assembly(model_dir, candidate, found, target, dry_run=dry_run)
    saved = assembly.run(fallback=fallback)
    if saved is not None:
      return saved
    check_none_refused(candidate.step, assembly.refused, fallback)
    check_newer(candidate.step - 1, fallback)
  check_newer(-1, fallback)
  return None


def _promote(
  model_dir: ModelDir, local: pathlib.Path, target: Any, dry_run: bool
) -> Optional[Saved]:
  folder = model_dir.path
  if distributed.is_main_process() and not dry_run:
    if is_real_folder(folder / STAGING):  # left by a killed process; anything else stays
      shutil.rmtree(folder / STAGING, ignore_errors=True)
  run, durable = None, None
  with distributed.errors_together():
    if distributed.is_main_process():
      run, durable = read_run_id(folder), _newest_readable(model_dir)
  run, durable = distributed.broadcast_json((run, durable))
  if run is None:
    return None
  found = _find(local, run, durable)
  return _first_complete(
    model_dir, found, candidates(found), target, durable=durable, dry_run=dry_run
  )


def _newest_readable(model_dir: ModelDir) -> Optional[int]:
  for step in reversed(model_dir.steps):
    try:
      return model_dir.saved(step).step
    except UNREADABLE:
      continue
  return None
