"""Reads T5X checkpoints in slices: the legacy format, and Orbax's with or without OCDBT.

A legacy checkpoint is a msgpack file `checkpoint` with the small arrays, and a zarr folder for each
large array. TensorStore reads both formats; TensorFlow, T5X and pickle are not involved.
"""

import contextlib
import functools
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Optional

import flax.serialization
import flax.traverse_util
import numpy as np
import tensorstore as ts

from t5x_gpu.checkpoint.manifest import ARRAY_METADATA
from t5x_gpu.checkpoint.model_dir import check_only_files
from t5x_gpu.errors import CheckpointError, first_line
from t5x_gpu.storage.files import access_error
from t5x_gpu.storage.json_schema import Json, JsonObject, parse_json, read_bytes, read_json
from t5x_gpu.storage.paths import system_error

# Name -> the array itself, or its TensorStore spec.
Stored = Mapping[str, np.ndarray | JsonObject]
_BROKEN_FIX = 'Copy the checkpoint again.'
_METADATA = ('*', '*/.zarray', 'state/*', 'state/*/.zarray')  # files, of both formats
# Raised by msgpack, NumPy and TensorStore for damaged files. RecursionError is a RuntimeError.
_BROKEN = (
  ValueError,
  LookupError,
  TypeError,
  AttributeError,
  OSError,
  RuntimeError,
  ArithmeticError,
  MemoryError,
)


class T5xArrays:
  """Arrays of a T5X checkpoint; see `name_table.Tensors`.

  Args:
    path: folder of the checkpoint.
    arrays: name -> the array itself, or its TensorStore spec.
    context: TensorStore context.
  Attributes:
    path: as above.
    shapes, dtypes: name -> shape, dtype.
  Raises:
    CheckpointError: an array cannot be opened.
  """

  def __init__(self, path: pathlib.Path, arrays: Stored, context: ts.Context):
    self.path, self._arrays, self._context = path, arrays, context
    with _errors_as_ours(path):
      opened = {name: self._open(name) for name in arrays}
      self.shapes = {name: tuple(a.shape) for name, a in opened.items()}
      self.dtypes = {
        name: np.dtype(a.dtype if isinstance(a, np.ndarray) else a.dtype.numpy_dtype)
        for name, a in opened.items()
      }

  @functools.cache  # noqa: B019 - a reader lives as long as its command
  def _open(self, name: str) -> np.ndarray | ts.TensorStore:
    array = self._arrays[name]
    if isinstance(array, np.ndarray):
      return array
    return ts.open(array, open=True, read=True, context=self._context).result()

  def read(self, name: str, start: int = 0, stop: Optional[int] = None) -> np.ndarray:
    """Returns rows `start` to `stop` of an array, in its stored dtype."""
    array = self._open(name)
    rows = array[start : array.shape[0] if stop is None else stop]
    if isinstance(array, np.ndarray):
      return rows
    try:
      return rows.read().result()
    except _BROKEN as e:
      if refused := system_error(e):
        raise access_error(refused, self.path) from e
      raise CheckpointError(
        f'{name} of {self.path} cannot be read: {first_line(e)[:600]}', fix=_BROKEN_FIX
      ) from e


class T5xCheckpoint(T5xArrays):
  """The parameters of a T5X checkpoint, by path: 'decoder/layers_0/mlp/wi_0/kernel'.

  Args:
    folder: `checkpoint_<step>`, or its parent folder to read the latest checkpoint in it.
  Attributes:
    step: number of training steps.
  Raises:
    CheckpointError: the checkpoint does not exist, or cannot be read.
  """

  def __init__(self, folder: str | os.PathLike):
    path = _checkpoint_folder(pathlib.Path(folder).absolute())
    context = ts.Context({'cache_pool': {'total_bytes_limit': 0}})
    with _errors_as_ours(path):
      check_only_files(path)
      if (path / 'checkpoint').is_file():
        self.step, parameters, self._moments = _read_legacy(path)
      else:
        self.step, parameters, self._moments = _read_orbax(path, context)
    super().__init__(path, parameters, context)

  def moments(self) -> T5xArrays:
    """Returns the optimizer's arrays; for Adafactor, 'decoder/decoder_norm/scale/v', ...

    Raises:
      CheckpointError: an array cannot be opened.
    """
    with _errors_as_ours(self.path):
      return T5xArrays(self.path, self._moments(), self._context)

  def version(self) -> list[tuple[str, int, int]]:
    """Returns name, size and time (s) of the metadata files, which a later save changes.

    Raises:
      CheckpointError: a file cannot be read.
    """
    with _errors_as_ours(self.path):
      found = {p: p.stat() for glob in _METADATA for p in self.path.glob(glob) if p.is_file()}
    return [(str(p), stat.st_size, int(stat.st_mtime)) for p, stat in sorted(found.items())]


@contextlib.contextmanager
def _errors_as_ours(path: pathlib.Path) -> Iterator[None]:
  """Turns the errors of NumPy, msgpack and TensorStore for damaged files into CheckpointError."""
  try:
    yield
  except _BROKEN as e:
    if refused := system_error(e):
      raise access_error(refused, path) from e
    raise CheckpointError(
      f'{path} cannot be read as a T5X checkpoint ({type(e).__name__}: {first_line(e)[:600]}).',
      fix=_BROKEN_FIX,
    ) from e


