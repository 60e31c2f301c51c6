"""A Hugging Face model on disk: config.json, weights and tokenizer, checked against each other."""

import dataclasses
import functools
import importlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.checkpoint.convert.hf_config import LAYERS, family_of, from_hf
from t5x_gpu.checkpoint.convert.hf_names import FAMILIES
from t5x_gpu.checkpoint.convert.model_spec import ModelFields
from t5x_gpu.checkpoint.convert.name_table import Table
from t5x_gpu.checkpoint.convert.safetensors_io import (
  FILE_NAME,
  INDEX,
  SafetensorsFolder,
  tensors_of,
)
from t5x_gpu.checkpoint.convert.tensor_copy import Names, check_tensors, match_names, without_copies
from t5x_gpu.checkpoint.run_files import SENTENCEPIECE
from t5x_gpu.config.json_schema import (
  Also,
  Fields,
  ListOf,
  MapOf,
  Nullable,
  Whole,
  check,
  read_json,
)
from t5x_gpu.errors import CheckpointError

CONFIG = 'config.json'
# What goes along with the weights, unread but for the tokenizer's ids.
CARRIED = (
  CONFIG,
  'generation_config.json',
  'tokenizer*',
  '*token*.json',
  'vocab*',
  'merges.txt',
  '*.model',
  'chat_template*',
  'README.md',
  'LICENSE*',
)
RECORD = 'safetensors_headers.json'
_TOKENIZER = Fields(
  {'model': dict}, optional={'added_tokens': Nullable(ListOf(Fields({'id': Whole()})))}
)
_IDS = MapOf(Whole())


def _header_problem(header: str) -> str:
  try:
    tensors_of(header)
  except ValueError as e:
    return str(e)
  return ''


def _file_problem(headers: Mapping[str, str]) -> str:
  outside = [name for name in headers if not re.fullmatch(FILE_NAME.pattern, name)]
  return (
    f'{outside[0]!r} is a file outside of the folder, or no safetensors file' if (outside) else ''
  )


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
  """A model of Hugging Face that ours can be.

  Attributes:
    folder: where it lies.
    config: parsed config.json.
    family: a key of `hf_names.FAMILIES`.
    tensors: the weights.
    model: what config.json describes.
    table: our parameters and their tensors.
    names: how the files name them.
  """

  folder: pathlib.Path
  config: Mapping[str, Any]
  family: str
  tensors: SafetensorsFolder
  model: ModelFields
  table: Table
  names: Names


def open_hf(
  folder: str | os.PathLike, *, family: Optional[str] = None, drop: Sequence[str] = ()
) -> HfModel:
  """Returns the model in `folder`; nothing but headers and configuration is read.

  Args:
    folder: config.json and safetensors files.
    family: what it must be; None for what config.json says.
    drop: patterns of tensors to leave out.
  Raises:
    CheckpointError: files that are missing, cut off, pickled, or of another family; tensors that
      are missing or left over; vocabularies that disagree.
  """
  folder = pathlib.Path(folder)
  tensors = SafetensorsFolder(folder)
  config = read_config(folder)
  found = family_of(config)
  if family not in (None, found):
    raise CheckpointError(
      f'{folder} is a {found} model, --family={family} asks for another.',
      fix=f'Leave --family out, or set --family={found}.',
    )
  names = match_names(tensors, FAMILIES[found], drop=drop)
  _check_token_table(folder, config, tensors, names, found)
  num_layers = max(config.get(key) or 0 for key in LAYERS)
  if num_layers > len(tensors.shapes):  # a table of so many layers would fill the memory
    raise CheckpointError(
      f'{folder / CONFIG} describes {num_layers:,} layers, and the files have '
      f'{len(tensors.shapes):,} tensors.',
      fix=f'Take the {CONFIG} that belongs to the weights.',
      docs='convert.md#refused',
    )
  model = from_hf(
    config,
    has_tensor=lambda name: name in names.of_table and names.of_table[name] not in names.copies,
  )
  table = Table(FAMILIES[found].rules(model), model.sizes())
  names = without_copies(names, table)
  check_tensors(
    tensors,
    table,
    names,
    what=f'The tensors of {folder} are not those of the {found} model that its {CONFIG} describes',
    fix=f'Take weights and {CONFIG} of one model. Tensors that are left over and not '
    "wanted are dropped by name: --drop='PATTERN' (a regular expression; repeat it "
    'for several).',
  )
  check_tokenizer(folder, model.config.vocab_size)
  return HfModel(folder, config, found, tensors, model, table, names)


