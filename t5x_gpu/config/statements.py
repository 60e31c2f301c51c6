"""Parses gin text into statements with file and line, without importing or binding anything.

gin 0.5.0 resolves references while it parses and stops at the first failure. Here references and
macros stay symbols, so that all problems are reported at once, and values are shown as written.
"""

import dataclasses
import io
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, Union

from gin import config_parser

from t5x_gpu.errors import ConfigError

Statement = Union[
  config_parser.BindingStatement,
  config_parser.ImportStatement,
  config_parser.IncludeStatement,
  config_parser.BlockDeclaration,
]
_T = TypeVar('_T')


@dataclasses.dataclass(frozen=True)
class Reference:
  """`@scope/name` or, evaluated, `@scope/name()`."""

  scoped_selector: str
  evaluate: bool

  def __repr__(self) -> str:
    return f'@{self.scoped_selector}{"()" if self.evaluate else ""}'


@dataclasses.dataclass(frozen=True)
class Macro:
  """`%NAME`, which may also name a gin constant."""

  name: str

  def __repr__(self) -> str:
    return f'%{self.name}'


class _Symbols(config_parser.ParserDelegate):
  def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
    return Reference(scoped_configurable_name, evaluate)

  def macro(self, macro_name: str) -> Macro:
    return Macro(macro_name)


def read(text: str, *, shown: str) -> Iterator[Statement]:
  """Yields the statements of gin `text`, whose values hold `Reference` and `Macro` objects.

  Args:
    text: content of a gin file.
    shown: its name in messages.
  Raises:
    ConfigError: the text is not gin; names `shown`:line and shows the line.
  """
  lines = text.splitlines()
  try:
    yield from config_parser.ConfigParser(io.StringIO(text), _Symbols())
  except SyntaxError as e:
    line, message = _location(e)
    raise _not_gin(message, shown=shown, line=line, lines=lines) from e
  except tokenize.TokenError as e:
    message, (line, _) = e.args
    if 'EOF' in message:
      message = 'a bracket or a triple quote is not closed before the end of the file'
    raise _not_gin(message, shown=shown, line=min(line, len(lines)), lines=lines) from e
  except RecursionError as e:
    raise ConfigError(
      f'{shown} has brackets that are nested too deeply to be read.',
      fix='Correct the file, or name another: --gin_file=FILE.',
    ) from e


def _location(error: SyntaxError) -> tuple[int, str]:
  """Returns (line, message). The second argument is gin's Location or the tokenizer's tuple."""
  message, *location = error.args
  line = location[0][1] if location else error.lineno
  return line or 1, str(message).splitlines()[0]


def _not_gin(message: str, *, shown: str, line: int, lines: list[str]) -> ConfigError:
  content = lines[line - 1].strip() if 0 < line <= len(lines) else ''
  fix = ''
  key, equals, value = content.partition('=')
  value = value.partition('#')[0].strip()
  if not equals and content and content.endswith(')') is False and ':' not in content:
    fix = 'A binding is spelled `Class.parameter = value`, a block `Class:` and indented lines.'
  elif value and value[0] not in '@%[({"\'' and not is_literal(value):
    fix = f'Text needs quotes: {key.strip()} = {value!r}'
  return ConfigError(f'{shown}:{line} is not gin: {message.rstrip(".")}.\n    {content}', fix=fix)


def is_literal(text: str) -> bool:
  """Returns whether `text` is one complete gin value: a literal, a reference or a macro."""
  try:
    parse_value(text)
  except (SyntaxError, tokenize.TokenError):
    return False
  return True


def parse_value(text: str) -> Any:
  """Returns the value that `text` spells. Raises SyntaxError unless it is one complete value."""
  found = list(config_parser.ConfigParser(f'value = {text}', _Symbols()))
  if len(found) != 1:
    raise SyntaxError(f'{text!r} is not a single value')
  return found[0].value


def instances(value: Any, kind: type[_T]) -> Iterator[_T]:
  """Yields the objects of a `kind` anywhere inside `value`."""
  if isinstance(value, kind):
    yield value
  elif isinstance(value, Mapping):
    for key, item in value.items():
      yield from instances(key, kind)
      yield from instances(item, kind)
  elif isinstance(value, (list, tuple)):
    for item in value:
      yield from instances(item, kind)


def map_symbols(value: Any, function: Any) -> Any:
  """Returns `value` with every reference and macro replaced by `function(symbol)`."""
  if isinstance(value, (Reference, Macro)):
    return function(value)
  if isinstance(value, Mapping):
    return {map_symbols(k, function): map_symbols(v, function) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return type(value)(map_symbols(item, function) for item in value)
  return value
