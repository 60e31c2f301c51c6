"""The checkpoints of a run: when it saves, and how it writes, restores and deletes them.

`BaseCheckpointer` has everything that disks and object storage share. `Checkpointer` lets Orbax
write `MODEL_DIR/checkpoint_<step>` to a disk; a step exists only once it is committed, and older
ones are deleted only after that. Each checkpoint holds three items: the state's arrays, the state
of the data iterator, and the manifest.
"""

import abc
import base64
import contextlib
import dataclasses
import errno
import logging
import math
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional, Self

import orbax.checkpoint as ocp
from etils import epath

from t5x_gpu.checkpoint.arrays import check_restored, checksums_entry, checksums_of, save_args
from t5x_gpu.checkpoint.local.promotion import promote_newer
from t5x_gpu.checkpoint.local.tier import LocalTier, NoLocalTier, check_local_settings
from t5x_gpu.checkpoint.manifest import Manifest, describe_arrays, sealed
from t5x_gpu.checkpoint.model_dir import (
  CUT_SHORT,
  UNREADABLE,
  ModelDir,
  as_model_dir,
  check_same_model,
  check_writable,
  check_written,
  error_line,
  is_dangling,
  none_can_be_read,
  remove_checkpoint,
  remove_leftovers,
  set_aside_checkpoint,
)
from t5x_gpu.checkpoint.retention import BEST_IS, EVALUATIONS, Keep
from t5x_gpu.checkpoint.run_files import RunFiles
from t5x_gpu.checkpoint.run_lock import check_exists
from t5x_gpu.checkpoint.store import OF_TENSORSTORE, CheckpointAddress, StateReader, read_state
from t5x_gpu.errors import AccessError, CheckpointError, ConfigError, UserError, did_you_mean
from t5x_gpu.runtime import distributed, process_exit
from t5x_gpu.runtime.cluster.agreement import who_text
from t5x_gpu.storage.files import free_bytes, sync_folder, sync_names, write_problem
from t5x_gpu.storage.json_schema import Json
from t5x_gpu.storage.paths import AnyPath, access_errors
from t5x_gpu.terminal.console import show
from t5x_gpu.training.state import TrainState

_log = logging.getLogger(__name__)


def saved_data(data_state: bytes) -> dict[str, str]:
  """Returns the state of a `BatchIterator` in the form that checkpoints store."""
  return {'iterator': base64.b64encode(data_state).decode()}


@dataclasses.dataclass(frozen=True)
class RestoredState:
  """A checkpoint that has been read.

  Attributes:
    path: folder of the checkpoint.
    state: the training state, on the mesh of this run.
    data_state: argument of `BatchIterator.set_state`.
    manifest: see checkpoint/manifest.py.
  """

  path: AnyPath
  state: TrainState
  data_state: bytes
  manifest: Manifest


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When to save and how many to keep.

  Attributes:
    period: steps between saves; the last step and an interrupted run are saved as well.
    checkpoint_steps: further steps to save after; `keep` counts them like the others.
    keep: how many of the last checkpoints are kept; None for all.
    keep_every: checkpoints whose step is a multiple of this are kept, too.
    keep_best: this many of the best evaluated checkpoints are kept, too.
    best_metric: the evaluation metric that ranks checkpoints, named as in metrics.jsonl.
    best_is: 'min' or 'max': whether low or high values are best.
    stop_before_end_seconds: save and exit this long before the job's time limit, if it is known.
    local_checkpoint_dir: folder on each host for local checkpoints between saves, such as
      '/dev/shm/$USER'; None turns them off (checkpoint/local/tier.py).
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
  checkpoint_steps: Sequence[int] = ()

  def __post_init__(self) -> None:
    object.__setattr__(self, 'checkpoint_steps', tuple(self.checkpoint_steps))
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

  def is_due(self, step: int) -> bool:
    """Returns whether a checkpoint follows `step`."""
    return step % self.period == 0 or step in self.checkpoint_steps

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


