"""Mistakes that gin accepts: unknown scopes, unused bindings, wrong types, lost overrides.

Each check returns problems with file:line; `gin_loader.load` raises them all at once.
"""

import inspect
import re
import sys
import types
from collections.abc import Sequence

from gin import config as gin_config

from t5x_gpu.config import bindings as bindings_lib
from t5x_gpu.config import resolve, type_checks
from t5x_gpu.config.bindings import Binding, Bindings, Call
from t5x_gpu.errors import Problem, did_you_mean

_CONFIG_SCOPE = re.compile(r'config_scope\(\s*[\'"]([\w./]+)[\'"]')


def problems(
  bindings: Bindings, entries: Sequence[Call], lost: Sequence[gin_config.ConfigurableReference] = ()
) -> list[Problem]:
  """Returns all problems of bindings that gin accepted.

  Args:
    bindings: all bindings.
    entries: the calls of the entry functions.
    lost: references in refused bindings; bindings reached from them do not count as unused.
  """
  refused = [Call(r.configurable.selector, tuple(r.scopes), r.evaluate) for r in lost]
  scopes = _scopes(bindings, refused)
  roots = [*entries, *_decorated(scopes)]
  circles = _macro_circles(bindings)
  if circles:  # following values would not terminate
    return circles
  reached = bindings.calls(roots)
  return [
    *_lost_overrides(bindings),
    *_unused(bindings, reached, roots=roots, refused=refused, scopes=scopes),
    *_wrong_types(bindings, reached),
  ]


def _scopes(bindings: Bindings, refused: Sequence[Call]) -> set[bindings_lib.Scopes]:
  """Returns the scopes that references, or `gin.config_scope` in user modules, enter."""
  found = {
    tuple(r.scopes)
    for b in bindings.ordered
    for r in bindings_lib.references(b.value)
    if not bindings_lib.is_constant(r)
  }
  found |= {call.scopes for call in refused}
  for module in {c.wrapped.__module__ for _, c in gin_config._REGISTRY.items() if _is_decorated(c)}:
    try:
      source = inspect.getsource(sys.modules[module])
    except (OSError, KeyError, TypeError):
      continue
    found |= {tuple(name.split('/')) for name in _CONFIG_SCOPE.findall(source)}
  return {scopes[:depth] for scopes in found for depth in range(len(scopes) + 1)} | {()}


def _is_decorated(configurable: gin_config.Configurable) -> bool:
  return configurable.import_source is None and configurable.module != 'gin'


def _decorated(scopes: set[bindings_lib.Scopes]) -> list[Call]:
  """Returns calls of `@gin.configurable` functions: Python code may call them in any scope."""
  return [
    Call(selector, s, evaluated=False)
    for selector, c in gin_config._REGISTRY.items()
    if _is_decorated(c)
    for s in sorted(scopes)
  ]


def _macro_circles(bindings: Bindings) -> list[Problem]:
  found = {}
  for start in bindings.final():
    path, binding = [], start
    while binding is not None and binding.is_macro and binding not in path:
      path.append(binding)
      inner = next(
        (r for r in bindings_lib.references(binding.value) if bindings_lib.is_macro(r)), None
      )
      binding = inner and bindings.macro(inner)
    if path and binding is start:
      text = ' -> '.join(f'%{b.key} ({b.origin})' for b in path)
      circle = f'Macros refer to each other in a circle: {text} -> %{start.key}.'
      found.setdefault(frozenset(path), Problem(circle))
  return list(found.values())


def _lost_overrides(bindings: Bindings) -> list[Problem]:
  """Returns problems with bindings that are overridden by a file included later."""
  result = []
  for last in bindings.final():
    history = bindings.history(last)
    for earlier, later in zip(history, history[1:]):
      depth = len(earlier.stack)
      if 0 < depth < len(later.stack) and later.stack[:depth] == earlier.stack:
        result.append(
          Problem(
            f'{earlier.origin} sets {earlier.key} = {earlier.text}, and {later.origin}, '
            f'included after it, sets it to {later.text}.',
            'Move the include above that line.',
          )
        )
  return result


