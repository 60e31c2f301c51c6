"""Entities in sequences of tags: 'B-PER' begins a person, 'I-PER' continues it, 'O' is outside.

'E-' ends an entity and 'S-' is one of a single word (IOBES). Sequences that break the rules are
read as by conlleval and by seqeval's default mode: 'I-PER' after 'O' or after another type begins
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
    start, stop: its words: from `start` to before `stop`.
  """

  kind: str
  start: int
  stop: int


def entity_kinds(names: Sequence[str]) -> tuple[str, ...]:
  """Returns the types of entities in alphabetical order; empty if not all names are such tags."""
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
  """Returns two tables [tag before, tag after]: whether an entity starts, or ends, between them.

  The tables have one more row and column than there are names, for the ends of the sentence.
  """
  tags = [*names, OUTSIDE]
  starts, ends = (
    np.array([[rule(before, after) for after in tags] for before in tags])
    for rule in (_starts, _ends)
  )
  return starts, ends


def kind_numbers(names: Sequence[str]) -> np.ndarray:
  """Returns the number in `entity_kinds` of each tag's type; 0 for 'O'."""
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
