"""Rewrites a checkpoint with other chunks, dtypes or stacking of layers, without model or devices.

Arrays are copied in pieces whose size follows from a budget of host memory. The largest chunk of
the source may take an eighth of the budget.
"""

import ast
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Optional

import jax.numpy as jnp
import numpy as np

from t5x_gpu.checkpoint.arrays import (
  CHUNK_BYTES,
  HostSums,
  boxes,
  checksums_entry,
  piece_shape,
  smaller_chunk,
)
from t5x_gpu.checkpoint.atomic_folder import Journal, RemoteJournal, open_journal
from t5x_gpu.checkpoint.manifest import DATA, TREE
from t5x_gpu.checkpoint.model_dir import ModelDir
from t5x_gpu.checkpoint.params_files import PARAMS_ONLY
from t5x_gpu.checkpoint.run_files import carry
from t5x_gpu.checkpoint.store import (
  UNSTACKED,
  CheckpointAddress,
  StateReader,
  StateWriter,
  stacked_arrays,
)
from t5x_gpu.errors import AccessError, CheckpointError
from t5x_gpu.partitioning.trees import Shape
from t5x_gpu.storage.json_schema import JsonObject, JsonValue, read_json
from t5x_gpu.storage.paths import AnyPath
from t5x_gpu.terminal.console import Console, show
from t5x_gpu.terminal.flag_types import MIB
from t5x_gpu.tools.checkpoints import check_sums, damage_named, verify

LEAST_MEMORY = 16 << 20
# Budget in chunks of the source: memory holds input data three times (compressed, as a chunk, as a
# piece), output data three times, and chunks cached from one piece to the next.
_CHUNKS_IN_MEMORY = 8
_PIECES_IN_MEMORY = 16
_OPTIMIZER, _PARAMS = 'opt_state/', 'params/'


@dataclasses.dataclass(frozen=True)
class ReshardRequest:
  """Which checkpoint to rewrite, and how.

  Attributes:
    source: MODEL_DIR, or the folder of one checkpoint. `source` and `target` may be in object
      storage.
    target: new MODEL_DIR.
    step: step of the checkpoint; None for the latest.
    dtype: new dtype of floating-point parameters; None to keep it.
    optimizer_dtype: new dtype of the optimizer's floating-point arrays; None to keep it.
    drop_optimizer: leave the optimizer's arrays out.
    layout: number of parts for the largest dimension of each array, for the next, and so on: (8, 2)
      matches the shards of a mesh with fsdp=8 and model=2. Empty keeps the chunks.
    chunk_bytes: maximum size of a chunk.
    unscan: True for one array per layer, False for one array with all layers, None to keep the
      source's stacking.
    verify: read everything back at the end.
    memory: budget for array data in host memory, in bytes.
  """

  source: AnyPath
  target: AnyPath
  step: Optional[int] = None
  dtype: Optional[str] = None
  optimizer_dtype: Optional[str] = None
  drop_optimizer: bool = False
  layout: tuple[int, ...] = ()
  chunk_bytes: int = CHUNK_BYTES
  unscan: Optional[bool] = None
  verify: bool = False
  memory: int = 2 << 30


@dataclasses.dataclass(frozen=True)
class ReshardPlan:
  """The arrays of the new checkpoint.

  Attributes:
    arrays: '/'-joined path -> (shape, dtype).
    chunks: '/'-joined path -> shape of a chunk.
    unstacked: paths of the arrays that are stored as one array per layer.
  """

  arrays: Mapping[str, tuple[Shape, np.dtype]]
  chunks: Mapping[str, Shape]
  unstacked: tuple[str, ...]

  @property
  def num_bytes(self) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays.values())

  def as_json(self) -> list[list[JsonValue]]:
    return [
      [name, list(shape), str(dtype), list(self.chunks[name]), name in self.unstacked]
      for name, (shape, dtype) in self.arrays.items()
    ]


def plan_reshard(reader: StateReader, request: ReshardRequest) -> ReshardPlan:
  """Returns the arrays of the new checkpoint; does not read any array.

  Raises:
    CheckpointError: the budget is too small for the chunks of the source.
  """
  arrays = {
    name: (shape, _new_dtype(name, reader.dtypes[name], request))
    for name, shape in reader.shapes.items()
    if not (request.drop_optimizer and name.startswith(_OPTIMIZER))
  }
  largest = max(arrays, key=reader.chunk_bytes)
  least = max(_CHUNKS_IN_MEMORY * reader.chunk_bytes(largest), LEAST_MEMORY)
  if request.memory < least:
    raise CheckpointError(
      f'--memory={request.memory:,} bytes is too little: {largest} of {reader.path} is stored in '
      f'chunks of {reader.chunk_bytes(largest):,} bytes, which must be read whole.',
      fix=f'Set --memory={-(-least // MIB)}MiB or more. The new checkpoint has chunks of at most '
      f'{_max_chunk_bytes(request):,} bytes and will need less.',
      docs='reshard.md#memory',
    )
  stacked = set(stacked_arrays(reader.shapes))
  as_it_was = set(reader.manifest.get(UNSTACKED, ()))
  per_layer = as_it_was if request.unscan is None else stacked if request.unscan else set()
  unstacked = tuple(n for n in arrays if n in per_layer)
  chunks = {}
  for name, (shape, dtype) in arrays.items():
    chunk = reader.chunk_shape(name)
    if request.layout:
      chunk = _laid_out(shape, request.layout, first=1 if name in stacked else 0)
    if name in unstacked:
      chunk = (1, *chunk[1:])
    # The wider of both dtypes: memory also holds the unconverted piece.
    itemsize = max(dtype.itemsize, reader.dtypes[name].itemsize)
    chunks[name] = smaller_chunk(chunk, itemsize=itemsize, most_bytes=_max_chunk_bytes(request))
  return ReshardPlan(arrays, chunks, unstacked)


