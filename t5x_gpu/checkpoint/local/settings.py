"""Checks folder, period and space of local checkpoints, before anything compiles."""

import functools
import os
import pathlib
import pwd
import stat
import string
from typing import Optional

from t5x_gpu.checkpoint.local.replication import Hosts, ReplicaPlan, gigabytes
from t5x_gpu.config.atomic_write import write_problem
from t5x_gpu.config.user_paths import user_path
from t5x_gpu.errors import CheckpointError
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.host import available_memory

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
) -> None:
  """Raises CheckpointError, on all processes, unless every host has room for local checkpoints.

  Args:
    folder: local folder of this process; need not exist, and is not created.
    copies: which process keeps which parts.
    hosts: hosts of the processes.
    run: name of the run, whose files in the folder will be replaced; None for a new run.
  """
  found = distributed.gather_json([str(folder), *_look_at(folder, run)])
  # In a test, one process simulates several: they share its folder.
  for index in range(len(hosts.keys)):
    host, (its_folder, danger, problem, free) = hosts.names[index], found[index % len(found)]
    if danger:
      raise not_private(danger, where=f' on {host}')
    if problem:
      raise _error(
        f'{DIR} = {its_folder!r} cannot be written to by process {index} on {host}: {problem}.',
        fix=f"Set {DIR} to a folder you can write to on every host, such as '/dev/shm/$USER'.",
        parameters=(DIR,),
      )
    needed = SLOTS * copies.bytes_on_host(hosts, index)
    if free < needed:
      raise _error(
        f'{DIR} = {its_folder!r} has {gigabytes(free)} free on {host}, and local '
        f'checkpoints take {gigabytes(needed)} there: {SLOTS} times {gigabytes(needed // SLOTS)}, '
        'two that are kept and one that is being written.',
        fix=f'Free space, set {DIR} to a larger disk of the host, or train on more hosts; or set '
        f'{DIR} = None and {PERIOD} = None.',
        parameters=(DIR,),
      )


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
