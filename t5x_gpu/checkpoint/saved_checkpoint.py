"""One checkpoint in MODEL_DIR: where it is, whether it is committed, and its metadata."""

import base64
import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any, Optional

from t5x_gpu.checkpoint.array_files import check_array_files, check_only_files
from t5x_gpu.checkpoint.manifest import check_seal
from t5x_gpu.checkpoint.schemas import DATA, MANIFEST, TREE
from t5x_gpu.checkpoint.storage.object_store_steps import remote_steps
from t5x_gpu.checkpoint.storage.paths import AnyPath, RemotePath, access_errors
from t5x_gpu.checkpoint.storage.storage_errors import reason_of
from t5x_gpu.config.json_schema import read_json

PREFIX = 'checkpoint'
CUT_SHORT = '.orbax-checkpoint-tmp'  # in the names of folders that Orbax is still writing
# Errors that `read_saved` raises for files that are missing, truncated or garbled.
UNREADABLE = (OSError, ValueError, KeyError, TypeError)


@dataclasses.dataclass(frozen=True)
class Saved:
  """The metadata of a checkpoint.

  Attributes:
    step: number of updates at the time of the save.
    data_state: argument of `BatchIterator.set_state`.
    manifest: see checkpoint/manifest.py.
  """

  step: int
  data_state: bytes
  manifest: Mapping[str, Any]


def checkpoint_path(folder: AnyPath, step: int) -> AnyPath:
  """Returns the folder of the checkpoint of `step`."""
  return folder / f'{PREFIX}_{step}'


def committed_steps(folder: AnyPath) -> list[int]:
  """Returns the steps of the checkpoints in `folder` at this moment, oldest first.

  Ignores interrupted saves, files, links, and names that only resemble `checkpoint_<step>`.

  Raises:
    AccessError: the folder cannot be listed.
  """
  if isinstance(folder, RemotePath):
    return remote_steps(folder)
  steps = []
  # Not Path.glob: without permission to list the folder, it finds nothing, and a run would start
  # from scratch.
  with access_errors(folder), contextlib.suppress(FileNotFoundError, NotADirectoryError):
    with os.scandir(folder) as entries:
      for entry in entries:
        match = re.fullmatch(rf'{PREFIX}_(0|[1-9][0-9]*)', entry.name)
        if match and entry.is_dir(follow_symlinks=False):
          steps.append(int(match[1]))
  return sorted(steps)


def is_real_folder(path: pathlib.Path) -> bool:
  """Returns whether `path` is itself a folder, not a link to one."""
  return path.is_dir() and not path.is_symlink()


def remove_cut_short(folder: pathlib.Path) -> None:
  """Removes partial saves of killed processes, each up to the size of a checkpoint."""
  for path in folder.glob(f'{PREFIX}_*{CUT_SHORT}*'):
    if re.fullmatch(rf'{PREFIX}_[0-9]+{re.escape(CUT_SHORT)}(-[0-9]+)?', path.name) and (
      is_real_folder(path)
    ):
      shutil.rmtree(path, ignore_errors=True)  # best effort; leftovers are harmless


def read_manifest(folder: AnyPath, step: int) -> Mapping[str, Any]:
  """Returns the manifest of a checkpoint; other files may be damaged.

  Raises:
    OSError, ValueError: the manifest is missing, truncated, garbled, or does not match
      `schemas.MANIFEST`.
    AccessError: the manifest cannot be opened.
  """
  checkpoint = checkpoint_path(folder, step)
  with access_errors(checkpoint):
    return read_json(checkpoint / 'manifest' / 'metadata', MANIFEST)


def read_saved(
  folder: AnyPath, step: int, *, manifest: Optional[Mapping[str, Any]] = None
) -> Saved:
  """Returns the metadata of a checkpoint, if all of its files are complete.

  Finds array files that are missing or truncated; does not read their contents.

  Args:
    folder: MODEL_DIR.
    step: step of the checkpoint.
    manifest: its manifest, if it was read before.
  Raises:
    OSError, ValueError, KeyError, TypeError: something is missing, truncated or garbled.
    AccessError: something cannot be opened.
  """
  checkpoint = checkpoint_path(folder, step)
  if manifest is None:
    manifest = read_manifest(folder, step)
  with access_errors(checkpoint):
    if not isinstance(checkpoint, RemotePath):
      check_only_files(checkpoint)
    data = read_json(checkpoint.joinpath('data', 'metadata'), DATA)
    check_seal(manifest, data=data)
    read_json(checkpoint.joinpath('state', '_METADATA'), TREE)
    check_array_files(checkpoint / 'state')
  return Saved(step, base64.b64decode(data['iterator']), manifest)


def error_line(e: Exception) -> str:
  """Returns the reason for an error in one line."""
  while type(e) is Exception and isinstance(e.__cause__, Exception):
    e = e.__cause__  # Orbax's error names neither file nor reason
  return f'{type(e).__name__}: {reason_of(e)[:200]}'
