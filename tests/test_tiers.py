"""A test that does more than its tier allows fails."""

import pathlib
import subprocess
import sys
import textwrap

import pytest

REPOSITORY = pathlib.Path(__file__).parents[1]

pytestmark = pytest.mark.process

CONFTEST = """
from tests.helpers_tiers import Tiers

def pytest_configure(config):
  config.addinivalue_line('markers', 'slow: of another tier')
  config.pluginmanager.register(Tiers(budget={budget}, quick={quick}))
"""
BURN = 'import time\nend = time.process_time() + 1\nwhile time.process_time() < end: pass\n'


def outcomes(folder, tests, *, budget=None, quick=False):
  """Returns what pytest prints, which lists each test with its outcome."""
  (folder / 'conftest.py').write_text(CONFTEST.format(budget=budget, quick=quick))
  (folder / 'pytest.ini').write_text('[pytest]')
  (folder / 'test_it.py').write_text(f'BURN = {BURN!r}\n' + textwrap.dedent(tests))
  run = subprocess.run(
    [sys.executable, '-m', 'pytest', '-vv', '-p', 'no:cacheprovider', str(folder)],
    cwd=REPOSITORY,
    capture_output=True,
    text=True,
  )
  return run.stdout


@pytest.mark.slow
def test_a_test_over_its_cpu_budget_fails_unless_it_is_slow(tmp_path):
  out = outcomes(
    tmp_path,
    """
    import subprocess, sys, time
    import pytest

    @pytest.fixture
    def fixture():
      exec(BURN)

    def test_here(): exec(BURN)
    def test_in_a_fixture(fixture): pass
    def test_in_a_child(): subprocess.run([sys.executable, '-c', BURN])
    def test_that_waits(): time.sleep(0.5)

    @pytest.mark.slow
    def test_marked(): exec(BURN)
    """,
    budget=0.05,
  )
  for name in ('here', 'in_a_fixture', 'in_a_child'):
    assert f'test_{name} FAILED' in out, out
  for name in ('that_waits', 'marked'):
    assert f'test_{name} PASSED' in out, out
  assert 'A test that is not marked slow may take 0.05 (0.2 on a slow machine)' in out


@pytest.mark.slow
def test_the_summary_names_tests_over_their_cpu_budget(tmp_path):
  out = outcomes(tmp_path, 'def test_here(): exec(BURN)\ndef test_nothing(): pass', budget=0.5)
  assert '2 passed' in out, out
  summary = out[out.index('over 0.5 CPU seconds: mark slow, or make faster') :]
  assert 'test_here' in summary and 'test_nothing' not in summary, out


def test_the_quick_tier_starts_no_process_and_imports_no_tensorflow(tmp_path):
  out = outcomes(
    tmp_path,
    """
    import os, sys

    def test_nothing(): pass
    def test_a_process(): os.system('true')
    def test_tensorflow(): sys.modules['tensorflow'] = sys
    """,
    quick=True,
  )
  assert 'test_nothing PASSED' in out, out
  assert 'test_a_process FAILED' in out and 'mark it process' in out, out
  assert 'test_tensorflow FAILED' in out and 'mark it tf' in out, out


@pytest.mark.slow
def test_quick_cases_make_the_other_cases_slow_and_name_one_that_is_not_there(tmp_path):
  cases = """
    import pytest

    @pytest.mark.quick_cases('one', 'tw*')
    @pytest.mark.parametrize('x', ['one', 'two', 'three'])
    def test_it(x, request):
      assert (request.node.get_closest_marker('slow') is None) == (x != 'three')
    """
  assert '3 passed' in outcomes(tmp_path, cases)
  out = outcomes(tmp_path, cases.replace("'tw*'", "'four'"))
  assert 'quick_cases of test_it: no case is four' in out
