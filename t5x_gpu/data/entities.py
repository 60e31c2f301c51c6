"""Entities in sequences of tags: 'B-PER' begins a person, 'I-PER' continues it, 'O' is outside.

'E-' ends an entity, and 'S-' is an entity of a single word (IOBES). Sequences that break the rules
are read as in conlleval and seqeval's default mode: 'I-PER' after 'O' or after another type begins
an entity. Source: Tjong Kim Sang and De Meulder 2003; https://github.com/chakki-works/seqeval.
"""

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

OUTSIDE = 'O'
_TAG = re.compile(r'([BIES])-(.+)')


@dataclasses.dataclass(frozen=True)
class Entity:
  """An entity.

  Attributes:
    kind: its type, 'PER'.
    start, stop: word indices, from `start` to before `stop`.
  """

  kind: str
  start: int
  stop: int


def entity_kinds(names: Sequence[str]) -> tuple[str, ...]:
  """Returns the entity types in alphabetical order; () unless all names are entity tags."""
  found = [_TAG.fullmatch(name) for name in names if name != OUTSIDE]
  return tuple(sorted({tag[2] for tag in found})) if all(found) else ()


def entities_of(tags: Sequence[str]) -> list[Entity]:
  """Returns the entities of a sentence, one tag per word."""
  found, start, before = [], 0, OUTSIDE
  for place, tag in enumerate([*tags, OUTSIDE]):
    if _ends(before, tag):
      found.append(Entity(_split(before)[1], start, place))
    if _starts(before, tag):
      start = place
    before = tag
  return found


def boundaries(names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
  """Returns two tables [previous tag, next tag]: whether an entity starts, or ends, between them.

  The tables have an extra row and column for the ends of the sentence.
  """
  tags = [*names, OUTSIDE]
  starts, ends = (
    np.array([[rule(before, after) for after in tags] for before in tags])
    for rule in (_starts, _ends)
  )
  return starts, ends


def kind_numbers(names: Sequence[str]) -> np.ndarray:
  """Returns the index of each tag's type in `entity_kinds`; also 0 for 'O'."""
  kinds = entity_kinds(names)
  return np.array([kinds.index(_split(name)[1]) if name != OUTSIDE else 0 for name in names])


def _split(tag: str) -> tuple[str, str]:
  found = _TAG.fullmatch(tag)
  return (found[1], found[2]) if found else (OUTSIDE, '')


def _starts(before: str, after: str) -> bool:
  (last, last_kind), (tag, kind) = _split(before), _split(after)
  return tag != OUTSIDE and (tag in 'BS' or last in 'OES' or last_kind != kind)


def _ends(before: str, after: str) -> bool:
  (last, last_kind), (tag, kind) = _split(before), _split(after)
  return last != OUTSIDE and (last in 'ES' or tag in 'OBS' or last_kind != kind)
