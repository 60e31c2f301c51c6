"""Which checkpoints to evaluate next, while a run may still write and remove them."""

import time
from collections.abc import Collection, Iterator
from typing import Any, Optional, Union

from t5x_gpu.checkpoint.arrays.params_files import read_params
from t5x_gpu.checkpoint.saved_checkpoint import checkpoint_path, committed_steps
from t5x_gpu.checkpoint.storage.paths import AnyPath
from t5x_gpu.errors import CheckpointError, UserError, first_line
from t5x_gpu.runtime import distributed
from t5x_gpu.training.program import Program

POLL_SECONDS = 2.0  # between two looks at MODEL_DIR
Wanted = Union[str, tuple[int, ...]]  # 'all', 'last' or steps


def steps_to_evaluate(
  folder: AnyPath,
  *,
  wanted: Wanted,
  done: Collection[int],
  last_step: Optional[int],
  timeout: float,
) -> Iterator[int]:
  """Yields the steps to evaluate, oldest first and the same on all processes.

  Args:
    folder: MODEL_DIR.
    wanted: 'all', 'last', or steps.
    done: steps to skip.
    last_step: wait for new checkpoints until this step; None for no waiting.
    timeout: seconds to wait for the next checkpoint.
  """
  done = set(done)
  deadline = time.monotonic() + timeout
  while True:
    step = distributed.broadcast_json(_next(folder, wanted, done, last_step, deadline))
    if step == _END:
      return
    if step == _NOT_YET:
      if distributed.is_main_process():
        time.sleep(POLL_SECONDS)
      continue
    done.add(step)
    yield step
    deadline = time.monotonic() + timeout


_END, _NOT_YET = -1, -2


def _next(
  folder: AnyPath, wanted: Wanted, done: Collection[int], last_step: Optional[int], deadline: float
) -> int:
  steps = committed_steps(folder)
  if wanted == 'last':
    steps = steps[-1:]
  elif wanted != 'all':
    steps = [step for step in steps if step in wanted]
  left = [step for step in steps if step not in done]
  if left:
    return left[0]
  if last_step is None or any(step >= last_step for step in committed_steps(folder)):
    return _END
  return _END if time.monotonic() >= deadline else _NOT_YET


def read_if_there(model_dir: AnyPath, step: int, program: Program) -> Any:
  """Returns the parameters; None, on all processes, if the run has removed the checkpoint.

  Raises:
    CheckpointError: the checkpoint exists and cannot be read.
  """
  params, problem = None, None
  try:
    params = read_params(model_dir, program.abstract_saved.params, step=step)
  except Exception as e:  # Orbax and TensorStore raise many kinds when files vanish
    problem = e
  exists = checkpoint_path(model_dir, step).exists()
  if problem is not None and exists:
    if isinstance(problem, UserError):
      raise problem
    raise CheckpointError(
      f'{checkpoint_path(model_dir, step)} cannot be read: '
      f'{type(problem).__name__}: {first_line(problem)[:200]}',
      fix='Skip it: list the steps to evaluate as --steps=1000,2000.',
      parameters=('MODEL_DIR',),
    ) from problem
  whole = all(distributed.gather_json(problem is None))
  return params if whole else None
