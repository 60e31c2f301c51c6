"""What the command `checkpoint` does with checkpoints: describe, compare, prune, verify, average.

`describe` reads no array. `prune` deletes committed t5x_gpu checkpoints that a rule does not keep,
and nothing else. `value_differences`, `verify` and `average` read arrays a few pieces at a time.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Optional

import numpy as np

from t5x_gpu.checkpoint.arrays import HostSums, boxes, checksums_in, smaller_chunk
from t5x_gpu.checkpoint.atomic_folder import new_folder
from t5x_gpu.checkpoint.manifest import STARTED_FROM, WITHOUT_DATA
from t5x_gpu.checkpoint.model_dir import (
  UNREADABLE,
  ModelDir,
  error_line,
  is_link,
  remove_checkpoint,
  remove_leftovers,
)
from t5x_gpu.checkpoint.params_files import (
  PARAMS_ONLY,
  ParamsReader,
  ParamsWriter,
  num_bytes,
  tree_problems,
)
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.checkpoint.run_files import GIN_FILES, carry
from t5x_gpu.checkpoint.run_lock import RunLock
from t5x_gpu.checkpoint.store import PIECE_BYTES, UNSTACKED, Source, StateReader
from t5x_gpu.errors import CheckpointError, did_you_mean
from t5x_gpu.storage.json_schema import JsonObject
from t5x_gpu.storage.paths import AnyPath, RemotePath
from t5x_gpu.terminal.console import Console, show

_ORIGINS = (STARTED_FROM, 'converted_from', 'resharded_from')


def describe(source: Source, *, step: Optional[int] = None) -> JsonObject:
  """Returns all facts about a checkpoint, JSON-ready; sizes are in bytes.

  Args:
    source: a checkpoint, MODEL_DIR, or the folder of one checkpoint.
    step: step of the checkpoint; None for the latest.
  Raises:
    CheckpointError: there is no checkpoint, or it cannot be read.
  """
  reader = StateReader(source, step=step, step_setting='--step')
  manifest, folder = reader.manifest, reader.checkpoint.model_dir.path
  checksums = checksums_in(manifest)
  arrays = {
    name: {
      'shape': list(shape),
      'dtype': str(reader.dtypes[name]),
      'bytes': reader.bytes_of(name),
      'chunk': list(reader.chunk_shape(name)),
      'checksum': checksums.get(name),
    }
    for name, shape in reader.shapes.items()
  }
  parts: dict[str, dict[str, int]] = {}
  for name, array in arrays.items():
    part = parts.setdefault(name.split('/')[0], {'arrays': 0, 'elements': 0, 'bytes': 0})
    part['arrays'] += 1
    part['elements'] += math.prod(array['shape'])
    part['bytes'] += array['bytes']
  return {
    'path': str(reader.path),
    'step': reader.step,
    'written': manifest.get('written'),
    'parts': parts,
    'bytes_on_disk': disk_bytes(reader.path),
    'arrays': arrays,
    'params_only': bool(manifest.get(PARAMS_ONLY)),
    'without_data': bool(manifest.get(WITHOUT_DATA)),
    'unstacked': bool(manifest.get(UNSTACKED)),
    'mesh': manifest.get('mesh'),
    'num_processes': manifest.get('num_processes'),
    'gin': [str(folder / name) for name in GIN_FILES if (folder / name).is_file()],
    'versions': manifest.get('versions'),
    'data': manifest.get('data'),
    'data_state_bytes': len(reader.metadata.data_state),
    'next_batch_hash': manifest.get('next_batch_hash'),
    'checksums': f'{len(checksums)} of {len(arrays)} arrays',
    **{key: manifest[key] for key in _ORIGINS if manifest.get(key)},
  }


def disk_bytes(path: AnyPath) -> Optional[int]:
  """Returns the size of all files of a checkpoint; None in object storage."""
  if isinstance(path, RemotePath):
    return None  # TensorStore does not list sizes
  return sum(p.stat().st_size for p in path.rglob('*') if p.is_file())


def description_text(d: JsonObject) -> str:
  """Returns the result of `describe` as text: a line per array, then the other facts."""
  lines = [f'{d["path"]}: step {d["step"]}' + (f', written {d["written"]}' if d['written'] else '')]
  width = max(map(len, d['arrays']), default=0)
  for name, a in d['arrays'].items():
    shape = f'{a["dtype"]}[{", ".join(map(str, a["shape"]))}]'
    lines.append(f'  {name:{width}}  {shape:28} {_size(a["bytes"]):>10}')
  for part, n in d['parts'].items():
    lines.append(f'{part}: {n["arrays"]} arrays, {n["elements"]:,} elements, {_size(n["bytes"])}')
  lines.append(
    f'on disk: {"unknown" if d["bytes_on_disk"] is None else _size(d["bytes_on_disk"])}'
    + ('; one array per layer' if d['unstacked'] else '')
    + ('; parameters only: cannot be resumed' if d['params_only'] else '')
    + ('; no position in the data' if d['without_data'] else '')
  )
  sizes = ' '.join(f'{axis}={n}' for axis, n in (d['mesh'] or {}).items())
  lines.append(
    f'written by: {sizes or "no mesh"}; {d["num_processes"]} processes; '
    + ', '.join(f'{name} {version}' for name, version in (d['versions'] or {}).items())
  )
  data = ', '.join(f'{k}={v}' for k, v in (d['data'] or {}).items())
  lines.append(
    f'data: {data or "none"}; state of {d["data_state_bytes"]} bytes; next batch '
    f'{d["next_batch_hash"] or "unknown"}'
  )
  lines.append(f'gin: {", ".join(d["gin"]) or "none"}')
  lines.append(f'checksums: {d["checksums"]}')
  lines += [f'{key.replace("_", " ")}: {d[key]}' for key in _ORIGINS if key in d]
  return '\n'.join(lines)


def _size(num_bytes: int) -> str:
  return show(num_bytes, GiB='.1f', MiB='.1f', KiB='.1f', B='.0f')


@dataclasses.dataclass(frozen=True)
class ChangedArray:
  """An array whose values differ between two checkpoints.

  Attributes:
    name: '/'-joined path.
    num_different: number of elements that differ; NaN equals NaN.
    max_abs: largest absolute difference; infinite if only one of two elements is NaN.
    max_relative: `max_abs` divided by the largest absolute value of the first array.
  """

  name: str
  num_different: int
  max_abs: float
  max_relative: float

  def __str__(self) -> str:
    return (
      f'{self.name}: {self.num_different:,} elements differ, by at most {self.max_abs:.3g} '
      f'({self.max_relative:.3g} of the largest value)'
    )


def tree_differences(a: StateReader, b: StateReader) -> list[str]:
  """Returns a line per array that is missing in one, or differs in shape or dtype."""
  only_a, only_b = a.shapes.keys() - b.shapes.keys(), b.shapes.keys() - a.shapes.keys()
  lines = []
  for name in [*a.shapes, *sorted(only_b)]:
    if name in only_a:
      lines.append(f'{_text(a, name)}: only in the first.{did_you_mean(name, only_b, limit=1)}')
    elif name in only_b:
      lines.append(f'{_text(b, name)}: only in the second.')
    elif (a.shapes[name], a.dtypes[name]) != (b.shapes[name], b.dtypes[name]):
      lines.append(f'{_text(a, name)} in the first, {_text(b, name)} in the second.')
  return lines


def _text(reader: StateReader, name: str) -> str:
  return f'{name} {reader.dtypes[name]}{list(reader.shapes[name])}'


def value_differences(
  a: StateReader, b: StateReader, *, advance: Callable[[int], None]
) -> Iterator[ChangedArray]:
  """Yields the arrays with equal shapes and different values; dtypes may differ.

  Args:
    a, b: the checkpoints.
    advance: called with the number of bytes of `a` compared since the last call.
  """
  for name, shape in a.shapes.items():
    if b.shapes.get(name) != shape:
      continue
    found = _difference(a, b, name, advance)
    if found is not None:
      yield found


def _difference(
  a: StateReader, b: StateReader, name: str, advance: Callable[[int], None]
) -> Optional[ChangedArray]:
  different, most, largest = 0, 0.0, 0.0
  for place, x in a.pieces(name):
    y = b.read_at(name, place)
    advance(x.nbytes)
    if x.size and x.dtype == y.dtype and np.array_equal(_bytes(x), _bytes(y)):
      largest = max(largest, _largest(x))
      continue
    x, y = x.astype(np.float64), y.astype(np.float64)
    unequal = (x != y) & ~(np.isnan(x) & np.isnan(y))
    different += int(unequal.sum())
    if unequal.any():
      with np.errstate(invalid='ignore'):  # infinity minus infinity
        most = max(most, float(np.max(np.abs(x - y), where=unequal & ~np.isnan(x - y), initial=0)))
      if np.any(np.isnan(x) != np.isnan(y)):
        most = float('inf')
    largest = max(largest, _largest(x))
  if not different:
    return None
  return ChangedArray(name, different, most, most / largest if largest else float('inf'))


def _bytes(x: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _largest(x: np.ndarray) -> float:
  finite = np.abs(x.astype(np.float64))
  return float(np.max(finite, where=np.isfinite(finite), initial=0))


@dataclasses.dataclass(frozen=True)
class PrunePlan:
  """Which checkpoints of a MODEL_DIR to keep and which to remove.

  Attributes:
    model_dir: the open MODEL_DIR.
    kept: step -> reason.
    removed: step -> bytes on disk; 0 for a link, whose files stay.
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
      value = keep.value_of(model_dir.metadata(step).manifest.get('metrics') or {})
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
      path = model_dir.checkpoint(step)
      removed[step] = 0 if is_link(path) else disk_bytes(path)
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
    remove_leftovers(folder)
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


