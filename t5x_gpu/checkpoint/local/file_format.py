"""A file of a local checkpoint: a header that describes parts of arrays, then their raw bytes.

    8 bytes   T5XLOCAL
    8 bytes   length of the header, little endian
    4 bytes   CRC-32 of the header
    header    JSON: facts of the save, and name, start, shape, dtype, checksum, offset of each part
    parts     raw bytes, each from a multiple of 64

The checksums of an array's parts (checkpoint/arrays.py) add up to the checksum of the
array, which is in the manifest of a durable checkpoint.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
import struct
import zlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from t5x_gpu.checkpoint.arrays import HostSums
from t5x_gpu.checkpoint.manifest import BASE64, CHECKSUM, DTYPE, MANIFEST, SHAPE
from t5x_gpu.partitioning.trees import Shape
from t5x_gpu.storage.files import atomic_write
from t5x_gpu.storage.json_schema import (
  MOST_BYTES,
  Fields,
  Json,
  ListOf,
  Whole,
  check,
  open_regular,
  parse_json,
)

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

MAGIC = b'T5XLOCAL'
FORMAT = 1
TEMPORARY = '.tmp'
FILE_NAME = re.compile(r'step_(\d+)\.process_(\d+)')
_PRELUDE = struct.Struct('<8sQI')
_ALIGNED = 64


@dataclasses.dataclass(frozen=True)
class Part:
  """A box of an array, as a file describes it.

  Attributes:
    name: '/'-joined path of the array.
    start: first index of the box in the array.
    shape: shape of the box.
    dtype: dtype of the array.
    checksum: checksum of the box at its position in the array.
    offset: offset of its bytes after the header.
  """

  name: str
  start: Shape
  shape: Shape
  dtype: str
  checksum: str
  offset: int

  @property
  def num_bytes(self) -> int:
    return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class LocalFile:
  """A file with an intact header and the right length.

  Attributes:
    path: path of the file.
    facts: facts about the save; JSON-ready.
    parts: the parts in the file.
    data_start: offset of the first part.
  """

  path: pathlib.Path
  facts: Json
  parts: tuple[Part, ...]
  data_start: int

  def check(self, *, step: int) -> None:
    """Raises ValueError unless the file is of `step`, and all parts lie inside their arrays."""
    check(self.facts, LOCAL_FACTS)
    if self.facts['step'] != step:
      raise ValueError(f'it belongs to step {self.facts["step"]}')
    arrays = self.facts['manifest']['arrays']
    for part in self.parts:
      shape, dtype = arrays.get(part.name, ([], ''))
      if (
        part.dtype != dtype
        or not len(part.start) == len(part.shape) == len(shape)
        or any(begin + size > whole for begin, size, whole in zip(part.start, part.shape, shape))
      ):
        raise ValueError(f'{part} is not a part of one of its arrays')

  def read(self, part: Part, shape: Shape) -> np.ndarray:
    """Returns a part's values.

    Args:
      part: one of `parts`.
      shape: shape of the whole array.
    Raises:
      ValueError: the values differ from the written values.
      OSError: the file cannot be read.
    """
    dtype = jnp.dtype(part.dtype)
    with open(self.path, 'rb') as f:
      f.seek(self.data_start + part.offset)
      values = np.fromfile(f, np.uint8, part.num_bytes)
    if values.nbytes != part.num_bytes:
      raise ValueError(f'{part.name} is truncated')
    values = values.view(dtype).reshape(part.shape)
    got = checksum(values, part.start, shape)
    if got != part.checksum:
      raise ValueError(
        f'{part.name} does not have the values that were saved: its checksum is {got}, not '
        f'{part.checksum}'
      )
    return values


def checksum(values: np.ndarray, start: Shape, shape: Shape) -> str:
  """Returns the checksum of a box that begins at `start` of an array of `shape`."""
  sums = HostSums(shape)
  sums.add(values, start)
  return str(sums)


def write_local_file(
  path: pathlib.Path, *, facts: Json, parts: Sequence[tuple[str, Shape, Shape, np.ndarray]]
) -> None:
  """Writes a file, which appears under its name only when it is complete.

  Skips fsync: the data survive a killed process, and checksums find damage by a power failure.

  Args:
    path: path of the file; replaced if it exists.
    facts: facts about the save; JSON-ready.
    parts: (name, shape of the array, start of the box, values of the box) for each part.
  Raises:
    OSError: no space, for example. Leaves no file behind.
  """
  described, offset = [], 0
  for name, shape, start, values in parts:
    described.append(
      Part(name, start, values.shape, str(values.dtype), checksum(values, start, shape), offset)
    )
    offset = _aligned(offset + values.nbytes)
  header = json.dumps(
    {'format': FORMAT, 'facts': facts, 'parts': [dataclasses.astuple(part) for part in described]}
  ).encode()
  begin = _aligned(_PRELUDE.size + len(header))
  with atomic_write(path, suffix=TEMPORARY) as new, open(new, 'wb', opener=_for_user_alone) as f:
    f.write(_PRELUDE.pack(MAGIC, len(header), zlib.crc32(header)) + header)
    for part, (_, _, _, values) in zip(described, parts):
      f.seek(begin + part.offset)
      f.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    f.truncate(begin + offset)


def _for_user_alone(path: str, flags: int) -> int:
  return os.open(path, flags, 0o600)


def open_local_file(path: pathlib.Path) -> LocalFile:
  """Opens a file and reads its header, but not its parts.

  Raises:
    ValueError: the file is truncated, or its header is damaged.
    OSError: the file cannot be read.
  """
  with open_regular(path) as f:
    start = f.read(_PRELUDE.size)
    if len(start) < _PRELUDE.size:
      raise ValueError('it is truncated')
    magic, length, crc = _PRELUDE.unpack(start)
    most = min(os.fstat(f.fileno()).st_size, MOST_BYTES)
    header = f.read(length) if magic == MAGIC and length < most else b''
    if zlib.crc32(header) != crc or not header:
      raise ValueError('its header is damaged')
    size = os.fstat(f.fileno()).st_size
    if os.fstat(f.fileno()).st_uid != os.geteuid():
      raise ValueError('it belongs to another user')
  content = parse_json(header, LOCAL_FILE)
  if content['format'] != FORMAT:
    raise ValueError(f'it has format {content["format"]}, not {FORMAT}')
  parts = tuple(
    Part(name, tuple(start), tuple(shape), dtype, checksum, offset)
    for name, start, shape, dtype, checksum, offset in content['parts']
  )
  begin = _aligned(_PRELUDE.size + length)
  end = begin + max((part.offset + part.num_bytes for part in parts), default=0)
  if size < end:
    raise ValueError(f'it is truncated: it has {size:,} of {end:,} bytes')
  return LocalFile(path, content['facts'], parts, begin)


def _aligned(offset: int) -> int:
  return -(-offset // _ALIGNED) * _ALIGNED
