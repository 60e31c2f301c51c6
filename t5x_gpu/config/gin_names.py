"""What the names in gin files mean: the functions and classes that gin can configure.

`FileNames` looks up the names of a file, `CommandLineNames` the names in `--gin.X=VALUE`; both say
why a name is unknown. `bind` hands a checked configuration to gin, `forget` removes it.

Only this module uses private members of gin, three tables of the functions and classes that it can
configure: gin has no public list of them, and cannot remove any.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
import traceback
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Optional

import gin
from gin import config as gin_config
from gin import config_parser

from t5x_gpu.config.gin_text import (
  PACKAGE,
  Constant,
  Macro,
  Reference,
  Symbol,
  Value,
  is_dynamic,
  map_symbols,
)
from t5x_gpu.errors import did_you_mean, first_line

_KNOWN = gin_config._REGISTRY  # complete name -> gin_config.Configurable
_DYNAMIC = 'from __gin__ import dynamic_registration'


def forget() -> None:
  """Clears gin's bindings and the names that gin files registered: loads are independent."""
  gin.clear_config()
  for selector, known in list(_KNOWN.items()):
    is_stale = getattr(known.wrapped, '__module__', 'gin') not in sys.modules
    if known.import_source is not None or is_stale:
      _KNOWN.pop(selector)
      gin_config._INVERSE_REGISTRY.pop(known.wrapped, None)
      gin_config._RENAMED_SELECTORS.pop(selector, None)


def bind(values: Iterable[tuple[str, str, str, Value]]) -> None:
  """Gives gin (scope, complete name, parameter, value) of each binding."""
  for scope, selector, arg, value in values:
    gin.bind_parameter((scope, selector, arg), map_symbols(value, _gin_reference))


def config_text(files: Iterable['FileNames']) -> str:
  """Returns gin text that repeats gin's configuration when loaded, with the imports of `files`."""
  for names in files:
    gin.parse_config([statement.format() for statement in names.imports])
  return gin.config_str()


def _gin_reference(symbol: Symbol) -> gin_config.ConfigurableReference:
  if isinstance(symbol, Reference):
    name = '/'.join((*symbol.scopes, symbol.selector))
    return gin_config.ConfigurableReference(name, symbol.evaluate)
  return gin_config.ParserDelegate().macro(symbol.name)


def macro_or_constant(name: str) -> Macro | Constant:
  """Returns the macro or the constant that `%name` refers to."""
  found = gin_config.ParserDelegate().macro(name)
  kind = Constant if found.configurable.selector == 'gin.constant' else Macro
  return kind('/'.join(found.scopes))


def configurable(selector: str) -> gin_config.Configurable:
  """Returns gin's record of a complete name."""
  return _KNOWN[selector]


def selector_of(entry: str) -> Optional[str]:
  """Returns gin's name of the function 'package.module.function'; None if no file names it.

  Raises:
    Exception: the module cannot be imported.
  """
  module, _, name = entry.rpartition('.')
  function = getattr(importlib.import_module(module), name)
  known = (c for _, c in _KNOWN.items() if function in (c.wrapped, c.wrapper))
  return next((c.selector for c in known), None)


def short_name(selector: str) -> str:
  """Returns the shortest unique name of a configurable, 'DatasetConfig'."""
  return _KNOWN.minimal_selector(selector)


def decorated() -> list[gin_config.Configurable]:
  """Returns the `@gin.configurable` functions of users and libraries."""
  return [c for _, c in _KNOWN.items() if c.import_source is None and c.module != 'gin']


def parameters(selector: str) -> dict[str, inspect.Parameter]:
  """Returns the named parameters of a configurable's signature, without `self`."""
  known = _KNOWN[selector]
  try:
    found = list(inspect.signature(known.wrapped).parameters.values())
  except (TypeError, ValueError):  # Written in C.
    return {}
  variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
  named = found[1:] if known.is_method else found
  return {p.name: p for p in named if p.kind not in variadic}


def annotations(selector: str) -> dict[str, object]:
  """Returns parameter -> annotation, without annotations that cannot be resolved."""
  function = inspect.unwrap(_KNOWN[selector].wrapped)
  if inspect.isclass(function) and not dataclasses.is_dataclass(function):
    function = inspect.unwrap(function.__init__)
  try:
    return typing.get_type_hints(function)
  except Exception:  # a name that exists only for type checkers: check the other parameters
    raw = getattr(function, '__annotations__', {})
    return {name: hint for name, hint in raw.items() if not isinstance(hint, str)}


