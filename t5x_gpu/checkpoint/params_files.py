"""Parameters alone, in our checkpoints: read and written in slices, by any number of pieces.

The files are Orbax's (zarr arrays in one OCDBT store), so whatever reads a checkpoint of a run
reads these; written here is only what a converter has: parameters and step, no optimizer state.
"""

import functools
import json
import math
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Self

import flax.traverse_util
import jax
import numpy as np
import tensorstore as ts

from t5x_gpu.checkpoint.manifest import make_manifest
from t5x_gpu.checkpoint.name_tables import PIECE_BYTES
from t5x_gpu.checkpoint.model_dir import (
    UNREADABLE, checkpoint_path, committed_steps, read_saved, why)
from t5x_gpu.errors import CheckpointError, did_you_mean

FLUSH_BYTES = 32 << 20  # written at once: some large files rather than one per layer
# For float32 that was bfloat16: 2.1 times the speed of Orbax's zstd, and 4% smaller.
COMPRESSOR = {'id': 'blosc', 'cname': 'lz4', 'clevel': 1, 'shuffle': 1}
PARAMS_ONLY = 'params_only'
_HANDLERS = 'orbax.checkpoint._src.handlers.'

Place = tuple[slice | int, ...]


class ParamsReader:
  """The parameters of a checkpoint; see `name_tables.Tensors` for the attributes.

  Args:
    model_dir: MODEL_DIR, or the folder of one checkpoint.
    step: which checkpoint; None for the latest.
  Attributes:
    path: folder of the checkpoint.
    step: of the checkpoint.
    manifest: what it says of itself.
    shapes: '/'-joined path -> shape.
  Raises:
    CheckpointError: none there, or it cannot be read.
  """

  def __init__(self, model_dir: str | os.PathLike, *, step: Optional[int] = None):
    folder = pathlib.Path(model_dir).absolute()
    if folder.name.startswith('checkpoint_') and (folder / 'manifest').exists():
      folder, step = folder.parent, int(folder.name.removeprefix('checkpoint_'))
    steps = committed_steps(folder)
    if not steps or step not in (None, *steps):
      raise CheckpointError(
          f'{folder} has no checkpoint' + ('.' if step is None else f' of step {step}.'),
          fix=f'Its steps are {", ".join(map(str, steps))}.' if steps else
          'Give the MODEL_DIR of a run, which has checkpoint_<step> in it.')
    self.step = steps[-1] if step is None else step
    self.path = checkpoint_path(folder, self.step)
    try:
      self.manifest: Mapping[str, Any] = read_saved(folder, self.step).manifest
    except UNREADABLE as e:
      raise CheckpointError(f'{self.path} cannot be read ({why(e)}).',
                            fix='Take an earlier checkpoint: --step names one.') from e
    arrays = {name.removeprefix('params/'): value for name, value in self.manifest['arrays'].items()
              if name.startswith('params/')}
    self.shapes = {name: tuple(shape) for name, (shape, _) in arrays.items()}
    self.dtypes = {name: np.dtype(dtype) for name, (_, dtype) in arrays.items()}
    # A run writes what a device holds as one chunk: several layers, which are asked for in turn.
    largest = max(map(self._chunk_bytes, self.shapes), default=0)
    self._context = ts.Context({'cache_pool': {'total_bytes_limit': (
        4 * largest if largest > PIECE_BYTES else 0)}})  # query, key and value may come together

  @functools.cache
  def _open(self, path: str) -> ts.TensorStore:
    return self._opened(path, self._context)

  def _opened(self, path: str, context: Optional[ts.Context] = None) -> ts.TensorStore:
    return ts.open(_spec(self.path / 'state', f'params/{path}'), open=True, read=True,
                   context=context).result()

  def _chunk_bytes(self, path: str) -> int:
    chunk = self._opened(path).chunk_layout.read_chunk.shape
    return math.prod(chunk) * self.dtypes[path].itemsize

  def read_at(self, path: str, place: Place) -> np.ndarray:
    """Returns a part of a parameter."""
    return self._open(path)[place].read().result()

  def read(self, path: str, start: int = 0, stop: Optional[int] = None) -> np.ndarray:
    """Returns rows `start` to `stop` of a parameter."""
    return self.read_at(path, (slice(start, self.shapes[path][0] if stop is None else stop),))


