"""The manifest of a checkpoint (arrays, mesh, data, versions), which is read before any array.

Orbax's mismatch errors do not name the parameter, and Orbax casts a wrong dtype silently. Here, if
the model differs from the checkpoint, `differences` lists what differs. The schemas check the JSON
files of checkpoints and local checkpoints, so that code can rely on their values.
"""

import base64
import datetime
import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, NotRequired, Optional, TypedDict

import jax
import jax.numpy as jnp

from t5x_gpu.errors import did_you_mean, listed
from t5x_gpu.partitioning.trees import Tree, by_name
from t5x_gpu.runtime import machine
from t5x_gpu.storage.json_schema import Also, Fields, Json, ListOf, MapOf, Text, Whole, schema_of

FORMAT = 1
PACKAGES = ('t5x_gpu', 'jax', 'flax', 'optax', 'orbax-checkpoint')
ArrayFacts = list[list[int] | str]  # [shape, dtype]
STARTED_FROM = 'started_from'
GRAD_NORMS = 'grad_norms'
WITHOUT_DATA = 'without_data'  # a converted checkpoint with optimizer state, but no data position
SEAL = 'seal'
_SHOWN = 5
_OPTIMIZER, _HISTORY = 'opt_state/', 'fp8_history/'

# Through these schemas, shapes are lists of whole numbers whose product fits into memory addresses,
# dtypes exist, and references between names are valid.
_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 2**58  # so that byte counts of any dtype fit into 63 bits
_MOST_CHUNK_ELEMENTS = 2**28  # for an array that is smaller than its chunk
_MOST_LAYERS = 10_000


def _too_large(shape: Sequence[int]) -> str:
  # Ignores sizes of zero: NumPy refuses such a shape, too.
  return '' if math.prod(max(n, 1) for n in shape) <= _MOST_ELEMENTS else 'it is too large'


@functools.cache
def _dtype_problem(name: str) -> str:
  try:
    dtype = jnp.dtype(name)
  except TypeError:
    return 'the dtype is unknown'
  return '' if str(dtype) == name and dtype.kind in 'biufcV' else 'arrays do not support this dtype'


def _base64_problem(text: str) -> str:
  try:
    base64.b64decode(text, validate=True)
  except ValueError as e:
    return str(e)
  return ''


def _tree_problem(tree: Json) -> str:
  wrong = [key for key in tree if not _TREE_KEY.fullmatch(key)]
  return f'{wrong[0]!r} is not a place in a tree' if wrong else ''


def _chunk_problem(array: Json) -> str:
  chunks, shape = array['chunks'], array['shape']
  if len(chunks) != len(shape) or min(chunks, default=1) < 1:
    return 'its chunks do not fit its shape'
  # The last chunk along an axis may reach beyond the array, and a small array may have one chunk.
  largest = max(math.prod(shape), _MOST_CHUNK_ELEMENTS)
  return '' if math.prod(chunks) <= largest else 'its chunks are larger than the array'


_TREE_KEY_PART = r"""('[^'\\]*'|"[^"\\]*"|\d+)"""
_TREE_KEY = re.compile(rf'\(({_TREE_KEY_PART}, )*{_TREE_KEY_PART}?,?\)')

SHAPE = Also(ListOf(Whole(), most=_MOST_DIMENSIONS), _too_large)
DTYPE = Also(Text('[a-z][a-z0-9_]{2,20}'), _dtype_problem)
CHECKSUM = Text('[0-9a-f]{16}')
BASE64 = Also(str, _base64_problem)


class Checksums(TypedDict):
  """Checksums of arrays; see checkpoint/arrays.py."""

  method: str
  arrays: Mapping[str, str]


class DataFacts(TypedDict):
  """`BatchIterator.describe()` of the training data."""

  libraries: NotRequired[Mapping[str, str]]


class Manifest(TypedDict):
  """Content of checkpoint_<step>/manifest/metadata.

  Attributes:
    arrays: '/'-joined path -> [shape, dtype].
    next_batch_hash: `batch_hash` of the batch of the next step; '' if unknown.
    data: facts about the training data; {} without.
    mesh: sizes of the mesh that wrote it; no restore depends on it.
    seal: digest of the rest, see `sealed`.
    params_only, without_data: a converted checkpoint: parameters and step, or with
      optimizer state.
    metrics: evaluation metrics at this step; None without an evaluation, {} if a stop signal ended
      the evaluation, which the next start repeats.
    grad_norms: gradient norms of the last steps, oldest first.
    started_from, converted_from, resharded_from, promoted_from: where the arrays came from.
    unstacked: arrays that the files have once per layer (checkpoint/store.py).
  """

  arrays: Mapping[str, tuple[Annotated[Sequence[int], SHAPE], Annotated[str, DTYPE]]]
  next_batch_hash: str
  data: DataFacts
  format: NotRequired[int]
  mesh: NotRequired[Mapping[str, int]]
  num_processes: NotRequired[int]
  versions: NotRequired[Mapping[str, str]]
  written: NotRequired[str]
  seal: NotRequired[str]
  params_only: NotRequired[bool]
  without_data: NotRequired[bool]
  metrics: NotRequired[Optional[Mapping[str, float]]]
  grad_norms: NotRequired[Sequence[float]]
  started_from: NotRequired[Optional[Json]]
  converted_from: NotRequired[Json]
  resharded_from: NotRequired[Json]
  promoted_from: NotRequired[Json]
  unstacked: NotRequired[Sequence[str]]
  checksums: NotRequired[Optional[Checksums]]