def piece_bytes(request: ReshardRequest) -> int:
  """Returns the maximum size of a piece that the memory budget allows."""
  return request.memory // _PIECES_IN_MEMORY


def _max_chunk_bytes(request: ReshardRequest) -> int:
  return min(request.chunk_bytes, piece_bytes(request))


def _new_dtype(name: str, dtype: np.dtype, request: ReshardRequest) -> np.dtype:
  asked = None
  if name.startswith(_PARAMS):
    asked = request.dtype
  elif name.startswith(_OPTIMIZER):
    asked = request.optimizer_dtype
  return np.dtype(asked) if asked and jnp.issubdtype(dtype, jnp.floating) else dtype


def _laid_out(shape: Shape, layout: Sequence[int], *, first: int) -> Shape:
  """Returns the chunk shape for a mesh with these sizes.

  Each size divides the largest dimension that it can; dimensions before `first` stay whole.
  """
  chunk, free = list(shape), set(range(first, len(shape)))
  for parts in layout:
    fits = [d for d in free if shape[d] and shape[d] % parts == 0]
    if fits:
      d = max(fits, key=lambda d: (shape[d], d))
      chunk[d] //= parts
      free.remove(d)
  return tuple(chunk)


_NEVER = 2**62


def reshard(request: ReshardRequest, console: Console) -> AnyPath:
  """Writes the checkpoint and returns its folder; continues after an interrupted call.

  Raises:
    CheckpointError: the memory budget is too small, or the source is damaged.
  """
  reader = StateReader(
    request.source, step=request.step, cache_bytes=piece_bytes(request), step_setting='--step'
  )
  plan = plan_reshard(reader, request)
  work = {'source': str(reader.path), 'manifest': dict(reader.manifest), 'plan': plan.as_json()}
  with open_journal(request.target, work=work, num_bytes=plan.num_bytes) as journal:
    try:
      writer = StateWriter(
        journal.folder,
        step=reader.step,
        arrays=plan.arrays,
        chunks=plan.chunks,
        unstacked=plan.unstacked,
        flush_bytes=_NEVER,
        resume=journal.entry is not None,
      )
      checksums = _copy(reader, writer, plan, request, journal, console)
      writer.close(
        manifest=_manifest(reader, plan, request, checksums),
        data=read_json(reader.path / 'data' / 'metadata', DATA),
        empty=_empty(reader, request),
      )
      if request.verify:
        _verify(CheckpointAddress(ModelDir(journal.folder), reader.step), request, console)
      carry(reader.path.parent, journal.folder)
      journal.finish()
    except AccessError:
      raise  # the same command continues once the source can be read, or the storage answers
    except CheckpointError:
      journal.discard()  # the source or the disk is damaged: a new call could not continue
      raise
    except OSError as e:
      raise CheckpointError(
        f'{request.target} could not be written: {e.strerror or e}.',
        fix='Free some space; the same command then continues.',
      ) from e
  return request.target / reader.path.name


