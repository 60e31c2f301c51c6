"""In every world a new run has the losses of the plain world, or the world is refused."""

import re

import pytest

from tests.worlds.sessions import Session, check_together, combined, name, plain
from tests.worlds.table import WORLDS

pytestmark = [pytest.mark.tf, pytest.mark.process]
FLOWS = ('train', 'kill_and_resume', 'prepare_and_train', 'launch_two')


@pytest.mark.parametrize(
  'flow',
  [
    'train',
    'train_and_resume',
    'kill_and_resume',
    'prepare_and_train',
    pytest.param('launch_two', marks=pytest.mark.slow),
  ],
)
def test_each_flow_has_the_numbers_of_its_texts(sessions, flow):
  session = sessions(plain(flow))
  numbers = session.numbers(flow)
  assert numbers
  if flow.endswith('resume'):
    assert numbers == session.numbers('train')
  if flow == 'prepare_and_train':
    assert numbers[1] == session.counted()


@pytest.mark.parametrize('worlds, flow', list(combined(FLOWS)), ids=name)
def test_worlds_of_all_kinds_together_change_no_number(sessions, warm, worlds, flow):
  check_together(sessions, warm, worlds, flow)


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
