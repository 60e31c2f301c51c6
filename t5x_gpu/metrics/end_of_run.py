"""The end of a run: draws its pictures, and describes its files and possible next steps."""

import logging
import math
import os
import shlex
from collections.abc import Sequence
from typing import Optional

import numpy as np

from t5x_gpu.errors import ConfigError, first_line
from t5x_gpu.metrics import classification, plots
from t5x_gpu.metrics.confusion_picture import plot_confusion

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
    if 'metrics.jsonl' in logged and plots.plot_losses(
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


def draw_confusion(
  folder: str | os.PathLike, confusion: np.ndarray, class_names: Sequence[str], *, step: int
) -> tuple[list[str], str]:
  """Writes confusion.csv and, if matplotlib is installed, confusion.png.

  Args:
    folder: folder of the run.
    confusion, class_names, step: as for `closing_text`.
  Returns:
    the names of the files, and a table for the terminal.
  """
  names = classification.all_names(class_names, len(confusion))
  classification.write_csv(confusion, names, os.path.join(folder, 'confusion.csv'))
  files = ['confusion.csv']
  try:
    plot_confusion(
      confusion, names, os.path.join(folder, 'confusion.png'), title=f'Step {step}, validation'
    )
    files.insert(0, 'confusion.png')
  except ConfigError as e:
    _log.warning('No picture of the confusion matrix: %s', e)
  return files, classification.table(confusion, names) + '\n'
