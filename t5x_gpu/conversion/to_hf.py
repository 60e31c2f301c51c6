"""Converts a t5x_gpu checkpoint to a Hugging Face model, or merges its adapters (`merge_lora`).

Adapters are merged while the checkpoint is read. The folder of a Hugging Face model appears only
after every tensor has been read back and the logits have been compared.
"""

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Optional

import numpy as np

from t5x_gpu.checkpoint.arrays import boxes, smaller_chunk
from t5x_gpu.checkpoint.atomic_folder import new_folder
from t5x_gpu.checkpoint.params_files import ParamsReader, Place, num_bytes, tree_problems
from t5x_gpu.checkpoint.run_files import carry_hf_folder
from t5x_gpu.conversion import conversion, name_table
from t5x_gpu.conversion.conversion import Batch, ConversionRequest, check_logits, hf_reference
from t5x_gpu.conversion.hf.config_json import from_hf, guess_family, to_hf
from t5x_gpu.conversion.hf.folder import (
  CONFIG,
  GENERATION,
  HfRecord,
  carry_files,
  open_hf,
  read_record,
  write_modules,
)
from t5x_gpu.conversion.hf.names import FAMILIES
from t5x_gpu.conversion.model_spec import ModelFields, describe, differences
from t5x_gpu.conversion.name_table import Table
from t5x_gpu.conversion.safetensors_io import SafetensorsWriter, make_headers, tensors_of
from t5x_gpu.conversion.tensor_copy import (
  FLOATS,
  Names,
  OurPiece,
  compare_with_theirs,
  copy_to_theirs,
)
from t5x_gpu.conversion.to_ours import counted, write_ours
from t5x_gpu.conversion.tokenizer import (
  RunText,
  carry_vocabulary,
  export_tokenizer,
  export_vocabulary,
  generation_config,
  token_ids,
  tokenizer_warning,
)
from t5x_gpu.errors import CheckpointError, ConfigError, Problem, UserError, first_line
from t5x_gpu.models.dpo import policy_of
from t5x_gpu.models.lora import LoraModel, factors_of, without_adapters
from t5x_gpu.models.model import Model
from t5x_gpu.partitioning.trees import Shape
from t5x_gpu.storage.json_schema import Json
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
    self.manifest: Json = reader.manifest
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

  def adapted_logits(batch: Batch) -> tuple[np.ndarray, str]:
    adapted = dataclasses.replace(lora, model=conversion.for_the_check(model).build())
    params = conversion.params_of_checkpoint(reader)
    return conversion.logits_of(adapted, params, batch), 'the model with its adapters'

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


_SHOWN = 300  # characters of the reason why a run cannot be exported


class _ScaledParams:
  """A reader that multiplies some parameters by a power of two, which is exact.

  Args:
    reader: reader of all parameters.
    factor: factor for parameters whose path matches `pattern`.
  """

  def __init__(self, reader: ParamsReader | MergedParams, factor: float, pattern: str):
    self._reader, self._factor, self._pattern = reader, np.float32(factor), re.compile(pattern)
    self.path, self.shapes = reader.path, reader.shapes

  def read_at(self, path: str, place: Place) -> np.ndarray:
    """Returns a part of a parameter."""
    value = self._reader.read_at(path, place)
    return value * self._factor if self._pattern.search(path) else value


def folded(model: ModelFields, family: str) -> tuple[ModelFields, float, str]:
  """Folds the attention scale of a model into its queries, to match the scale of `family`.

  Returns the model with the scale of `family`, the factor, and a pattern of the parameters to
  multiply: kernel and bias of the queries, or the scale of their norm. If the factor is not a power
  of two, and so not exact, the model is unchanged.
  """
  c = model.config
  scale = None if family in ('t5', 'umt5') else float(c.head_dim)
  factor = ((scale or 1.0) / (c.query_pre_attn_scalar or 1.0)) ** 0.5
  has_key = family in ('gemma2', 'gemma3_text')
  if (
    has_key
    or factor == 1.0
    or math.frexp(factor)[0] != 0.5
    or (c.qk_norm and c.qk_norm_kind == 'head_plus_one')
  ):
    return model, 1.0, ''
  config = dataclasses.replace(c, query_pre_attn_scalar=scale)
  pattern = r'/query_norm/scale$' if c.qk_norm else r'/query/(kernel|bias)$'
  return dataclasses.replace(model, config=config), factor, pattern


