"""Reads gin files and command-line bindings; reports every problem instead of the first.

`Reader` has its own loop over statements, because gin 0.5.0 forgets file and line, stops at the
first problem, and silently accepts a second binding of a key. `Bindings` holds the statements in
order, and follows references from an entry point to the bindings that a run uses, without running
any code.
"""

import dataclasses
import pathlib
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Optional

from gin import config as gin_config
from gin import config_parser

from t5x_gpu.config import gin_names, gin_text
from t5x_gpu.config.gin_names import CommandLineNames, FileNames, short_name
from t5x_gpu.config.gin_text import GinFiles, Macro, Reference, Symbol, Value
from t5x_gpu.errors import ConfigError, Problem, first_line

MACRO = 'gin.macro'
COMMAND_LINE = '--gin.'

Scopes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Binding:
  """One statement `scope/selector.arg = value`; a macro X is `X/gin.macro.value`.

  Attributes:
    scope: 'train', 'a/b' or ''.
    selector: gin's complete name of the configurable.
    arg: parameter name.
    value: the value, with references and macros as symbols.
    origin: 'FILE:LINE', or '--gin.KEY' for the command line.
    stack: the including files, outermost first; () for the command line.
    typed: the text of the value on the command line; '' in a file.
  """

  scope: str
  selector: str
  arg: str
  value: Value
  origin: str
  stack: tuple[str, ...] = ()
  typed: str = ''

  @property
  def text(self) -> str:
    """The value as gin text."""
    return repr(self.value)

  @property
  def is_macro(self) -> bool:
    return self.selector == MACRO

  @property
  def from_command_line(self) -> bool:
    return self.origin.startswith(COMMAND_LINE)

  @property
  def key(self) -> str:
    """The key as a user types it: 'TRAIN_STEPS', 'train/DatasetConfig.batch_size'."""
    if self.is_macro:
      return self.scope
    prefix = f'{self.scope}/' if self.scope else ''
    return f'{prefix}{short_name(self.selector)}.{self.arg}'


@dataclasses.dataclass(frozen=True)
class Call:
  """A configurable that the run calls or passes on, with the scopes active at that point.

  Attributes:
    selector: gin's complete name.
    scopes: active scopes, outermost first.
    evaluated: whether gin calls it without arguments (`@x()`).
    binding: the binding whose value contains the reference; None for an entry point.
  """

  selector: str
  scopes: Scopes
  evaluated: bool
  binding: Optional[Binding] = dataclasses.field(default=None, compare=False)


class Bindings:
  """All bindings in order, and queries on them."""

  def __init__(self, ordered: Iterable[Binding]):
    self.ordered = list(ordered)
    self._history: dict[tuple[str, str], dict[str, list[Binding]]] = {}
    for b in self.ordered:
      self._history.setdefault((b.scope, b.selector), {}).setdefault(b.arg, []).append(b)

  def final(self) -> list[Binding]:
    """Returns the last binding of each key."""
    return [history[-1] for args in self._history.values() for history in args.values()]

  def history(self, binding: Binding) -> list[Binding]:
    """Returns all bindings of the same key, in order."""
    return self._history[binding.scope, binding.selector][binding.arg]

  def applied(self, call: Call) -> dict[str, list[Binding]]:
    """Returns arg -> bindings that apply to a call; the last one overrides the others."""
    result: dict[str, list[Binding]] = {}
    for depth in range(len(call.scopes) + 1):
      scope = '/'.join(call.scopes[:depth])
      for arg, history in self._history.get((scope, call.selector), {}).items():
        result.setdefault(arg, []).extend(history)
    return result

  def effective(self, call: Call) -> dict[str, Binding]:
    """Returns arg -> the binding that gin uses in a call."""
    return {arg: found[-1] for arg, found in self.applied(call).items()}

  def used(self, calls: Iterable[Call]) -> set[Binding]:
    """Returns the bindings that set a parameter of one of the calls."""
    return {binding for call in calls for binding in self.effective(call).values()}

  def macro(self, macro: Macro) -> Optional[Binding]:
    """Returns the binding that sets a macro, or None."""
    return self.effective(_macro_call(macro)).get('value')

  def follow(self, binding: Binding) -> Binding:
    """Returns the binding at the end of a chain of macros, which holds the value."""
    seen = set()
    while isinstance(binding.value, Macro) and binding not in seen:
      seen.add(binding)
      binding = self.macro(binding.value) or binding
    return binding

  def calls(self, roots: Iterable[Call], *, overridden: bool = False) -> list[Call]:
    """Returns every call that is reached from the `roots`, starting with the roots.

    Args:
      roots: entry points.
      overridden: follow the values of overridden bindings as well.
    """
    queue, seen = list(roots), dict.fromkeys(())
    while queue:
      call = queue.pop(0)
      if call in seen:
        continue
      seen[call] = None
      for found in self.applied(call).values():
        for binding in found if overridden else found[-1:]:
          queue += calls_in(binding.value, scopes=call.scopes, binding=binding)
    return list(seen)


