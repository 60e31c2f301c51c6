"""In every world each flow gives the numbers of the plain world, or the world is refused.

`make test` combines a world of each kind, with each flow in turn.
`make test-all` does everything in each world alone.
"""

import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from tests.helpers_disk import refusing_library
from tests.helpers_train import HELD_DATA
from tests.helpers_warm import WarmStart
from tests.worlds.flows import FLOWS, GIN, RUN_FIRST, SAME, Place
from tests.worlds.table import KINDS, TEXTS, TOKENIZERS, WORLDS, World

pytestmark = [pytest.mark.tf, pytest.mark.process]
IMPORTS = tuple(
  f't5x_gpu.{name}'
  for name in ('data.seqio_batches', 'eval', 'infer', 'convert', 'prepare', 'reshard', '__main__')
)

SLOW = ('launch_two',)  # processes that import everything
PLAIN = {world.name: (world,) for world in TOKENIZERS if not world.refused}


def plain(flow: str) -> tuple[World, ...]:
  """Returns the tokenizer, with nothing else changed, with which `make test` tries a flow."""
  return PLAIN['sp_default' if flow == 'prepare_and_train' else 'unigram_begin_first']


class Session:
  """The flows in one place, each at most once.

  Args:
    warm: forks the commands.
    worlds: what changes the place, one after the other.
  """

  def __init__(self, warm: WarmStart, worlds: Sequence[World] = ()):
    base = pathlib.Path(tempfile.mkdtemp(prefix='t5x_gpu_world_'))  # other users may pass /tmp
    base.chmod(0o755)
    (base / 'world.gin').write_text(GIN)
    (base / 'held_data.py').write_text(HELD_DATA)
    (base / 'texts.jsonl').write_text(''.join(json.dumps({'text': t}) + '\n' for t in TEXTS))
    cwd = base / 'cwd'
    cwd.mkdir()
    self.place = Place(
      warm=warm,
      base=base,
      cwd=cwd,
      runs='runs',
      data=f'jsonl:{base / "texts.jsonl"}',
      gin_file=str(base / 'world.gin'),
    )
    for world in worlds:
      world.change(self.place)
    self._found: dict[str, Any] = {}

  def close(self) -> None:
    shutil.rmtree(self.place.base)

  def numbers(self, flow: str) -> Any:
    if flow not in self._found:
      self.place.real('.').mkdir(exist_ok=True)
      if flow in RUN_FIRST:
        self.numbers('train')
      self._found[flow] = FLOWS[flow](self.place)
    return self._found[flow]

  def counted(self) -> tuple[int, int]:
    """Returns how many texts and tokens the data have by the tokenizer's library, with ends."""
    tokenizer = self.place.tokenizer
    encode = tokenizer.encode if tokenizer else str.encode
    return len(TEXTS), sum(len(encode(text)) + 1 for text in TEXTS)


@pytest.fixture(scope='module')
def warm(tmp_path_factory):
  with contextlib.ExitStack() as stack:
    if shutil.which('cc'):  # for worlds with REFUSED_PATH
      library = refusing_library(tmp_path_factory.mktemp('refusing'))
      stack.enter_context(mock.patch.dict(os.environ, LD_PRELOAD=library))
    started = WarmStart(tmp_path_factory.mktemp('compiled'), imports=IMPORTS)
  with started:
    yield started


@pytest.fixture(scope='module')
def sessions(warm):
  """Returns the session of some worlds; keeps sessions with a tokenizer alone, and the latest."""
  kept, latest = {}, {}

  def session(worlds: tuple[World, ...]) -> Session:
    known = kept if all(world.kind == 'tokenizer' for world in worlds) else latest
    if worlds not in known:
      while latest and known is latest:
        latest.popitem()[1].close()
      known[worlds] = Session(warm, worlds)
    return known[worlds]

  yield session
  for each in (*kept.values(), *latest.values()):
    each.close()


def combined() -> list[tuple[tuple[World, ...], str]]:
  """Returns worlds of all kinds, each world at least once, with a flow in turn."""
  kinds = [[w for w in WORLDS if w.kind == kind and not w.refused] for kind in KINDS]
  flows = itertools.cycle(flow for flow in FLOWS if flow not in SLOW)
  found = []
  for _ in range(max(map(len, kinds))):
    flow, worlds = next(flows), []
    for kind in kinds:  # the world that has waited longest
      worlds.append(next(w for w in kind if flow not in w.changes))
      kind.remove(worlds[-1])
      kind.append(worlds[-1])
    found.append(((*worlds, *plain(flow)), flow))
  return found


def name(value: Any) -> str:
  return ' + '.join(w.name for w in value) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(
  'worlds, flow',
  [
    pytest.param(worlds, f, marks=[pytest.mark.slow] * (worlds != plain(f)))
    for worlds in ((), *PLAIN.values())
    for f in FLOWS
    if not (worlds and f in SLOW)
  ],
  ids=lambda value: name(value) or 'byte',
)
def test_each_flow_has_the_numbers_of_its_texts(sessions, worlds, flow):
  session = sessions(worlds)
  numbers = session.numbers(flow)
  assert numbers
  if flow in SAME:
    assert numbers == session.numbers(SAME[flow])
  if flow == 'prepare_and_train':
    assert numbers[1] == session.counted()


@pytest.mark.parametrize('worlds, flow', combined(), ids=name)
def test_worlds_of_all_kinds_together_change_no_number(sessions, worlds, flow):
  assert sessions(worlds).numbers(flow) == sessions(plain(flow)).numbers(flow)


@pytest.mark.slow
@pytest.mark.parametrize(
  'world, flow',
  [
    (w, f)
    for w in WORLDS
    if w.kind in KINDS and not w.refused
    for f in w.flows
    if f not in w.changes
  ],
  ids=str,
)
def test_a_world_changes_no_number(sessions, world, flow):
  assert sessions((world,)).numbers(flow) == sessions(()).numbers(flow)


@pytest.mark.parametrize('world', [w for w in WORLDS if w.refused], ids=str)
def test_a_world_is_refused_before_the_first_step(warm, world):
  session = Session(warm, [world])
  place = session.place
  argv = place.gin(MODEL_DIR=place.folder('a'))
  if place.between is not None:
    place.run('train', *argv, '--gin.TRAIN_STEPS=2')
    place.between()
  before = list(place.cwd.rglob('checkpoint_*'))
  started = place.start('train', *argv)
  assert started.finish() == 1, started.text
  assert re.search(f'^{world.refused}', started.text, re.MULTILINE), started.text
  assert 'Traceback' not in started.text and not re.search('step [0-9]+/', started.text)
  assert list(place.cwd.rglob('checkpoint_*')) == before
  session.close()
