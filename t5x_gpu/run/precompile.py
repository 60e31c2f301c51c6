"""`--precompile`: compiles the programs of a run into the cache, for later runs."""

import dataclasses
import time
from typing import Optional

from t5x_gpu.analysis.fp8_use import fp8_lines
from t5x_gpu.errors import ConfigError
from t5x_gpu.run.check import CheckedRun
from t5x_gpu.runtime.xla import flags as xla_flags
from t5x_gpu.runtime.xla import program_cache
from t5x_gpu.runtime.xla.compile_errors import compile_errors
from t5x_gpu.training.program import compile_options


def check_cache() -> None:
  """Raises ConfigError if there is no folder for compiled programs."""
  if program_cache.folder() is None:
    raise ConfigError(
      '--precompile needs a folder for compiled programs, and there is none: on CPU it is off '
      'unless you set it.',
      fix='Set the environment variable JAX_COMPILATION_CACHE_DIR to a folder, and leave '
      'JAX_ENABLE_COMPILATION_CACHE unset.',
      docs='performance.md#start',
    )


def precompile(plan: CheckedRun, *, xla: Optional[xla_flags.Applied]) -> str:
  """Compiles initialization, training step and evaluation; returns a summary for the log.

  Args:
    plan: the checked run.
    xla: settings to compile with, the same as the run's.
  Raises:
    OutOfMemoryError: the compiled step does not fit.
    ModelError: as `compile_errors` and `fp8_lines`.
  """
  program, done = plan.program, []

  def compiled(what: str, lowered: object, **options: object) -> object:
    started = time.monotonic()
    with compile_errors(program.layout.mesh.devices.flat[0].device_kind):
      result = lowered.compile(**options)
    done.append(f'  {what}: {time.monotonic() - started:.1f} s')
    return result

  compiled('initialization', program.init.lower())
  step = compiled(
    'training step',
    program.train_step.lower(program.abstract_state, program.abstract_batch),
    compiler_options=compile_options(program, xla),
  )
  memory = plan.memory.compiled(step)
  precision = fp8_lines(step, plan.run.model, program.layout.mesh)
  dataset = plan.run.train_eval_dataset_cfg
  if dataset is not None:
    spec = plan.run.model.batch_spec(
      dataset.task_feature_lengths, batch_size=dataset.batch_size, pack=dataset.pack
    )
    batch = dataclasses.replace(program, spec=spec).abstract_batch
    compiled('evaluation', program.eval_step.lower(program.abstract_state.params, batch))
  lines = ['Compiled, without training:', *done, memory.line(), program_cache.line(), *precision]
  return '\n'.join(lines)
