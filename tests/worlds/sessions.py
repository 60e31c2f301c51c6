"""Sessions of flows in worlds, and the rows of worlds that the tests try together.

`make test` has the first row's flows, except the slow launch, and training in each world of a
path, an environment or data. `make test-all` has all flows in each world, and in each world that is
refused.
"""

import contextlib
import json
import math
import pathlib
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, Optional

import pytest

from tests.helpers_train import HELD_DATA
from tests.helpers_warm import WarmStart
from tests.worlds.flows import FIRST, FLOWS, GIN, ROW_TOKENS, RUN, SAME_AS, Failed, Place
from tests.worlds.table import TEXTS, TOKENIZERS, WORLDS, World

Row = tuple[World, ...]
ACCEPTED = [world for world in WORLDS if not world.refused]
TOKENIZER = TOKENIZERS[0]
# Two processes add their losses in another order, as does the evaluation of a checkpoint.
ROUNDED = ('launch_two', 'evaluate')
ROUNDING = 1e-5


class Session:
  """The flows in one place, each at most once.

  Args:
    warm: forks the commands.
    worlds: what changes the place, in the order of the table.
    trained: another session, whose run the flows get that begin with a run.
  """

  def __init__(self, warm: WarmStart, worlds: Row = (), *, trained: Optional['Session'] = None):
    base = pathlib.Path(tempfile.mkdtemp(prefix='t5x_gpu_world_'))  # other users may pass /tmp
    base.chmod(0o755)
    (base / 'world.gin').write_text(GIN)
    (base / 'held_data.py').write_text(HELD_DATA)
    (base / 'texts.jsonl').write_text(''.join(json.dumps({'text': t}) + '\n' for t in TEXTS))
    cwd = base / 'cwd'
    cwd.mkdir()
    self.place = Place(warm=warm, base=base, cwd=cwd, runs='runs', inputs=str(base), contents=TEXTS)
    if trained is not None:
      self.place.trained = str(base / 'trained')
      shutil.copytree(trained.place.real(trained.place.run_folder), base / 'trained')
    for world in worlds:
      world.change(self.place)
    self.place.real('runs').mkdir(exist_ok=True)
    self._found: dict[str, Any] = {}

  def close(self) -> None:
    shutil.rmtree(self.place.base)

  def numbers(self, flow: str) -> Any:
    if flow not in self._found:
      first = FIRST.get(flow)
      if first == 'prepare' or first and not self._has_run():
        self.numbers(first)
      self._found[flow] = FLOWS[flow](self.place)
    return self._found[flow]

  def _has_run(self) -> bool:
    return bool(self.place.trained or self._found.keys() & {'train', RUN})

  def counted(self) -> tuple[int, int]:
    """Returns how many rows and tokens the data have by the tokenizer's library, with ends."""
    tokenizer = self.place.tokenizer
    encode = tokenizer.encode if tokenizer else str.encode
    lengths = [len(encode(text)) + 1 for text in self.place.contents]
    return sum(math.ceil(length / ROW_TOKENS) for length in lengths), sum(lengths)


class Sessions:
  """Sessions that tests share: the plain worlds, and the worlds of the latest row."""

  def __init__(self, warm: WarmStart):
    self.warm = warm
    self._plain: dict[Row, Session] = {}
    self._latest: dict[Row, Session] = {}

  def plain(self, row: Row) -> Session:
    """Returns the session with the worlds of `row` that change all numbers, and no others."""
    return self._of(self._plain, tuple(w for w in row if w.kind == 'tokenizer' or w.contents))

  def of(self, row: Row) -> Session:
    if row not in self._latest:
      self._close(self._latest)
    return self._of(self._latest, row)

  def close(self) -> None:
    self._close(self._plain)
    self._close(self._latest)

  def _of(self, known: dict[Row, Session], row: Row) -> Session:
    if row not in known:
      known[row] = Session(self.warm, row)
    return known[row]

  def _close(self, known: dict[Row, Session]) -> None:
    while known:
      known.popitem()[1].close()

  def check(self, row: Row, flow: str) -> None:
    """Fails if a number differs from the plain world, and names the worlds that do that."""
    if problem := self._difference(self.of(row), row, flow):
      fewer = ' + '.join(world.name for world in self._fewer(row, flow))
      pytest.fail(f'{flow} in {fewer}:\n{problem}')

  def _fewer(self, row: Row, flow: str) -> Row:
    """Returns the worlds of `row` that are left after halving, as long as a half still fails."""
    tokenizer = tuple(world for world in row if world.kind == 'tokenizer')
    left: Optional[Row] = tuple(world for world in row if world not in tokenizer)
    while left is not None:
      row, middle = (*left, *tokenizer), len(left) // 2
      halves = (left[:middle], left[middle:]) if middle else ()
      left = next((half for half in halves if self._fails((*half, *tokenizer), flow)), None)
    return row

  def _fails(self, row: Row, flow: str) -> bool:
    with contextlib.closing(Session(self.warm, row)) as session:
      return bool(self._difference(session, row, flow))

  def _difference(self, session: Session, row: Row, flow: str) -> str:
    """Returns how the flow failed or what it gave in place of the plain numbers, or nothing."""
    refused = '|'.join(w.refuses[flow] for w in row if flow in w.refuses)
    try:
      got = session.numbers(flow)
    except Failed as e:
      is_silent = any('stderr' in world.sets for world in row)  # it closes standard error
      return '' if refused and is_refusal(str(e), '' if is_silent else refused) else str(e)
    if refused:
      return f'{got}, not {refused}'
    if any(flow in world.changes for world in row):
      return ''
    want = self.wanted(session, row, flow)
    return '' if got == want else f'{got}, not {want}'

  def wanted(self, session: Session, row: Row, flow: str) -> Any:
    """Returns what the flow in `session` has to give, with tolerance where sums are rounded."""
    if flow == 'prepare':
      return session.counted()
    want = self.plain(row).numbers(SAME_AS[flow])
    return pytest.approx(want, rel=ROUNDING) if flow in ROUNDED else want


def is_refusal(failure: str, error: str = r'\w*Error: ') -> bool:
  """Returns whether a command ended with one of our errors, which begins with `error`."""
  found = re.search(f'^({error})', failure, re.MULTILINE)
  return bool(found) and 'exit code 1\n' in failure and 'Traceback' not in failure


def _rows() -> Iterator[Row]:
  """Yields rows of accepted worlds, of all kinds, until each world has been in one.

  A row has worlds that were in no earlier row, as far as they fit together, and about half of the
  others that do: most pairs are in some row, and most worlds are without each other in some row.
  """
  chance = random.Random(0)
  uses = dict.fromkeys(ACCEPTED, 0)
  while not all(uses.values()):
    row: list[World] = []
    for world in sorted(ACCEPTED, key=uses.__getitem__):
      taken = {name for other in row for name in other.sets}
      if not taken & set(world.sets) and (not uses[world] or chance.random() < 0.5):
        row.append(world)
    if not any(world.kind == 'tokenizer' for world in row):
      row.append(TOKENIZER)
    uses |= {world: uses[world] + 1 for world in row}
    yield tuple(sorted(row, key=ACCEPTED.index))


ROWS = list(_rows())
# Each row's flows; training is a part of kill_and_resume.
CELLS = [flow for flow in (*SAME_AS, 'prepare') if flow != 'train']
# The first rows have every world but some tokenizers.
NUM_WITH_NEW = 1 + max(
  next(i for i, row in enumerate(ROWS) if world in row)
  for world in ACCEPTED
  if world.kind != 'tokenizer'
)