_FIX = 'Use another checkpoint. To check all of this one:\npython -m t5x_gpu.checkpoint verify {}'
NUM_THREADS = min(4, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True)
class VerifyResult:
  """The result of `verify`.

  Attributes:
    num_arrays: number of arrays read.
    num_unknown: number of arrays without a checksum: readable, but not verified.
    damaged: array -> reason.
  """

  num_arrays: int
  num_unknown: int
  damaged: Mapping[str, str]


def verify(
  reader: StateReader,
  *,
  advance: Callable[[int], None],
  num_threads: int = NUM_THREADS,
  most_bytes: int = PIECE_BYTES,
) -> VerifyResult:
  """Compares each array with its checksum; memory holds a few pieces at a time.

  Args:
    reader: the checkpoint.
    advance: called with the number of bytes read since the last call.
    num_threads: number of threads; each holds one piece and the chunks that contain it.
    most_bytes: maximum size of a piece.
  """
  want = checksums_in(reader.manifest)
  problem = functools.partial(reader.problem, advance=advance, most_bytes=most_bytes)
  with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
    problems = dict(zip(reader.shapes, pool.map(problem, reader.shapes)))
  return VerifyResult(
    len(problems),
    sum(name not in want for name in problems),
    {name: text for name, text in problems.items() if text},
  )


