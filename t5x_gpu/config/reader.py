"""Reads gin files and command-line bindings into gin; reports every problem instead of the first.

gin resolves scopes, references and dynamic registration, but this module has its own loop over
statements: gin 0.5.0 forgets file and line, stops at the first problem, and silently accepts a
second binding of a key.
"""

import contextlib
import pathlib
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

import gin
from gin import config as gin_config
from gin import config_parser

from t5x_gpu.config import bindings as bindings_lib
from t5x_gpu.config import data_only, overrides, resolve, statements
from t5x_gpu.config.bindings import Binding
from t5x_gpu.config.gin_files import GinFiles
from t5x_gpu.errors import ConfigError, Problem, first_line


@contextlib.contextmanager
def _context(context: gin_config.ParseContext) -> Iterator[gin_config.ParseContext]:
  """Makes gin resolve names in `context`."""
  gin_config._PARSE_CONTEXTS.append(context)
  try:
    yield context
  finally:
    gin_config._PARSE_CONTEXTS.pop()


class Reader:
  """Reads files and bindings into gin and into `bindings`; collects problems and continues.

  Args:
    files: finds gin files.
    read_as_data: file name -> arguments to take from it as data; see `data_only.kept`.
  """

  def __init__(
    self,
    files: GinFiles,
    *,
    read_as_data: Mapping[str, Collection[str]] = types.MappingProxyType({}),
  ):
    self.files = files
    self.read_as_data = read_as_data
    self.bindings: list[Binding] = []
    self.problems: list[Problem] = []
    self.docs = ''  # page of a refused file
    self.notes: list[str] = []
    self.lost: list[gin_config.ConfigurableReference] = []  # references in refused bindings
    self.unreadable = False  # a whole file or module is missing, which causes more problems
    self._contexts: list[gin_config.ParseContext] = []
    self._stack: list[tuple[str, pathlib.Path]] = []
    self._refused: set[tuple[str, str]] = set()
    self._failed_imports: set[tuple[int, str]] = set()

  def read_file(self, name: str, *, asked_at: str) -> None:
    """Reads one file; `asked_at` is the include statement, '' for the command line."""
    try:
      path = self.files.find(
        name, asked_at=asked_at, included_by=self._stack[-1][1] if self._stack else None
      )
      if path in [p for _, p in self._stack]:
        raise ConfigError(
          f'{asked_at} includes {name!r}, which is being read: the includes form a circle.'
        )
      shown = self.files.shown(path)
      try:
        text = path.read_text(encoding='utf-8')
      except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f'{shown} cannot be read: {e}.') from e
      if len(self._stack) > 1:
        self.notes.append(
          f'{asked_at} includes {shown}: nested includes are hard to follow; shipped files do '
          'not nest them.'
        )
      self._stack.append((f'{len(self._contexts)}:{shown}', path))
      try:
        with _context(gin_config.ParseContext()) as context:
          self._contexts.append(context)
          found = statements.read(text, shown=shown)
          if name in self.read_as_data:
            found = data_only.kept(found, wanted=self.read_as_data[name], shown=shown)
          self._read_statements(found, shown=shown, context=context)
          gin_config._IMPORTS.update(context.imports)
      finally:
        self._stack.pop()
    except ConfigError as e:
      self.unreadable = True
      self._refuse(e)

  def _refuse(self, e: ConfigError) -> None:
    self.problems.append(Problem(e.what, e.fix, e.parameters))
    self.docs = self.docs or e.docs

  def _read_statements(
    self, found: Iterable[statements.Statement], *, shown: str, context: gin_config.ParseContext
  ) -> None:
    lines: dict[tuple[str, str, str], int] = {}
    for statement in found:
      line = statement.location.line_num
      at = f'{shown}:{line}'
      if isinstance(statement, config_parser.ImportStatement):
        self._import(statement, at=at, context=context)
      elif isinstance(statement, config_parser.IncludeStatement):
        self.read_file(statement.filename, asked_at=at)
      elif isinstance(statement, config_parser.BlockDeclaration):
        self._configurable(statement.selector, at=at, context=context)
      else:
        binding = self._bind(
          statement.scope,
          statement.selector,
          statement.arg_name,
          statement.value,
          origin=at,
          context=context,
        )
        if binding is None:
          continue
        first = lines.setdefault((binding.scope, binding.selector, binding.arg), line)
        if first != line:
          twice = f'{at} binds {binding.key} a second time; {shown}:{first} does too.'
          self.problems.append(Problem(twice, 'Keep one of them.'))

  def read_command_line(self, texts: Sequence[str], *, origin: str = '') -> None:
    """Binds each 'KEY=VALUE'; for computed values, `origin` replaces '--gin.KEY'."""
    with _context(resolve.CommandLineContext(self._contexts)) as context:
      for text in texts:
        try:
          override = overrides.parse_override(text)
        except ConfigError as e:
          self._refuse(e)
          continue
        scope, selector, arg = config_parser.parse_binding_key(override.key)
        self._bind(
          scope,
          selector,
          arg,
          override.value,
          origin=origin or override.origin,
          context=context,
          typed=override.typed,
        )

  def _import(
    self, statement: config_parser.ImportStatement, *, at: str, context: gin_config.ParseContext
  ) -> None:
    try:
      context.process_import(statement)
    except Exception as e:  # Users' modules may raise anything on import.
      self.unreadable = True
      self._failed_imports.add((id(context), statement.bound_name()))
      self.problems.append(Problem(f'{at}: {resolve.import_problem(statement, e)}'))

  def _configurable(
    self, selector: str, *, at: str, context: gin_config.ParseContext, arg: str = ''
  ) -> Optional[gin_config.Configurable]:
    """Returns gin's configurable, or records the problem once per file."""
    problem = resolve.selector_problem(context, selector, arg=arg)
    if problem is None:
      try:
        return context.get_configurable(selector)
      except Exception as e:
        problem = f'gin cannot configure {selector}: {first_line(e)}'
    failed = (id(context), selector.split('.')[0]) in self._failed_imports
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
    raw: Any,
    *,
    origin: str,
    context: gin_config.ParseContext,
    typed: str = '',
  ) -> Optional[Binding]:
    """Binds one value, or records the problem and keeps its references in `lost`."""
    if arg:
      configurable = self._configurable(selector, at=origin, context=context, arg=arg)
      problem = configurable and resolve.parameter_problem(configurable, arg)
      if problem:
        self.problems.append(Problem(f'{origin}: {problem}'))
      accepted = configurable is not None and not problem
    else:
      name = f'{scope}/{selector}' if scope else selector
      scope, selector, arg = name, bindings_lib.MACRO, 'value'
      accepted, configurable = True, context.get_configurable(bindings_lib.MACRO)
    unresolved: list[Any] = []

    def resolved(symbol: Any) -> Any:
      delegate = gin_config.ParserDelegate()
      if isinstance(symbol, statements.Macro):
        return delegate.macro(symbol.name)
      name = symbol.scoped_selector.rsplit('/', 1)[-1]
      if self._configurable(name, at=origin, context=context) is None:
        unresolved.append(symbol)
        return None
      return delegate.configurable_reference(symbol.scoped_selector, symbol.evaluate)

    value = statements.map_symbols(raw, resolved)
    if not accepted or unresolved:
      self.lost += bindings_lib.references(value)
      return None
    gin.bind_parameter((scope, selector, arg), value)
    binding = Binding(
      scope,
      configurable.selector,
      arg,
      value,
      repr(raw),
      origin,
      tuple(name for name, _ in self._stack),
      typed,
    )
    self.bindings.append(binding)
    return binding
