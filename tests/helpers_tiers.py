"""The limits of the test tiers, checked while they run.

- `@pytest.mark.quick_cases('one', 'two*')` above a test with parameters: the other cases are slow.
- `make test`: a test that is not marked `slow` should take at most BUDGET seconds of CPU. The
  summary names slower tests, and ALLOWANCE times as much fails.
- `make test-quick`: no test imports TensorFlow or starts a process; files that train or compile
  many layouts are left out.

CPU seconds of this process and of all that it started, not the time that passes: a test does not
fail because the machine has other work. With `--junitxml` each is a property of its test.
"""

import os
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, Optional

import pytest

BUDGET = 10.0
# The first test of a worker also pays for the warm server, the first of a model for its reference
# on one device; and CPU seconds grow up to fourfold on a machine whose cores are shared.
ALLOWANCE = 4.0
_CPU = 'cpu_seconds'  # property of a report

# Marks of tests that `make test-quick` leaves out.
NOT_QUICK = ('slow', 'tf', 'process', 'cluster')

# What files have in them that start processes, import TensorFlow, train, or compile many layouts.
_NOT_QUICK_WORDS = re.compile(
  r'\bsubprocess\b|\bmultiprocessing\b|\bos\.fork\b|[(,] ?(warm|server|ranks)\b'
  r'|\b(two|forked)_processes\b|\b(remote|restoring|fault)_ranks\b'
  r'|\bhelpers_(crashes|disk|layouts|pages|prepared|storage|tables|tfds|topologies|train|warm)\b'
  r'|\bshard_map\b|\btolerances\b|\btf_runtime\b|\b(eval|mixed|t5_like)_tasks\b|\btransformers\b'
)

_STARTS = {'subprocess.Popen', 'os.fork', 'os.forkpty', 'os.posix_spawn', 'os.system'}
_TICKS = os.sysconf('SC_CLK_TCK')


def only_for_other_tiers(source: str) -> bool:
  """Returns whether `make test-quick` leaves out the whole test file with this source."""
  marks = re.findall(r'^pytestmark = (.*)', source, re.MULTILINE)
  marked = any(f'pytest.mark.{mark}' in line for line in marks for mark in NOT_QUICK)
  return marked or _NOT_QUICK_WORDS.search(source) is not None


def cpu_seconds() -> float:
  """Returns the CPU seconds that this process and all its descendants have used, dead or alive."""
  own = sum(os.times()[:4])
  try:
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
  except ChildProcessError:
    return own
  return own + _of_living_descendants()


def _of_living_descendants() -> float:
  used, children = {}, {}
  for pid in filter(str.isdigit, os.listdir('/proc')):
    try:
      with open(f'/proc/{pid}/stat', encoding='utf-8') as f:
        fields = f.read().rpartition(')')[2].split()
    except OSError:  # it has ended
      continue
    used[int(pid)] = sum(map(int, fields[11:15])) / _TICKS
    children.setdefault(int(fields[1]), []).append(int(pid))
  descendants = list(children.get(os.getpid(), []))
  for pid in descendants:
    descendants += children.get(pid, [])
  return sum(used[pid] for pid in descendants)


class Tiers:
  """A pytest plugin that fails tests which do more than their marks say.

  Args:
    budget: CPU seconds of a test and its fixtures; None for no limit.
    quick: check that nothing imports TensorFlow or starts a process.
  """

  def __init__(self, *, budget: Optional[float], quick: bool):
    self._budget, self._quick = budget, quick
    self._starts: list[str] = []
    sys.addaudithook(self._audit)

  def _audit(self, event: str, args: Any) -> None:
    # The first plan of a machine asks XLA which flags it knows: once, whichever test is the first.
    if event in _STARTS and 'make_cpu_client()' not in str(args[:2]):
      self._starts.append(f'{event}{args[:2]}'[:200])

  @pytest.hookimpl(wrapper=True)
  def pytest_pycollect_makeitem(self, collector: Any, name: str, obj: Any) -> Iterator[Any]:
    """Marks the cases that `@pytest.mark.quick_cases(PATTERN, ...)` leaves out as slow."""
    found = yield
    items = [item for item in found or () if isinstance(item, pytest.Function)]
    marker = (
      items[0].get_closest_marker('quick_cases') if isinstance(found, list) and items else None
    )
    if marker is not None:
      cases = {item: item.callspec.id for item in items}
      useless = [p for p in marker.args if not any(fnmatchcase(id, p) for id in cases.values())]
      if useless:
        raise collector.CollectError(f'quick_cases of {name}: no case is {" or ".join(useless)}')
      for item, case in cases.items():
        if not any(fnmatchcase(case, pattern) for pattern in marker.args):
          item.add_marker('slow')
    return found

  @pytest.hookimpl(wrapper=True, tryfirst=True)
  def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
    self._cpu_before = cpu_seconds()
    self._starts = []
    return (yield)

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[Any]:
    if call.when == 'call':
      used = round(cpu_seconds() - self._cpu_before, 1)
      item.user_properties.append((_CPU, used))  # which every report of this test has
    report = yield
    if call.when == 'call' and report.passed and not item.get_closest_marker('slow'):
      problems = list(self._problems(used))
      if problems:
        report.outcome, report.longrepr = 'failed', '\n'.join(problems)
    return report

  def pytest_terminal_summary(self, terminalreporter: Any) -> None:
    reports = terminalreporter.getreports('passed') + terminalreporter.getreports('failed')
    used = {r.nodeid: dict(r.user_properties).get(_CPU, 0.0) for r in reports}
    over = sorted((u, name) for name, u in used.items() if self._budget and u > self._budget)
    if over:
      terminalreporter.section(f'over {self._budget:g} CPU seconds: mark slow, or make faster')
    for seconds, name in reversed(over):
      terminalreporter.line(f'{seconds:6.1f} {name}')

  def _problems(self, used: float) -> Iterator[str]:
    if self._budget is not None and used > self._budget * ALLOWANCE:
      yield (
        f'The test and its fixtures took {used:.1f} CPU seconds. A test that is not marked slow '
        f'may take {self._budget:g} ({self._budget * ALLOWANCE:g} on a slow machine).'
      )
    if self._quick and 'tensorflow' in sys.modules:
      yield 'This test, or one before it, imported TensorFlow: mark it tf.'
    if self._quick and self._starts:
      yield f'The test started a process ({self._starts[0]}): mark it process.'
