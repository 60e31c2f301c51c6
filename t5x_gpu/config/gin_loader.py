"""gin files and command-line bindings -> a checked configuration: `load` and `LoadedConfig`.

gin does the work (scopes, references, dynamic registration); its parsing loop is ours, statement by
statement, because gin 0.5.0 keeps no file and line, stops at the first problem, and accepts misspelt
scopes, unused macros and wrong types in silence.
"""

import contextlib
import copy
import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional, Union

import gin
from gin import config as gin_config
from gin import config_parser

from t5x_gpu.config import bindings as bindings_lib
from t5x_gpu.config import gin_checks, overrides, provenance, resolve, statements
from t5x_gpu.config.bindings import Binding, Bindings, Call
from t5x_gpu.config.gin_files import GinFiles
from t5x_gpu.errors import ConfigError, all_problems

ENTRY = 't5x_gpu.train.train'
Entry = Union[str, Callable[..., Any]]


@dataclasses.dataclass(frozen=True)
class LoadedConfig:
  """A configuration that passed all checks. One at a time is the one that gin holds.

  Attributes:
    entry: the entry points that it was checked for.
    provenance: every value, where it was set and what it overrode; to print, save and explain.
    notes: remarks to print; none of them is an error.
    bindings: what was bound, in order.
  """
  entry: tuple[Entry, ...]
  provenance: provenance.Provenance
  notes: tuple[str, ...]
  bindings: Bindings

  def arguments(self, entry: Optional[Entry] = None, *,
                without: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the keyword arguments that the gin files give the entry function, references resolved.

    Args:
      entry: 'module.function' or the function; the first entry point of `load` if None.
      without: parameters that the caller does not need: not resolved, and not missed if required.
    Raises:
      ConfigError: required values that nothing sets, all of them, with how to set each. Errors of
        the constructors that references call pass through.
    """
    if gin_config._CONFIG and provenance.current() is not self.provenance:
      raise ConfigError('Another configuration has been loaded since this one.',
                        fix='Call arguments() before the next load().')
    call = _entry_call(entry or self.entry[0])
    if call is None:
      raise ConfigError(f'No gin file configures {entry or self.entry[0]}.')
    missing = gin_checks.missing(self.bindings, call, without=without)
    if missing:
      raise ConfigError(all_problems(missing, title='Required values are not set'))
    bound = gin.get_bindings(call.selector, resolve_references=False)
    return {k: copy.deepcopy(v) for k, v in bound.items() if k not in without}


def load(gin_files: Sequence[Union[str, os.PathLike]], *, bindings: Sequence[str] = (),
         search_paths: Sequence[str] = (),
         entry: Union[Entry, Sequence[Entry]] = ENTRY) -> LoadedConfig:
  """Returns the configuration of `gin_files`, then `bindings`, after every check of `gin_checks`.

  Forgets what was loaded before, in gin as well.

  Args:
    gin_files: paths, found from the working directory, `search_paths`, the package or its repository.
    bindings: 'KEY=VALUE' as after `--gin.`; text needs no quotes.
    search_paths: further folders to look for gin files in.
    entry: the function that the configuration is for, or several: 'module.function'. What they do
      not reach is unused, which is an error.
  Raises:
    ConfigError: all problems at once, each with file:line and suggestions.
  """
  _forget()
  _make_working_directory_importable()
  entries = (entry,) if isinstance(entry, str) or callable(entry) else tuple(entry)
  reader = _Reader(GinFiles(search_paths))
  for name in gin_files:
    reader.read_file(os.fspath(name), asked_at='')
  reader.read_command_line(bindings)
  bound = Bindings(reader.bindings)
  problems = list(reader.problems)
  roots = [_entry_call(e) for e in entries] if not reader.unreadable else []
  if not reader.unreadable:
    unbound = [str(e) for e, call in zip(entries, roots) if call is None]
    problems += [f'No gin file configures {name}: include one of gin_configs/runs/, or import '
                 'its module and bind its parameters.' for name in unbound]
    if not unbound:
      problems += gin_checks.problems(bound, roots, lost=reader.lost)
  if problems:
    raise ConfigError(all_problems(problems, title='The configuration cannot be used'))
  report, notes = provenance.collect(bound, roots)
  return LoadedConfig(entry=entries, provenance=report, bindings=bound,
                      notes=(*reader.notes, *notes))


def _forget() -> None:
  """Clears gin's bindings and all that gin files registered, so that loads do not see each other."""
  gin.clear_config()
  for selector, configurable in list(gin_config._REGISTRY.items()):
    stale = configurable.wrapped.__module__ not in sys.modules if hasattr(
        configurable.wrapped, '__module__') else False
    if configurable.import_source is not None or stale:
      gin_config._REGISTRY.pop(selector)
      gin_config._INVERSE_REGISTRY.pop(configurable.wrapped, None)
      gin_config._RENAMED_SELECTORS.pop(selector, None)
  provenance.forget()


def _make_working_directory_importable() -> None:
  """`python -m` does so by itself, a console script does not; users' modules lie there."""
  if '' not in sys.path and os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())


