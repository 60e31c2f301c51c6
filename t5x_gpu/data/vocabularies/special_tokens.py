"""Tokens that the files next to a tokenizer.json name or declare. No TF.

Such a token stays whole in a text. tokenizer.json lists most of them; transformers adds the tokens
that only the other files have.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Optional

from t5x_gpu.errors import DataError
from t5x_gpu.storage.files import check_not_refused
from t5x_gpu.storage.json_schema import Also, Fields, JsonObject, MapOf, Whole, check, read_json

_CONFIG, _SPECIAL, _ADDED = 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json'
_DECLARED = 'added_tokens_decoder'  # in tokenizer_config.json: id -> token
_LISTS = ('additional_special_tokens', 'extra_special_tokens')
_FLAGS = ('single_word', 'lstrip', 'rstrip', 'normalized', 'special')
_TOKEN = Fields({'content': str}, optional=dict.fromkeys(_FLAGS, bool))


def _id_problem(tokens: JsonObject) -> str:
  return next((f'{number!r} is not an id' for number in tokens if not number.isdecimal()), '')


_FORMS = {
  _SPECIAL: dict,
  _CONFIG: Fields({}, optional={_DECLARED: Also(MapOf(_TOKEN), _id_problem)}),
  _ADDED: MapOf(Whole()),
}


@dataclasses.dataclass(frozen=True)
class DeclaredToken:
  """A token that a file declares.

  Attributes:
    text: its text.
    flags: tokenizer.json's name of a flag -> value.
    id: its id, or None if the file does not give one.
    file: name of the file.
    replaces: whether it replaces the flags of the same token in tokenizer.json.
  """

  text: str
  flags: dict[str, bool]
  id: Optional[int]
  file: str
  replaces: bool = False


def read_special_tokens(
  folder: pathlib.Path,
) -> tuple[dict[str, str], list[DeclaredToken], list[DeclaredToken]]:
  """Returns 'eos_token' -> its text for the named tokens; tokens with an id, by id; the other ones.

  Raises:
    DataError: a file cannot be read.
  """
  files = {name: _read(folder / name) for name in _FORMS}
  named: dict[str, str] = {}
  special: dict[str, DeclaredToken] = {}
  # As in transformers: special_tokens_map.json overrides the configuration of older tokenizers, and
  # is not read for newer ones.
  for file in (_CONFIG,) if _DECLARED in files[_CONFIG] else (_CONFIG, _SPECIAL):
    for key, value in _tokens(files[file]):
      fields = {'content': value} if isinstance(value, str) else value
      token = _declared({**fields, 'special': True}, file)
      special[token.text] = token
      if key not in _LISTS:
        named[key] = token.text
  if _DECLARED in files[_CONFIG]:
    declared = [
      dataclasses.replace(_declared(fields, _CONFIG), id=int(number), replaces=True)
      for number, fields in files[_CONFIG][_DECLARED].items()
    ]
  else:  # older files
    declared = [
      dataclasses.replace(
        _declared({'content': text, 'special': text in special}, _ADDED), id=number
      )
      for text, number in files[_ADDED].items()
    ]
  known = {token.text for token in declared}
  others = [token for token in special.values() if token.text not in known]
  return named, sorted(declared, key=lambda token: token.id or 0), others


def _declared(fields: JsonObject, file: str) -> DeclaredToken:
  """Returns a token without an id; a flag that is missing has transformers' default."""
  normalized = not fields.get('special', False)
  flags = {flag: fields.get(flag, flag == 'normalized' and normalized) for flag in _FLAGS}
  return DeclaredToken(fields['content'], flags, None, file)


def _tokens(content: JsonObject) -> Iterator[tuple[str, str | JsonObject]]:
  """Yields (key, token) of the named tokens, and of the lists of further special tokens."""
  for key, value in content.items():
    if key in _LISTS and isinstance(value, list):
      yield from ((key, token) for token in value)
    elif key in _LISTS and isinstance(value, dict):  # named tokens of a model
      yield from value.items()
    elif key.endswith('_token') and isinstance(value, (str, dict)):
      yield key, value


def _read(file: pathlib.Path) -> JsonObject:
  """Returns the content of a file; {} if it does not exist."""
  try:
    content = read_json(file, _FORMS[file.name]) if file.is_file() else {}
    for key, token in _tokens(content):
      check(token, _TOKEN if isinstance(token, dict) else str, key)
    return content
  except (ValueError, OSError) as e:
    check_not_refused(e, file)
    raise DataError(
      f'{str(file)!r} does not have the form that save_pretrained writes: {e!r}.',
      fix='Correct it, or copy it from the model again.',
      parameters=('DatasetConfig.vocabulary',),
    ) from e
