"""Reads and writes Hugging Face's safetensors files in slices. Nothing is ever unpickled.

A file is eight bytes with the length of the header, the header (JSON: name -> dtype, shape, byte
offsets), and the data. A model of several files has an index. Files are read with plain reads,
because the pages of a memory map would count as this process's memory.

The safetensors library is not used: it does not return the text of a header, which a model that is
converted back has again, byte for byte (`files_of` in tests/test_convert.py), and conversion works
without the extra `hf`. Only `SafetensorsFolder.read` could call it, 11 of the lines below.
Source: https://github.com/huggingface/safetensors#format
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Optional

import ml_dtypes
import numpy as np

from t5x_gpu.checkpoint.manifest import SHAPE
from t5x_gpu.errors import CheckpointError
from t5x_gpu.storage.files import check_not_refused
from t5x_gpu.storage.json_schema import (
  Fields,
  JsonObject,
  MapOf,
  Text,
  Whole,
  check,
  open_regular,
  parse_json,
  read_json,
)

INDEX = 'model.safetensors.index.json'
SINGLE = 'model.safetensors'
PICKLES = ('.bin', '.pt', '.pth', '.pkl', '.ckpt')
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
DTYPES = {
  'F32': np.dtype(np.float32),
  'F16': np.dtype(np.float16),
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F64': np.dtype(np.float64),
  'I64': np.dtype(np.int64),
  'I32': np.dtype(np.int32),
  'I16': np.dtype(np.int16),
  'I8': np.dtype(np.int8),
  'U8': np.dtype(np.uint8),
  'BOOL': np.dtype(np.bool_),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
FILE_NAME = Text(r'[^/\0]{1,200}\.safetensors')  # in the folder, never '../../x'
_INDEX_SCHEMA = Fields({'weight_map': MapOf(FILE_NAME)})
_TENSOR = Fields({'dtype': str, 'shape': SHAPE, 'data_offsets': (Whole(), Whole())})
_HEADER_SCHEMA = Fields({}, optional={'__metadata__': MapOf(str)})
_damaged = functools.partial(CheckpointError, fix='Copy the file again.')


@dataclasses.dataclass(frozen=True)
class _Entry:
  file: str
  dtype: np.dtype
  shape: tuple[int, ...]
  begin: int  # in the file


class SafetensorsFolder:
  """The tensors of a folder's safetensors files; see `name_table.Tensors`.

  Attributes:
    headers: file name -> text of its header.
    shapes, dtypes: name of the tensor -> shape, dtype.
  Raises:
    CheckpointError: the folder has no safetensors files (pickles are refused), or a file is
      truncated, garbled or does not match the index.
  """

  def __init__(self, folder: str | os.PathLike):
    self.folder = pathlib.Path(folder)
    files = _file_names(self.folder)
    self.headers: dict[str, str] = {}
    self._entries: dict[str, _Entry] = {}
    for file in files:
      self.headers[file] = _read_header(self.folder / file)
      for name, entry in _parse_header(self.folder / file, self.headers[file]):
        if name in self._entries:
          raise CheckpointError(
            f'Tensor {name!r} is in both {self._entries[name].file} and {file} of {self.folder}.',
            fix='Use a folder with the files of one model.',
          )
        self._entries[name] = entry
    _check_index(self.folder, {name: entry.file for name, entry in self._entries.items()})

  @functools.cached_property
  def shapes(self) -> Mapping[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in self._entries.items()}

  @functools.cached_property
  def dtypes(self) -> Mapping[str, np.dtype]:
    return {name: entry.dtype for name, entry in self._entries.items()}

  def read(self, name: str, start: int = 0, stop: Optional[int] = None) -> np.ndarray:
    """Returns rows `start` to `stop` of a tensor, in its stored dtype."""
    entry = self._entries[name]
    rows = slice(start, stop).indices(entry.shape[0])[:2] if entry.shape else (0, 1)
    row_bytes = math.prod(entry.shape[1:]) * entry.dtype.itemsize
    out = np.empty((rows[1] - rows[0], *entry.shape[1:]) if entry.shape else (), entry.dtype)
    with open(self.folder / entry.file, 'rb') as f:
      f.seek(entry.begin + rows[0] * row_bytes)
      read = f.readinto(out.reshape(-1).view(np.uint8))
    if read != out.nbytes:
      raise _damaged(f'{self.folder / entry.file} was truncated while it was read.')
    return out


def _file_names(folder: pathlib.Path) -> list[str]:
  if not folder.is_dir():
    raise CheckpointError(f'{folder} is not a folder.', fix='Name the folder of a model.')
  index = folder / INDEX
  if index.exists():
    named = sorted(set(_read_index(index).values()))
    missing = [name for name in named if not (folder / name).is_file()]
    if missing:
      raise CheckpointError(
        f'{index} names {len(named)} files; {len(missing)} of them are missing: '
        f'{", ".join(missing[:5])}{" ..." if len(missing) > 5 else ""}.',
        fix='Copy all files of the model.',
      )
    return named
  found = sorted(p.name for p in folder.glob('*.safetensors'))
  if SINGLE in found:
    return [SINGLE]
  if len(found) == 1:
    return found
  if found:
    raise CheckpointError(
      f'{folder} has {len(found)} safetensors files and no {INDEX}.',
      fix=f'Copy {INDEX} too. It lists the files of the model.',
    )
  pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
  if pickles:
    raise CheckpointError(
      f'{folder} has no safetensors file, only {", ".join(pickles[:3])}. Reading a pickle can run '
      'any program, so it is never read here.',
      fix='Use the safetensors files, which most models also have. Or, if you trust the origin, '
      'save the model again with transformers: '
      'AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER_FOLDER).',
      docs='convert.md#pickles',
    )
  raise CheckpointError(
    f'{folder} has no *.safetensors file.',
    fix='Name the folder of a Hugging Face model: config.json and '
    f'{SINGLE}, or {INDEX} with its files.',
  )


def _read_index(index: pathlib.Path) -> dict[str, str]:
  try:
    return read_json(index, _INDEX_SCHEMA)['weight_map']
  except (ValueError, OSError) as e:
    check_not_refused(e, index)
    raise _damaged(f'{index} is not an index of safetensors files ({e}).') from e


def _check_index(folder: pathlib.Path, files: Mapping[str, str]) -> None:
  index = folder / INDEX
  if not index.exists():
    return
  wrong = [
    f'{name}: {file} in the index, {files.get(name, "in no file")}'
    for name, file in _read_index(index).items()
    if files.get(name) != file
  ]
  if wrong:
    raise CheckpointError(
      f'{index} and the files do not agree on {len(wrong)} tensors:\n  ' + '\n  '.join(wrong[:5]),
      fix='Copy all files of one model again.',
    )


def _read_header(path: pathlib.Path) -> str:
  try:
    size = path.stat().st_size
    with open_regular(path) as f:
      start = f.read(8)
      length = int.from_bytes(start, 'little')
      if len(start) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise _damaged(
          f'{path} is truncated or not a safetensors file: it has {size:,} bytes'
          + (f', but its header alone would have {length:,}.' if len(start) == 8 else '.')
        )
      return f.read(length).decode('utf-8')
  except UnicodeDecodeError as e:
    raise _damaged(f'{path} is not a safetensors file: its header is not text.') from e
  except OSError as e:
    check_not_refused(e, path)
    raise _damaged(f'{path} cannot be read: {e.strerror or e}.') from e


def _parse_header(path: pathlib.Path, header: str) -> Iterator[tuple[str, _Entry]]:
  """Yields the tensors of a file, ordered by byte offset; raises CheckpointError."""
  begin, size = 8 + len(header.encode()), path.stat().st_size
  try:
    tensors = tensors_of(header)
  except _UnknownDtype as e:
    raise CheckpointError(
      f'{path}: {e}, which is not supported.',
      fix=f'Use a copy of the model in one of {", ".join(DTYPES)}, usually F32, F16 or BF16. '
      'Dequantise a quantised model first.',
    ) from e
  except ValueError as e:
    raise _damaged(f'{path} has a garbled header ({e}).') from e
  end = begin
  for name, dtype, shape in tensors:
    yield name, _Entry(path.name, dtype, shape, end)
    end += math.prod(shape) * dtype.itemsize
  if size < end:
    raise _damaged(f'{path} is truncated: it has {size:,} of {end:,} bytes.')
  if size > end:
    raise _damaged(f'{path} has {size:,} bytes, but its header describes {end:,}.')


class SafetensorsWriter:
  """Writes files with the given headers. Tensors may be written in any order, row by row.

  Args:
    folder: must exist.
    headers: file name -> header, from `make_headers` or from existing files.
    index: text of the index; None to make one if there are several files.
  Attributes:
    tensors: name -> (dtype, shape).
  """

  def __init__(
    self, folder: pathlib.Path, headers: Mapping[str, str], *, index: Optional[str] = None
  ):
    self.tensors: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    self._places: dict[str, tuple[pathlib.Path, int]] = {}
    weight_map, total = {}, 0
    for file, header in headers.items():
      encoded = header.encode()
      offset = 8 + len(encoded)
      for name, dtype, shape in tensors_of(header):
        self.tensors[name], self._places[name] = (dtype, shape), (folder / file, offset)
        weight_map[name] = file
        size = math.prod(shape) * dtype.itemsize
        offset, total = offset + size, total + size
      with open(folder / file, 'wb') as f:
        f.write(len(encoded).to_bytes(8, 'little') + encoded)
        f.truncate(offset)
    if index is None and list(headers) != [SINGLE]:
      index = (
        json.dumps(
          {'metadata': {'total_size': total}, 'weight_map': dict(sorted(weight_map.items()))},
          indent=2,
        )
        + '\n'
      )
    if index is not None:
      (folder / INDEX).write_text(index, 'utf-8')

  def write(self, name: str, start: int, rows: np.ndarray) -> None:
    """Writes rows of a tensor from row `start` on, in the tensor's dtype."""
    dtype, shape = self.tensors[name]
    assert rows.dtype == dtype and rows.shape[1:] == shape[1:], f'{name}: {rows.dtype} {rows.shape}'
    path, offset = self._places[name]
    with open(path, 'r+b') as f:
      f.seek(offset + start * math.prod(shape[1:]) * dtype.itemsize)
      f.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)


