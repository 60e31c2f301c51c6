"""Local checkpoints: every few steps, each process saves its part of the state on its own host.

The step loop waits for the copy to host memory and for the transfers between hosts; a thread then
writes the file. Local checkpoints are best effort: a failed save is reported, and tried again at
the next period. Only the checkpoints in MODEL_DIR are guaranteed.
"""

import base64
import contextlib
import json
import logging
import pathlib
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Self

import jax

from t5x_gpu.checkpoint.local.file_format import (
  FILE_NAME,
  TEMPORARY,
  open_local_file,
  write_local_file,
)
from t5x_gpu.checkpoint.local.host_parts import HostPart, copy_parts
from t5x_gpu.checkpoint.local.replication import (
  Hosts,
  ReplicaPlan,
  gigabytes,
  hosts_of_run,
  plan_copies,
)
from t5x_gpu.checkpoint.local.run_id import ensure_run_id, read_run_id
from t5x_gpu.checkpoint.local.settings import (
  DIR,
  PERIOD,
  SLOTS,
  check_space,
  local_folder,
  make_private,
)
from t5x_gpu.checkpoint.model_dir import ModelDir
from t5x_gpu.checkpoint.saved_checkpoint import is_real_folder
from t5x_gpu.config.atomic_write import write_problem
from t5x_gpu.config.json_schema import Fields, read_json
from t5x_gpu.errors import CheckpointError
from t5x_gpu.runtime import distributed

_log = logging.getLogger(__name__)

KEPT_STEPS = SLOTS - 1
ABOUT = 'run.json'


