"""Resolves names in gin files to gin's configurables; explains failures, with a suggestion."""

import importlib
import inspect
import pathlib
import pkgutil
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Optional

from gin import config as gin_config
from gin import config_parser

from t5x_gpu.errors import did_you_mean, first_line

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
