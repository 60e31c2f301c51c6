"""Reads gin files and command-line bindings into gin; reports every problem instead of the first.

`Reader` has its own loop over statements, because gin 0.5.0 forgets file and line, stops at the
first problem, and silently accepts a second binding of a key; gin resolves scopes, references and
dynamic registration. `Bindings` holds the statements in order, and follows references from an entry
point to the bindings that a run uses, without running any code.
"""

import contextlib
import dataclasses
import importlib
import inspect
import pathlib
import pkgutil
import re
import sys
import traceback
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

import gin
from gin import config as gin_config
from gin import config_parser

from t5x_gpu.config import gin_text
from t5x_gpu.config.gin_text import GinFiles
from t5x_gpu.errors import ConfigError, Problem, did_you_mean, first_line

MACRO = 'gin.macro'
CONSTANT = 'gin.constant'
COMMAND_LINE = '--gin.'

Scopes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Binding:
  """One statement `scope/selector.arg = value`; a macro X is `X/gin.macro.value`.

  Attributes:
    scope: 'train', 'a/b' or ''.
    selector: gin's complete name of the configurable.
    arg: parameter name.
    value: gin's value, which may contain gin's reference objects.
    text: the value as written.
    origin: 'FILE:LINE', or '--gin.KEY' for the command line.
    stack: the including files, outermost first; () for the command line.
    typed: the text of the value on the command line; '' in a file.
  """

  scope: str
  selector: str
  arg: str
  value: Any
  text: str
  origin: str
  stack: tuple[str, ...] = ()
  typed: str = ''

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


def short_name(selector: str) -> str:
  """Returns the shortest unique name of a configurable, 'DatasetConfig'."""
  return gin_config._REGISTRY.minimal_selector(selector)


def references(value: Any) -> Iterator[gin_config.ConfigurableReference]:
  """Yields gin's references, macros and constants anywhere inside `value`."""
  return gin_text.instances(value, gin_config.ConfigurableReference)


def is_macro(reference: gin_config.ConfigurableReference) -> bool:
  return reference.configurable.selector == MACRO and reference.evaluate


def is_constant(reference: gin_config.ConfigurableReference) -> bool:
  return reference.configurable.selector == CONSTANT and reference.evaluate


def is_required(value: Any) -> bool:
  """Returns whether `value` is %gin.REQUIRED."""
  return (
    isinstance(value, gin_config.ConfigurableReference)
    and is_constant(value)
    and gin_config._CONSTANTS.get('/'.join(value.scopes)) is gin_config.REQUIRED
  )


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

  def applied(self, selector: str, scopes: Scopes) -> dict[str, list[Binding]]:
    """Returns arg -> bindings that apply in `scopes`; the last one overrides the others."""
    result: dict[str, list[Binding]] = {}
    for depth in range(len(scopes) + 1):
      for arg, history in self._history.get(('/'.join(scopes[:depth]), selector), {}).items():
        result.setdefault(arg, []).extend(history)
    return result

  def effective(self, selector: str, scopes: Scopes) -> dict[str, Binding]:
    """Returns arg -> the binding that gin uses in `scopes`."""
    return {arg: found[-1] for arg, found in self.applied(selector, scopes).items()}

  def macro(self, reference: gin_config.ConfigurableReference) -> Optional[Binding]:
    """Returns the binding that sets a macro, or None."""
    return self.effective(MACRO, tuple(reference.scopes)).get('value')

  def follow(self, binding: Binding) -> Binding:
    """Returns the binding at the end of a chain of macros, which holds the value."""
    seen = set()
    while (
      isinstance(binding.value, gin_config.ConfigurableReference)
      and is_macro(binding.value)
      and binding not in seen
    ):
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
      for found in self.applied(call.selector, call.scopes).values():
        for binding in found if overridden else found[-1:]:
          queue += calls_in(binding.value, scopes=call.scopes, binding=binding)
    return list(seen)


def calls_in(value: Any, *, scopes: Scopes, binding: Optional[Binding] = None) -> list[Call]:
  """Returns the calls in `value`. Scopes of a reference replace the active scopes."""
  return [
    Call(r.configurable.selector, tuple(r.scopes) or scopes, r.evaluate, binding)
    for r in references(value)
  ]


_DYNAMIC = 'from __gin__ import dynamic_registration'


class CommandLineContext(gin_config.ParseContext):
  """Finds registered names by any unique ending, then names that the gin files import.

  So T5X's spelling `train_script.train.total_steps` and values like `@schedules.cosine` work on the
  command line, which has no imports.
  """

  def __init__(self, contexts: Sequence[gin_config.ParseContext]):
    super().__init__()
    self.contexts = [c for c in contexts if c._dynamic_registration]  # others do not define names

  def get_configurable(self, selector: str) -> Optional[gin_config.Configurable]:
    matches = _named(selector)
    found = gin_config._REGISTRY[matches[0]] if matches else None
    for context in reversed(self.contexts):
      if found is None and selector_problem(context, selector) is None:
        found = context.get_configurable(selector)
    return found