class LocalTier:
  """The local checkpoints of one process.

  Args:
    folder: local folder of this host, with a subfolder for each run.
    model_dir: MODEL_DIR of the run.
    copies: which process keeps which parts of the states passed to `save`.
    hosts: hosts of the processes.
    period: steps between local checkpoints.
    process: index of this process.
    attempt: id of this attempt, equal on all processes: parts of different attempts do not fit
      together.
  """

  pause = 'local_save'  # the name of a save in the step timer

  def __init__(
    self,
    folder: pathlib.Path,
    *,
    model_dir: pathlib.Path,
    copies: ReplicaPlan,
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
    self._complete: Optional[int] = None  # the latest step that all processes have saved
    self._has_warned = False

  def due(self, step: int) -> Optional[Self]:
    """Returns itself if `step` should be saved, else None."""
    return self if step % self._period == 0 else None

  def __enter__(self) -> Self:
    """Creates the folder; MODEL_DIR exists by now and belongs to this run.

    Raises:
      CheckpointError: other users can write to the folder; raised on all processes.
    """
    run = distributed.broadcast_json(
      ensure_run_id(self.model_dir) if distributed.is_main_process() else None
    )
    self._run_folder = self.folder / run
    danger: Optional[CheckpointError] = None
    try:
      make_private(self._run_folder)
      if self._is_first_of_host:
        (self._run_folder / ABOUT).write_text(json.dumps({'model_dir': str(self.model_dir)}))
        # Left by killed processes. No other process writes yet: `save` waits for all of them.
        for path in self._run_folder.glob(f'step_*{TEMPORARY}'):
          path.unlink(missing_ok=True)
      self._left_over = [path for path in self._run_folder.glob('step_*') if self._is_mine(path)]
    except CheckpointError as e:
      danger = e
    except OSError as e:
      self._warn(f'{self._run_folder} cannot be used: {write_problem(e, self.folder)}.')
    distributed.raise_together(danger)
    return self

  def _is_mine(self, path: pathlib.Path) -> bool:
    """Returns whether this process must remove a file of an earlier attempt.

    Each process removes files of its index. The first process of a host also removes files of
    processes that are not on this host.
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

    All processes must call it. If one process is still writing the previous step, all skip this
    step; otherwise no step would be complete on two hosts.

    Args:
      step: updates done.
      state: the state, with the shardings of the plan.
      data_state: argument of `BatchIterator.set_state`.
      manifest: see checkpoint/manifest.py.
    """
    jax.block_until_ready(state)  # two collectives at once can deadlock on CPU
    is_busy = self._thread is not None and self._thread.is_alive()
    reported = distributed.gather_json([is_busy, [] if is_busy else self._saved])
    busy = [process for process, (flag, _) in enumerate(reported) if flag]
    if busy:
      if busy[0] == self._process:
        self._warn(
          f'Step {step} was not saved: process {busy[0]} is still writing the step before.',
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
    self._complete = max(set.intersection(*(set(saved) for _, saved in reported)), default=None)
    parts = copy_parts(state, self._copies, process=self._process)
    if parts is None:
      self._warn(f'Step {step} was not saved: there is too little host memory for a copy.')
      return
    self._thread = threading.Thread(
      target=self._write, args=(step, facts, parts), name='local_save', daemon=True
    )
    self._thread.start()

  def _write(self, step: int, facts: Mapping[str, Any], parts: Sequence[HostPart]) -> None:
    """Writes the file and removes older files; runs in a thread."""
    try:
      write_local_file(self._path(step), facts=facts, parts=parts)
      stays = {step, *([self._complete] if self._complete is not None else self._saved[-1:])}
      for old in set(self._saved) - stays:
        self._path(old).unlink(missing_ok=True)
      self._saved = sorted(stays)
      self._remove_left_over()
    except OSError as e:
      self._warn(
        f'Step {step} could not be saved in {self._run_folder}: '
        f'{write_problem(e, self.folder)}. '
        f'The run tries again every {self._period} steps.'
      )
    except Exception as e:  # a local checkpoint is best effort: it must not end the run
      self._warn(f'Step {step} could not be saved: {type(e).__name__}: {e}')

  def _path(self, step: int) -> pathlib.Path:
    return self._run_folder / f'step_{step}.process_{self._process}'

  def _remove_left_over(self) -> None:
    """Removes files that earlier attempts of this run left on this host."""
    left, self._left_over = self._left_over, []
    for path in left:
      if _attempt_of(path) != self._attempt:
        path.unlink(missing_ok=True)

  def _warn(self, text: str, *, fix: str = '') -> None:
    """Warns, but only the first time."""
    if not self._has_warned:
      self._has_warned = True
      _log.warning(
        'Local checkpoint: %s Checkpoints in MODEL_DIR are not affected.%s',
        text,
        f' {fix}' if fix else '',
      )

  def wait(self) -> None:
    """Waits until the write in progress ends."""
    if self._thread is not None:
      self._thread.join()

  def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
    """Removes the files after a run without error: MODEL_DIR has a newer checkpoint."""
    self.wait()
    if error is None:
      self._remove_left_over()
      for step in self._saved:
        self._path(step).unlink(missing_ok=True)
      # For the last process of the host, only the file that describes the run is left.
      if not any(self._run_folder.glob('step_*')):
        (self._run_folder / ABOUT).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another process was faster
          self._run_folder.rmdir()


class NoLocalTier(contextlib.nullcontext):
  """Replaces LocalTier in a run without local checkpoints."""

  def due(self, step: int) -> None:
    del step


def open_local_tier(config: Any, model_dir: ModelDir, state: Any) -> LocalTier | NoLocalTier:
  """Returns the run's LocalTier, after checking that local checkpoints fit on every host.

  Logs their location. Writes nothing.

  Args:
    config: CheckpointConfig.
    model_dir: MODEL_DIR of the run.
    state: shapes with the shardings of the run.
  Raises:
    CheckpointError: a folder cannot be written, is too small, or is inside MODEL_DIR.
  """
  if config.local_checkpoint_dir is None:
    return NoLocalTier()
  folder = model_dir.path
  if model_dir.is_remote:
    raise CheckpointError(
      f'{DIR} = {config.local_checkpoint_dir!r}, but MODEL_DIR = {str(folder)!r} is not a '
      'folder: promoting a local checkpoint takes a rename, which object storage does not have.',
      fix=f'Set MODEL_DIR to a folder that all hosts share, or {DIR} = None and {PERIOD} = None.',
      parameters=(DIR, 'MODEL_DIR'),
      docs='checkpoints.md#local-checkpoints',
    )
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
      'local checkpoints: every %d steps in %s, the last %d are kept; of each, %s',
      config.local_period,
      local,
      KEPT_STEPS,
      copies.words(hosts),
    )
  if hosts.is_first_of_host(process):
    _name_other_runs(local, folder)
  return tier


def _name_other_runs(local: pathlib.Path, model_dir: pathlib.Path) -> None:
  """Logs which other runs have files here, because they are neither used nor removed."""
  own = read_run_id(model_dir)
  for folder in sorted(path for path in local.glob('*') if path.is_dir() and path.name != own):
    files = [path for path in folder.glob('step_*') if FILE_NAME.fullmatch(path.name)]
    if not files:
      continue
    try:
      owner = read_json(folder / ABOUT, Fields({'model_dir': str}))['model_dir']
    except (OSError, ValueError):
      owner = 'an unknown MODEL_DIR'
    size = gigabytes(sum(path.stat().st_size for path in files))
    if owner == str(model_dir):
      _log.warning(
        '%s has %s of local checkpoints of an earlier run in %s. They are neither used nor '
        'removed. To remove them: rm -r %s',
        folder,
        size,
        model_dir,
        folder,
      )
    else:
      _log.info(
        '%s has %s of local checkpoints from another run, in %s; left in place.',
        folder,
        size,
        owner,
      )


def _attempt_of(path: pathlib.Path) -> str:
  try:
    return open_local_file(path).facts['attempt']
  except (OSError, ValueError, KeyError):
    return ''
