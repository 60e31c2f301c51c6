"""T5X's checkpoints, read in slices: the legacy format, and Orbax's with or without OCDBT.

A legacy checkpoint is a msgpack file `checkpoint` with the small arrays, and a zarr folder for each
large one. TensorStore reads both formats; TensorFlow, T5X and pickle are not involved.
"""

import functools
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Optional

import flax.serialization
import flax.traverse_util
import numpy as np
import tensorstore as ts

from t5x_gpu.checkpoint.array_files import check_only_files
from t5x_gpu.checkpoint.schemas import ARRAY_METADATA
from t5x_gpu.config.json_schema import parse_json, read_bytes, read_json
from t5x_gpu.errors import CheckpointError, first_line

_BROKEN_FIX = 'Copy the checkpoint again.'
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


class T5xCheckpoint:
  """The parameters of a T5X checkpoint; see `name_table.Tensors`.

  Args:
    folder: `checkpoint_<step>`, or its parent, which means the latest one in it.
  Attributes:
    path: folder of the checkpoint.
    step: number of training steps.
    shapes, dtypes: by parameter path, 'decoder/layers_0/mlp/wi_0/kernel'.
  Raises:
    CheckpointError: there is no such checkpoint, or it cannot be read.
  """

  def __init__(self, folder: str | os.PathLike):
    self.path = _checkpoint_folder(pathlib.Path(folder).absolute())
    self._context = ts.Context({'cache_pool': {'total_bytes_limit': 0}})
    # Path of the parameter -> the array itself, or TensorStore's spec of it.
    self._arrays: Mapping[str, np.ndarray | dict[str, Any]]
    try:
      check_only_files(self.path)
      if (self.path / 'checkpoint').is_file():
        self.step, self._arrays = _read_legacy(self.path)
      else:
        self.step, self._arrays = _read_orbax(self.path, self._context)
      opened = {name: self._open(name) for name in self._arrays}
      self.shapes = {name: tuple(a.shape) for name, a in opened.items()}
      self.dtypes = {
        name: np.dtype(a.dtype if isinstance(a, np.ndarray) else a.dtype.numpy_dtype)
        for name, a in opened.items()
      }
    except _BROKEN as e:
      raise CheckpointError(
        f'{self.path} cannot be read as a T5X checkpoint '
        f'({type(e).__name__}: {first_line(e)[:300]}).',
        fix=_BROKEN_FIX,
      ) from e

  @functools.cache  # noqa: B019 - a reader lives as long as its command
  def _open(self, name: str) -> Any:
    array = self._arrays[name]
    if isinstance(array, np.ndarray):
      return array
    return ts.open(array, open=True, read=True, context=self._context).result()

  def read(self, name: str, start: int = 0, stop: Optional[int] = None) -> np.ndarray:
    """Returns rows `start` to `stop` of a parameter, in its own dtype."""
    array = self._open(name)
    rows = array[start : array.shape[0] if stop is None else stop]
    if isinstance(array, np.ndarray):
      return rows
    try:
      return rows.read().result()
    except _BROKEN as e:
      raise CheckpointError(
        f'{name} of {self.path} cannot be read: {first_line(e)[:300]}', fix=_BROKEN_FIX
      ) from e


def is_t5x(folder: pathlib.Path) -> bool:
  """Returns whether `folder`, or a checkpoint_<step> in it, looks like a T5X checkpoint."""
  return _latest(folder) is not None


def _latest(folder: pathlib.Path) -> Optional[pathlib.Path]:
  steps = {
    int(m[1]): p
    for p in folder.glob('checkpoint_*')
    if (m := re.fullmatch(r'checkpoint_(\d+)', p.name)) and _kind(p)
  }
  return folder if _kind(folder) else steps[max(steps)] if steps else None


def _kind(folder: pathlib.Path) -> str:
  if (folder / 'checkpoint').is_file():
    return 'legacy'
  state = _orbax_state(folder)
  return 'orbax' if state and not (folder / 'manifest').exists() else ''  # a manifest means ours


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


def _read_legacy(folder: pathlib.Path) -> tuple[int, dict[str, Any]]:
  tree = flax.serialization.msgpack_restore((folder / 'checkpoint').read_bytes())
  optimizer = tree['optimizer']
  flat = flax.traverse_util.flatten_dict(
    optimizer['target'], sep='/', is_leaf=lambda _, value: 'driver' in value
  )
  arrays = {}
  for name, value in flat.items():
    if isinstance(value, dict):  # stored next to `checkpoint`, wherever that was written
      last = value['kvstore']['path'].rstrip('/').split('/')[-1]
      if last == '..':
        raise ValueError(f'{name} is outside of the folder')
      if not (folder / last / '.zarray').is_file():
        raise FileNotFoundError(f'{last}/.zarray is missing')
      read_json(folder / last / '.zarray', ARRAY_METADATA['.zarray'])
      arrays[name] = {'driver': 'zarr', 'kvstore': f'file://{folder / last}/'}
    else:
      arrays[name] = np.asarray(value)
  return int(optimizer['state']['step']), arrays


def _read_orbax(folder: pathlib.Path, context: ts.Context) -> tuple[int, dict[str, Any]]:
  state = _orbax_state(folder)
  if (state / 'manifest.ocdbt').is_file():
    base: dict[str, Any] = {'driver': 'ocdbt', 'base': f'file://{state}/'}
    store = ts.KvStore.open(base, context=context).result()
    metadata = [key.decode() for key in store.list().result()]

    def content(name: str) -> bytes:
      return store.read(name).result().value

    def kvstore(name: str) -> Any:
      return {**base, 'path': f'{name}/'}
  else:
    metadata = [p.relative_to(state).as_posix() for p in state.glob('*/.zarray')]

    def content(name: str) -> bytes:
      return read_bytes(state / name)

    def kvstore(name: str) -> Any:
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
  targets = {
    name.removeprefix('target.').replace('.', '/'): spec
    for name, spec in specs.items()
    if name.startswith('target.')
  }
  if not targets:
    raise KeyError('no array is named target.*')
  step = next((spec for name, spec in specs.items() if name in ('state.step', 'step')), None)
  number = re.fullmatch(r'checkpoint_(\d+)', folder.name)
  if step is not None:
    return int(ts.open(step, context=context).result().read().result()), targets
  return int(number[1]) if number else 0, targets
