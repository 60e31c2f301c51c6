"""Ranks that die, stop, hang or fail in a real run: the others end soon, and say who it was.

Each test is one run of several processes on loopback; the fault happens in a user's data module.
The deadlines are short ones, but for `test_a_killed_rank_...`, which has the defaults.
"""

import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading

import pytest

from t5x_gpu.runtime.cluster.restarts import EXIT_PREEMPTED
from t5x_gpu.runtime.watchdog import EXIT_ERROR, EXIT_RANK_DEAD, EXIT_STUCK
from tests.helpers_train import REPOSITORY, TINY_GIN, WATCHED_BATCHES, Project
from tests.helpers_xla import xla_flags

pytestmark = pytest.mark.cluster

DEADLINE_SECONDS = 90

GIN = (
  TINY_GIN.replace('LOG_PERIOD = 1', 'LOG_PERIOD = 5')
  + """
from t5x_gpu.runtime import watchdog
train_script.train.watchdog_cfg = @watchdog.WatchdogConfig()
"""
)
SHORT = {'WatchdogConfig.period_seconds': 0.2, 'WatchdogConfig.dead_seconds': 3}

# A user's own data module. FAULT is 'RANK:BATCH:KIND', BATCH from 1; the time goes to `fault`.
FAULTY_DATA = (
  '''"""Synthetic batches of 50 ms, and something that goes wrong before one of them."""

import json
import os
import pathlib
import signal
import time

from t5x_gpu.data import synthetic as _inner
from t5x_gpu.errors import DataError

_who, _when, _kind = os.environ['FAULT'].split(':')
_me = os.environ.get('RANK_OF_TEST')


def fault():
  with open(f'fault_{_me}', 'w') as f:
    f.write(str(time.time()))
  if _kind == 'kill':
    os.kill(os.getpid(), signal.SIGKILL)
  elif _kind == 'stop':
    os.kill(os.getpid(), signal.SIGSTOP)
  elif _kind == 'sleep':
    time.sleep(1000)
  elif _kind == 'raise':
    raise ValueError('boom in my_data')
  elif _kind == 'user_error':
    time.sleep(0.7 * int(_me))
    raise DataError('The file is torn.', fix='Mend it.')
  elif _kind in ('term', 'term_in_eval'):
    os.kill(os.getpid(), signal.SIGTERM)


def slow(*, is_me):
  if _kind == 'slow' and is_me:
    time.sleep(8)


def lose_the_lock():
  lock = pathlib.Path('model', 'run.lock')
  lock.write_text(json.dumps({**json.loads(lock.read_text()), 'host': 'gpu-08', 'pid': 1}))


def before(number):
  if _who in (_me, 'all') and number == int(_when):
    fault()
  time.sleep(0.05)

'''
  + WATCHED_BATCHES
  + """

class FaultyBatches(WatchedBatches):

  def get_state(self):
    slow(is_me=_me == _who)
    return self._batches.get_state()


class EvaluatedBatches(WatchedBatches):

  def __next__(self):
    time.sleep(1)
    return super().__next__()


def open_batches(config, *, spec, feature_converter, repeat=True):
  batches = _inner.open_batches(config, spec=spec, feature_converter=feature_converter,
                                repeat=repeat)
  if not repeat:
    slow(is_me=True)
    if _kind == 'lock' and _who == _me:
      lose_the_lock()
  if _kind == 'term_in_eval':
    return batches if repeat else EvaluatedBatches(batches)
  return FaultyBatches(batches) if repeat else batches
"""
)


@dataclasses.dataclass(frozen=True)
class Ended:
  """How a run ended.

  Attributes:
    codes: exit code of each rank.
    seconds: from the fault until each rank ended.
    texts: what each rank wrote.
  """

  codes: list[int]
  seconds: list[float]
  texts: list[str]


@pytest.fixture
def project(tmp_path) -> Project:
  (tmp_path / 'faulty_data.py').write_text(FAULTY_DATA)
  return Project(tmp_path, gin=GIN)