class BaseCheckpointer(abc.ABC):
  """The checkpoints of one MODEL_DIR, locked at least until the end of the `with` block.

  The end of the block waits for the save in progress, also after an error of the run, but not after
  an interrupt. It always releases MODEL_DIR, unless the caller had locked it.

  Args:
    model_dir: MODEL_DIR of the run; created if missing.
    keep: which checkpoints stay; all of them if `keep.last` is None.
  Attributes:
    files: where the run writes its small files.
  Raises:
    CheckpointError: MODEL_DIR cannot be created or written to, or another run writes to it.
  """

  pause = 'save'  # the name of a save in the step timer

  def __init__(self, model_dir: ModelDir | str | AnyPath, *, keep: Keep = Keep(last=3)):
    self._is_main = distributed.is_main_process()
    model_dir = as_model_dir(model_dir)
    self._dir, self._keep = model_dir, keep
    self._values: dict[int, float] = {}  # step -> value of the metric that `keep.best` compares
    if self._is_main or not model_dir.is_remote:
      check_writable(model_dir.path)
    self._releases = not model_dir.is_locked
    model_dir.lock()
    for step in remove_leftovers(model_dir.path) if self._is_main else ():
      _log.info(
        'Deleted the rest of checkpoint_%d: an earlier process ended while saving or deleting it.',
        step,
      )
    self.files = RunFiles(model_dir.path, is_main=self._is_main)
    # In the names of uncommitted files: a process of an earlier start that was suspended while it
    # wrote a checkpoint may continue while this start saves the same step.
    self._start: str = distributed.broadcast_json(f'{secrets.randbelow(10**16):016}')
    with distributed.errors_together():
      for step in model_dir.steps if keep.best else ():
        if is_dangling(model_dir.checkpoint(step)):  # an older one does not matter
          continue
        with contextlib.suppress(*UNREADABLE):  # a damaged checkpoint is not among the best
          self._note_value(step, model_dir.manifest(step))

  def _note_value(self, step: int, manifest: Manifest) -> None:
    value = self._keep.value_of(manifest.get('metrics') or {})
    if value is not None:
      self._values[step] = value

  def path(self, step: int) -> AnyPath:
    return self._dir.checkpoint(step)

  @abc.abstractmethod
  def steps(self) -> list[int]:
    """Returns the committed steps, oldest first."""

  # ---- Saving ------------------------------------------------------------------------------------

  def save(self, step: int, state: TrainState, *, data_state: bytes, manifest: Manifest) -> None:
    """Starts to write `checkpoint_<step>`; returns once `state` may be overwritten.

    Raises:
      CheckpointError: this or an earlier save failed (no older checkpoint was deleted), or another
        run has taken over MODEL_DIR (nothing is written).
      ConfigError: the evaluation did not report `keep.metric`. Raised after the commit.
    """
    self._prepare_to_save(step)
    unknown_metric = None
    try:
      self._note_value(step, manifest)
    except ConfigError as e:
      unknown_metric = e
    manifest = {**manifest, **checksums_entry(checksums_of(state))}
    data = saved_data(data_state)
    self._start_to_save(step, state, data=data, manifest=manifest)
    if unknown_metric is not None:
      self.wait()
      raise unknown_metric

  @abc.abstractmethod
  def _prepare_to_save(self, step: int) -> None:
    """Raises CheckpointError unless this run owns MODEL_DIR and `checkpoint_<step>` is free."""

  @abc.abstractmethod
  def _start_to_save(self, step: int, state: TrainState, *, data: Json, manifest: Manifest) -> None:
    """Starts to write; returns once `state` may be overwritten."""

  @abc.abstractmethod
  def raise_if_failed(self) -> None:
    """Raises CheckpointError if the save in progress has failed by now."""

  @abc.abstractmethod
  def wait(self) -> None:
    """Waits until everything is committed; raises CheckpointError if that failed."""

  def _remove_old(self) -> None:
    """Removes the checkpoints that no rule keeps; process 0 calls it once a newer is committed."""
    steps = self.steps()
    kept = steps if self._keep.last is None else self._keep.reasons(steps, self._values)
    for step in steps:
      if step not in kept and self._dir.is_ours(step):
        try:
          remove_checkpoint(self._dir.path, step)
          self._dir.removed(step)
        except (OSError, CheckpointError) as e:  # harmless; the next save tries again
          _log.warning('checkpoint_%d could not be deleted: %s', step, error_line(e))

  def _last_good(self) -> str:
    """Returns a sentence on where a restart continues, for the error of a failed save."""
    steps = self.steps()
    return (
      f'The last good one is checkpoint_{steps[-1]}; a restart continues from it.'
      if steps
      else 'No checkpoint has been committed yet.'
    )

  def close(self) -> None:
    """Ends background work and releases MODEL_DIR. Everything is committed by now."""
    self._stop()
    self._release()

  def _release(self) -> None:
    if self._releases:
      self._dir.release()

  @abc.abstractmethod
  def _stop(self) -> None:
    """Ends background work."""

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: object, error: Optional[BaseException], trace: object) -> None:
    try:
      if error is None:
        self.wait()
        self.close()
      elif isinstance(error, Exception) and not isinstance(error, CheckpointError):
        try:
          self.wait()
        except CheckpointError as e:
          _log.error('%s', e)
    finally:
      self._release()

  # ---- Restoring ---------------------------------------------------------------------------------

  def restore_latest(
    self, target: TrainState, *, local: LocalTier | NoLocalTier = NoLocalTier()
  ) -> Optional[RestoredState]:
    """Returns the latest readable checkpoint on the mesh of `target`; None if there is none.

    Unreadable checkpoints are set aside, with a warning that names the checkpoint used instead.

    Args:
      target: shapes, dtypes and shardings of this run.
      local: local checkpoints of the run. If a checkpoint cannot be read, a local one that is newer
        than the next older checkpoint replaces it.
    Raises:
      CheckpointError: the checkpoint belongs to another model, no checkpoint can be read, or the
        storage does not answer.
    """
    try:
      return self._restore_latest(target, local)
    except BaseException:
      self._release()  # the run ends before it has written anything
      raise

  def _restore_latest(
    self, target: TrainState, local: LocalTier | NoLocalTier
  ) -> Optional[RestoredState]:
    steps = self.steps()
    reasons: dict[int, str] = {}
    while steps:
      step = steps.pop()
      restored, damage = self._try_to_restore(step, target)
      if damage:
        reasons[step] = damage
      if restored is not None:
        if reasons:
          self._dir.lock()  # reading may have taken long
          self._set_all_aside(reasons, used=step)
        return restored
      self._dir.lock()
      older = steps[-1] if steps else None
      promoted = promote_newer(self._dir, local, newer_than=older, target=target)
      if promoted is not None:
        steps.append(promoted)
        if promoted in reasons:  # it was renamed to make room
          _log.warning('checkpoint_%d could not be read (%s).', promoted, reasons.pop(promoted))
          local = NoLocalTier()  # nothing newer is left
    if reasons:
      raise none_can_be_read(self._dir.path, reasons)
    return None

  def _try_to_restore(self, step: int, target: TrainState) -> tuple[Optional[RestoredState], str]:
    """Returns the checkpoint, or None and the reason; the same on all processes."""
    checkpoint = CheckpointAddress(self._dir, step)
    restored, reasons = read_checkpoint(
      checkpoint,
      target,
      check=lambda manifest: check_same_model(self._dir.path, step, manifest, target=target),
    )
    if restored is None and not all(reasons):
      _check_damaged_for_all(checkpoint, reasons)
    return restored, next(filter(None, reasons), '')

  def _set_all_aside(self, reasons: Mapping[int, str], *, used: int) -> None:
    for step, reason in reasons.items():
      self._dir.removed(step)
      if self._is_main:
        _log.warning(
          'checkpoint_%d cannot be read (%s) and %s. Continuing from checkpoint_%d.',
          step,
          reason,
          set_aside_checkpoint(self._dir.path, step, reason),
          used,
        )


