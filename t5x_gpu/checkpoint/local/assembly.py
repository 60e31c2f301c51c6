"""Assembles one local checkpoint in MODEL_DIR from the parts on the hosts.

Each process copies its share of the parts into a staging folder, in the format of durable
checkpoints. A rename commits the folder. The checksums of an array's parts add up to the checksum
of the array.
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
from t5x_gpu.checkpoint.local.inventory import Box, Candidate, LocalFiles, missing_words
from t5x_gpu.checkpoint.local.replication import gigabytes
from t5x_gpu.checkpoint.local.settings import DIR
from t5x_gpu.checkpoint.manifest import differences
from t5x_gpu.checkpoint.model_dir import ModelDir
from t5x_gpu.checkpoint.saved_checkpoint import PREFIX, Saved, error_line, is_real_folder
from t5x_gpu.checkpoint.storage.checksums import record, to_text
from t5x_gpu.checkpoint.storage.chunks import Shape, boxes, chunk_of_shard
from t5x_gpu.checkpoint.storage.storage_errors import system_error
from t5x_gpu.config.set_aside import free_name, set_aside
from t5x_gpu.errors import CheckpointError
from t5x_gpu.runtime import distributed

_log = logging.getLogger(__name__)

PROMOTED_FROM = 'promoted_from'
STAGING = '.promoting'
VISIBLE_SECONDS = 120  # longer than NFS caches the contents of a folder (60 s)


@dataclasses.dataclass
class CopyOutcome:
  """The parts that a process has copied; sent to the other processes as JSON.

  Attributes:
    done: [array, start, checksum] of boxes that are written.
    bad: [array, start, file, reason, whether the file may be intact] of unreadable boxes.
    problem: why MODEL_DIR cannot be written; '' if it can.
  """

  done: list[Any] = dataclasses.field(default_factory=list)
  bad: list[Any] = dataclasses.field(default_factory=list)
  problem: str = ''


class Assembly:
  """Assembles one local checkpoint in MODEL_DIR. All processes create one and call `run`.

  Args:
    model_dir: MODEL_DIR of the run; lists the new checkpoint afterwards.
    candidate: the local checkpoint, with the holders of each part.
    found: the files of this process.
    target: the TrainState of this run.
    dry_run: only read and check.
  Attributes:
    refused: reasons for parts that cannot be read, but may be intact; the same on all processes.
  """

  def __init__(
    self,
    model_dir: ModelDir,
    candidate: Candidate,
    found: LocalFiles,
    target: Any,
    *,
    dry_run: bool,
  ):
    self._dir, self._candidate, self._found = model_dir, candidate, found
    self._target, self._dry_run = target, dry_run
    self._folder: pathlib.Path = model_dir.path
    self._staging = self._folder / STAGING
    self._facts: Mapping[str, Any] = {}
    self._arrays: dict[str, tuple[Shape, Any]] = {}
    self._names: list[str] = []
    self._writer: Optional[StateWriter] = None
    self.refused: list[str] = []

  def run(self, *, fallback: str) -> Optional[Saved]:
    """Returns the promoted checkpoint; None if parts are missing, or it belongs to another model.

    Args:
      fallback: words for logs: the checkpoint that the run would otherwise continue from.
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
        f'Ignoring local checkpoint {step}: it belongs to another model or optimizer. '
        f'Continuing from {fallback}.'
      )
      return None
    if not self._is_complete(self._candidate.holders, fallback):
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
    self._log(
      f'Local checkpoint {step} would be promoted to checkpoint_{step}: it is complete and newer '
      f'than {fallback}.'
      if self._dry_run
      else f'Promoted local checkpoint {step} to checkpoint_{step}: {gigabytes(size)} in '
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

  def _is_complete(self, holders: Mapping[Box, Any], fallback: str) -> bool:
    """Returns whether every part is on some host; warns about missing parts."""
    there: collections.Counter = collections.Counter()
    for (array, _, shape), who in holders.items():
      there[array] += math.prod(shape) if who else 0
    lacking = [
      name for i, name in enumerate(self._names) if there[i] != math.prod(self._arrays[name][0])
    ]
    if lacking:
      self._warn(
        f'Local checkpoint {self._candidate.step} cannot be promoted: '
        f'{missing_words(self._candidate, self._facts["hosts"])} ({len(lacking)} of '
        f'{len(self._names)} arrays are incomplete, {lacking[0]} among them). Continuing from '
        f'{fallback} or an older local checkpoint.'
      )
    return not lacking

  def _copy_all(self, fallback: str) -> Optional[dict[str, str]]:
    """Returns array -> checksum once all boxes are copied; None if no copy of a box can be read."""
    holders = {box: list(who) for box, who in self._candidate.holders.items()}
    shapes = {array: shape for array, _, shape in holders}
    sums = {name: [0, 0] for name in self._names}
    self._prepare()
    todo = set(holders)
    while todo:
      mine = self._assigned(todo, holders)
      outcomes = [
        CopyOutcome(**o)
        for o in distributed.gather_json(dataclasses.asdict(self._copy(mine, shapes)))
      ]
      for process, outcome in enumerate(outcomes):
        if outcome.problem:
          raise self._write_error(f'process {process}: {outcome.problem}')
        for array, start, checksum in outcome.done:
          todo.remove((array, tuple(start), shapes[array]))
          both = sums[self._names[array]]
          both[0] += int(checksum[:8], 16)
          both[1] += int(checksum[8:], 16)
        for array, start, file, reason, is_intact in outcome.bad:
          reason = f'{reason} (read by process {process})'
          self._candidate.damaged.append(reason)
          self.refused += [reason] if is_intact else []
          holders[array, tuple(start), shapes[array]].remove((process, file))
      if not self._is_complete(holders, fallback):
        return None
    for reason in self._candidate.damaged:
      self._warn(f'Local checkpoint {self._candidate.step}: {reason}. Using its other copy.')
    return {name: to_text(both) for name, both in sums.items()}

  def _prepare(self) -> None:
    """Creates an empty staging folder."""
    problem = ''
    if distributed.is_main_process() and not self._dry_run:
      try:
        if os.path.lexists(self._staging):
          set_aside(self._staging, 'it is not a staging folder')
        self._staging.mkdir()
      except OSError as e:
        problem = e.strerror or str(e)
    problem = distributed.broadcast_json(problem)
    if problem:
      raise self._write_error(problem)

  def _assigned(
    self, todo: set[Box], holders: Mapping[Box, Sequence[tuple[int, int]]]
  ) -> list[tuple[Box, int]]:
    """Returns the (box, file) pairs that this process copies; balances bytes over processes."""
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

  def _copy(self, mine: Sequence[tuple[Box, int]], shapes: Mapping[int, Shape]) -> CopyOutcome:
    """Copies the share of this process."""
    outcome = CopyOutcome()
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
          reason = f'{file.path}: {error_line(e)}'
          outcome.bad.append([array, start, number, reason, bool(system_error(e))])
          continue
        if self._writer is not None:
          self._write(name, start, shape, values)
        outcome.done.append([array, start, part.checksum])
      if self._writer is not None:
        self._writer.flush()
    except (OSError, ValueError) as e:  # TensorStore raises ValueError while it creates arrays
      outcome.problem = (e.strerror if isinstance(e, OSError) else None) or error_line(e)
    return outcome

  def _write(self, name: str, start: Shape, shape: Shape, values: Any) -> None:
    chunk = chunk_of_shard(self._arrays[name][0], shape, itemsize=values.dtype.itemsize)
    for place in boxes(shape, chunk):
      self._writer.write(
        name, tuple(slice(s.start + a, s.stop + a) for s, a in zip(place, start)), values[place]
      )

  def _commit(self, manifest: Mapping[str, Any]) -> None:
    """Renames the checkpoint into place; returns once every process sees it."""
    step, problem = self._candidate.step, ''
    final = self._dir.checkpoint(step)
    if distributed.is_main_process():
      try:
        self._writer.merge(num_processes=distributed.process_count())
        self._writer.close(
          manifest=manifest,
          data={'iterator': self._facts['data_state']},
          empty=empty_leaves(self._target.saved()),
        )
        if is_real_folder(final):  # an unreadable checkpoint of the same step
          os.rename(final, free_name(self._folder / f'corrupt_{PREFIX}_{step}'))
        os.rename(self._writer.path, final)
      except (OSError, ValueError) as e:
        problem = (e.strerror if isinstance(e, OSError) else None) or error_line(e)
    problem = distributed.broadcast_json(problem)
    if problem:
      raise self._write_error(problem)
    deadline = time.monotonic() + VISIBLE_SECONDS
    self._dir.refresh()
    while step not in self._dir.steps and time.monotonic() < deadline:
      time.sleep(0.1)
      self._dir.relist()

  def _write_error(self, problem: str) -> CheckpointError:
    step = self._candidate.step
    return CheckpointError(
      f'Local checkpoint {step} is complete, but cannot be written to {self._folder}: {problem}.',
      fix=f'Free space there, and start again: the parts stay where they are. Or set {DIR} = None '
      'to continue without it.',
      parameters=('MODEL_DIR', DIR),
      docs='checkpoints.md#local-checkpoints',
    )

  def _warn(self, text: str) -> None:
    if distributed.is_main_process():
      _log.warning('%s', text)

  def _log(self, text: str) -> None:
    if distributed.is_main_process():
      _log.info('%s', text)