def _entry_call(entry: Entry) -> Optional[Call]:
  """Returns the call of the entry function, or None if no gin file names it."""
  configurable = gin_config._inverse_lookup(resolve.entry_function(entry))
  return configurable and Call(configurable.selector, (), evaluated=True)


@contextlib.contextmanager
def _context(context: gin_config.ParseContext) -> Iterator[gin_config.ParseContext]:
  """Makes `context` the one in which gin resolves names."""
  gin_config._PARSE_CONTEXTS.append(context)
  try:
    yield context
  finally:
    gin_config._PARSE_CONTEXTS.pop()


class _Reader:
  """Reads files and bindings into gin and into `bindings`, noting problems and going on."""

  def __init__(self, files: GinFiles):
    self.files = files
    self.bindings: list[Binding] = []
    self.problems: list[str] = []
    self.notes: list[str] = []
    self.lost: list[gin_config.ConfigurableReference] = []  # References in refused bindings.
    self.unreadable = False  # A whole file or module is missing: whatever follows is a consequence.
    self._contexts: list[gin_config.ParseContext] = []
    self._stack: list[tuple[str, pathlib.Path]] = []
    self._refused: set[tuple[str, str]] = set()
    self._failed_imports: set[tuple[int, str]] = set()

  def read_file(self, name: str, *, asked_at: str) -> None:
    """Reads one file; `asked_at` is the include statement, '' for the command line."""
    try:
      path = self.files.find(name, asked_at=asked_at)
      if path in [p for _, p in self._stack]:
        raise ConfigError(f'{asked_at} includes {name!r}, which is being read: a circle of includes.')
      shown = self.files.shown(path)
      try:
        text = path.read_text()
      except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f'{shown} cannot be read: {e}.') from e
      if len(self._stack) > 1:
        self.notes.append(f'{asked_at} includes {shown}: files that include files that include '
                          'files are hard to follow; shipped ones do not.')
      self._stack.append((f'{len(self._contexts)}:{shown}', path))
      try:
        with _context(gin_config.ParseContext()) as context:
          self._contexts.append(context)
          self._read_statements(statements.read(text, shown=shown), shown=shown, context=context)
          gin_config._IMPORTS.update(context.imports)
      finally:
        self._stack.pop()
    except ConfigError as e:
      self.unreadable = True
      self.problems.append(str(e))

  def _read_statements(self, found: Iterator[statements.Statement], *, shown: str,
                       context: gin_config.ParseContext) -> None:
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
        binding = self._bind(statement.scope, statement.selector, statement.arg_name,
                             statement.value, origin=at, context=context)
        if binding is None:
          continue
        first = lines.setdefault((binding.scope, binding.selector, binding.arg), line)
        if first != line:
          self.problems.append(f'{at} binds {binding.key} a second time; {shown}:{first} does too. '
                               'Keep one of them.')

  def read_command_line(self, texts: Sequence[str]) -> None:
    """Binds each 'KEY=VALUE'."""
    with _context(resolve.CommandLineContext(self._contexts)) as context:
      for text in texts:
        try:
          override = overrides.parse_override(text)
        except ConfigError as e:
          self.problems.append(str(e))
          continue
        scope, selector, arg = config_parser.parse_binding_key(override.key)
        self._bind(scope, selector, arg, override.value, origin=override.origin, context=context)

  def _import(self, statement: config_parser.ImportStatement, *, at: str,
              context: gin_config.ParseContext) -> None:
    try:
      context.process_import(statement)
    except Exception as e:  # Users' modules may raise anything on import.
      self.unreadable = True
      self._failed_imports.add((id(context), statement.bound_name()))
      self.problems.append(f'{at}: {resolve.import_problem(statement, e)}')

  def _configurable(self, selector: str, *, at: str, context: gin_config.ParseContext
                    ) -> Optional[gin_config.Configurable]:
    """Returns gin's configurable, or notes once per file why there is none."""
    problem = resolve.selector_problem(context, selector)
    if problem is None:
      try:
        return context.get_configurable(selector)
      except Exception as e:
        problem = f'gin cannot configure {selector}: {str(e).splitlines()[0]}'
    failed = (id(context), selector.split('.')[0]) in self._failed_imports
    once = (at.rpartition(':')[0], selector)
    if not failed and once not in self._refused:
      self._refused.add(once)
      self.problems.append(f'{at}: {problem}')
    return None

  def _bind(self, scope: str, selector: str, arg: str, raw: Any, *, origin: str,
            context: gin_config.ParseContext) -> Optional[Binding]:
    """Binds one value, or notes the problem and keeps its references in `lost`."""
    if arg:
      configurable = self._configurable(selector, at=origin, context=context)
      problem = configurable and resolve.parameter_problem(configurable, arg)
      if problem:
        self.problems.append(f'{origin}: {problem}')
      accepted = configurable is not None and not problem
    else:
      scope, selector, arg = '/'.join(x for x in (scope, selector) if x), bindings_lib.MACRO, 'value'
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
    binding = Binding(scope, configurable.selector, arg, value, repr(raw), origin,
                      tuple(name for name, _ in self._stack))
    self.bindings.append(binding)
    return binding
