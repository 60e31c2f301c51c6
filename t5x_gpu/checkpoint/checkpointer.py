"""Saves in the background, restores onto today's mesh, keeps the last few and the best.

Orbax writes `MODEL_DIR/checkpoint_<step>`; a step exists only once it is committed, and older ones
are deleted only after that. Each checkpoint holds three items: the state's arrays, the state of the
data iterator, and the manifest.
"""

import base64
import contextlib
import dataclasses
import errno
import logging
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional

import jax
import orbax.checkpoint as ocp

from t5x_gpu.checkpoint.arrays.state_reader import UNSTACKED, read_state
from t5x_gpu.checkpoint.base_checkpointer import CommitAtExit
from t5x_gpu.checkpoint.local.settings import check_local_settings
from t5x_gpu.checkpoint.manifest import sealed
from t5x_gpu.checkpoint.model_dir import (
  PREFIX,
  UNREADABLE,
  Saved,
  check_same_model,
  check_writable,
  checkpoint_path,
  committed_steps,
  is_checkpoint_of_ours,
  none_can_be_read,
  read_manifest,
  read_saved,
  remove_cut_short,
  why,
)
from t5x_gpu.checkpoint.retention import BEST_IS, EVALUATIONS, Keep, Preservation
from t5x_gpu.checkpoint.run_files import RunFiles
from t5x_gpu.checkpoint.run_lock import RunLock, check_exists
from t5x_gpu.checkpoint.storage.checksums import check_restored, checksums_of, record
from t5x_gpu.checkpoint.storage.chunks import save_args
from t5x_gpu.checkpoint.storage.orbax_internals import let_go_of_reads, silent_left_over
from t5x_gpu.checkpoint.storage.paths import AnyPath, is_remote
from t5x_gpu.checkpoint.storage.removal import RenamingDeleter, finish_removals
from t5x_gpu.config.set_aside import free_name
from t5x_gpu.errors import CheckpointError, ConfigError, did_you_mean
from t5x_gpu.runtime import distributed, process_exit
from t5x_gpu.training.train_state import TrainState

_log = logging.getLogger(__name__)
# newer_than -> the step of what a host keeps that is newer and has become a checkpoint, if any.
Promote = Callable[[Optional[int]], Optional[int]]


