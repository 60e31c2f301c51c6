"""python -m t5x_gpu.prepare: killed, interrupted, continued; and a run on its output."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from t5x_gpu import prepare
from t5x_gpu.data.prepared.index import read_index
from t5x_gpu.errors import ConfigError
from tests.helpers_prepared import prepare_here
from tests.helpers_train import DEADLINE_SECONDS, REPOSITORY, Project, run_here
from tests.messages import raises

pytestmark = pytest.mark.tf
MODULE = {
  'DATA_MODULE': 't5x_gpu.data.seqio_batches',
  'MIXTURE_OR_TASK_MODULE': 'tests.mixed_tasks',
}


class Command:
  """A started `prepare`; as a context manager it never outlives the block."""

  def __init__(self, project, *flags, **macros):
    macros = {**MODULE, **macros}
    argv = [
      f'--gin_file={project.gin_file}',
      f'--output={project.folder / "rows"}',
      *flags,
      *(f'--gin.{k}={v}' for k, v in {'MODEL_DIR': 'unused', **macros}.items()),
    ]
    self._out = open(project.folder / 'prepare.txt', 'w+')
    self.popen = subprocess.Popen(
      [sys.executable, '-m', 't5x_gpu.prepare', *argv],
      cwd=project.folder,
      stdout=self._out,
      stderr=subprocess.STDOUT,
      start_new_session=True,
      env={**os.environ, 'PYTHONPATH': str(REPOSITORY), 'JAX_PLATFORMS': 'cpu'},
    )

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    if self.popen.poll() is None:
      os.killpg(self.popen.pid, signal.SIGKILL)
    self.popen.wait()
    self._out.close()

  @property
  def out(self):
    self._out.seek(0)
    return self._out.read()

  def wait_for(self, condition):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
      assert time.monotonic() < deadline and self.popen.poll() is None, self.out
      time.sleep(0.01)

  def finish(self):
    return self.popen.wait(DEADLINE_SECONDS)


def workers_of(session):
  """Returns the pids of the processes of a session that are still there."""
  found = []
  for pid in filter(str.isdigit, os.listdir('/proc')):
    try:
      with open(f'/proc/{pid}/stat') as f:
        fields = f.read().rpartition(')')[2].split()
    except OSError:
      continue
    if int(fields[3]) == session and fields[0] != 'Z':
      found.append(int(pid))
  return found


def gone(session):
  deadline = time.monotonic() + DEADLINE_SECONDS
  while workers_of(session):
    assert time.monotonic() < deadline, 'workers outlive the process that started them'
    time.sleep(0.01)


def shards(folder):
  return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob('*.arrayrecord')}


@pytest.fixture(name='project')
def _project(tmp_path):
  return Project(tmp_path)


def test_both_splits_of_a_run_are_prepared_unless_one_is_named(project):
  argv = [
    f'--gin_file={project.gin_file}',
    f'--output={project.folder / "rows"}',
    '--dry_run',
    *(f'--gin.{k}={v}' for k, v in MODULE.items()),
    '--gin.MIXTURE_OR_TASK_NAME=mixed',
  ]
  result = run_here(lambda: prepare.main(argv))
  each = 'shards of mixed_a (4), mixed_b (4), mixed_c (4)'
  assert result.code == 0 and [line.split(' would get ') for line in result.out.splitlines()] == [
    [f'Dry run: {project.folder}/rows/{split}', f'{each}.'] for split in ('train', 'validation')
  ]
  one = run_here(lambda: prepare.main([*argv, '--split=validation', '--shards=7']))
  assert 'mixed_c (7)' in one.out and '/train' not in one.out
  assert not (project.folder / 'rows').exists()


@pytest.mark.slow
def test_the_command_makes_rows_and_says_how_to_train_on_them(project):
  with Command(
    project, '--workers=1', '--shards=1', '--split=train', MIXTURE_OR_TASK_NAME='mixed_b'
  ) as command:
    assert command.finish() == 0, command.out
    out = command.out
  rows = project.folder / 'rows'
  index = read_index(rows, split='train')
  assert re.search(
    rf'^train: {index.rows} rows, {index.tokens:,} tokens, padding [\d.]+%', out, re.MULTILINE
  ), out
  assert f"MIXTURE_OR_TASK_NAME='prepared:{rows}'" in out
  here = prepare_here('mixed_b', project.folder / 'here', num_parts=1, vocab_size=264)
  assert here.members == index.members  # for any number of processes, to the byte


@pytest.mark.slow
def test_rows_do_not_depend_on_kills_interrupts_or_the_number_of_workers(project):
  text = project.folder / 'text'
  text.mkdir()
  for f in range(6):
    (text / f'{f}.txt').write_text(''.join(f'{f} {i} {"word " * (i % 40)}\n' for i in range(400)))
  name = f'text_lines:{text}/*.txt'
  flags = dict(MIXTURE_OR_TASK_NAME=name)
  rows = project.folder / 'rows'
  unfinished = rows / 'train' / '.unfinished'
  done = lambda number: lambda: len(list(unfinished.glob('*/*.json'))) >= number

  with Command(project, '--workers=2', '--shards=6', '--split=train', **flags) as command:
    command.wait_for(done(1))
    command.popen.send_signal(signal.SIGKILL)  # the parent alone: its workers must notice
    command.finish()
    gone(command.popen.pid)
  kept = len(list(unfinished.glob('*/*.json')))
  assert 1 <= kept < 6 and not (rows / 'train' / 'index.json').exists()

  with Command(project, '--workers=1', '--shards=6', '--split=train', **flags) as command:
    command.wait_for(done(kept + 1))
    os.killpg(command.popen.pid, signal.SIGINT)  # Ctrl-C reaches the whole group
    assert command.finish() == 130, command.out
    assert 'Traceback' not in command.out and not list(rows.rglob('*.partial'))
    gone(command.popen.pid)

  with Command(project, '--workers=3', '--shards=6', '--split=train', **flags) as command:
    assert command.finish() == 0, command.out
    assert re.search(r'train: \d shards are finished and unchanged', command.out)
  prepare_here(name, project.folder / 'here', num_parts=6, vocab_size=264)
  assert shards(rows) == shards(project.folder / 'here') and len(shards(rows)) == 6

  with Command(project, '--workers=3', '--shards=6', '--split=train', **flags) as command:
    assert command.finish() == 0 and 'already complete' in command.out


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_run_with_its_signal_and_no_process_stays(project):
  text = project.folder / 'text.txt'
  text.write_text(''.join(f'{i} {"word " * (i % 40)}\n' for i in range(3000)))
  with Command(
    project, '--workers=2', '--shards=6', '--split=train', MIXTURE_OR_TASK_NAME=f'text_lines:{text}'
  ) as command:
    unfinished = project.folder / 'rows' / 'train' / '.unfinished'
    command.wait_for(lambda: any(unfinished.glob('*/*.json')))
    workers = [
      pid
      for pid in workers_of(command.popen.pid)
      if 'spawn_main' in pathlib.Path(f'/proc/{pid}/cmdline').read_text()
    ]
    os.kill(workers[0], signal.SIGKILL)
    assert command.finish() == 1, command.out
    assert 'DataError: A worker was killed by SIGKILL while it wrote shard' in command.out
    assert '--workers' in command.out and 'Traceback' not in command.out
    gone(command.popen.pid)
  assert not list((project.folder / 'rows').rglob('*.partial'))


@pytest.mark.slow
def test_a_run_on_a_prepared_mixture_refuses_other_rates(project, tmp_path):
  rows = tmp_path / 'rows'
  prepare_here('mixed', rows, num_parts=1)
  macros = {
    **MODULE,
    'MIXTURE_OR_TASK_NAME': f'prepared:{rows}',
    'train_eval/DatasetConfig.split': 'train',
  }
  first = project.run(**macros, TRAIN_STEPS=2)
  assert first.code == 0, first.err
  refused = project.run(**macros, **{'train/DatasetConfig.mixture_rates': "{'mixed_a': 1}"})
  assert refused.code == 1 and 'rates: saved' in refused.err


@pytest.mark.parametrize('flags', [[], ['--output=x', '--workers=0']])
def test_flags_that_cannot_be_are_refused(project, flags):
  with raises(ConfigError):
    prepare.main([f'--gin_file={project.gin_file}', *flags])


def test_random_batches_cannot_be_prepared(project):
  with raises(ConfigError):
    prepare.main(
      [
        f'--gin_file={project.gin_file}',
        f'--output={project.folder / "rows"}',
        '--gin.MODEL_DIR=unused',
      ]
    )
