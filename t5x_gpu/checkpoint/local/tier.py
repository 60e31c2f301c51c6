"""Local checkpoints: every few steps, each process saves its part of the state on its own host.

`open_local_tier` checks folder, period and space before anything compiles. `LocalTier.save` waits
for the copy to host memory and for the transfers between hosts; a thread then writes the file.
Local checkpoints are best effort: a failed save is reported, and tried again at the next period.
Only the checkpoints in MODEL_DIR are guaranteed.
"""

import base64
import contextlib
import functools
import json
import logging
import os
import pathlib
import pwd
import secrets
import stat
import string
import threading
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
  Hosts,
  KeptBox,
  ReplicaPlan,
  gigabytes,
  hosts_of_run,
  plan_copies,
  send,
)
from t5x_gpu.checkpoint.manifest import Manifest
from t5x_gpu.checkpoint.model_dir import ModelDir, is_real_folder
from t5x_gpu.errors import CheckpointError
from t5x_gpu.partitioning.trees import Shape, Tree, by_name
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster import interruptions
from t5x_gpu.runtime.machine import available_memory
from t5x_gpu.storage.files import (
  check_not_refused,
  set_aside_damaged,
  write_atomically,
  write_problem,
)
from t5x_gpu.storage.json_schema import Fields, Json, Text, read_json
from t5x_gpu.storage.user_paths import user_path

_log = logging.getLogger(__name__)

HostPart = tuple[str, Shape, Shape, np.ndarray]  # name, shape of the array, start, values


def copy_parts(state: Tree, copies: ReplicaPlan, *, process: int) -> Optional[list[HostPart]]:
  """Returns the parts of `state` that `process` keeps.

  Returns None if the host lacks the memory; other hosts still receive their parts from it. All
  processes must call this function.

  Args:
    state: the state, with the shardings of the plan; may be overwritten afterwards.
    copies: which process keeps which parts.
    process: index of this process.
  """
  names, arrays = zip(*by_name(state).items())
  places = {d: i for i, d in enumerate(arrays[0].sharding.mesh.devices.flat)}
  own = [part for part in copies.by_process[process] if not part.is_sent]
  sent = [part for part in copies.by_process[process] if part.is_sent]
  shards: dict[int, dict[int, jax.Array]] = {}
  for part in own:
    if part.array not in shards:
      shards[part.array] = _shards(arrays[part.array], places)
    shards[part.array][part.device].copy_to_host_async()
  found: Optional[list[HostPart]] = []

  def take(part: KeptBox, shard: jax.Array) -> None:
    nonlocal found
    array = arrays[part.array]
    try:
      if found is not None:
        values = _on_host(shard, part, array.dtype)
        found.append((names[part.array], array.shape, part.start, values))
    except MemoryError:
      found = None

  for part in own:
    take(part, shards[part.array][part.device])
  del shards
  # One array at a time: device memory fits one extra shard, not a copy of the neighbor's state.
  for i, pairs in sorted(copies.sent.items()):
    received = _shards(send(arrays[i], pairs), places)
    for part in sent:
      if part.array == i:
        take(part, received[part.device])
    jax.block_until_ready(list(received.values()))
  return found


def _shards(array: jax.Array, places: Mapping[jax.Device, int]) -> dict[int, jax.Array]:
  """Returns position in the flat mesh -> shard of the device at that position."""
  return {places[shard.device]: shard.data for shard in array.addressable_shards}


def _on_host(shard: jax.Array, part: KeptBox, dtype: np.dtype) -> np.ndarray:
  """Returns a copy of a part's values in host memory."""
  values = np.asarray(shard)
  if next(iter(shard.devices())).platform == 'cpu':
    values = values.copy()  # otherwise a view of a buffer that the step reuses
  if part.is_sent:  # sent as integers, with an axis for devices
    values = np.ascontiguousarray(values).reshape(-1).view(jnp.dtype(dtype))
  return values.reshape(part.shape)