def nothing_local(newer_than: Optional[int]) -> Optional[int]:
  """The `Promote` of a run without local steps."""
  del newer_than


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When to save and how many to keep.

  Attributes:
    period: steps between saves; the last step and an interrupted run are saved as well.
    keep: how many of the last checkpoints stay; None for all.
    keep_every: and those whose step is a multiple of this.
    keep_best: and so many of the best, of those saved at a step with an evaluation.
    best_metric: by which metric of the evaluation, as metrics.jsonl calls it.
    best_is: which values of it are best, 'min' or 'max'.
    stop_before_end_seconds: save and leave this long before the job's time limit, if it is known.
    local_checkpoint_dir: of each host, '/dev/shm/$USER', for steps in between; None for none.
    local_period: steps between those; a divisor of `period` (checkpoint/local/local_tier.py).
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
          parameters=('CheckpointConfig.keep', f'CheckpointConfig.{name}'),
        )
    if self.best_is not in BEST_IS:
      raise CheckpointError(
        f'CheckpointConfig.best_is = {self.best_is!r} is neither.',
        fix=f'Set it to {" or ".join(map(repr, BEST_IS))}.',
        parameters=('CheckpointConfig.best_is',),
      )
    check_local_settings(self.local_checkpoint_dir, self.local_period, period=self.period)

  @property
  def kept(self) -> Keep:
    """Which checkpoints stay."""
    return Keep(
      last=self.keep,
      every=self.keep_every,
      best=self.keep_best,
      metric=self.best_metric,
      best_is=self.best_is,
    )

  def check_best(self, total_steps: int, *eval_periods: Optional[int]) -> None:
    """Raises CheckpointError if the best are to stay, but only the last one is evaluated.

    Args:
      total_steps: of the run.
      eval_periods: steps between evaluations of each kind in `EVALUATIONS`; None for no such.
    """
    if not self.keep_best:
      return
    group = self.best_metric.partition('/')[0]
    if group not in EVALUATIONS:
      raise CheckpointError(
        f'CheckpointConfig.best_metric = {self.best_metric!r} is of no evaluation.'
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


@dataclasses.dataclass(frozen=True)
class Restored:
  """A checkpoint, read.

  Attributes:
    path: folder of the checkpoint.
    state: on today's mesh.
    data_state: for `BatchIterator.set_state`.
    manifest: what the checkpoint says of itself.
  """

  path: AnyPath
  state: TrainState
  data_state: bytes
  manifest: Mapping[str, Any]


class Checkpointer(CommitAtExit):
  """The checkpoints of one MODEL_DIR.

  Args:
    model_dir: absolute or relative folder; made if missing.
    keep: which checkpoints stay; one without `last` keeps all.
  Raises:
    CheckpointError: the folder cannot be made or written to, or another run writes to it.
  """

  pause = 'save'  # what the step loop's timer calls it

  def __init__(self, model_dir: str, *, keep: Keep = Keep(last=3)):
    self._dir = pathlib.Path(model_dir).absolute()
    check_writable(self._dir)
    self.files = RunFiles(self._dir, is_main=jax.process_index() == 0)  # where the run writes them
    self._keep, self._preservation = (
      keep,
      Preservation(
        keep, self._values(keep), is_ours=lambda step: is_checkpoint_of_ours(self._dir, step)
      ),
    )
    self._lock = RunLock(self._dir) if jax.process_index() == 0 else None
    if self._lock is not None:  # saves under way are then not those of another run
      remove_cut_short(self._dir)
      finish_removals(self._dir)
    self._manager = ocp.CheckpointManager(
      self._dir,
      item_handlers={
        # Compressing takes longer than writing, and makes weights 8% smaller.
        'state': ocp.PyTreeCheckpointHandler(use_compression=False),
        'data': ocp.JsonCheckpointHandler(),
        'manifest': ocp.JsonCheckpointHandler(),
      },
      options=ocp.CheckpointManagerOptions(
        preservation_policy=self._preservation,
        step_prefix=PREFIX,
        create=True,
        enable_async_checkpointing=True,
        # It would take those of others for ours.
        cleanup_tmp_directories=False,
      ),
    )
    # No option renames first and then deletes (0.12.8).
    self._manager._checkpoint_deleter = RenamingDeleter(self._dir, is_main=self._lock is not None)

  def path(self, step: int) -> pathlib.Path:
    return checkpoint_path(self._dir, step)

  def steps(self) -> list[int]:
    """Returns the committed steps, oldest first."""
    return committed_steps(self._dir)

  def _values(self, keep: Keep) -> dict[int, float]:
    """Returns step -> value that the best are told by, of what earlier runs have saved here."""
    values = {}
    for step in self.steps() if keep.best else ():
      with contextlib.suppress(*UNREADABLE):  # one that cannot be read is no best one
        value = keep.value_of(read_manifest(self._dir, step).get('metrics') or {})
        if value is not None:
          values[step] = value
    return values

  def check(self) -> None:
    """Raises CheckpointError if the save under way has failed by now."""
    # Orbax's check_for_errors stays silent (0.12.8): the thread that commits has taken the error.
    if self._manager._finalize_thread.map(
      lambda thread: thread is not None and not thread.is_alive() and thread.exception
    ):
      self.wait()

  def save(
    self, step: int, state: TrainState, *, data_state: bytes, manifest: Mapping[str, Any]
  ) -> None:
    """Starts to write `checkpoint_<step>`; returns once `state` may be overwritten.

    Raises:
      CheckpointError: this or an earlier save failed, and nothing older has been deleted; or
        another run has taken over MODEL_DIR, and nothing is written.
      ConfigError: no metric is called as the best are told by; once the checkpoint is committed.
    """
    if self._lock is not None:  # the other processes wait for this one before they write
      self._lock.check()
    if os.path.lexists(self.path(step)):  # also what does not count: Orbax would replace a file
      raise self._exists(step)
    data = {'iterator': base64.b64encode(data_state).decode()}
    value, no_metric = None, None
    try:
      value = self._keep.value_of(manifest.get('metrics') or {})
    except ConfigError as e:
      no_metric = e
    manifest = sealed({**manifest, **record(checksums_of(state))}, data=data)
    if value is not None:
      self._preservation.values[step] = value
    with self._mended_errors(step):
      self._manager.check_for_errors()
      written = self._manager.save(
        step,
        force=True,
        args=ocp.args.Composite(
          state=ocp.args.PyTreeSave(state, save_args=save_args(state)),
          data=ocp.args.JsonSave(data),
          manifest=ocp.args.JsonSave(manifest),
        ),
      )
    if not written:
      raise self._exists(step)
    if no_metric is not None:
      self.wait()
      raise no_metric

  def _exists(self, step: int) -> CheckpointError:
    return CheckpointError(
      f'{self.path(step)} exists and was not overwritten.',
      fix='Continue from the latest checkpoint, or set another MODEL_DIR.',
      parameters=('MODEL_DIR',),
    )

  def wait(self) -> None:
    """Returns when everything is committed; raises CheckpointError if it could not be."""
    with self._mended_errors(None):
      self._manager.wait_until_finished()
      self._manager.check_for_errors()

  def close(self) -> None:
    """Ends what Orbax runs in the background, and lets other runs use MODEL_DIR."""
    self._manager.close()
    self._release()

  def _release(self) -> None:
    if self._lock is not None:
      self._lock.release()

  @contextlib.contextmanager
  def _mended_errors(self, step: Optional[int]) -> Iterator[None]:
    """Turns whatever Orbax raises while it saves into a CheckpointError."""
    problem = None
    with silent_left_over():
      try:
        yield
      except Exception as e:
        problem = self._save_error(step, e)
    if problem:
      raise problem

  def _save_error(self, step: Optional[int], e: Exception) -> CheckpointError:
    # After a failure, Orbax's threads wait for each other for ten minutes.
    process_exit.abandon_threads()
    try:
      check_exists(self._dir)
    except CheckpointError as gone:
      return gone
    what = 'The last checkpoint' if step is None else f'checkpoint_{step} (or the save before it)'
    # From the folder: Orbax's own list drops what it means to delete after a save that then fails.
    last = self.steps()[-1] if self.steps() else None
    reason = f'{type(e).__name__}: {e}'
    if os.strerror(errno.ENOSPC) in reason:
      reason = os.strerror(errno.ENOSPC) + '.'
    return CheckpointError(
      f'{what} could not be written to {self._dir}: {reason}',
      fix=(
        'No checkpoint has been committed yet.'
        if last is None
        else f'The last good one is checkpoint_{last}; a restart continues from it.'
      )
      + f' Free space there: {shutil.disk_usage(self._dir).free / 2**30:.2f} GiB.',
      parameters=('MODEL_DIR',),
    )

  def restore_latest(
    self, target: TrainState, *, promote: Promote = nothing_local
  ) -> Optional[Restored]:
    """Returns the latest readable checkpoint on the mesh of `target`, or None without any.

    A checkpoint that cannot be read is renamed to `corrupt_checkpoint_<step>`, with a warning that
    says which one is used in its place.

    Args:
      target: shapes, dtypes and shardings of today.
      promote: asked when one cannot be read, before the next older one is taken.
    Raises:
      CheckpointError: the checkpoint is of another model, or none can be read.
    """
    try:
      return self._read_latest(target, promote)
    except BaseException:
      self._release()  # the run ends before it has written anything
      raise

  def _read_latest(self, target: TrainState, promote: Promote) -> Optional[Restored]:
    steps = self.steps()
    reasons: dict[int, str] = {}
    while steps:
      step = steps.pop()
      with silent_left_over():
        try:
          saved = read_saved(self._dir, step)
          check_same_model(self._dir, step, saved.manifest, target=target)
          if saved.manifest.get(UNSTACKED):  # another tree than Orbax is asked for
            state = read_state(self.path(step), target)
          else:
            args = ocp.args.PyTreeRestore(
              target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)
            )
            state = self._manager.restore(step, args=ocp.args.Composite(state=args))['state']
          check_restored(state, saved.manifest, step=step)
        except (CheckpointError, MemoryError):
          raise
        except Exception as e:  # Orbax's are of many kinds
          if 'RESOURCE_EXHAUSTED' in str(e):
            raise  # too little memory is no fault of the checkpoint
          reasons[step] = why(e)
        found = [r for r in distributed.gather_json(reasons.get(step, '')) if r]
        if found:  # one process is enough
          reasons[step], state = found[0], None
          let_go_of_reads()  # out of the `except` block, which still holds them
      if step in reasons:
        promoted = promote(steps[-1] if steps else None)
        if promoted is not None:
          steps.append(promoted)
          self._manager.reload()
          if promoted in reasons:  # it was set aside to make room
            _log.warning('checkpoint_%d could not be read (%s).', promoted, reasons.pop(promoted))
            promote = nothing_local  # nothing newer is left
        continue
      if reasons:
        self._set_aside(reasons, used=step)
      return Restored(self.path(step), state, saved.data_state, saved.manifest)
    if reasons:
      raise none_can_be_read(self._dir, reasons)
    return None

  def _set_aside(self, reasons: Mapping[int, str], *, used: int) -> None:
    """Renames unreadable checkpoints, so that their steps can be written again."""
    if jax.process_index() == 0:
      for step in reasons:
        aside = free_name(self._dir / f'corrupt_{PREFIX}_{step}')
        os.rename(self.path(step), aside)
        _log.warning(
          'checkpoint_%d cannot be read (%s) and is kept as %s. Continuing from checkpoint_%d.',
          step,
          reasons[step],
          aside.name,
          used,
        )
    self._manager.reload()


