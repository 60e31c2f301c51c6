"""Checks gin values against annotations: `batch_size = '128'` for an int fails at startup.

Unknown annotations accept any value.
"""

import collections.abc
import dataclasses
import inspect
import tokenize
import types
import typing
from collections.abc import Mapping
from typing import Any

from gin import config as gin_config

from t5x_gpu.config import bindings as bindings_lib
from t5x_gpu.config import statements
from t5x_gpu.config.bindings import Bindings

_SCALARS = (int, float, bool, str, bytes)
_LITERALS = (*_SCALARS, list, tuple, dict)
_NUMBERS = {int: (int,), float: (int, float), complex: (int, float, complex)}


@dataclasses.dataclass(frozen=True)
class ReferenceValue:
  """The value of a reference: an instance of `what` (`@x()`), or `what` itself (`@x`)."""

  what: Any
  evaluated: bool
  text: str


class Unknown:
  """A value that is unknown before the run, and fits any annotation."""


def annotations(configurable: gin_config.Configurable) -> dict[str, Any]:
  """Returns parameter -> annotation, without annotations that cannot be resolved."""
  function = configurable.wrapped
  if inspect.isclass(function) and not dataclasses.is_dataclass(function):
    function = gin_config._find_class_construction_fn(function)
  if not inspect.isclass(function):
    function = inspect.unwrap(function)
  try:
    return typing.get_type_hints(function)
  except Exception:  # a name that exists only for type checkers: check the other parameters
    raw = getattr(function, '__annotations__', {})
    return {name: hint for name, hint in raw.items() if not isinstance(hint, str)}


def literal(value: Any, bindings: Bindings) -> Any:
  """Returns `value` without macros; references become a `ReferenceValue` or `Unknown`."""
  if isinstance(value, gin_config.ConfigurableReference):
    if bindings_lib.is_constant(value):
      constant = gin_config._CONSTANTS.get('/'.join(value.scopes))
      return constant if isinstance(constant, _LITERALS) else Unknown()
    if bindings_lib.is_macro(value):
      binding = bindings.macro(value)
      return Unknown() if binding is None else literal(binding.value, bindings)
    return ReferenceValue(value.configurable.wrapped, value.evaluate, repr(value))
  if isinstance(value, Mapping):
    return {_hashable(literal(k, bindings)): literal(v, bindings) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return type(value)(literal(item, bindings) for item in value)
  return value


def _hashable(key: Any) -> Any:
  return key if isinstance(key, (*_SCALARS, tuple, type(None))) else Unknown()


def mismatch(value: Any, annotation: Any, *, typed: str = '') -> str:
  """Returns why `value` does not fit `annotation`, with a value that would fit; '' if it fits.

  `typed` is the text of a number on the command line, where 1e5 may be the name of a folder.
  """
  if _fits(value, annotation):
    return ''
  if isinstance(value, ReferenceValue):
    if not value.evaluated and _fits(dataclasses.replace(value, evaluated=True), annotation):
      return f'{value.text} is the class or function itself; write {value.text}() to call it.'
    name = getattr(value.what, '__name__', value.what)
    return f'{value.text} gives {name}; expected {show(annotation)}.'
  wrong = f'{typed or repr(value)} is {_article(value)}; expected {show(annotation)}.'
  if typed and _fits(typed, annotation):
    return f'{wrong} For the text, add quotes: "{typed!r}".'
  return wrong + _remedy(value, annotation)


def _article(value: Any) -> str:
  if value is None:
    return 'None'
  name = type(value).__name__
  return f'{"an" if name[0] in "aeiou" else "a"} {name}'


def _remedy(value: Any, annotation: Any) -> str:
  """Returns ` Write 128.` if a small change makes `value` fit."""
  candidates: list[Any] = []
  if isinstance(value, str):
    for text in (value, value.capitalize()):
      try:
        candidates.append(statements.parse_value(text))
      except (SyntaxError, tokenize.TokenError):
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


def show(annotation: Any) -> str:
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


def _fits(value: Any, annotation: Any) -> bool:
  if isinstance(value, Unknown) or annotation is Any:
    return True
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if origin in (typing.Union, types.UnionType):
    return any(_fits(value, a) for a in args)
  if origin in (typing.Annotated, typing.Final, typing.ClassVar):
    return _fits(value, args[0]) if args else True
  if origin is typing.Literal:
    return isinstance(value, ReferenceValue) or any(
      value == a and type(value) is type(a) for a in args
    )
  if isinstance(value, ReferenceValue):
    return _made_fits(value, origin or annotation)
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
  if _is_container(kind):
    return _container_fits(value, kind, args)
  return True


def _is_container(kind: type) -> bool:
  abstract = ('Sequence', 'Iterable', 'Collection', 'Mapping', 'MutableMapping', 'MutableSequence')
  return kind in (
    list,
    tuple,
    dict,
    set,
    frozenset,
    *(getattr(collections.abc, name) for name in abstract),
  )


def _container_fits(value: Any, kind: type, args: tuple) -> bool:
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


def _made_fits(value: ReferenceValue, kind: Any) -> bool:
  """Returns whether a reference's value fits; True for functions, whose result is unknown."""
  if not inspect.isclass(kind) or getattr(kind, '_is_protocol', False) or kind is object:
    return True
  if not value.evaluated:
    return (
      kind not in _LITERALS
      and kind is not type(None)
      and not dataclasses.is_dataclass(kind)
      and not (_is_container(kind))
    )
  if kind in (collections.abc.Callable, type):
    return True
  if not inspect.isclass(value.what):
    return True
  try:
    return issubclass(value.what, kind)
  except TypeError:
    return True
