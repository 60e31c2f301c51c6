"""The conversion of our checkpoint to a Hugging Face model.

The folder appears only after every tensor has been read back and the logits have been compared.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Optional

from t5x_gpu.checkpoint.arrays.params_files import ParamsReader
from t5x_gpu.checkpoint.convert import logits_check
from t5x_gpu.checkpoint.convert.conversion import ConversionRequest, check_logits, hf_reference
from t5x_gpu.checkpoint.convert.hf.config import from_hf, guess_family, to_hf
from t5x_gpu.checkpoint.convert.hf.folder import CONFIG, HfRecord, carry_files, open_hf, read_record
from t5x_gpu.checkpoint.convert.hf.names import FAMILIES
from t5x_gpu.checkpoint.convert.hf.sentence_modules import write_modules
from t5x_gpu.checkpoint.convert.merge_lora import MergedParams, check_params
from t5x_gpu.checkpoint.convert.model_spec import ModelFields, differences
from t5x_gpu.checkpoint.convert.name_table import Table
from t5x_gpu.checkpoint.convert.safetensors_io import SafetensorsWriter, make_headers, tensors_of
from t5x_gpu.checkpoint.convert.tensor_copy import (
  FLOATS,
  Names,
  compare_with_theirs,
  copy_to_theirs,
)
from t5x_gpu.checkpoint.convert.to_ours import counted
from t5x_gpu.checkpoint.convert.vocabulary import export_vocabulary
from t5x_gpu.checkpoint.storage.atomic_folder import new_folder
from t5x_gpu.errors import ConfigError
from t5x_gpu.terminal.console import Console


def convert_ours(request: ConversionRequest, console: Console) -> None:
  """Writes a Hugging Face model from our checkpoint; adapters are merged into the kernels."""
  reader: Any = ParamsReader(request.model_dir, step=request.step, step_setting='--step')
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
      f'The model of {reader.path} is unknown.',
      fix='Name the gin file that it was trained with: --gin_file=FILE.',
    )
  family = request.family or (record.family if record else guess_family(model))
  like = record if record and record.family == family else None
  config = _hf_config(model, family, like)
  rules = FAMILIES[family].rules_of(model, like.names.of_table if like else ())
  table = Table(rules, model.sizes())
  check_params(reader, table.our_shapes)
  headers, index, names = _hf_layout(request, table, like)
  console.say(f'from: {reader.path}: t5x_gpu, {counted(table.our_shapes)}')
  size = sum(
    math.prod(shape) * dtype.itemsize
    for header in headers.values()
    for _, dtype, shape in tensors_of(header)
  )
  with new_folder(request.target, num_bytes=size) as folder:
    if like:
      carry_files(like.folder, folder, without=(CONFIG,))
    else:
      is_t5 = model.kind == 'encoder_decoder'
      console.say(f'vocabulary: {export_vocabulary(request.vocabulary, folder, is_t5=is_t5)}')
    (folder / CONFIG).write_text(config, 'utf-8')
    if model.options.get('head_type') == 'embedding':
      write_modules(model, folder, is_new=like is None)
    with console.progress('written', size) as advance:
      writer = SafetensorsWriter(folder, headers, index=index)
      rounded = copy_to_theirs(reader, table, names, writer, advance=advance)
    hf = open_hf(folder, family=family)
    num_tensors = len(hf.weights.tensors.shapes)
    if rounded:
      console.say(
        f'rounded: {len(rounded)} of {num_tensors} tensors lost digits '
        f'in {hf.weights.tensors.dtypes[rounded[0]]} (--dtype=float32 keeps them)'
      )
    with console.progress('read back', size) as advance:
      compare_with_theirs(reader, hf.weights, advance=advance)
    console.say(
      f'check: {num_tensors} tensors read back: '
      + ('equal after rounding' if rounded else 'bit-identical')
    )
    check_logits(
      request,
      console,
      model,
      table.our_shapes,
      reference=hf_reference(request, hf),
      ours=lambda: (
        logits_check.params_of_files(hf.weights)
        if rounded
        else logits_check.params_of_checkpoint(reader)
      ),
    )
  console.say(f'done: {request.target}')


def _model_of(record: HfRecord) -> ModelFields:
  """Returns the model that the config.json next to a record describes."""
  own = {
    name for name, actual in record.names.of_table.items() if actual not in record.names.copies
  }
  return from_hf(record.config, has_tensor=lambda name: name in own)


def _hf_config(model: ModelFields, family: str, like: Optional[HfRecord]) -> str:
  """Returns the text of config.json: that of `like`, unless it describes another model."""
  if like is not None:
    theirs = _model_of(like)
    longer = model.config.max_length not in (0, theirs.config.max_length)
    if not longer and not differences(theirs, model):
      return (like.folder / CONFIG).read_text('utf-8')
  config = to_hf(model, family=family, like=like.config if like else None)
  return json.dumps(config, indent=2) + '\n'


def _hf_layout(
  request: ConversionRequest, table: Table, like: Optional[HfRecord]
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
