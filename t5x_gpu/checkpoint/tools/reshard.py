"""A checkpoint written anew in other chunks, dtypes or groups of layers; no model, no devices.

Arrays go through in pieces. What a piece may take follows from a budget of host memory, which the
largest chunk of the source must fit into eight times.
"""

import ast
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import jax.numpy as jnp
import numpy as np

from t5x_gpu.checkpoint.arrays.params_files import PARAMS_ONLY
from t5x_gpu.checkpoint.arrays.state_reader import UNSTACKED, StateReader, stacked_arrays
from t5x_gpu.checkpoint.arrays.state_writer import StateWriter
from t5x_gpu.checkpoint.run_files import carry
from t5x_gpu.checkpoint.schemas import DATA, TREE
from t5x_gpu.checkpoint.storage.atomic_folder import Journal, RemoteJournal, open_journal
from t5x_gpu.checkpoint.storage.checksums import HostSums, record
from t5x_gpu.checkpoint.storage.chunks import CHUNK_BYTES, Shape, boxes, piece_shape, smaller_chunk
from t5x_gpu.checkpoint.storage.paths import AnyPath, StorageError
from t5x_gpu.checkpoint.tools.average import Progress
from t5x_gpu.checkpoint.tools.verify import check_sums, damage_named, verify
from t5x_gpu.config.json_schema import read_json
from t5x_gpu.errors import CheckpointError

RESHARDED_FROM = 'resharded_from'
LEAST_MEMORY = 16 << 20
# Of the budget: what is read is there three times (compressed, as a chunk, as a piece of it), what
# is written as well, and chunks are kept from one piece to the next.
_CHUNKS_IN_MEMORY = 8
_PIECES_IN_MEMORY = 16
_OPTIMIZER, _PARAMS = 'opt_state/', 'params/'
_NEVER = 2**62


@dataclasses.dataclass(frozen=True)
class Request:
  """What is asked for.

  Attributes:
    source: MODEL_DIR, or the folder of one checkpoint; also in object storage, as `target`.
    target: new folder: a MODEL_DIR.
    step: which checkpoint; None for the latest.
    dtype: of floating parameters; None to leave them.
    optimizer_dtype: of the floating arrays of the optimizer; None to leave them.
    drop_optimizer: leave its arrays out.
    layout: into how many parts to cut the largest dimension of each array, the next, and so on:
      (8, 2) for what a mesh of fsdp=8 and model=2 reads. Empty for chunks as they are.
    chunk_bytes: of a chunk at most.
    unscan: True for an array per layer, False for one of all layers, None for what the source has.
    verify: read everything again at the end.
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
class Plan:
  """What will be written.

  Attributes:
    arrays: '/'-joined path -> (shape, dtype).
    chunks: the same -> shape of a chunk.
    unstacked: the arrays that are one per layer on disk.
  """

  arrays: Mapping[str, tuple[Shape, np.dtype]]
  chunks: Mapping[str, Shape]
  unstacked: tuple[str, ...]

  @property
  def num_bytes(self) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays.values())

  def as_json(self) -> Any:
    return [
      [name, list(shape), str(dtype), list(self.chunks[name]), name in self.unstacked]
      for name, (shape, dtype) in self.arrays.items()
    ]


def plan_reshard(reader: StateReader, request: Request) -> Plan:
  """Returns what will be written; reads no array.

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
      f'--memory={request.memory:,} bytes are too few: {largest} of {reader.path} lies in chunks '
      f'of {reader.chunk_bytes(largest):,} bytes, which are read as a whole.',
      fix=f'Set --memory={-(-least // 2**20)}MiB or more. What this writes has chunks of '
      f'{_most_bytes(request):,} bytes at most, and needs less.',
      docs='reshard.md#memory',
    )
  stacked = set(stacked_arrays(reader.shapes))
  as_it_was = set(reader.manifest.get(UNSTACKED, ()))
  unstacked = tuple(
    n
    for n in arrays
    if n in (as_it_was if request.unscan is None else stacked if request.unscan else ())
  )
  chunks = {}
  for name, (shape, dtype) in arrays.items():
    chunk = (
      _laid_out(shape, request.layout, first=1 if name in stacked else 0)
      if (request.layout)
      else reader.chunk_shape(name)
    )
    if name in unstacked:
      chunk = (1, *chunk[1:])
    # By the wider of both dtypes: a piece is in memory as it was read, too.
    itemsize = max(dtype.itemsize, reader.dtypes[name].itemsize)
    chunks[name] = smaller_chunk(chunk, itemsize=itemsize, most_bytes=_most_bytes(request))
  return Plan(arrays, chunks, unstacked)


