"""The text of gin files: where files are found, their statements, and bindings of the command line.

`GinFiles` finds files; `read` parses text into statements with file and line, without importing or
binding anything; `keep_data_only` leaves only the data of an untrusted file; `parse_override`
parses `--gin.KEY=VALUE`. gin 0.5.0 resolves references while it parses and stops at the first
failure. Here references and macros stay symbols, so that all problems are reported at once.
"""

import dataclasses
import io
import os
import pathlib
import re
import shlex
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Optional, TypeVar, Union

from gin import config_parser

from t5x_gpu.errors import ConfigError, Problem, did_you_mean
from t5x_gpu.storage.user_paths import user_path

Statement = Union[
  config_parser.BindingStatement,
  config_parser.ImportStatement,
  config_parser.IncludeStatement,
  config_parser.BlockDeclaration,
]
_T = TypeVar('_T')


@dataclasses.dataclass(frozen=True)
class Reference:
  """`@scope/name` or, evaluated, `@scope/name()`.

  Attributes:
    written: 'scope/name', as in the file.
    evaluate: whether gin calls it without arguments.
    selector: gin's complete name; '' before `Reader` has looked up the name.
    target: the function or class; None before.
  """

  written: str
  evaluate: bool
  selector: str = dataclasses.field(default='', compare=False)
  target: Optional[Callable[..., object]] = dataclasses.field(default=None, compare=False)

  @property
  def scopes(self) -> tuple[str, ...]:
    return tuple(self.written.split('/')[:-1])

  @property
  def name(self) -> str:
    """The name as written, without scopes."""
    return self.written.rpartition('/')[2]

  def __repr__(self) -> str:
    return f'@{self.written}{"()" if self.evaluate else ""}'


@dataclasses.dataclass(frozen=True)
class Macro:
  """`%NAME`. Before `Reader` has looked up the name, it may be a constant."""

  name: str

  def __repr__(self) -> str:
    return f'%{self.name}'


@dataclasses.dataclass(frozen=True, repr=False)
class Constant:
  """`%module.NAME`, a value that Python code has given a name. `name` is complete."""

  name: str

  __repr__ = Macro.__repr__


REQUIRED = Constant('gin.REQUIRED')
Symbol = Union[Reference, Macro, Constant]
# A value in a gin file.
Value = Union[
  Symbol,
  str,
  bytes,
  bool,
  int,
  float,
  None,
  list['Value'],
  tuple['Value', ...],
  dict['Value', 'Value'],
]


class _Symbols(config_parser.ParserDelegate):
  def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
    return Reference(scoped_configurable_name, evaluate)

  def macro(self, macro_name: str) -> Macro:
    return Macro(macro_name)


# Modules that gin files of older versions import -> where their names are now.
MOVED = {
  't5x_gpu.analysis.profile.profile_config': 't5x_gpu.run.profile_config',
  't5x_gpu.metrics.loggers.logging_config': 't5x_gpu.metrics.logging_config',
  't5x_gpu.models.preference.dpo': 't5x_gpu.models.dpo',
  't5x_gpu.planning.assumptions': 't5x_gpu.tools.planning.assumptions',
  't5x_gpu.training.guards.spikes': 't5x_gpu.training.spikes',
}


# What reading text as Python's tokens may raise besides SyntaxError; from 3.12 on, surrogates and
# some null bytes raise the last two.
_OF_TOKENIZE = (tokenize.TokenError, RecursionError, UnicodeError, SystemError)


