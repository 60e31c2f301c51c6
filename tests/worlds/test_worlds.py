"""In every world a run has the losses of the plain world, or the world is refused."""

import re

import pytest

from tests.worlds.flows import Failed
from tests.worlds.sessions import CELLS, NUM_WITH_NEW, ROWS, TOKENIZER, Session, is_refusal
from tests.worlds.table import WORLDS

pytestmark = [pytest.mark.tf, pytest.mark.process]


def test_the_plain_run_has_each_step(sessions):
  assert list(sessions.plain(ROWS[0]).numbers('train')) == [1, 2, 3, 4]


@pytest.mark.parametrize('flow', [flow for flow in CELLS if flow != 'launch_two'])
def test_each_flow_in_the_first_row_has_the_numbers_of_the_plain_world(sessions, flow):
  sessions.check(ROWS[0], flow)


@pytest.mark.parametrize('number', range(1, NUM_WITH_NEW))
def test_training_in_worlds_of_all_kinds_has_the_numbers_of_the_plain_world(sessions, number):
  row = [world for world in ROWS[number] if world.kind != 'tokenizer']
  sessions.check((*row, TOKENIZER), 'train')


@pytest.mark.parametrize('world', [w for w in WORLDS if w.refused], ids=str)
def test_a_world_is_refused_before_the_first_step(warm, world):
  session = Session(warm, (world,))
  place = session.place
  with pytest.raises(Failed) as e:
    session.numbers('train' if place.between is None else 'kill_and_resume')
  assert is_refusal(str(e.value), world.refused), str(e.value)
  if place.during is None:
    assert not re.search('step [0-9]+/', str(e.value))
    assert len(list(place.cwd.rglob('checkpoint_*'))) == (place.between is not None)
  session.close()
