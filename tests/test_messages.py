"""A test fails where its messages are others than in tests/golden/messages.txt."""

import pathlib
import subprocess
import sys

import pytest

from tests import messages

REPOSITORY = pathlib.Path(__file__).parents[1]
CONFTEST = """
import pathlib
from tests import messages

messages.ROOT = pathlib.Path(__file__).parent
messages.FILE = messages.ROOT / 'messages.txt'

def pytest_addoption(parser):
  parser.addoption('--update_golden', action='store_true')

def pytest_configure(config):
  config.pluginmanager.register(messages.Messages(update=config.option.update_golden))
"""
TESTS = """
import pytest
from t5x_gpu.errors import DataError
from tests.messages import raises

@pytest.mark.parametrize('name', ['a', 'b'])
def test_two(tmp_path, name):
  for number in (1, 2):
    with raises(DataError, parameters=('A.b',)):
      raise DataError(f'{tmp_path}/{name}.txt has\\n\\n  {number}.', fix='C', parameters=('A.b',))

def test_silent():
  pass
"""


def test_every_message_belongs_to_a_test(request):
  plugin = request.config.pluginmanager.get_plugin('messages')
  assert plugin.gone(request.config) == []


def test_the_file_is_read_as_it_is_written():
  texts = {'tests/a.py::test_b[x]': ['E: one\n\n    two', 'E: three'], 'tests/c.py::d': ['E: 4']}
  assert messages.read(messages.written(texts)) == texts


def test_paths_addresses_and_versions_do_not_count(tmp_path):
  text = f'{tmp_path}/a.txt, {messages.ROOT}/b, 127.0.0.1:4711, jax 0.11.2, process 4711.'
  assert (
    messages.plain(text) == 'TMP/a.txt, REPOSITORY/b, 127.0.0.1:PORT, jax VERSION, process PID.'
  )


@pytest.mark.process
def test_other_new_and_missing_messages_fail_until_they_are_updated(tmp_path):
  path, golden = tmp_path / 'test_it.py', tmp_path / 'messages.txt'
  (tmp_path / 'conftest.py').write_text(CONFTEST)
  (tmp_path / 'pytest.ini').write_text('[pytest]')
  path.write_text(TESTS)

  def pytest_on(*flags):
    command = [sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider', *flags]
    env = {
      'PYTHONPATH': str(REPOSITORY),
      'T5X_GPU_TESTS_SHARE': str(tmp_path / 'base'),
      'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1',
    }
    done = subprocess.run(
      [*command, f'--basetemp={tmp_path}/base'],
      cwd=tmp_path,
      env=env,
      capture_output=True,
      text=True,
    )
    return done.stdout

  assert '2 failed, 1 passed' in pytest_on()
  assert '3 passed' in pytest_on('--update_golden') and '3 passed' in pytest_on()
  assert 'DataError: TMP/a.txt has\n\n      1.\n      C\n' in golden.read_text()
  path.write_text(TESTS.replace("'b'", "'c'").replace(' has', ' holds'))
  out = pytest_on('-k', 'not silent')
  assert '2 failed' in out and '-DataError: TMP/a.txt has' in out and '+DataError' in out
  pytest_on('--update_golden', 'test_it.py::test_two[a]')  # alone: others stay
  assert 'test_two[a]' in golden.read_text() and 'test_two[b]' in golden.read_text()
  pytest_on('--update_golden', '-k', 'two')
  assert 'test_two[c]' in golden.read_text() and 'test_two[b]' not in golden.read_text()
  path.write_text(TESTS.replace('(1, 2)', '()'))
  assert '2 failed, 1 passed' not in pytest_on('test_it.py::test_silent')
  assert '1 failed, 2 passed' in pytest_on()  # test_two[a] causes no message any more
