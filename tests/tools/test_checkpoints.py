"""prune removes what it showed, and nothing that it does not know."""

import os
import shutil
import subprocess
import sys

from t5x_gpu import checkpoint_tools
from t5x_gpu.checkpoint.model_dir import ModelDir, committed_steps
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.errors import CheckpointError
from t5x_gpu.tools import checkpoints
from tests.checkpoint.test_checkpointer import folder_with
from tests.helpers_train import REPOSITORY, listing, run_here
from tests.messages import raises


def run(*argv):
  return run_here(lambda: checkpoint_tools.main([str(a) for a in argv]))


def test_prune_shows_first_and_then_removes_what_it_showed(tmp_path):
  folder = folder_with(tmp_path, 10, 20, 30, 40, 50)
  before = listing(folder)
  shown = run('prune', folder, '--keep_last=2', '--keep_every=20')
  assert shown.code == 0 and 'Nothing was removed.' in shown.out
  assert listing(folder) == before
  done = run('prune', folder, '--keep_last=2', '--keep_every=20', '--yes')
  assert done.code == 0 and committed_steps(folder) == [20, 40, 50]
  for step, words in ((10, 'remove  '), (20, 'keep    '), (30, 'remove  '), (50, 'keep    ')):
    assert f'{words}checkpoint_{step}:' in shown.out
  assert run('prune', folder, '--keep_steps=20', '--yes').code == 0
  assert committed_steps(folder) == [20] and run('verify', folder).code == 0


def test_prune_removes_nothing_that_it_does_not_know(tmp_path):
  folder = folder_with(tmp_path, 10, 20)
  (folder / 'checkpoint_5').mkdir()  # another user's file
  (folder / 'checkpoint_5/notes').write_text('mine')
  shutil.copytree(folder / 'checkpoint_10', folder / 'checkpoint_15')
  shutil.rmtree(folder / 'checkpoint_15/manifest')
  (folder / '.removed_checkpoint_10.mine').mkdir()
  result = run('prune', folder, '--keep_last=1', '--yes')
  assert result.code == 0, result.err
  assert 'keep    checkpoint_15: cannot be read as a checkpoint' in result.out
  assert sorted(p.name for p in folder.iterdir() if p.name != 'run.lock') == [
    '.removed_checkpoint_10.mine',
    'checkpoint_15',
    'checkpoint_20',
    'checkpoint_5',
  ]


def test_prune_is_refused_while_a_run_writes_and_would_leave_one(tmp_path):
  folder = folder_with(tmp_path, 10, 20)
  with raises(CheckpointError):
    checkpoints.plan_prune(ModelDir(folder), Keep(every=7))
  with raises(CheckpointError):
    checkpoints.plan_prune(ModelDir(folder), Keep(steps=(7,)))
  holds = (
    'import pathlib, sys; from t5x_gpu.checkpoint.run_lock import RunLock; '
    'RunLock(pathlib.Path(sys.argv[1])); print("locked", flush=True); sys.stdin.read()'
  )
  with subprocess.Popen(
    [sys.executable, '-c', holds, str(folder)],
    cwd=REPOSITORY,
    text=True,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  ) as other:
    assert other.stdout.readline() == 'locked\n'
    for more in ((), ('--yes',)):
      result = run('prune', folder, '--keep_last=1', *more)
      assert result.code == 1 and 'belongs to another run' in result.err
    assert committed_steps(folder) == [10, 20]
    other.stdin.close()
  assert run('prune', folder, '--keep_last=1', '--yes').code == 0
  assert committed_steps(folder) == [20]


def test_a_prune_that_was_killed_leaves_no_half_checkpoint_and_the_next_one_clears_up(tmp_path):
  folder = folder_with(tmp_path, 10, 20)
  os.rename(folder / 'checkpoint_10', folder / '.removed_checkpoint_10')  # what a kill leaves
  shutil.rmtree(folder / '.removed_checkpoint_10/state')
  assert committed_steps(folder) == [20]
  assert run('prune', folder, '--keep_last=1', '--yes').code == 0
  assert [p.name for p in folder.iterdir() if p.name != 'run.lock'] == ['checkpoint_20']