def read(text: str, *, shown: str) -> Iterator[Statement]:
  """Yields the statements of gin `text`, whose values hold `Reference` and `Macro` objects.

  Args:
    text: content of a gin file.
    shown: its name in messages.
  Raises:
    ConfigError: the text is not gin; names `shown`:line and shows the line.
  """
  lines = text.splitlines()
  source = io.StringIO(text)
  try:
    for statement in config_parser.ConfigParser(source, _Symbols()):
      if isinstance(statement, config_parser.ImportStatement):
        statement = statement._replace(module=MOVED.get(statement.module, statement.module))
      yield statement
  except SyntaxError as e:
    line, message = _location(e)
    raise _not_gin(message, shown=shown, line=line, lines=lines) from e
  except _OF_TOKENIZE as e:
    if isinstance(e, RecursionError) or 'too many nested' in str(e):
      raise ConfigError(
        f'{shown} has brackets that are nested too deeply to be read.',
        fix='Correct the file, or name another: --gin_file=FILE.',
      ) from e
    if isinstance(e, tokenize.TokenError):
      message, (line, _) = e.args
      if 'EOF' in message:
        message = 'a bracket or a triple quote is not closed before the end of the file'
    else:
      message = 'a character cannot be read'
      line = text.count('\n', 0, max(source.tell() - 1, 0)) + 1  # the last that was read
    raise _not_gin(message, shown=shown, line=min(line, len(lines)), lines=lines) from e


def _location(error: SyntaxError) -> tuple[int, str]:
  """Returns (line, message). The second argument is gin's Location or the tokenizer's tuple."""
  message, *location = error.args
  line = location[0][1] if location else error.lineno
  return line or 1, str(message).splitlines()[0]


def _not_gin(message: str, *, shown: str, line: int, lines: list[str]) -> ConfigError:
  content = lines[line - 1].strip() if 0 < line <= len(lines) else ''
  fix = ''
  key, equals, value = content.partition('=')
  quote = value.strip()[:1]
  if quote in ('"', "'") and value.count(quote) == 1:  # each Python has its own words for it
    message = 'a quote is not closed before the end of the line'
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
  except SyntaxError:
    return False
  return True


def parse_value(text: str) -> Value:
  """Returns the value that `text` spells. Raises SyntaxError unless it is one complete value."""
  try:
    found = list(config_parser.ConfigParser(f'value = {text}', _Symbols()))
  except _OF_TOKENIZE as e:
    raise SyntaxError(f'{text!r} is not a value') from e
  if len(found) != 1:
    raise SyntaxError(f'{text!r} is not a single value')
  return found[0].value


def instances(value: Value, kind: type[_T] | tuple[type[_T], ...]) -> Iterator[_T]:
  """Yields the objects of a `kind`, or of several, anywhere inside `value`."""
  if isinstance(value, kind):
    yield value
  elif isinstance(value, Mapping):
    for key, item in value.items():
      yield from instances(key, kind)
      yield from instances(item, kind)
  elif isinstance(value, (list, tuple)):
    for item in value:
      yield from instances(item, kind)