# MODEL_DIR/run.id names the run, so that its files in other folders can be recognized.
RUN_ID = 'run.id'
# `name` becomes the name of a folder on local disks: it must not be '../..'. `folder` is MODEL_DIR
# at the time of writing.
_SCHEMA = Fields({'name': Text('[0-9a-f]{16}'), 'folder': str}, others=False)


def read_run_id(folder: pathlib.Path) -> Optional[str]:
  """Returns the name of the run in `folder`; None if it has none, or the name of another run.

  A MODEL_DIR that was moved keeps its name. A copy is another run: while the original exists, the
  name belongs to the original.

  Raises:
    AccessError: the file cannot be opened.
  """
  try:
    kept = _read(folder)
  except ValueError:
    return None
  except OSError as e:
    check_not_refused(e, folder / RUN_ID)  # without the name, the run loses its local checkpoints
    return None
  here, there = str(folder.resolve()), pathlib.Path(kept['folder'])
  with contextlib.suppress(OSError, ValueError):
    if str(there) != here and _read(there)['name'] == kept['name']:
      return None
  return kept['name']


def ensure_run_id(folder: pathlib.Path) -> str:
  """Returns the name of the run in `folder`; creates it if needed. Called on one process.

  A damaged file is renamed, with a warning.
  """
  name = read_run_id(folder) or secrets.token_hex(8)
  now, kept = {'name': name, 'folder': str(folder.resolve())}, None
  try:
    kept = _read(folder)
  except FileNotFoundError:
    pass
  except (OSError, ValueError) as e:
    set_aside_damaged(folder / RUN_ID, e)
  if kept != now:
    try:
      text = json.dumps(now, indent=1) + '\n'
      write_atomically(folder / RUN_ID, text, suffix=f'.{os.getpid()}.tmp')
    except OSError as e:
      raise CheckpointError(
        f'{folder / RUN_ID} cannot be written: {e.strerror or e}.',
        fix='Set MODEL_DIR to a folder you can write to, with free space.',
        parameters=('MODEL_DIR',),
      ) from e
  return name


def _read(folder: pathlib.Path) -> dict[str, str]:
  """Raises OSError or ValueError if the file is missing or damaged."""
  return read_json(folder / RUN_ID, _SCHEMA)


SLOTS = 3  # two local checkpoints stay, one is being written
DIR, PERIOD = 'CheckpointConfig.local_checkpoint_dir', 'CheckpointConfig.local_period'
_error = functools.partial(CheckpointError, docs='checkpoints.md#local-checkpoints')


def check_local_settings(
  local_checkpoint_dir: Optional[str], local_period: Optional[int], *, period: int
) -> None:
  """Raises CheckpointError unless local checkpoints evenly divide the time between durable ones."""
  if local_checkpoint_dir is None and local_period is None:
    return
  if period == 1:
    raise _error(
      f'{PERIOD} = {local_period}, but every step is saved to MODEL_DIR: period = {period}.',
      fix=f'Set {DIR} = None and {PERIOD} = None, or CheckpointConfig.period = 10 or more.',
      parameters=(PERIOD, 'CheckpointConfig.period'),
    )
  if local_checkpoint_dir is None:
    raise _error(
      f'{PERIOD} = {local_period}, but {DIR} = None: there is nowhere to save to.',
      fix=f"Set {DIR} = '/dev/shm/$USER' (memory of each host) or a folder on its local disk, or "
      f'{PERIOD} = None.',
      parameters=(PERIOD, DIR),
    )
  if local_period is None:
    raise _error(
      f'{DIR} = {local_checkpoint_dir!r}, but {PERIOD} = None does not say how often.',
      fix=f'Set {PERIOD} to a number that divides CheckpointConfig.period = {period}.',
      parameters=(DIR, PERIOD),
    )
  if not 1 <= local_period < period or period % local_period:
    raise _error(
      f'{PERIOD} = {local_period} must divide CheckpointConfig.period = {period}, and be less: '
      'local checkpoints are those between saves to MODEL_DIR.',
      fix=f'Set {PERIOD} to a number below {period} that divides it.',
      parameters=(PERIOD, 'CheckpointConfig.period'),
    )