def _unused(
  bindings: Bindings,
  reached: Sequence[Call],
  *,
  roots: Sequence[Call],
  refused: Sequence[Call],
  scopes: set[bindings_lib.Scopes],
) -> list[Problem]:
  """Returns unused bindings, except bindings that only other unused bindings refer to."""
  operative = {
    found[-1] for call in reached for found in bindings.applied(call.selector, call.scopes).values()
  }
  excused = _applied(bindings, bindings.calls([*roots, *refused], overridden=True))
  idle = [b for b in bindings.final() if b not in excused]
  # An unused binding that another unused binding refers to is not a second problem.
  causes = [b for b in idle if not b.is_macro] or idle
  consequences = set()
  for b in [*causes, *(b for b in idle if b not in causes)]:
    if b not in consequences:
      scope = tuple(b.scope.split('/')) if b.scope else ()
      inner = bindings.calls(bindings_lib.calls_in(b.value, scopes=scope), overridden=True)
      consequences |= _applied(bindings, inner) - {b}
  result = [_unused_problem(b, bindings, reached, scopes) for b in idle if b not in consequences]
  for b in bindings.final():
    if b in excused and b not in operative and b.from_command_line:
      result.append(
        Problem(f'{b.origin} has no effect: the bindings that use {b.key} are overridden.')
      )
  return result


def _applied(bindings: Bindings, calls: Sequence[Call]) -> set[Binding]:
  return {
    b
    for call in calls
    for found in bindings.applied(call.selector, call.scopes).values()
    for b in found
  }


def _unused_problem(
  binding: Binding, bindings: Bindings, reached: Sequence[Call], scopes: set[bindings_lib.Scopes]
) -> Problem:
  if binding.is_macro:
    used = {
      '/'.join(r.scopes)
      for b in bindings.ordered
      for r in bindings_lib.references(b.value)
      if bindings_lib.is_macro(r)
    }
    unset = sorted(
      name for name in used if not bindings.effective(bindings_lib.MACRO, tuple(name.split('/')))
    )
    hint = (
      did_you_mean(binding.key, unset)
      or _parameter_hint(binding.key, reached)
      or did_you_mean(binding.key, used - {binding.key})
    )
    if binding.from_command_line:
      return Problem(f'{binding.origin}: no gin file uses a macro {binding.key}.{hint}')
    return Problem(f'{binding.origin}: macro {binding.key} is set, and nothing uses it.{hint}')
  scope = tuple(binding.scope.split('/')) if binding.scope else ()
  known = sorted('/'.join(s) for s in scopes if s and not _is_macro_name(s, bindings))
  if scope not in scopes:
    hint = did_you_mean(binding.scope, known) or (
      f' Scopes in use: {", ".join(known)}.' if known else ' No reference uses a scope.'
    )
    entered = f'no reference enters scope {binding.scope!r} of {binding.key}.{hint}'
    return Problem(f'{binding.origin}: {entered}')
  elsewhere = sorted({'/'.join(c.scopes) for c in reached if c.selector == binding.selector})
  name = bindings_lib.short_name(binding.selector)
  if scope and elsewhere:
    return Problem(
      f'{binding.origin}: {binding.key} is set, but no @{binding.scope}/{name} is used. '
      f'It is used as ' + ', '.join(f'@{s}/{name}' if s else f'@{name}' for s in elsewhere) + '.'
    )
  return Problem(
    f'{binding.origin}: {binding.key} is set, but the run never uses {name}: no @{name} '
    'leads to it from the entry point.',
    'Remove the binding, or bind the reference.',
  )


def _parameter_hint(macro: str, reached: Sequence[Call]) -> str:
  """Returns a hint if parameters of the run have the same name as an unused macro."""
  selectors = dict.fromkeys(call.selector for call in reached)
  names = [
    f'{bindings_lib.short_name(selector)}.{macro.lower()}'
    for selector in selectors
    if macro.lower() in type_checks.annotations(gin_config._REGISTRY[selector])
  ]
  return f' It is a parameter: set {" or ".join(names)}.' if names else ''


