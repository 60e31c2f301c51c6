"""Compares the values of a checkpoint with its checksums; reads every array once."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping

from t5x_gpu.checkpoint.arrays.state_reader import PIECE_BYTES, StateReader
from t5x_gpu.checkpoint.saved_checkpoint import error_line
from t5x_gpu.checkpoint.storage.checksums import HostSums, recorded
from t5x_gpu.checkpoint.storage.paths import AnyPath
from t5x_gpu.errors import CheckpointError

_FIX = 'Use another checkpoint. To check all of this one:\npython -m t5x_gpu.checkpoint verify {}'
NUM_THREADS = min(4, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True)
class VerifyResult:
  """The result of `verify`.

  Attributes:
    num_arrays: number of arrays read.
    num_unknown: number of arrays without a checksum: readable, but not verified.
    damaged: array -> reason.
  """

  num_arrays: int
  num_unknown: int
  damaged: Mapping[str, str]


def verify(
  reader: StateReader,
  *,
  advance: Callable[[int], None],
  num_threads: int = NUM_THREADS,
  most_bytes: int = PIECE_BYTES,
) -> VerifyResult:
  """Compares each array with its checksum; memory holds a few pieces at a time.

  Args:
    reader: the checkpoint.
    advance: called with the number of bytes read since the last call.
    num_threads: number of threads; each holds one piece and the chunks that contain it.
    most_bytes: maximum size of a piece.
  """
  want = recorded(reader.manifest)
  problem = functools.partial(reader.problem, advance=advance, most_bytes=most_bytes)
  with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
    problems = dict(zip(reader.shapes, pool.map(problem, reader.shapes)))
  return VerifyResult(
    len(problems),
    sum(name not in want for name in problems),
    {name: text for name, text in problems.items() if text},
  )


@contextlib.contextmanager
def damage_named(name: str, where: AnyPath) -> Iterator[None]:
  """Context in which an array that cannot be read raises CheckpointError."""
  try:
    yield
  except ValueError as e:  # from TensorStore: corrupt or truncated data
    raise CheckpointError(
      f'{name} of {where} cannot be read: {error_line(e)}',
      fix=_FIX.format(where),
      docs='checkpoints.md#checksums',
    ) from e


def check_sums(name: str, sums: HostSums, manifest: Mapping[str, object], where: str) -> None:
  """Raises CheckpointError if an array read from a checkpoint does not have its checksum."""
  want = recorded(manifest).get(name)
  if want is not None and str(sums) != want:
    raise CheckpointError(
      f'{name} of {where} does not have the values that were saved: its checksum is {sums}, '
      f'not {want}.',
      fix=_FIX.format(where),
      docs='checkpoints.md#checksums',
    )