def selector_problem(
  context: gin_config.ParseContext, selector: str, *, arg: str = ''
) -> Optional[str]:
  """Returns why gin cannot configure `selector`, or None if it can.

  Args:
    context: context in which the name is looked up.
    selector: 'Class', 'module.function', ...
    arg: the parameter to bind, to suggest configurables that have it.
  """
  if isinstance(context, CommandLineContext):
    return _registry_problem(selector, matches=_named(selector), contexts=context.contexts, arg=arg)
  if not context._dynamic_registration:
    problem = _registry_problem(selector, gin_config._REGISTRY.matching_selectors(selector))
    first, imported = selector.split('.')[0], [s.bound_name() for s in context.imports]
    if problem and first in imported:
      problem += (
        f' The imports of this file have no effect without this line before them: {_DYNAMIC}'
      )
    elif problem and (line := _import_line(selector)):
      problem += f' Import it in this file: {_DYNAMIC}, and {line}'
    return problem
  first, *rest = selector.split('.')
  if first not in context._symbol_table:
    hint = did_you_mean(first, context._symbol_table)
    if line := _import_line(selector):
      hint += f' Write in this file: {line}'
    return f'{first!r} is not imported.{hint}'
  value, path = context._symbol_table[first], first
  for name in rest:
    if not hasattr(value, name):
      kind = 'Module' if inspect.ismodule(value) else 'Class'
      known = [n for n, v in vars(value).items() if not n.startswith('_') and callable(v)]
      return (
        f'{kind} {getattr(value, "__name__", path)} has no {name!r}.{did_you_mean(name, known)}'
      )
    value, path = getattr(value, name), f'{path}.{name}'
  if not callable(value):
    return f'{path} is a {type(value).__name__}: only functions and classes have parameters.'
  return None


def _named(selector: str) -> list[str]:
  """Returns the registered names that end in `selector`.

  Includes gin's own names only if `selector` begins with `gin.`; otherwise a schedule named
  `constant` would clash with `gin.constant`.
  """
  matches = gin_config._REGISTRY.matching_selectors(selector)
  return [m for m in matches if selector.startswith('gin.') or not m.startswith('gin.')]


def _import_line(selector: str) -> str:
  """Returns the import of the t5x_gpu module that defines `selector`, or ''."""
  module, _, name = selector.rpartition('.')
  package = pathlib.Path(__file__).parents[1]
  for path in sorted(package.rglob(f'{module}.py')) if module.isidentifier() else ():
    if re.search(rf'^(?:class|def) {name}\b', path.read_text(encoding='utf-8'), re.MULTILINE):
      folder = '.'.join(path.parent.relative_to(package.parent).parts)
      return f'from {folder} import {module}'
  return ''


def _registry_problem(
  selector: str,
  matches: Sequence[str],
  contexts: Sequence[gin_config.ParseContext] = (),
  arg: str = '',
) -> Optional[str]:
  if len(matches) > 1:
    return (
      f'{selector!r} may mean '
      + ' or '.join(repr(m) for m in sorted(matches))
      + ': write more of the name.'
    )
  if matches or any(selector_problem(c, selector) is None for c in contexts):
    return None
  longer = sorted(
    {
      f'{alias}.{selector}'
      for context in contexts
      for alias in context._symbol_table
      if alias != 'gin' and selector_problem(context, f'{alias}.{selector}') is None
    }
  )
  if longer:
    return (
      f'{selector!r} is not used by the gin files, so gin does not know it by its short name.'
      f' Write {" or ".join(longer)}.'
    )
  known = [s for s, c in gin_config._REGISTRY.items() if c.module != 'gin']
  if '.' not in selector:
    known = [s.rsplit('.', 1)[-1] for s in known]
  else:
    known = [gin_config._REGISTRY.minimal_selector(s) for s in known] + known
  hint = did_you_mean(selector, known)
  owners = [
    gin_config._REGISTRY.minimal_selector(s)
    for s, c in gin_config._REGISTRY.items()
    if c.module != 'gin' and arg in parameters(c)
  ]
  # T5X's `trainer.Trainer.num_microbatches` resembles `train_script.train`, but the parameter shows
  # which configurable was meant.
  if len(owners) == 1 and repr(owners[0]) not in hint:
    hint = f' {arg} is a parameter of {owners[0]}: write {owners[0]}.{arg}.'
  imported = sorted({a for context in contexts for a in context._symbol_table if a != 'gin'})
  if imported and not hint and '.' in selector and selector.split('.')[0] not in imported:
    hint = (
      f' No gin file imports {selector.split(".")[0]!r}; imported are {", ".join(imported)}.'
      f' Import it in a gin file first{f": {line}" if (line := _import_line(selector)) else "."}'
    )
  return f'No function or class {selector!r} is known to gin.{hint}'


