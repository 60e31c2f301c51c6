"""Checks at startup that all processes see the same MODEL_DIR; otherwise the first save would hang.

Process 0 writes a file with a new name, and all other processes look for it. An NFS client may
cache attributes of folders for a minute (acdirmax): reading the parent folders makes it ask the
server, and a new name is not in its cache.
"""

import contextlib
import os
import pathlib
import secrets
import time
from collections.abc import Iterator

from t5x_gpu.checkpoint.model_dir import ModelDir, check_writable
from t5x_gpu.checkpoint.storage.paths import AnyPath, RemotePath, as_path
from t5x_gpu.errors import CheckpointError, listed
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster.agreement import who_text

# Longer than a slow file server takes. A process that sees the file immediately does not wait.
LOOK_SECONDS = 20.0
_POLL_SECONDS = 0.1


def shared_model_dir(model_dir: str | os.PathLike | AnyPath, *, dry_run: bool = False) -> ModelDir:
  """Returns MODEL_DIR, open, after checking that all processes see the same folder.

  Object storage is checked, too: hosts may talk to different servers. A single process skips the
  check.

  Args:
    model_dir: MODEL_DIR of the run.
    dry_run: remove the folder again if it did not exist. A run keeps it: removing and creating it
      again would give other hosts stale handles.
  Raises:
    ConfigError: the address is not supported.
    CheckpointError: process 0 cannot write to MODEL_DIR, or another process does not see the file;
      raised on all processes.
  """
  folder = as_path(model_dir, parameter='train.model_dir')
  if distributed.process_count() > 1:
    with _nonce(folder, dry_run=dry_run) as name:
      seen = distributed.gather_json([_sees(folder, name), str(folder)])
    blind = [i for i, (sees, _) in enumerate(seen) if not sees]
    if blind:
      raise _not_shared(blind, [path for _, path in seen])
  return ModelDir(folder)


@contextlib.contextmanager
def _nonce(folder: AnyPath, *, dry_run: bool) -> Iterator[str]:
  """Yields the name of a file that process 0 wrote into the folder; removes it at the end."""
  name, made = '', []
  try:
    if distributed.is_main_process():
      if dry_run and not isinstance(folder, RemotePath):
        made = [f for f in (folder, *folder.parents) if not f.exists()]
      check_writable(folder)
      name = f'.shared_{secrets.token_hex(8)}'
      (folder / name).write_bytes(b'ok')
    yield distributed.broadcast_json(name)
  finally:
    if name:
      with contextlib.suppress(OSError):
        (folder / name).unlink(missing_ok=True)
    for new in made:
      with contextlib.suppress(OSError):  # another process has written to the folder
        new.rmdir()


def _sees(folder: AnyPath, name: str) -> bool:
  """Returns whether this process sees the file within `LOOK_SECONDS`."""
  deadline = time.monotonic() + LOOK_SECONDS
  while True:
    if not isinstance(folder, RemotePath):
      _refresh(folder)
    with contextlib.suppress(OSError):  # no permission, or a stale handle
      if (folder / name).is_file():
        return True
    if time.monotonic() > deadline:
      return False
    time.sleep(_POLL_SECONDS)


def _refresh(folder: pathlib.Path) -> None:
  """Reads the beginning of each parent folder, so that NFS asks the server."""
  for above in (*reversed(folder.parents), folder):
    with contextlib.suppress(OSError), os.scandir(above) as entries:
      next(entries, None)


def _not_shared(blind: list[int], paths: list[str]) -> CheckpointError:
  names = distributed.hostnames()
  by_host: dict[str, list[int]] = {}
  for process in blind:
    by_host.setdefault(names[process] if names else '', []).append(process)
  hosts = [f'{who_text(who, names)}: {paths[who[0]]}' for who in by_host.values()]
  return CheckpointError(
    f'MODEL_DIR = {paths[0]!r} is not one folder for all processes. Process 0'
    f'{f" ({names[0]})" if names else ""} wrote a file there; {len(blind)} of {len(paths)} '
    'processes do not see it:\n  ' + '\n  '.join(listed(hosts, 8)),
    fix='Set MODEL_DIR to an absolute path on a file system that all hosts mount, or to object '
    'storage (s3://BUCKET/FOLDER). Every process writes its part of a checkpoint there.',
    parameters=('MODEL_DIR',),
    docs='slurm.md#what-hosts-must-share',
  )