def parameter_problem(selector: str, arg: str) -> Optional[str]:
  """Returns why gin cannot set parameter `arg` of a configurable, or None if it can."""
  if _can_bind(selector, arg):
    return None
  known = [name for name in parameters(selector) if _can_bind(selector, name)]
  takes = f' It takes {", ".join(known)}.' if known else ' It takes none.'
  hint = did_you_mean(arg, known) or takes
  return f'{_KNOWN[selector].name} has no parameter {arg!r}.{hint}'


def _can_bind(selector: str, arg: str) -> bool:
  try:
    gin_config.ParsedBindingKey.parse(('', selector, arg))
  except ValueError:
    return False
  return True


class FileNames(gin_config.ParseContext):
  """Looks up the names of one gin file, among its imports or gin's known names.

  `Reader` gives `process_import` each import statement of the file, and `get_configurable` each
  name: a subclass that overrides them can translate the names of another program.
  """

  @property
  def is_dynamic(self) -> bool:
    """Whether names come from the imports of this file."""
    return any(map(is_dynamic, self.imports))

  @property
  def modules(self) -> Mapping[str, types.ModuleType]:
    """Name in the file -> imported module."""
    imports = [s for s in self.imports if not is_dynamic(s)]
    return {
      s.bound_name(): sys.modules[s.module if s.is_from or s.alias else s.bound_name()]
      for s in imports
    }

  def problem(self, selector: str, *, arg: str = '') -> Optional[str]:
    """Returns why gin cannot configure `selector`, or None if it can.

    Args:
      selector: 'Class', 'module.function', ...
      arg: the parameter to bind, to suggest configurables that have it.
    """
    modules = self.modules
    first, *rest = selector.split('.')
    if not self.is_dynamic:
      problem = _unknown(selector, matches=_KNOWN.matching_selectors(selector))
      if problem and first in modules:
        return (
          f'{problem} The imports of this file have no effect without this line before them: '
          f'{_DYNAMIC}'
        )
      if problem and (line := _import_line(selector)):
        return f'{problem} Import it in this file: {_DYNAMIC}, and {line}'
      return problem
    if first not in modules and first != 'gin':
      line = _import_line(selector)
      hint = '' if line and not rest else did_you_mean(first, modules)
      if line:
        hint += f' Write in this file: {line}'
      return f'{first!r} is not imported.{hint}'
    value, path = modules.get(first, gin_config), first
    for name in rest:
      if not hasattr(value, name):
        kind = 'Module' if inspect.ismodule(value) else 'Class'
        known = [n for n, v in vars(value).items() if not n.startswith('_') and callable(v)]
        hint = did_you_mean(name, known)
        return f'{kind} {getattr(value, "__name__", path)} has no {name!r}.{hint}'
      value, path = getattr(value, name), f'{path}.{name}'
    if not callable(value):
      return f'{path} is a {type(value).__name__}: only functions and classes have parameters.'
    return None


class CommandLineNames(FileNames):
  """Looks up known names by any unique ending, then names that the gin files import.

  So T5X's spelling `train_script.train.total_steps` and values like `@schedules.cosine` work on the
  command line, which has no imports.
  """

  def __init__(self, files: Sequence[FileNames]):
    super().__init__()
    self._files = [names for names in files if names.is_dynamic]  # others do not define names

  def _matches(self, selector: str) -> list[str]:
    """Returns the known names that end in `selector`.

    Includes gin's own names only if `selector` begins with `gin.`; otherwise a schedule named
    `constant` would clash with `gin.constant`.
    """
    matches = _KNOWN.matching_selectors(selector)
    return [m for m in matches if selector.startswith('gin.') or not m.startswith('gin.')]

  def get_configurable(self, selector: str) -> Optional[gin_config.Configurable]:
    if matches := self._matches(selector):
      return _KNOWN[matches[0]]
    found = (names for names in reversed(self._files) if names.problem(selector) is None)
    return next((names.get_configurable(selector) for names in found), None)

  def problem(self, selector: str, *, arg: str = '') -> Optional[str]:
    return _unknown(selector, matches=self._matches(selector), files=self._files, arg=arg)


