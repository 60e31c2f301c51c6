"""`finish`: the sample and the closing text of a run that has taken all its steps."""

import numpy as np

from t5x_gpu.checkpoint.convert.to_hf import export_problem
from t5x_gpu.data.prompts import zero_is_padding
from t5x_gpu.evaluation.samples import append_sample
from t5x_gpu.metrics.end_of_run import closing_text
from t5x_gpu.models.inference.generation import sample
from t5x_gpu.models.model import OptionalMembers
from t5x_gpu.run.data import row_length, vocabulary_of
from t5x_gpu.run.live import LiveRun
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.main_log import log
from t5x_gpu.runtime.watchdog import Watchdog
from t5x_gpu.training.schedules import with_total_steps
from t5x_gpu.training.train_state import TrainState


def finish(live: LiveRun, state: TrainState, watchdog: Watchdog) -> None:
  """Prints a sample if the run asks for one, then its results and where they are."""
  if live.plan.run.sample_cfg is not None:
    with watchdog.phase('eval'):
      log(_sample_text(live, state))
  if distributed.is_main_process():
    log(_closing_text(live))


def _sample_text(live: LiveRun, state: TrainState) -> str:
  run, program = live.plan.run, live.plan.program
  config, vocabulary = run.sample_cfg, vocabulary_of(run)
  ids = sample(
    run.model,
    program.in_model_order(state).params,
    np.asarray(vocabulary.encode(config.prompt), np.int32),
    layout=program.layout,
    length=row_length(program),
    num_tokens=config.num_tokens,
    temperature=config.temperature,
    zero_is_padding=zero_is_padding(vocabulary),
  )
  text = vocabulary.decode([int(i) for i in ids])
  if distributed.is_main_process():
    append_sample(live.checkpointer.files.folder, run.total_steps, config, text)
  return f'Sample (temperature {config.temperature}, prompt {config.prompt!r}):\n{text}\n'


def _rates(live: LiveRun, step: int) -> tuple[float, float]:
  """Returns the learning rate of `step`, and of the next one in a run of twice as many steps."""
  schedule, factor = live.plan.run.learning_rate, live.plan.program.learning_rate_factor
  longer = with_total_steps(schedule, 2 * step)
  return factor * float(schedule(step - 1)), factor * float(longer(step))


def _closing_text(live: LiveRun) -> str:
  run, files = live.plan.run, live.checkpointer.files
  evaluations = live.data.evaluations
  confusion = evaluations.confusion
  text = closing_text(
    files.folder,
    shown=str(files.model_dir),
    step=run.total_steps,
    rates=_rates(live, run.total_steps),
    guess_loss=OptionalMembers(run.model).guess_loss,
    confusion=confusion,
    logged=run.logging_cfg.files,
    export_problem=export_problem(run.model),
    class_names=None if confusion is None else evaluations.class_names(),
  )
  files.push()
  return text