def read_config(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the parsed config.json of `folder`; raises CheckpointError without one."""
  path = folder / CONFIG
  try:
    return read_json(path, dict)
  except FileNotFoundError as e:
    raise CheckpointError(
      f'{folder} has no {CONFIG}.',
      fix='Copy it from where the weights come from; it says what they are.',
    ) from e
  except (ValueError, OSError) as e:
    raise CheckpointError(f'{path} cannot be read ({e}).', fix='Copy the file again.') from e


def _check_token_table(
  folder: pathlib.Path,
  config: Mapping[str, Any],
  tensors: SafetensorsFolder,
  names: Names,
  family: str,
) -> None:
  """Raises CheckpointError if the token table is of another family or size than config.json."""
  wanted = FAMILIES[family].token_table
  if wanted not in names.of_table:
    others = [name for name, other in FAMILIES.items() if other.token_table in names.of_table]
    if others:
      raise CheckpointError(
        f'{folder / CONFIG} says that this is a {family} model; the tensors are those of '
        f'{" or ".join(others)}: {FAMILIES[others[0]].token_table} is there, {wanted} is not.',
        fix=f'Take the {CONFIG} that belongs to the weights.',
        docs='convert.md#refused',
      )
    return  # the whole list of what is missing comes later
  rows, vocab_size = tensors.shapes[names.of_table[wanted]][0], config.get('vocab_size')
  if rows != vocab_size:
    raise CheckpointError(
      f'{folder / CONFIG} says vocab_size = {vocab_size}, and {wanted} has {rows} rows.',
      fix=f'Take the {CONFIG} that belongs to the weights; if only the number is wrong, set '
      f'"vocab_size": {rows} in it.',
      docs='convert.md#refused',
    )


def check_tokenizer(folder: pathlib.Path, vocab_size: int) -> None:
  """Raises CheckpointError if tokenizer files of `folder` have ids that the model has not."""
  readers = {
    'tokenizer.json': _ids_of_tokenizer,
    'vocab.json': _ids_of_dictionary,
    'added_tokens.json': _ids_of_dictionary,
    'vocab.txt': _ids_of_lines,
    **dict.fromkeys(SENTENCEPIECE, _ids_of_sentencepiece),
  }
  if (folder / 'tokenizer.json').is_file():
    readers.pop('tokenizer.model')  # nobody needs it; it may be tiktoken's
  for file, ids in readers.items():
    path = folder / file
    if not path.is_file():
      continue
    try:
      largest = ids(path)
    except (ValueError, RuntimeError, OSError) as e:  # SentencePiece raises RuntimeError
      raise CheckpointError(
        f'{path} cannot be read ({type(e).__name__}: {e}).', fix='Copy the file again.'
      ) from e
    if largest >= vocab_size:
      raise CheckpointError(
        f'{path} has token ids up to {largest}, and the model vocab_size = {vocab_size}: ids '
        f'from 0 to {vocab_size - 1}.',
        fix='Take the tokenizer files that belong to the weights.',
        docs='convert.md#refused',
      )


def _ids_of_tokenizer(path: pathlib.Path) -> int:
  parsed = read_json(path, _TOKENIZER)
  vocab = parsed['model'].get('vocab', {})
  check(vocab, _IDS if isinstance(vocab, dict) else list, 'the vocabulary')
  ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
  return max(ids + [token['id'] for token in parsed.get('added_tokens') or []], default=-1)


def _ids_of_dictionary(path: pathlib.Path) -> int:
  return max(read_json(path, _IDS).values(), default=-1)


def _ids_of_lines(path: pathlib.Path) -> int:
  with path.open(encoding='utf-8') as lines:  # a token may hold what str.splitlines splits at
    return sum(1 for _ in lines) - 1


def _ids_of_sentencepiece(path: pathlib.Path) -> int:
  try:
    library = importlib.import_module('sentencepiece')
  except ModuleNotFoundError:  # comes with SeqIO; a conversion alone does not need it
    return -1
  return library.SentencePieceProcessor(model_file=str(path)).get_piece_size() - 1


# ---- what is kept beside a converted checkpoint, so that the way back is exact -----------------


def carry_files(source: pathlib.Path, target: pathlib.Path, *, without: Sequence[str] = ()) -> None:
  """Copies configuration and tokenizer from one folder to another."""
  found = sorted(
    {
      path
      for pattern in CARRIED
      for path in source.glob(pattern)
      if path.is_file() and path.name not in (*without, INDEX, RECORD)
    }
  )
  target.mkdir(exist_ok=True)
  for path in found:
    shutil.copyfile(path, target / path.name)


def write_record(hf: HfModel, target: pathlib.Path) -> None:
  """Writes down how the weights were named and laid out."""
  index = hf.folder / INDEX
  (target / RECORD).write_text(
    json.dumps(
      {
        'family': hf.family,
        'of_table': dict(hf.names.of_table),
        'copies': dict(hf.names.copies),
        'unused': list(hf.names.unused),
        'headers': hf.tensors.headers,
        'index': index.read_text('utf-8') if index.exists() else None,
      }
    ),
    'utf-8',
  )


@dataclasses.dataclass(frozen=True)
class Record:
  """What `write_record` wrote, or the same of a Hugging Face model's own folder.

  Attributes:
    folder: where it, config.json and tokenizer files lie.
    family, names: as in HfModel.
    headers, index: of the safetensors files.
  """

  folder: pathlib.Path
  family: str
  names: Names
  headers: Mapping[str, str]
  index: Optional[str]

  @functools.cached_property
  def config(self) -> dict[str, Any]:
    return read_config(self.folder)


def read_record(folder: pathlib.Path) -> Optional[Record]:
  """Returns what `folder` (of a converted checkpoint, or of a Hugging Face model) keeps, if it
  does.

  Raises:
    CheckpointError: it cannot be read.
  """
  for place in (folder, folder / 'hf'):
    if (place / RECORD).is_file():
      try:
        read = read_json(place / RECORD, _RECORD)
        return Record(
          place,
          read['family'],
          Names(read['of_table'], read['copies'], tuple(read['unused'])),
          read['headers'],
          read['index'],
        )
      except (ValueError, OSError) as e:
        raise CheckpointError(
          f'{place / RECORD} cannot be read ({e}).',
          fix='Remove it: the way back then makes names and files of its own.',
        ) from e
  if (folder / CONFIG).is_file():
    hf = open_hf(folder)
    index = folder / INDEX
    return Record(
      folder,
      hf.family,
      hf.names,
      hf.tensors.headers,
      index.read_text('utf-8') if index.exists() else None,
    )
  return None
