"""Values against annotations: sure mismatches are found, unknown annotations accept everything."""

import collections.abc
import dataclasses
import typing
from typing import Any, Literal, Optional, Protocol, Union

import pytest

from t5x_gpu.config import checks
from t5x_gpu.config.gin_text import Reference


class Model(Protocol):
  def loss(self): ...


@dataclasses.dataclass
class Point:
  x: int = 0


class Special(Point):
  pass


def reference(target, *, evaluate):
  return Reference(target.__name__, evaluate, target=target)


NEW = typing.NewType('NEW', int)


@pytest.mark.parametrize(
  'value, annotation',
  [
    (1, int),
    (1, float),
    (1.5, float),
    (True, bool),
    ('a', str),
    (None, None),
    (None, Optional[int]),
    (1, Optional[int]),
    (1, int | None),
    ('a', Union[int, str]),
    ([1], list),
    ([1], list[int]),
    ((1, 2), tuple[int, ...]),
    ((1, 'a'), tuple[int, str]),
    ((), tuple[()]),
    ([1, 2], typing.Sequence[int]),
    ((1,), collections.abc.Sequence[int]),
    ({'a': 1}, dict[str, int]),
    ({'a': 1}, typing.Mapping[str, Any]),
    ({}, collections.abc.Mapping),
    ('b', Literal['a', 'b']),
    ('x', NEW),
    ('x', Any),
    ('x', 'Unresolved'),
    (1, typing.TypeVar('T')),
    ('x', typing.Annotated[str, 'unit']),
    (checks.Unknown(), int),
    ({'a': checks.Unknown()}, dict[str, int]),
    (reference(Special, evaluate=True), Point),
    (reference(Special, evaluate=False), collections.abc.Callable[..., Any]),
    (reference(Special, evaluate=False), type[Point]),
    (reference(Special, evaluate=False), collections.abc.Callable[..., Point]),
    (reference(Model, evaluate=True), collections.abc.Callable[..., Point]),
    (reference(Point, evaluate=True), Model),
    (reference(len, evaluate=True), Point),
  ],
)
def test_fitting_values(value, annotation):
  assert checks.mismatch(value, annotation) == ''


@pytest.mark.parametrize(
  'value, annotation, expected',
  [
    ('1', int, "'1' is a str; expected int. Write 1."),
    (1.0, int, '1.0 is a float; expected int. Write 1.'),
    (1.5, int, '1.5 is a float; expected int.'),
    (True, int, 'True is a bool; expected int.'),
    (1, bool, '1 is an int; expected bool.'),
    (1, str, "1 is an int; expected str. Write '1'."),
    (None, int, 'None is None; expected int.'),
    ('a', Optional[int], "'a' is a str; expected int or None."),
    ('a', list[str], "'a' is a str; expected list[str]. Write ['a']."),
    ('a', typing.Sequence[str], "'a' is a str; expected Sequence[str]. Write ['a']."),
    ([1, 2], tuple[int, ...], '[1, 2] is a list; expected tuple[int, ...]. Write (1, 2).'),
    ((1, 2, 3), tuple[int, int], '(1, 2, 3) is a tuple; expected tuple[int, int].'),
    ({'a': '1'}, dict[str, int], "{'a': '1'} is a dict; expected dict[str, int]."),
    ([('a', 1)], typing.Mapping[str, int], "[('a', 1)] is a list; expected Mapping[str, int]."),
    ('c', Literal['a', 'b'], "'c' is a str; expected 'a' or 'b'."),
    ({'x': 1}, Point, "{'x': 1} is a dict; expected Point."),
    ('f', collections.abc.Callable[..., Any], "'f' is a str; expected Callable[..., Any]."),
    (reference(Point, evaluate=True), Special, '@Point() gives Point; expected Special.'),
    (
      reference(Point, evaluate=False),
      Point,
      '@Point is the class or function itself; write @Point() to call it.',
    ),
    (reference(Point, evaluate=True), int, '@Point() gives Point; expected int.'),
    ('lion', Model, "'lion' is a str; expected Model."),
    (
      reference(Special, evaluate=True),
      collections.abc.Callable[..., Point],
      '@Special() is the object; expected is the class: write @Special, without parentheses.',
    ),
    (
      reference(Model, evaluate=False),
      collections.abc.Callable[..., Point],
      '@Model gives Model; expected Callable[..., tests.config.test_type_checks.Point].',
    ),
    (
      reference(len, evaluate=False),
      typing.Sequence[collections.abc.Callable[..., Any]],
      '@len is not a list; write [@len].',
    ),
  ],
)
def test_mismatches_name_the_types_that_fit(value, annotation, expected):
  assert checks.mismatch(value, annotation) == expected
