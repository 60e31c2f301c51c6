"""Parses `--gin.KEY=VALUE` into a gin binding. Unquoted text becomes a string."""

import dataclasses
import re
import tokenize
from typing import Any

from t5x_gpu.config import statements
from t5x_gpu.errors import ConfigError

_KEY = re.compile(r'^([A-Za-z_][\w.]*/)*[A-Za-z_][\w.]*$')


@dataclasses.dataclass(frozen=True)
class Override:
  """One binding of the command line; `value` may hold statements.Reference and statements.Macro.

  `typed` is the text of the value.
  """

  key: str
  value: Any
  typed: str

  @property
  def origin(self) -> str:
    return f'--gin.{self.key}'


def parse_override(text: str) -> Override:
  """Returns the binding of 'KEY=VALUE'.

  A legal gin value keeps its meaning (`5`, `True`, `[1, 2]`, `"text"`, `%MACRO`, `@module.name()`).
  Anything else is a string, so `MODEL_DIR=runs/a` and `DTYPE=bfloat16` work without quotes. Escaped
  quotes as in T5X's shell scripts (`MODEL_DIR=\\"runs/a\\"`) have the same result.

  Raises:
    ConfigError: the value is missing, the key is malformed, or a quote or bracket is not closed.
  """
  key, equals, value = (part.strip() for part in text.partition('='))
  key = key.removeprefix('--gin.').removeprefix('%')
  if not equals or not value:
    raise ConfigError(
      f'--gin.{key} has no value.',
      fix=f'Write --gin.{key}=VALUE; the empty text is --gin.{key}="\'\'".',
    )
  if not _KEY.match(key):
    raise ConfigError(
      f'--gin.{key} is not a name that gin can bind.',
      fix='Write --gin.MACRO=VALUE, --gin.Class.parameter=VALUE or '
      '--gin.scope/Class.parameter=VALUE.',
    )
  for quote in ('\\"', "\\'"):
    if value.startswith(quote) and value.endswith(quote) and len(value) > 2:
      value = value.replace(quote, quote[1])
  try:
    return Override(key, statements.parse_value(value), value)
  except (SyntaxError, tokenize.TokenError) as e:
    if value[0] in '@%[({"\'':
      raise ConfigError(
        f'--gin.{key}={value} starts like a gin value but is not one.',
        fix='Close its quotes and brackets; text that begins with one of @%[({ '
        f'needs quotes: --gin.{key}="{value!r}"',
      ) from e
    return Override(key, value, value)