def local_folder(local_checkpoint_dir: str, *, model_dir: pathlib.Path) -> pathlib.Path:
  """Returns the folder with ~ and environment variables expanded.

  Raises:
    CheckpointError: a variable is not set, or the folder is inside MODEL_DIR.
  """
  names = (
    match['named'] or match['braced']
    for match in string.Template.pattern.finditer(local_checkpoint_dir)
  )
  unset = [name for name in names if name and name not in os.environ]
  if unset:
    raise _error(
      f'{DIR} = {local_checkpoint_dir!r}: ${unset[0]} is not set.',
      fix=f'Set it for every process: export {unset[0]}=..., or write the folder out.',
      parameters=(DIR,),
    )
  folder = user_path(os.path.expandvars(local_checkpoint_dir))
  inner, outer = folder.resolve(), model_dir.resolve()
  if inner.is_relative_to(outer):
    raise _error(
      f'{DIR} = {str(folder)!r} is inside MODEL_DIR = {str(model_dir)!r}: it must be a disk or the '
      'memory of each host, which is faster than the file system that all share.',
      fix=f"Set {DIR} = '/dev/shm/$USER', or a folder of the host's own disk.",
      parameters=(DIR, 'MODEL_DIR'),
    )
  return folder


def check_space(
  folder: pathlib.Path, copies: ReplicaPlan, hosts: Hosts, *, run: Optional[str]
) -> Optional[CheckpointError]:
  """Returns, on all processes, why a host has no room for local checkpoints; None if all have.

  Args:
    folder: local folder of this process; need not exist, and is not created.
    copies: which process keeps which parts.
    hosts: hosts of the processes.
    run: name of the run, whose files in the folder will be replaced; None for a new run.
  Raises:
    CheckpointError: other users could write to a folder.
  """
  found = distributed.gather_json([str(folder), *_look_at(folder, run)])
  # In a test, one process simulates several: they share its folder.
  for index in range(len(hosts.keys)):
    host, (its_folder, danger, problem, free) = hosts.names[index], found[index % len(found)]
    if danger:
      raise not_private(danger, where=f' on {host}')
    if problem:
      return _error(
        f'{DIR} = {its_folder!r} cannot be written to by process {index} on {host}: {problem}.',
        fix=f"Set {DIR} to a folder you can write to on every host, such as '/dev/shm/$USER'.",
        parameters=(DIR,),
      )
    needed = SLOTS * copies.bytes_on_host(hosts, index)
    if free < needed:
      return _error(
        f'{DIR} = {its_folder!r} has {gigabytes(free)} free on {host}, and local '
        f'checkpoints take {gigabytes(needed)} there: {SLOTS} times {gigabytes(needed // SLOTS)}, '
        'two that are kept and one that is being written.',
        fix=f'Free space, set {DIR} to a larger disk of the host, or train on more hosts; or set '
        f'{DIR} = None and {PERIOD} = None.',
        parameters=(DIR,),
      )
  return None


def danger_of(folder: pathlib.Path) -> str:
  """Returns why other users could write to a folder; '' if they cannot, or the folder is missing.

  Checksums do not help against other users, because anybody can compute them.
  """
  try:
    own, link = folder.stat(), folder.lstat()
  except OSError:  # the folder is missing or unusable
    return ''
  me = os.geteuid()
  if own.st_uid != me or link.st_uid not in (me, 0):
    other = own.st_uid if own.st_uid != me else link.st_uid
    return f'{folder} belongs to user {_user_name(other)}, and this run to user {_user_name(me)}'
  if own.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
    return f'{folder} can be written to by other users: its mode is {stat.S_IMODE(own.st_mode):o}'
  return ''


def _user_name(number: int) -> str:
  try:
    return pwd.getpwuid(number).pw_name
  except KeyError:  # a container without that user
    return str(number)


