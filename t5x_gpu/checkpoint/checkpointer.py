"""When a run saves, which checkpoints it keeps, and the checkpoints of a MODEL_DIR on a disk.

Orbax writes `MODEL_DIR/checkpoint_<step>`; a step exists only once it is committed, and older ones
are deleted only after that. Each checkpoint holds three items: the state's arrays, the state of the
data iterator, and the manifest.
"""

import contextlib
import dataclasses
import errno
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, Optional

import orbax.checkpoint as ocp

from t5x_gpu.checkpoint.array_files import check_array_files
from t5x_gpu.checkpoint.arrays.state_reader import Checkpoint, has_other_arrays, read_state
from t5x_gpu.checkpoint.base_checkpointer import BaseCheckpointer
from t5x_gpu.checkpoint.local.settings import check_local_settings
from t5x_gpu.checkpoint.manifest import sealed
from t5x_gpu.checkpoint.model_dir import ModelDir
from t5x_gpu.checkpoint.retention import BEST_IS, EVALUATIONS, Keep, Preservation
from t5x_gpu.checkpoint.run_lock import check_exists
from t5x_gpu.checkpoint.saved_checkpoint import PREFIX, Saved, remove_cut_short
from t5x_gpu.checkpoint.storage.chunks import save_args
from t5x_gpu.checkpoint.storage.orbax_internals import (
  check_before_commit,
  read_tree,
  save_has_failed,
  set_deleter,
  silence_abandoned_work,
)
from t5x_gpu.checkpoint.storage.paths import AnyPath
from t5x_gpu.checkpoint.storage.removal import RenamingDeleter, finish_removals
from t5x_gpu.config.atomic_write import write_problem
from t5x_gpu.config.set_aside import free_name
from t5x_gpu.errors import CheckpointError, did_you_mean
from t5x_gpu.runtime import process_exit
from t5x_gpu.training.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When to save and how many to keep.

  Attributes:
    period: steps between saves; the last step and an interrupted run are saved as well.
    keep: how many of the last checkpoints are kept; None for all.
    keep_every: checkpoints whose step is a multiple of this are kept, too.
    keep_best: this many of the best evaluated checkpoints are kept, too.
    best_metric: the evaluation metric that ranks checkpoints, named as in metrics.jsonl.
    best_is: 'min' or 'max': whether low or high values are best.
    stop_before_end_seconds: save and exit this long before the job's time limit, if it is known.
    local_checkpoint_dir: folder on each host for local checkpoints between saves, such as
      '/dev/shm/$USER'; None turns them off (checkpoint/local/local_tier.py).
    local_period: steps between local checkpoints; a divisor of `period`.
  """

  period: int
  keep: Optional[int] = 3
  keep_every: Optional[int] = None
  keep_best: Optional[int] = None
  best_metric: str = 'eval/loss'
  best_is: str = 'min'
  stop_before_end_seconds: float = 120.0
  local_checkpoint_dir: Optional[str] = None
  local_period: Optional[int] = None

  def __post_init__(self) -> None:
    for name, what in (
      ('period', 'steps'),
      ('keep', 'checkpoints'),
      ('keep_every', 'steps'),
      ('keep_best', 'checkpoints'),
    ):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise CheckpointError(
          f'CheckpointConfig.{name} = {value} must be at least 1.',
          fix=f'Set CheckpointConfig.{name} to a number of {what}.',
          parameters=(f'CheckpointConfig.{name}',),
        )
      if name.startswith('keep_') and value is not None and self.keep is None:
        raise CheckpointError(
          f'CheckpointConfig.{name} = {value}, but keep = None keeps all.',
          fix=f'Set CheckpointConfig.keep = 1, or {name} = None.',
          parameters=(f'CheckpointConfig.{name}', 'CheckpointConfig.keep'),
        )
    if self.best_is not in BEST_IS:
      raise CheckpointError(
        f'CheckpointConfig.best_is = {self.best_is!r} is not supported.',
        fix=f'Set it to {" or ".join(map(repr, BEST_IS))}.',
        parameters=('CheckpointConfig.best_is',),
      )
    check_local_settings(self.local_checkpoint_dir, self.local_period, period=self.period)

  @property
  def kept(self) -> Keep:
    """The rule for which checkpoints stay."""
    return Keep(
      last=self.keep,
      every=self.keep_every,
      best=self.keep_best,
      metric=self.best_metric,
      best_is=self.best_is,
    )

  def check_best(self, total_steps: int, *eval_periods: Optional[int]) -> None:
    """Raises CheckpointError if `keep_best` is set, but only the last checkpoint is evaluated.

    Args:
      total_steps: number of steps of the run.
      eval_periods: steps between evaluations of each kind in `EVALUATIONS`; None if it never runs.
    """
    if not self.keep_best:
      return
    group = self.best_metric.partition('/')[0]
    if group not in EVALUATIONS:
      raise CheckpointError(
        f'CheckpointConfig.best_metric = {self.best_metric!r} is not a metric of an evaluation.'
        + did_you_mean(group, EVALUATIONS),
        fix="Set it to 'eval/loss', 'eval/accuracy', ... or 'infer_eval/TASK/METRIC'.",
        parameters=('CheckpointConfig.best_metric',),
      )
    period = dict(zip(EVALUATIONS, eval_periods, strict=True))[group]
    if not period or math.lcm(period, self.period) >= total_steps:
      name = EVALUATIONS[group]
      raise CheckpointError(
        f'CheckpointConfig.keep_best = {self.keep_best} by {self.best_metric!r}, but no '
        f'checkpoint before the last is saved at a step with that evaluation: a save every '
        f'{self.period} steps, an evaluation every {period or "(never)"}.',
        fix=f'Set {name.upper() if group == "eval" else f"train.{name}"} = {self.period}, or '
        'CheckpointConfig.keep_best = None.',
        parameters=('CheckpointConfig.keep_best', f'train.{name}'),
      )


class Checkpointer(BaseCheckpointer):
  """The checkpoints of one MODEL_DIR on a disk; see `BaseCheckpointer`."""

  def __init__(self, model_dir: ModelDir | str | AnyPath, *, keep: Keep = Keep(last=3)):
    super().__init__(model_dir, keep=keep)
    folder = self._dir.path
    self._has_saved = False  # then the list of steps may be out of date
    # Compressing takes longer than writing, and makes weights only 8% smaller.
    self._state_handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    check_before_commit(self._state_handler, check_array_files)
    self._manager = ocp.CheckpointManager(
      folder,
      item_handlers={
        'state': self._state_handler,
        'data': ocp.JsonCheckpointHandler(),
        'manifest': ocp.JsonCheckpointHandler(),
      },
      options=ocp.CheckpointManagerOptions(
        preservation_policy=Preservation(keep, self._values, is_ours=self._dir.is_ours),
        step_prefix=PREFIX,
        create=True,
        enable_async_checkpointing=True,
        # Orbax would remove the temporary folders of other programs, too.
        cleanup_tmp_directories=False,
      ),
    )
    set_deleter(self._manager, RenamingDeleter(folder, is_main=self._is_main))

  def _remove_left_over(self) -> list[int]:
    remove_cut_short(self._dir.path)
    return finish_removals(self._dir.path)

  def steps(self) -> list[int]:
    """Returns the committed steps, oldest first."""
    # Orbax drops steps from its list that it wants to delete after a save, even if the save fails.
    if self._has_saved:
      self._dir.relist()
    return self._dir.steps

  # ---- Saving ------------------------------------------------------------------------------------

  def _prepare_to_save(self, step: int) -> None:
    self._dir.check_owner()  # the other processes wait for this one before they write
    if os.path.lexists(self.path(step)):  # Orbax would replace a file
      raise self._exists(step)

  def _start_to_save(
    self, step: int, state: TrainState, *, data: Mapping[str, Any], manifest: Mapping[str, Any]
  ) -> None:
    self._has_saved = True
    with self._errors_as_ours(step):
      self._manager.check_for_errors()
      written = self._manager.save(
        step,
        force=True,
        args=ocp.args.Composite(
          state=ocp.args.PyTreeSave(state.saved(), save_args=save_args(state.saved())),
          data=ocp.args.JsonSave(data),
          manifest=ocp.args.JsonSave(sealed(manifest, data=data)),
        ),
      )
    if not written:
      raise self._exists(step)

  def _exists(self, step: int) -> CheckpointError:
    return CheckpointError(
      f'{self.path(step)} exists and was not overwritten.',
      fix='Continue from the latest checkpoint, or set another MODEL_DIR.',
      parameters=('MODEL_DIR',),
    )

  def check(self) -> None:
    """Raises CheckpointError if the save in progress has failed by now."""
    if save_has_failed(self._manager):
      self.wait()

  def wait(self) -> None:
    """Waits until everything is committed; raises CheckpointError if that failed."""
    with self._errors_as_ours(None):
      self._manager.wait_until_finished()
      self._manager.check_for_errors()

  def _stop(self) -> None:
    self._manager.close()

  @contextlib.contextmanager
  def _errors_as_ours(self, step: Optional[int]) -> Iterator[None]:
    """Turns any error of Orbax's save into a CheckpointError."""
    problem = None
    with silence_abandoned_work():
      try:
        yield
      except Exception as e:
        problem = self._save_error(step, e)
    if problem:
      raise problem

  def _save_error(self, step: Optional[int], e: Exception) -> CheckpointError:
    # After a failure, Orbax's threads wait for each other for ten minutes.
    process_exit.abandon_threads()
    folder = self._dir.path
    try:
      check_exists(folder)
    except CheckpointError as gone:
      return gone
    what = 'The last checkpoint' if step is None else f'checkpoint_{step} (or the save before it)'
    reason = f'{type(e).__name__}: {e}'
    for number in (errno.ENOSPC, errno.EDQUOT):
      if os.strerror(number) in reason:
        reason = write_problem(OSError(number, os.strerror(number)), folder) + '.'
    return CheckpointError(
      f'{what} could not be written to {folder}: {reason}',
      fix=f'{self._last_good()} Free space there: '
      f'{shutil.disk_usage(folder).free / 2**30:.2f} GiB.',
      parameters=('MODEL_DIR',),
    )

  # ---- Restoring ---------------------------------------------------------------------------------

  def _read_state(self, saved: Saved, target: TrainState) -> TrainState:
    if has_other_arrays(saved.manifest, target):
      return read_state(Checkpoint(self._dir, saved.step), target)
    return TrainState(
      **read_tree(self._state_handler, self.path(saved.step) / 'state', target.saved())
    )

  def _set_aside(self, step: int, reason: str) -> str:
    del reason
    aside = free_name(self._dir.path / f'corrupt_{PREFIX}_{step}')
    os.rename(self.path(step), aside)
    return f'is kept as {aside.name}'

  def _reload(self) -> None:
    self._manager.reload()
