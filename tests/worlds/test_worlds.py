"""In every world each flow gives the numbers of the plain world, or the world is refused.

`make test` combines a world of each kind, with each flow in turn.
`make test-all` does everything in each world alone.
"""

import itertools
import json
import pathlib
import re
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

import pytest

from tests.helpers_train import HELD_DATA
from tests.helpers_warm import WarmStart
from tests.worlds.flows import FLOWS, GIN, RUN_FIRST, Place, train
from tests.worlds.table import KINDS, TEXTS, WORLDS, World

pytestmark = [pytest.mark.tf, pytest.mark.process]
IMPORTS = tuple(
  f't5x_gpu.{name}'
  for name in ('data.seqio_batches', 'eval', 'infer', 'convert', 'prepare', 'reshard', '__main__')
)

SLOW = ('launch_two',)  # processes that import everything


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
      if flow in RUN_FIRST and not self.place.real('a').exists():
        train(self.place)
      self._found[flow] = FLOWS[flow](self.place)
    return self._found[flow]


@pytest.fixture(scope='module')
def warm(tmp_path_factory):
  with WarmStart(tmp_path_factory.mktemp('compiled'), imports=IMPORTS) as started:
    yield started


@pytest.fixture(scope='module')
def sessions(warm):
  """Returns the session of some worlds; the plain one stays, of the others the latest."""
  plain, latest = Session(warm), {}

  def session(worlds: tuple[World, ...]) -> Session:
    if not worlds:
      return plain
    if worlds not in latest:
      while latest:
        latest.popitem()[1].close()
      latest[worlds] = Session(warm, worlds)
    return latest[worlds]

  yield session
  for each in (plain, *latest.values()):
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
    found.append((tuple(worlds), flow))
  return found


def name(value: Any) -> str:
  return ' + '.join(w.name for w in value) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(
  'flow', [pytest.param(f, marks=[pytest.mark.slow] * (f in SLOW)) for f in FLOWS]
)
def test_each_flow_works_in_the_plain_world(sessions, flow):
  numbers = sessions(()).numbers(flow)
  assert numbers
  if flow == 'kill_and_resume':
    assert numbers == sessions(()).numbers('train_and_resume')


@pytest.mark.parametrize('worlds, flow', combined(), ids=name)
def test_worlds_of_all_kinds_together_change_no_number(sessions, worlds, flow):
  assert sessions(worlds).numbers(flow) == sessions(()).numbers(flow)


@pytest.mark.slow
@pytest.mark.parametrize(
  'world, flow',
  [(w, f) for w in WORLDS if not w.refused for f in w.flows if f not in w.changes],
  ids=str,
)
def test_a_world_changes_no_number(sessions, world, flow):
  assert sessions((world,)).numbers(flow) == sessions(()).numbers(flow)


@pytest.mark.parametrize('world', [w for w in WORLDS if w.refused], ids=str)
def test_a_world_is_refused_before_the_first_step(warm, world):
  session = Session(warm, [world])
  place = session.place
  started = place.start('train', *place.gin(MODEL_DIR=place.folder('a')))
  assert started.finish() == 1, started.text
  assert re.search(f'^{world.refused}', started.text, re.MULTILINE), started.text
  assert 'Traceback' not in started.text and 'step 1/' not in started.text, started.text
  assert not list(place.cwd.rglob('checkpoint_*'))
  session.close()
