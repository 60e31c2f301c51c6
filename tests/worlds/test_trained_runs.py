"""In every world a trained run resumes, evaluates, converts and reshards as in the plain world."""

import pytest

from tests.worlds.flows import RUN_FIRST
from tests.worlds.sessions import PLAIN, check_together, combined, name, plain

pytestmark = [pytest.mark.tf, pytest.mark.process]
FLOWS = ('train_and_resume', *RUN_FIRST)


@pytest.mark.parametrize('flow', ['evaluate', 'infer', 'reshard'])
def test_each_flow_has_numbers(sessions, flow):
  assert sessions(plain(flow)).numbers(flow)


@pytest.mark.parametrize(
  'tokenizer',
  [
    pytest.param(each, marks=[pytest.mark.slow] * (each != plain('convert_there_and_back')))
    for each in ((), *PLAIN.values())
  ],
  ids=lambda worlds: name(worlds) or 'byte',
)
def test_a_run_converted_there_and_back_writes_the_same_text(sessions, tokenizer):
  session = sessions(tokenizer)
  assert session.numbers('convert_there_and_back') == session.numbers('infer') != []


@pytest.mark.parametrize('worlds, flow', list(combined(FLOWS)), ids=name)
def test_worlds_of_all_kinds_together_change_no_number(sessions, warm, worlds, flow):
  check_together(sessions, warm, worlds, flow)
