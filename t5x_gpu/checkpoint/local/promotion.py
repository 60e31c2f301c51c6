"""At a restart, the newest step that the hosts' local disks have whole becomes a checkpoint.

Processes tell each other which parts they find. The newest step of which each part is there once,
and which is newer than the last readable checkpoint, is written into MODEL_DIR as checkpoint_<step>
in the format of all others, each process its parts: so it restores onto any mesh and any number of
processes, and with the same checks.
"""

import base64
import collections
import dataclasses
import logging
import math
import os
import pathlib
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import jax.numpy as jnp

from t5x_gpu.checkpoint.arrays.state_writer import StateWriter, empty_leaves
from t5x_gpu.checkpoint.local.inventory import (
  Box,
  Candidate,
  Found,
  candidates,
  find_local_files,
  missing_words,
)
from t5x_gpu.checkpoint.local.local_tier import LocalTier, NoLocalTier
from t5x_gpu.checkpoint.local.replication import gigabytes
from t5x_gpu.checkpoint.local.run_id import read_run_id
from t5x_gpu.checkpoint.local.settings import DIR
from t5x_gpu.checkpoint.manifest import differences
from t5x_gpu.checkpoint.model_dir import (
  PREFIX,
  UNREADABLE,
  Saved,
  check_model_dir,
  checkpoint_path,
  committed_steps,
  is_real_folder,
  read_saved,
  why,
)
from t5x_gpu.checkpoint.run_lock import RunLock
from t5x_gpu.checkpoint.storage.checksums import record, to_text
from t5x_gpu.checkpoint.storage.chunks import Shape, boxes, chunk_of_shard
from t5x_gpu.config.set_aside import free_name, set_aside
from t5x_gpu.errors import CheckpointError
from t5x_gpu.runtime import distributed

_log = logging.getLogger(__name__)

PROMOTED_FROM = 'promoted_from'
_STAGING = '.promoting'
VISIBLE_SECONDS = 120  # longer than NFS keeps what it knows of a folder (60 s)


def check_with_local(
  model_dir: str | os.PathLike, local: LocalTier | NoLocalTier, *, target: Any, dry_run: bool
) -> Optional[Saved]:
  """Returns the latest checkpoint as `check_model_dir` does, once what is kept locally and is newer
  has become one.

  Args:
    model_dir: need not exist.
    local: of today's run.
    target: the TrainState (or its shapes) of today.
    dry_run: change nothing; say, and return, what would be promoted.
  Raises:
    CheckpointError: as `check_model_dir`; or a whole local step cannot be written to MODEL_DIR.
  """
  promoted = None
  if isinstance(local, LocalTier):
    promoted = _promote(pathlib.Path(model_dir).absolute(), local.folder, target, dry_run)
  saved = check_model_dir(model_dir, target=target)
  return promoted if dry_run and promoted else saved


def promote_newer(
  local: LocalTier | NoLocalTier, newer_than: Optional[int], *, target: Any
) -> Optional[int]:
  """Returns the newest local step after `newer_than` that is whole, once it is a checkpoint.

  For a run that finds, when it reads the arrays, that a checkpoint is damaged. It has MODEL_DIR
  locked. None without such a step.

  Args:
    local: of today's run.
    newer_than: the step that comes next among the checkpoints; None without any.
    target: the TrainState (or its shapes) of today.
  Raises:
    CheckpointError: a whole local step cannot be written to MODEL_DIR.
  """
  if not isinstance(local, LocalTier):
    return None
  folder = local.model_dir
  run = distributed.broadcast_json(read_run_id(folder) if distributed.is_main_process() else None)
  if run is None:
    return None
  found = _found(local.folder, run, newer_than)
  saved = _first_whole(folder, found, candidates(found), target, durable=newer_than)
  return None if saved is None else saved.step


def _found(local: pathlib.Path, run: str, newer_than: Optional[int]) -> Found:
  return find_local_files(local / run, run=run, newer_than=-1 if newer_than is None else newer_than)