def parameter_problem(configurable: gin_config.Configurable, arg: str) -> Optional[str]:
  """Returns why gin cannot set parameter `arg` of `configurable`, or None if it can."""
  known = [p for p in parameters(configurable) if _allowed(configurable, p)]
  if gin_config._might_have_parameter(configurable.wrapper, arg) and _allowed(configurable, arg):
    return None
  hint = did_you_mean(arg, known) or (
    f' It takes {", ".join(known)}.' if known else ' It takes none.'
  )
  return f'{configurable.name} has no parameter {arg!r}.{hint}'


def _allowed(configurable: gin_config.Configurable, arg: str) -> bool:
  allowed, denied = configurable.allowlist, configurable.denylist
  return not (allowed and arg not in allowed) and not (denied and arg in denied)


def parameters(configurable: gin_config.Configurable) -> dict[str, inspect.Parameter]:
  """Returns the named parameters of a configurable's signature, without `self`."""
  function = configurable.wrapped
  if inspect.isclass(function):
    function = gin_config._find_class_construction_fn(function)
  function = inspect.unwrap(function)
  try:
    found = dict(inspect.signature(function).parameters)
  except (TypeError, ValueError):  # Written in C.
    return {}
  if inspect.isclass(configurable.wrapped) or configurable.is_method:
    found.pop(next(iter(found), None), None)
  variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
  return {name: p for name, p in found.items() if p.kind not in variadic}


def import_problem(statement: config_parser.ImportStatement, error: BaseException) -> str:
  """Returns why the import of a gin file failed: no such module, or an error inside it."""
  module = statement.module
  missing = getattr(error, 'name', None) or ''
  if not isinstance(error, ModuleNotFoundError) or not f'{module}.'.startswith(f'{missing}.'):
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
      f'Importing {module} failed: {type(error).__name__}: {first_line(error)} '
      f'({frame.filename}:{frame.lineno}).'
    )
  parent, _, name = missing.rpartition('.')
  package = sys.modules.get(parent)
  if package is not None and not hasattr(package, '__path__'):
    grand, _, short = parent.rpartition('.')
    spelled = f'from {grand} import {short}' if grand else f'import {short}'
    return (
      f'{parent} is a module, and gin imports modules, not their contents: write '
      f'`{spelled}` and use {short}.{name}.'
    )
  paths = package.__path__ if package is not None else None
  siblings = [info.name for info in pkgutil.iter_modules(paths)]
  where = f' in {parent}' if parent else ''
  return f'There is no module {name!r}{where}.{did_you_mean(name, siblings)}'


def entry_function(entry: Any) -> Any:
  """Returns the function named 'package.module.function', or `entry` itself if it is a function.

  In `python -m t5x_gpu.train`, `__main__.train` is a second object: gin files bind the importable
  function, so this function returns that.
  """
  if not isinstance(entry, str):
    module = entry.__module__
    if module == '__main__' and sys.modules['__main__'].__spec__ is not None:
      module = sys.modules['__main__'].__spec__.name
    entry = f'{module}.{entry.__qualname__}'
  module, _, name = entry.rpartition('.')
  return getattr(importlib.import_module(module), name)


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
    read_as_data: file name -> arguments to take from it as data; see `gin_text.keep_data_only`.
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
          found = gin_text.read(text, shown=shown)
          if name in self.read_as_data:
            found = gin_text.keep_data_only(found, wanted=self.read_as_data[name], shown=shown)
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
    self, found: Iterable[gin_text.Statement], *, shown: str, context: gin_config.ParseContext
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
    with _context(CommandLineContext(self._contexts)) as context:
      for text in texts:
        try:
          override = gin_text.parse_override(text)
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
      self.problems.append(Problem(f'{at}: {import_problem(statement, e)}'))

  def _configurable(
    self, selector: str, *, at: str, context: gin_config.ParseContext, arg: str = ''
  ) -> Optional[gin_config.Configurable]:
    """Returns gin's configurable, or records the problem once per file."""
    problem = selector_problem(context, selector, arg=arg)
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
      problem = configurable and parameter_problem(configurable, arg)
      if problem:
        self.problems.append(Problem(f'{origin}: {problem}'))
      accepted = configurable is not None and not problem
    else:
      name = f'{scope}/{selector}' if scope else selector
      scope, selector, arg = name, MACRO, 'value'
      accepted, configurable = True, context.get_configurable(MACRO)
    unresolved: list[Any] = []

    def resolved(symbol: Any) -> Any:
      delegate = gin_config.ParserDelegate()
      if isinstance(symbol, gin_text.Macro):
        return delegate.macro(symbol.name)
      name = symbol.scoped_selector.rsplit('/', 1)[-1]
      if self._configurable(name, at=origin, context=context) is None:
        unresolved.append(symbol)
        return None
      return delegate.configurable_reference(symbol.scoped_selector, symbol.evaluate)

    value = gin_text.map_symbols(raw, resolved)
    if not accepted or unresolved:
      self.lost += references(value)
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
