"""The arrays of a checkpoint, read and written in slices, with only a few pieces in memory.

The files are in Orbax's format (zarr arrays in one OCDBT store): Orbax restores what `StateWriter`
writes. Readers see layers as one array with a leading axis, even if the files have an array per
layer (`layers_0`, `layers_1`): the manifest lists such arrays under 'unstacked'.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Optional, TypeVar, Union

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from t5x_gpu.checkpoint.arrays import HostSums, boxes, checksums_in, piece_shape
from t5x_gpu.checkpoint.manifest import Manifest, sealed
from t5x_gpu.checkpoint.model_dir import (
  PREFIX,
  UNREADABLE,
  CheckpointMetadata,
  ModelDir,
  as_model_dir,
  check_written,
  checkpoint_path,
  error_line,
  is_link,
)
from t5x_gpu.errors import AccessError, CheckpointError
from t5x_gpu.partitioning.trees import Shape, Tree, by_name
from t5x_gpu.storage.json_schema import Json
from t5x_gpu.storage.paths import (
  AnyPath,
  RemotePath,
  access_errors,
  context,
  is_outage,
  is_remote,
  kvstore_spec,
  reason_of,
  storage_error,
)

UNSTACKED = 'unstacked'
STACK = 'layers'
_READS = 8  # arrays that are read at the same time
PIECE_BYTES = 32 << 20  # read at once; larger chunks are cached for the next piece
OF_TENSORSTORE = 'ocdbt.process_'  # folders of a process's arrays, which TensorStore syncs

Place = tuple[slice | int, ...]
_Result = TypeVar('_Result')


@dataclasses.dataclass(frozen=True)
class CheckpointAddress:
  """One checkpoint of an open MODEL_DIR, which lists the steps and reads the metadata once.

  Attributes:
    model_dir: the open MODEL_DIR.
    step: step of the checkpoint.
  """

  model_dir: ModelDir
  step: int

  @property
  def path(self) -> AnyPath:
    """The folder of the checkpoint."""
    return self.model_dir.checkpoint(self.step)

  @property
  def metadata(self) -> CheckpointMetadata:
    """Its metadata; see `ModelDir.metadata`."""
    return self.model_dir.metadata(self.step)

  @property
  def is_deleted(self) -> bool:
    """Whether the run has deleted it by now, because it has newer ones."""
    return self.step not in ModelDir(self.model_dir.path).steps  # a new one lists them again


# A checkpoint, or where to look for one: MODEL_DIR or the folder of one checkpoint.
Source = Union[CheckpointAddress, ModelDir, str, os.PathLike, AnyPath]


def find_checkpoint(
  path: ModelDir | str | os.PathLike | AnyPath, *, step: Optional[int] = None
) -> CheckpointAddress:
  """Returns a checkpoint; its `model_dir` is `path` if that is an open MODEL_DIR.

  Args:
    path: MODEL_DIR, or the folder of one checkpoint.
    step: step of the checkpoint; None for the latest.
  Raises:
    CheckpointError: no checkpoint exists, or `path` is the checkpoint of another step.
  """
  model_dir = as_model_dir(path)
  folder = model_dir.path
  named = _checkpoint_in(model_dir)
  if named is not None:
    if step not in (None, named.step):
      raise CheckpointError(
        f'{folder} is the checkpoint of step {named.step}, not of step {step}.',
        fix=f'Give its MODEL_DIR, {folder.parent}, or leave the step out.',
        parameters=('MODEL_DIR',),
      )
    return named
  steps = model_dir.steps
  if not steps or step not in (None, *steps):
    raise CheckpointError(
      f'{folder} does not exist.'
      if not model_dir.is_remote and not folder.exists()
      else f'{folder} has no checkpoint' + ('.' if step is None else f' of step {step}.'),
      fix=f'Its steps are {", ".join(map(str, steps))}.'
      if steps
      else 'Give the MODEL_DIR of a run, which has checkpoint_<step> in it.',
      parameters=('MODEL_DIR',),
    )
  return CheckpointAddress(model_dir, steps[-1] if step is None else step)


def _checkpoint_in(opened: ModelDir) -> Optional[CheckpointAddress]:
  """Returns the checkpoint whose folder is `opened`; None if `opened` is a MODEL_DIR."""
  number = re.fullmatch(rf'{PREFIX}_(\d+)', opened.path.name)
  if not number:
    return None
  found = CheckpointAddress(ModelDir(opened.path.parent), int(number[1]))
  has_manifest = (opened.path / 'manifest').exists()
  if opened.is_remote:
    is_one = has_manifest and found.step in found.model_dir.steps
  else:
    is_folder = opened.path.is_dir()
    is_one = has_manifest or (not opened.steps if is_folder else is_link(opened.path))
  return found if is_one else None


class StateReader:
  """The arrays of a checkpoint.

  Args:
    source: the checkpoint, or where `find_checkpoint` finds it.
    step: step of the checkpoint; None for the latest.
    prefix: reads only arrays whose names start with this, e.g. 'params/', and strips it.
    cache_bytes: cache size for chunks that are read in parts; None to fit the largest chunks.
    step_setting: how the user selects another step, for errors: '--step'.
  Attributes:
    checkpoint: the checkpoint that was found.
    path, step: folder and step of the checkpoint.
    metadata, manifest: metadata of the checkpoint.
    shapes, dtypes: '/'-joined path -> shape, dtype.
  Raises:
    CheckpointError: no checkpoint exists, or it cannot be read.
    AccessError: the checkpoint cannot be opened, or was deleted; all methods raise this too.
  """

  def __init__(
    self,
    source: Source,
    *,
    step: Optional[int] = None,
    prefix: str = '',
    cache_bytes: Optional[int] = None,
    step_setting: str = '',
  ):
    is_found = isinstance(source, CheckpointAddress)
    self.checkpoint = source if is_found else find_checkpoint(source, step=step)
    self.path, self.step = self.checkpoint.path, self.checkpoint.step
    self._prefix = prefix
    try:
      with self._reading():
        self.metadata = self.checkpoint.metadata
        self.manifest: Manifest = self.metadata.manifest
        self._describe(cache_bytes)
    except UNREADABLE as e:
      raise CheckpointError(
        f'{self.path} cannot be read ({error_line(e)}).',
        fix='Use an earlier checkpoint'
        + (f': select it with {step_setting}.' if step_setting else ', or copy this one again.'),
        parameters=(step_setting,) if '.' in step_setting else (),
        docs='checkpoints.md#checksums',
      ) from e

  def _describe(self, cache_bytes: Optional[int]) -> None:
    """Sets the attributes from the manifest."""
    prefix = self._prefix
    arrays = {
      name.removeprefix(prefix): value
      for name, value in self.manifest['arrays'].items()
      if name.startswith(prefix)
    }
    self.shapes: dict[str, Shape] = {name: tuple(shape) for name, (shape, _) in arrays.items()}
    self.dtypes = {name: np.dtype(dtype) for name, (_, dtype) in arrays.items()}
    self._unstacked = frozenset(self.manifest.get(UNSTACKED, ()))
    self._index = context()  # for opening arrays without reading chunks
    # A run may write a device's whole shard as one chunk: several layers, which are read in turn.
    if cache_bytes is None:
      largest = max(map(self.chunk_bytes, self.shapes), default=0)
      cache_bytes = 4 * largest if largest > PIECE_BYTES else 0  # query, key and value together
    self._context = context(cache_bytes=cache_bytes)

  @contextlib.contextmanager
  def _reading(self) -> Iterator[None]:
    """As `access_errors`, and for a checkpoint that its run has deleted meanwhile."""
    try:
      with access_errors(self.path):
        yield
    except UNREADABLE as e:
      if not self.checkpoint.is_deleted:
        raise
      raise AccessError(
        f'{self.path} was deleted while it was read.',
        fix='Read a newer one. A run keeps more of them with CheckpointConfig.keep.',
        docs='checkpoints.md',
      ) from e

  def chunk_shape(self, name: str) -> Shape:
    """Returns the shape of the chunks of an array on disk; a chunk is read as a whole."""
    with self._reading():
      array = self._opened(self._parts(name)[0], self._index)
    shape = self.shapes[name][1:] if self._is_unstacked(name) else self.shapes[name]
    if tuple(array.shape) != shape:
      raise ValueError(
        f'{name} has shape {tuple(array.shape)} in its files, {shape} in the manifest'
      )
    chunk = tuple(array.chunk_layout.read_chunk.shape or ())
    return (1, *chunk) if self._is_unstacked(name) else chunk

  def chunk_bytes(self, name: str) -> int:
    return math.prod(self.chunk_shape(name)) * self.dtypes[name].itemsize

  def read_at(self, name: str, place: Place) -> np.ndarray:
    """Returns a part of an array; raises ValueError if it is damaged."""
    with self._reading():
      return self._read_at(name, place)

  def _read_at(self, name: str, place: Place) -> np.ndarray:
    if not self._is_unstacked(name):
      return self._open(self._parts(name)[0])[place].read().result()
    first, rest = (place[0], place[1:]) if place else (slice(None), ())
    parts = self._parts(name)
    if isinstance(first, int):
      return self._open(parts[first])[rest].read().result()
    layers = [self._open(part)[rest].read().result() for part in parts[first]]
    return np.stack(layers) if layers else np.empty((0, *self.shapes[name][1:]), self.dtypes[name])

  def pieces(
    self, name: str, *, most_bytes: int = PIECE_BYTES
  ) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """Yields (slices, values) of the parts of an array, about `most_bytes` each."""
    shape = self.shapes[name]
    piece = piece_shape(
      shape, self.chunk_shape(name), itemsize=self.dtypes[name].itemsize, most_bytes=most_bytes
    )
    for place in boxes(shape, piece):
      yield place, self.read_at(name, place)

  def problem(
    self,
    name: str,
    *,
    advance: Callable[[int], None] = lambda num_bytes: None,
    most_bytes: int = PIECE_BYTES,
  ) -> str:
    """Returns the reason why the values of an array are damaged.

    Returns '' if they match their checksum, or are readable and no checksum was stored.

    Args:
      name: name of the array.
      advance: called with the number of bytes read since the last call.
      most_bytes: maximum number of bytes to read at once.
    """
    want, sums = checksums_in(self.manifest).get(self._prefix + name), HostSums(self.shapes[name])
    try:
      for place, values in self.pieces(name, most_bytes=most_bytes):
        sums.add_at(place, values)
        advance(values.nbytes)
    except (ValueError, OSError) as e:  # from TensorStore: corrupt or missing data
      return f'cannot be read: {error_line(e)}'
    if want is not None and str(sums) != want:
      return f'does not have the values that were saved: its checksum is {sums}, not {want}'
    return ''

  @property
  def num_bytes(self) -> int:
    """Size of all arrays."""
    return sum(self.bytes_of(name) for name in self.shapes)

  def bytes_of(self, name: str) -> int:
    return math.prod(self.shapes[name]) * self.dtypes[name].itemsize

  def _is_unstacked(self, name: str) -> bool:
    return self._prefix + name in self._unstacked

  @functools.cache  # noqa: B019 - a reader lives as long as its command
  def _parts(self, name: str) -> list[str]:
    """Returns the stored array names of one logical array (one per layer if unstacked)."""
    full = self._prefix + name
    return layer_names(full, self.shapes[name][0]) if self._is_unstacked(name) else [full]

  @functools.cache  # noqa: B019 - a reader lives as long as its command
  def _open(self, name: str) -> ts.TensorStore:
    return self._opened(name, self._context)

  def _opened(self, name: str, limits: ts.Context) -> ts.TensorStore:
    return ts.open(
      spec_of(self.path / 'state', name), open=True, read=True, context=limits
    ).result()


def read_array(reader: StateReader, name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
  """Returns an array with the dtype and sharding of `like`.

  Each process reads the parts that its devices hold.
  """
  if like.sharding is None:
    return jax.numpy.asarray(reader.read_at(name, ()), like.dtype)
  parts: dict[str, np.ndarray] = {}

  def part(place: tuple[slice, ...]) -> np.ndarray:
    if str(place) not in parts:  # several devices may hold the same part
      parts[str(place)] = reader.read_at(name, place).astype(like.dtype, copy=False)
    return parts[str(place)]

  return jax.make_array_from_callback(like.shape, like.sharding, part)


def read_state(source: Source, target: Tree) -> Tree:
  """Returns the arrays of a checkpoint as a tree like `target`, of ShapeDtypeStructs.

  Raises:
    AccessError: the checkpoint cannot be opened, or storage did not answer.
    Exception: any kind; the checkpoint is damaged.
  """
  try:
    reader = StateReader(source)
  except AccessError:
    raise
  except CheckpointError as e:  # like other damage: the caller falls back to an older checkpoint
    raise ValueError(e.what) from e
  leaves = by_name(target)
  # If a read fails, `map` cancels the reads that have not begun, and the pool waits for the others.
  with concurrent.futures.ThreadPoolExecutor(_READS) as pool:
    arrays = list(pool.map(lambda name: read_array(reader, name, leaves[name]), leaves))
  return jax.tree.unflatten(jax.tree.structure(target), arrays)


def layer_names(name: str, num_layers: int) -> list[str]:
  """Returns 'params/layers_0/mlp/wo/kernel', ... for 'params/layers/mlp/wo/kernel'."""
  before, after = re.fullmatch(rf'(.*/)?{STACK}/(.*)', name).groups()
  return [f'{before or ""}{STACK}_{i}/{after}' for i in range(num_layers)]


def stacked_arrays(shapes: Mapping[str, Shape]) -> list[str]:
  """Returns the arrays whose first axis counts the layers of a stack."""
  return [n for n, shape in shapes.items() if re.search(rf'(^|/){STACK}/', n) and shape]


def spec_of(state: AnyPath, name: str) -> Json:
  """Returns TensorStore's spec of an array in the folder `state` of a checkpoint."""
  return {'driver': 'zarr', 'kvstore': {**store_of(state), 'path': name.replace('/', '.') + '/'}}


