"""A Hugging Face model on disk: config.json, weights and tokenizer, checked against each other.

`open_hf` reads a model; `read_modules` and `write_modules` have sentence-transformers' modules
around an encoder; `check_tokenizer` and `end_differences` compare token ids; `write_record` keeps
names and layout of the weights, so that converting back gives the same files.
"""

import dataclasses
import functools
import importlib
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Optional

from t5x_gpu.checkpoint.run_files import SENTENCEPIECE
from t5x_gpu.conversion.hf.config_json import LAYERS, family_of, from_hf, training_differences
from t5x_gpu.conversion.hf.names import FAMILIES
from t5x_gpu.conversion.model_spec import OPTIONS, ModelFields
from t5x_gpu.conversion.name_table import Table
from t5x_gpu.conversion.safetensors_io import FILE_NAME, INDEX, SafetensorsFolder, tensors_of
from t5x_gpu.conversion.tensor_copy import ForeignWeights, Names, match_names, without_copies
from t5x_gpu.errors import CheckpointError
from t5x_gpu.storage.files import check_not_refused
from t5x_gpu.storage.json_schema import (
  Also,
  Fields,
  Json,
  JsonObject,
  JsonValue,
  ListOf,
  MapOf,
  Nullable,
  Whole,
  check,
  read_json,
)

# `modules.json` lists sentence-transformers' modules: the encoder, a pooling with its own
# config.json, and perhaps a normalization. Without that file, sentence-transformers takes the mean
# of the tokens.
MODULES = 'modules.json'
FILES = (MODULES, 'sentence_bert_config.json', 'config_sentence_transformers.json')
_POOLING, _NORMALIZE = '1_Pooling', '2_Normalize'
_TYPE = 'sentence_transformers.models.'
_MODULES = ListOf(Fields({'type': str, 'path': str}))
# t5x_gpu's names -> sentence-transformers'. Several modes at once, which join vectors there, are
# refused.
_MODES = {'first_token': 'cls_token', 'mean': 'mean_tokens'}


def read_modules(folder: pathlib.Path) -> Optional[JsonObject]:
  """Returns the arguments of `EncoderModel` that modules.json sets; None without that file.

  Raises:
    CheckpointError: a file cannot be read, or names something that is not supported.
  """
  path = folder / MODULES
  if not path.is_file():
    return None
  try:
    modules = [(m['type'].rpartition('.')[2], m['path']) for m in read_json(path, _MODULES)]
    kinds = [kind for kind, _ in modules]
    if kinds not in (['Transformer', 'Pooling'], ['Transformer', 'Pooling', 'Normalize']):
      raise _refused(path, f'lists the modules {", ".join(kinds)}')
    path = folder / modules[1][1] / 'config.json'
    return {'pooling': _pooling(path, read_json(path, dict)), 'normalize': len(kinds) == 3}
  except (ValueError, OSError) as e:
    check_not_refused(e, path)
    raise CheckpointError(f'{path} cannot be read ({e}).', fix='Copy the file again.') from e


def _pooling(path: pathlib.Path, config: Json) -> str:
  modes = [name.removeprefix('pooling_mode_') for name, on in config.items() if on is True]
  modes = [mode for mode in modes if f'pooling_mode_{mode}' in config]
  ours = [name for name, theirs in _MODES.items() if modes == [theirs]]
  if not ours:
    raise _refused(path, f'pools by {" and ".join(modes) or "an unknown mode"}')
  if config.get('include_prompt') is False:
    raise _refused(path, 'leaves prompts out of the vector')
  return ours[0]


def _refused(path: pathlib.Path, what: str) -> CheckpointError:
  return CheckpointError(
    f'{path} {what}. Supported: an encoder, then the mean of its tokens (mean_tokens) or its first '
    'token (cls_token), then perhaps a normalization.',
    fix=f'Such a model cannot be converted. To convert the encoder alone, remove {MODULES}.',
    docs='convert.md#families',
  )


def write_modules(model: ModelFields, folder: pathlib.Path, *, is_new: bool) -> None:
  """Writes modules.json and the files that it names, unless `folder` has equivalent files.

  Args:
    model: an embedding model.
    folder: folder of a Hugging Face model.
    is_new: False if the folder reproduces an original model, which may have lacked modules.json.
  """
  options = {**OPTIONS['encoder'], **model.options}
  wanted = {name: options[name] for name in ('pooling', 'normalize')}
  found = read_modules(folder)
  if found == wanted or (found is None and not is_new and wanted['pooling'] == 'mean'):
    return
  names = [('Transformer', ''), ('Pooling', _POOLING)]
  names += [('Normalize', _NORMALIZE)] if wanted['normalize'] else []
  _write(
    folder / MODULES,
    [
      {'idx': i, 'name': str(i), 'path': path, 'type': _TYPE + kind}
      for i, (kind, path) in enumerate(names)
    ],
  )
  modes = {f'pooling_mode_{their}': our == wanted['pooling'] for our, their in _MODES.items()}
  _write(
    folder / _POOLING / 'config.json', {'word_embedding_dimension': model.config.embed_dim, **modes}
  )


def _write(path: pathlib.Path, content: JsonValue) -> None:
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(content, indent=2) + '\n', 'utf-8')


GENERATION = 'generation_config.json'
_TOKENIZER = Fields(
  {'model': dict}, optional={'added_tokens': Nullable(ListOf(Fields({'id': Whole()})))}
)
_IDS = MapOf(Whole())
_error = functools.partial(CheckpointError, docs='convert.md#refused')