def is_t5x(folder: pathlib.Path) -> bool:
  """Returns whether `folder`, or a checkpoint_<step> in it, looks like a T5X checkpoint."""
  return _latest(folder) is not None


def t5x_steps(folder: pathlib.Path) -> dict[int, pathlib.Path]:
  """Returns step -> folder of the T5X checkpoints in `folder`."""
  # A ModelDir lists only checkpoints named by t5x_gpu; T5X's may be links or have leading zeros.
  return {
    int(m[1]): p
    for p in folder.glob('checkpoint_*')
    if (m := re.fullmatch(r'checkpoint_(\d+)', p.name)) and _kind(p)
  }


def _latest(folder: pathlib.Path) -> Optional[pathlib.Path]:
  steps = t5x_steps(folder)
  return folder if _kind(folder) else steps[max(steps)] if steps else None


def _kind(folder: pathlib.Path) -> str:
  if (folder / 'checkpoint').is_file():
    return 'legacy'
  state = _orbax_state(folder)
  # Only t5x_gpu writes a manifest.
  return 'orbax' if state and not (folder / 'manifest').exists() else ''


def _orbax_state(folder: pathlib.Path) -> Optional[pathlib.Path]:
  for state in (folder / 'state', folder):
    if (state / 'manifest.ocdbt').is_file() or next(state.glob('target.*/.zarray'), None):
      return state
  return None


def _checkpoint_folder(folder: pathlib.Path) -> pathlib.Path:
  found = _latest(folder) if folder.is_dir() else None
  if found is None:
    raise CheckpointError(
      f'{folder} does not hold a T5X checkpoint.',
      fix='Name the folder checkpoint_<step>, which has a file `checkpoint` (legacy) or a folder '
      '`state` (Orbax) in it, or its parent.',
    )
  return found


# Step, parameters, and a function that returns the arrays of the optimizer.
_Contents = tuple[int, Stored, Callable[[], Stored]]


def _read_legacy(folder: pathlib.Path) -> _Contents:
  tree = flax.serialization.msgpack_restore((folder / 'checkpoint').read_bytes())
  optimizer = tree['optimizer']
  state = optimizer['state']
  return (
    int(state['step']),
    _legacy_arrays(folder, optimizer['target']),
    lambda: _legacy_arrays(folder, state.get('param_states', {})),
  )


def _legacy_arrays(folder: pathlib.Path, tree: Json) -> Stored:
  flat = flax.traverse_util.flatten_dict(tree, sep='/', is_leaf=lambda _, value: 'driver' in value)
  arrays = {}
  for name, value in flat.items():
    if isinstance(value, dict):  # stored next to `checkpoint`, which may have been moved
      last = value['kvstore']['path'].rstrip('/').split('/')[-1]
      if last == '..':
        raise ValueError(f'{name} is outside of the folder')
      if not (folder / last / '.zarray').is_file():
        raise FileNotFoundError(f'{last}/.zarray is missing')
      read_json(folder / last / '.zarray', ARRAY_METADATA['.zarray'])
      arrays[name] = {'driver': 'zarr', 'kvstore': f'file://{folder / last}/'}
    else:
      arrays[name] = np.asarray(value)
  return arrays


def _read_orbax(folder: pathlib.Path, context: ts.Context) -> _Contents:
  state = _orbax_state(folder)
  if (state / 'manifest.ocdbt').is_file():
    base: JsonObject = {'driver': 'ocdbt', 'base': f'file://{state}/'}
    store = ts.KvStore.open(base, context=context).result()
    metadata = [key.decode() for key in store.list().result()]

    def content(name: str) -> bytes:
      return store.read(name).result().value

    def kvstore(name: str) -> JsonObject | str:
      return {**base, 'path': f'{name}/'}
  else:
    metadata = [p.relative_to(state).as_posix() for p in state.glob('*/.zarray')]

    def content(name: str) -> bytes:
      return read_bytes(state / name)

    def kvstore(name: str) -> JsonObject | str:
      return f'file://{state / name}/'

  drivers = {'.zarray': 'zarr', 'zarr.json': 'zarr3'}
  for key in metadata:
    if (name := key.rpartition('/')[2]) in ARRAY_METADATA:
      parse_json(content(key), ARRAY_METADATA[name])
  specs = {
    name: {'driver': drivers[file], 'kvstore': kvstore(name)}
    for name, _, file in (key.rpartition('/') for key in metadata)
    if file in drivers
  }

  def below(prefix: str) -> Stored:
    return {
      name.removeprefix(prefix).replace('.', '/'): spec
      for name, spec in specs.items()
      if name.startswith(prefix)
    }

  targets = below('target.')
  if not targets:
    raise KeyError('no array is named target.*')
  step = next((spec for name, spec in specs.items() if name in ('state.step', 'step')), None)
  number = re.fullmatch(r'checkpoint_(\d+)', folder.name)
  if step is not None:
    done = int(ts.open(step, context=context).result().read().result())
  else:
    done = int(number[1]) if number else 0
  return done, targets, lambda: below('state.param_states.')
