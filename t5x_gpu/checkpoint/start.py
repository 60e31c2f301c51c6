"""Builds the first state of a run, from its own checkpoint, another checkpoint, or the seed.

Each process reads the parts of the parameters that its devices hold. Any mesh may have written
them.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Mapping
from typing import Any, Optional

import flax.traverse_util
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from t5x_gpu.checkpoint.arrays.params_files import ParamsReader, check_params
from t5x_gpu.checkpoint.arrays.state_reader import (
  Checkpoint,
  has_other_arrays,
  read_array,
  read_state,
)
from t5x_gpu.checkpoint.base_checkpointer import Restored, damage
from t5x_gpu.checkpoint.local.local_tier import LocalTier, NoLocalTier
from t5x_gpu.checkpoint.local.promotion import promote_newer
from t5x_gpu.checkpoint.manifest import STARTED_FROM, known_part
from t5x_gpu.checkpoint.remote_checkpointer import AnyCheckpointer
from t5x_gpu.checkpoint.saved_checkpoint import Saved
from t5x_gpu.checkpoint.storage.checksums import check_restored
from t5x_gpu.checkpoint.storage.orbax_internals import (
  read_tree,
  silence_abandoned_work,
  wait_for_abandoned_reads,
)
from t5x_gpu.checkpoint.storage.paths import AnyPath, is_remote
from t5x_gpu.config.json_schema import read_bytes
from t5x_gpu.config.set_aside import check_not_refused
from t5x_gpu.data.batches import BatchIterator, batch_hash, optional_method
from t5x_gpu.data.same_data import check_next_batch
from t5x_gpu.data.sources.source_files import NAME, NOT_COMPARED, FileWatch, SourceFiles
from t5x_gpu.errors import CheckpointError, first_line
from t5x_gpu.runtime import distributed
from t5x_gpu.training.program import Program
from t5x_gpu.training.train_state import TrainState

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Start:
  """What a run starts from: another checkpoint; without `reader`, its own checkpoint or the seed.

  Attributes:
    reader: reader of the other checkpoint.
    taken: path of a parameter -> its path in the other checkpoint.
    saved: for 'resume' and 'new_data', the metadata of the other checkpoint.
    origin: where the run's first state comes from, for its manifests; JSON-ready.
    text: a table for the log.
    takes_data: whether the data continue from their position in `saved`.
  """

  reader: Optional[ParamsReader] = None
  taken: Mapping[str, str] = dataclasses.field(default_factory=dict)
  saved: Optional[Saved] = None
  origin: Optional[Mapping[str, Any]] = None
  text: str = ''
  takes_data: bool = True

  @property
  def path(self) -> str:
    """Folder of the other checkpoint; '' without a checkpoint."""
    return '' if self.reader is None else str(self.reader.path)

  def origin_of(self, restored: Optional[Restored]) -> Optional[Mapping[str, Any]]:
    """Returns the origin of the run's first state, taken from its manifest if it was `restored`."""
    return self.origin or (restored and restored.manifest.get(STARTED_FROM))

  def first_state(
    self,
    checkpointer: AnyCheckpointer,
    program: Program,
    fresh: Optional[TrainState],
    local: LocalTier | NoLocalTier = NoLocalTier(),
  ) -> tuple[TrainState, Optional[Restored]]:
    """Returns the state of the next step, and the checkpoint that holds the whole state, or None.

    Args:
      checkpointer: checkpointer of the run; the run's latest checkpoint takes precedence.
      program: program of the run.
      fresh: the initial state, which is donated; None to compute it if needed.
      local: local checkpoints of the run; they replace a checkpoint that turns out to be damaged.
    Raises:
      CheckpointError: no checkpoint can be read.
    """
    restored = checkpointer.restore_latest(
      program.abstract_saved,
      promote=functools.partial(promote_newer, local, target=program.abstract_saved),
    )
    if restored is None and self.saved is not None:
      restored = restore_from(self.reader.checkpoint, program.abstract_saved)
    if restored is not None:
      return program.in_run_order(_with_history(restored.state, program)), restored
    return self._filled(fresh or program.init(), program), None

  def _filled(self, state: TrainState, program: Program) -> TrainState:
    """Returns a fresh state with the parameters of the checkpoint; `state` is donated."""
    if not self.taken:
      return state
    state = program.in_model_order(state)
    flat = flax.traverse_util.flatten_dict(state.params, sep='/')
    with distributed.errors_together():
      for name, source in self.taken.items():
        flat[name].delete()  # so that at most one parameter is in memory twice
        flat[name] = self._read(source, flat[name])
    left = dict(self.taken)
    while left:  # several parameters can have one source: a DPO run's reference begins as a copy
      name_of = {source: name for name, source in left.items()}
      check_params(self.reader, {source: flat[name] for source, name in name_of.items()})
      left = {name: source for name, source in left.items() if name_of[source] != name}
    params = flax.traverse_util.unflatten_dict(flat, sep='/')
    return program.in_run_order(state.replace(params=params))

  def _read(self, source: str, like: jax.Array) -> jax.Array:
    try:
      return read_array(self.reader, source, like)
    except (ValueError, OSError) as e:
      raise CheckpointError(
        f'{source} of {self.reader.path} cannot be read: {first_line(e)[:300]}',
        fix='Copy the checkpoint again, or name another: RestoreConfig.step.',
        parameters=('RestoreConfig.path', 'RestoreConfig.step'),
      ) from e