def read_params(model_dir: str | os.PathLike, abstract_params: Any, *,
                step: Optional[int] = None) -> Any:
  """Returns the parameters of a checkpoint on the devices of `abstract_params`.

  Each process reads the parts that its devices hold. The checkpoint may be a converted one, which
  has parameters alone, or one of a run.

  Args:
    model_dir: MODEL_DIR, or the folder of one checkpoint.
    abstract_params: tree of ShapeDtypeStructs with shardings (`Program.abstract_state.params`);
      layers in the order of the model (`Program.in_run_order` comes after).
    step: which checkpoint; None for the latest.
  Raises:
    CheckpointError: no such checkpoint, or other parameters than those asked for, all of them.
  """
  reader = ParamsReader(model_dir, step=step)
  want = flax.traverse_util.flatten_dict(abstract_params, sep='/')
  problems = tree_problems({name: a.shape for name, a in want.items()}, reader.shapes,
                           wanted_by='the model', had_by='the checkpoint')
  if problems:
    raise CheckpointError(f'{reader.path} holds other parameters than this model has:\n  '
                          + '\n  '.join(problems),
                          fix='Take the model file that belongs to the checkpoint.',
                          parameters=('MODEL_DIR',))

  def placed(name: str, a: jax.ShapeDtypeStruct) -> jax.Array:
    if a.sharding is None:
      return jax.numpy.asarray(reader.read_at(name, ()), a.dtype)
    return jax.make_array_from_callback(
        a.shape, a.sharding, lambda place: reader.read_at(name, place).astype(a.dtype, copy=False))
  return flax.traverse_util.unflatten_dict({n: placed(n, a) for n, a in want.items()}, sep='/')


def tree_problems(want: Mapping[str, Sequence[int]], have: Mapping[str, Sequence[int]], *,
                  wanted_by: str, had_by: str, limit: int = 8) -> list[str]:
  """Returns a line per tensor that is missing (with the closest names), left over or of another
  shape, at most `limit` of each kind; [] if both are the same.
  """
  over = sorted(have.keys() - want.keys())
  missing = [f'missing: {n} {list(want[n])}.{did_you_mean(n, over, limit=2)}'
             for n in sorted(want.keys() - have.keys())]
  left_over = [f'left over: {n} {list(have[n])}.' for n in over]
  changed = [f'{n}: {list(have[n])} in {had_by}, {list(want[n])} in {wanted_by}.'
             for n in sorted(want.keys() & have.keys()) if tuple(want[n]) != tuple(have[n])]
  return [line for kind in (changed, missing, left_over) for line in
          kind[:limit] + ([f'... and {len(kind) - limit} more.'] if len(kind) > limit else [])]


