"""Arrays in a checkpoint: their chunks on disk, and checksums of their values.

`save_args` divides the shards of a run into chunks; a chunk is read as a whole. A checksum does not
depend on how an array is split: `checksums_of` adds up parts on devices, `HostSums` the pieces that
a reader has in memory, and `check_restored` compares a restored state with its manifest.
"""

import functools
import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Optional, SupportsInt

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from t5x_gpu.checkpoint.manifest import Manifest
from t5x_gpu.partitioning.trees import Array, Shape, Tree, by_name
from t5x_gpu.storage.json_schema import Json

_log = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20  # chunk size in a run's checkpoints; readers hold a few chunks in memory
_MUCH_SMALLER = 16


def boxes(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[tuple[slice, ...]]:
  """Yields the slices of an array's chunks on disk, in row-major order."""
  starts = (range(0, n, max(c, 1)) for n, c in zip(shape, chunk))
  for start in itertools.product(*starts):
    yield tuple(slice(i, min(i + c, n)) for i, c, n in zip(start, chunk, shape))


def smaller_chunk(chunk: Sequence[int], *, itemsize: int, most_bytes: int) -> Shape:
  """Returns a chunk of at most `most_bytes` (or one element), by dividing its first dimensions."""
  out = list(chunk)
  for d in range(len(out)):
    rest = math.prod(out[d + 1 :]) * itemsize
    if math.prod(out) * itemsize <= most_bytes:
      break
    pieces = -(-out[d] // max(most_bytes // max(rest, 1), 1))
    out[d] = -(-out[d] // pieces)  # pieces of about equal size
  return tuple(out)


def piece_shape(
  shape: Sequence[int], chunk: Sequence[int], *, itemsize: int, most_bytes: int
) -> Shape:
  """Returns the shape to read at once: whole chunks up to `most_bytes`, or part of one chunk."""
  if math.prod(chunk) * itemsize > most_bytes:
    return smaller_chunk(chunk, itemsize=itemsize, most_bytes=most_bytes)
  out = [min(c, n) for c, n in zip(chunk, shape)]
  for d in reversed(range(len(out))):
    chunks = most_bytes // max(math.prod(out) * itemsize, 1)
    out[d] = min(out[d] * max(chunks, 1), shape[d])
  return tuple(out)


def save_args(state: Tree) -> Tree:
  """Returns Orbax's arguments for a state: divides shards into chunks of at most CHUNK_BYTES.

  By default, Orbax writes a shard as one chunk: with one device, all layers of a parameter. Given a
  size, it divides dimensions by divisors, the largest first. If that would give tiny chunks (a
  vocabulary of a prime size), the shard stays whole.
  """

  def of(x: Array) -> ocp.SaveArgs:  # NumPy arrays have no shards
    shard = x.sharding.shard_shape(x.shape) if isinstance(x, jax.Array) else x.shape
    whole = chunk_of_shard(x.shape, shard, itemsize=x.dtype.itemsize) == tuple(shard)
    return ocp.SaveArgs() if whole else ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)

  return jax.tree.map(of, state)


def chunk_of_shard(shape: Sequence[int], shard: Sequence[int], *, itemsize: int) -> Shape:
  """Returns the chunk shape for a shard of an array; chunks divide the shard evenly."""
  cut = _as_orbax_cuts(shape, shard, CHUNK_BYTES // itemsize)
  if math.prod(shard) * itemsize <= CHUNK_BYTES or (
    math.prod(cut) * itemsize < CHUNK_BYTES // _MUCH_SMALLER
  ):
    return tuple(shard)
  return cut


def _as_orbax_cuts(shape: Sequence[int], shard: Sequence[int], most: int) -> Shape:
  """Returns the chunk shape that Orbax will choose; it divides sharded dimensions first."""
  chunk, split = list(shard), [a != b for a, b in zip(shape, shard)]
  while math.prod(chunk) > most:
    dims = [d for d, n in enumerate(chunk) if n > 1 and split[d]]
    if not dims:
      split = [True] * len(chunk)
      continue
    largest = max(dims, key=chunk.__getitem__)
    chunk[largest] = max(n for n in range(1, chunk[largest] // 2 + 1) if not chunk[largest] % n)
  return tuple(chunk)


# Each element is mixed with its position in the whole array to 32 bits, in two ways, and the
# results are summed mod 2^32. So the sums of parts add up exactly to the sum of the array, in any
# order. They find damage; they do not resist an attacker who constructs two arrays with the same
# sum.
#
# The position of an element is two words, so that arrays may have more than 2^32 elements: a
# column, the index over as many of the last dimensions as fit into 32 bits, and a row, the index
# over the other dimensions.
# Mixing: https://github.com/skeeto/hash-prospector#two-round-functions (lowbias32, a bijection).
KEY, METHOD = 'checksums', 'sum of lowbias32, 1'
MOST_COLUMNS = 2**32
# A restore checks all arrays of a state up to this size, and some arrays of a larger state.
SMALL_BYTES = 64 << 20
SAMPLED = 4
HOST_BYTES = 1 << 20  # arrays up to this are summed on the host, without compiling a program

_ROW, _COLUMN = 0x9E3779B1, 0x85EBCA77  # odd
_LANE = 0xC2B2AE3D
_ROUNDS, _LAST_SHIFT = ((16, 0x7FEB352D), (15, 0x846CA68B)), 16  # lowbias32
_HIGH_WORD = 0x80000000  # added to the row for the second half of a 64-bit element
_BLOCK = 1 << 15  # elements; a block stays in the cache of a core


def checksums_in(manifest: Manifest) -> dict[str, str]:
  """Returns the checksums in a manifest; {} if an older version without checksums wrote it."""
  kept = manifest.get(KEY) or {}
  return kept['arrays'] if kept.get('method') == METHOD else {}


def checksums_entry(checksums: Mapping[str, str]) -> Json:
  """Returns the manifest entry for checksums."""
  return {KEY: {'method': METHOD, 'arrays': dict(checksums)}}


def to_text(sums: Sequence[SupportsInt]) -> str:
  """Returns both sums as 16 hexadecimal digits, the form in manifests."""
  return ''.join(f'{int(s) % 2**32:08x}' for s in sums)


def split_dims(shape: Sequence[int], *, most_columns: int = MOST_COLUMNS) -> int:
  """Returns how many of the first dimensions make up the row of an element; usually none."""
  columns, rows = 1, len(shape)
  while rows and (columns * shape[rows - 1] <= most_columns or rows == len(shape)):
    rows -= 1
    columns *= shape[rows]
  return rows


# ---- On devices --------------------------------------------------------------------------------


def checksums_of(tree: Tree) -> dict[str, str]:
  """Returns '/'-joined path -> checksum of every array of `tree`, for the manifest.

  Arrays may be split over devices and processes; every process gets all sums. The cost is one read
  of the arrays from device memory.
  """
  return _texts(by_name(tree))


def _texts(arrays: Mapping[str, Array]) -> dict[str, str]:
  on_device = {}
  for name, x in arrays.items():
    if not _is_for_host(x):
      on_device[name] = device_sums(x)
      if jax.process_count() > 1:
        # Processes with several CPU devices sometimes deadlock if they exchange the sums of several
        # arrays at once (jax 0.10.2, Gloo).
        jax.block_until_ready(on_device[name])
  texts = {name: to_text(both) for name, both in jax.device_get(on_device).items()}
  return {name: texts[name] if name in texts else _host_text(x) for name, x in arrays.items()}


def _is_for_host(x: Array) -> bool:
  """Returns whether the host is faster, because it does not compile a program for the shape."""
  return x.nbytes <= HOST_BYTES and (
    not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
  )


def _host_text(x: Array) -> str:
  whole = HostSums(x.shape)
  whole.add(np.asarray(x))
  return str(whole)


def device_sums(array: Array) -> jax.Array:
  """Returns the two sums of an array, uint32 [2], the same on every device that holds it."""
  if not isinstance(array, jax.Array):
    array = jnp.asarray(array)
  sharding = array.sharding
  if isinstance(sharding, jax.NamedSharding):
    return _jitted(jax.NamedSharding(sharding.mesh, jax.P()))(array)
  return _jitted(None)(array)


@functools.cache
def _jitted(sharding: Optional[jax.sharding.Sharding]) -> Callable[[jax.Array], jax.Array]:
  return jax.jit(sums, out_shardings=sharding)


def sums(array: jax.Array, *, most_columns: int = MOST_COLUMNS) -> jax.Array:
  """Returns the two sums of an array, uint32 [2]; to be traced."""
  rows = split_dims(array.shape, most_columns=most_columns)

  def index(dims: range) -> jax.Array:
    out = jnp.zeros(array.shape, jnp.uint32)
    for d in dims:
      stride = math.prod(array.shape[i] for i in dims if i > d)
      out += jax.lax.broadcasted_iota(jnp.uint32, array.shape, d) * jnp.uint32(stride % 2**32)
    return out

  row, column = index(range(rows)), index(range(rows, array.ndim))
  total = jnp.zeros(2, jnp.uint32)
  for word, bits in enumerate(_device_words(array)):
    total += jnp.stack(
      [
        jnp.sum(x, dtype=jnp.uint32)
        for x in _mixed(bits, row + jnp.uint32(word * _HIGH_WORD), column)
      ]
    )
  return total


def _device_words(array: jax.Array) -> list[jax.Array]:
  if array.dtype == jnp.bool_:
    return [array.astype(jnp.uint32)]
  size = array.dtype.itemsize
  if size == 8:
    halves = jax.lax.bitcast_convert_type(array, jnp.uint32)
    return [halves[..., 0], halves[..., 1]]
  bits = jax.lax.bitcast_convert_type(array, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[size])
  return [bits.astype(jnp.uint32)]


def _mixed(bits: jax.Array, row: jax.Array, column: jax.Array) -> list[jax.Array]:
  """Returns the contribution of elements to each of the two sums."""
  uint32 = jnp.uint32
  place = _lowbias32((row * uint32(_ROW)) ^ (column * uint32(_COLUMN) + uint32(1)))
  # The position enters in two ways: errors that cancel in one sum do not cancel in the other.
  return [_lowbias32(bits ^ place), _lowbias32(bits + place * uint32(_LANE))]


def _lowbias32(x: jax.Array) -> jax.Array:
  for shift, factor in _ROUNDS:
    x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
  return x ^ (x >> jnp.uint32(_LAST_SHIFT))


# ---- In host memory ----------------------------------------------------------------------------


class HostSums:
  """The sums of an array that is added in parts, each element once.

  Args:
    shape: shape of the whole array.
    start: checksum text of the parts that were added before.
    most_columns: see `split_dims`.
  """

  def __init__(self, shape: Sequence[int], *, start: str = '', most_columns: int = MOST_COLUMNS):
    self._shape = tuple(shape)
    self._rows = split_dims(shape, most_columns=most_columns)
    self._sums = [int(start[:8], 16), int(start[8:], 16)] if start else [0, 0]

  def add(self, part: np.ndarray, offset: Sequence[int] = ()) -> None:
    """Adds a part of the array that starts at `offset` (the origin by default)."""
    offset = tuple(offset) or (0,) * len(self._shape)
    words = _host_words(part)
    # In blocks of whole innermost rows, to avoid an array of indices as large as the part.
    inner = part.shape[-1] if part.ndim else 1
    outer = part.shape[:-1]
    if not part.size:
      return
    offsets = self._line_offsets(outer, offset)
    last = np.arange(inner, dtype=np.uint32) + np.uint32(offset[-1] % 2**32 if offset else 0)
    lines = [w.reshape(-1, inner) for w in words]
    step = max(_BLOCK // inner, 1)
    size = min(step, len(offsets[0])), min(_BLOCK, inner)
    buffers = [np.empty(size, np.uint32) for _ in range(3)]
    for i in range(0, len(offsets[0]), step):
      for j in range(0, inner, _BLOCK):
        rows = offsets[0][i : i + step, None]
        columns = offsets[1][i : i + step, None] + last[j : j + _BLOCK]
        for word, line in enumerate(lines):
          bits = line[i : i + step, j : j + _BLOCK].astype(np.uint32, copy=False)
          self._add_block(
            bits,
            rows + np.uint32(word * _HIGH_WORD),
            columns,
            [buffer[: bits.shape[0], : bits.shape[1]] for buffer in buffers],
          )

  def _add_block(
    self, bits: np.ndarray, rows: np.ndarray, columns: np.ndarray, buffers: Sequence[np.ndarray]
  ) -> None:
    """Adds the result of `_mixed`, in preallocated memory: twice as fast, 620 MB/s."""
    place, x, scratch = buffers
    np.multiply(columns, np.uint32(_COLUMN), out=place)
    np.add(place, np.uint32(1), out=place)
    np.bitwise_xor(place, rows * np.uint32(_ROW), out=place)
    _lowbias32_inplace(place, scratch)
    np.bitwise_xor(bits, place, out=x)
    _lowbias32_inplace(x, scratch)
    self._sums[0] += int(x.sum(dtype=np.uint32))
    np.multiply(place, np.uint32(_LANE), out=x)
    np.add(x, bits, out=x)
    _lowbias32_inplace(x, scratch)
    self._sums[1] += int(x.sum(dtype=np.uint32))

  def add_at(self, place: Sequence[slice | int], part: np.ndarray) -> None:
    """Adds the part that is indexed by `place`: whole numbers and slices without steps."""
    place = (*place, *[slice(None)] * (len(self._shape) - len(place)))
    # An index drops its dimension, a slice of length one does not.
    shape = [
      1 if isinstance(i, int) else len(range(*i.indices(n))) for i, n in zip(place, self._shape)
    ]
    self.add(
      part.reshape(shape),
      [i if isinstance(i, int) else i.indices(n)[0] for i, n in zip(place, self._shape)],
    )

  def _line_offsets(
    self, outer: Sequence[int], offset: Sequence[int]
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns row and column of the first element of every line along the last dimension."""
    row, column = np.zeros(outer, np.uint32), np.zeros(outer, np.uint32)
    for d in range(len(outer)):
      dims = range(self._rows) if d < self._rows else range(self._rows, len(self._shape))
      stride = math.prod(self._shape[i] for i in dims if i > d)
      index = np.arange(outer[d], dtype=np.uint64) + np.uint64(offset[d])
      part = (index * np.uint64(stride)).astype(np.uint32)
      target = row if d < self._rows else column
      target += part.reshape((-1,) + (1,) * (len(outer) - d - 1))
    return row.reshape(-1), column.reshape(-1)

  def __str__(self) -> str:
    return to_text(self._sums)


def _lowbias32_inplace(x: np.ndarray, scratch: np.ndarray) -> None:
  for shift, factor in _ROUNDS:
    np.right_shift(x, np.uint32(shift), out=scratch)
    np.bitwise_xor(x, scratch, out=x)
    np.multiply(x, np.uint32(factor), out=x)
  np.right_shift(x, np.uint32(_LAST_SHIFT), out=scratch)
  np.bitwise_xor(x, scratch, out=x)


def _host_words(array: np.ndarray) -> list[np.ndarray]:
  array = np.ascontiguousarray(array)
  flat = array.reshape(-1)
  if array.dtype.itemsize == 8:
    halves = flat.view(np.uint32)
    return [halves[0::2], halves[1::2]]
  return [flat.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])]


# ---- At restore --------------------------------------------------------------------------------


def check_restored(tree: Tree, manifest: Manifest, *, step: int, prefix: str = '') -> None:
  """Raises ValueError if the values of a restored tree differ from the saved values.

  Checks all arrays of a small tree, else a few arrays that depend on the step. Logs if the manifest
  has no checksums.

  Args:
    tree: the restored tree, on any mesh.
    manifest: manifest of the checkpoint.
    step: step of the checkpoint.
    prefix: prefix of the tree's names in the manifest: 'params/'.
  """
  want = checksums_in(manifest)
  if not want:
    _log.info(
      'checkpoint_%d has no checksums (an older version wrote it): its values are not checked.',
      step,
    )
    return
  arrays = {prefix + name: x for name, x in by_name(tree).items()}
  # An array that is read with another dtype has different bits.
  known = sorted(
    n
    for n, x in arrays.items()
    if n in want and manifest['arrays'][n] == [list(x.shape), str(x.dtype)]
  )
  if sum(arrays[n].nbytes for n in known) > SMALL_BYTES:
    known = random.Random(step).sample(known, min(SAMPLED, len(known)))
  got = _texts({name: arrays[name] for name in known})
  wrong = [name for name in known if got[name] != want[name]]
  if wrong:
    raise ValueError(
      f'{wrong[0]} does not have the values that were saved (its checksum is '
      f'{got[wrong[0]]}, not {want[wrong[0]]})'
      + (f'; so have {len(wrong) - 1} more arrays' if len(wrong) > 1 else '')
    )
