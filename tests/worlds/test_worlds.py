"""In every world each flow gives the numbers of the plain world, or the world is refused.

`make test` combines a world of each kind: each flow once, and training in each world. In
`make test-all` each combination has all flows that its worlds can reach (table.py says why).
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest

from tests.helpers_disk import refusing_library
from tests.helpers_train import HELD_DATA
from tests.helpers_warm import WarmStart
from tests.worlds.flows import FLOWS, GIN, RUN_FIRST, SAME, Failed, Place
from tests.worlds.table import KINDS, TEXTS, TOKENIZERS, WORLDS, World

pytestmark = [pytest.mark.tf, pytest.mark.process]
IMPORTS = (
  *(
    f't5x_gpu.{name}'
    for name in ('data.seqio_batches', 'eval', 'infer', 'convert', 'prepare', 'reshard', '__main__')
  ),
  'transformers.models.auto.tokenization_auto',  # convert reads back the tokenizer that it wrote
)
# Flows that are part of others: of train_and_resume, and of convert_there_and_back.
PARTS = ('train', 'infer')
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
        self.numbers('train_and_resume')
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


def combined() -> Iterator[Any]:
  """Yields (worlds of all kinds, flow); each accepted world is in some worlds."""
  kinds = [[w for w in WORLDS if w.kind == kind and not w.refused] for kind in KINDS]
  quick = [flow for flow in FLOWS if flow not in (*PARTS, 'launch_two')]
  for i in range(max(map(len, kinds))):
    worlds = tuple(kind[i % len(kind)] for kind in kinds)
    in_turn = quick[i] if i < len(quick) else 'train'
    for flow in FLOWS:
      is_slow = flow != in_turn
      if is_slow and (flow in PARTS or flow == 'launch_two' and i % 7):
        continue
      yield pytest.param(
        (*(w for w in worlds if flow not in w.changes), *plain(flow)),
        flow,
        marks=[pytest.mark.slow] * is_slow,
      )


def name(value: Any) -> str:
  return ' + '.join(w.name for w in value) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(
  'worlds, flow',
  [
    *(pytest.param(plain(f), f, marks=[pytest.mark.slow] * (f == 'launch_two')) for f in FLOWS),
    *(
      pytest.param(worlds, 'convert_there_and_back', marks=pytest.mark.slow)
      for worlds in ((), *PLAIN.values())
      if worlds != plain('convert_there_and_back')
    ),
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


@pytest.mark.parametrize('worlds, flow', list(combined()), ids=name)
def test_worlds_of_all_kinds_together_change_no_number(sessions, warm, worlds, flow):
  want = sessions(plain(flow)).numbers(flow)
  if problem := difference(sessions(worlds), flow, want):
    alone = {
      w.name: difference(Session(warm, (w, *plain(flow))), flow, want)
      for w in worlds
      if w.kind in KINDS
    }
    pytest.fail(f'{problem}\nEach world alone:\n{json.dumps(alone, indent=1)}')


def difference(session: Session, flow: str, want: Any) -> str:
  """Returns how the flow failed or what it gave in place of `want`, or nothing."""
  try:
    got = session.numbers(flow)
  except Failed as e:
    return str(e)
  return '' if got == want else f'{got}, not {want}'


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