def _copy(
  reader: StateReader,
  writer: StateWriter,
  plan: ReshardPlan,
  request: ReshardRequest,
  journal: Journal | RemoteJournal,
  console: Console,
) -> dict[str, str]:
  """Writes all arrays, from the journal's position on; returns their checksums."""
  entry = journal.entry or {'pieces': 0, 'array': '', 'read': '', 'written': '', 'checksums': {}}
  if journal.entry is None:
    writer.flush()  # the arrays exist before the journal says so
    journal.note(entry)
  checksums, skipped = dict(entry['checksums']), entry['pieces']
  done = _bytes_of_first(reader, plan, skipped)
  if skipped:
    console.say(f'continuing an interrupted call: {show(done, MB=",.1f")} are already written')
  count, num_unflushed = 0, 0
  most_bytes = piece_bytes(request)
  total = sum(reader.bytes_of(name) for name in plan.arrays)
  with console.progress('written', total, done=done) as advance:
    for name, (shape, dtype) in plan.arrays.items():
      is_partial = name == entry['array']  # some of its pieces are written
      read = HostSums(shape, start=entry['read'] if is_partial else '')
      written = HostSums(shape, start=entry['written'] if is_partial else '')
      for place in boxes(shape, plan.chunks[name]):
        count += 1
        if count <= skipped:
          continue
        with damage_named(name, reader.path):
          values = _read(reader, name, place, most_bytes)
        read.add_at(place, values)
        advance(values.nbytes)
        values = _cast(values, dtype, name)
        written.add_at(place, values)
        writer.write(name, place, values)
        num_unflushed += values.nbytes
        del values
        if num_unflushed >= most_bytes:
          writer.flush()
          num_unflushed = 0
          journal.note(
            {
              'pieces': count,
              'array': name,
              'read': str(read),
              'written': str(written),
              'checksums': checksums,
            }
          )
      if name not in checksums:
        check_sums(name, read, reader.manifest, str(reader.path))
        checksums[name] = str(written)
  return checksums


def _bytes_of_first(reader: StateReader, plan: ReshardPlan, pieces: int) -> int:
  total = 0
  for name, (shape, _) in plan.arrays.items():
    for place in boxes(shape, plan.chunks[name]):
      if pieces == 0:
        return total
      pieces -= 1
      total += math.prod(s.stop - s.start for s in place) * reader.dtypes[name].itemsize
  return total


def _read(reader: StateReader, name: str, place: tuple[slice, ...], most_bytes: int) -> np.ndarray:
  """Returns a part of an array, read chunk by chunk: TensorStore would read all chunks at once."""
  itemsize = reader.dtypes[name].itemsize
  grid = piece_shape(
    reader.shapes[name],
    reader.chunk_shape(name),
    itemsize=itemsize,
    most_bytes=max(most_bytes, reader.chunk_bytes(name)),
  )
  starts = [s.start // g for s, g in zip(place, grid)]
  if all((s.stop - 1) // g == i for s, g, i in zip(place, grid, starts)):
    return reader.read_at(name, place)
  out = np.empty([s.stop - s.start for s in place], reader.dtypes[name])
  cells = [-(-s.stop // g) - i for s, g, i in zip(place, grid, starts)]
  for cell in np.ndindex(*cells):
    part = tuple(
      slice(max(s.start, (i + c) * g), min(s.stop, (i + c + 1) * g))
      for s, g, i, c in zip(place, grid, starts, cell)
    )
    out[tuple(slice(p.start - s.start, p.stop - s.start) for p, s in zip(part, place))] = (
      reader.read_at(name, part)
    )
  return out


def _cast(values: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
  if values.dtype == dtype:
    return values
  with np.errstate(over='ignore'):
    out = values.astype(dtype)
  if np.any(np.isinf(out) & ~np.isinf(values)):
    raise CheckpointError(
      f'{name} has values beyond the range of {dtype}.',
      fix='Set --dtype=bfloat16, which has the range of float32.',
    )
  return out


def _manifest(
  reader: StateReader, plan: ReshardPlan, request: ReshardRequest, checksums: Mapping[str, str]
) -> JsonObject:
  """Returns the manifest of the source, updated for the new arrays."""
  manifest = {
    **reader.manifest,
    **checksums_entry(checksums),
    'arrays': {n: [list(shape), str(dtype)] for n, (shape, dtype) in plan.arrays.items()},
    'resharded_from': {
      'checkpoint': str(reader.path),
      'dtype': request.dtype,
      'optimizer_dtype': request.optimizer_dtype,
      'drop_optimizer': request.drop_optimizer,
      'layout': list(request.layout),
    },
  }
  manifest.pop(UNSTACKED, None)
  if plan.unstacked:
    manifest[UNSTACKED] = list(plan.unstacked)
  if request.drop_optimizer:
    manifest[PARAMS_ONLY] = True
  return manifest


def _empty(reader: StateReader, request: ReshardRequest) -> JsonObject:
  """Returns the nodes of Orbax's tree without arrays, leaving out a dropped optimizer."""
  tree = read_json(reader.path / 'state' / '_METADATA', TREE)['tree_metadata']
  return {
    key: leaf
    for key, leaf in tree.items()
    if leaf['value_metadata']['skip_deserialize']
    and not (request.drop_optimizer and ast.literal_eval(key)[0] == 'opt_state')
  }


def _verify(written: CheckpointAddress, request: ReshardRequest, console: Console) -> None:
  """Raises CheckpointError unless the new checkpoint reads back with the right checksums."""
  reader = StateReader(written, cache_bytes=0)
  with console.progress('read back', reader.num_bytes) as advance:
    verdict = verify(reader, advance=advance, num_threads=1, most_bytes=piece_bytes(request))
  for name, problem in verdict.damaged.items():
    raise CheckpointError(f'{name}, read back, {problem}.', fix='Check the disk, then try again.')