def _without_other_history(target: TrainState, manifest: Manifest) -> TrainState:
  """Returns `target`, without its FP8 history if the checkpoint has a different FP8 history."""
  want = describe_arrays({'fp8_history': target.fp8_history})
  have = manifest['arrays']
  return target if want.items() <= have.items() else target.replace(fp8_history={})


def read_checkpoint(
  checkpoint: CheckpointAddress,
  target: TrainState,
  *,
  check: Callable[[Manifest], None] = lambda manifest: None,
) -> tuple[Optional[RestoredState], list[str]]:
  """Reads a checkpoint onto the mesh of `target`, and compares its values with the checksums.

  All processes call it.

  Args:
    checkpoint: the checkpoint.
    target: shapes, dtypes and shardings of this run.
    check: called with the manifest before the arrays are read; may raise UserError.
  Returns:
    The checkpoint, or None if it is damaged; why each process cannot read it ('' if it can).
  Raises:
    AccessError: the files cannot be opened, and may be intact.
  """
  path, restored = checkpoint.path, None

  def read() -> None:
    nonlocal restored
    saved = checkpoint.metadata
    check(saved.manifest)
    state = read_state(checkpoint, _without_other_history(target, saved.manifest))
    restored = RestoredState(path, state, saved.data_state, saved.manifest)

  def compare() -> None:
    check_restored(restored.state, restored.manifest, step=checkpoint.step)

  # Two rounds: the processes compute checksums together, once all have read their parts.
  for do in (read, compare):
    reason = ''
    with distributed.errors_together():
      reason = _damage(do, path)
    reasons = distributed.gather_json(reason)
    if any(reasons):
      return None, reasons
  return restored, reasons


