"""Converts Hugging Face models and T5X checkpoints to t5x_gpu checkpoints.

The folder appears only after every tensor has been read back and the logits have been compared.
Commands whose gin file names a T5X checkpoint call `converted_once` instead.
"""

import contextlib
import fcntl
import hashlib
import pathlib
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional, TextIO

from t5x_gpu.checkpoint.atomic_folder import new_folder
from t5x_gpu.checkpoint.model_dir import ModelDir
from t5x_gpu.checkpoint.params_files import ParamsReader, ParamsWriter, num_bytes
from t5x_gpu.checkpoint.run_files import HF_FOLDER, MODEL_GIN, carried_generation, not_applied
from t5x_gpu.checkpoint.store import CheckpointAddress, StateReader
from t5x_gpu.conversion import conversion
from t5x_gpu.conversion.conversion import (
  ConversionRequest,
  Reference,
  check_logits,
  hf_reference,
  own_reference,
)
from t5x_gpu.conversion.hf.folder import CONFIG, MODULES, carry_files, open_hf, write_record
from t5x_gpu.conversion.model_spec import ModelFields, describe, differences, gin_text
from t5x_gpu.conversion.name_table import Table
from t5x_gpu.conversion.t5x_files import T5xCheckpoint, is_t5x, t5x_steps
from t5x_gpu.conversion.t5x_names import T5xMoments, t5x_layers, t5x_model, t5x_moments, t5x_table
from t5x_gpu.conversion.tensor_copy import (
  ForeignWeights,
  Names,
  OurPiece,
  compare_with_ours,
  copy_to_ours,
)
from t5x_gpu.errors import CheckpointError
from t5x_gpu.models.dpo import policy_of
from t5x_gpu.models.lora import without_adapters
from t5x_gpu.models.model import Model
from t5x_gpu.partitioning.trees import Shape
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.main_log import log, stream_of_messages
from t5x_gpu.storage.files import write_problem
from t5x_gpu.storage.json_schema import Json
from t5x_gpu.storage.paths import AnyPath, as_path, is_remote
from t5x_gpu.terminal.console import Console

_INCLUDE = 'Include it in place of a file of gin_configs/models/.'


def convert_hf(request: ConversionRequest, console: Console) -> None:
  """Writes a t5x_gpu checkpoint, model.gin and hf/ from a Hugging Face model."""
  hf = open_hf(request.source, family=request.family, drop=request.drop)
  if request.model is not None:
    _check_same(request.model, hf.model, f'{request.source / CONFIG}')
  tensors, names = hf.weights.tensors, hf.weights.names
  dtypes = sorted({str(tensors.dtypes[name]) for name in names.of_table.values()})
  console.say(
    f'from: {request.source}: Hugging Face, {hf.family}, {counted(hf.weights.table.our_shapes)} in '
    f'{" and ".join(dtypes)}'
  )
  for name in names.unused:
    console.say(f'left out: {name} {list(tensors.shapes[name])}')
  for note in hf.training:
    console.say(f'training: {note}')
  for note in hf.ends:
    console.say(f'end of text: {note}')
  if hf.model.kind != 'encoder' and (note := not_applied(carried_generation(request.source))):
    console.say(f'generation: {note}')

  if hf.model.options.get('head_type') == 'embedding':
    said = MODULES if (request.source / MODULES).is_file() else f'there is no {MODULES}'
    console.say(f'vectors: pooling = {hf.model.options["pooling"]!r} ({said})')

  def write_hf_files(folder: pathlib.Path) -> None:
    carry_files(request.source, folder / HF_FOLDER)
    write_record(hf, folder / HF_FOLDER)

  _write_weights(
    request,
    console,
    hf.model,
    hf.weights,
    step=0,
    about={'format': 'hf', 'family': hf.family, 'folder': request.source.name},
    reference=hf_reference(request, hf),
    write_extra=write_hf_files,
  )


def convert_t5x(request: ConversionRequest, console: Console) -> None:
  """Writes a t5x_gpu checkpoint, with Adafactor state, and model.gin from a T5X checkpoint."""
  files = T5xCheckpoint(request.source)
  model = request.model or t5x_model(files.shapes)
  weights = _t5x_weights(model, files)
  console.say(f'from: {files.path}: T5X, step {files.step}, {counted(weights.table.our_shapes)}')
  for stack, layers in t5x_layers(files.shapes).items():
    console.say(f'recognized: {stack}: {layers}')
  if request.model is None and len(model.config.mlp_activations) > 1:
    console.say(
      "assumed: mlp_activations = ('gelu', 'linear'), as in T5.1.1; the files do not "
      'say (set another with --gin_file=model.gin)'
    )
  console.say(
    'vocabulary: not in a T5X checkpoint; python -m t5x_gpu.infer needs --vocabulary=NAME'
  )
  _write_weights(
    request,
    console,
    model,
    weights,
    step=files.step,
    about={'format': 't5x', 'folder': files.path.name},
    reference=own_reference(model, weights),
    moments=_moments(model, files, console),
  )