def check_start(folder: pathlib.Path) -> None:
  """Raises CheckpointError if generation_config.json starts a decoder with an id other than 0.

  t5x_gpu's decoders start with 0. config.json's start id is checked with its other keys.
  """
  path = folder / GENERATION
  start = _read(path).get('decoder_start_token_id')
  if start not in (0, None):
    raise _error(
      f'{path} has decoder_start_token_id = {start}; our decoders start with id 0.',
      fix='Use the generation_config.json that came with the weights, or set it to 0 there.',
    )


def _read(path: pathlib.Path) -> JsonObject:
  """Returns the JSON object in a file; {} if the file does not exist."""
  try:
    return read_json(path, dict) if path.is_file() else {}
  except (ValueError, OSError) as e:
    check_not_refused(e, path)
    raise CheckpointError(f'{path} cannot be read ({e}).', fix='Copy the file again.') from e


def end_differences(folder: pathlib.Path, config: Json, *, vocab_size: int) -> list[str]:
  """Returns sentences on where the files disagree about the tokens that end a text.

  Args:
    folder: folder of the files.
    config: its config.json.
    vocab_size: vocabulary size of the model.
  """
  ends: dict[str, list[JsonValue]] = {}
  for file, content in (('config.json', config), (GENERATION, _read(folder / GENERATION))):
    found = content.get('eos_token_id')
    if found is not None:
      ends[file] = found if isinstance(found, list) else [found]
  notes = [
    f'eos_token_id of {file} is {end}, but the model has ids from 0 to {vocab_size - 1}'
    for file, found in ends.items()
    for end in found
    if not (isinstance(end, int) and 0 <= end < vocab_size)
  ]
  own, used = _end_of_tokenizer(folder), ends.get(GENERATION, ends.get('config.json'))
  if own is not None and used and own not in used:
    notes.append(
      f'the tokenizer ends a text with id {own}, and eos_token_id is {", ".join(map(str, used))}. '
      'infer stops at all of them'
    )
  return notes


def _end_of_tokenizer(folder: pathlib.Path) -> Optional[int]:
  """Returns the id of the `eos_token` of tokenizer_config.json, or None."""
  token = _read(folder / 'tokenizer_config.json').get('eos_token')
  token = token.get('content') if isinstance(token, dict) else token
  parsed = _read(folder / 'tokenizer.json')
  for added in parsed.get('added_tokens') or []:
    if added.get('content') == token:
      return added['id']
  vocab = parsed.get('model', {}).get('vocab')
  return vocab.get(token) if isinstance(vocab, dict) and isinstance(token, str) else None


def check_tokenizer(folder: pathlib.Path, vocab_size: int) -> None:
  """Raises CheckpointError if a tokenizer file has ids beyond the vocabulary of the model."""
  readers = {
    'tokenizer.json': _ids_of_tokenizer,
    'vocab.json': _ids_of_dictionary,
    'added_tokens.json': _ids_of_dictionary,
    'vocab.txt': _ids_of_lines,
    **dict.fromkeys(SENTENCEPIECE, _ids_of_sentencepiece),
  }
  if (folder / 'tokenizer.json').is_file():
    readers.pop('tokenizer.model')  # unused then; it may be in tiktoken's format
  for file, ids in readers.items():
    path = folder / file
    if not path.is_file():
      continue
    try:
      largest = ids(path)
    except (ValueError, RuntimeError, OSError) as e:  # SentencePiece raises RuntimeError
      check_not_refused(e, path)
      raise CheckpointError(
        f'{path} cannot be read ({type(e).__name__}: {e}).', fix='Copy the file again.'
      ) from e
    if largest >= vocab_size:
      raise _error(
        f'{path} has token ids up to {largest}, but the model has vocab_size = {vocab_size}: ids '
        f'from 0 to {vocab_size - 1}.',
        fix='Use the tokenizer files that came with the weights.',
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
  with path.open(encoding='utf-8') as lines:  # str.splitlines would also split inside tokens
    return sum(1 for _ in lines) - 1


def _ids_of_sentencepiece(path: pathlib.Path) -> int:
  try:
    library = importlib.import_module('sentencepiece')
  except ModuleNotFoundError:  # installed with SeqIO; conversion does not need it
    return -1
  return library.SentencePieceProcessor(model_file=str(path)).get_piece_size() - 1


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
  'additional_chat_templates/*.jinja',
  'README.md',
  'LICENSE*',
  *FILES,
  '[0-9]_*/config.json',
)
RECORD = 'safetensors_headers.json'


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


def read_config(folder: pathlib.Path) -> JsonObject:
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
  folder: pathlib.Path, config: Json, tensors: SafetensorsFolder, names: Names, family: str
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


def _carried(source: pathlib.Path) -> set[pathlib.Path]:
  """Returns the files of configuration and tokenizer in a folder, relative to it."""
  return {
    path.relative_to(source)
    for pattern in CARRIED
    for path in source.glob(pattern)
    if path.is_file() and path.name not in (INDEX, RECORD)
  }


def changed_files(source: pathlib.Path, carried: pathlib.Path) -> list[str]:
  """Returns the files of configuration and tokenizer that differ, or are in one folder only."""

  def contents(folder: pathlib.Path, name: pathlib.Path) -> Optional[bytes]:
    return (folder / name).read_bytes() if (folder / name).is_file() else None

  return [
    str(name)
    for name in sorted(_carried(source) | _carried(carried))
    if not name.name.startswith(('README', 'LICENSE'))
    and contents(source, name) != contents(carried, name)
  ]


def carry_files(source: pathlib.Path, target: pathlib.Path, *, without: Sequence[str] = ()) -> None:
  """Copies configuration and tokenizer from one folder to another."""
  target.mkdir(exist_ok=True)
  for name in sorted(_carried(source) - set(map(pathlib.Path, without))):
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
  def config(self) -> JsonObject:
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
