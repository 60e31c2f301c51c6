"""Checks of a MODEL_DIR after a crash."""

import pathlib
import re
import time
from collections.abc import Callable

from t5x_gpu.checkpoint.store import StateReader
from t5x_gpu.tools.checkpoints import verify
from tests.helpers_train import DEADLINE_SECONDS, Process, Project

# Of runs that are forked from a WarmStart: with dropout, without evaluations.
MACROS = {
  'DATA_MODULE': 'held_data',
  'DROPOUT_RATE': 0.1,
  'LEARNING_RATE': 1e-3,
  'train.train_eval_dataset_cfg': None,
}


def files_of_saves(model_dir: pathlib.Path) -> int:
  """Returns the number of files of uncommitted saves; it may change at any time."""
  try:
    return sum(p.is_file() for p in model_dir.glob('checkpoint_*.orbax-checkpoint-tmp*/**/*'))
  except OSError:  # renamed or removed meanwhile
    return 0


def is_saving(project: Project, *, files: int) -> Callable[[], bool]:
  """Returns what tells that a save has written so many files, or that one has been committed."""
  before = project.steps()
  return lambda: files_of_saves(project.model_dir) >= files or project.steps() != before


def until(run: Process, condition: Callable[[], bool]) -> bool:
  """Returns once `condition` is true, or False once the run has ended without it."""
  deadline = time.monotonic() + DEADLINE_SECONDS
  while not condition():
    if run.popen.poll() is not None:
      return condition()
    assert time.monotonic() < deadline, f'not in time:\n{run.out}\n{run.err}'
    time.sleep(0.001)
  return True


def damaged(model_dir: pathlib.Path, step: int) -> dict[str, str]:
  """Returns the problems of a committed checkpoint, by array; reads the whole checkpoint."""
  verdict = verify(StateReader(model_dir, step=step), advance=lambda num_bytes: None)
  assert verdict.num_arrays > 20 and not verdict.num_unknown
  return dict(verdict.damaged)


def assert_reported(err: str, *parts: str) -> None:
  """Fails unless the run ended with a UserError that contains all `parts`."""
  assert re.search('^(Checkpoint|Training|Config)Error: ', err, re.MULTILINE), err
  for part in parts:
    assert part in err, f'{part!r} is not in:\n{err}'
