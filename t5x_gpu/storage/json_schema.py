"""Untrusted JSON: parsed safely, then checked against a schema.

For any file content, the only errors are ValueError (invalid content) and OSError (unreadable
file). Code that uses a value from `parse_json` does not have to check it again. A schema is

    str, bool, dict, list, float, object   a value of that type; `float` is any number except true
                                           and false, `object` is any value
    Whole(low, high), Number(low, high)    a number between these bounds
    Text(pattern)                          text that matches as a whole
    (a, b)                                 a list with exactly these entries
    ListOf(schema), MapOf(schema)          a list, an object with any keys
    Fields({...}, optional={...})          an object with these keys
    Nullable(schema)                       null, or a value that matches the schema
    Also(schema, problem)                  `problem(value)` must return '' as well

`schema_of` makes the schema of a dataclass or TypedDict, so that the fields are declared once.
"""

import dataclasses
import errno
import functools
import json
import os
import re
import stat
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, BinaryIO, NotRequired, TypeVar, Union

T = TypeVar('T')
JsonValue = Union[None, bool, int, float, str, list, dict]
JsonObject = dict[str, Any]  # an object of a JSON file; its schema has the types of the values
Json = Mapping[str, Any]  # the same, only read
MOST_BYTES = 1 << 30  # limit for a file; the largest files hold shuffle buffers of the data
MOST_DEPTH = 100
MOST_DIGITS = 40  # tokenizer files of Hugging Face have 10**30 for "no limit"
LARGEST = 2**62
_SHOWN = 60
_SURROGATE = re.compile(r'\\u[dD][89abAB]|\\u[dD][c-fC-F]')
_TYPES = {str: 'text', bool: 'true or false', dict: 'an object', list: 'a list'}


@dataclasses.dataclass(frozen=True)
class Whole:
  low: int = 0
  high: int = LARGEST


@dataclasses.dataclass(frozen=True)
class Number:
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class Text:
  pattern: str


@dataclasses.dataclass(frozen=True)
class ListOf:
  schema: Any
  most: int = LARGEST


@dataclasses.dataclass(frozen=True)
class MapOf:
  schema: Any


@dataclasses.dataclass(frozen=True)
class Fields:
  """Other keys are allowed unless `others` is False."""

  required: Mapping[str, Any]
  optional: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  others: bool = True


@dataclasses.dataclass(frozen=True)
class Nullable:
  schema: Any


@dataclasses.dataclass(frozen=True)
class Also:
  schema: Any
  problem: Callable[[Any], str]


def schema_of(kind: Any) -> Any:
  """Returns the schema of a type.

  - A dataclass is an object with its fields and no others. Fields with a default may be absent.
  - A TypedDict is an object that may have other keys.
  - int is a whole number of at least 0; Annotated[int, Whole(1, 9)] has the given schema.
  """
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if origin is Annotated:
    return arguments[1]
  if origin is NotRequired:
    return schema_of(arguments[0])
  if origin is Union:  # Optional
    return Nullable(schema_of(arguments[0]))
  if origin is tuple and arguments[-1] is not Ellipsis:
    return tuple(map(schema_of, arguments))
  if origin is not None and issubclass(origin, Mapping):
    return dict if arguments[1] is Any else MapOf(schema_of(arguments[1]))
  if origin is not None:
    return ListOf(schema_of(arguments[0]))
  if not dataclasses.is_dataclass(kind) and not typing.is_typeddict(kind):
    return Whole() if kind is int else object if kind is Any else kind
  schemas = {
    name: schema_of(each) for name, each in typing.get_type_hints(kind, include_extras=True).items()
  }
  if typing.is_typeddict(kind):
    required, others = kind.__required_keys__, True
  else:
    required = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
    others = False
  return Fields(
    {name: schema for name, schema in schemas.items() if name in required},
    {name: schema for name, schema in schemas.items() if name not in required},
    others,
  )


def to_json(value: Any) -> JsonObject:
  """Returns a dataclass as a JSON object, its sets as sorted lists; `from_json` reverses it."""

  def fields(pairs: list[tuple[str, Any]]) -> JsonObject:
    return {name: sorted(x) if isinstance(x, frozenset) else x for name, x in pairs}

  return dataclasses.asdict(value, dict_factory=fields)


def from_json(kind: type[T], value: Any) -> T:
  """Returns the dataclass `kind` from a JSON object.

  Raises:
    ValueError: the object does not match `schema_of(kind)`.
  """
  check(value, _schema_of(kind))
  return _builder(kind)(value)


_schema_of = functools.cache(schema_of)


@functools.cache
def _builder(kind: Any) -> Callable[[Any], Any]:
  """Returns the function that makes a value of type `kind` from a JSON value."""
  if dataclasses.is_dataclass(kind):
    builders = {name: _builder(each) for name, each in typing.get_type_hints(kind).items()}
    return lambda value: kind(**{name: builders[name](x) for name, x in value.items()})
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if origin is Union:  # Optional
    build = _builder(arguments[0])
    return lambda value: None if value is None else build(value)
  if origin in (tuple, frozenset):
    build = _builder(arguments[0])
    return lambda value: origin(map(build, value))
  return lambda value: value


