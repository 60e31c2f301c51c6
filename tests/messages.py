"""The wording of errors: each test's messages are in tests/golden/messages.txt, in one place.

A test states what must be refused and by which class; the sentences are compared with that file.

    with raises(DataError, parameters=('DatasetConfig.split',)):
      open_data(split='tran')

`pytest --update_golden` rewrites the messages of the tests that ran, and drops the messages of
tests that are gone; read `git diff` after. Any part of the tests can run, in any number of
processes.
"""

import contextlib
import difflib
import fcntl
import os
import pathlib
import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, Optional

import pytest

from t5x_gpu.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]
FILE = ROOT / 'tests' / 'golden' / 'messages.txt'
_HEAD = """\
Messages of errors, by the test that causes them. `pytest --update_golden` rewrites this file.
"""

_said: list[str] = []  # by the test that runs

# What differs between machines and runs, and what stands for it.
_MACHINE = [
  (re.escape(tempfile.gettempdir()) + r'/tmp\w{8}', 'TMP'),
  (re.escape(str(ROOT)), 'REPOSITORY'),
  (re.escape(sys.executable), 'python'),
  (rf'(?:{re.escape(sys.prefix)}|{re.escape(sys.base_prefix)})/lib/python[0-9.]+', 'LIBRARY'),
  (re.escape(os.path.expanduser('~')) + '(?=/)', 'HOME'),
  (rf'\b(on |host \(){re.escape(socket.gethostname())}\b', r'\1HOST'),
  (r'\b([Pp]rocess|pid) \d{3,}', r'\1 PID'),
  (r'\bport \d+', 'port PORT'),
  (r"(\d\.\d+\.\d+\.\d+(?:', |:))\d+", r'\1PORT'),
  (r'\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?', 'TIME'),
  (r'\d+ s ago', 'N s ago'),
  (r'[\d,]+(?:\.\d+)?(?:e\+\d+)? (GB|GiB|inodes)\b', r'N \1'),
  (r'[\d,]+\.\d+ MiB\b', 'N MiB'),
  (r'\b[0-9a-f]{16}\b', 'HASH'),
  (r'(data state \(|byte range \[0, |value of size )\d+', r'\1N'),  # of compressed files
  (r'0x[0-9a-f]{6,}', '0xADDRESS'),
  (r'\d+ are registered: [^.]*', 'N are registered: NAMES'),  # other tests add some
  (r'(?<!\S)/ exists and holds .*? and \d+ more', '/ exists and holds NAMES and N more'),
  (r', and \d+ more', ', and N more'),
  (r'_\d{15,}', '_NUMBER'),
  (
    r'\b(jax|JAX|jaxlib|Python|TensorFlow|TFDS|transformers|Tokamax|Orbax) \d+\.[\w.]*\w',
    r'\1 VERSION',
  ),
  (r'\b(jax-cuda13-plugin==)[\w.]*\w', r'\1VERSION'),
]


@contextlib.contextmanager
def raises(
  error: type[UserError], *, parameters: Optional[tuple[str, ...]] = None
) -> Iterator[pytest.ExceptionInfo[Any]]:
  """`pytest.raises` of an error whose whole message is in tests/golden/messages.txt.

  Args:
    error: the class.
    parameters: `UserError.parameters`, if the test is about them.
  """
  with pytest.raises(error) as caught:
    yield caught
  record_message(f'{type(caught.value).__name__}: {caught.value}')
  if parameters is not None:
    assert caught.value.parameters == parameters


def record_message(text: str) -> None:
  """Compares `text`, a message that this test caused, with tests/golden/messages.txt."""
  _said.append(text)


def record_stderr(text: str) -> None:
  """Compares the error at the end of what a command wrote to standard error."""
  found = re.search(r'^\w+Error: ', text, re.MULTILINE)
  assert found, text
  record_message(text[found.start() :])


class Messages:
  """A pytest plugin that compares the messages of each test that passes.

  Args:
    update: rewrite the file instead.
  """

  def __init__(self, *, update: bool):
    self._update = update
    self._golden = read(FILE.read_text(encoding='utf-8')) if FILE.exists() else {}
    self._now: dict[str, list[str]] = {}
    self._collected: set[str] = set()  # also tests that -k or a marker leaves out

  def pytest_itemcollected(self, item: pytest.Item) -> None:
    self._collected.add(item.nodeid)

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_call(self, item: pytest.Item) -> Iterator[Any]:
    _said.clear()
    result = yield
    now = [plain(text) for text in _said]
    if self._update:
      self._now[item.nodeid] = now
    elif now != (want := self._golden.get(item.nodeid, [])):
      lines = ['\n\n'.join(texts).splitlines() for texts in (want, now)]
      diff = difflib.unified_diff(*lines, 'golden', 'now', lineterm='', n=9)
      pytest.fail(
        'tests/golden/messages.txt has other messages of this test. If they should be so now: '
        'pytest --update_golden, then read git diff.\n' + '\n'.join(diff),
        pytrace=False,
      )
    return result

  def gone(self, config: pytest.Config) -> list[str]:
    """Returns the tests in the file that do not exist, as far as this session can know."""
    whole = not any('::' in argument for argument in config.args)
    files = {name.split('::')[0] for name in self._collected} if whole else set()

    def exists(name: str) -> bool:
      file = name.split('::')[0]
      return name in self._collected if file in files else (ROOT / file).exists()

    return [name for name in self._golden if not exists(name)]

  def pytest_sessionfinish(self, session: pytest.Session) -> None:
    if not self._update or not self._now:
      return
    with open(FILE, 'a+', encoding='utf-8') as f:  # other workers of pytest-xdist write it, too
      fcntl.flock(f, fcntl.LOCK_EX)
      f.seek(0)
      found = {**read(f.read()), **self._now}
      for name in self.gone(session.config):
        found.pop(name, None)
      f.truncate(0)
      f.write(written(found))


def plain(text: str) -> str:
  """Returns `text` without what differs between machines and runs."""
  base = re.escape(os.environ['T5X_GPU_TESTS_SHARE'])  # has the folders of all tests
  text = re.sub(rf'{base}(?:/popen-gw\d+)?/[\w.-]+?\d+(?=[^\w.-]|$|\.(?:\s|$))', 'TMP', text)
  for pattern, name in _MACHINE:
    text = re.sub(pattern, name, text)
  return '\n'.join(line.rstrip() for line in text.strip().splitlines())


def written(messages: dict[str, list[str]]) -> str:
  """Returns the file: tests by name, their messages indented below them."""
  lines = [_HEAD.strip()]
  for name, texts in sorted(messages.items()):
    for text in texts:
      lines += ['', name, *('    ' + line if line else '' for line in text.splitlines())]
  return '\n'.join(lines) + '\n'


def read(text: str) -> dict[str, list[str]]:
  """Returns the messages of each test in the file `text`."""
  found: dict[str, list[str]] = {}
  for block in re.split(r'\n\n(?=\S)', text)[1:]:
    name, _, indented = block.rstrip('\n').partition('\n')
    found.setdefault(name, []).append(re.sub(r'^    ', '', indented, flags=re.MULTILINE))
  return found