def _damage(do: Callable[[], None], path: AnyPath) -> str:
  """Returns the reason if `do` fails because files in `path` are damaged; '' if it succeeds."""
  try:
    with access_errors(path):
      do()
  except (UserError, MemoryError):
    raise
  except Exception as e:  # Orbax and TensorStore raise many kinds of errors
    if 'RESOURCE_EXHAUSTED' in str(e):
      raise  # too little memory does not mean that the checkpoint is damaged
    return error_line(e)
  return ''


def _check_damaged_for_all(checkpoint: CheckpointAddress, reasons: Sequence[str]) -> None:
  """Raises CheckpointError if the files are intact and some hosts damage the data they read.

  Each process reads different parts, so a single process may see the damage in a file. The
  processes that saw no damage divide all arrays of the checkpoint among them and read those.

  Args:
    checkpoint: the checkpoint.
    reasons: why each process cannot read it; '' for processes that can.
  """
  witnesses = [process for process, reason in enumerate(reasons) if not reason]
  problem = ''
  with distributed.errors_together():
    if distributed.process_index() in witnesses:
      # A new ModelDir: this process may have read the metadata before they changed.
      again = CheckpointAddress(ModelDir(checkpoint.model_dir.path), checkpoint.step)
      number = witnesses.index(distributed.process_index())
      problem = _first_problem(again, number, len(witnesses))
  if any(distributed.gather_json(problem)):
    return
  others = [process for process, reason in enumerate(reasons) if reason]
  raise CheckpointError(
    f'{checkpoint.path} cannot be read by {who_text(others, distributed.hostnames())}: '
    f'{reasons[others[0]]}. All other processes find it intact.',
    fix='Check the mount and the memory of that host, or start the run without it. Nothing was '
    'moved or removed.',
    docs='checkpoints.md#no-access',
  )


def _first_problem(checkpoint: CheckpointAddress, number: int, count: int) -> str:
  """Returns the first damaged array with the reason; '' if all match their checksums.

  Checks the arrays number, number + count, ...
  """
  try:
    reader = StateReader(checkpoint)
  except AccessError:
    raise
  except CheckpointError as e:
    return e.what
  return next(filter(None, map(reader.problem, sorted(reader.shapes)[number::count])), '')


class _LiteralPath(type(epath.Path('/'))):
  """A path in which `[`, `*` and `?` are ordinary characters.

  Orbax finds the files of all processes by a glob pattern that begins with the path of the folder.
  """

  def glob(self, pattern: str) -> Iterator['_LiteralPath']:
    yield from map(type(self), pathlib.Path(self).glob(pattern))


