"""Selects the next checkpoints to evaluate, while a run may still write and remove checkpoints."""

import time
from collections.abc import Collection, Iterator
from typing import Any, Optional, Union

from t5x_gpu.checkpoint.arrays.params_files import read_params
from t5x_gpu.checkpoint.arrays.state_reader import Checkpoint
from t5x_gpu.checkpoint.model_dir import ModelDir
from t5x_gpu.errors import CheckpointError, UserError, first_line
from t5x_gpu.runtime import distributed
from t5x_gpu.training.program import Program

POLL_SECONDS = 2.0  # between two listings of MODEL_DIR
Wanted = Union[str, tuple[int, ...]]  # 'all', 'last' or steps


def steps_to_evaluate(
  model_dir: ModelDir,
  *,
  wanted: Wanted,
  done: Collection[int],
  last_step: Optional[int],
  timeout: float,
) -> Iterator[int]:
  """Yields the steps to evaluate, oldest first and the same on all processes.

  Lists the steps again after each step, because a run may have written and removed checkpoints.

  Args:
    model_dir: MODEL_DIR of the run.
    wanted: 'all', 'last', or steps.
    done: steps to skip.
    last_step: wait for new checkpoints until this step; None to not wait.
    timeout: seconds to wait for the next checkpoint.
  """
  done = set(done)
  deadline = time.monotonic() + timeout
  while True:
    step = distributed.broadcast_json(_next(model_dir, wanted, done, last_step, deadline))
    if step == _END:
      return
    if step != _NOT_YET:
      done.add(step)
      yield step
      deadline = time.monotonic() + timeout
    elif distributed.is_main_process():
      time.sleep(POLL_SECONDS)
    model_dir.refresh()


_END, _NOT_YET = -1, -2


def _next(
  model_dir: ModelDir,
  wanted: Wanted,
  done: Collection[int],
  last_step: Optional[int],
  deadline: float,
) -> int:
  steps = model_dir.steps
  if wanted == 'last':
    steps = steps[-1:]
  elif wanted != 'all':
    steps = [step for step in steps if step in wanted]
  left = [step for step in steps if step not in done]
  if left:
    return left[0]
  if last_step is None or any(step >= last_step for step in model_dir.steps):
    return _END
  return _END if time.monotonic() >= deadline else _NOT_YET


def read_if_there(checkpoint: Checkpoint, program: Program) -> Any:
  """Returns the parameters; None, on all processes, if the run has removed the checkpoint.

  Raises:
    CheckpointError: the checkpoint exists and cannot be read.
  """
  params, problem = None, None
  try:
    params = read_params(checkpoint, program.abstract_saved.params)
  except Exception as e:  # Orbax and TensorStore raise many kinds of errors when files vanish
    problem = e
  exists = checkpoint.path.exists()
  if problem is not None and exists:
    if isinstance(problem, UserError):
      raise problem
    raise CheckpointError(
      f'{checkpoint.path} cannot be read: {type(problem).__name__}: {first_line(problem)[:200]}',
      fix='Skip it: list the steps to evaluate as --steps=1000,2000.',
      parameters=('MODEL_DIR',),
    ) from problem
  whole = all(distributed.gather_json(problem is None))
  return params if whole else None