def converted_once(
  path: AnyPath,
  folder: AnyPath,
  model: Model,
  *,
  dry_run: bool = False,
  wants_all: bool = False,
  on_progress: Callable[[], object] = lambda: None,
) -> Optional[AnyPath]:
  """Returns `path`, or the folder of its conversion if it is a T5X checkpoint.

  Process 0 converts a T5X checkpoint, with the moments of Adafactor, to a folder in
  `folder`/converted. Later calls find it there. Waits for another job that is converting it.
  Tensors are read back; logits are not compared. All processes must call it.

  Args:
    path: folder of a checkpoint in any format, or of several checkpoints, where the latest counts.
    folder: MODEL_DIR, or the folder of results. In object storage nothing is converted.
    model: the model that the parameters belong to.
    dry_run: write nothing. For a T5X checkpoint that is not converted yet, compare names and
      shapes, and return None.
    wants_all: the caller reads every checkpoint in `path`, so several of T5X's are an error.
    on_progress: called on process 0 while it converts, or waits for another job.
  Raises:
    CheckpointError: the checkpoint cannot be converted.
  """
  found: list[Optional[str]] = [str(path)]
  with distributed.errors_together():
    if distributed.is_main_process() and not is_remote(path) and not is_remote(folder):
      is_theirs = False
      with contextlib.suppress(OSError):  # whoever opens the checkpoint reports the error
        is_theirs = is_t5x(path)
      if is_theirs and wants_all and len(steps := sorted(t5x_steps(path))) > 1:
        raise CheckpointError(
          f'{path} has T5X checkpoints of steps {", ".join(map(str, steps))}; only the '
          'latest checkpoint would be converted and evaluated.',
          fix='Convert each, python -m t5x_gpu.convert --from=CHECKPOINT --to=FOLDER, and evaluate '
          'each FOLDER.',
        )
      if is_theirs:
        target = folder / 'converted'
        found = [_convert_into(target, path, model, dry_run=dry_run, on_progress=on_progress)]
  [found_path] = distributed.broadcast_json(found)
  return None if found_path is None else as_path(found_path)


def _convert_into(
  folder: pathlib.Path,
  path: pathlib.Path,
  model: Model,
  *,
  dry_run: bool,
  on_progress: Callable[[], object],
) -> Optional[str]:
  fields = describe(without_adapters(policy_of(model)))
  files = T5xCheckpoint(path)
  # A checkpoint that T5X has written over an older one is converted again.
  digest = hashlib.sha256(str([str(files.path), files.version()]).encode()).hexdigest()[:8]
  target = folder / f'{files.path.name}-{digest}'
  request = ConversionRequest(
    source=files.path,
    model_dir=ModelDir(files.path),
    target=target,
    # gin holds the configuration of the command; reading the new model.gin would replace it.
    read_gin=lambda written: fields,
    model=fields,
    check='tensors',
  )
  try:
    if dry_run:
      if (target / MODEL_GIN).is_file():
        return str(target)
      _t5x_weights(fields, files)
      return None
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f'.{target.name}.lock', waiting=on_progress):
      if not (target / MODEL_GIN).is_file():
        log(f'{files.path} is a T5X checkpoint. It is converted once, to {target}.')
        convert_t5x(request, Console(stream_of_messages(), on_progress=on_progress))
  except (CheckpointError, OSError) as e:
    reason = e.what if isinstance(e, CheckpointError) else write_problem(e, folder)
    raise CheckpointError(
      f'The T5X checkpoint {files.path} cannot be converted: {reason}',
      fix='Convert it by hand, and give the new folder:\n'
      f'  python -m t5x_gpu.convert --from={shlex.quote(str(files.path))} --to=NEW_FOLDER',
      docs='from_t5x.md#checkpoints',
    ) from e
  return str(target)


@contextlib.contextmanager
def _locked(path: pathlib.Path, *, waiting: Callable[[], object]) -> Iterator[None]:
  """Waits until no other process of this host, or of the file server, holds the lock.

  A process that ends loses the lock, so the other one works, however long it takes. `waiting` is
  called meanwhile.
  """
  with open(path, 'w', encoding='utf-8') as lock:
    with contextlib.suppress(OSError):  # a file system without locks: `new_folder` finds the other
      is_logged = False
      while not _takes(lock):
        if not is_logged:
          log(f'Waiting for another job that holds {path}.')
        is_logged = True
        waiting()
        time.sleep(_LOCK_SECONDS)
    yield


_LOCK_SECONDS = 1  # between two tries


def _takes(lock: TextIO) -> bool:
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  return True