class _UnknownDtype(ValueError):
  """A tensor has an unsupported dtype."""


def tensors_of(header: str) -> list[tuple[str, np.dtype, tuple[int, ...]]]:
  """Returns (name, dtype, shape) of the tensors in a header, ordered by byte offset.

  Raises:
    ValueError: the text is not a header, or its tensors overlap or leave gaps.
  """
  parsed = parse_json(header, _HEADER_SCHEMA)
  parsed.pop('__metadata__', None)
  check(parsed, MapOf(_TENSOR), 'the header')
  found, end = [], 0
  for name, value in sorted(parsed.items(), key=lambda item: item[1]['data_offsets']):
    if value['dtype'] not in DTYPES:
      raise _UnknownDtype(f'tensor {name!r} has dtype {value["dtype"]}')
    dtype, shape = DTYPES[value['dtype']], tuple(value['shape'])
    start, end = end, end + math.prod(shape) * dtype.itemsize
    if value['data_offsets'] != [start, end]:
      raise ValueError(f'the bytes of {name} are {value["data_offsets"]}, not {[start, end]}')
    found.append((name, dtype, shape))
  return found


def make_headers(
  tensors: Sequence[tuple[str, np.dtype, tuple[int, ...]]], *, max_file_bytes: int
) -> dict[str, str]:
  """Returns file name -> header; tensors fill one file after another in the given order."""
  files: list[list[tuple[str, np.dtype, tuple[int, ...]]]] = [[]]
  used = 0
  for tensor in tensors:
    size = math.prod(tensor[2]) * tensor[1].itemsize
    if used and used + size > max_file_bytes:
      files.append([])
      used = 0
    files[-1].append(tensor)
    used += size
  names = (
    [SINGLE]
    if len(files) == 1
    else [f'model-{i:05d}-of-{len(files):05d}.safetensors' for i in range(1, len(files) + 1)]
  )
  return {name: _make_header(tensors) for name, tensors in zip(names, files)}


def _make_header(tensors: Sequence[tuple[str, np.dtype, tuple[int, ...]]]) -> str:
  header: JsonObject = {'__metadata__': {'format': 'pt'}}
  offset = 0
  for name, dtype, shape in tensors:
    end = offset + math.prod(shape) * dtype.itemsize
    header[name] = {'dtype': CODES[dtype], 'shape': list(shape), 'data_offsets': [offset, end]}
    offset = end
  text = json.dumps(header, separators=(',', ':'), ensure_ascii=False)
  return text + ' ' * (-len(text.encode()) % 8)  # the data must start at a multiple of 8
