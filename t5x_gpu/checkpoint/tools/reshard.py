"""Rewrites a checkpoint with other chunks, dtypes or stacking of layers, without model or devices.

Arrays are copied in pieces whose size follows from a budget of host memory. The largest chunk of
the source may take an eighth of the budget.
"""

import ast
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from t5x_gpu.checkpoint.arrays.params_files import PARAMS_ONLY
from t5x_gpu.checkpoint.arrays.state_reader import UNSTACKED, Checkpoint, StateReader
from t5x_gpu.checkpoint.arrays.state_writer import StateWriter
from t5x_gpu.checkpoint.model_dir import ModelDir
from t5x_gpu.checkpoint.run_files import carry
from t5x_gpu.checkpoint.schemas import DATA, TREE
from t5x_gpu.checkpoint.storage.atomic_folder import Journal, RemoteJournal, open_journal
from t5x_gpu.checkpoint.storage.checksums import HostSums, record
from t5x_gpu.checkpoint.storage.chunks import boxes, piece_shape
from t5x_gpu.checkpoint.storage.paths import AnyPath
from t5x_gpu.checkpoint.tools.reshard_plan import (
  ReshardPlan,
  ReshardRequest,
  piece_bytes,
  plan_reshard,
)
from t5x_gpu.checkpoint.tools.verify import check_sums, damage_named, verify
from t5x_gpu.config.json_schema import read_json
from t5x_gpu.errors import AccessError, CheckpointError
from t5x_gpu.terminal.console import Console

RESHARDED_FROM = 'resharded_from'
_NEVER = 2**62


def reshard(request: ReshardRequest, console: Console) -> AnyPath:
  """Writes the checkpoint and returns its folder; continues after an interrupted call.

  Raises:
    CheckpointError: the memory budget is too small, or the source is damaged.
  """
  reader = StateReader(
    request.source, step=request.step, cache_bytes=request.memory // 16, step_setting='--step'
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
        _verify(Checkpoint(ModelDir(journal.folder), reader.step), request, console)
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
    console.say(f'continuing an interrupted call: {done / 1e6:,.1f} MB are already written')
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
) -> dict[str, Any]:
  """Returns the manifest of the source, updated for the new arrays."""
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


def _empty(reader: StateReader, request: ReshardRequest) -> dict[str, Any]:
  """Returns the nodes of Orbax's tree without arrays, leaving out a dropped optimizer."""
  tree = read_json(reader.path / 'state' / '_METADATA', TREE)['tree_metadata']
  return {
    key: leaf
    for key, leaf in tree.items()
    if leaf['value_metadata']['skip_deserialize']
    and not (request.drop_optimizer and ast.literal_eval(key)[0] == 'opt_state')
  }


def _verify(written: Checkpoint, request: ReshardRequest, console: Console) -> None:
  """Raises CheckpointError unless the new checkpoint reads back with the right checksums."""
  reader = StateReader(written, cache_bytes=0)
  with console.progress('read back', reader.num_bytes) as advance:
    verdict = verify(reader, advance=advance, num_threads=1, most_bytes=piece_bytes(request))
  for name, problem in verdict.damaged.items():
    raise CheckpointError(f'{name}, read back, {problem}.', fix='Check the disk, then try again.')
