"""The manifest of a checkpoint: arrays, mesh, data, versions. It is read before any array.

Orbax's mismatch errors do not name the parameter, and Orbax casts a wrong dtype silently. Here, if
the model differs from the checkpoint, an error lists the differences.
"""

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import jax

from t5x_gpu.errors import did_you_mean, listed
from t5x_gpu.runtime import host
from t5x_gpu.training.train_state import TrainState

FORMAT = 1
PACKAGES = ('t5x_gpu', 'jax', 'flax', 'optax', 'orbax-checkpoint')
STARTED_FROM = 'started_from'
GRAD_NORMS = 'grad_norms'
WITHOUT_DATA = 'without_data'  # a converted checkpoint with optimizer state, but no data position
SEAL = 'seal'
_SHOWN = 5
_OPTIMIZER, _HISTORY = 'opt_state/', 'fp8_history/'


def describe_arrays(tree: Any) -> dict[str, list[Any]]:
  """Returns 'params/decoder_norm/scale' -> [shape, dtype] of every array in `tree`."""
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): [list(x.shape), str(x.dtype)]
    for path, x in flat
  }


def make_manifest(
  state: Any,
  *,
  mesh_shape: Mapping[str, int],
  data: Mapping[str, Any],
  next_batch_hash: str,
  started_from: Optional[Mapping[str, Any]] = None,
  metrics: Optional[Mapping[str, float]] = None,
  grad_norms: Sequence[float] = (),
) -> dict[str, Any]:
  """Returns the JSON-ready manifest for saving `state` now.

  Args:
    state: the TrainState.
    mesh_shape: sizes of the current mesh; for information, no restore depends on it.
    data: `BatchIterator.describe()` of the training data.
    next_batch_hash: `batch_hash` of the batch of the next step.
    started_from: where the run's first parameters came from (checkpoint/initialize.py); None for
      random initialization.
    metrics: name -> value of the evaluation metrics at this step; None without an evaluation.
    grad_norms: gradient norms of the last steps, oldest first, if the run checks for spikes
      (guards/spikes.py).
  """
  return {
    'format': FORMAT,
    'arrays': describe_arrays(state),
    'mesh': dict(mesh_shape),
    'num_processes': jax.process_count(),
    'data': dict(data),
    'next_batch_hash': next_batch_hash,
    'versions': dict.fromkeys(PACKAGES, 'not installed') | host.versions(PACKAGES),
    STARTED_FROM: None if started_from is None else dict(started_from),
    'metrics': None if metrics is None else dict(metrics),
    **({GRAD_NORMS: list(grad_norms)} if grad_norms else {}),
    'written': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
  }


def sealed(manifest: Mapping[str, Any], *, data: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the manifest with a digest of itself and of the data state.

  Without a digest, a flipped bit in the text would look like different data or another model.
  """
  return {**manifest, SEAL: _digest(manifest, data)}


def check_seal(manifest: Mapping[str, Any], *, data: Mapping[str, Any]) -> None:
  """Raises ValueError if manifest or data state has changed; older manifests have no seal."""
  if SEAL in manifest and manifest[SEAL] != _digest(manifest, data):
    raise ValueError('the manifest or the data state has changed (its digest differs)')


def _digest(manifest: Mapping[str, Any], data: Mapping[str, Any]) -> str:
  content = {'manifest': {k: v for k, v in manifest.items() if k != SEAL}, 'data': data}
  as_read = json.loads(json.dumps(content))  # numeric keys become text
  return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def differences(manifest: Mapping[str, Any], target: Any) -> list[str]:
  """Returns sentences on how the arrays of a manifest differ from `target`; [] if equal.

  If parameters differ, lists them and only counts the differences of the optimizer state. An FP8
  history may differ: see `known_part`.
  """
  have, want = (
    {name: array for name, array in arrays.items() if not name.startswith(_HISTORY)}
    for arrays in (manifest['arrays'], describe_arrays(target))
  )
  all_names = sorted(have.keys() | want.keys())
  optimizer = [n for n in all_names if n.startswith(_OPTIMIZER)]
  lines = _differing(have, want, [n for n in all_names if not n.startswith(_OPTIMIZER)])
  if lines:
    others = len(_differing(have, want, optimizer, limit=None))
    return lines + ([f'{others} arrays of the optimizer state differ as well.'] if others else [])
  lines = _differing(have, want, optimizer)
  if lines and _factored(have) and _factored(want):
    lines.append(
      'Adafactor.layers and Adafactor.min_dim_size_to_factor decide which moments are factored. '
      '--gin.Adafactor.layers="\'joined_heads\'" continues checkpoints older than `layers`; '
      'a run without the setting takes it from its checkpoint.'
    )
  return ['The parameters are the same, the optimizer state is not:'] + lines if lines else []


def moments_differ(manifest: Mapping[str, Any], target: Any) -> bool:
  """Returns whether only Adafactor's moments differ between manifest and `target`."""
  have, want = manifest['arrays'], describe_arrays(target)
  different = {n for n in have.keys() | want.keys() if have.get(n) != want.get(n)}
  different = {n for n in different if not n.startswith(_HISTORY)}
  return bool(different) and _factored(have) and all(n.startswith(_OPTIMIZER) for n in different)


def _factored(arrays: Mapping[str, Any]) -> bool:
  """Returns whether the arrays include second moments of Adafactor."""
  return any(n.startswith(_OPTIMIZER) and n.endswith(('/full', '/row')) for n in arrays)


def known_part(manifest: Mapping[str, Any], target: TrainState) -> TrainState:
  """Returns `target`, without its FP8 history if the checkpoint has a different FP8 history."""
  want = describe_arrays({_HISTORY[:-1]: target.fp8_history})
  have = manifest['arrays']
  return target if want.items() <= have.items() else target.replace(fp8_history={})


def _differing(
  have: Mapping[str, Any],
  want: Mapping[str, Any],
  names: list[str],
  *,
  limit: Optional[int] = _SHOWN,
) -> list[str]:
  """Returns a line per name that differs: at most `limit` lines of each kind, then a count."""
  missing = [
    f'{n} {_text(want[n])}: not in the checkpoint.'
    + (
      ''
      if n.startswith(_OPTIMIZER)
      # moments are named like their parameters
      else did_you_mean(n, have.keys() - want.keys(), limit=1)
    )
    for n in names
    if n not in have
  ]
  left_over = [
    f'{n} {_text(have[n])}: in the checkpoint, not in the model.' for n in names if n not in want
  ]
  changed = [
    f'{n}: {_text(have[n])} in the checkpoint, {_text(want[n])} in the model.'
    for n in names
    if n in have and n in want and have[n] != want[n]
  ]
  if limit is None:
    return changed + missing + left_over
  return [line for kind in (changed, missing, left_over) for line in listed(kind, limit)]


def _text(array: list[Any]) -> str:
  shape, dtype = array
  return f'{dtype}[{", ".join(map(str, shape))}]'