def store_of(state: AnyPath) -> Json:
  """Returns TensorStore's spec of the store of all arrays in a folder."""
  store = {'driver': 'ocdbt', 'base': kvstore_spec(state)}
  if is_remote(state):  # the index is read once, not once per array
    store['cache_pool'] = 'cache_pool#ocdbt'
  return store


# Handlers of the items in a checkpoint, for `_CHECKPOINT_METADATA`.
_HANDLERS = {
  'data': ocp.JsonCheckpointHandler.typestr(),
  'manifest': ocp.JsonCheckpointHandler.typestr(),
  'state': ocp.StandardCheckpointHandler.typestr(),
}
# Pays off if values were narrower than their dtype: for float32 arrays whose values were bfloat16,
# 2.1 times the speed of ZSTD, and files 4% smaller.
BLOSC = {'id': 'blosc', 'cname': 'lz4', 'clevel': 1, 'shuffle': 1}
ZSTD = {'id': 'zstd', 'level': 1}  # Orbax's default
FLUSH_BYTES = 32 << 20  # bytes written at once: a few large files rather than one per layer


class StateWriter:
  """Writes the arrays of `folder`/checkpoint_<step>, which is complete after `close`.

  Several processes may write at the same time, each its own chunks. Once all have called `flush`,
  the first of them calls `merge` and then `close`.

  Args:
    folder: the checkpoint's parent; exists.
    step: updates done.
    arrays: '/'-joined path -> (shape, dtype).
    chunks: '/'-joined path -> shape of a chunk, which `write` should fill.
    unstacked: the arrays to store as one per layer; their chunks have one layer.
    compressor: `BLOSC`, `ZSTD`, or None.
    flush_bytes: write when this much is waiting.
    resume: continue with the arrays of an earlier writer, which stopped after `flush`.
    process: index of this process if several write; None for one alone.
    start: letters or digits for the name of a process's folder, the same in all of them. Folders of
      others are not merged.
  """

  def __init__(
    self,
    folder: AnyPath,
    *,
    step: int,
    arrays: Mapping[str, tuple[Shape, np.dtype]],
    chunks: Mapping[str, Shape],
    unstacked: Collection[str] = (),
    compressor: Optional[Json] = None,
    flush_bytes: Optional[int] = None,
    resume: bool = False,
    process: Optional[int] = None,
    start: str = '',
  ):
    self.path = checkpoint_path(folder, step)
    self._arrays, self._unstacked = dict(arrays), frozenset(unstacked)
    self._compressor, self._flush_bytes = compressor, flush_bytes or FLUSH_BYTES
    self._state, self._start = self.path / 'state', start
    self._written = self._state if process is None else self._store_of_process(process)
    self._written.mkdir(parents=True, exist_ok=resume)
    self._pending, self._writing = 0, None
    self._context = context()
    self._transaction = ts.Transaction()
    self._created_in = None if resume else self._transaction
    self._stores: dict[str, list[ts.TensorStore]] = {}
    for name, (_, dtype) in self._arrays.items():
      chunk = tuple(chunks[name])[1:] if name in self._unstacked else tuple(chunks[name])
      self._stores[name] = [
        self._reopen(part) if resume else self._create(part, shape, dtype, chunk)
        for part, shape in self._parts(name)
      ]

  def _create(self, name: str, shape: Shape, dtype: np.dtype, chunk: Shape) -> ts.TensorStore:
    metadata = {
      'shape': list(shape),
      'chunks': [max(c, 1) for c in chunk],
      'compressor': self._compressor,
    }
    return self._result(
      ts.open(
        {**spec_of(self._written, name), 'metadata': metadata},
        create=True,
        dtype=dtype,
        context=self._context,
        transaction=self._transaction,
      )
    )

  def _reopen(self, name: str) -> ts.TensorStore:
    return self._result(ts.open(spec_of(self._written, name), open=True, context=self._context))

  def _result(self, future: ts.Future[_Result]) -> _Result:
    """Returns the result; for a remote path, raises StorageError or CheckpointError as `_wait`."""
    try:
      return future.result()
    except ValueError as e:  # TensorStore raises it for every reason
      if not isinstance(self.path, RemotePath):
        raise
      what = f'{self.path} cannot be written'
      if is_outage(e):
        raise storage_error(e, what, self.path.scheme) from None
      raise CheckpointError(
        f'{what}: {reason_of(e)}.', fix='Remove what is stored there, or name another folder.'
      ) from None

  def write(self, name: str, place: Place, value: np.ndarray) -> bool:
    """Writes a part of an array; returns whether everything written before it is stored by now."""
    if name in self._unstacked:
      first, rest = place[0], place[1:]
      layers = (
        [(first, value)]
        if isinstance(first, int)
        else zip(range(*first.indices(self._arrays[name][0][0])), value)
      )
      for i, layer in layers:
        self._store(name, i)[rest] = layer
    else:
      self._store(name)[place] = value
    self._pending += value.nbytes
    if self._pending < self._flush_bytes:
      return False
    self._start_to_write()
    return True

  def _store(self, name: str, part: int = 0) -> ts.TensorStore:
    store = self._stores[name][part]
    if self._transaction is self._created_in:
      return store
    return store.with_transaction(self._transaction)

  def _start_to_write(self) -> None:
    self._wait()
    self._writing = self._transaction.commit_async()
    if self._transaction is self._created_in:  # TensorStore refuses other transactions until then
      self._wait()
    self._transaction, self._pending = ts.Transaction(), 0

  def _wait(self) -> None:
    """Waits until all started writes are stored.

    Raises:
      OSError: the disk cannot be written to.
      StorageError: object storage refused the write, or did not answer.
      CheckpointError: object storage failed for another reason.
    """
    if self._writing is not None:
      writing, self._writing = self._writing, None
      try:
        self._result(writing)
      except ValueError as e:
        full = os.strerror(errno.ENOSPC)
        number = errno.ENOSPC if full in str(e) else errno.EIO
        raise OSError(number, full if number == errno.ENOSPC else str(e)[:300]) from e

  def flush(self) -> None:
    """Waits until everything is stored; raises as `_wait`."""
    self._start_to_write()
    self._wait()

  def merge(self, *, num_processes: int) -> None:
    """Writes one index over the stores of all processes, as Orbax does; their files stay in place.

    Raises as `flush`.
    """

    def opened(folder: AnyPath) -> ts.KvStore:
      # TensorStore refuses to copy between stores that were opened with different contexts.
      return ts.KvStore.open(store_of(folder), context=self._context).result()

    merged, transaction = opened(self._state), ts.Transaction(atomic=True)
    stores = [self._store_of_process(i) for i in range(num_processes)]
    copies = [
      opened(store).experimental_copy_range_to(merged.with_transaction(transaction))
      for store in stores
      if (store / 'manifest.ocdbt').is_file()  # a process may have had nothing to write
    ]
    for copy in copies:
      copy.result()
    self._writing = transaction.commit_async()
    self._wait()

  def _store_of_process(self, process: int) -> AnyPath:
    """Returns the folder of one process's store, named as Orbax names it."""
    return self._state / '_'.join(filter(None, (f'{OF_TENSORSTORE}{process}', self._start)))

  def close(self, *, manifest: Manifest, data: Json, empty: Json) -> None:
    """Writes pending data and Orbax's metadata files; checks that all arrays can be opened.

    Args:
      manifest: JSON-ready; sealed here.
      data: JSON-ready.
      empty: result of `empty_leaves`.
    Raises:
      OSError: the disk cannot be written to, or the arrays cannot be opened afterwards.
    """
    self.flush()
    check_written(self._state)
    tree = {
      str(tuple(part.split('/'))): _leaf_metadata(part, shape)
      for name in self._arrays
      for part, shape in self._parts(name)
    }
    write_json(
      self.path / 'state' / '_METADATA',
      {
        'tree_metadata': {**tree, **empty},
        'use_ocdbt': True,
        'use_zarr3': False,
        'store_array_data_equal_to_fill_value': True,
        'custom_metadata': None,
      },
    )
    write_json(self.path / 'data' / 'metadata', data)
    write_json(self.path / 'manifest' / 'metadata', sealed(manifest, data=data))
    now = time.time_ns()
    write_json(
      self.path / '_CHECKPOINT_METADATA',
      {
        'item_handlers': _HANDLERS,
        'metrics': {},
        'performance_metrics': {},
        'init_timestamp_nsecs': now,
        'commit_timestamp_nsecs': now,
        'custom_metadata': {},
      },
    )

  def _parts(self, name: str) -> list[tuple[str, Shape]]:
    """Returns (name, shape) of the stored arrays of one logical array."""
    shape = self._arrays[name][0]
    if name in self._unstacked:
      return [(part, tuple(shape[1:])) for part in layer_names(name, shape[0])]
    return [(name, tuple(shape))]


