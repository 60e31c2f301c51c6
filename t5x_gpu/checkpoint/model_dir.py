"""MODEL_DIR as it lies on disk, judged in milliseconds: may it be written, and whose is it?

No array is read here, the sizes of their files tell whether they are whole; and nothing is left
behind. So a run finds out before it compiles, and a dry run finds out the same.

Whether the array files of a checkpoint are whole, told in milliseconds: no array is read.

Orbax keeps the pieces of all arrays in a few files, and where each piece lies in an index: a
manifest and a tree of nodes, each with a checksum (TensorStore's OCDBT). So the sizes of the files
tell whether all pieces are there. The metadata of the arrays is read before TensorStore sees it.
Source: https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format
"""

import base64
import contextlib
import dataclasses
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, Optional

import jax
import tensorstore as ts

from t5x_gpu.checkpoint.manifest import check_seal, differences
from t5x_gpu.checkpoint.run_lock import check_lock
from t5x_gpu.checkpoint.schemas import ARRAY_METADATA, DATA, MANIFEST, TREE
from t5x_gpu.checkpoint.storage.object_store_steps import remote_steps
from t5x_gpu.checkpoint.storage.paths import (
  AnyPath,
  RemotePath,
  as_path,
  context,
  is_outage,
  kvstore_spec,
  reason_of,
  storage_error,
)
from t5x_gpu.config.json_schema import open_regular, parse_json, read_json
from t5x_gpu.errors import CheckpointError

_log = logging.getLogger(__name__)


_MOST_METADATA_BYTES = 1 << 20  # of one array


def check_only_files(folder: str | os.PathLike) -> None:
  """Raises OSError or ValueError if something in `folder` is neither a file nor a folder.

  Orbax and TensorStore would wait for a pipe for ever.
  """
  with os.scandir(folder) as entries:
    for entry in entries:
      if entry.is_dir(follow_symlinks=False):
        check_only_files(entry)
      elif not entry.is_file():  # of a link, what it leads to; nothing is looked up for a file
        raise ValueError(f'{entry.path} is no file')


def check_array_files(folder: AnyPath) -> None:
  """Raises OSError or ValueError unless each piece of each array lies inside its file.

  That finds files that are missing or cut off, a damaged index, and metadata that TensorStore would
  end the process for; not bytes that have changed inside a file. It takes some milliseconds, 3 more
  for every 1000 pieces (one per array and shard). In object storage nothing can be cut off, and the
  files need only be there; metadata is not looked at.

  Args:
    folder: of the item in the checkpoint, `checkpoint_<step>/state`.
  """
  ends: dict[str, int] = {}
  metadata: dict[str, list[tuple[str, int, int]]] = {}  # file -> key, offset and length in it
  try:
    base = ts.KvStore.open(kvstore_spec(folder), context=context()).result()
    manifest = ts.ocdbt.dump(base).result()
    root = manifest['versions'][-1]['root'].get('location') if manifest else None
    if root is None:
      raise ValueError('manifest.ocdbt names no arrays')
    for key, entry in _entries(base, root):
      if 'indirect_value' not in entry:  # a short one is kept in the index itself
        _check_metadata(key, entry.get('inline_value', b''))
        continue
      # 'value:ocdbt.process_0/:d/bd17da16:65208:3861': folder, file, offset, length.
      place, offset, length = entry['indirect_value'].rsplit(':', 2)
      file = ''.join(place.split(':')[1:])
      ends[file] = max(ends.get(file, 0), int(offset) + int(length))
      if _name(key) in ARRAY_METADATA:
        metadata.setdefault(file, []).append((key, int(offset), int(length)))
  except (LookupError, TypeError, AttributeError, RuntimeError) as e:  # of a damaged index
    raise ValueError(f'the index of the arrays is damaged: {type(e).__name__}: {e}') from e
  if isinstance(folder, RemotePath):
    missing = sorted(ends.keys() - set(folder.files()))
    if missing:
      raise ValueError(f'{missing[0]} is missing')
    return
  for file, end in ends.items():
    size = (folder / file).stat().st_size
    if size < end:
      raise ValueError(f'{file} is cut off: it has {size:,} of at least {end:,} bytes')
  for file, places in metadata.items():
    with open_regular(folder / file) as f:
      for key, offset, length in places:
        if length > _MOST_METADATA_BYTES:
          raise ValueError(f'{key} has {length:,} bytes, and {_MOST_METADATA_BYTES:,} is the limit')
        f.seek(offset)
        _check_metadata(key, f.read(length))


