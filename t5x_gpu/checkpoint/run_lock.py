"""MODEL_DIR/run.lock names the run that writes to MODEL_DIR and keeps other runs out.

Process 0 writes its identity and touches the file every ten seconds. A lock is stale, and is taken
over, if its process has ended, if it belongs to an earlier attempt of the same Slurm job or to an
earlier start by the same `launch`, or if it has not been touched for two minutes. A suspended run
may lose its lock this way. So a run checks the owner before it restores, before its first step,
before each save and just before each commit, and exits if the owner has changed. Objects in storage
cannot be touched: the owner writes the time into the object, so the clocks of hosts must agree to a
minute.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import socket
import threading
import time
from typing import Annotated, Optional

from t5x_gpu.errors import AccessError, CheckpointError
from t5x_gpu.runtime import process_exit
from t5x_gpu.runtime.machine import boot_id
from t5x_gpu.storage.files import access_error, is_missing, set_aside, write_atomically
from t5x_gpu.storage.json_schema import Number, parse_json, read_bytes, schema_of
from t5x_gpu.storage.paths import AnyPath, RemotePath

_log = logging.getLogger(__name__)

LOCK = 'run.lock'
REFRESH_SECONDS = 10
POLL_SECONDS = 1  # while waiting for another run's lock
GENERATION_VARIABLE = 'T5X_GPU_GENERATION'  # of launch: 'RUN NUMBER', see `Owner`
STALE_SECONDS = 120  # longer than NFS keeps attributes of files in its cache (60 s)


@dataclasses.dataclass(frozen=True)
class Owner:
  """A process that writes to a MODEL_DIR.

  Attributes:
    host, pid: host and pid of the process.
    started: when it took the lock, as text.
    kernel: boot id and PID namespace; processes with the same value see each other's pids.
    born: start of the process in ticks since boot, because pids are reused.
    folder: MODEL_DIR as this host sees it; differs in a copied folder.
    job, attempt: Slurm's job id and attempt; '' and 0 without Slurm.
    touched: time of its last renewal in seconds since 1970, in object storage.
    run, generation: the run and its start, of `launch` on several hosts, which starts a generation
      only after the processes of all earlier ones have ended or can no longer save.
  """

  host: str
  pid: int
  started: str
  kernel: str
  born: str
  folder: str
  job: str
  attempt: int
  touched: Annotated[float, Number(0, 1e12)] = 0.0
  run: str = ''
  generation: int = 0

  @property
  def name(self) -> str:
    job = f' (Slurm job {self.job}, attempt {self.attempt})' if self.job else ''
    return f'process {self.pid} on {self.host}{job}, started {self.started}'

  def is_same_process(self, other: 'Owner') -> bool:
    return (self.kernel, self.pid, self.born) == (other.kernel, other.pid, other.born)

  def is_visible_to(self, me: 'Owner') -> bool:
    """Returns whether `me` can tell if this process has ended."""
    return self.kernel == me.kernel and not _is_hidden(self.pid)

  def stale_because(self, me: 'Owner', age_seconds: float) -> str:
    """Returns why `me` may take over the lock of this owner; '' if it may not."""
    if self.job and self.job == me.job and self.attempt < me.attempt:
      return f'it is an earlier attempt of Slurm job {me.job}'
    if self.run and self.run == me.run and self.generation < me.generation:
      return f'it is start {self.generation} of the same run, this is start {me.generation}'
    if self.is_visible_to(me):
      if self.born != _born(self.pid):
        return 'it has ended'
      is_copy = (
        '://' not in me.folder
        and os.path.exists(self.folder)
        and (not os.path.samefile(self.folder, me.folder))
      )
      return f'its folder is {self.folder}, this is a copy' if is_copy else ''
    if age_seconds > STALE_SECONDS:
      return f'its last heartbeat was {age_seconds:.0f} s ago'
    return ''


def check_lock(folder: AnyPath, *, wait: bool = False) -> Optional[str]:
  """Returns why another process's lock is stale; None if there is none. Changes nothing.

  Args:
    folder: MODEL_DIR.
    wait: for a lock of another host or container, whose processes this process cannot see, wait
      until the lock is renewed, as a live run does every ten seconds, or becomes stale.
  Raises:
    CheckpointError: another run writes here.
  """
  path, me = folder / LOCK, _this_process(folder)
  seen: Optional[tuple[Owner, float]] = None
  while True:
    found = _read(path)
    if found is None:
      return None
    owner, touched = found
    if owner is None:
      return f'{path} cannot be read'
    if owner.is_same_process(me):
      return None
    age = (time.time() if isinstance(path, RemotePath) else _now(folder)) - touched
    reason = owner.stale_because(me, age)
    if reason:
      return f'the last run here was {owner.name}; {reason}'
    if not wait or owner.is_visible_to(me) or (seen is not None and seen != found):
      raise CheckpointError(
        f'MODEL_DIR = {str(folder)!r} belongs to another run: {owner.name}; its last '
        f'heartbeat was {max(age, 0):.0f} s ago.',
        fix='Wait for that run or end it, or set another MODEL_DIR. The lock of a run on another '
        f'host expires {STALE_SECONDS} s after its last heartbeat; if you are sure that the '
        f'run is gone, remove {path}.',
        parameters=('MODEL_DIR',),
        docs='watchdog.md#two-runs-on-one-model_dir',
      )
    if seen is None:
      _log.info(
        'Waiting for %s of %s; its last heartbeat was %.0f s ago. If the lock is not renewed, '
        'this run takes over in %.0f s.',
        path,
        owner.name,
        max(age, 0),
        STALE_SECONDS - age,
      )
    seen = found
    time.sleep(POLL_SECONDS)


def _read(path: AnyPath) -> Optional[tuple[Optional[Owner], float]]:
  """Returns (owner or None if garbled, time of the last renewal); None without a lock.

  Raises:
    CheckpointError: the lock cannot be read now, and its owner may be running.
  """
  try:
    owner = _parse(read_bytes(path))  # opening makes NFS ask the server
    if isinstance(path, RemotePath):
      return owner, owner.touched if owner else 0.0
    return owner, path.stat().st_mtime
  except FileNotFoundError:
    return None
  except PermissionError as e:
    if _now(path.parent) - path.stat().st_mtime > STALE_SECONDS:
      return None, 0.0
    raise CheckpointError(
      f'MODEL_DIR = {str(path.parent)!r} belongs to another run: {path.name} there was renewed '
      'less than two minutes ago, by a user whose file you may not read.',
      fix='Wait for that run or end it, or set another MODEL_DIR.',
      parameters=('MODEL_DIR',),
      docs='watchdog.md#two-runs-on-one-model_dir',
    ) from e
  except (OSError, ValueError) as e:  # a folder, a loop of links, bytes that are not UTF-8
    if isinstance(e, OSError) and not is_missing(e):
      error = access_error(e, path)
      raise AccessError(
        f'{error.what} So the lock may still be held.',
        fix=error.fix,
        docs='watchdog.md#two-runs-on-one-model_dir',
      ) from e
    return None, 0.0


class RunLock:
  """The lock of this process on `folder`, from now until `release`.

  Args:
    folder: MODEL_DIR.
    wait: see `check_lock`.
  Raises:
    CheckpointError: another run writes here.
  """

  def __init__(self, folder: AnyPath, *, wait: bool = False):
    self._folder = folder
    self._path = folder / LOCK
    reason = check_lock(folder, wait=wait)
    if reason:
      _log.info('Taking over %s: %s.', self._path, reason)
    self._me = _this_process(folder)
    self._number = _number(folder)
    self._write()
    self._released = threading.Event()
    self._thread = threading.Thread(target=self._refresh, name='run_lock', daemon=True)
    self._thread.start()
    process_exit.before_exit(self.release)

  def check(self) -> bool:
    """Returns False if the lock file had been removed; then writes it again.

    Raises:
      CheckpointError: another run has or may have taken over, or the folder is gone.
    """
    owner = self._owner()
    if self._released.is_set():  # the process is exiting
      return True
    check_exists(self._folder)
    if owner is None:
      # Only without the lock: some file systems change the numbers of their folders.
      if _number(self._folder) != self._number:
        raise _gone(self._folder, 'is another folder now')
      self._write()
    elif not owner.is_same_process(self._me):
      raise CheckpointError(
        f'MODEL_DIR = {str(self._folder)!r} now belongs to {owner.name}: it took over after this '
        f'run (process {self._me.pid} on {self._me.host}) had stopped renewing its lock. Nothing '
        'more is written.',
        fix="If that is this run's restart, ignore this. Otherwise give each run its own "
        'MODEL_DIR.',
        parameters=('MODEL_DIR',),
        docs='watchdog.md#two-runs-on-one-model_dir',
      )
    return owner is not None

  def release(self) -> None:
    """Removes the lock if it still belongs to this process. May be called again."""
    if not self._released.is_set():
      self._released.set()
      process_exit.cancel_before_exit(self.release)
      # Python aborts if it exits while a thread is inside TensorStore.
      self._thread.join(process_exit.CLEANUP_SECONDS)
      with contextlib.suppress(OSError, CheckpointError):
        owner = self._owner()
        if owner is not None and owner.is_same_process(self._me):
          self._path.unlink()

  def _refresh(self) -> None:
    while not self._released.wait(REFRESH_SECONDS):
      with contextlib.suppress(OSError, CheckpointError):  # the next save reports it
        if isinstance(self._path, RemotePath):
          before = self._path.read_bytes().decode(errors='replace')
          owner = _parse(before)
          if owner is not None and owner.is_same_process(self._me):
            self._path.swap(before, self._text())
          continue
        owner = self._owner()
        if owner is not None and owner.is_same_process(self._me):
          os.utime(self._path)

  def _owner(self) -> Optional[Owner]:
    found = _read(self._path)
    return found[0] if found else None

  def _text(self) -> str:
    values = dataclasses.asdict(dataclasses.replace(self._me, touched=time.time()))
    if not self._me.run:  # keys that an older t5x_gpu cannot read
      del values['run'], values['generation']
    return json.dumps(values, indent=1) + '\n'

  def _write(self) -> None:
    if isinstance(self._path, RemotePath):
      self._path.write_text(self._text())
      return
    try:
      if os.path.lexists(self._path) and self._owner() is None:
        set_aside(self._path, 'it is damaged')
      write_atomically(self._path, self._text(), suffix=f'.{self._me.pid}.tmp')
    except OSError as e:
      raise CheckpointError(
        f'{self._path} cannot be written: {e.strerror or e}.',
        fix='Set MODEL_DIR to a folder you can write to, with free space.',
        parameters=('MODEL_DIR',),
      ) from e


def check_exists(folder: AnyPath) -> None:
  """Raises CheckpointError if the MODEL_DIR of this run has been deleted from its disk."""
  if not isinstance(folder, RemotePath) and not folder.is_dir():
    raise _gone(folder, 'no longer exists')


def _gone(folder: AnyPath, what: str) -> CheckpointError:
  return CheckpointError(
    f'MODEL_DIR = {str(folder)!r} {what}: it was deleted, moved or unmounted during the run. This '
    'checkpoint was not saved.',
    fix='Put the folder back and start the same command again: it continues from the latest '
    'checkpoint there. Without the folder the run starts over.',
    parameters=('MODEL_DIR',),
  )


def _number(folder: AnyPath) -> int:
  """Returns the number of the folder in its file system; 0 in object storage."""
  return 0 if isinstance(folder, RemotePath) else folder.stat().st_ino


def _this_process(folder: AnyPath) -> Owner:
  try:
    pid_namespace = os.readlink('/proc/self/ns/pid')
  except OSError:
    pid_namespace = ''
  host = socket.gethostname()
  run, _, generation = os.environ.get(GENERATION_VARIABLE, '').partition(' ')
  return Owner(
    host=host,
    pid=os.getpid(),
    started=time.strftime('%Y-%m-%d %H:%M:%S'),
    kernel='/'.join((boot_id() or host, pid_namespace)),
    born=_born(os.getpid()),
    folder=str(folder),
    job=os.environ.get('SLURM_JOB_ID', ''),
    attempt=int(os.environ.get('SLURM_RESTART_COUNT') or 0),
    run=run,
    generation=int(generation or 0),
  )


def _born(pid: int) -> str:
  """Returns the start of a process in ticks since boot; '' if it has ended or is a zombie."""
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text('ascii', errors='replace')
  except OSError:
    return ''
  fields = stat.rpartition(')')[2].split()  # from the third on: the second may contain spaces
  return '' if fields[0] in 'ZX' else fields[19]


def _is_hidden(pid: int) -> bool:
  """Returns whether another user's process exists that /proc, mounted with hidepid, does not show.

  A process that has ended, and whose parent has not noticed yet, counts as well.
  """
  if _born(pid):
    return False
  try:
    os.kill(pid, 0)  # sends nothing
  except PermissionError:
    return True
  except (OSError, OverflowError):
    pass
  return False


def _parse(content: str | bytes) -> Optional[Owner]:
  try:
    return Owner(**parse_json(content, schema_of(Owner)))
  except ValueError:
    return None


def _now(folder: pathlib.Path) -> float:
  """Returns the time of the clock that stamps files in `folder`, which may be a file server's."""
  probe = folder / f'.time_{os.getpid()}'
  try:
    probe.write_bytes(b'')
    return probe.stat().st_mtime
  except OSError:
    return time.time()
  finally:
    probe.unlink(missing_ok=True)
