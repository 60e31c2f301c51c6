"""Mistakes that gin accepts: unknown scopes, unused bindings, wrong types, lost overrides.

`problems` and `missing` return problems with file:line; `gin_loader.load` raises them all at once.
Types are checked against annotations, so `batch_size = '128'` for an int fails at startup.
"""

import collections.abc
import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Optional

import gin

from t5x_gpu.config import gin_names, gin_text
from t5x_gpu.config.gin_names import short_name
from t5x_gpu.config.gin_text import REQUIRED, Constant, Macro, Reference, Symbol, Value
from t5x_gpu.config.reader import MACRO, Binding, Bindings, Call, Scopes, calls_in
from t5x_gpu.errors import Problem, did_you_mean

_LITERALS = (int, float, bool, str, bytes, list, tuple, dict)
_NUMBERS = {int: (int,), float: (int, float), complex: (int, float, complex)}
_CONTAINERS = (
  *(list, tuple, dict, set, frozenset),
  *(collections.abc.Sequence, collections.abc.MutableSequence),
  *(collections.abc.Mapping, collections.abc.MutableMapping),
  *(collections.abc.Iterable, collections.abc.Collection),
)
Annotation = object  # a class, or a form of `typing`


def problems(
  bindings: Bindings, roots: Sequence[Call], lost: Sequence[Value] = ()
) -> list[Problem]:
  """Returns all problems of bindings that gin accepted.

  Args:
    bindings: all bindings.
    roots: the calls of the entry functions, and `decorated_calls`.
    lost: values of refused bindings; bindings reached from them do not count as unused.
  """
  circles = _macro_circles(bindings)
  if circles:  # following values would not terminate
    return circles
  refused = calls_in(list(lost))
  reached = bindings.calls(roots)
  scopes = _scopes(bindings) | _with_outer({call.scopes for call in refused})
  return [
    *_lost_overrides(bindings),
    *_unused(bindings, reached, roots=roots, refused=refused, scopes=scopes),
    *_wrong_types(bindings, reached),
  ]


def missing(
  bindings: Bindings, entry: Call, *, only: Optional[Collection[str]] = None
) -> list[Problem]:
  """Returns required parameters and macros that are not set, with how to set them.

  `only` are the parameters of the entry function that the caller needs; None for all.
  """
  result: dict[str, Problem] = {}
  bound = bindings.effective(entry)
  needed = [name for name in gin_names.parameters(entry.selector) if only is None or name in only]
  own = {arg: b for arg, b in bound.items() if arg in needed}
  _required(entry, own, names=needed, result=result)
  _unset(own, bindings, result=result)
  roots = [call for b in own.values() for call in calls_in(b.value, scopes=entry.scopes, binding=b)]
  for call in bindings.calls(roots):
    bound = bindings.effective(call)
    if call.evaluated and call.selector != MACRO:
      _required(call, bound, names=gin_names.parameters(call.selector), result=result)
    _unset(bound, bindings, result=result)
  return list(result.values())


class Unknown:
  """A value that is unknown before the run, and fits any annotation."""


def literal(value: Value, bindings: Bindings) -> Value:
  """Returns `value` without macros and constants; unknown ones become `Unknown`."""

  def known(symbol: Symbol) -> Value | Unknown:
    if isinstance(symbol, Reference):
      return symbol
    if isinstance(symbol, Constant):
      constant = gin.query_parameter(symbol.name)
      return constant if isinstance(constant, _LITERALS) else Unknown()
    binding = bindings.macro(symbol)
    return Unknown() if binding is None else literal(binding.value, bindings)

  return gin_text.map_symbols(value, known)