def map_symbols(value: Value, function: Callable[[Symbol], object]) -> Value:
  """Returns `value` with every reference, macro and constant replaced by `function(symbol)`."""
  if isinstance(value, Symbol):
    return function(value)
  if isinstance(value, Mapping):
    return {map_symbols(k, function): map_symbols(v, function) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return type(value)(map_symbols(item, function) for item in value)
  return value


# Constructors of these classes do not import modules, read files or call functions named in gin.
# Modules named in a DatasetConfig are imported when it is opened: see `may_import` in
# data/data_module.py.
ALLOWED = frozenset(
  {
    't5x_gpu.data.batches.DatasetConfig',
    't5x_gpu.layers.positions.RotaryEmbedding',
    't5x_gpu.models.config.TransformerConfig',
    't5x_gpu.models.decoder_only.DecoderOnlyModel',
    't5x_gpu.models.decoding.DecodingConfig',
    't5x_gpu.models.encoder.EncoderModel',
    't5x_gpu.models.encoder_decoder.EncoderDecoderModel',
    't5x_gpu.models.lora.LoraModel',
    't5x_gpu.models.dpo.DpoModel',
    't5x_gpu.models.transformer.TransformerLayer',
    't5x_gpu.partitioning.partitioner.Partitioner',
    't5x_gpu.runtime.distributed.DistributedConfig',
  }
)
_TRAIN = 't5x_gpu.train.train'


def keep_data_only(
  found: Iterable[Statement], *, wanted: Collection[str], shown: str
) -> list[Statement]:
  """Returns the bindings that `wanted` needs, and the imports for them.

  gin imports modules and calls functions by name, so a gin file is a program. Here everything but
  the bindings of `wanted` is removed before gin sees the file.

  Args:
    found: the statements of one gin file.
    wanted: names of macros, and of arguments of `train`.
    shown: the file's name in messages.
  Raises:
    ConfigError: `wanted` needs more than plain values and `ALLOWED`; names file:line.
  """
  found = list(found)
  problems: list[Problem] = []
  imports = _imports(found, problems, shown=shown)
  names = {id(s): _name(s, imports) for s in found if _is_binding(s)}
  todo = [
    s
    for s in found
    if _is_binding(s)
    and (s.arg_name if names[id(s)] == _TRAIN else names[id(s)].removeprefix('%')) in wanted
  ]
  needed: set[int] = set()
  used = {_TRAIN}
  while todo:
    statement = todo.pop()
    if id(statement) in needed:
      continue
    needed.add(id(statement))
    leads_to = {f'%{macro.name}' for macro in instances(statement.value, Macro)}
    for reference in instances(statement.value, Reference):
      name = _resolved(reference.name, imports)
      if name in ALLOWED:
        leads_to.add(name)
      else:
        problems.append(
          Problem(
            f'{shown}:{statement.location.line_num} names {reference}, which is not a '
            'model or setting of t5x_gpu and could run any code.'
          )
        )
    used |= leads_to
    todo += [s for s in found if _is_binding(s) and names[id(s)] in leads_to]
  if problems:
    raise ConfigError(
      f'{shown} is more than data',
      problems=problems,
      fix='The gin file of a checkpoint folder is read as data, because the folder may come from '
      'elsewhere.\nIf you trust it, add --trust_gin, which runs the file. Or give your own '
      'gin file: --gin_file=FILE.',
      docs='infer.md#trust',
    )
  return [
    s
    for s in found
    if id(s) in needed
    or is_dynamic(s)
    or isinstance(s, config_parser.ImportStatement)
    and any(name.startswith(f'{s.module}.') for name in used)
  ]


def _is_binding(statement: Statement) -> bool:
  return isinstance(statement, config_parser.BindingStatement)


def is_dynamic(statement: Statement) -> bool:
  """Returns whether this import turns on dynamic registration: names come from the imports."""
  is_import = isinstance(statement, config_parser.ImportStatement)
  return is_import and statement.is_from and statement.module == '__gin__.dynamic_registration'


def _imports(found: Iterable[Statement], problems: list[Problem], *, shown: str) -> dict[str, str]:
  """Returns imported name -> module; adds unresolvable imports to `problems`.

  Returns {} without dynamic registration, because names then do not come from the file's imports.
  """
  imports: dict[str, str] = {}
  for statement in found:
    place = f'{shown}:{statement.location.line_num}'
    if isinstance(statement, config_parser.IncludeStatement):
      problems.append(Problem(f'{place} includes {statement.filename!r}, another file.'))
    elif isinstance(statement, config_parser.ImportStatement):
      name = statement.bound_name()
      is_whole = statement.is_from or statement.alias
      module = statement.module if is_whole else statement.module.partition('.')[0]
      if imports.setdefault(name, module) != module:
        already = f'which is already {imports[name]}'
        problems.append(Problem(f'{place} imports {module} as {name!r}, {already}.'))
  return imports if any(map(is_dynamic, found)) else {}


def _name(statement: config_parser.BindingStatement, imports: dict[str, str]) -> str:
  """Returns '%scope/MACRO', or 'package.module.Class' for any scope."""
  if not statement.arg_name:
    return '%' + '/'.join(filter(None, (statement.scope, statement.selector)))
  return _resolved(statement.selector, imports)


def _resolved(selector: str, imports: dict[str, str]) -> str:
  """Returns 'package.module.Class' for gin's 'module.Class'; '' if it is not imported."""
  first, dot, rest = selector.partition('.')
  return f'{imports[first]}{dot}{rest}' if first in imports else ''


PACKAGE = pathlib.Path(__file__).resolve().parents[1]


class GinFiles:
  """Finds gin files in the working directory, `search_paths`, the package and its repository.

  gin 0.5.0's search treats a folder that Python could import as a package and then fails with a
  TypeError (resource_reader.py:89), so we read all files ourselves and pass only their text to gin.
  """

  def __init__(self, search_paths: Iterable[str] = ()):
    cwd = pathlib.Path.cwd()
    folders = [cwd, *((cwd / os.path.expanduser(p)) for p in search_paths), PACKAGE, PACKAGE.parent]
    self.folders = list(dict.fromkeys(map(user_path, folders)))

  def find(
    self, name: str, *, asked_at: str = '', included_by: Optional[pathlib.Path] = None
  ) -> pathlib.Path:
    """Returns the absolute path of the gin file `name`.

    Args:
      name: a path, absolute or relative to one of the folders; the first folder that has it wins.
      asked_at: 'FILE:LINE' of an include statement, for the message.
      included_by: the including file; its folder is searched last.
    Raises:
      ConfigError: the file does not exist; lists the searched folders and similar shipped files.
    """
    expanded = os.path.expanduser(name)
    folders = self.folders if included_by is None else [*self.folders, included_by.parent]
    tried = [user_path(folder / expanded) for folder in folders]
    for path in dict.fromkeys(tried):
      if path.is_file():
        return path
    where = (
      ''
      if os.path.isabs(expanded)
      else ' Searched folders: ' + ', '.join(map(str, dict.fromkeys(folders))) + '.'
    )
    asked = f'{asked_at} includes {name!r}, which' if asked_at else f'Gin file {name!r}'
    shipped = self.shipped()
    by_tail = [s for s in shipped if s.rsplit('/', 1)[1] == os.path.basename(name)]
    hint = f' Did you mean {by_tail[0]!r}?' if by_tail else did_you_mean(name, shipped)
    folder = any(path.is_dir() for path in tried)
    # T5X's files include each other from the root of their repository.
    above = () if included_by is None else included_by.parent.parents
    root = next((f for f in above if (f / expanded).is_file()), None)
    raise ConfigError(
      f'{asked} {"is a folder" if folder else "does not exist"}.{where}{hint if not root else ""}',
      fix=f'Add the folder that has this file: --gin_search_paths={shlex.quote(str(root))}'
      if root
      else 'Give the path from one of these folders, or add its folder: --gin_search_paths=FOLDER',
    )

  def shown(self, path: pathlib.Path) -> str:
    """Returns `path` relative to its folder, as messages and tables print it."""
    # The shortest path: a virtual environment may be inside the working directory.
    relative = [str(path.relative_to(f)) for f in self.folders if path.is_relative_to(f)]
    return min(relative, key=len, default=str(path))

  def is_shipped(self, shown: str) -> bool:
    """Returns whether a file, named as by `shown`, comes with the package."""
    found = next((path for f in self.folders if (path := f / shown).is_file()), None)
    roots = [folder / 'gin_configs' for folder in (PACKAGE, PACKAGE.parent)]
    return found is not None and any(found.is_relative_to(root) for root in roots)

  def shipped(self, subfolder: str = '') -> list[str]:
    """Returns the gin files of the package, in the form that users type."""
    for folder in (PACKAGE, PACKAGE.parent):
      root = folder / 'gin_configs'
      if root.is_dir():
        return sorted(str(p.relative_to(folder)) for p in (root / subfolder).rglob('*.gin'))
    return []


_KEY = re.compile(r'^([A-Za-z_][\w.]*/)*[A-Za-z_][\w.]*$')


@dataclasses.dataclass(frozen=True)
class Override:
  """One binding of the command line; `typed` is the text of the value."""

  key: str
  value: Value
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
    return Override(key, parse_value(value), value)
  except SyntaxError as e:
    if value[0] in '@%[({"\'':
      raise ConfigError(
        f'--gin.{key}={value} starts like a gin value but is not one.',
        fix='Close its quotes and brackets; text that begins with one of @%[({ '
        f'needs quotes: --gin.{key}="{value!r}"',
      ) from e
    return Override(key, value, value)
