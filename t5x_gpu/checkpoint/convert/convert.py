"""The three conversions: Hugging Face to ours, T5X to ours, ours to Hugging Face.

Each writes tensor by tensor into a folder that appears at the end: after every tensor has been read
again, and after logits have been compared.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, Protocol

from t5x_gpu.checkpoint.arrays.params_files import (
  ParamsReader,
  ParamsWriter,
  num_bytes,
  tree_problems,
)
from t5x_gpu.checkpoint.convert import logits_check
from t5x_gpu.checkpoint.convert.hf_config import from_hf, guess_family, to_hf
from t5x_gpu.checkpoint.convert.hf_folder import (
  CONFIG,
  HfModel,
  Record,
  carry_files,
  open_hf,
  read_record,
  write_record,
)
from t5x_gpu.checkpoint.convert.hf_names import FAMILIES
from t5x_gpu.checkpoint.convert.merged_params import MergedParams
from t5x_gpu.checkpoint.convert.model_spec import ModelFields, differences, gin_text
from t5x_gpu.checkpoint.convert.name_table import Table, Tensors
from t5x_gpu.checkpoint.convert.safetensors_io import SafetensorsWriter, make_headers, tensors_of
from t5x_gpu.checkpoint.convert.t5x import T5xCheckpoint, t5x_model, t5x_table
from t5x_gpu.checkpoint.convert.tensor_copy import (
  FLOATS,
  Names,
  Step,
  check_tensors,
  compare_with_ours,
  compare_with_theirs,
  copy_to_ours,
  copy_to_theirs,
)
from t5x_gpu.checkpoint.run_files import HF_FOLDER, MODEL_GIN
from t5x_gpu.checkpoint.storage.atomic_folder import new_folder
from t5x_gpu.errors import CheckpointError, ConfigError
from t5x_gpu.models.lora import LoraModel

TOLERANCE = logits_check.TOLERANCE
CHECKS = ('auto', 'transformers', 'own', 'tensors')

Reference = Callable[[Mapping[str, Any]], tuple[Any, str]]


class Console(Protocol):
  """Where a conversion tells how it goes."""

  def say(self, text: str) -> None:
    """Prints a line."""

  def progress(self, title: str, num_bytes: int) -> contextlib.AbstractContextManager[Step]:
    """Shows how far something with so many bytes is; prints how long it took."""


@dataclasses.dataclass(frozen=True)
class Request:
  """What is to be converted.

  Attributes:
    source, target: folders; the target must not exist, or be empty.
    read_gin: (a gin model file) -> its model.
    model: what the user says that the model is; None to read it from the source.
    family: of Hugging Face; None for the one that the source has, or looks like.
    like: a Hugging Face model, or a converted one, whose names, dtypes, tokenizer and config.json
      the new one takes; None for those that the source carries.
    step: of our checkpoint; None for the latest.
    dtype: of the new tensors: a key of `FLOATS`; None for that of `like`, or float32.
    drop: patterns of their tensors to leave out.
    max_file_bytes: of a safetensors file.
    check: one of `CHECKS`; 'transformers' only where it is installed.
    tolerance: of logits.
    lora: the model with adapters, where `source` has them; `model` is then the one that it wraps.
  """

  source: pathlib.Path
  target: pathlib.Path
  read_gin: Callable[[pathlib.Path], ModelFields]
  model: Optional[ModelFields] = None
  family: Optional[str] = None
  like: Optional[pathlib.Path] = None
  step: Optional[int] = None
  dtype: Optional[str] = None
  drop: Sequence[str] = ()
  max_file_bytes: int = 5 * 10**9
  check: str = 'auto'
  tolerance: float = TOLERANCE
  lora: Optional[LoraModel] = None


def convert_hf(request: Request, console: Console) -> None:
  """Writes our checkpoint, model.gin and hf/ from a Hugging Face model."""
  hf = open_hf(request.source, family=request.family, drop=request.drop)
  if request.model is not None:
    _check_same(request.model, hf.model, f'{request.source / CONFIG}')
  dtypes = sorted({str(hf.tensors.dtypes[name]) for name in hf.names.of_table.values()})
  console.say(
    f'from: {request.source}: Hugging Face, {hf.family}, {_counted(hf.table)} in '
    f'{" and ".join(dtypes)}'
  )
  for name in hf.names.unused:
    console.say(f'left out: {name} {list(hf.tensors.shapes[name])}')

  def extra(folder: pathlib.Path) -> None:
    carry_files(request.source, folder / HF_FOLDER)
    write_record(hf, folder / HF_FOLDER)

  _write_ours(
    request,
    console,
    hf.model,
    _Source(hf.table, hf.tensors, hf.names),
    step=0,
    about={'format': 'hf', 'family': hf.family, 'folder': request.source.name},
    extra=extra,
    reference=_reference(request, hf),
  )


def convert_t5x(request: Request, console: Console) -> None:
  """Writes our checkpoint and model.gin from a checkpoint of T5X; its optimizer state stays."""
  files = T5xCheckpoint(request.source)
  model = request.model or t5x_model(files.shapes)
  source = _Source(t5x_table(model, files.shapes), files, Names({n: n for n in files.shapes}))
  check_tensors(
    files,
    source.table,
    source.names,
    what=f'The parameters of {files.path} are not those of the model',
    fix='Name the model file that belongs to them: --gin_file=model.gin.',
  )
  console.say(f'from: {files.path}: T5X, step {files.step}, {_counted(source.table)}')
  if request.model is None and len(model.config.mlp_activations) > 1:
    console.say(
      "assumed: mlp_activations = ('gelu', 'linear'), as in T5.1.1; the files do not "
      'tell (--gin_file=model.gin says otherwise)'
    )
  _write_ours(
    request,
    console,
    model,
    source,
    step=files.step,
    about={'format': 't5x', 'folder': files.path.name},
    reference=lambda batch: source.logits(model, batch),
  )


def convert_ours(request: Request, console: Console) -> None:
  """Writes a Hugging Face model from our checkpoint."""
  reader: Any = ParamsReader(request.source, step=request.step)
  if request.lora is not None:
    reader = MergedParams(reader, request.lora)
  record = read_record(request.like or reader.path.parent)
  if request.like is not None and record is None:
    raise ConfigError(
      f'--like={request.like} is neither a Hugging Face model nor a converted one.',
      fix=f'Name a folder with {CONFIG} and safetensors files.',
    )
  model = request.model or (record and _model_of(record))
  if model is None:
    raise ConfigError(
      f'Nothing says what model {reader.path} is of.',
      fix='Name the gin file that it was trained with: --gin_file=FILE.',
    )
  family = request.family or (record.family if record else guess_family(model))
  like = record if record and record.family == family else None
  config = _hf_config(model, family, like)
  table = Table(FAMILIES[family].rules(model), model.sizes())
  problems = tree_problems(
    table.our_shapes, reader.shapes, wanted_by='the model', had_by='the checkpoint'
  )
  if problems:
    raise CheckpointError(
      f'{reader.path} does not hold the parameters of this model:\n  ' + '\n  '.join(problems),
      fix='Name the gin file that the checkpoint was trained with: --gin_file=FILE.',
      docs='convert.md#refused',
    )
  headers, index, names = _hf_layout(request, table, like)
  console.say(f'from: {reader.path}: t5x_gpu, {_counted(table)}')
  size = sum(_bytes(header) for header in headers.values())
  with new_folder(request.target, num_bytes=size) as folder:
    if like:
      carry_files(like.folder, folder, without=(CONFIG,))
    (folder / CONFIG).write_text(config, 'utf-8')
    with console.progress('written', size) as step:
      writer = SafetensorsWriter(folder, headers, index=index)
      rounded = copy_to_theirs(reader, table, names, writer, step=step)
    hf = open_hf(folder, family=family)
    if rounded:
      console.say(
        f'rounded: {len(rounded)} of {len(hf.tensors.shapes)} tensors have lost digits '
        f'as {hf.tensors.dtypes[rounded[0]]} (--dtype=float32 keeps them)'
      )
    with console.progress('read again', size) as step:
      compare_with_theirs(reader, table, names, hf.tensors, step=step)
    console.say(
      f'check: {len(hf.tensors.shapes)} tensors read again: '
      + ('as they were rounded' if rounded else 'equal to the bit')
    )
    _check_logits(
      request,
      console,
      model,
      table,
      reference=_reference(request, hf),
      ours=lambda: (
        _Source(hf.table, hf.tensors, hf.names).params()
        if rounded
        else logits_check.params_of_checkpoint(reader)
      ),
    )
  console.say(f'done: {request.target}')


# ---- parts of them -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Source:
  """Other files, with the table that reads them."""

  table: Table
  tensors: Tensors
  names: Names

  @property
  def num_bytes(self) -> int:
    return sum(
      math.prod(self.tensors.shapes[n]) * self.tensors.dtypes[n].itemsize
      for n in self.names.of_table.values()
    )

  def params(self) -> Any:
    return logits_check.params_of_files(self.tensors, self.table, self.names)

  def logits(self, model: ModelFields, batch: Mapping[str, Any]) -> tuple[Any, str]:
    return (
      logits_check.our_logits(model, self.params(), batch),
      'our own model with the tensors of the other files',
    )


def _write_ours(
  request: Request,
  console: Console,
  model: ModelFields,
  source: _Source,
  *,
  step: int,
  about: Mapping[str, Any],
  reference: Reference,
  extra: Callable[[pathlib.Path], Any] = lambda folder: None,
) -> None:
  """Writes our checkpoint of `source`, model.gin, and what else belongs beside them."""
  table, tensors, names = source.table, source.tensors, source.names
  with new_folder(request.target, num_bytes=num_bytes(table.our_shapes)) as folder:
    with (
      console.progress('written', source.num_bytes) as told,
      ParamsWriter(
        folder,
        step=step,
        shapes=table.our_shapes,
        chunks=table.chunks(),
        about=about,
        compress=source.num_bytes < num_bytes(table.our_shapes),
      ) as writer,
    ):
      copy_to_ours(tensors, table, names, writer, step=told)
    extra(folder)
    (folder / MODEL_GIN).write_text(
      gin_text(
        model,
        title=(
          f'{request.source.name}, converted by python -m t5x_gpu.convert: {_counted(table)}.\n'
          'Include it in place of a file of gin_configs/models/.'
        ),
      ),
      'utf-8',
    )
    reader = ParamsReader(folder)
    with console.progress('read again', source.num_bytes) as told:
      compare_with_ours(tensors, table, names, reader, step=told)
    console.say(f'check: {len(names.of_table)} tensors read again: equal to the bit')
    again = request.read_gin(folder / MODEL_GIN)
    assert not differences(again, model), f'{MODEL_GIN}: {differences(again, model)}'
    _check_logits(
      request,
      console,
      again,
      table,
      reference=reference,
      ours=lambda: logits_check.params_of_checkpoint(reader),
    )
  console.say(f'done: {request.target}: checkpoint_{step}, {MODEL_GIN}')


def _check_logits(
  request: Request,
  console: Console,
  model: ModelFields,
  table: Table,
  *,
  reference: Reference,
  ours: Callable[[], Any],
) -> None:
  """Compares logits; raises CheckpointError if they differ or do not fit into memory."""
  if request.check == 'tensors':
    console.say('check: logits were NOT compared (--check=tensors)')
    return
  logits_check.check_memory(table.our_shapes, copies=3.0)  # measured: 2.1 to 2.8
  batch = logits_check.random_batch(model)
  theirs, against = reference(batch)
  console.say(
    'check: '
    + str(
      logits_check.compare(
        model,
        logits_check.our_logits(model, ours(), batch),
        theirs,
        batch,
        against=against,
        tolerance=request.tolerance,
      )
    )
  )


def _reference(request: Request, hf: HfModel) -> Reference:
  """Returns what computes the logits of a Hugging Face model: transformers, if it is there."""
  if request.check == 'transformers' or (
    request.check == 'auto' and logits_check.has_transformers()
  ):
    return lambda batch: logits_check.transformers_logits(hf.folder, hf.model, batch)
  return lambda batch: _Source(hf.table, hf.tensors, hf.names).logits(hf.model, batch)


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


def _model_of(record: Record) -> ModelFields:
  """Returns the model that the config.json beside a record describes."""
  own = {
    read_as for read_as, name in record.names.of_table.items() if name not in record.names.copies
  }
  return from_hf(record.config, has_tensor=lambda name: name in own)


def _hf_config(model: ModelFields, family: str, like: Optional[Record]) -> str:
  """Returns the text of config.json: the one of `like`, unless it describes another model."""
  if like is not None:
    theirs = _model_of(like)
    longer = model.config.max_length not in (0, theirs.config.max_length)
    if not longer and not differences(theirs, model):
      return (like.folder / CONFIG).read_text('utf-8')
  return (
    json.dumps(to_hf(model, family=family, like=like.config if like else None), indent=2) + '\n'
  )


def _hf_layout(
  request: Request, table: Table, like: Optional[Record]
) -> tuple[Mapping[str, str], Optional[str], Names]:
  """Returns headers, index and names: those of `like` if it has the same tensors, else new ones."""
  if like is not None and request.dtype is None and not like.names.unused:
    known = {
      name: shape for header in like.headers.values() for name, _, shape in tensors_of(header)
    }
    mine = {like.names.of_table.get(n, n): s for n, s in table.their_shapes.items()}
    if {n: s for n, s in known.items() if n not in like.names.copies} == mine:
      return like.headers, like.index, like.names
  dtype = FLOATS[request.dtype or 'float32']
  tensors = [(name, dtype, shape) for name, shape in sorted(table.their_shapes.items())]
  return (
    make_headers(tensors, max_file_bytes=request.max_file_bytes),
    None,
    Names({name: name for name in table.their_shapes}),
  )


def _bytes(header: str) -> int:
  return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in tensors_of(header))


def _counted(table: Table) -> str:
  return f'{num_bytes(table.our_shapes) // 4:,} parameters'
