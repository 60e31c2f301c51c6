"""A Hugging Face model on disk: config.json, weights and tokenizer, checked against each other."""

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.checkpoint.convert.hf.config import LAYERS, family_of, from_hf, training_differences
from t5x_gpu.checkpoint.convert.hf.names import FAMILIES
from t5x_gpu.checkpoint.convert.hf.sentence_modules import FILES as SENTENCE_FILES
from t5x_gpu.checkpoint.convert.hf.sentence_modules import read_modules
from t5x_gpu.checkpoint.convert.hf.token_files import (
  GENERATION,
  check_start,
  check_tokenizer,
  end_differences,
)
from t5x_gpu.checkpoint.convert.model_spec import ModelFields
from t5x_gpu.checkpoint.convert.name_table import Table
from t5x_gpu.checkpoint.convert.safetensors_io import (
  FILE_NAME,
  INDEX,
  SafetensorsFolder,
  tensors_of,
)
from t5x_gpu.checkpoint.convert.tensor_copy import (
  ForeignWeights,
  Names,
  match_names,
  without_copies,
)
from t5x_gpu.config.json_schema import Also, Fields, ListOf, MapOf, Nullable, read_json
from t5x_gpu.config.set_aside import check_not_refused
from t5x_gpu.errors import CheckpointError

CONFIG = 'config.json'
# Files copied along with the weights. Of the tokenizer files, only the ids are read.
CARRIED = (
  CONFIG,
  GENERATION,
  'tokenizer*',
  '*token*.json',
  'vocab*',
  'merges.txt',
  '*.model',
  'chat_template*',
  'README.md',
  'LICENSE*',
  *SENTENCE_FILES,
  '[0-9]_*/config.json',
)
RECORD = 'safetensors_headers.json'
_error = functools.partial(CheckpointError, docs='convert.md#refused')


def _header_problem(header: str) -> str:
  try:
    tensors_of(header)
  except ValueError as e:
    return str(e)
  return ''


def _file_problem(headers: Mapping[str, str]) -> str:
  outside = [name for name in headers if not re.fullmatch(FILE_NAME.pattern, name)]
  return f'{outside[0]!r} is not a safetensors file in the folder' if outside else ''


_RECORD = Fields(
  {
    'family': str,
    'of_table': MapOf(str),
    'copies': MapOf(str),
    'unused': ListOf(str),
    'index': Nullable(str),
    'headers': Also(MapOf(Also(str, _header_problem)), _file_problem),
  }
)


@dataclasses.dataclass(frozen=True)
class HfModel:
  """A supported Hugging Face model.

  Attributes:
    folder: the folder of its files.
    family: a key of `hf.names.FAMILIES`.
    model: the t5x_gpu model with the same configuration.
    weights: its tensors, with the name table.
    headers: file name -> header of the safetensors file.
    training: sentences on how training `model` here differs from the original training.
    ends: sentences on files that disagree on the tokens that end a text.
  """

  folder: pathlib.Path
  family: str
  model: ModelFields
  weights: ForeignWeights
  headers: Mapping[str, str]
  training: Sequence[str] = ()
  ends: Sequence[str] = ()


def open_hf(
  folder: str | os.PathLike, *, family: Optional[str] = None, drop: Sequence[str] = ()
) -> HfModel:
  """Returns the model in `folder`; reads only headers and configuration.

  Args:
    folder: has config.json and safetensors files.
    family: the family that it must have; None for any.
    drop: patterns of tensors to leave out.
  Raises:
    CheckpointError: files are missing, truncated, pickled or of another family; tensors are missing
      or left over; vocabularies disagree.
  """
  folder = pathlib.Path(folder)
  tensors = SafetensorsFolder(folder)
  config = read_config(folder)
  found = family_of(config)
  if family not in (None, found):
    raise CheckpointError(
      f'{folder} is a {found} model, but --family={family} was given.',
      fix=f'Leave --family out, or set --family={found}.',
    )
  names = match_names(tensors, FAMILIES[found], drop=drop)
  _check_token_table(folder, config, tensors, names, found)
  num_layers = max(config.get(key) or 0 for key in LAYERS)
  if num_layers > len(tensors.shapes):  # a name table with that many layers would fill the memory
    raise _error(
      f'{folder / CONFIG} describes {num_layers:,} layers, but the files have only '
      f'{len(tensors.shapes):,} tensors.',
      fix=f'Use the {CONFIG} that came with the weights.',
    )
  model = from_hf(
    config,
    has_tensor=lambda name: name in names.of_table and names.of_table[name] not in names.copies,
  )
  rules = FAMILIES[found].rules_of(model, names.of_table)
  sizes = model.sizes()
  most = max(math.prod(sizes[axis] for axis in rule.stacks) for rule in rules)
  if most > len(tensors.shapes):
    raise _error(
      f'{folder / CONFIG} describes {num_layers:,} layers of {model.config.num_experts:,} experts, '
      f'but the files have only {len(tensors.shapes):,} tensors.',
      fix=f'Use the {CONFIG} that came with the weights.',
    )
  table = Table(rules, sizes)
  weights = ForeignWeights(table, tensors, without_copies(names, table))
  weights.check(
    what=f'The tensors of {folder} do not match the {found} model that its {CONFIG} describes',
    fix=f'Use weights and {CONFIG} of the same model. To ignore tensors that are left over, drop '
    "them by name: --drop='PATTERN' (a regular expression; may be repeated).",
  )
  vocab_size = model.config.vocab_size
  check_tokenizer(folder, vocab_size)
  if model.kind == 'encoder_decoder':
    check_start(folder)
  if model.options.get('head_type') == 'embedding':
    options = {**model.options, **(read_modules(folder) or {})}
    model = dataclasses.replace(model, options=options)
  return HfModel(
    folder,
    found,
    model,
    weights,
    tensors.headers,
    training_differences(config, model),
    end_differences(folder, config, vocab_size=vocab_size),
  )