def _unstacked_problem(manifest: Manifest) -> str:
  for name in manifest.get('unstacked', ()):
    shape = manifest['arrays'].get(name, [[]])[0]
    if not shape or shape[0] > _MOST_LAYERS or not re.fullmatch('(.*/)?layers/.*', name):
      return f'{name!r} of "unstacked" is not an array with a number of layers'
  return ''


MANIFEST = Also(schema_of(Manifest), _unstacked_problem)
# checkpoint_<step>/data/metadata
DATA = Fields({'iterator': BASE64})
# checkpoint_<step>/state/_METADATA, which Orbax writes
TREE = Fields(
  {
    'tree_metadata': Also(
      MapOf(Fields({'value_metadata': Fields({'skip_deserialize': bool})})), _tree_problem
    )
  }
)
# .zarray of an array, which TensorStore reads: it ends the process for JSON that is nested too
# deeply, or for a chunk that does not fit into memory.
ZARRAY = Also(
  Fields(
    {'shape': SHAPE, 'chunks': SHAPE, 'dtype': Text('[<>|]?[biufc][0-9]{1,2}|[a-z][a-z0-9_]{2,20}')}
  ),
  _chunk_problem,
)
ARRAY_METADATA = {'.zarray': ZARRAY, 'zarr.json': dict}


def describe_arrays(tree: Tree) -> dict[str, ArrayFacts]:
  """Returns 'params/decoder_norm/scale' -> [shape, dtype] of every array in `tree`."""
  return {name: [list(x.shape), str(x.dtype)] for name, x in by_name(tree).items()}


def make_manifest(
  state: Tree,
  *,
  mesh_shape: Mapping[str, int],
  data: Json,
  next_batch_hash: str,
  started_from: Optional[Json] = None,
  metrics: Optional[Mapping[str, float]] = None,
  grad_norms: Sequence[float] = (),
) -> Manifest:
  """Returns the JSON-ready manifest for saving `state` now.

  Args:
    state: the TrainState.
    mesh_shape: sizes of the current mesh; for information, no restore depends on it.
    data: `BatchIterator.describe()` of the training data.
    next_batch_hash: `batch_hash` of the batch of the next step.
    started_from: where the run's first parameters came from (checkpoint/initialize.py); None for
      random initialization.
    metrics: name -> value of the evaluation metrics at this step, as in `Manifest`.
    grad_norms: gradient norms of the last steps, oldest first, if the run checks for spikes
      (training/spikes.py).
  """
  return {
    'format': FORMAT,
    'arrays': describe_arrays(state),
    'mesh': dict(mesh_shape),
    'num_processes': jax.process_count(),
    'data': dict(data),
    'next_batch_hash': next_batch_hash,
    'versions': dict.fromkeys(PACKAGES, 'not installed') | machine.versions(PACKAGES),
    STARTED_FROM: None if started_from is None else dict(started_from),
    'metrics': None if metrics is None else dict(metrics),
    **({GRAD_NORMS: list(grad_norms)} if grad_norms else {}),
    'written': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
  }


def sealed(manifest: Manifest, *, data: Json) -> Manifest:
  """Returns the manifest with a digest of itself and of the data state.

  Without a digest, a flipped bit in the text would look like different data or another model.
  """
  return {**manifest, SEAL: _digest(manifest, data)}


def check_seal(manifest: Manifest, *, data: Json) -> None:
  """Raises ValueError if manifest or data state has changed; older manifests have no seal."""
  if SEAL in manifest and manifest[SEAL] != _digest(manifest, data):
    raise ValueError('the manifest or the data state has changed (its digest differs)')


def _digest(manifest: Manifest, data: Json) -> str:
  content = {'manifest': {k: v for k, v in manifest.items() if k != SEAL}, 'data': data}
  as_read = json.loads(json.dumps(content))  # numeric keys become text
  return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def differences(manifest: Manifest, target: Tree) -> list[str]:
  """Returns sentences on how the arrays of a manifest differ from `target`; [] if equal.

  If parameters differ, lists them and only counts the differences of the optimizer state. An FP8
  history may differ: a restore then leaves it out.
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
  different = [n for n in optimizer if have.get(n) != want.get(n)]
  if lines and all(n.endswith('/momentum') for n in different):
    lines.append('Adafactor.beta1 decides whether there is momentum; None has none.')
  elif lines and _factored(have) and _factored(want):
    lines.append(
      'Adafactor.layers and Adafactor.min_dim_size_to_factor decide which moments are factored. '
      '--gin.Adafactor.layers="\'joined_heads\'" continues checkpoints older than `layers`; '
      'a run without the setting takes it from its checkpoint.'
    )
  return ['The parameters are the same, the optimizer state is not:'] + lines if lines else []


def moments_differ(manifest: Manifest, target: Tree) -> bool:
  """Returns whether only Adafactor's moments differ between manifest and `target`."""
  have, want = manifest['arrays'], describe_arrays(target)
  different = {n for n in have.keys() | want.keys() if have.get(n) != want.get(n)}
  different = {n for n in different if not n.startswith(_HISTORY)}
  return bool(different) and _factored(have) and all(n.startswith(_OPTIMIZER) for n in different)


def _factored(arrays: Json) -> bool:
  """Returns whether the arrays include second moments of Adafactor."""
  return any(n.startswith(_OPTIMIZER) and n.endswith(('/full', '/row')) for n in arrays)


def _differing(
  have: Json, want: Json, names: list[str], *, limit: Optional[int] = _SHOWN
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


def _text(array: ArrayFacts) -> str:
  shape, dtype = array
  return f'{dtype}[{", ".join(map(str, shape))}]'