class Ranks:
  """Runs of several processes, forked from one that has imported everything."""

  def __init__(self, compiled: pathlib.Path):
    env = {**os.environ, 'XLA_FLAGS': xla_flags()}
    env.update(
      JAX_PLATFORMS='cpu',
      PYTHONPATH=str(REPOSITORY),
      PYTHONUNBUFFERED='1',
      TF_CPP_MIN_LOG_LEVEL='1',
      JAX_COMPILATION_CACHE_DIR=str(compiled),
      JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
    )
    self._popen = subprocess.Popen(
      [sys.executable, REPOSITORY / 'tests' / 'cluster' / 'fault_ranks.py'],
      env=env,
      text=True,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      start_new_session=True,
    )

  def close(self) -> None:
    if self._popen.poll() is None:
      os.killpg(self._popen.pid, signal.SIGKILL)  # its ranks as well, if a test left some
    self._popen.communicate()

  def run(
    self, project: Project, fault: str, *, ranks: int, hosts: bool = False, **settings
  ) -> Ended:
    """Returns how a run of `ranks` processes, or hosts, with `fault` ended."""
    settings = {'DATA_MODULE': 'faulty_data', 'TRAIN_STEPS': 40, 'BATCH_SIZE': 12, **settings}
    for path in project.folder.glob('fault_*'):
      path.unlink()
    run = {
      'count': ranks,
      'folder': str(project.folder),
      'fault': fault,
      'hosts': hosts,
      'port': random.randrange(20000, 30000),
      'argv': project.argv(**settings),
    }
    # A run that hangs is ended by the timer: the answer is then an empty line.
    timer = threading.Timer(DEADLINE_SECONDS, self.close)
    timer.start()
    self._popen.stdin.write(json.dumps(run) + '\n')
    self._popen.stdin.flush()
    answer = self._popen.stdout.readline()
    timer.cancel()
    assert answer.startswith('ENDS '), '\n'.join(texts(project, ranks))
    ends = json.loads(answer.removeprefix('ENDS '))
    times = [float(path.read_text()) for path in project.folder.glob('fault_*')]
    started = min(times, default=ends[0][1])
    return Ended(
      [code for code, _ in ends], [end - started for _, end in ends], texts(project, ranks)
    )


@pytest.fixture(scope='module')
def ranks(tmp_path_factory):
  ranks = Ranks(tmp_path_factory.mktemp('compiled'))
  yield ranks
  ranks.close()


def texts(project: Project, ranks: int) -> list[str]:
  return [(project.folder / f'rank_{i}.txt').read_text() for i in range(ranks)]


def reports(text: str) -> list[str]:
  return re.findall('^WATCHDOG: (.*)$', text, re.MULTILINE)


def others(values: list, rank: int) -> list:
  return [value for i, value in enumerate(values) if i != rank]


