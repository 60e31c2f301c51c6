"""Local steps: every few steps, each process keeps its part of the state on its own host.

The step loop sees the copy from device to host memory, and what a host must get from another; a
thread then writes. They are an extra: a local save that fails is reported, and tried again at the
next period. What is promised are the checkpoints in MODEL_DIR.
"""

import base64
import json
import logging
import pathlib
import secrets
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Self

import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.checkpoint.local.file_format import (
  FILE_NAME,
  TEMPORARY,
  open_local_file,
  write_local_file,
)
from t5x_gpu.checkpoint.local.replication import (
  Copies,
  Hosts,
  Kept,
  gigabytes,
  hosts_of_run,
  plan_copies,
  send,
)
from t5x_gpu.checkpoint.local.run_id import ensure_run_id, read_run_id
from t5x_gpu.checkpoint.local.settings import DIR, PERIOD, SLOTS, check_space, local_folder
from t5x_gpu.checkpoint.model_dir import is_real_folder
from t5x_gpu.checkpoint.storage.chunks import Shape
from t5x_gpu.config.json_schema import Fields, read_json
from t5x_gpu.errors import CheckpointError
from t5x_gpu.runtime import distributed

_log = logging.getLogger(__name__)

KEPT_STEPS = SLOTS - 1
ABOUT = 'run.json'


