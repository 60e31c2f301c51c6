"""T5X's gin files, evaluated without T5X: nothing is imported, registered or called.

`read` collects the bindings of gin files and of the command line; `Files.call` returns what gin
would pass to a function or class, as a tree of records. Scopes, macros and partial names have gin's
meaning (gin 0.5.0, config.py); of two bindings of one parameter the last wins, as in gin.
"""

import dataclasses
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Optional, Union

from gin import config_parser

from t5x_gpu.config import gin_text
from t5x_gpu.config.gin_text import GinFiles, Macro, Reference
from t5x_gpu.errors import ConfigError, Problem

_DYNAMIC = '__gin__.dynamic_registration'


@dataclasses.dataclass(frozen=True)
class Unset:
  """A value that the files leave to the user: `%gin.REQUIRED`, or a macro that nothing sets."""

  macro: str = ''

  def __repr__(self) -> str:
    return f'%{self.macro or "gin.REQUIRED"}'


@dataclasses.dataclass(frozen=True)
class Value:
  """One argument of a record.

  Attributes:
    value: a literal, a `Record`, an `Unset`, or a list, tuple or dict of these.
    origin: 'FILE:LINE' or '--gin.KEY' of the binding that names the parameter.
    macro: the macro that the binding consists of; '' if it is anything else.
  """

  value: Any
  origin: str
  macro: str = ''


@dataclasses.dataclass(frozen=True)
class Record:
  """What a call would get.

  Attributes:
    name: the full name of the function or class, 't5x.utils.DatasetConfig'.
    arguments: parameter -> value; parameters that no binding names are absent.
    scope: gin scope of the call, 'train'.
    evaluated: False for a reference without `()`.
  """

  name: str
  arguments: Mapping[str, Value]
  scope: str = ''
  evaluated: bool = True


@dataclasses.dataclass(frozen=True)
class T5XBinding:
  """`scope/selector.argument = value` at `origin`; a macro has neither argument nor full name.

  Attributes:
    selector: full name of the function or class, or the macro's name.
    value: holds `Reference` (with full names) and `Macro`.
  """

  scope: str
  selector: str
  argument: str
  value: Any
  origin: str

  @property
  def key(self) -> str:
    """The binding as gin spells it, 'train/t5x.utils.DatasetConfig.seed'."""
    name = f'{self.selector}.{self.argument}' if self.argument else self.selector
    return f'{self.scope}/{name}' if self.scope else name


class Files:
  """The bindings of T5X's gin files.

  Attributes:
    bindings: in the order in which gin binds them.
    modules: modules that the files import, apart from T5X's -> 'FILE:LINE'.
    ours: bindings of the command line ('KEY=VALUE') that name nothing of these files.
    used: keys of the bindings that `call` has read.
  """

  def __init__(
    self, bindings: Sequence[T5XBinding], modules: Mapping[str, str], ours: Sequence[str]
  ):
    self.bindings = tuple(bindings)
    self.modules = dict(modules)
    self.ours = tuple(ours)
    self.used: set[str] = set()
    self._last = {b.key: b for b in bindings}
    self._arguments: dict[str, dict[str, dict[str, T5XBinding]]] = {}
    for b in self._last.values():
      if b.argument:
        self._arguments.setdefault(b.selector, {}).setdefault(b.scope, {})[b.argument] = b

  def macro_origin(self, name: str) -> str:
    """Returns the origin of a macro's value, '' if nothing sets it."""
    return self._last[name].origin if name in self._last else ''

  def final(self) -> list[T5XBinding]:
    """Returns the bindings that no later one replaces."""
    return list(self._last.values())

  def call(self, name: str, *, scope: str = '', evaluated: bool = True) -> Record:
    """Returns what gin would pass to `name` (a full name) inside `scope`.

    Raises:
      ConfigError: a reference leads to itself.
    """
    return self._record(name, scope, evaluated, open_calls=())

  def _record(
    self, name: str, scope: str, evaluated: bool, *, open_calls: tuple[tuple[str, str], ...]
  ) -> Record:
    by_scope = self._arguments.get(name, {})
    parts = scope.split('/') if scope else []
    applied: dict[str, T5XBinding] = {}
    for i in range(len(parts) + 1):
      applied.update(by_scope.get('/'.join(parts[:i]), {}))
    arguments = {}
    for argument, binding in applied.items():
      self.used.add(binding.key)
      macro = binding.value.name if isinstance(binding.value, Macro) else ''
      value = self._value(binding.value, scope, binding, (*open_calls, (name, scope)))
      arguments[argument] = Value(value, binding.origin, macro)
    return Record(name, arguments, scope, evaluated)

  def _value(
    self, value: Any, scope: str, binding: T5XBinding, open_calls: tuple[tuple[str, str], ...]
  ) -> Any:
    def resolved(symbol: Union[Reference, Macro]) -> Any:
      if isinstance(symbol, Macro):
        target, own_scope = ('', symbol.name), symbol.name
      else:
        own_scope, _, name = symbol.written.rpartition('/')
        # Without (), T5X calls it after gin has left the scope.
        own_scope = own_scope or (scope if symbol.evaluate else '')
        target = name, own_scope
      if target in open_calls:
        raise ConfigError(f'{binding.origin}: {symbol} leads to itself.')
      if isinstance(symbol, Reference):
        return self._record(target[0], own_scope, symbol.evaluate, open_calls=open_calls)
      macro = self._last.get(symbol.name)
      if symbol.name == 'gin.REQUIRED' or macro is None or macro.argument:
        return Unset('' if symbol.name == 'gin.REQUIRED' else symbol.name)
      self.used.add(macro.key)
      found = self._value(macro.value, own_scope, macro, (*open_calls, target))
      return Unset(symbol.name) if found == Unset() else found

    return gin_text.map_symbols(value, resolved)