def empty_leaves(tree: Tree) -> Json:
  """Returns the leaves without arrays that Orbax also stores: None and empty containers."""

  def is_empty(x: object) -> bool:
    return x is None or isinstance(x, (Mapping, list, tuple)) and not x

  found = {}
  for path, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)[0]:
    if is_empty(x):
      keys = [
        (
          jax.tree_util.keystr((key,), simple=True),
          1 if isinstance(key, jax.tree_util.SequenceKey) else 2,
        )
        for key in path
      ]
      # Orbax stores an empty NamedTuple as None.
      kind = (
        'Dict'
        if isinstance(x, Mapping)
        else 'List'
        if isinstance(x, list)
        else 'Tuple'
        if type(x) is tuple
        else 'None'
      )
      found[str(tuple(name for name, _ in keys))] = {
        'key_metadata': _key_metadata(keys),
        'value_metadata': {'value_type': kind, 'skip_deserialize': True},
      }
  return found


def _key_metadata(keys: Sequence[tuple[str, int]]) -> list[Json]:
  # Orbax's numbers: 1 is the index of a sequence, 2 the key of a mapping.
  return [{'key': name, 'key_type': kind} for name, kind in keys]


def _leaf_metadata(name: str, shape: Sequence[int]) -> Json:
  keys = name.split('/')
  return {
    'key_metadata': _key_metadata([(key, 1 if key.isdecimal() else 2) for key in keys]),
    'value_metadata': {
      'value_type': 'jax.Array',
      'skip_deserialize': False,
      'write_shape': list(shape),
    },
  }


def write_json(path: AnyPath, value: Json) -> None:
  """Writes a file, creating its folder."""
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(value), 'utf-8')
