"""At a restart, promotes the newest complete local checkpoint to a checkpoint in MODEL_DIR.

The processes exchange lists of the files they find. If the newest local checkpoint with all parts
is newer than the last readable checkpoint, each process copies its share of the parts into a
staging folder of MODEL_DIR, in the format of durable checkpoints, and a rename commits it as
checkpoint_<step>. So it restores onto any mesh and any number of processes, with the same checks.
"""

import base64
import collections
import contextlib
import dataclasses
import logging
import math
import os
import pathlib
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

import jax.numpy as jnp
import numpy as np

from t5x_gpu.checkpoint.arrays import boxes, checksums_entry, chunk_of_shard, to_text
from t5x_gpu.checkpoint.local.file_format import FILE_NAME, LocalFile, open_local_file
from t5x_gpu.checkpoint.local.replication import gigabytes
from t5x_gpu.checkpoint.local.tier import DIR, LocalTier, NoLocalTier, read_run_id
from t5x_gpu.checkpoint.manifest import Manifest, differences
from t5x_gpu.checkpoint.model_dir import (
  UNREADABLE,
  CheckpointMetadata,
  ModelDir,
  error_line,
  is_real_folder,
  set_aside_checkpoint,
)
from t5x_gpu.checkpoint.store import OF_TENSORSTORE, StateWriter, empty_leaves
from t5x_gpu.errors import AccessError, CheckpointError, listed
from t5x_gpu.partitioning.trees import Shape, Tree
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.machine import boot_id
from t5x_gpu.storage.files import sync_folder, sync_names
from t5x_gpu.storage.json_schema import Json
from t5x_gpu.storage.paths import access_errors, system_error

_log = logging.getLogger(__name__)

Box = tuple[int, Shape, Shape]  # index of the array among the sorted names, start, shape
Holder = tuple[int, int]  # process, index of the file among the files it found