def _is_macro_name(scope: bindings_lib.Scopes, bindings: Bindings) -> bool:
  return any(b.is_macro and b.scope == '/'.join(scope) for b in bindings.ordered) or any(
    bindings_lib.is_macro(r) and tuple(r.scopes)[: len(scope)] == scope
    for b in bindings.ordered
    for r in bindings_lib.references(b.value)
  )


def _wrong_types(bindings: Bindings, reached: Sequence[Call]) -> list[Problem]:
  result: dict[Binding, Problem] = {}
  for call in reached:
    configurable = gin_config._REGISTRY[call.selector]
    if configurable.module == 'gin':
      continue
    hints = type_checks.annotations(configurable)
    for arg, binding in bindings.effective(call.selector, call.scopes).items():
      if arg not in hints or binding in result:
        continue
      value = type_checks.literal(binding.value, bindings)
      wrong = type_checks.mismatch(value, hints[arg])
      if wrong:
        source = bindings.follow(binding)
        through = '' if source is binding else f' through {binding.text} at {binding.origin}'
        typed = source.typed if isinstance(value, (int, float, types.NoneType)) else ''
        if typed:
          wrong = type_checks.mismatch(value, hints[arg], typed=typed)
        text = typed or source.text
        result[binding] = Problem(f'{source.origin}: {binding.key} = {text}{through}: {wrong}')
  return list(result.values())


def missing(bindings: Bindings, entry: Call, *, without: Sequence[str] = ()) -> list[Problem]:
  """Returns required parameters and macros that are not set, with how to set them.

  Skips the parameters of the entry function in `without`.
  """
  result: dict[str, Problem] = {}
  roots = [entry]
  own = {
    arg: b
    for arg, b in bindings.effective(entry.selector, entry.scopes).items()
    if arg not in without
  }
  _required(entry, own, skip=without, result=result)
  _unset(own, bindings, result=result)
  roots = [
    call
    for b in own.values()
    for call in bindings_lib.calls_in(b.value, scopes=entry.scopes, binding=b)
  ]
  for call in bindings.calls(roots):
    if call.selector == bindings_lib.CONSTANT:
      continue
    bound = bindings.effective(call.selector, call.scopes)
    if call.evaluated and call.selector != bindings_lib.MACRO:
      _required(call, bound, skip=(), result=result)
    _unset(bound, bindings, result=result)
  return list(result.values())


def _required(
  call: Call, bound: dict[str, Binding], *, skip: Sequence[str], result: dict[str, Problem]
) -> None:
  name = '/'.join((*call.scopes, bindings_lib.short_name(call.selector)))
  used = f', which {call.binding.key} uses ({call.binding.origin})' if call.binding else ''
  for arg, parameter in resolve.parameters(gin_config._REGISTRY[call.selector]).items():
    needed = any(parameter.default is x for x in (inspect.Parameter.empty, gin_config.REQUIRED))
    if needed and arg not in bound and arg not in skip:
      key = f'{name}.{arg}'
      result.setdefault(key, Problem(f'{key} is required{used}.', _set_it(key)))


def _unset(bound: dict[str, Binding], bindings: Bindings, *, result: dict[str, Problem]) -> None:
  macros = {b.key for b in bindings.ordered if b.is_macro}
  for b in bound.values():
    for reference in bindings_lib.references(b.value):
      if bindings_lib.is_required(reference):
        result.setdefault(b.key, Problem(f'{b.key} is required ({b.origin}).', _set_it(b.key)))
      elif bindings_lib.is_macro(reference) and bindings.macro(reference) is None:
        name = '/'.join(reference.scopes)
        unset = f'{b.key} = {b.text} at {b.origin}, and nothing sets {name}.'
        result.setdefault(name, Problem(f'{unset}{did_you_mean(name, macros)}', _set_it(name)))


def _set_it(name: str) -> str:
  return f'Set it in a gin file or by --gin.{name}=VALUE'