def mismatch(value: Value, annotation: Annotation, *, typed: str = '') -> str:
  """Returns why `value` does not fit `annotation`, with a value that would fit; '' if it fits.

  `typed` is the text of a number on the command line, where 1e5 may be the name of a folder.
  """
  if _fits(value, annotation):
    return ''
  if isinstance(value, Reference):
    if _fits([value], annotation):
      return f'{value} is not a list; write [{value}].'
    called = dataclasses.replace(value, evaluate=not value.evaluate)
    if value.evaluate and _fits(called, annotation):
      return f'{value} is the object; expected is the class: write {called}, without parentheses.'
    if not value.evaluate and _result(annotation) is None and _fits(called, annotation):
      return f'{value} is the class or function itself; write {value}() to call it.'
    name = getattr(value.target, '__name__', value.target)
    wrong = f'{value} gives {name}; expected {show(annotation)}.'
    return wrong + _base_class(value.target, annotation)
  wrong = f'{typed or repr(value)} is {_article(value)}; expected {show(annotation)}.'
  if typed and _fits(typed, annotation):
    return f'{wrong} For the text, add quotes: "{typed!r}".'
  return wrong + _remedy(value, annotation)


def _base_class(made: object, annotation: Annotation) -> str:
  """Returns ` Write class MyModel(Model), ...` for a user's class that lacks our base class."""
  own = 't5x_gpu.'
  if not all(map(inspect.isclass, (made, annotation))) or dataclasses.is_dataclass(annotation):
    return ''
  if made.__module__.startswith(own) or not annotation.__module__.startswith(own):
    return ''
  return (
    f' Write class {made.__name__}({annotation.__name__}), and import {annotation.__name__} from '
    f'{annotation.__module__}.'
  )


def _article(value: Value) -> str:
  if value is None:
    return 'None'
  name = type(value).__name__
  return f'{"an" if name[0] in "aeiou" else "a"} {name}'


def _remedy(value: Value, annotation: Annotation) -> str:
  """Returns ` Write 128.` if a small change makes `value` fit."""
  candidates: list[Value] = []
  if isinstance(value, str):
    for text in (value, value.capitalize()):
      try:
        candidates.append(gin_text.parse_value(text))
      except SyntaxError:
        continue
  elif isinstance(value, list):
    candidates.append(tuple(value))
  elif isinstance(value, tuple):
    candidates.append(list(value))
  elif isinstance(value, float) and value.is_integer():
    candidates.append(int(value))
  candidates += [[value], (value,), str(value)]
  fitting = [c for c in candidates if _fits(c, annotation)]
  return f' Write {fitting[0]!r}.' if fitting else ''


def show(annotation: Annotation) -> str:
  """Returns an annotation as source text."""
  if annotation is None or annotation is type(None):
    return 'None'
  if typing.get_origin(annotation) in (typing.Union, types.UnionType):
    return ' or '.join(show(a) for a in typing.get_args(annotation))
  if typing.get_origin(annotation) is typing.Literal:
    return ' or '.join(repr(a) for a in typing.get_args(annotation))
  if inspect.isclass(annotation) and not typing.get_args(annotation):
    return annotation.__name__
  return str(annotation).replace('typing.', '').replace('collections.abc.', '')


def _fits(value: Value | Unknown, annotation: Annotation) -> bool:
  if isinstance(value, Unknown) or annotation is Any:
    return True
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if origin in (typing.Union, types.UnionType):
    return any(_fits(value, a) for a in args)
  if origin in (typing.Annotated, typing.Final, typing.ClassVar):
    return _fits(value, args[0]) if args else True
  if origin is typing.Literal:
    return isinstance(value, Reference) or any(value == a and type(value) is type(a) for a in args)
  if isinstance(value, Reference):
    return _made_fits(value, origin or annotation) and _makes(value, _result(annotation))
  if annotation is None or annotation is type(None):
    return value is None
  kind = origin or annotation
  if kind in _NUMBERS:
    return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
  if kind in (bool, str, bytes):
    return isinstance(value, kind)
  if not inspect.isclass(kind):
    return True
  if kind in (collections.abc.Callable, type) or dataclasses.is_dataclass(kind):
    return not isinstance(value, (*_LITERALS, type(None)))
  if kind in _CONTAINERS:
    return _container_fits(value, kind, args)
  if typing.Protocol in kind.__bases__:  # an interface, which no literal has
    return not isinstance(value, _LITERALS)
  return True