@dataclasses.dataclass(frozen=True)
class LocalFiles:
  """The files that this process found, and what all processes found.

  Attributes:
    files: files of this process.
    of_all: for every process, {'step', 'attempt', 'process', 'parts'} of each of its files.
    damaged: (step, reason) of truncated or garbled files on any process.
    refused: (step, reason) of files that their process cannot open, which may be intact.
  """

  files: tuple[LocalFile, ...]
  of_all: Sequence[Sequence[Json]]
  damaged: Sequence[tuple[int, str]]
  refused: Sequence[tuple[int, str]]


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A local checkpoint, or the remaining parts of one.

  Attributes:
    step: updates done.
    attempt: attempt of the run; parts of different attempts do not fit together.
    files: holders of its files.
    processes: the writing run's processes whose files were found.
    holders: box -> its holders.
    damaged: why some of its files cannot be read.
  """

  step: int
  attempt: str
  files: Sequence[Holder]
  processes: frozenset[int]
  holders: Mapping[Box, Sequence[Holder]]
  damaged: list[str]


def find_local_files(folder: pathlib.Path, *, run: str, newer_than: int) -> LocalFiles:
  """Returns the files of a run, each found by one process.

  Args:
    folder: folder of the run on this host; need not exist.
    run: name of the run, which its files also contain.
    newer_than: a step; files of this and older steps are not opened.
  Raises:
    AccessError: the folder cannot be listed; raised on all processes.
  """
  # Processes of one host see the same folder: each opens a share of its files.
  folders = distributed.gather_json(_identity(folder))
  same = [i for i, other in enumerate(folders) if other == folders[distributed.process_index()]]
  names: list[str] = []
  with distributed.errors_together(), access_errors(folder), contextlib.suppress(FileNotFoundError):
    names = sorted(os.listdir(folder))
  paths = [
    folder / name
    for name in names
    if (match := FILE_NAME.fullmatch(name)) and int(match[1]) > newer_than
  ]
  files: list[LocalFile] = []
  unusable: dict[str, list[tuple[int, str]]] = {'damaged': [], 'refused': []}
  for path in paths[same.index(distributed.process_index()) :: len(same)]:
    step = int(FILE_NAME.fullmatch(path.name)[1])
    try:
      file = open_local_file(path)
      file.check(step=step)
      if file.facts['run'] == run:
        files.append(file)
    except (OSError, ValueError) as e:
      kind = 'refused' if system_error(e) else 'damaged'
      unusable[kind].append((step, f'{path}: {e}'))
  reported = distributed.gather_json({'files': [_summary(file) for file in files], **unusable})
  return LocalFiles(
    tuple(files),
    [each['files'] for each in reported],
    *(
      [(step, what) for each in reported for step, what in each[kind]]
      for kind in ('damaged', 'refused')
    ),
  )


def _identity(folder: pathlib.Path) -> str:
  try:
    stat = folder.stat()
  except OSError:
    return ''
  return f'{boot_id()}:{stat.st_dev}:{stat.st_ino}'


def _summary(file: LocalFile) -> Json:
  """Returns the summary of a file for other processes, with array indices instead of names."""
  number = {name: i for i, name in enumerate(sorted(file.facts['manifest']['arrays']))}
  return {
    **{key: file.facts[key] for key in ('step', 'attempt', 'process')},
    'parts': [[number[part.name], part.start, part.shape] for part in file.parts],
  }


def candidates(found: LocalFiles) -> list[Candidate]:
  """Returns the local checkpoints, newest first; the same on all processes."""
  groups: dict[tuple[int, str], list[tuple[Holder, Json]]] = {}
  for process, files in enumerate(found.of_all):
    for number, file in enumerate(files):
      groups.setdefault((file['step'], file['attempt']), []).append(((process, number), file))
  out = []
  for (step, attempt), files in sorted(groups.items(), reverse=True):
    holders: dict[Box, list[Holder]] = collections.defaultdict(list)
    for holder, file in files:
      for array, start, shape in file['parts']:
        holders[array, tuple(start), tuple(shape)].append(holder)
    out.append(
      Candidate(
        step,
        attempt,
        [holder for holder, _ in files],
        frozenset(file['process'] for _, file in files),
        dict(holders),
        [what for s, what in found.damaged if s == step],
      )
    )
  return out


def missing_words(candidate: Candidate, hosts: Sequence[str]) -> str:
  """Returns a sentence such as 'the parts of process 1 on gpu-002 are missing'.

  Args:
    candidate: the local checkpoint.
    hosts: hosts of the processes that wrote it.
  """
  by_host = collections.defaultdict(list)
  for process, host in enumerate(hosts):
    if process not in candidate.processes:
      by_host[host].append(process)
  words = [
    f'process{"es" * (len(p) > 1)} {", ".join(map(str, p))} on {host}'
    for host, p in by_host.items()
  ]
  found = [f'the parts of {" and ".join(words)} are missing'] if words else []
  return '; '.join([*found, *candidate.damaged]) or 'parts are missing'


# Each promotion has its own staging folder: a process that was suspended and has lost MODEL_DIR
# writes and removes only its own.
STAGING = '.promoting'
_STAGING_NAME = re.compile(rf'{re.escape(STAGING)}(?:_[0-9a-f]{{8}})?')
VISIBLE_SECONDS = 120  # longer than NFS caches the contents of a folder (60 s)


@dataclasses.dataclass
class CopyOutcome:
  """The parts that a process has copied; sent to the other processes as JSON.

  Attributes:
    done: [array, start, checksum] of boxes that are written.
    bad: [array, start, file, reason, whether the file may be intact] of unreadable boxes.
    problem: why MODEL_DIR cannot be written; '' if it can.
  """

  done: list[tuple[int, Shape, str]] = dataclasses.field(default_factory=list)
  bad: list[tuple[int, Shape, int, str, bool]] = dataclasses.field(default_factory=list)
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
    target: Tree,
    *,
    dry_run: bool,
  ):
    self._dir, self._candidate, self._found = model_dir, candidate, found
    self._target, self._dry_run = target, dry_run
    self._folder: pathlib.Path = model_dir.path
    self._staging: Optional[pathlib.Path] = None  # set by `_prepare`, unless `dry_run`
    self._facts: Json = {}
    self._arrays: dict[str, tuple[Shape, np.dtype]] = {}
    self._names: list[str] = []
    self._writer: Optional[StateWriter] = None
    self.refused: list[str] = []

  def run(self, *, fallback: str) -> Optional[CheckpointMetadata]:
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
        **checksums_entry(checksums),
        'promoted_from': {
          'hosts': sorted(set(self._facts['hosts'])),
          'processes': len(self._facts['hosts']),
        },
      }
      if not self._dry_run:
        self._commit(manifest)
    finally:
      if distributed.is_main_process() and self._staging is not None:
        shutil.rmtree(self._staging, ignore_errors=True)
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._arrays.values())
    self._log(
      f'Local checkpoint {step} would be promoted to checkpoint_{step}: it is complete and newer '
      f'than {fallback}.'
      if self._dry_run
      else f'Promoted local checkpoint {step} to checkpoint_{step}: {gigabytes(size)} in '
      f'{time.monotonic() - started:.1f} s. It is newer than {fallback}.'
    )
    return CheckpointMetadata(step, base64.b64decode(self._facts['data_state']), manifest)

  def _shared_facts(self) -> Json:
    """Returns the facts of the save, from one of the files."""
    first = min(process for process, _ in self._candidate.files)
    mine = None
    if first == distributed.process_index():
      number = min(number for process, number in self._candidate.files if process == first)
      mine = self._found.files[number].facts
    return next(facts for facts in distributed.gather_json(mine) if facts is not None)

  def _is_complete(self, holders: Mapping[Box, Sequence[Holder]], fallback: str) -> bool:
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
    if self._dry_run:
      return
    name = distributed.broadcast_json(f'{STAGING}_{uuid.uuid4().hex[:8]}')
    self._staging = self._folder / name
    with distributed.errors_together():
      if distributed.is_main_process():
        try:
          self._staging.mkdir()
        except OSError as e:
          raise self._write_error(e.strerror or str(e)) from e

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
          outcome.bad.append((array, start, number, reason, bool(system_error(e))))
          continue
        if self._writer is not None:
          self._write(name, start, shape, values)
        outcome.done.append((array, start, part.checksum))
      if self._writer is not None:
        self._writer.flush()
    except (OSError, ValueError) as e:  # TensorStore raises ValueError while it creates arrays
      outcome.problem = (e.strerror if isinstance(e, OSError) else None) or error_line(e)
    return outcome

  def _write(self, name: str, start: Shape, shape: Shape, values: np.ndarray) -> None:
    chunk = chunk_of_shard(self._arrays[name][0], shape, itemsize=values.dtype.itemsize)
    for place in boxes(shape, chunk):
      self._writer.write(
        name, tuple(slice(s.start + a, s.stop + a) for s, a in zip(place, start)), values[place]
      )

  def _commit(self, manifest: Manifest) -> None:
    """Renames the checkpoint into place; returns once every process sees it."""
    step = self._candidate.step
    self._dir.lock()  # copying may have taken long
    with distributed.errors_together():
      if distributed.is_main_process():
        try:
          self._rename_into_place(step, manifest)
        except (OSError, ValueError) as e:
          reason = (e.strerror if isinstance(e, OSError) else None) or error_line(e)
          raise self._write_error(reason) from e
    deadline = time.monotonic() + VISIBLE_SECONDS
    self._dir.refresh()
    while step not in self._dir.steps and time.monotonic() < deadline:
      time.sleep(0.1)
      self._dir.relist()

  def _rename_into_place(self, step: int, manifest: Manifest) -> None:
    """Completes the files and renames their folder, unless another run has taken over."""
    final = self._dir.checkpoint(step)
    self._writer.merge(num_processes=distributed.process_count())
    self._writer.close(
      manifest=manifest,
      data={'iterator': self._facts['data_state']},
      empty=empty_leaves(self._target.saved()),
    )
    sync_folder(self._writer.path, leave_out=OF_TENSORSTORE)
    self._dir.check_owner()
    if final.is_dir():  # an unreadable checkpoint of the same step
      set_aside_checkpoint(self._folder, step, 'a local checkpoint of this step is complete')
    os.rename(self._writer.path, final)
    sync_names(self._folder)

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


def promote_local(
  model_dir: ModelDir, local: LocalTier | NoLocalTier, *, target: Tree, dry_run: bool
) -> Optional[CheckpointMetadata]:
  """Makes the newest local checkpoint an ordinary one if it is complete and newer than all others.

  Args:
    model_dir: MODEL_DIR of this run. Unless `dry_run`, this run has locked it.
    local: local checkpoints of this run.
    target: the TrainState (or its shapes) of this run.
    dry_run: only log and return the checkpoint that would be promoted; change nothing.
  Returns:
    The promoted checkpoint, or None.
  Raises:
    CheckpointError: a local checkpoint cannot be written to MODEL_DIR.
  """
  if not dry_run and isinstance(local, LocalTier):
    model_dir.lock()  # another run that has taken over may be promoting
    with distributed.errors_together(), access_errors(model_dir.path):
      if distributed.is_main_process():
        _remove_staging(model_dir.path)
  return _promote(model_dir, local, lambda: _newest_readable(model_dir), target, dry_run=dry_run)


def promote_newer(
  model_dir: ModelDir, local: LocalTier | NoLocalTier, *, newer_than: Optional[int], target: Tree
) -> Optional[int]:
  """Promotes the newest complete local checkpoint and returns its step; None if there is none.

  For a run that has locked MODEL_DIR and finds a damaged checkpoint when it reads the arrays.

  Args:
    model_dir: MODEL_DIR of this run.
    local: local checkpoints of this run.
    newer_than: the step of the next older checkpoint; None if there is none.
    target: the TrainState (or its shapes) of this run.
  Raises:
    CheckpointError: a local checkpoint cannot be written to MODEL_DIR.
  """
  promoted = _promote(model_dir, local, lambda: newer_than, target)
  return None if promoted is None else promoted.step


def _promote(
  model_dir: ModelDir,
  local: LocalTier | NoLocalTier,
  newer_than: Callable[[], Optional[int]],
  target: Tree,
  *,
  dry_run: bool = False,
) -> Optional[CheckpointMetadata]:
  """Promotes and returns the newest complete local checkpoint; None if there is none.

  Raises:
    AccessError: parts of a newer local checkpoint cannot be opened, but may be intact.
  """
  if not isinstance(local, LocalTier):
    return None
  run, durable = None, None
  with distributed.errors_together():
    if distributed.is_main_process():
      run, durable = read_run_id(model_dir.path), newer_than()
  run, durable = distributed.broadcast_json((run, durable))
  if run is None:
    return None
  found = find_local_files(
    local.folder / run, run=run, newer_than=-1 if durable is None else durable
  )
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

  for candidate in candidates(found):
    check_newer(candidate.step, f'local checkpoint {candidate.step}')
    assembly = Assembly(model_dir, candidate, found, target, dry_run=dry_run)
    saved = assembly.run(fallback=fallback)
    if saved is not None:
      return saved
    check_none_refused(candidate.step, assembly.refused, fallback)
    check_newer(candidate.step - 1, fallback)
  check_newer(-1, fallback)
  return None


def _remove_staging(folder: pathlib.Path) -> None:
  """Removes the staging folders that killed processes have left; anything else stays."""
  for path in folder.iterdir():
    if _STAGING_NAME.fullmatch(path.name) and is_real_folder(path):
      shutil.rmtree(path, ignore_errors=True)


def _newest_readable(model_dir: ModelDir) -> Optional[int]:
  for step in reversed(model_dir.steps):
    try:
      return model_dir.metadata(step).step
    except UNREADABLE:
      continue
  return None