class ParamsWriter:
  """Writes `folder`/checkpoint_<step> with parameters alone; all of it is there after `close`.

  Args:
    folder: exists; of the checkpoint's parent.
    step: updates done.
    shapes: '/'-joined path -> shape, all float32.
    chunks: the same -> shape of a chunk, which `write` should fill.
    about: JSON-ready, for the manifest: where the parameters come from.
    compress: worth it where values were narrower than float32, and are half zeros.
  """

  def __init__(self, folder: pathlib.Path, *, step: int, shapes: Mapping[str, tuple[int, ...]],
               chunks: Mapping[str, tuple[int, ...]], about: Mapping[str, Any], compress: bool):
    self._path = checkpoint_path(folder, step)
    self._shapes, self._about, self._step = dict(shapes), dict(about), step
    self._compress = compress
    self._state = self._path / 'state'
    self._state.mkdir(parents=True)
    self._pending, self._writing = 0, None
    self._context = ts.Context({'cache_pool': {'total_bytes_limit': 0}})
    self._transaction = ts.Transaction()
    self._arrays = {name: self._create(f'params/{name}', shape, np.float32, chunks[name])
                    for name, shape in self._shapes.items()}
    self._arrays['step'] = self._create('step', (), np.int32, ())
    self._flush()
    self._wait()
    self.write('step', (), np.asarray(step, np.int32))

  def _create(self, path: str, shape: tuple[int, ...], dtype: Any,
              chunk: tuple[int, ...]) -> ts.TensorStore:
    metadata = {'shape': list(shape), 'chunks': list(chunk),
                'compressor': COMPRESSOR if self._compress else None}
    return ts.open({**_spec(self._state, path), 'metadata': metadata}, create=True, dtype=dtype,
                   context=self._context, transaction=self._transaction).result()

  def write(self, path: str, place: Place, value: np.ndarray) -> None:
    """Writes a part of a parameter; each element is to be written once."""
    self._arrays[path].with_transaction(self._transaction)[place] = value
    self._pending += value.nbytes
    if self._pending >= FLUSH_BYTES:
      self._flush()

  def _flush(self) -> None:
    """Starts to write what is pending, once what came before is written."""
    self._wait()
    self._writing = self._transaction.commit_async()
    self._transaction, self._pending = ts.Transaction(), 0

  def _wait(self) -> None:
    if self._writing is not None:
      self._writing.result()
      self._writing = None

  def close(self) -> None:
    """Writes what is pending, and what the checkpoint says of itself."""
    self._flush()
    self._wait()
    tree = {'step': jax.ShapeDtypeStruct((), np.int32), 'params': flax.traverse_util.unflatten_dict(
        {n: jax.ShapeDtypeStruct(s, np.float32) for n, s in self._shapes.items()}, sep='/')}
    names = {'step': (), **{f'params/{n}': s for n, s in self._shapes.items()}}
    _write_json(self._state / '_METADATA', {
        'tree_metadata': {str(tuple(n.split('/'))): _leaf_metadata(n, s) for n, s in names.items()},
        'use_ocdbt': True, 'use_zarr3': False, 'store_array_data_equal_to_fill_value': True,
        'custom_metadata': None})
    _write_json(self._path / 'data' / 'metadata', {'iterator': ''})
    _write_json(self._path / 'manifest' / 'metadata', {
        **make_manifest(tree, mesh_shape={}, data={}, next_batch_hash=''), PARAMS_ONLY: True,
        'converted_from': self._about})
    now = time.time_ns()
    _write_json(self._path / '_CHECKPOINT_METADATA', {
        'item_handlers': {
            'data': f'{_HANDLERS}json_checkpoint_handler.JsonCheckpointHandler',
            'manifest': f'{_HANDLERS}json_checkpoint_handler.JsonCheckpointHandler',
            'state': f'{_HANDLERS}standard_checkpoint_handler.StandardCheckpointHandler'},
        'metrics': {}, 'performance_metrics': {}, 'init_timestamp_nsecs': now,
        'commit_timestamp_nsecs': now, 'custom_metadata': {}})

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: Any) -> None:
    if error[0] is None:
      self.close()


def _spec(state: pathlib.Path, path: str) -> dict[str, Any]:
  return {'driver': 'zarr', 'kvstore': {'driver': 'ocdbt', 'base': f'file://{state}/',
                                        'path': path.replace('/', '.') + '/'}}


def _leaf_metadata(path: str, shape: Sequence[int]) -> dict[str, Any]:
  return {'key_metadata': [{'key': key, 'key_type': 2} for key in path.split('/')],
          'value_metadata': {'value_type': 'jax.Array', 'skip_deserialize': False,
                             'write_shape': list(shape)}}


def _write_json(path: pathlib.Path, value: Any) -> None:
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(value), 'utf-8')


def num_bytes(shapes: Mapping[str, Sequence[int]]) -> int:
  """Returns the bytes of float32 arrays of these shapes."""
  return sum(4 * math.prod(shape) for shape in shapes.values())
