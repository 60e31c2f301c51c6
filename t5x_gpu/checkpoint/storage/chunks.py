"""How arrays are divided into chunks on disk. A chunk is read as a whole."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

CHUNK_BYTES = 64 << 20  # chunk size in a run's checkpoints; readers hold a few chunks in memory
_MUCH_SMALLER = 16

Shape = tuple[int, ...]


def by_name(tree: Any) -> dict[str, Any]:
  """Returns the leaves of `tree` by their '/'-joined paths."""
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator='/'): x for path, x in flat}


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


def save_args(state: Any) -> Any:
  """Returns Orbax's arguments for a state: divides shards into chunks of at most CHUNK_BYTES.

  By default, Orbax writes a shard as one chunk: with one device, all layers of a parameter. Given a
  size, it divides dimensions by divisors, the largest first. If that would give tiny chunks (a
  vocabulary of a prime size), the shard stays whole.
  """

  def of(x: Any) -> ocp.SaveArgs:  # NumPy arrays have no shards
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