def restore_from(path: AnyPath, saved: Saved, target: TrainState) -> Restored:
  """Returns a checkpoint of another run, which is only read, on the mesh of `target`.

  Args:
    path: folder of the checkpoint.
    saved: what it says of itself, compared with `target` by now.
    target: shapes, dtypes and shardings of today.
  Raises:
    CheckpointError: it cannot be read.
  """
  with silent_left_over(), ocp.StandardCheckpointer() as checkpointer:
    try:
      state, problem = (
        (
          read_state(path, target)
          if saved.manifest.get(UNSTACKED) or is_remote(path)
          else checkpointer.restore(path / 'state', target)
        ),
        None,
      )
      check_restored(state, saved.manifest, step=saved.step)
    except MemoryError:
      raise
    except Exception as e:  # Orbax's are of many kinds
      if 'RESOURCE_EXHAUSTED' in str(e):
        raise  # too little memory is no fault of the checkpoint
      problem = why(e)
    if problem:
      let_go_of_reads()  # out of the `except` block, which still holds them
      raise CheckpointError(
        f'{path} cannot be read: {problem}',
        fix='Copy the checkpoint again, or name another: RestoreConfig.step.',
        parameters=('RestoreConfig.path', 'RestoreConfig.step'),
      )
  return Restored(path, state, saved.data_state, saved.manifest)