def read_config(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the parsed config.json of `folder`; raises CheckpointError if it cannot be read."""
  path = folder / CONFIG
  try:
    return read_json(path, dict)
  except FileNotFoundError as e:
    raise CheckpointError(
      f'{folder} has no {CONFIG}.',
      fix='Copy it from the source of the weights; it describes the model.',
    ) from e
  except (ValueError, OSError) as e:
    check_not_refused(e, path)
    raise CheckpointError(f'{path} cannot be read ({e}).', fix='Copy the file again.') from e


def _check_token_table(
  folder: pathlib.Path,
  config: Mapping[str, Any],
  tensors: SafetensorsFolder,
  names: Names,
  family: str,
) -> None:
  """Raises CheckpointError if the token table does not match the family or size in config.json."""
  wanted = FAMILIES[family].token_table
  if wanted not in names.of_table:
    others = [name for name, other in FAMILIES.items() if other.token_table in names.of_table]
    if others:
      raise _error(
        f'{folder / CONFIG} says that this is a {family} model, but the tensors belong to '
        f'{" or ".join(others)}: they include {FAMILIES[others[0]].token_table} but not {wanted}.',
        fix=f'Use the {CONFIG} that came with the weights.',
      )
    return  # a later check lists all missing tensors
  rows, vocab_size = tensors.shapes[names.of_table[wanted]][0], config.get('vocab_size')
  if rows != vocab_size:
    raise _error(
      f'{folder / CONFIG} says vocab_size = {vocab_size}, but {wanted} has {rows} rows.',
      fix=f'Use the {CONFIG} that came with the weights. If only the number is wrong, set '
      f'"vocab_size": {rows} in it.',
    )


def carry_files(source: pathlib.Path, target: pathlib.Path, *, without: Sequence[str] = ()) -> None:
  """Copies configuration and tokenizer from one folder to another."""
  found = {
    path.relative_to(source)
    for pattern in CARRIED
    for path in source.glob(pattern)
    if path.is_file() and path.name not in (INDEX, RECORD)
  }
  target.mkdir(exist_ok=True)
  for name in sorted(found - set(map(pathlib.Path, without))):
    (target / name).parent.mkdir(exist_ok=True)
    shutil.copyfile(source / name, target / name)


def write_record(hf: HfModel, target: pathlib.Path) -> None:
  """Records names and layout of the weights, so that converting back gives the same files."""
  names = hf.weights.names
  (target / RECORD).write_text(
    json.dumps(
      {
        'family': hf.family,
        'of_table': dict(names.of_table),
        'copies': dict(names.copies),
        'unused': list(names.unused),
        'headers': hf.headers,
        'index': _index_text(hf.folder),
      }
    ),
    'utf-8',
  )


def _index_text(folder: pathlib.Path) -> Optional[str]:
  index = folder / INDEX
  return index.read_text('utf-8') if index.exists() else None


@dataclasses.dataclass(frozen=True)
class HfRecord:
  """Names and layout of Hugging Face weights: read from a record, or from the model itself.

  Attributes:
    folder: folder with config.json and the tokenizer files.
    family: as in HfModel.
    names: as in ForeignWeights.
    headers: file name -> header of the safetensors file.
    index: text of the index; None if there is none.
  """

  folder: pathlib.Path
  family: str
  names: Names
  headers: Mapping[str, str]
  index: Optional[str]

  @functools.cached_property
  def config(self) -> dict[str, Any]:
    return read_config(self.folder)


def read_record(folder: pathlib.Path) -> Optional[HfRecord]:
  """Returns the record of a converted checkpoint or Hugging Face model; None if it has none.

  Raises:
    CheckpointError: the record cannot be read.
  """
  for place in (folder, folder / 'hf'):
    if (place / RECORD).is_file():
      try:
        read = read_json(place / RECORD, _RECORD)
        return HfRecord(
          place,
          read['family'],
          Names(read['of_table'], read['copies'], tuple(read['unused'])),
          read['headers'],
          read['index'],
        )
      except (ValueError, OSError) as e:
        check_not_refused(e, place / RECORD)
        raise CheckpointError(
          f'{place / RECORD} cannot be read ({e}).',
          fix='Remove it. The conversion to Hugging Face then chooses new names and files.',
        ) from e
  if (folder / CONFIG).is_file():
    hf = open_hf(folder)
    return HfRecord(folder, hf.family, hf.weights.names, hf.headers, _index_text(folder))
  return None