def _t5x_weights(model: ModelFields, files: T5xCheckpoint) -> ForeignWeights:
  """Returns the parameters of `files` as a `model` has them; raises CheckpointError."""
  table = t5x_table(model, files.shapes)
  weights = ForeignWeights(table, files, Names({n: n for n in files.shapes}))
  weights.check(
    what=f'The parameters of {files.path} do not match the model',
    fix='Name the model file that belongs to them: --gin_file=model.gin.',
  )
  return weights


def _moments(model: ModelFields, files: T5xCheckpoint, console: Console) -> Optional[T5xMoments]:
  """Returns the second moments, or None after printing why they cannot be converted."""
  try:
    moments = t5x_moments(model, files)
  except CheckpointError as e:
    console.say(f'optimizer: left out: {e.what}')
    return None
  console.say(f'optimizer: {moments}')
  return moments


def _write_weights(
  request: ConversionRequest,
  console: Console,
  model: ModelFields,
  weights: ForeignWeights,
  **options: Any,
) -> None:
  table: Table = weights.table
  write_ours(
    request,
    console,
    model,
    table.our_shapes,
    weights.our_pieces,
    chunks=table.chunks(),
    num_source_bytes=weights.num_bytes,
    **options,
  )


def write_ours(
  request: ConversionRequest,
  console: Console,
  model: ModelFields,
  shapes: Mapping[str, Shape],
  pieces: Callable[[], Iterator[OurPiece]],
  *,
  chunks: Mapping[str, Shape],
  num_source_bytes: int,
  step: int,
  about: Json,
  reference: Reference,
  write_extra: Callable[[pathlib.Path], None] = lambda folder: None,
  origin: str = 'converted',
  moments: Optional[T5xMoments] = None,
) -> None:
  """Writes a t5x_gpu checkpoint and model.gin, reads both back and compares the logits.

  Args:
    request, console: request and console of the conversion.
    model: the model that the parameters belong to.
    shapes: path -> shape of each parameter.
    pieces: yields all pieces of the parameters; called twice.
    chunks: path -> shape of the chunks on disk.
    num_source_bytes: sum of the sizes that `pieces` yields.
    step: step of the new checkpoint.
    about: origin of the parameters, for the manifest.
    reference: computes the logits to compare with.
    write_extra: (folder) -> writes further files.
    origin: how the parameters were made, for the comment in model.gin.
    moments: the optimizer state; None to write parameters only.
  """
  size = num_bytes(shapes) + (num_bytes(moments.shapes) if moments else 0)
  num_read_bytes = num_source_bytes + (moments.weights.num_bytes if moments else 0)
  with new_folder(request.target, num_bytes=size) as folder:
    with (
      console.progress('written', num_read_bytes) as advance,
      ParamsWriter(
        folder,
        step=step,
        shapes=shapes,
        chunks=chunks,
        about=about,
        compress=num_source_bytes < num_bytes(shapes),
        opt_state=moments and moments.opt_state,
        opt_chunks=moments.weights.table.chunks() if moments else {},
      ) as writer,
    ):
      copy_to_ours(pieces(), writer.write, advance=advance)
      if moments:
        copy_to_ours(moments.weights.our_pieces(), writer.write_moment, advance=advance)
    write_extra(folder)
    title = f'{request.source.name}, {origin} by python -m t5x_gpu.convert: {counted(shapes)}.'
    (folder / MODEL_GIN).write_text(gin_text(model, title=f'{title}\n{_INCLUDE}'), 'utf-8')
    reader = ParamsReader(CheckpointAddress(ModelDir(folder), step))
    with console.progress('read back', num_read_bytes) as advance:
      compare_with_ours(pieces(), reader, advance=advance)
      if moments:
        stored = StateReader(reader.checkpoint, prefix='opt_state/')
        compare_with_ours(moments.weights.our_pieces(), stored, advance=advance)
    both = f' and {len(stored.shapes)} moments' if moments else ''
    console.say(f'check: {len(shapes)} parameters{both} read back: bit-identical')
    read_back = request.read_gin(folder / MODEL_GIN)
    assert not differences(read_back, model), f'{MODEL_GIN}: {differences(read_back, model)}'
    check_logits(
      request,
      console,
      read_back,
      shapes,
      reference=reference,
      ours=lambda: conversion.params_of_checkpoint(reader),
    )
  console.say(f'done: {request.target}: checkpoint_{step}, {MODEL_GIN}')


def _check_same(asked: ModelFields, found: ModelFields, where: str) -> None:
  problems = differences(found, asked)
  if problems:
    raise CheckpointError(
      f'The gin file describes another model than {where}:\n  '
      + '\n  '.join(
        f'{name} = {ours!r} in the gin file, {theirs!r} there' for name, theirs, ours in problems
      ),
      fix='Leave --gin_file out: model.gin is then made from config.json.',
      parameters=[asked.parameter(name) for name, _, _ in problems],
    )


def counted(shapes: Mapping[str, Shape]) -> str:
  """Returns '1,234 parameters'."""
  return f'{num_bytes(shapes) // 4:,} parameters'