class LocalTier:
  """The local steps of one process.

  Args:
    folder: that holds a folder of each run, on this host.
    model_dir: of the run.
    copies: who keeps what; of states with the shardings that `save` will get.
    hosts: of the processes.
    period: steps between them.
    process: index of this one.
    attempt: the same on all processes: parts of different attempts make no state.
  """

  pause = 'local_save'  # what the step loop's timer calls it

  def __init__(
    self,
    folder: pathlib.Path,
    *,
    model_dir: pathlib.Path,
    copies: Copies,
    hosts: Hosts,
    period: int,
    process: int,
    attempt: str,
  ):
    self.folder, self.model_dir = folder, model_dir
    self._copies, self._hosts = copies, hosts
    self._period, self._process, self._attempt = period, process, attempt
    self._thread: Optional[threading.Thread] = None
    self._run_folder = folder
    self._left_over: list[pathlib.Path] = []
    self._saved: list[int] = []
    self._complete: Optional[int] = None  # the latest step that all processes have kept
    self._has_warned = False

  def due(self, step: int) -> Optional[Self]:
    """Returns itself if `step` is to be kept, else None."""
    return self if step % self._period == 0 else None

  def __enter__(self) -> Self:
    """Begins: MODEL_DIR is there, and this run's."""
    run = distributed.broadcast_json(
      ensure_run_id(self.model_dir) if distributed.is_main_process() else None
    )
    self._run_folder = self.folder / run
    try:
      self._run_folder.mkdir(parents=True, exist_ok=True)
      if self._is_first_of_host:
        (self._run_folder / ABOUT).write_text(json.dumps({'model_dir': str(self.model_dir)}))
        # Of processes that were killed; none of today writes before all have come to `save`.
        for path in self._run_folder.glob(f'step_*{TEMPORARY}'):
          path.unlink(missing_ok=True)
      self._left_over = [path for path in self._run_folder.glob('step_*') if self._is_mine(path)]
    except OSError as e:
      self._warn(f'{self._run_folder} cannot be used: {e.strerror or e}.')
    return self

  def _is_mine(self, path: pathlib.Path) -> bool:
    """Returns whether this process, of those on its host, is to remove what is left of earlier
    attempts under this name: its own, and the first one also what nobody else is going to write.
    """
    match = FILE_NAME.fullmatch(path.name)
    if match is None or is_real_folder(path):
      return False
    here = [i for i, key in enumerate(self._hosts.keys) if key == self._hosts.keys[self._process]]
    return int(match[2]) == self._process or (self._is_first_of_host and int(match[2]) not in here)

  @property
  def _is_first_of_host(self) -> bool:
    return self._hosts.is_first_of_host(self._process)

  def save(self, step: int, state: Any, *, data_state: bytes, manifest: Mapping[str, Any]) -> None:
    """Starts to write this process's part of a step; returns once `state` may be overwritten.

    All processes must call it. While one of them still writes the step before, none saves: steps
    would else be whole on no two hosts.

    Args:
      step: updates done.
      state: with the shardings that the copies were planned for.
      data_state: for `BatchIterator.set_state`.
      manifest: see checkpoint/manifest.py.
    """
    jax.block_until_ready(state)  # two collectives at once may wait for each other for ever on CPU
    is_busy = self._thread is not None and self._thread.is_alive()
    told = distributed.gather_json([is_busy, [] if is_busy else self._saved])
    busy = [process for process, (flag, _) in enumerate(told) if flag]
    if busy:
      if busy[0] == self._process:
        self._warn(
          f'Step {step} is not kept: process {busy[0]} still writes the step before.',
          fix=f'Set {PERIOD} higher.',
        )
      return
    facts = {
      'run': self._run_folder.name,
      'attempt': self._attempt,
      'step': step,
      'process': self._process,
      'hosts': list(self._hosts.names),
      'data_state': base64.b64encode(data_state).decode(),
      'manifest': manifest,
    }
    self._complete = max(set.intersection(*(set(saved) for _, saved in told)), default=None)
    parts = self._parts(state)
    if parts is None:
      self._warn(f'Step {step} is not kept: there is too little host memory for a copy.')
      return
    self._thread = threading.Thread(
      target=self._write, args=(step, facts, parts), name='local_save', daemon=True
    )
    self._thread.start()

  def _parts(self, state: Any) -> Optional[list[tuple[str, Shape, Shape, np.ndarray]]]:
    """Returns (name, shape of the array, start, values) of what this process keeps; None if its
    host has too little memory, after it has sent the others theirs.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    names = [jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in flat]
    arrays = [x for _, x in flat]
    places = {d: i for i, d in enumerate(arrays[0].sharding.mesh.devices.flat)}
    own = [part for part in self._copies.by_process[self._process] if not part.is_sent]
    sent = [part for part in self._copies.by_process[self._process] if part.is_sent]
    shards: dict[int, dict[int, jax.Array]] = {}
    for part in own:
      if part.array not in shards:
        shards[part.array] = _shards(arrays[part.array], places)
      shards[part.array][part.device].copy_to_host_async()
    found: Optional[list[tuple[str, Shape, Shape, np.ndarray]]] = []

    def take(part: Kept, shard: jax.Array) -> None:
      nonlocal found
      try:
        if found is not None:
          found.append(
            (
              names[part.array],
              arrays[part.array].shape,
              part.start,
              _on_host(shard, part, arrays[part.array].dtype),
            )
          )
      except MemoryError:
        found = None

    for part in own:
      take(part, shards[part.array][part.device])
    del shards
    # One after the other: a device has room for a shard more, not for its neighbour's state.
    for i, pairs in sorted(self._copies.sent.items()):
      received = _shards(send(arrays[i], pairs), places)
      for part in sent:
        if part.array == i:
          take(part, received[part.device])
      jax.block_until_ready(list(received.values()))
    return found

  def _write(
    self, step: int, facts: Mapping[str, Any], parts: Sequence[tuple[str, Shape, Shape, np.ndarray]]
  ) -> None:
    """Writes the file and removes what is older; in a thread."""
    try:
      write_local_file(self._path(step), facts=facts, parts=parts)
      stays = {step, *([self._complete] if self._complete is not None else self._saved[-1:])}
      for old in set(self._saved) - stays:
        self._path(old).unlink(missing_ok=True)
      self._saved = sorted(stays)
      self._remove_left_over()
    except OSError as e:
      self._warn(
        f'Step {step} could not be kept in {self._run_folder}: {e.strerror or e}. '
        f'It is tried again every {self._period} steps.'
      )
    except Exception as e:  # an extra must not end the run
      self._warn(f'Step {step} could not be kept: {type(e).__name__}: {e}')

  def _path(self, step: int) -> pathlib.Path:
    return self._run_folder / f'step_{step}.process_{self._process}'

  def _remove_left_over(self) -> None:
    """Removes what earlier attempts of this run have left on this host."""
    left, self._left_over = self._left_over, []
    for path in left:
      if _attempt_of(path) != self._attempt:
        path.unlink(missing_ok=True)

  def _warn(self, text: str, *, fix: str = '') -> None:
    """Warns the first time."""
    if not self._has_warned:
      self._has_warned = True
      _log.warning(
        'Local step: %s Checkpoints in MODEL_DIR are written as always.%s',
        text,
        f' {fix}' if fix else '',
      )

  def wait(self) -> None:
    """Returns once nothing is being written."""
    if self._thread is not None:
      self._thread.join()

  def __exit__(
    self,
    kind: Optional[type[BaseException]],
    error: Optional[BaseException],
    trace: Optional[types.TracebackType],
  ) -> None:
    """Frees the host where all went well: MODEL_DIR has a newer checkpoint."""
    self.wait()
    if error is None:
      self._remove_left_over()
      for step in self._saved:
        self._path(step).unlink(missing_ok=True)
      # The last process of the host finds nothing but the file about the run.
      if not any(self._run_folder.glob('step_*')):
        (self._run_folder / ABOUT).unlink(missing_ok=True)
        try:
          self._run_folder.rmdir()
        except OSError:  # another process has been quicker
          pass


class NoLocalTier:
  """In the place of a LocalTier where nothing is kept locally."""

  folder = None

  def due(self, step: int) -> None:
    del step

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: Any) -> None:
    pass


def open_local_tier(config: Any, model_dir: str, state: Any) -> LocalTier | NoLocalTier:
  """Returns what keeps local steps, once they are known to fit on every host.

  Says in the log what is kept where. Makes nothing.

  Args:
    config: CheckpointConfig.
    model_dir: of the run.
    state: shapes with the shardings of the run.
  Raises:
    CheckpointError: a folder cannot be written, is too small, or lies in MODEL_DIR.
  """
  if config.local_checkpoint_dir is None:
    return NoLocalTier()
  if '://' in model_dir:
    raise CheckpointError(
      f'{DIR} = {config.local_checkpoint_dir!r}, but MODEL_DIR = {model_dir!r} is no folder: '
      'a local step becomes a checkpoint by a rename, which object storage does not have.',
      fix=f'Set MODEL_DIR to a folder that all hosts share, or {DIR} = None and {PERIOD} = None.',
      parameters=(DIR, 'MODEL_DIR'),
      docs='checkpoints.md#local-steps',
    )
  folder = pathlib.Path(model_dir).absolute()
  local = local_folder(config.local_checkpoint_dir, model_dir=folder)
  hosts = hosts_of_run()
  copies = plan_copies(state, hosts)
  check_space(local, copies, hosts, run=read_run_id(folder))
  process = jax.process_index()
  tier = LocalTier(
    local,
    model_dir=folder,
    copies=copies,
    hosts=hosts,
    period=config.local_period,
    process=process,
    attempt=distributed.broadcast_json(secrets.token_hex(4)),
  )
  if process == 0:
    _log.info(
      'local steps: every %d steps in %s, the last %d stay; of each, %s',
      config.local_period,
      local,
      KEPT_STEPS,
      copies.words(hosts),
    )
  if hosts.is_first_of_host(process):
    _name_other_runs(local, folder)
  return tier


def _name_other_runs(local: pathlib.Path, model_dir: pathlib.Path) -> None:
  """Says which other runs have files here: they are neither used nor removed."""
  own = read_run_id(model_dir)
  for folder in sorted(path for path in local.glob('*') if path.is_dir() and path.name != own):
    files = [path for path in folder.glob('step_*') if FILE_NAME.fullmatch(path.name)]
    if not files:
      continue
    try:
      of = read_json(folder / ABOUT, Fields({'model_dir': str}))['model_dir']
    except (OSError, ValueError):
      of = 'an unknown MODEL_DIR'
    size = gigabytes(sum(path.stat().st_size for path in files))
    if of == str(model_dir):
      _log.warning(
        '%s has %s of local steps of an earlier run in %s. They are neither used nor '
        'removed: rm -r %s',
        folder,
        size,
        model_dir,
        folder,
      )
    else:
      _log.info('%s has %s of local steps of another run, in %s: left alone.', folder, size, of)


def _shards(array: jax.Array, places: Mapping[Any, int]) -> dict[int, jax.Array]:
  """Returns place in the flat mesh -> what the device there holds."""
  return {places[shard.device]: shard.data for shard in array.addressable_shards}


def _on_host(shard: jax.Array, part: Kept, dtype: Any) -> np.ndarray:
  """Returns the values of a part in memory that no device shares."""
  values = np.asarray(shard)
  if next(iter(shard.devices())).platform == 'cpu':
    values = values.copy()  # it was a view of a buffer that the step reuses
  if part.is_sent:  # as bits, with an axis for devices
    values = np.ascontiguousarray(values).reshape(-1).view(jnp.dtype(dtype))
  return values.reshape(part.shape)


def _attempt_of(path: pathlib.Path) -> str:
  try:
    return open_local_file(path).facts['attempt']
  except (OSError, ValueError, KeyError):
    return ''