def _entries(
  base: ts.KvStore, node: str, prefix: bytes = b''
) -> Iterator[tuple[str, Mapping[str, Any]]]:
  """Yields key and entry of each value below a node of the index."""
  for entry in ts.ocdbt.dump(base, node).result()['entries']:
    if 'location' in entry:
      yield from _entries(base, entry['location'], prefix + entry['subtree_common_prefix'])
    else:
      yield (prefix + entry['key']).decode(errors='replace'), entry


def _name(key: str) -> str:
  return key.rpartition('/')[2]


def _check_metadata(key: str, content: bytes) -> None:
  """Raises ValueError if `content` is metadata of an array, and such as no array has."""
  if _name(key) in ARRAY_METADATA:
    try:
      parse_json(content, ARRAY_METADATA[_name(key)])
    except ValueError as e:
      raise ValueError(f'{key} is damaged: {e}') from e


PREFIX = 'checkpoint'
CUT_SHORT = '.orbax-checkpoint-tmp'  # in the name of a folder that Orbax still writes
# What `read_saved` raises for files that are missing, cut or garbled.
UNREADABLE = (OSError, ValueError, KeyError, TypeError)


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


def checkpoint_path(folder: AnyPath, step: int) -> AnyPath:
  """Returns where the checkpoint of `step` lies."""
  return folder / f'{PREFIX}_{step}'


def committed_steps(folder: AnyPath) -> list[int]:
  """Returns the steps of the checkpoints in `folder`, oldest first.

  Saves cut short are none, nor are files, links, and names that only resemble ours.
  """
  if isinstance(folder, RemotePath):
    return remote_steps(folder)
  found = {
    path: re.fullmatch(rf'{PREFIX}_(0|[1-9][0-9]*)', path.name)
    for path in folder.glob(f'{PREFIX}_*')
  }
  return sorted(int(match[1]) for path, match in found.items() if match and is_real_folder(path))


def is_real_folder(path: pathlib.Path) -> bool:
  """Returns whether `path` is a folder itself, no link to one."""
  return path.is_dir() and not path.is_symlink()


def is_checkpoint_of_ours(folder: pathlib.Path, step: int) -> bool:
  """Returns whether `checkpoint_<step>` has a manifest of ours; without, it may be anybody's."""
  with contextlib.suppress(*UNREADABLE):
    return is_real_folder(checkpoint_path(folder, step)) and bool(
      read_manifest(folder, step)['arrays']
    )
  return False


def remove_cut_short(folder: pathlib.Path) -> None:
  """Removes what a kill has left of saves, each up to as big as a checkpoint, and nothing else."""
  for path in folder.glob(f'{PREFIX}_*{CUT_SHORT}*'):
    if re.fullmatch(rf'{PREFIX}_[0-9]+{re.escape(CUT_SHORT)}(-[0-9]+)?', path.name) and (
      is_real_folder(path)
    ):
      shutil.rmtree(path, ignore_errors=True)  # what stays is in nobody's way


def check_model_dir(model_dir: str | os.PathLike | AnyPath, *, target: Any) -> Optional[Saved]:
  """Returns the latest checkpoint that can be read as far as `read_saved` can tell; None without
  any. Leaves no trace.

  Args:
    model_dir: need not exist.
    target: the TrainState (or its shapes) of today.
  Raises:
    CheckpointError: the folder cannot be written, another run writes to it, none of its checkpoints
      can be read, or the latest is of another model.
  """
  folder = as_path(model_dir)
  if jax.process_index() == 0:  # the others would find folders that come and go
    made = (
      []
      if isinstance(folder, RemotePath)
      else [f for f in (folder, *folder.parents) if not f.exists()]
    )
    try:
      check_writable(folder)
      check_lock(folder, wait=True)
    finally:
      for new in made:
        with contextlib.suppress(OSError):  # not made, or somebody has put something there
          new.rmdir()
  reasons: dict[int, str] = {}
  for step in reversed(committed_steps(folder)):
    try:
      saved = read_saved(folder, step)
    except UNREADABLE as e:
      check_no_outage(e, folder)
      reasons[step] = why(e)
      continue
    check_same_model(folder, step, saved.manifest, target=target)
    for damaged, reason in reasons.items() if jax.process_index() == 0 else ():
      _log.warning('checkpoint_%d cannot be read (%s); checkpoint_%d can.', damaged, reason, step)
    return saved
  if reasons:
    raise none_can_be_read(folder, reasons)
  return None