@pytest.mark.slow
@pytest.mark.parametrize('rank', [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_others_within_30_seconds_and_is_named(ranks, project, rank):
  step = random.Random(rank).randrange(8, 30)
  ended = ranks.run(project, f'{rank}:{step}:kill', ranks=4)  # the deadlines are the defaults
  assert ended.codes[rank] == -signal.SIGKILL, ended.texts
  assert others(ended.codes, rank) == [EXIT_RANK_DEAD] * 3, ended.texts
  assert max(ended.seconds) < 30
  for text in others(ended.texts, rank):
    found = re.search(
      rf'process {rank} on (\S+) \(pid \d+\), last seen at step (\d+)', reports(text)[0]
    )
    assert found, text
    assert step - 25 <= int(found[2]) < step  # heartbeats come once a second, steps each 50 ms
  print(
    f'\nkill -9 of rank {rank} of 4: the others ended after '
    f'{min(others(ended.seconds, rank)):.1f} to {max(ended.seconds):.1f} s'
  )


@pytest.mark.slow
@pytest.mark.parametrize('rank', [0, 1])
def test_a_stopped_rank_ends_the_others_and_is_named(ranks, project, rank):
  ended = ranks.run(project, f'{rank}:12:stop', ranks=2, **SHORT)
  assert ended.codes[1 - rank] == EXIT_RANK_DEAD, ended.texts
  assert re.search(
    rf'process {rank} on \S+ \(pid \d+\), last seen at step \d', reports(ended.texts[1 - rank])[0]
  )
  assert ended.seconds[1 - rank] < 30  # JAX alone: 60
  print(f'\nSIGSTOP of rank {rank} of 2, dead_seconds 3: {ended.seconds[1 - rank]:.1f} s')


@pytest.mark.slow
def test_a_rank_stuck_in_its_data_is_named_with_its_stack(ranks, project):
  rank = 2
  ended = ranks.run(
    project,
    f'{rank}:12:sleep',
    ranks=3,
    **SHORT,
    **{'WatchdogConfig.step_seconds': 4, 'WatchdogConfig.step_factor': 1},
  )
  assert ended.codes == [EXIT_STUCK] * 3, ended.texts
  assert max(ended.seconds) < 30  # JAX alone: never
  text = ended.texts[0]  # which has the heartbeats of all
  behind = re.search('^Behind the others: (.*)$', text, re.MULTILINE)
  assert behind and behind[1].startswith(f'process {rank} on'), text
  assert behind[1].count('process') == 1, text
  assert re.search(rf'process {rank} on .* in faulty_data.py:\d+ \(fault\)', text), text
  for other in ended.texts:
    assert 'most recent call first' in other
    assert other == text or 'The output of process 0 has the heartbeats' in other
  verdicts = {re.search('^WATCHDOG: (Process .*)$', t, re.MULTILINE)[1] for t in ended.texts}
  assert len(verdicts) == 1
  assert 'in fault' in ended.texts[rank]  # its own stack
  print(f'\nrank {rank} of 3 stuck, step_seconds 4: {max(ended.seconds):.1f} s')


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_the_others_at_once_with_its_reason(ranks, project):
  ended = ranks.run(project, '1:12:raise', ranks=3, **SHORT)
  assert ended.codes == [EXIT_ERROR] * 3, ended.texts
  assert '[1/3] Traceback' in ended.texts[1] and 'boom in my_data' in ended.texts[1]
  for text in others(ended.texts, 1):
    assert 'failed after step 1' in reports(text)[0], text
    assert 'ValueError: boom in my_data' in reports(text)[0]
  assert max(ended.seconds) < 20
  print(f'\nexception on rank 1 of 3: {max(ended.seconds):.1f} s')


@pytest.mark.slow
def test_a_model_dir_lost_while_the_data_opens_ends_all_ranks_before_they_write(ranks, project):
  ended = ranks.run(project, '0:0:lock', ranks=2, TRAIN_STEPS=4)
  assert ended.codes == [1, 1], ended.texts
  for text in ended.texts:
    assert 'now belongs to process 1 on gpu-08' in text and 'Traceback' not in text
  assert [path.name for path in project.model_dir.iterdir()] == ['run.lock']


@pytest.mark.slow
def test_a_user_error_on_all_ranks_is_each_ones_own_and_leaves_with_1(ranks, project):
  ended = ranks.run(project, 'all:12:user_error', ranks=3)  # one 0.7 s after the other
  assert ended.codes == [1] * 3, ended.texts
  for text in ended.texts:
    assert 'DataError: The file is torn.' in text and 'Traceback' not in text
  assert 'Mend it.' in ended.texts[0]
  assert project.steps()[-1] == 11  # the last step before the batch that all could not read


@pytest.mark.slow
def test_slow_progress_is_not_a_fault(ranks, project):
  """Opening the data, and each save on one rank, take longer than any silence or step may."""
  # A busy machine may well take three seconds for a step.
  ended = ranks.run(
    project,
    '1:0:slow',
    ranks=2,
    TRAIN_STEPS=10,
    **SHORT
    | {
      'WatchdogConfig.dead_seconds': 6,
      'WatchdogConfig.step_seconds': 6,
      'WatchdogConfig.step_factor': 1,
    },
  )
  assert ended.codes == [0, 0], ended.texts
  assert not reports(''.join(ended.texts)) and project.steps() == [10]


@pytest.mark.slow
def test_preemption_of_one_rank_saves_on_all_and_the_run_continues(ranks, project):
  ended = ranks.run(project, '1:12:term', ranks=2)
  assert ended.codes == [EXIT_PREEMPTED] * 2, ended.texts
  step = project.steps()[-1]
  saved = (project.model_dir / f'checkpoint_{step}').stat().st_ctime  # of its renaming
  signalled = float((project.folder / 'fault_1').read_text())
  assert 12 <= step < 40 and 0 < saved - signalled < 15
  assert 'Reached preemption sync point' not in ''.join(ended.texts)
  print(
    f'\nSIGTERM to committed checkpoint, 2 ranks: {saved - signalled:.1f} s; '
    f'until both had left: {max(ended.seconds):.1f} s'
  )
  again = ranks.run(project, '9:1:none', ranks=2)
  assert again.codes == [0, 0], again.texts
  assert f'Continuing from {project.model_dir}/checkpoint_{step}' in again.texts[0]
  assert set(project.metrics()) >= set(range(5, 41, 5))
  assert not reports(''.join(again.texts))


@pytest.mark.slow
def test_preemption_of_one_rank_during_an_evaluation_saves_on_all_and_repeats_it(ranks, project):
  settings = {'TRAIN_STEPS': 6, 'EVAL_PERIOD': 3, 'EVAL_STEPS': 8}
  ended = ranks.run(project, '1:2:term_in_eval', ranks=2, **settings)
  assert ended.codes == [EXIT_PREEMPTED] * 2, ended.texts
  assert 'The evaluation after step 3 was interrupted' in ended.texts[0]
  assert project.steps() == [3] and not project.metrics('eval/loss')
  again = ranks.run(project, '9:1:none', ranks=2, **settings)
  assert again.codes == [0, 0], again.texts
  assert list(project.metrics('eval/loss')) == [3, 6]