class Checkpointer(BaseCheckpointer):
  """The checkpoints of one MODEL_DIR on a disk; see `BaseCheckpointer`.

  Orbax copies each process's part of the arrays to host memory, and a thread of each process writes
  the copy. Process 0 also writes data state and manifest, waits for all processes, and commits.
  """

  def __init__(self, model_dir: ModelDir | str | AnyPath, *, keep: Keep = Keep(last=3)):
    super().__init__(model_dir, keep=keep)
    self._has_saved = False
    checkpointer = self

    class Unfinished(ocp.path.atomicity.AtomicRenameTemporaryPath):
      """The folder that Orbax writes. A thread of process 0 finalizes it, after the last write."""

      @classmethod
      def from_final(cls, final_path: epath.Path, **options: Any) -> Self:
        name = f'{final_path.name}{CUT_SHORT}-{checkpointer._start}'
        return cls(final_path.with_name(name), final_path, **options)

      async def finalize(self) -> None:
        written = pathlib.Path(self.get())
        check_written(written / 'state')
        # TensorStore has waited for the disk, Orbax has not: for half a minute after the commit, a
        # crash of the machine would leave small files empty, and the older checkpoint is deleted.
        sync_folder(written, leave_out=OF_TENSORSTORE)
        checkpointer._dir.check_owner()  # no other run has taken over meanwhile
        await super().finalize()  # the commit: renames the folder to checkpoint_<step>
        sync_names(written.parent)
        checkpointer._remove_old()

    # Compressing takes longer than writing, and makes weights only 8% smaller.
    state_handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    merge = state_handler.finalize
    state_handler.finalize = lambda folder: merge(_LiteralPath(folder))  # MODEL_DIR may contain `[`
    self._orbax = ocp.AsyncCheckpointer(
      ocp.CompositeCheckpointHandler(
        state=state_handler, data=ocp.JsonCheckpointHandler(), manifest=ocp.JsonCheckpointHandler()
      ),
      temporary_path_class=Unfinished,
    )

  def steps(self) -> list[int]:
    """Returns the committed steps, oldest first."""
    if self._has_saved:
      self._dir.relist()  # a thread, perhaps of another process, commits and removes
    return self._dir.steps

  # ---- Saving ------------------------------------------------------------------------------------

  def _prepare_to_save(self, step: int) -> None:
    self._dir.check_owner()  # the other processes wait for this one before they write
    if os.path.lexists(self.path(step)):  # also a dangling link
      raise CheckpointError(
        f'{self.path(step)} exists and was not overwritten.',
        fix='Continue from the latest checkpoint, or set another MODEL_DIR.',
        parameters=('MODEL_DIR',),
      )

  def _start_to_save(self, step: int, state: TrainState, *, data: Json, manifest: Manifest) -> None:
    self._has_saved = True
    with self._errors_as_ours(step):
      self._orbax.check_for_errors()
      self._orbax.save(
        self.path(step),
        args=ocp.args.Composite(
          state=ocp.args.PyTreeSave(state.saved(), save_args=save_args(state.saved())),
          data=ocp.args.JsonSave(data),
          manifest=ocp.args.JsonSave(sealed(manifest, data=data)),
        ),
      )

  def raise_if_failed(self) -> None:
    """Raises CheckpointError if the save in progress has failed by now."""
    with self._errors_as_ours(None):
      self._orbax.check_for_errors()

  def wait(self) -> None:
    """Waits until everything is committed; raises CheckpointError if that failed."""
    with self._errors_as_ours(None):
      self._orbax.wait_until_finished()

  def _stop(self) -> None:
    self._orbax.close()

  @contextlib.contextmanager
  def _errors_as_ours(self, step: Optional[int]) -> Iterator[None]:
    """Turns any error of Orbax's save into a CheckpointError."""
    try:
      yield
    except Exception as e:
      # After a failure, Orbax's threads wait for each other for ten minutes.
      process_exit.abandon_threads()
      if isinstance(e, CheckpointError):  # another run has taken over
        raise
      raise self._save_error(step, e) from e

  def _save_error(self, step: Optional[int], e: Exception) -> CheckpointError:
    folder = self._dir.path
    try:
      check_exists(folder)
    except CheckpointError as gone:
      return gone
    what = 'The last checkpoint' if step is None else f'checkpoint_{step} (or the save before it)'
    reason, where = f'{type(e).__name__}: {e}', 'there'
    for number in (errno.ENOSPC, errno.EDQUOT):
      if os.strerror(number) in reason:
        reason = write_problem(OSError(number, os.strerror(number)), folder) + '.'
        # What this save wrote would keep the disk full for the next start.
        for path in folder.glob(f'*{CUT_SHORT}-{self._start}') if self._is_main else ():
          shutil.rmtree(path, ignore_errors=True)
          where = 'now that its files are deleted'
    free = free_bytes(folder)
    room = 'unknown' if free is None else show(free, GiB='.2f')
    return CheckpointError(
      f'{what} could not be written to {folder}: {reason}',
      fix=f'{self._last_good()} Free space {where}: {room}.',
      parameters=('MODEL_DIR',),
    )