def _first_whole(
  folder: pathlib.Path,
  found: Found,
  waiting: Sequence[Candidate],
  target: Any,
  *,
  durable: Optional[int],
  dry_run: bool = False,
) -> Optional[Saved]:
  """Returns the first of `waiting` that can be promoted, once it is; None if none can."""
  fallback = 'the seed' if durable is None else f'checkpoint_{durable}'
  for candidate in waiting:
    saved = Promotion(folder, candidate, found, target, dry_run=dry_run).run(fallback=fallback)
    if saved is not None:
      return saved
  return None


def _promote(
  folder: pathlib.Path, local: pathlib.Path, target: Any, dry_run: bool
) -> Optional[Saved]:
  staging = folder / _STAGING
  run, durable, cut_short = distributed.broadcast_json(
    (read_run_id(folder), _newest_readable(folder), is_real_folder(staging))
    if distributed.is_main_process()
    else None
  )
  if run is None:
    return None
  found = _found(local, run, durable)
  waiting = candidates(found)
  lock = _lock(folder) if (waiting or cut_short) and not dry_run else None
  try:
    if lock is not None:
      shutil.rmtree(staging, ignore_errors=True)  # of a promotion that was killed
      if os.path.lexists(staging):
        set_aside(staging, 'it is no folder of ours')
    return _first_whole(folder, found, waiting, target, durable=durable, dry_run=dry_run)
  finally:
    if lock is not None:
      lock.release()


def _lock(folder: pathlib.Path) -> Optional[RunLock]:
  """Returns the lock of MODEL_DIR, of process 0; all raise CheckpointError if another has it."""
  lock, problem = None, None
  if distributed.is_main_process():
    try:
      lock = RunLock(folder, wait=True)
    except CheckpointError as e:
      problem = {'what': e.what, 'fix': e.fix, 'parameters': e.parameters, 'docs': e.docs}
  problem = distributed.broadcast_json(problem)
  if problem is not None:
    raise CheckpointError(problem.pop('what'), **problem)
  return lock


def _newest_readable(folder: pathlib.Path) -> Optional[int]:
  for step in reversed(committed_steps(folder)):
    try:
      return read_saved(folder, step).step
    except UNREADABLE:
      continue
  return None


@dataclasses.dataclass
class Outcome:
  """What a process has done of its share; travels as JSON.

  Attributes:
    done: [array, start, checksum] of boxes that are written.
    bad: [array, start, file, why] of those that cannot be read.
    problem: why nothing can be written; '' if all is well.
  """

  done: list[Any] = dataclasses.field(default_factory=list)
  bad: list[Any] = dataclasses.field(default_factory=list)
  problem: str = ''


