"""Writes the mean of several checkpoints' parameters as a parameter checkpoint."""

import pathlib
from collections.abc import Sequence

import numpy as np

from t5x_gpu.checkpoint.arrays.params_files import (
  ParamsReader,
  ParamsWriter,
  num_bytes,
  tree_problems,
)
from t5x_gpu.checkpoint.arrays.state_reader import PIECE_BYTES
from t5x_gpu.checkpoint.run_files import carry
from t5x_gpu.checkpoint.storage.atomic_folder import new_folder
from t5x_gpu.checkpoint.storage.checksums import HostSums
from t5x_gpu.checkpoint.storage.chunks import boxes, smaller_chunk
from t5x_gpu.checkpoint.tools.verify import check_sums, damage_named
from t5x_gpu.errors import CheckpointError
from t5x_gpu.terminal.console import Console


def average(readers: Sequence[ParamsReader], target: pathlib.Path, console: Console) -> int:
  """Writes `target`/checkpoint_<step> with the mean of the parameters; returns the step.

  Sums are float32, in the order given. config.gin, model.gin and hf/ are copied from the last
  checkpoint. All values read are compared with their checksums.

  Args:
    readers: two or more checkpoints of the same model.
    target: new folder, which appears at the end.
    console: shows the progress.
  Raises:
    CheckpointError: the checkpoints belong to different models, or one is damaged.
  """
  last = readers[-1]
  for reader in readers[:-1]:
    problems = tree_problems(
      last.shapes, reader.shapes, wanted_by=str(last.path), had_by=str(reader.path)
    )
    if problems:
      raise CheckpointError(
        f'{reader.path} and {last.path} belong to different models:\n  ' + '\n  '.join(problems),
        fix='Name checkpoints of one model.',
      )
  size = num_bytes(last.shapes)
  chunks = {
    name: smaller_chunk(shape, itemsize=4, most_bytes=PIECE_BYTES)
    for name, shape in last.shapes.items()
  }
  about = {'format': 'average', 'of': [str(reader.path) for reader in readers]}
  with new_folder(target, num_bytes=size) as folder:
    with (
      console.progress('averaged', size * len(readers)) as advance,
      ParamsWriter(
        folder, step=last.step, shapes=last.shapes, chunks=chunks, about=about, compress=False
      ) as writer,
    ):
      for name, shape in last.shapes.items():
        sums = [HostSums(shape) for _ in readers]
        for place in boxes(shape, chunks[name]):
          total = np.zeros([s.stop - s.start for s in place], np.float32)
          for reader, checksum in zip(readers, sums):
            with damage_named(f'params/{name}', reader.path):
              values = reader.read_at(name, place)
            checksum.add_at(place, values)
            total += values.astype(np.float32)
            advance(total.nbytes)
          writer.write(name, place, total / np.float32(len(readers)))
        for reader, checksum in zip(readers, sums):
          check_sums(f'params/{name}', checksum, reader.manifest, str(reader.path))
    carry(last.path.parent, folder)
  return last.step
