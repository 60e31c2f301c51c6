"""What a checkpoint says of itself: arrays, mesh, data, versions. Read before any array is.

Orbax's own mismatch errors name no parameter, and a wrong dtype is cast in silence; here a model
that is not the checkpoint's is refused with the list of what differs.
"""

import datetime
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import jax

from t5x_gpu.errors import did_you_mean

FORMAT = 1
PACKAGES = ('t5x_gpu', 'jax', 'flax', 'optax', 'orbax-checkpoint')
_SHOWN = 8


def describe_arrays(tree: Any) -> dict[str, list[Any]]:
  """Returns 'params/decoder_norm/scale' -> [shape, dtype] of every array in `tree`."""
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator='/'): [list(x.shape), str(x.dtype)]
          for path, x in flat}


def make_manifest(state: Any, *, mesh_shape: Mapping[str, int], data: Mapping[str, Any],
                  next_batch_hash: str) -> dict[str, Any]:
  """Returns the JSON-ready manifest of `state` as it is saved now.

  Args:
    state: the TrainState.
    mesh_shape: sizes of the mesh that wrote it; information only, never a demand on the restore.
    data: `BatchIterator.describe()` of the training data.
    next_batch_hash: `batch_hash` of the batch that the next step will take.
  """
  return {'format': FORMAT, 'arrays': describe_arrays(state), 'mesh': dict(mesh_shape),
          'num_processes': jax.process_count(), 'data': dict(data),
          'next_batch_hash': next_batch_hash, 'versions': _versions(),
          'written': datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds')}


def _versions() -> dict[str, str]:
  versions = {}
  for package in PACKAGES:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      versions[package] = 'not installed'  # run from a source tree
  return versions


def differences(manifest: Mapping[str, Any], target: Any) -> list[str]:
  """Returns how the arrays of a manifest differ from those of `target`, in words; [] if equal."""
  have, want = manifest['arrays'], describe_arrays(target)
  lines = []
  for name in sorted(want.keys() - have.keys()):
    lines.append(f'{name} {_text(want[name])}: not in the checkpoint.'
                 + did_you_mean(name, have.keys() - want.keys(), limit=1))
  for name in sorted(have.keys() - want.keys()):
    lines.append(f'{name} {_text(have[name])}: in the checkpoint, not in the model.')
  for name in sorted(have.keys() & want.keys()):
    if have[name] != want[name]:
      lines.append(f'{name}: {_text(have[name])} in the checkpoint, {_text(want[name])} in the '
                   'model.')
  if len(lines) > _SHOWN:
    lines = lines[:_SHOWN] + [f'... and {len(lines) - _SHOWN} more.']
  return lines


def _text(array: list[Any]) -> str:
  shape, dtype = array
  return f'{dtype}[{", ".join(map(str, shape))}]'