def _unknown(
  selector: str, *, matches: Sequence[str], files: Sequence[FileNames] = (), arg: str = ''
) -> Optional[str]:
  """Returns why gin cannot configure a name that `matches` known names; None if it can.

  Args:
    selector: the name.
    matches: complete names that end in it.
    files: names of files that are looked up as well.
    arg: the parameter to bind.
  """
  if len(matches) > 1:
    names = ' or '.join(repr(m) for m in sorted(matches))
    return f'{selector!r} may mean {names}: write more of the name.'
  if matches or any(names.problem(selector) is None for names in files):
    return None
  imported = sorted({alias for names in files for alias in names.modules})
  longer = [f'{alias}.{selector}' for alias in imported]
  longer = [name for name in longer if any(names.problem(name) is None for names in files)]
  if longer:
    return (
      f'{selector!r} is not used by the gin files, so gin does not know it by its short name.'
      f' Write {" or ".join(longer)}.'
    )
  users = [name for name, c in _KNOWN.items() if c.module != 'gin']
  if '.' in selector:
    hint = did_you_mean(selector, [*map(short_name, users), *users])
  else:
    hint = did_you_mean(selector, [name.rpartition('.')[2] for name in users])
  owners = [short_name(name) for name in users if arg in parameters(name)]
  # T5X's `trainer.Trainer.num_microbatches` resembles `train_script.train`, but the parameter shows
  # which configurable was meant.
  if len(owners) == 1 and repr(owners[0]) not in hint:
    hint = f' {arg} is a parameter of {owners[0]}: write {owners[0]}.{arg}.'
  first = selector.partition('.')[0]
  if imported and not hint and '.' in selector and first not in imported:
    line = _import_line(selector)
    hint = (
      f' No gin file imports {first!r}; imported are {", ".join(imported)}.'
      f' Import it in a gin file first{f": {line}" if line else "."}'
    )
  return f'No function or class {selector!r} is known to gin.{hint}'


def _import_line(selector: str) -> str:
  """Returns the import of the t5x_gpu module that defines `selector`, or ''.

  If `selector` does not name its module, also returns the longer name: 'from t5x_gpu.data import
  batches, and batches.DatasetConfig'.
  """
  module, _, name = selector.rpartition('.')
  if '.' in module:
    return ''
  found = [
    path
    for path in sorted(PACKAGE.rglob(f'{module or "*"}.py'))
    if re.search(rf'^(?:class|def) {name}\b', path.read_text(encoding='utf-8'), re.MULTILINE)
  ]
  if not found or (not module and len(found) > 1):
    return ''
  folder = '.'.join(found[0].parent.relative_to(PACKAGE.parent).parts)
  line = f'from {folder} import {found[0].stem}'
  return line if module else f'{line}, and {found[0].stem}.{name}'


# T5's package asks for nightly builds of SeqIO and TFDS, which would replace the tested versions.
_T5_FIX = """Install T5's package without its dependencies, then what its tasks need:
  pip install --no-deps t5==0.9.4
  pip install babel editdistance nltk pandas rouge-score sacrebleu scikit-learn scipy"""


def install_fix(module: str, *, missing: str) -> str:
  """Returns how to install `missing`, without which `module` of a package cannot be imported."""
  return _T5_FIX if module.partition('.')[0] == 't5' else f'pip install {missing}'


# Modules of T5X that users look for in this package.
_T5X_MODULES = (
  'adafactor checkpoint_utils checkpoints decoding export_lib gin_utils losses optimizers trainer '
  'utils'
).split()


def import_problem(statement: config_parser.ImportStatement, error: BaseException) -> str:
  """Returns why the import of a gin file failed: no such module, or an error inside it."""
  module = statement.module
  missing = getattr(error, 'name', None) or ''
  if isinstance(error, ModuleNotFoundError) and module.partition('.')[0] == 't5':
    fix = install_fix(module, missing=missing)
    return f'{module} cannot be imported: there is no module {missing!r}. {fix}'
  if not isinstance(error, ModuleNotFoundError) or not f'{module}.'.startswith(f'{missing}.'):
    if isinstance(error, SyntaxError):
      what, where = error.msg, f'{error.filename}:{error.lineno}'
    else:
      frame = traceback.extract_tb(error.__traceback__)[-1]
      what, where = first_line(error), f'{frame.filename}:{frame.lineno}'
    return f'Importing {module} failed: {type(error).__name__}: {what} ({where}).'
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
  if missing == 't5x' or (parent == PACKAGE.name and name in _T5X_MODULES):
    return (
      f"There is no module {name!r}{where}. T5X's gin files run as they are, with T5X's names, if "
      'they do not import t5x_gpu (docs/from_t5x.md).'
    )
  return f'There is no module {name!r}{where}.{did_you_mean(name, siblings)}'