def read_json(path: Any, schema: Any = object) -> Any:
  """Returns the content of a JSON file.

  Args:
    path: a file, or an object in storage.
    schema: see above.
  Raises:
    ValueError: the content is too large, not JSON, or does not match `schema`.
    OSError: the file cannot be read, or is not a regular file.
  """
  return parse_json(read_bytes(path), schema)


def read_bytes(path: Any) -> bytes:
  """Returns the content of a small file; errors as for `read_json`."""
  if not isinstance(path, (str, os.PathLike)):  # an object in storage
    return path.read_bytes()
  with open_regular(path) as f:
    size = os.fstat(f.fileno()).st_size
    if size > MOST_BYTES:
      raise ValueError(f'it has {size:,} bytes, and {MOST_BYTES:,} is the limit')
    return f.read()


def open_regular(path: str | os.PathLike) -> BinaryIO:
  """Opens a regular file for reading. Raises OSError for others; does not block on a pipe."""
  f = open(path, 'rb', opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
  if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
    f.close()
    raise OSError(errno.EINVAL, 'It is not a regular file', str(path))
  return f


def parse_json(data: str | bytes, schema: Any = object) -> Any:
  """Returns the value of JSON text; raises ValueError if it is invalid or does not match."""
  text = data if isinstance(data, str) else data.decode('utf-8')
  try:
    value = json.loads(text, parse_int=_whole)
  except RecursionError:
    raise ValueError('it is nested too deeply') from None
  if is_deeper(value, MOST_DEPTH):  # code that traverses the value later recurses, too
    raise ValueError(f'it is nested more than {MOST_DEPTH} levels deep')
  if _SURROGATE.search(text):
    json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be printed or written
  check(value, schema)
  return value


def _whole(text: str) -> int:
  if len(text) > MOST_DIGITS:
    raise ValueError(f'a number has {len(text)} digits')
  return int(text)


def is_deeper(value: Any, levels: int) -> bool:
  """Returns whether lists and objects in `value` are nested more than `levels` deep."""
  level = [value]
  for _ in range(levels):
    level = [
      child
      for each in level
      if isinstance(each, (dict, list))
      for child in (each.values() if isinstance(each, dict) else each)
      if isinstance(child, (dict, list))
    ]
    if not level:
      return False
  return True


def check(value: Any, schema: Any, where: str = 'it') -> None:
  """Raises ValueError, naming the position in `value`, unless `value` matches `schema`."""

  def refuse(wanted: str) -> None:
    raise ValueError(f'{where} is {_shown(value)}, not {wanted}')

  def is_number(kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)

  match schema:
    case Nullable(inner):
      if value is not None:
        check(value, inner, where)
    case Also(inner, problem):
      check(value, inner, where)
      if problem(value):
        raise ValueError(f'{where} is {_shown(value)}: {problem(value)}')
    case Whole(low, high):
      if not is_number(int) or not low <= value <= high:
        refuse(f'a whole number from {low} to {high}')
    case Number(low, high):
      if not is_number((int, float)) or not low <= value <= high:
        refuse(f'a number from {low:g} to {high:g}')
    case Text(pattern):
      if not isinstance(value, str) or not re.fullmatch(pattern, value):
        refuse(f'text like {pattern}')
    case ListOf(inner, most):
      if not isinstance(value, list) or len(value) > most:
        refuse('a list' if most == LARGEST else f'a list of at most {most} entries')
      for i, entry in enumerate(value):
        check(entry, inner, f'{where}[{i}]')
    case tuple():
      if not isinstance(value, list) or len(value) != len(schema):
        refuse(f'a list of {len(schema)} entries')
      for i, (entry, inner) in enumerate(zip(value, schema)):
        check(entry, inner, f'{where}[{i}]')
    case MapOf(inner):
      check(value, dict, where)
      for key, entry in value.items():
        check(entry, inner, _below(where, key))
    case Fields(required, optional, others):
      check(value, dict, where)
      missing = required.keys() - value.keys()
      if missing:
        raise ValueError(f'{where} has no {min(missing)!r}')
      unknown = value.keys() - required.keys() - optional.keys()
      if unknown and not others:
        raise ValueError(f'{where} has an unknown key {_shown(min(unknown))}')
      for key, inner in (*required.items(), *optional.items()):
        if key in value:
          check(value[key], inner, _below(where, key))
    case _:
      if schema is float:
        if not is_number((int, float)):
          refuse('a number')
      elif schema is not object and not isinstance(value, schema):
        refuse(_TYPES[schema])


def _below(where: str, key: str) -> str:
  return f'{where}[{_shown(key)}]'


def _shown(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= _SHOWN else f'{text[:_SHOWN]}...'