def _with_history(state: TrainState, program: Program) -> TrainState:
  """Returns `state`, with a new FP8 history if the run needs one and the checkpoint lacks it."""
  if bool(state.fp8_history) == bool(program.abstract_saved.fp8_history):
    return state
  _log.info('The checkpoint has no FP8 history of this length: the first step uses default scales.')
  zeros = jax.tree.map(
    lambda a: jax.jit(functools.partial(jnp.zeros, a.shape, a.dtype), out_shardings=a.sharding)(),
    program.abstract_saved.fp8_history,
  )
  return state.replace(fp8_history=zeros)


def restore_from(checkpoint: Checkpoint, target: TrainState) -> Restored:
  """Reads a checkpoint of another run onto the mesh of `target`; never writes to the other run.

  Args:
    checkpoint: the checkpoint; its manifest has been compared with `target`.
    target: shapes, dtypes and shardings of this run.
  Raises:
    CheckpointError: the checkpoint cannot be read; raised on all processes.
  """
  path, saved = checkpoint.path, checkpoint.saved
  target, state = known_part(saved.manifest, target), None

  def read() -> None:
    nonlocal state
    if has_other_arrays(saved.manifest, target) or is_remote(path):
      state = read_state(checkpoint, target)
    else:
      with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        state = TrainState(**read_tree(handler, path / 'state', target.saved()))

  def check() -> None:
    check_restored(state, saved.manifest, step=saved.step)

  with silence_abandoned_work():
    for do in (read, check):  # the processes compute checksums together, once all have read
      with distributed.errors_together():
        if problem := damage(do, path):
          wait_for_abandoned_reads()
          raise CheckpointError(
            f'{path} cannot be read: {problem}',
            fix='Copy the checkpoint again, or name another: RestoreConfig.step.',
            parameters=('RestoreConfig.path', 'RestoreConfig.step'),
          )
  return Restored(path, state, saved.data_state, saved.manifest)


def open_sources(data: BatchIterator, folder: AnyPath, *, resumed: bool) -> SourceFiles:
  """Returns the files that `data` reads; empty on all processes but 0, and for data without files.

  Args:
    data: data of the run.
    folder: MODEL_DIR, or the checkpoint of another run that this run continues.
    resumed: compare the files with the record in `folder`.
  Raises:
    DataError: a file has changed since the record was written, or cannot be read.
    AccessError: the record cannot be opened.
  """
  read_files = optional_method(data, 'source_files')
  if read_files is None or not distributed.is_main_process():
    return SourceFiles({})
  files = read_files()
  if resumed:
    check_sources(files, folder)
  return files


def open_watch(data: BatchIterator) -> FileWatch:
  """Returns a watch for changes of the files of `data`; it watches no file except on process 0."""
  files = optional_method(data, 'watched_files')
  return FileWatch(files() if files is not None and distributed.is_main_process() else ())


def check_sources(files: SourceFiles, folder: AnyPath) -> None:
  """Checks that `files` have not changed since the record in `folder`, if it has a good one.

  Raises:
    DataError: a file has changed.
    AccessError: the record cannot be opened.
  """
  if not files.files:
    return
  path = (folder.parent if (folder / 'manifest').is_dir() else folder) / NAME
  try:
    files.check(read_bytes(path), where=str(path))
  except FileNotFoundError:
    _log.warning('%s does not exist. %s This run writes a new one.', path, NOT_COMPARED)
  except (OSError, ValueError) as e:
    check_not_refused(e, path)
    reason = e.strerror if isinstance(e, OSError) else e
    _log.warning('%s cannot be read: %s. %s', path, reason, NOT_COMPARED)


def resume_data(data: BatchIterator, *, data_state: bytes, manifest: Mapping[str, Any]) -> None:
  """Moves the data to the position in a checkpoint; raises DataError if the data differ."""
  data.set_state(data_state)
  if not manifest['next_batch_hash']:  # unknown: a source file had changed at the time of the save
    return
  check_next_batch(
    saved_hash=manifest['next_batch_hash'],
    hash_now=batch_hash(data.peek()),
    saved=manifest['data'],
    now=data.describe(),
  )
