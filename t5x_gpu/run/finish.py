"""`finish`: the sample, the pictures and the closing text of a run that has taken all its steps."""

import logging
import math
import os
import shlex
from collections.abc import Sequence
from typing import Optional

import numpy as np

from t5x_gpu.checkpoint.run_files import append_sample
from t5x_gpu.conversion.to_hf import export_problem
from t5x_gpu.data.data_module import zero_is_padding
from t5x_gpu.errors import first_line
from t5x_gpu.metrics import pictures
from t5x_gpu.metrics.pictures import draw_confusion
from t5x_gpu.models.inference.generation import sample
from t5x_gpu.run.data import row_length, vocabulary_of
from t5x_gpu.run.live import LiveRun
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.main_log import log
from t5x_gpu.runtime.watchdog import Watchdog
from t5x_gpu.training.schedules import with_total_steps
from t5x_gpu.training.state import TrainState

_log = logging.getLogger(__name__)


def closing_text(
  folder: str | os.PathLike,
  *,
  shown: str,
  step: int,
  rates: tuple[float, float],
  guess_loss: Optional[float],
  confusion: Optional[np.ndarray],
  class_names: Optional[tuple[str, ...]],
  logged: Sequence[str] = ('metrics.jsonl', 'tensorboard/'),
  export_problem: str = '',
) -> str:
  """Draws the loss curve and the confusion matrix; returns a text for the end of the run.

  Args:
    folder: folder of the run, to which the pictures are written.
    shown: MODEL_DIR as the user wrote it.
    step: number of training steps done.
    rates: learning rate of the last step, and of the next step in a run of twice as many steps.
    guess_loss: loss of guessing, a line in the picture; None for no line.
    confusion: matrix [true class, predicted class]; None if the model has no classes.
    class_names: class names of the data, which may be fewer than in `confusion`; None to use
      numbers.
    logged: files that the loggers wrote in `folder`.
    export_problem: why the model cannot be exported to Hugging Face; '' if it can.
  """
  files = [*logged, 'config.gin', 'config_origins.txt']
  table = ''
  if confusion is not None:
    files[:0], table = draw_confusion(folder, confusion, class_names or (), step=step)
  try:
    if 'metrics.jsonl' in logged and pictures.plot_losses(
      os.path.join(folder, 'metrics.jsonl'), os.path.join(folder, 'loss.png'), guess_loss=guess_loss
    ):
      files.insert(0, 'loss.png')
  except Exception as e:  # matplotlib is not installed, or fails; the run itself is complete
    _log.warning('No picture of the loss: %s', first_line(e))
  where = shlex.quote(shown)
  curves = f'  curves       tensorboard --logdir {where}/tensorboard\n'
  convert = (
    f'  convert      python -m t5x_gpu.convert --from={where} --to=FOLDER   (Hugging Face)\n'
  )
  return (
    f'{table}Done at step {step}. In {shown}: {", ".join(files)}\n'
    'Next:\n'
    f'  report       python -m t5x_gpu.report {where}\n'
    f'{curves if "tensorboard/" in logged else ""}'
    f'  infer        python -m t5x_gpu.infer --checkpoint={where} --prompts=prompts.txt\n'
    f'{"" if export_problem else convert}'
    f'{_how_to_continue(step, *rates)}'
    f'  who set it   grep BATCH_SIZE {where}/config_origins.txt'
  )


def _how_to_continue(step: int, rate: float, longer_rate: float) -> str:
  text = f'  continue     the same command with --gin.TRAIN_STEPS={2 * step}\n'
  if math.isclose(rate, longer_rate, rel_tol=0.1):
    return text
  constant = rate if rate > 0.01 * longer_rate else longer_rate / 10
  return (
    f'{text}               Its schedule changes the learning rate from {rate:.2g} to '
    f'{longer_rate:.2g}. For a rate of your choice, add:\n'
    "               '--gin.train.learning_rate=@schedules.constant()' "
    f'--gin.constant.learning_rate={constant:.2g}\n'
  )


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
    append_sample(
      live.checkpointer.files.folder,
      run.total_steps,
      prompt=config.prompt,
      temperature=config.temperature,
      text=text,
    )
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
    guess_loss=run.model.guess_loss,
    confusion=confusion,
    logged=run.logging_cfg.files,
    export_problem=export_problem(run.model),
    class_names=None if confusion is None else evaluations.class_names(),
  )
  files.push()
  return text