def calls_in(value: Value, *, scopes: Scopes = (), binding: Optional[Binding] = None) -> list[Call]:
  """Returns the calls in `value`. Scopes of a reference replace the active scopes."""
  return [
    _macro_call(symbol, binding)
    if isinstance(symbol, Macro)
    else Call(symbol.selector, symbol.scopes or scopes, symbol.evaluate, binding)
    for symbol in gin_text.instances(value, (Reference, Macro))
  ]


def _macro_call(macro: Macro, binding: Optional[Binding] = None) -> Call:
  """Returns the call by which gin reads a macro: the macro's name is its scope."""
  return Call(MACRO, tuple(macro.name.split('/')), True, binding)


class Reader:
  """Reads files and the command line into `bindings`; collects problems and continues.

  Args:
    files: finds gin files.
    read_as_data: file name -> arguments to take from it as data; see `gin_text.keep_data_only`.
  """

  def __init__(
    self,
    files: GinFiles,
    *,
    read_as_data: Mapping[str, Collection[str]] = types.MappingProxyType({}),
  ):
    self.bindings: list[Binding] = []
    self.problems: list[Problem] = []
    self.docs = ''  # page of a refused file
    self.notes: list[str] = []
    self.lost: list[Value] = []  # values of refused bindings
    self.unreadable = False  # a whole file or module is missing, which causes more problems
    self.names: list[FileNames] = []  # of each file
    self._files, self._read_as_data = files, read_as_data
    self._stack: list[tuple[str, pathlib.Path]] = []
    self._refused: set[tuple[str, str]] = set()
    self._failed_imports: set[tuple[FileNames, str]] = set()

  def read_file(self, name: str, *, asked_at: str) -> None:
    """Reads one file; `asked_at` is the include statement, '' for the command line."""
    try:
      path = self._files.find(
        name, asked_at=asked_at, included_by=self._stack[-1][1] if self._stack else None
      )
      if path in [p for _, p in self._stack]:
        raise ConfigError(
          f'{asked_at} includes {name!r}, which is being read: the includes form a circle.'
        )
      shown = self._files.shown(path)
      try:
        text = path.read_text(encoding='utf-8')
      except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f'{shown} cannot be read: {e}.') from e
      if len(self._stack) > 1:
        self.notes.append(
          f'{asked_at} includes {shown}: nested includes are hard to follow; shipped files do '
          'not nest them.'
        )
      self._stack.append((f'{len(self.names)}:{shown}', path))
      self.names.append(names := FileNames())
      try:
        found = gin_text.read(text, shown=shown)
        if name in self._read_as_data:
          found = gin_text.keep_data_only(found, wanted=self._read_as_data[name], shown=shown)
        self._read_statements(found, shown=shown, names=names)
      finally:
        self._stack.pop()
    except ConfigError as e:
      self.unreadable = True
      self._refuse(e)

  def read_text(self, text: str, *, shown: str, origins: Mapping[int, str]) -> None:
    """Reads gin text that a command has written; `origins` is line -> origin of its value."""
    self.names.append(names := FileNames())
    found = gin_text.read(text, shown=shown)
    self._read_statements(found, shown=shown, names=names, origins=origins)

  def _refuse(self, e: ConfigError) -> None:
    self.problems.append(Problem(e.what, e.fix, e.parameters))
    self.docs = self.docs or e.docs

  def _read_statements(
    self,
    found: Iterable[gin_text.Statement],
    *,
    shown: str,
    names: FileNames,
    origins: Mapping[int, str] = types.MappingProxyType({}),
  ) -> None:
    lines: dict[tuple[str, str, str], int] = {}
    for statement in found:
      line = statement.location.line_num
      at = origins.get(line, f'{shown}:{line}')
      if isinstance(statement, config_parser.ImportStatement):
        self._import(statement, at=at, names=names)
      elif isinstance(statement, config_parser.IncludeStatement):
        self.read_file(statement.filename, asked_at=at)
      elif isinstance(statement, config_parser.BlockDeclaration):
        self._configurable(statement.selector, at=at, names=names)
      else:
        binding = self._bind(
          statement.scope,
          statement.selector,
          statement.arg_name,
          statement.value,
          origin=at,
          names=names,
        )
        if binding is None:
          continue
        first = lines.setdefault((binding.scope, binding.selector, binding.arg), line)
        if first != line:
          twice = f'{at} binds {binding.key} a second time; {shown}:{first} does too.'
          self.problems.append(Problem(twice, 'Keep one of them.'))

  def read_command_line(self, texts: Sequence[str], *, origin: str = '') -> None:
    """Binds each 'KEY=VALUE'; for computed values, `origin` replaces '--gin.KEY'."""
    names = CommandLineNames(self.names)
    for text in texts:
      try:
        override = gin_text.parse_override(text)
      except ConfigError as e:
        self._refuse(e)
        continue
      self._bind(
        *config_parser.parse_binding_key(override.key),
        override.value,
        origin=origin or override.origin,
        names=names,
        typed=override.typed,
      )

  def _import(self, statement: config_parser.ImportStatement, *, at: str, names: FileNames) -> None:
    try:
      names.process_import(statement)
    except Exception as e:  # Users' modules may raise anything on import.
      self.unreadable = True
      self._failed_imports.add((names, statement.bound_name()))
      self.problems.append(Problem(f'{at}: {gin_names.import_problem(statement, e)}'))

  def _configurable(
    self, selector: str, *, at: str, names: FileNames, arg: str = ''
  ) -> Optional[gin_config.Configurable]:
    """Returns gin's configurable, or records the problem once per file."""
    problem = names.problem(selector, arg=arg)
    if problem is None:
      try:
        return names.get_configurable(selector)
      except Exception as e:
        problem = f'gin cannot configure {selector}: {first_line(e)}'
    failed = (names, selector.split('.')[0]) in self._failed_imports
    once = (at.rpartition(':')[0], selector)
    if not failed and once not in self._refused:
      self._refused.add(once)
      self.problems.append(Problem(f'{at}: {problem}'))
    return None

  def _bind(
    self,
    scope: str,
    selector: str,
    arg: str,
    value: Value,
    *,
    origin: str,
    names: FileNames,
    typed: str = '',
  ) -> Optional[Binding]:
    """Binds one value, or records the problem and keeps the value in `lost`."""
    accepted = True
    if arg:
      configurable = self._configurable(selector, at=origin, names=names, arg=arg)
      selector = configurable.selector if configurable else ''
      problem = selector and gin_names.parameter_problem(selector, arg)
      if problem:
        self.problems.append(Problem(f'{origin}: {problem}'))
      accepted = bool(selector) and not problem
    else:
      scope, selector, arg = f'{scope}/{selector}'.lstrip('/'), MACRO, 'value'

    def looked_up(symbol: Symbol) -> Optional[Symbol]:
      nonlocal accepted
      if isinstance(symbol, Macro):
        return gin_names.macro_or_constant(symbol.name)
      configurable = self._configurable(symbol.name, at=origin, names=names)
      if configurable is None:
        accepted = False
        return None
      return dataclasses.replace(
        symbol, selector=configurable.selector, target=configurable.wrapped
      )

    value = gin_text.map_symbols(value, looked_up)
    if not accepted:
      self.lost.append(value)
      return None
    stack = tuple(name for name, _ in self._stack)
    binding = Binding(scope, selector, arg, value, origin, stack, typed)
    self.bindings.append(binding)
    return binding
