"""MODEL_DIR as it lies on disk, judged in milliseconds: may it be written, and whose is it?

No array is read here and nothing is left behind, so that a run finds out before it compiles, and a
dry run finds out the same.
"""

import base64
import contextlib
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Optional

import jax

from t5x_gpu.checkpoint.manifest import differences
from t5x_gpu.checkpoint.run_lock import check_lock
from t5x_gpu.errors import CheckpointError

PREFIX = 'checkpoint'


@dataclasses.dataclass(frozen=True)
class Saved:
  """What a checkpoint says of itself.

  Attributes:
    step: updates done when it was written.
    data_state: for `BatchIterator.set_state`.
    manifest: see checkpoint/manifest.py.
  """
  step: int
  data_state: bytes
  manifest: Mapping[str, Any]


def checkpoint_path(folder: pathlib.Path, step: int) -> pathlib.Path:
  """Returns where the checkpoint of `step` lies."""
  return folder / f'{PREFIX}_{step}'


def committed_steps(folder: pathlib.Path) -> list[int]:
  """Returns the steps of the checkpoints in `folder`, oldest first; saves cut short are none."""
  found = (re.fullmatch(rf'{PREFIX}_(\d+)', path.name) for path in folder.glob(f'{PREFIX}_*'))
  return sorted(int(match[1]) for match in found if match)


def check_model_dir(model_dir: str | os.PathLike, *, target: Any) -> Optional[Saved]:
  """Returns the latest checkpoint that can be read so far, or None; leaves no trace.

  Args:
    model_dir: need not exist.
    target: the TrainState (or its shapes) of today.
  Raises:
    CheckpointError: the folder cannot be written, another run writes to it, or that checkpoint is
      of another model.
  """
  folder = pathlib.Path(model_dir).absolute()
  if jax.process_index() == 0:  # the others would find folders that come and go
    made = [f for f in (folder, *folder.parents) if not f.exists()]
    try:
      check_writable(folder)
      check_lock(folder)
    finally:
      for new in made:
        with contextlib.suppress(OSError):  # not made, or somebody has put something there
          new.rmdir()
  for step in reversed(committed_steps(folder)):
    saved = _read(folder, step)
    if saved is not None:
      check_same_model(folder, step, saved.manifest, target=target)
      return saved
  return None


def check_manifest(manifest: Any) -> None:
  """Raises KeyError or TypeError unless `manifest` has what a resume needs."""
  for key in ('arrays', 'data', 'next_batch_hash'):
    manifest[key]
  differences(manifest, {})


def check_same_model(folder: pathlib.Path, step: int, manifest: Mapping[str, Any], *,
                     target: Any) -> None:
  """Raises CheckpointError with the arrays in which `manifest` and `target` differ, if any do."""
  different = differences(manifest, target)
  if different:
    raise CheckpointError(
        f'{checkpoint_path(folder, step)} holds another model or optimizer:\n  '
        + '\n  '.join(different),
        fix='Set another MODEL_DIR for this model, or go back to the configuration of '
            f'{folder / "config.gin"}. Nothing was overwritten.', parameters=('MODEL_DIR',))


def check_writable(folder: pathlib.Path) -> None:
  """Makes `folder` if needed; raises CheckpointError unless files can be made in it."""
  probe = folder / f'.write_test_{os.getpid()}'
  try:
    folder.mkdir(parents=True, exist_ok=True)
    probe.write_bytes(b'ok')
    probe.unlink()
  except OSError as e:
    raise CheckpointError(
        f'MODEL_DIR = {str(folder)!r} cannot be written to: {e.strerror or e}.',
        fix='Set MODEL_DIR to a folder of yours with free space '
            '(--gin.MODEL_DIR=runs/my_run).', parameters=('MODEL_DIR',)) from e


def _read(folder: pathlib.Path, step: int) -> Optional[Saved]:
  """Returns what the JSON items of a checkpoint say, or None where the restore will say why not."""
  def item(name: str) -> Any:
    return json.loads((checkpoint_path(folder, step) / name / 'metadata').read_text('utf-8'))
  try:
    manifest = item('manifest')
    data_state = base64.b64decode(item('data')['iterator'], validate=True)
    check_manifest(manifest)
  except (OSError, ValueError, KeyError, TypeError):
    return None
  return Saved(step, data_state, manifest)
