"""A checkpoint of the plain model from one with adapters, for runs, inference and conversion."""

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from t5x_gpu.checkpoint.arrays.params_files import (
  ParamsReader,
  ParamsWriter,
  Place,
  num_bytes,
  tree_problems,
)
from t5x_gpu.checkpoint.convert import logits_check
from t5x_gpu.checkpoint.convert.convert import Console, Request
from t5x_gpu.checkpoint.convert.merged_params import MergedParams
from t5x_gpu.checkpoint.convert.model_spec import ModelFields, gin_text
from t5x_gpu.checkpoint.convert.name_table import rows_per_piece
from t5x_gpu.checkpoint.run_files import HF_FOLDER, MODEL_GIN
from t5x_gpu.checkpoint.storage.atomic_folder import new_folder
from t5x_gpu.errors import CheckpointError


def merge_lora(request: Request, console: Console) -> None:
  """Writes our checkpoint of the model that `request.lora` wraps, and its model.gin.

  Every parameter is read again, and the logits of both models are compared.
  """
  model, lora = request.model, request.lora
  reader = ParamsReader(request.source, step=request.step)
  merged = MergedParams(reader, lora)
  want = model.abstract_shapes()
  problems = tree_problems(want, merged.shapes, wanted_by='the model', had_by='the checkpoint')
  if problems:
    raise CheckpointError(
      f'{reader.path} does not hold the parameters of this model:\n  ' + '\n  '.join(problems),
      fix='Name the gin file that the checkpoint was trained with: --gin_file=FILE.',
      docs='finetune.md#merge',
    )
  size = num_bytes(merged.shapes)
  console.say(
    f'from: {reader.path}: {merged.num_merged} kernels with adapters of rank '
    f'{lora.rank}, {size // 4:,} parameters without them'
  )
  about = {
    'format': 't5x_gpu',
    'folder': str(reader.path),
    'merged': {'rank': lora.rank, 'alpha': lora.alpha, 'pattern': lora.pattern},
  }
  with new_folder(request.target, num_bytes=size) as folder:
    chunks = {name: _chunk(shape) for name, shape in merged.shapes.items()}
    with (
      console.progress('written', size) as told,
      ParamsWriter(
        folder, step=reader.step, shapes=merged.shapes, chunks=chunks, about=about, compress=False
      ) as writer,
    ):
      for name, place in _pieces(merged.shapes):
        value = merged.read_at(name, place)
        writer.write(name, place, value)
        told(value.nbytes)
    hf = reader.path.parent / HF_FOLDER
    if hf.is_dir():
      shutil.copytree(hf, folder / HF_FOLDER)
    (folder / MODEL_GIN).write_text(
      gin_text(
        model,
        title=(
          f'{request.source.name}, its adapters merged by python -m t5x_gpu.convert: '
          f'{size // 4:,} parameters.\n'
          'Include it in place of a file of gin_configs/models/.'
        ),
      ),
      'utf-8',
    )
    written = ParamsReader(folder)
    with console.progress('read again', size) as told:
      for name, place in _pieces(merged.shapes):
        value = merged.read_at(name, place)
        if not np.array_equal(written.read_at(name, place), value):
          raise CheckpointError(
            f'{name} was read back with other values than were written.',
            fix='Look at the disk; then convert again.',
          )
        told(value.nbytes)
    if request.check == 'tensors':
      console.say('check: logits were NOT compared (--check=tensors)')
    else:
      console.say('check: ' + str(_compare_logits(request, model, reader, written)))
  console.say(f'done: {request.target}: checkpoint_{reader.step}, {MODEL_GIN}')


def _compare_logits(
  request: Request, model: ModelFields, reader: ParamsReader, written: ParamsReader
) -> Any:
  logits_check.check_memory(reader.shapes, copies=2.5)
  batch = logits_check.random_batch(model)
  exact = dataclasses.replace(model, config=dataclasses.replace(model.config, dtype='float32'))
  adapted = dataclasses.replace(request.lora, model=exact.build())
  theirs = logits_check.logits_of(adapted, logits_check.params_of_checkpoint(reader), batch)
  ours = logits_check.our_logits(model, logits_check.params_of_checkpoint(written), batch)
  return logits_check.compare(
    model, ours, theirs, batch, tolerance=request.tolerance, against='the model with its adapters'
  )


def _chunk(shape: Sequence[int]) -> tuple[int, ...]:
  """Returns the shape of a piece: some rows of one layer, or of what has no layers."""
  if len(shape) < 2:
    return tuple(shape)
  first, second, *rest = shape
  if len(shape) == 2:
    return min(first, rows_per_piece((second,))), second
  return 1, min(second, rows_per_piece(tuple(rest))), *rest


def _pieces(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Place]]:
  """Yields every part that is a chunk on disk, as (path, where)."""
  for name, shape in shapes.items():
    chunk = _chunk(shape)
    for start in np.ndindex(*(-(-n // c) for n, c in zip(shape, chunk))):
      yield name, tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(start, chunk, shape))