def not_private(danger: str, *, where: str = '') -> CheckpointError:
  """Returns the error for a folder that is unsafe because of `danger` (see `danger_of`)."""
  return CheckpointError(
    f'{danger}{where}. Users who can write there can change the state that a restart loads.',
    fix=f"Set {DIR} = '/dev/shm/$USER', or another folder that does not exist or belongs to "
    'you alone: chmod go-w FOLDER. A run makes missing folders for their user alone.',
    parameters=(DIR,),
    docs='security.md#local-checkpoints',
  )


def make_private(folder: pathlib.Path) -> None:
  """Creates a folder of local checkpoints and its missing parents, accessible only to this user.

  Raises:
    CheckpointError: other users can write to the folder or its parent.
    OSError: the folder cannot be created.
  """
  for missing in [f for f in (*folder.parents[::-1], folder) if not f.exists()]:
    missing.mkdir(mode=0o700, exist_ok=True)
  danger = danger_of(folder.parent) or danger_of(folder)
  if danger:
    raise not_private(danger)
  folder.chmod(0o700)


def _look_at(folder: pathlib.Path, run: Optional[str]) -> tuple[str, str, int]:
  """Returns three facts about a folder: security problem, write problem, and free bytes.

  The problems are reasons why other users could change local checkpoints, and why the folder cannot
  be written or created; '' if there is no problem.
  """
  danger = danger_of(folder) or (danger_of(folder / run) if run else '')
  there = next(f for f in (folder, *folder.parents) if f.exists())
  probe = there / f'.write_test_{os.getpid()}'
  try:
    probe.write_bytes(b'ok')
    probe.unlink()
    stats = os.statvfs(there)
    own = sum(path.stat().st_size for path in (folder / run).glob('step_*')) if run else 0
  except OSError as e:
    return danger, write_problem(e, there), 0
  free = stats.f_bavail * stats.f_frsize
  available = available_memory() if _is_memory(there) else None
  if available is not None:  # a tmpfs may be larger than the host's free memory
    free = min(free, available)
  return danger, '', free + own


def _is_memory(folder: pathlib.Path) -> bool:
  try:
    mounts = [line.split()[1:3] for line in pathlib.Path('/proc/mounts').read_text().splitlines()]
  except OSError:
    return False
  around = [(len(where), kind) for where, kind in mounts if folder.resolve().is_relative_to(where)]
  return max(around, default=(0, ''))[1] in ('tmpfs', 'ramfs')


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
    is_full: whether a host has no room: no step is saved, but an existing one can be promoted.
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
    is_full: bool = False,
  ):
    self._is_full = is_full
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
    return self if step % self._period == 0 and not self._is_full else None

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

  def save(self, step: int, state: Tree, *, data_state: bytes, manifest: Manifest) -> None:
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

  def _write(self, step: int, facts: Json, parts: Sequence[HostPart]) -> None:
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

  def __exit__(self, kind: object, error: Optional[BaseException], trace: object) -> None:
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


def open_local_tier(config: Any, model_dir: ModelDir, state: Tree) -> LocalTier | NoLocalTier:
  """Returns the run's LocalTier, after checking that local checkpoints fit on every host.

  Logs their location. Writes nothing. If `launch` has started this process to continue a run, a
  host without room does not end the run: this start keeps no local checkpoints.

  Args:
    config: CheckpointConfig.
    model_dir: MODEL_DIR of the run.
    state: shapes with the shardings of the run.
  Raises:
    CheckpointError: a folder cannot be written, is too small, or is inside MODEL_DIR; other users
      could write to it.
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
  full = check_space(local, copies, hosts, run=read_run_id(folder))
  if full is not None and not interruptions.is_restart(os.environ):
    raise full
  process = jax.process_index()
  tier = LocalTier(
    local,
    model_dir=folder,
    copies=copies,
    hosts=hosts,
    period=config.local_period,
    process=process,
    attempt=distributed.broadcast_json(secrets.token_hex(4)),
    is_full=full is not None,
  )
  if full is not None and process == 0:
    _log.warning(
      'Local checkpoint: %s Until the next start, the run saves to MODEL_DIR only.', full.what
    )
  elif process == 0:
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
