"""A schema is declared once, as the fields of a class."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NotRequired, Optional, TypedDict

import pytest

from t5x_gpu.storage.json_schema import (
  Fields,
  ListOf,
  MapOf,
  Nullable,
  Number,
  Whole,
  from_json,
  parse_json,
  schema_of,
  to_json,
)


class Part(TypedDict):
  name: str
  facts: Mapping[str, Any]
  place: NotRequired[tuple[int, str]]


@dataclasses.dataclass
class Record:
  share: Annotated[float, Number(0, 1)]
  parts: Mapping[str, Part]
  sizes: Sequence[int]
  note: Optional[str]
  anything: Any = None


def test_the_schema_of_a_class_has_its_fields():
  part = Fields({'name': str, 'facts': dict}, optional={'place': (Whole(), str)})
  assert schema_of(Record) == Fields(
    {'share': Number(0, 1), 'parts': MapOf(part), 'sizes': ListOf(Whole()), 'note': Nullable(str)},
    optional={'anything': object},
    others=False,
  )


@pytest.mark.parametrize(
  ('changed', 'problem'),
  [
    ('"share": 2', 'is 2, not a number from 0 to 1'),
    ('"sizes": [-1]', 'is -1, not a whole number'),
    ('"parts": {"a": {"name": "b"}}', "has no 'facts'"),
    ('"more": 1', "has an unknown key 'more'"),
  ],
)
def test_what_does_not_fit_the_class_is_refused(changed, problem):
  fields = ['"share": 0.5', '"parts": {}', '"sizes": []', '"note": null']
  key = changed.split(':')[0]
  text = ', '.join([*(f for f in fields if not f.startswith(key)), changed])
  with pytest.raises(ValueError, match=problem):
    parse_json(f'{{{text}}}', schema_of(Record))


@dataclasses.dataclass(frozen=True)
class Inner:
  code: Annotated[int, Whole(-64, 255)]
  failed: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Outer:
  all: tuple[Inner, ...]
  last: Optional[Inner] = None


@pytest.mark.parametrize(
  'value', [Outer(()), Outer((Inner(-9, frozenset({3, 1})), Inner(0)), Inner(7))]
)
def test_a_dataclass_comes_back_from_json(value):
  assert from_json(Outer, json.loads(json.dumps(to_json(value)))) == value


def test_an_object_that_does_not_fit_makes_no_dataclass():
  with pytest.raises(ValueError, match='is .x., not a whole number'):
    from_json(Outer, {'all': [{'code': 'x'}]})