def names_t5x(module: str) -> bool:
  """Returns whether gin files that import `module` are T5X's."""
  return module == '__main__' or module.partition('.')[0] == 't5x'


class T5XReader:
  """Collects the bindings of gin files, includes first read where they stand.

  Args:
    files: finds gin files.
    known: full names that short names may mean, besides the names that the files use.
    parameters: the parameters of `known` that T5X has.
    native: names of t5x_gpu, 'batches.DatasetConfig', whose parameters a command may set.
  """

  def __init__(
    self,
    files: GinFiles,
    known: Collection[str],
    parameters: Collection[str],
    native: Collection[str],
  ):
    self._files, self._native = files, tuple(native)
    self._known, self._parameters = sorted(known), frozenset(parameters)
    self._aliases: dict[str, str] = {}  # what the files import, by the names that they give it
    self._seen: dict[str, None] = {}  # full names that the files use
    self._reading: list[pathlib.Path] = []
    self.bindings: list[T5XBinding] = []
    self.modules: dict[str, str] = {}
    self.ours: list[str] = []
    self.problems: list[Problem] = []

  def read_file(self, name: str, *, asked_at: str = '') -> None:
    """Reads one file; `asked_at` is the include statement, '' for the command line."""
    path = self._files.find(
      name, asked_at=asked_at, included_by=self._reading[-1] if self._reading else None
    )
    if path in self._reading:
      raise ConfigError(
        f'{asked_at} includes {name!r}, which is being read: the includes form a circle.'
      )
    shown = self._files.shown(path)
    self._reading.append(path)
    try:
      self._read_statements(gin_text.read(_text(path, shown), shown=shown), shown)
    finally:
      self._reading.pop()

  def _read_statements(self, found: Iterator[gin_text.Statement], shown: str) -> None:
    imports: dict[str, str] = {}
    for statement in found:
      at = f'{shown}:{statement.location.line_num}'
      if isinstance(statement, config_parser.ImportStatement):
        if statement.module != _DYNAMIC:
          whole = statement.is_from or statement.alias
          first = statement.module if whole else statement.module.partition('.')[0]
          imports[statement.bound_name()] = first
          if names_t5x(statement.module):
            self._aliases[statement.bound_name()] = first
          if not names_t5x(statement.module):
            self.modules.setdefault(statement.module, at)
      elif isinstance(statement, config_parser.IncludeStatement):
        self.read_file(statement.filename, asked_at=at)
      elif isinstance(statement, config_parser.BindingStatement):
        self.bind(
          statement.scope, statement.selector, statement.arg_name, statement.value, at, imports
        )

  def read_command_line(self, texts: Sequence[str]) -> None:
    """Binds each 'KEY=VALUE' that names something of the files; names are partial, as in gin."""
    macros = {b.selector for b in self.bindings if not b.argument}
    macros |= {m.name for b in self.bindings for m in gin_text.instances(b.value, Macro)}
    for text in texts:
      override = gin_text.parse_override(text)
      scope, selector, argument = config_parser.parse_binding_key(override.key)
      if argument and selector.partition('.')[0] in self._aliases:
        names = {self._full_name(selector, override.origin, self._aliases)}
      else:
        names = set(self._matches(selector)) if argument else macros & {selector}
      # A parameter that T5X does not have may be ours: `train` has more of them here.
      is_native = argument and any(f'.{name}'.endswith(f'.{selector}') for name in self._native)
      is_t5xs = any(f'{name}.{argument}' in self._parameters for name in names)
      if not names or is_native and not is_t5xs:
        self.ours.append(text)
        continue
      self.bind(scope, selector, argument, override.value, override.origin, self._aliases)

  def bind(
    self,
    scope: str,
    selector: str,
    argument: str,
    value: Any,
    origin: str,
    imports: Mapping[str, str],
  ) -> None:
    """Adds one binding with full names."""

    def full(symbol: Union[Reference, Macro]) -> Union[Reference, Macro]:
      if isinstance(symbol, Macro):
        return symbol
      own_scope, slash, name = symbol.written.rpartition('/')
      name = self._full_name(name, origin, imports)
      return Reference(f'{own_scope}{slash}{name}', symbol.evaluate)

    if argument:
      selector = self._full_name(selector, origin, imports)
    elif scope:  # a macro with a scope is a macro with a longer name
      scope, selector = '', f'{scope}/{selector}'
    value = gin_text.map_symbols(value, full)
    self.bindings.append(T5XBinding(scope, selector, argument, value, origin))

  def _full_name(self, selector: str, origin: str, imports: Mapping[str, str]) -> str:
    first, dot, rest = selector.partition('.')
    if first in imports:
      name = f'{imports[first]}{dot}{rest}'
    else:
      name = self._by_suffix(selector, origin)
    self._seen[name] = None
    return name

  def _matches(self, selector: str) -> list[str]:
    names = (*self._seen, *self._known)
    return [name for name in names if f'.{name}'.endswith(f'.{selector}')]

  def _by_suffix(self, selector: str, origin: str) -> str:
    """Returns the full name that ends in `selector`; a name in use comes before a known one."""
    for names in (self._seen, self._known):
      found = [n for n in names if f'.{n}'.endswith(f'.{selector}')]
      if len(found) == 1 or found and names is self._known:
        return found[0]
      if found:
        self.problems.append(
          Problem(f'{origin}: {selector!r} may mean {" or ".join(found)}: write more of the name.')
        )
        return found[-1]
    return selector