class Promotion:
  """One local step on its way into MODEL_DIR. All processes make it and call `run`.

  Args:
    folder: MODEL_DIR.
    candidate: the step, and who has which part.
    found: this process's files.
    target: the TrainState of today.
    dry_run: read and check only.
  """

  def __init__(
    self, folder: pathlib.Path, candidate: Candidate, found: Found, target: Any, *, dry_run: bool
  ):
    self._folder, self._candidate, self._found = folder, candidate, found
    self._target, self._dry_run = target, dry_run
    self._staging = folder / _STAGING
    self._facts: Mapping[str, Any] = {}
    self._arrays: dict[str, tuple[Shape, Any]] = {}
    self._names: list[str] = []
    self._writer: Optional[StateWriter] = None

  def run(self, *, fallback: str) -> Optional[Saved]:
    """Returns the promoted step; None if it is not whole, or of another model.

    Args:
      fallback: what the run then continues from, unless there is an older local step.
    Raises:
      CheckpointError: MODEL_DIR cannot be written.
    """
    step = self._candidate.step
    self._facts = self._shared_facts()
    manifest = self._facts['manifest']
    self._arrays = {
      name: (tuple(shape), jnp.dtype(dtype)) for name, (shape, dtype) in manifest['arrays'].items()
    }
    self._names = sorted(self._arrays)
    if differences(manifest, self._target):
      self._warn(
        f'Local step {step} is of another model or optimizer, and is not used. '
        f'Continuing from {fallback}.'
      )
      return None
    lacking = self._lacking(self._candidate.holders)
    if lacking:
      self._warn(
        f'Local step {step} cannot be promoted: {lacking}. Continuing from {fallback} or '
        'an older local step.'
      )
      return None
    started = time.monotonic()
    try:
      checksums = self._copy_all(fallback)
      if checksums is None:
        return None
      manifest = {
        **manifest,
        **record(checksums),
        PROMOTED_FROM: {
          'hosts': sorted(set(self._facts['hosts'])),
          'processes': len(self._facts['hosts']),
        },
      }
      if not self._dry_run:
        self._commit(manifest)
    finally:
      if distributed.is_main_process() and not self._dry_run:
        shutil.rmtree(self._staging, ignore_errors=True)
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._arrays.values())
    self._say(
      f'Local step {step} would be promoted to checkpoint_{step}: whole, and newer than {fallback}.'
      if self._dry_run
      else f'Promoted local step {step} to checkpoint_{step}: {gigabytes(size)} in '
      f'{time.monotonic() - started:.1f} s. It is newer than {fallback}.'
    )
    return Saved(step, base64.b64decode(self._facts['data_state']), manifest)

  def _shared_facts(self) -> Mapping[str, Any]:
    """Returns the facts of the save, from one of the files."""
    first = min(process for process, _ in self._candidate.files)
    mine = None
    if first == distributed.process_index():
      number = min(number for process, number in self._candidate.files if process == first)
      mine = self._found.files[number].facts
    return next(facts for facts in distributed.gather_json(mine) if facts is not None)

  def _lacking(self, holders: Mapping[Box, Any]) -> str:
    """Returns which parts nobody has, in words; '' if all are there."""
    there: collections.Counter = collections.Counter()
    for (array, _, shape), who in holders.items():
      there[array] += math.prod(shape) if who else 0
    lacking = [
      name for i, name in enumerate(self._names) if there[i] != math.prod(self._arrays[name][0])
    ]
    if not lacking:
      return ''
    return (
      f'{missing_words(self._candidate, self._facts["hosts"])} ({len(lacking)} of '
      f'{len(self._names)} arrays, {lacking[0]} among them, are not whole)'
    )

  def _copy_all(self, fallback: str) -> Optional[dict[str, str]]:
    """Returns array -> checksum once all boxes are copied; None if one cannot be read anywhere."""
    holders = {box: list(who) for box, who in self._candidate.holders.items()}
    shapes = {array: shape for array, _, shape in holders}
    sums = {name: [0, 0] for name in self._names}
    self._prepare()
    todo = set(holders)
    while todo:
      mine = self._assigned(todo, holders)
      outcomes = [
        Outcome(**o) for o in distributed.gather_json(dataclasses.asdict(self._copy(mine, shapes)))
      ]
      for process, outcome in enumerate(outcomes):
        if outcome.problem:
          raise self._write_error(f'process {process}: {outcome.problem}')
        for array, start, checksum in outcome.done:
          todo.remove((array, tuple(start), shapes[array]))
          both = sums[self._names[array]]
          both[0] += int(checksum[:8], 16)
          both[1] += int(checksum[8:], 16)
        for array, start, file, reason in outcome.bad:
          self._candidate.damaged.append(f'{reason} (read by process {process})')
          holders[array, tuple(start), shapes[array]].remove((process, file))
      lacking = self._lacking(holders)
      if lacking:
        self._warn(
          f'Local step {self._candidate.step} cannot be promoted: {lacking}. Continuing '
          f'from {fallback} or an older local step.'
        )
        return None
    for reason in self._candidate.damaged:
      self._warn(f'Local step {self._candidate.step}: {reason}; its other copy is used.')
    return {name: to_text(both) for name, both in sums.items()}

  def _prepare(self) -> None:
    """Makes an empty staging folder."""
    problem = ''
    if distributed.is_main_process() and not self._dry_run:
      try:
        self._staging.mkdir()
      except OSError as e:
        problem = e.strerror or str(e)
    problem = distributed.broadcast_json(problem)
    if problem:
      raise self._write_error(problem)

  def _assigned(
    self, todo: set[Box], holders: Mapping[Box, Sequence[tuple[int, int]]]
  ) -> list[tuple[Box, int]]:
    """Returns (box, file) of what this process is to copy; all have about as many bytes."""
    loads: collections.Counter = collections.Counter()
    mine = []
    for box in sorted(todo, key=lambda box: (-self._bytes(box), box)):
      process, file = min(holders[box], key=lambda who: (loads[who[0]], who))
      loads[process] += self._bytes(box)
      if process == distributed.process_index():
        mine.append((box, file))
    return mine

  def _bytes(self, box: Box) -> int:
    return math.prod(box[2]) * self._arrays[self._names[box[0]]][1].itemsize

  def _copy(self, mine: Sequence[tuple[Box, int]], shapes: Mapping[int, Shape]) -> Outcome:
    """Returns what became of this process's share."""
    outcome = Outcome()
    try:
      if self._writer is None and not self._dry_run:
        chunks = {
          name: chunk_of_shard(
            self._arrays[name][0], shapes[i], itemsize=self._arrays[name][1].itemsize
          )
          for i, name in enumerate(self._names)
        }
        self._writer = StateWriter(
          self._staging,
          step=self._candidate.step,
          arrays=self._arrays,
          chunks=chunks,
          process=distributed.process_index(),
        )
      for (array, start, shape), number in mine:
        name, file = self._names[array], self._found.files[number]
        part = next(p for p in file.parts if p.name == name and p.start == start)
        try:
          values = file.read(part, self._arrays[name][0])
        except (OSError, ValueError) as e:
          outcome.bad.append([array, start, number, f'{file.path}: {why(e)}'])
          continue
        if self._writer is not None:
          self._write(name, start, shape, values)
        outcome.done.append([array, start, part.checksum])
      if self._writer is not None:
        self._writer.flush()
    except (OSError, ValueError) as e:  # TensorStore's while it makes arrays are ValueErrors
      outcome.problem = (e.strerror if isinstance(e, OSError) else None) or why(e)
    return outcome

  def _write(self, name: str, start: Shape, shape: Shape, values: Any) -> None:
    chunk = chunk_of_shard(self._arrays[name][0], shape, itemsize=values.dtype.itemsize)
    for place in boxes(shape, chunk):
      self._writer.write(
        name, tuple(slice(s.start + a, s.stop + a) for s, a in zip(place, start)), values[place]
      )

  def _commit(self, manifest: Mapping[str, Any]) -> None:
    """Gives the checkpoint its name; returns once every process sees it."""
    step, problem = self._candidate.step, ''
    final = checkpoint_path(self._folder, step)
    if distributed.is_main_process():
      try:
        self._writer.merge()
        self._writer.close(
          manifest=manifest,
          data={'iterator': self._facts['data_state']},
          empty=empty_leaves(self._target),
        )
        if is_real_folder(final):  # it could not be read
          os.rename(final, free_name(self._folder / f'corrupt_{PREFIX}_{step}'))
        os.rename(self._writer.path, final)
      except (OSError, ValueError) as e:
        problem = (e.strerror if isinstance(e, OSError) else None) or why(e)
    problem = distributed.broadcast_json(problem)
    if problem:
      raise self._write_error(problem)
    deadline = time.monotonic() + VISIBLE_SECONDS
    while step not in committed_steps(self._folder) and time.monotonic() < deadline:
      time.sleep(0.1)

  def _write_error(self, problem: str) -> CheckpointError:
    step = self._candidate.step
    return CheckpointError(
      f'Local step {step} is whole, but cannot be written to {self._folder}: {problem}.',
      fix=f'Make room there, and start again: the parts stay where they are. Or set {DIR} = None '
      'to go on without it.',
      parameters=('MODEL_DIR', DIR),
      docs='checkpoints.md#local-steps',
    )

  def _warn(self, text: str) -> None:
    if distributed.is_main_process():
      _log.warning('%s', text)

  def _say(self, text: str) -> None:
    if distributed.is_main_process():
      _log.info('%s', text)