def read_manifest(folder: AnyPath, step: int) -> Mapping[str, Any]:
  """Returns the manifest of a checkpoint, which may be damaged otherwise.

  Raises:
    OSError, ValueError: it is missing, cut off, garbled, or not as `schemas.MANIFEST` says.
  """
  return read_json(checkpoint_path(folder, step) / 'manifest' / 'metadata', MANIFEST)


def read_saved(folder: AnyPath, step: int) -> Saved:
  """Returns what a checkpoint says of itself, if all of it is there.

  Files of arrays that are missing or cut off are found, what is in them is not looked at: see
  checkpoint/model_dir.py.

  Raises:
    OSError, ValueError, KeyError, TypeError: something is missing, cut off or garbled.
  """
  checkpoint = checkpoint_path(folder, step)
  if not isinstance(checkpoint, RemotePath):
    check_only_files(checkpoint)
  manifest = read_manifest(folder, step)
  data = read_json(checkpoint.joinpath('data', 'metadata'), DATA)
  check_seal(manifest, data=data)
  read_json(checkpoint.joinpath('state', '_METADATA'), TREE)
  check_array_files(checkpoint / 'state')
  return Saved(step, base64.b64decode(data['iterator']), manifest)


def why(e: Exception) -> str:
  """Returns what went wrong in one line."""
  return f'{type(e).__name__}: {reason_of(e)[:200]}'


def check_no_outage(e: Exception, folder: AnyPath) -> None:
  """Raises CheckpointError if `e` says that storage did not answer, not that a file is damaged."""
  if isinstance(folder, RemotePath) and is_outage(e):
    raise storage_error(e, f'{folder} cannot be read', folder.scheme) from None


def none_can_be_read(folder: AnyPath, reasons: Mapping[int, str]) -> CheckpointError:
  """Returns the error for checkpoints (step -> reason) of which none can be read."""
  return CheckpointError(
    f'None of the {len(reasons)} checkpoints in {folder} can be read.\n'
    + '\n'.join(f'  checkpoint_{step}: {reason}' for step, reason in reasons.items()),
    fix='Set another MODEL_DIR to start anew, or move these folders away.',
    parameters=('MODEL_DIR',),
  )


def check_same_model(
  folder: AnyPath, step: int, manifest: Mapping[str, Any], *, target: Any
) -> None:
  """Raises CheckpointError with the arrays in which `manifest` and `target` differ, if any do."""
  different = differences(manifest, target)
  if different and not any(name.startswith('opt_state/') for name in manifest['arrays']):
    raise CheckpointError(
      f'{checkpoint_path(folder, step)} holds parameters only, as a converted checkpoint does: '
      'no run has written it that could go on.',
      fix='Set another MODEL_DIR, and start from this one: train.initialize_from =\n'
      f'@initialize.RestoreConfig() with RestoreConfig.path = {str(folder)!r}.',
      parameters=('MODEL_DIR',),
      docs='finetune.md#what-a-run-starts-from',
    )
  if different:
    raise CheckpointError(
      f'{checkpoint_path(folder, step)} holds another model or optimizer:\n  '
      + '\n  '.join(different),
      fix='Set another MODEL_DIR for this model, or go back to the configuration of '
      f'{folder / "config.gin"}. Nothing was overwritten.',
      parameters=('MODEL_DIR',),
    )


def check_writable(folder: AnyPath) -> None:
  """Makes `folder` if needed; raises CheckpointError unless files can be made in it."""
  probe = folder / f'.write_test_{os.getpid()}'
  try:
    folder.mkdir(parents=True, exist_ok=True)
    probe.write_bytes(b'ok')
    probe.unlink()
  except OSError as e:
    raise CheckpointError(
      f'MODEL_DIR = {str(folder)!r} cannot be written to: {e.strerror or e}.',
      fix='Set MODEL_DIR to a folder of yours with free space (--gin.MODEL_DIR=runs/my_run).',
      parameters=('MODEL_DIR',),
    ) from e
