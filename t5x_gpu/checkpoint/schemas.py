"""Schemas of the JSON files of checkpoints and local checkpoints (see `config.json_schema`).

After reading a file through a schema, code can rely on its values: shapes are lists of whole
numbers whose product fits into memory addresses, dtypes exist, and references between names are
valid.
"""

import base64
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from t5x_gpu.config.json_schema import Also, Fields, ListOf, MapOf, Nullable, Text, Whole

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


def _unstacked_problem(manifest: Mapping[str, Any]) -> str:
  for name in manifest.get('unstacked', ()):
    shape = manifest['arrays'].get(name, [[]])[0]
    if not shape or shape[0] > _MOST_LAYERS or not re.fullmatch('(.*/)?layers/.*', name):
      return f'{name!r} of "unstacked" is not an array with a number of layers'
  return ''


def _tree_problem(tree: Mapping[str, Any]) -> str:
  wrong = [key for key in tree if not _TREE_KEY.fullmatch(key)]
  return f'{wrong[0]!r} is not a place in a tree' if wrong else ''


def _chunk_problem(array: Mapping[str, Any]) -> str:
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

# checkpoint_<step>/manifest/metadata, written by checkpoint/manifest.py and its callers.
MANIFEST = Also(
  Fields(
    {
      'arrays': MapOf((SHAPE, DTYPE)),
      'next_batch_hash': str,
      'data': Fields({}, optional={'libraries': MapOf(str)}),
    },
    optional={
      'format': Whole(),
      'mesh': MapOf(Whole()),
      'num_processes': Whole(),
      'versions': MapOf(str),
      'written': str,
      'seal': str,
      'params_only': bool,
      'without_data': bool,
      'metrics': Nullable(MapOf(float)),
      'grad_norms': ListOf(float),
      'started_from': Nullable(dict),
      'converted_from': dict,
      'resharded_from': dict,
      'promoted_from': dict,
      'unstacked': ListOf(str),
      'checksums': Nullable(Fields({'method': str, 'arrays': MapOf(str)})),
    },
  ),
  _unstacked_problem,
)
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
# The header of a local checkpoint's file: a part is name, start, shape, dtype, checksum, offset.
LOCAL_FILE = Fields(
  {
    'format': Whole(),
    'facts': dict,
    'parts': ListOf((str, ListOf(Whole()), SHAPE, DTYPE, CHECKSUM, Whole())),
  }
)
LOCAL_FACTS = Fields(
  {
    'run': str,
    'attempt': str,
    'step': Whole(),
    'process': Whole(),
    'hosts': ListOf(str),
    'data_state': BASE64,
    'manifest': MANIFEST,
  }
)