@contextlib.contextmanager
def damage_named(name: str, where: AnyPath) -> Iterator[None]:
  """Context in which an array that cannot be read raises CheckpointError."""
  try:
    yield
  except ValueError as e:  # from TensorStore: corrupt or truncated data
    raise CheckpointError(
      f'{name} of {where} cannot be read: {error_line(e)}',
      fix=_FIX.format(shlex.quote(str(where))),
      docs='checkpoints.md#checksums',
    ) from e


def check_sums(name: str, sums: HostSums, manifest: Mapping[str, object], where: str) -> None:
  """Raises CheckpointError if an array read from a checkpoint does not have its checksum."""
  want = checksums_in(manifest).get(name)
  if want is not None and str(sums) != want:
    raise CheckpointError(
      f'{name} of {where} does not have the values that were saved: its checksum is {sums}, '
      f'not {want}.',
      fix=_FIX.format(shlex.quote(str(where))),
      docs='checkpoints.md#checksums',
    )


def average(readers: Sequence[ParamsReader], target: pathlib.Path, console: Console) -> int:
  """Writes `target`/checkpoint_<step> with the mean of the parameters; returns the step.

  Sums are float32, in the order given. config.gin, model.gin and hf/ are copied from the last
  checkpoint. All values read are compared with their checksums.

  Args:
    readers: two or more checkpoints of the same model.
    target: new folder, which appears at the end.
    console: shows the progress.
  Raises:
    CheckpointError: the checkpoints belong to different models, or one is damaged.
  """
  last = readers[-1]
  for reader in readers[:-1]:
    problems = tree_problems(
      last.shapes, reader.shapes, wanted_by=str(last.path), had_by=str(reader.path)
    )
    if problems:
      raise CheckpointError(
        f'{reader.path} and {last.path} belong to different models:\n  ' + '\n  '.join(problems),
        fix='Name checkpoints of one model.',
      )
  size = num_bytes(last.shapes)
  chunks = {
    name: smaller_chunk(shape, itemsize=4, most_bytes=PIECE_BYTES)
    for name, shape in last.shapes.items()
  }
  about = {'format': 'average', 'of': [str(reader.path) for reader in readers]}
  with new_folder(target, num_bytes=size) as folder:
    with (
      console.progress('averaged', size * len(readers)) as advance,
      ParamsWriter(
        folder, step=last.step, shapes=last.shapes, chunks=chunks, about=about, compress=False
      ) as writer,
    ):
      for name, shape in last.shapes.items():
        sums = [HostSums(shape) for _ in readers]
        for place in boxes(shape, chunks[name]):
          total = np.zeros([s.stop - s.start for s in place], np.float32)
          for reader, checksum in zip(readers, sums):
            with damage_named(f'params/{name}', reader.path):
              values = reader.read_at(name, place)
            checksum.add_at(place, values)
            total += values.astype(np.float32)
            advance(total.nbytes)
          writer.write(name, place, total / np.float32(len(readers)))
        for reader, checksum in zip(readers, sums):
          check_sums(f'params/{name}', checksum, reader.manifest, str(reader.path))
    carry(last.path.parent, folder)
  return last.step
