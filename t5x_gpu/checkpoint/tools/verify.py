"""Whether the values of a checkpoint are those that were saved: every array is read once."""

import concurrent.futures
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping

from t5x_gpu.checkpoint.arrays.state_reader import PIECE_BYTES, StateReader
from t5x_gpu.checkpoint.model_dir import check_no_outage, why
from t5x_gpu.checkpoint.storage.checksums import HostSums, recorded
from t5x_gpu.checkpoint.storage.paths import AnyPath
from t5x_gpu.errors import CheckpointError

_FIX = (
  'Take another checkpoint. All of this one is checked by\npython -m t5x_gpu.checkpoint verify {}'
)
NUM_THREADS = min(4, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What has been found.

  Attributes:
    num_arrays: that were read.
    num_unknown: of them without a checksum: they can be read, no more is known.
    damaged: array -> what is wrong with it.
  """

  num_arrays: int
  num_unknown: int
  damaged: Mapping[str, str]


def verify(
  reader: StateReader,
  *,
  step: Callable[[int], None],
  num_threads: int = NUM_THREADS,
  most_bytes: int = PIECE_BYTES,
) -> Verdict:
  """Returns whether each array has its checksum; a few pieces are in memory at a time.

  Args:
    reader: of the checkpoint.
    step: told of bytes that have been read.
    num_threads: each has a piece in memory, and the chunks that it lies in.
    most_bytes: of a piece.
  """
  want = recorded(reader.manifest)

  def problem(name: str) -> str:
    sums = HostSums(reader.shapes[name])
    try:
      for place, values in reader.pieces(name, most_bytes=most_bytes):
        sums.add_at(place, values)
        step(values.nbytes)
    except (ValueError, OSError) as e:  # TensorStore's: it does not decompress, or is not there
      check_no_outage(e, reader.path)
      return f'cannot be read: {why(e)}'
    if name in want and str(sums) != want[name]:
      return f'has other values than were saved: its checksum is {sums}, not {want[name]}'
    return ''

  with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
    problems = dict(zip(reader.shapes, pool.map(problem, reader.shapes)))
  return Verdict(
    len(problems),
    sum(name not in want for name in problems),
    {name: text for name, text in problems.items() if text},
  )


@contextlib.contextmanager
def damage_named(name: str, where: AnyPath) -> Iterator[None]:
  """Within, an array that cannot be read raises CheckpointError."""
  try:
    yield
  except ValueError as e:  # TensorStore's: it does not decompress, or is cut off
    check_no_outage(e, where)
    raise CheckpointError(
      f'{name} of {where} cannot be read: {why(e)}',
      fix=_FIX.format(where),
      docs='checkpoints.md#checksums',
    ) from e


def check_sums(name: str, sums: HostSums, manifest: Mapping[str, object], where: str) -> None:
  """Raises CheckpointError if an array that was read from a checkpoint is not what was saved."""
  want = recorded(manifest).get(name)
  if want is not None and str(sums) != want:
    raise CheckpointError(
      f'{name} of {where} has other values than were saved: its checksum is {sums}, not {want}.',
      fix=_FIX.format(where),
      docs='checkpoints.md#checksums',
    )
