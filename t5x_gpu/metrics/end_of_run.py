"""The end of a run: its pictures, and a text about its files and what to do next."""

import logging
import os
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
  guess_loss: Optional[float],
  confusion: Optional[np.ndarray],
  class_names: Optional[tuple[str, ...]],
  logged: Sequence[str] = ('metrics.jsonl', 'tensorboard/'),
) -> str:
  """Draws the loss curve and the confusion matrix; returns a text for the end of the run.

  Args:
    folder: of the run; the pictures go there.
    shown: MODEL_DIR as the user wrote it.
    step: number of training steps done.
    guess_loss: loss of guessing, a line in the picture; None for no line.
    confusion: matrix [true class, predicted class]; None if there is none.
    class_names: of the data, which may have fewer than `confusion`; None numbers the classes.
    logged: what the loggers wrote in `folder`.
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
  curves = f'  curves       tensorboard --logdir {shown}/tensorboard\n'
  return (
    f'{table}Done at step {step}. In {shown}: {", ".join(files)}\n'
    'Next:\n'
    f'  continue     the same command with --gin.TRAIN_STEPS={2 * step}\n'
    f'{curves if "tensorboard/" in logged else ""}'
    f'  who set it   grep BATCH_SIZE {shown}/config_origins.txt'
  )


def draw_confusion(
  folder: str | os.PathLike, confusion: np.ndarray, class_names: Sequence[str], *, step: int
) -> tuple[list[str], str]:
  """Writes confusion.csv and, if matplotlib is installed, confusion.png.

  Args:
    folder: of the run.
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