def _text(path: pathlib.Path, shown: str) -> str:
  try:
    return path.read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as e:
    raise ConfigError(f'{shown} cannot be read: {e}.') from e


def read(
  gin_files: Sequence[str],
  *,
  bindings: Sequence[str] = (),
  search_paths: Sequence[str] = (),
  known: Collection[str] = (),
  parameters: Collection[str] = (),
  native: Collection[str] = (),
) -> Files:
  """Returns the bindings of `gin_files`, then of `bindings` ('KEY=VALUE').

  Args:
    gin_files, search_paths: as for `gin_loader.load`.
    bindings: for these files, or for t5x_gpu where they name nothing of T5X's.
    known: full names that short names may mean, besides the names that the files use.
    parameters: the parameters of `known` that T5X has, 't5x.utils.DatasetConfig.seed'.
    native: names of t5x_gpu, 'batches.DatasetConfig', whose parameters `bindings` may set.
  Raises:
    ConfigError: a file is missing or is not gin; a short name has several meanings.
  """
  reader = T5XReader(GinFiles(search_paths), known, parameters, native)
  for name in gin_files:
    reader.read_file(name)
  reader.read_command_line(bindings)
  if reader.problems:
    raise ConfigError('The gin files cannot be read', problems=reader.problems)
  return Files(reader.bindings, reader.modules, reader.ours)


def imports(gin_files: Sequence[str], *, search_paths: Sequence[str] = ()) -> Iterator[str]:
  """Yields the modules that gin files and their includes import.

  Passes over files that cannot be found or parsed: whoever reads them reports the error.
  """
  files = GinFiles(search_paths)
  todo: list[tuple[str, Optional[pathlib.Path]]] = [(name, None) for name in gin_files]
  seen: set[pathlib.Path] = set()
  while todo:
    name, included_by = todo.pop(0)
    try:
      path = files.find(name, included_by=included_by)
      if path in seen:
        continue
      seen.add(path)
      shown = files.shown(path)
      for statement in gin_text.read(_text(path, shown), shown=shown):
        if isinstance(statement, config_parser.IncludeStatement):
          todo.append((statement.filename, path))
        elif isinstance(statement, config_parser.ImportStatement):
          yield statement.module
    except ConfigError:
      continue