def export_problem(model: Model) -> Optional[Problem]:
  """Returns what keeps a model from being exported to Hugging Face, in one line, or None."""
  try:
    fields = describe(without_adapters(policy_of(model)))
    family = guess_family(fields)
    to_hf(folded(fields, family)[0], family=family)
  except UserError as e:
    first, *others = e.what.splitlines()
    reason = f'{first} {"; ".join(line.strip() for line in others)}'.strip()
    return Problem(reason if len(reason) <= _SHOWN else f'{reason[: _SHOWN - 3]}...')
  return None


def convert_ours(request: ConversionRequest, console: Console) -> None:
  """Writes a Hugging Face model from a t5x_gpu checkpoint; adapters are merged into the kernels."""
  stored = ParamsReader(request.model_dir, step=request.step, step_setting='--step')
  reader = stored if request.lora is None else MergedParams(stored, request.lora)
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
  original, unscaled = model, reader
  model, factor, pattern = folded(model, family)
  if factor != 1.0:
    reader = _ScaledParams(reader, factor, pattern)
    console.say(
      f'folded: queries are multiplied by {factor:g}, as {family} divides attention logits by '
      f'sqrt(head_dim), and the run by sqrt({original.config.query_pre_attn_scalar or 1:g})'
    )
  text, problem = _text_of(request, unscaled)
  ids = token_ids(text, model, like.config if like else {}) if text else {}
  config = _hf_config(model, family, like, ids)
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
    is_t5 = model.kind == 'encoder_decoder'
    if like:
      carry_files(like.folder, folder, without=(CONFIG,))
    if text:
      console.say(f'vocabulary: {export_tokenizer(text, folder, is_t5=is_t5)}')
      _write_generation(text, model, ids, folder, console)
    elif not like:
      console.say(f'vocabulary: {export_vocabulary(request.vocabulary, folder, is_t5=is_t5)}')
    if problem:
      console.say(f'generation: {GENERATION} left out: {problem}')
    (folder / CONFIG).write_text(config, 'utf-8')
    if text and (warning := tokenizer_warning(text, folder, target=request.target, is_t5=is_t5)):
      console.say(f'vocabulary: {warning}')
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
      model if rounded else original,
      table.our_shapes,
      reference=hf_reference(request, hf),
      ours=lambda: (
        conversion.params_of_files(hf.weights)
        if rounded
        else conversion.params_of_checkpoint(unscaled)
      ),
    )
  console.say(f'done: {request.target}')


def _text_of(
  request: ConversionRequest, reader: ParamsReader | MergedParams
) -> tuple[Optional[RunText], str]:
  """Returns how `infer` reads and ends texts; or None and the reason why it is unknown."""
  try:
    return request.read_text(reader.manifest), ''
  except UserError as e:
    return None, first_line(e)


def _write_generation(
  text: RunText, model: ModelFields, ids: Json, folder: pathlib.Path, console: Console
) -> None:
  content, notes = generation_config(text, model, ids)
  (folder / GENERATION).write_text(json.dumps(content, indent=2) + '\n', 'utf-8')
  ends = ', '.join(map(str, text.decoding.stop_tokens)) or 'none'
  start = content.get('decoder_start_token_id', content.get('bos_token_id', 'none'))
  console.say(f'generation: a text starts with id {start}; ids that end it: {ends}')
  for note in filter(None, (text.note, *notes)):
    console.say(f'generation: {note}')


def _model_of(record: HfRecord) -> ModelFields:
  """Returns the model that the config.json next to a record describes."""
  own = {
    name for name, actual in record.names.of_table.items() if actual not in record.names.copies
  }
  return from_hf(record.config, has_tensor=lambda name: name in own)


def _hf_config(model: ModelFields, family: str, like: Optional[HfRecord], ids: Json) -> str:
  """Returns the text of config.json; the text in `like` if it describes this model and `ids`."""
  if like is not None:
    theirs = _model_of(like)
    longer = model.config.max_length not in (0, theirs.config.max_length)
    if not longer and not differences(theirs, model):
      if all(like.config.get(name) == number for name, number in ids.items()):
        return (like.folder / CONFIG).read_text('utf-8')
      return json.dumps({**like.config, **ids}, indent=2) + '\n'
  config = to_hf(model, family=family, like=like.config if like else None)
  # transformers' default ids may lie outside the token table.
  unknown = {} if like else dict.fromkeys(('bos_token_id', 'eos_token_id'))
  return json.dumps({**unknown, **config, **ids}, indent=2) + '\n'


def _hf_layout(
  request: ConversionRequest, table: Table, like: Optional[HfRecord]
) -> tuple[Mapping[str, str], Optional[str], Names]:
  """Returns headers, index and names, taken from `like` if it has the same tensors."""
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