def _container_fits(value: Value, kind: type, args: tuple) -> bool:
  if isinstance(value, (str, bytes)) or not isinstance(value, kind):  # text is not a list of words
    return False
  if not args:
    return True
  if isinstance(value, dict):
    keys, values = args if len(args) == 2 else (args[0], Any)
    return all(_fits(k, keys) and _fits(v, values) for k, v in value.items())
  if kind is tuple and args[-1] is not Ellipsis:
    return len(value) == len(args if args != ((),) else ()) and all(map(_fits, value, args))
  return all(_fits(item, args[0]) for item in value)


def _made_fits(value: Reference, kind: Annotation) -> bool:
  """Returns whether a reference's value fits; True for functions, whose result is unknown."""
  if not inspect.isclass(kind):
    return True
  if not value.evaluate:
    is_data = kind in _LITERALS or dataclasses.is_dataclass(kind) or kind in _CONTAINERS
    return not is_data and kind is not type(None)
  if kind in (collections.abc.Callable, type) or not inspect.isclass(value.target):
    return True
  try:
    return issubclass(value.target, kind)
  except TypeError:  # a Protocol that cannot be checked
    return True


def _result(annotation: Annotation) -> Annotation:
  """Returns what a Callable returns; None for other annotations."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  return args[-1] if origin is collections.abc.Callable and args else None


def _makes(value: Reference, result: Annotation) -> bool:
  """Returns whether a reference fits Callable[..., `result`]: a subclass, not an object."""
  if result is Any or not inspect.isclass(result) or not inspect.isclass(value.target):
    return True
  try:
    return issubclass(value.target, result) != value.evaluate
  except TypeError:  # a Protocol that cannot be checked
    return True


_CONFIG_SCOPE = re.compile(r'config_scope\(\s*[\'"]([\w./]+)[\'"]')


def _scopes(bindings: Bindings) -> set[Scopes]:
  """Returns the scopes that references, macros, or `gin.config_scope` in user modules enter."""
  found = {call.scopes for b in bindings.ordered for call in calls_in(b.value)}
  for module in {known.wrapped.__module__ for known in gin_names.decorated()}:
    try:
      source = inspect.getsource(sys.modules[module])
    except (OSError, KeyError, TypeError):
      continue
    found |= {tuple(name.split('/')) for name in _CONFIG_SCOPE.findall(source)}
  return _with_outer(found)


def _with_outer(scopes: set[Scopes]) -> set[Scopes]:
  return {scope[:depth] for scope in scopes for depth in range(len(scope) + 1)} | {()}


def decorated_calls(bindings: Bindings) -> list[Call]:
  """Returns calls of `@gin.configurable` functions: Python code may call them in any scope."""
  scopes = sorted(_scopes(bindings))
  return [
    Call(known.selector, s, evaluated=False) for known in gin_names.decorated() for s in scopes
  ]


def _macro_circles(bindings: Bindings) -> list[Problem]:
  found = {}
  for start in bindings.final():
    path, binding = [], start
    while binding is not None and binding.is_macro and binding not in path:
      path.append(binding)
      inner = next(gin_text.instances(binding.value, Macro), None)
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
  scopes: set[Scopes],
) -> list[Problem]:
  """Returns unused bindings, except bindings that only other unused bindings refer to."""
  operative = bindings.used(reached)
  excused = _applied(bindings, bindings.calls([*roots, *refused], overridden=True))
  idle = [b for b in bindings.final() if b not in excused]
  # An unused binding that another unused binding refers to is not a second problem.
  causes = [b for b in idle if not b.is_macro] or idle
  consequences = set()
  for b in [*causes, *(b for b in idle if b not in causes)]:
    if b not in consequences:
      scope = tuple(b.scope.split('/')) if b.scope else ()
      inner = bindings.calls(calls_in(b.value, scopes=scope), overridden=True)
      consequences |= _applied(bindings, inner) - {b}
  result = [_unused_problem(b, bindings, reached, scopes) for b in idle if b not in consequences]
  for b in bindings.final():
    if b in excused and b not in operative and b.from_command_line:
      result.append(
        Problem(f'{b.origin} has no effect: the bindings that use {b.key} are overridden.')
      )
  return result


def _applied(bindings: Bindings, calls: Sequence[Call]) -> set[Binding]:
  return {b for call in calls for found in bindings.applied(call).values() for b in found}


def _unused_problem(
  binding: Binding, bindings: Bindings, reached: Sequence[Call], scopes: set[Scopes]
) -> Problem:
  macros = {m for b in bindings.ordered for m in gin_text.instances(b.value, Macro)}
  used = {macro.name for macro in macros}
  if binding.is_macro:
    unset = sorted(macro.name for macro in macros if bindings.macro(macro) is None)
    hint = (
      did_you_mean(binding.key, unset)
      or _parameter_hint(binding.key, reached)
      or did_you_mean(binding.key, used - {binding.key})
    )
    if binding.from_command_line:
      return Problem(f'{binding.origin}: no gin file uses a macro {binding.key}.{hint}')
    return Problem(f'{binding.origin}: macro {binding.key} is set, and nothing uses it.{hint}')
  scope = tuple(binding.scope.split('/')) if binding.scope else ()
  known = sorted({'/'.join(s) for s in scopes if s} - used)
  if scope not in scopes:
    hint = did_you_mean(binding.scope, known) or (
      f' Scopes in use: {", ".join(known)}.' if known else ' No reference uses a scope.'
    )
    entered = f'no reference enters scope {binding.scope!r} of {binding.key}.{hint}'
    return Problem(f'{binding.origin}: {entered}')
  elsewhere = sorted({'/'.join(c.scopes) for c in reached if c.selector == binding.selector})
  name = short_name(binding.selector)
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
  names = [
    f'{short_name(selector)}.{macro.lower()}'
    for selector in dict.fromkeys(call.selector for call in reached)
    if macro.lower() in gin_names.annotations(selector)
  ]
  return f' It is a parameter: set {" or ".join(names)}.' if names else ''


def _wrong_types(bindings: Bindings, reached: Sequence[Call]) -> list[Problem]:
  result: dict[Binding, Problem] = {}
  for call in reached:
    if call.selector.startswith('gin.'):
      continue
    hints = gin_names.annotations(call.selector)
    for arg, binding in bindings.effective(call).items():
      if arg not in hints or binding in result:
        continue
      value = literal(binding.value, bindings)
      wrong = mismatch(value, hints[arg])
      if wrong:
        source = bindings.follow(binding)
        through = '' if source is binding else f' through {binding.text} at {binding.origin}'
        typed = source.typed if isinstance(value, (int, float, types.NoneType)) else ''
        if typed:
          wrong = mismatch(value, hints[arg], typed=typed)
        text = typed or source.text
        result[binding] = Problem(f'{source.origin}: {binding.key} = {text}{through}: {wrong}')
  return list(result.values())


def _required(
  call: Call, bound: Mapping[str, Binding], *, names: Collection[str], result: dict[str, Problem]
) -> None:
  name = '/'.join((*call.scopes, short_name(call.selector)))
  used = f', which {call.binding.key} uses ({call.binding.origin})' if call.binding else ''
  for arg, parameter in gin_names.parameters(call.selector).items():
    needed = any(parameter.default is x for x in (inspect.Parameter.empty, gin.REQUIRED))
    if arg in names and needed and arg not in bound:
      key = f'{name}.{arg}'
      result.setdefault(key, Problem(f'{key} is required{used}.', _set_it(key)))


def _unset(bound: Mapping[str, Binding], bindings: Bindings, *, result: dict[str, Problem]) -> None:
  macros = {b.key for b in bindings.ordered if b.is_macro}
  for b in bound.values():
    for symbol in gin_text.instances(b.value, (Macro, Constant)):
      if symbol == REQUIRED:
        result.setdefault(b.key, Problem(f'{b.key} is required ({b.origin}).', _set_it(b.key)))
      elif isinstance(symbol, Macro) and bindings.macro(symbol) is None:
        name = symbol.name
        unset = f'{b.key} = {b.text} at {b.origin}, and nothing sets {name}.'
        result.setdefault(name, Problem(f'{unset}{did_you_mean(name, macros)}', _set_it(name)))


def _set_it(name: str) -> str:
  return f'Set it in a gin file or by --gin.{name}=VALUE'
