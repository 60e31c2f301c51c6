"""In every world each flow has the numbers of the plain world, or the world is refused."""

import pytest

from tests.worlds.flows import Failed
from tests.worlds.sessions import CELLS, NUM_WITH_NEW, ROWS, Session, is_refusal
from tests.worlds.table import WORLDS

pytestmark = [pytest.mark.tf, pytest.mark.process, pytest.mark.slow]
# What a tokenizer does not reach but by training.
TRAINING = ('reshard', 'launch_two')
# The flows besides training that a world of this kind can reach.
REACHED = {
  'path': ('evaluate', 'infer', 'convert_there_and_back', 'reshard', 'prepare'),
  'environment': ('evaluate', 'reshard'),
  'data': ('evaluate', 'prepare'),
  'tokenizer': ('evaluate', 'infer', 'prepare'),
}


@pytest.mark.parametrize(
  'number, flow',
  [
    (i, flow)
    for i in range(len(ROWS))
    for flow in CELLS
    if (i or flow == 'launch_two') and (i < NUM_WITH_NEW or flow not in TRAINING)
  ],
)
def test_worlds_of_all_kinds_together_change_no_number(sessions, number, flow):
  sessions.check(ROWS[number], flow)


@pytest.mark.parametrize(
  'world, flow',
  [(world, flow) for world in WORLDS if world.refused for flow in REACHED[world.kind]],
  ids=str,
)
def test_a_refused_world_changes_no_number_of_another_flow_or_is_refused(sessions, world, flow):
  plain = sessions.plain(())
  plain.numbers('train')
  session = Session(sessions.warm, (world,), trained=plain)
  try:
    got = session.numbers(flow)
  except Failed as e:
    assert is_refusal(str(e)), e
  else:
    assert flow in world.changes or got == sessions.wanted(session, (), flow)
  session.close()
