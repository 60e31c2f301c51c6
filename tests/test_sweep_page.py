"""docs/sweep.md: its loop, its list of runs and its array train; the report compares them."""

import os
import re
import subprocess
import sys

import pytest

from tests.helpers_pages import ROOT, blocks
from tests.helpers_train import TINY_GIN
from tests.helpers_xla import xla_flags

LOOP, LIST, RANK = blocks('sweep.md', 'sh')
# Programs in front of the machine's own: srun runs its one task here.
PROGRAMS = {
  'python': f'#!/bin/sh\nexec {sys.executable} "$@"\n',
  'show': '#!/bin/bash\nprintf "<%s>" "$@"\n',
  'srun': '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
}


@pytest.fixture
def bash(tmp_path):
  """bash(script, **variables) runs a script in the user's folder, on one CPU device."""
  (tmp_path / 'bin').mkdir()
  for name, text in PROGRAMS.items():
    path = tmp_path / 'bin' / name
    path.write_text(text)
    path.chmod(0o755)
  environment = {
    **os.environ,
    'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}',
    'PYTHONPATH': str(ROOT),
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': xla_flags(1),
  }

  def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
      ['bash', '-c', script],
      cwd=tmp_path,
      env={**environment, **variables},
      capture_output=True,
      text=True,
    )

  return run


def array_task(bash, task: int, *flags: str, python: str) -> subprocess.CompletedProcess[str]:
  """Runs one task of an array of scripts/train.slurm on sweep.txt."""
  return bash(
    f'exec bash {ROOT}/scripts/train.slurm my.gin {" ".join(flags)}',
    SWEEP='sweep.txt',
    PYTHON=python,
    SLURM_JOB_ID='7',
    SLURM_JOB_NODELIST='n1',
    SLURM_ARRAY_JOB_ID='7',
    SLURM_ARRAY_TASK_ID=str(task),
  )


def test_a_task_of_an_array_has_the_flags_of_its_line(bash, tmp_path):
  assert bash(LIST).returncode == 0
  lines = (tmp_path / 'sweep.txt').read_text().splitlines()
  assert len(lines) == 4 and lines[2].endswith('--gin.LEARNING_RATE=0.01 --gin.RANDOM_SEED=0')
  with open(tmp_path / 'sweep.txt', 'a') as f:
    f.write('\n--gin.A="two words" --gin.B=[1]*\n')
  third = ''.join(f'<{flag}>' for flag in lines[2].split())
  shown = array_task(bash, 3, '--gin.X=1', python='show').stdout
  assert f'<--gin_file=my.gin><--gin.X=1>{third}' in shown
  assert '<--gin.A=two words><--gin.B=[1]*>' in array_task(bash, 6, python='show').stdout
  for task in (5, 9):
    done = array_task(bash, task, python='show')
    assert done.returncode == 2 and f'sweep.txt has no flags in line {task}' in done.stdout


def test_a_sweep_without_an_array_is_refused(bash):
  done = bash(f'bash {ROOT}/scripts/train.slurm my.gin', SWEEP='sweep.txt', SLURM_JOB_ID='7')
  assert done.returncode != 0 and 'SWEEP needs sbatch --array=1-N' in done.stderr


def test_xargs_starts_a_run_per_line_and_gives_each_a_gpu(bash):
  bash(LIST)
  one_by_one, at_once = re.findall(r'`(xargs .*?)`', (ROOT / 'docs/sweep.md').read_text())[:2]
  shown = bash(one_by_one.replace('python', 'show', 1)).stdout
  assert shown.count('<-m><t5x_gpu.train><--gin_file=my.gin><--gin.MODEL_DIR=runs/sweep/rate_') == 4
  gpus = bash(at_once.replace('python', "sh -c 'echo $CUDA_VISIBLE_DEVICES; sleep 0.1'", 1)).stdout
  assert sorted(gpus.split()) == ['0', '1', '2', '3']


@pytest.mark.slow
@pytest.mark.process
def test_the_loop_and_the_array_train_and_are_compared(bash, tmp_path):
  (tmp_path / 'my.gin').write_text(TINY_GIN.replace('TRAIN_STEPS = 20', 'TRAIN_STEPS = 3'))
  done = bash(LOOP)
  assert done.returncode == 0, done.stderr
  again = bash(LOOP)
  assert again.stdout.count('nothing to do up to TRAIN_STEPS = 3') == 3, again.stderr
  bash(LIST)
  done = array_task(bash, 1, python='python')
  assert done.returncode == 0 and 'Done at step 3' in done.stdout, done.stdout + done.stderr
  page = (tmp_path / 'runs/sweep.html').read_text()
  assert all(f'rate_{rate}' in page for rate in ('0.003', '0.01', '0.03'))
  ranked = [line.split() for line in bash(RANK).stdout.splitlines()]
  losses = [float(loss) for _, loss, _ in ranked]
  assert len(losses) == 4 and losses == sorted(losses)
