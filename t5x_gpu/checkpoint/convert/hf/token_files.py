"""Checks the token ids in files next to the weights: tokenizer, start and end tokens."""

import functools
import importlib
import pathlib
from collections.abc import Mapping
from typing import Any, Optional

from t5x_gpu.checkpoint.run_files import SENTENCEPIECE
from t5x_gpu.config.json_schema import Fields, ListOf, MapOf, Nullable, Whole, check, read_json
from t5x_gpu.config.set_aside import check_not_refused
from t5x_gpu.errors import CheckpointError

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


def _read(path: pathlib.Path) -> dict[str, Any]:
  """Returns the JSON object in a file; {} if the file does not exist."""
  try:
    return read_json(path, dict) if path.is_file() else {}
  except (ValueError, OSError) as e:
    check_not_refused(e, path)
    raise CheckpointError(f'{path} cannot be read ({e}).', fix='Copy the file again.') from e


def end_differences(
  folder: pathlib.Path, config: Mapping[str, Any], *, vocab_size: int
) -> list[str]:
  """Returns sentences on where the files disagree about the tokens that end a text.

  Args:
    folder: folder of the files.
    config: its config.json.
    vocab_size: vocabulary size of the model.
  """
  ends: dict[str, list[Any]] = {}
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
