"""Several processes evaluate as one does, however unevenly the rows fall on them."""

import os
import subprocess
import sys

import pytest

from t5x_gpu import eval
from t5x_gpu.metrics.writers import read_json_lines
from tests.helpers_train import DEADLINE_SECONDS, REPOSITORY, Project, compiled_kept_in, run_here
from tests.helpers_xla import xla_flags
from tests.test_eval import GIN

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
# Validation has 5 and 10 rows: in the last batch of four of either, the second process has nothing
# but rows that fill.
FLAGS = {'MIXTURE_OR_TASK_NAME': 'all_turned', 'train_eval/DatasetConfig.batch_size': 4}


def test_two_processes_with_unequal_rows_find_what_one_finds(tmp_path):
  project = Project(tmp_path, gin=GIN)
  assert project.run(num_devices=1, TRAIN_STEPS=2).code == 0
  with compiled_kept_in(project._compiled):
    alone = run_here(lambda: eval.main(project.argv('--name=alone', **FLAGS)), num_devices=1)
  assert alone.code == 0, alone.err
  launched(project, '--name=together', module='eval', **FLAGS)
  one, many = (
    read_json_lines(project.model_dir / 'eval' / f'{name}.jsonl') for name in ('alone', 'together')
  )
  assert [r['step'] for r in many] == [2] and len(one[0]) == len(many[0]) > 8
  for name, value in many[0].items():
    assert value == pytest.approx(one[0][name], rel=1e-4), name


def test_all_processes_take_the_task_metrics_of_process_0_and_so_decide_alike(tmp_path):
  """By its own metric, process 1 would stop early, and the run would hang."""
  project = Project(tmp_path, gin=GIN)
  launched(
    project,
    '--gin.train.early_stopping=@early_stopping.EarlyStopping()',
    "--gin.EarlyStopping.metric='infer_eval/turned_by_process/rank'",
    "--gin.EarlyStopping.best_is='max'",
    '--gin.EarlyStopping.patience=2',
    '--gin.train.infer_eval_period=1',
    module='train',
    MIXTURE_OR_TASK_NAME='turned_by_process',
    TRAIN_STEPS=4,
  )
  found = project.metrics('infer_eval/turned_by_process/rank')
  assert sorted(found) == list(range(5)) and sorted(found.values()) == list(found.values())


def launched(project: Project, *flags: str, module: str, **macros: object) -> None:
  """Runs a command in two processes; it must succeed."""
  done = subprocess.run(
    [
      *(sys.executable, '-m', 't5x_gpu.launch', '--nproc', '2', '--no_gpu'),
      *('--module', f't5x_gpu.{module}', '--', *project.argv(*flags, **macros)),
    ],
    cwd=project.folder,
    env={**os.environ, 'XLA_FLAGS': xla_flags(), 'PYTHONPATH': str(REPOSITORY)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=DEADLINE_SECONDS,
  )
  assert done.returncode == 0, done.stdout
