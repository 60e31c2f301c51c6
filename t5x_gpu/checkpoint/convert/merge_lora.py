"""Merges adapters into a checkpoint: while reading it, or into a new checkpoint."""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Optional

import numpy as np

from t5x_gpu.checkpoint.arrays.params_files import ParamsReader, Place, num_bytes, tree_problems
from t5x_gpu.checkpoint.convert import logits_check, name_table
from t5x_gpu.checkpoint.convert.conversion import ConversionRequest
from t5x_gpu.checkpoint.convert.tensor_copy import OurPiece
from t5x_gpu.checkpoint.convert.to_ours import counted, write_ours
from t5x_gpu.checkpoint.convert.vocabulary import carry_vocabulary
from t5x_gpu.checkpoint.run_files import carry_hf_folder
from t5x_gpu.checkpoint.storage.chunks import Shape, boxes, smaller_chunk
from t5x_gpu.errors import CheckpointError
from t5x_gpu.models.lora import LoraModel, factors_of
from t5x_gpu.terminal.console import Console


class MergedParams:
  """The parameters of the wrapped model with adapters merged; same interface as ParamsReader.

  Kernels are merged with their factors as they are read, so only one piece is in memory.

  Args:
    reader: reader of a checkpoint of `lora`.
    lora: the model with adapters.
  Raises:
    CheckpointError: the checkpoint has no adapters.
  """

  def __init__(self, reader: ParamsReader, lora: LoraModel):
    self._reader, self._scale = reader, lora.scale
    self.path, self.step = reader.path, reader.step
    self.manifest: Mapping[str, Any] = reader.manifest
    self.shapes = {n: shape for n, shape in reader.shapes.items() if not lora.is_adapter(n)}
    self.dtypes = {name: reader.dtypes[name] for name in self.shapes}
    factors = {name: factors_of(name, {n: n for n in reader.shapes}.get) for name in self.shapes}
    self._factors = {name: both for name, both in factors.items() if both[0] is not None}
    if not self._factors:
      raise CheckpointError(
        f'{reader.path} has no adapters, but its model should have: '
        f'LoraModel.pattern = {lora.pattern!r}.',
        fix='Name the gin file that the checkpoint was trained with: --gin_file=FILE.',
      )

  @property
  def num_merged(self) -> int:
    """Number of kernels that have factors; a stack of layers counts once."""
    return len(self._factors)

  def read_at(self, path: str, place: Place) -> np.ndarray:
    """Returns a part of a parameter."""
    kernel = self._reader.read_at(path, place)
    if path not in self._factors:
      return kernel
    a, b = self._factors[path]
    rank_at = len(self._reader.shapes[a]) - 1  # the rank follows the stack and input dimensions
    num_stack = rank_at + len(self._reader.shapes[b]) - 1 - len(self.shapes[path])
    place = (*place, *[slice(None)] * (len(self.shapes[path]) - len(place)))
    stack, inputs, features = place[:num_stack], place[num_stack:rank_at], place[rank_at:]
    a = self._reader.read_at(a, (*stack, *inputs, slice(None)))
    b = self._reader.read_at(b, (*stack, slice(None), *features))
    if any(isinstance(i, slice) for i in stack):  # layer by layer
      product = np.stack([np.tensordot(x, y, 1) for x, y in zip(a, b)])
    else:
      product = np.tensordot(a, b, 1)
    return kernel + np.float32(self._scale) * product

  def read(self, path: str, start: int = 0, stop: Optional[int] = None) -> np.ndarray:
    """Returns rows `start` to `stop` of a parameter."""
    return self.read_at(path, (slice(start, self.shapes[path][0] if stop is None else stop),))


def merge_lora(request: ConversionRequest, console: Console) -> None:
  """Writes the t5x_gpu checkpoint and model.gin of the model that `request.lora` wraps."""
  model, lora = request.model, request.lora
  reader = ParamsReader(request.model_dir, step=request.step, step_setting='--step')
  merged = MergedParams(reader, lora)
  check_params(merged, model.abstract_shapes())
  console.say(
    f'from: {reader.path}: {merged.num_merged} kernels with adapters of rank '
    f'{lora.rank}, {counted(merged.shapes)} without them'
  )
  chunks = {
    name: smaller_chunk(shape, itemsize=4, most_bytes=name_table.PIECE_BYTES)
    for name, shape in merged.shapes.items()
  }

  def pieces() -> Iterator[OurPiece]:
    for name, shape in merged.shapes.items():
      for place in boxes(shape, chunks[name]):
        value = merged.read_at(name, place)
        yield name, place, value, value.nbytes

  def carry(folder: pathlib.Path) -> None:
    carry_hf_folder(reader.path.parent, folder)
    console.say(f'vocabulary: {carry_vocabulary(request.vocabulary, folder)}')

  def adapted_logits(batch: Mapping[str, Any]) -> tuple[Any, str]:
    adapted = dataclasses.replace(lora, model=logits_check.checked(model).build())
    params = logits_check.params_of_checkpoint(reader)
    return logits_check.logits_of(adapted, params, batch), 'the model with its adapters'

  write_ours(
    request,
    console,
    model,
    merged.shapes,
    pieces,
    chunks=chunks,
    num_source_bytes=num_bytes(merged.shapes),
    step=reader.step,
    about={
      'format': 't5x_gpu',
      'folder': str(reader.path),
      'merged': {'rank': lora.rank, 'alpha': lora.alpha, 'pattern': lora.pattern},
    },
    reference=adapted_logits,
    write_extra=carry,
    origin='its adapters merged',
  )


def check_params(reader: ParamsReader | MergedParams, want: Mapping[str, Shape]) -> None:
  """Raises CheckpointError unless a checkpoint has exactly the parameters `want`."""
  problems = tree_problems(want, reader.shapes, wanted_by='the model', had_by='the checkpoint')
  if problems:
    raise CheckpointError(
      f'{reader.path} does not hold the parameters of this model:\n  ' + '\n  '.join(problems),
      fix='Name the gin file that the checkpoint was trained with: --gin_file=FILE.',
      docs='convert.md#refused',
    )