def _most_bytes(request: Request) -> int:
  return min(request.chunk_bytes, request.memory // _PIECES_IN_MEMORY)


def _new_dtype(name: str, dtype: np.dtype, request: Request) -> np.dtype:
  asked = (
    request.dtype
    if name.startswith(_PARAMS)
    else request.optimizer_dtype
    if name.startswith(_OPTIMIZER)
    else None
  )
  return np.dtype(asked) if asked and jnp.issubdtype(dtype, jnp.floating) else dtype


def _laid_out(shape: Shape, layout: Sequence[int], *, first: int) -> Shape:
  """Returns chunks that are the parts of a mesh: its sizes go to the largest dimensions that they
  divide, those before `first` excepted.
  """
  chunk, free = list(shape), set(range(first, len(shape)))
  for parts in layout:
    fits = [d for d in free if shape[d] and shape[d] % parts == 0]
    if fits:
      d = max(fits, key=lambda d: (shape[d], d))
      chunk[d] //= parts
      free.remove(d)
  return tuple(chunk)


def reshard(request: Request, *, progress: Progress, say: Callable[[str], None]) -> AnyPath:
  """Writes the checkpoint; returns its folder. A call that was cut off is gone on with.

  Args:
    request: what is asked for.
    progress: (title, bytes, done=bytes) -> shows how far it is.
    say: prints a line.
  Raises:
    CheckpointError: see `Request`; or the source is damaged.
  """
  reader = StateReader(request.source, step=request.step, cache_bytes=request.memory // 16)
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
      checksums = _copy(reader, writer, plan, request, journal, progress=progress, say=say)
      writer.close(
        manifest=_manifest(reader, plan, request, checksums),
        data=read_json(reader.path / 'data' / 'metadata', DATA),
        empty=_empty(reader, request),
      )
      if request.verify:
        _verify(writer.path, request, progress)
      carry(reader.path.parent, journal.folder)
      journal.finish()
    except StorageError:
      raise  # the same command goes on once it answers
    except CheckpointError:
      journal.discard()  # there is nothing to go on with: the source is damaged, or the disk
      raise
    except OSError as e:
      raise CheckpointError(
        f'{request.target} could not be written: {e.strerror or e}.',
        fix='Make room; the same command then goes on.',
      ) from e
  return request.target / reader.path.name


def _copy(
  reader: StateReader,
  writer: StateWriter,
  plan: Plan,
  request: Request,
  journal: Journal | RemoteJournal,
  *,
  progress: Progress,
  say: Callable[[str], None],
) -> dict[str, str]:
  """Writes all arrays from where the journal stands; returns their checksums."""
  entry = journal.entry or {'pieces': 0, 'array': '', 'read': '', 'written': '', 'checksums': {}}
  if journal.entry is None:
    journal.note(entry)
  checksums, skipped = dict(entry['checksums']), entry['pieces']
  done = _bytes_of_first(reader, plan, skipped)
  if skipped:
    say(f'going on where an earlier call was cut off: {done / 1e6:,.1f} MB are written')
  count, waiting = 0, 0
  total = sum(reader.bytes_of(name) for name in plan.arrays)
  with progress('written', total, done=done) as told:
    for name, (shape, dtype) in plan.arrays.items():
      is_cut = name == entry['array']  # some of its pieces are written
      read = HostSums(shape, start=entry['read'] if is_cut else '')
      written = HostSums(shape, start=entry['written'] if is_cut else '')
      for place in boxes(shape, plan.chunks[name]):
        count += 1
        if count <= skipped:
          continue
        with damage_named(name, reader.path):
          values = _read(reader, name, place, request.memory // _PIECES_IN_MEMORY)
        read.add_at(place, values)
        told(values.nbytes)
        values = _cast(values, dtype, name)
        written.add_at(place, values)
        writer.write(name, place, values)
        waiting += values.nbytes
        del values
        if waiting >= request.memory // _PIECES_IN_MEMORY:
          writer.flush()
          waiting = 0
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


def _bytes_of_first(reader: StateReader, plan: Plan, pieces: int) -> int:
  total = 0
  for name, (shape, _) in plan.arrays.items():
    for place in boxes(shape, plan.chunks[name]):
      if pieces == 0:
        return total
      pieces -= 1
      total += math.prod(s.stop - s.start for s in place) * reader.dtypes[name].itemsize
  return total


def _read(reader: StateReader, name: str, place: tuple[slice, ...], most_bytes: int) -> np.ndarray:
  """Returns a part of an array. Chunk by chunk: TensorStore would read all of them at once."""
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
      fix='Take --dtype=bfloat16, which has the range of float32.',
    )
  return out


def _manifest(
  reader: StateReader, plan: Plan, request: Request, checksums: Mapping[str, str]
) -> dict[str, Any]:
  """Returns the manifest of the source, as it is of what was written."""
  manifest = {
    **reader.manifest,
    **record(checksums),
    'arrays': {n: [list(shape), str(dtype)] for n, (shape, dtype) in plan.arrays.items()},
    RESHARDED_FROM: {
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


def _empty(reader: StateReader, request: Request) -> dict[str, Any]:
  """Returns what Orbax's tree has beside arrays: of an optimizer, which may be left out."""
  tree = read_json(reader.path / 'state' / '_METADATA', TREE)['tree_metadata']
  return {
    key: leaf
    for key, leaf in tree.items()
    if leaf['value_metadata']['skip_deserialize']
    and not (request.drop_optimizer and ast.literal_eval(key)[0] == 'opt_state')
  }


def _verify(folder: AnyPath, request: Request, progress: Progress) -> None:
  """Raises CheckpointError unless what was written reads as it should."""
  reader = StateReader(folder, cache_bytes=0, is_committed=False)
  with progress('read again', reader.num_bytes) as told:
    verdict = verify(
      reader, step=told, num_threads=1, most_bytes=request.memory // _PIECES_IN_MEMORY
    )
  for name, problem in verdict.damaged.items():
    raise CheckpointError(f'{name}, read back, {problem}.', fix='Look at the disk; then try again.')
