"""`finish`: the sample, the report and the closing text of a run that has taken all its steps.

`export_line` warns at the start if the finished model cannot be exported.
"""

import inspect
import logging
import math
import shlex
from collections.abc import Sequence

import numpy as np

from t5x_gpu.checkpoint.run_files import append_sample
from t5x_gpu.conversion.to_hf import export_problem
from t5x_gpu.conversion.tokenizer import tokenizer_problem
from t5x_gpu.data.data_module import zero_is_padding
from t5x_gpu.errors import first_line
from t5x_gpu.metrics import scores
from t5x_gpu.models.inference.generation import sample
from t5x_gpu.reporting.report_page import REPORT, report_page
from t5x_gpu.reporting.run_record import read_run
from t5x_gpu.run.config import Run
from t5x_gpu.run.data import row_length, vocabulary_of
from t5x_gpu.run.live import LiveRun
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.main_log import log
from t5x_gpu.runtime.watchdog import Watchdog
from t5x_gpu.storage.files import write_atomically
from t5x_gpu.training.schedules import with_total_steps
from t5x_gpu.training.state import TrainState

_log = logging.getLogger(__name__)


def export_line(run: Run) -> str:
  """Returns what keeps the model or its tokenizer from being exported to Hugging Face, or ''."""
  if problem := export_problem(run.model):
    return f'export: not possible to Hugging Face (docs/convert.md#families): {problem.what}'
  if reason := tokenizer_problem(run.train_dataset_cfg.vocabulary):
    return f'export: without a tokenizer.json (docs/convert.md#text): {reason}'
  return ''


def finish(live: LiveRun, state: TrainState, step: int, watchdog: Watchdog) -> None:
  """Prints a sample if the run asks for one, then its results and where they are.

  Args:
    live: the run.
    state: the state after `step`, the last one.
    watchdog: its deadline covers the sample.
  """
  if live.plan.run.sample_cfg is not None:
    with watchdog.phase('eval'):
      log(_sample_text(live, state, step))
  if distributed.is_main_process():
    log(_closing_text(live, step))


def _sample_text(live: LiveRun, state: TrainState, step: int) -> str:
  run, program = live.plan.run, live.plan.program
  config, vocabulary = run.sample_cfg, vocabulary_of(run)
  ids = sample(
    run.model,
    program.in_saved_form(state).params,
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
      step,
      prompt=config.prompt,
      temperature=config.temperature,
      text=text,
    )
  return f'Sample (temperature {config.temperature}, prompt {config.prompt!r}):\n{text}\n'


def _closing_text(live: LiveRun, step: int) -> str:
  run, files = live.plan.run, live.checkpointer.files
  written, tables = _write_results(live)
  text = closing_text(
    [*written, *run.logging_cfg.files, 'config.gin', 'config_origins.txt'],
    shown=str(files.model_dir),
    step=step,
    rates=_rates(live, step),
    is_early=step < run.total_steps,
    can_export=export_problem(run.model) is None,
    own_code=_has_own_code(run),
  )
  files.push()
  return tables + text


def _rates(live: LiveRun, step: int) -> tuple[float, float]:
  """Returns the learning rate of `step`, and of the next one in a run of twice as many steps.

  The second is the first if it is unknown.
  """
  schedule, factor = live.plan.run.learning_rate, live.plan.program.learning_rate_factor
  rate = factor * float(schedule(step - 1))
  longer = with_total_steps(schedule, 2 * step)
  return rate, rate if longer is None else factor * float(longer(step))


def _has_own_code(run: Run) -> bool:
  """Returns whether the model, its layer or the data come from modules outside t5x_gpu."""
  data = run.train_dataset_cfg
  classes = [type(run.model), *filter(inspect.isclass, vars(run.model).values())]
  modules = [*(c.__module__ for c in classes), data.module, *data.task_modules]
  return any(name and not name.startswith('t5x_gpu.') for name in modules)


def _write_results(live: LiveRun) -> tuple[list[str], str]:
  """Writes the confusion matrix and the report; returns their names, and the matrix as a table."""
  files, evaluations = live.checkpointer.files, live.data.evaluations
  written, table = [], ''
  if (confusion := evaluations.confusion) is not None:
    names = scores.all_names(evaluations.class_names(), len(confusion))
    scores.write_confusion_csv(confusion, names, files.folder / 'confusion.csv')
    written.append('confusion.csv')
    table = scores.confusion_table(confusion, names) + '\n'
  files.push()  # a report reads MODEL_DIR
  try:
    page = report_page([read_run(str(files.model_dir))])
    write_atomically(files.folder / REPORT, page)
    written.insert(0, REPORT)
  except Exception as e:  # the run itself is complete
    _log.warning('No report: %s', first_line(e))
  return written, table


def closing_text(
  files: Sequence[str],
  *,
  shown: str,
  step: int,
  rates: tuple[float, float],
  is_early: bool = False,
  can_export: bool = True,
  own_code: bool = False,
) -> str:
  """Returns a text for the end of the run.

  Args:
    files: files that the run wrote.
    shown: MODEL_DIR as the user wrote it.
    step: number of training steps done.
    rates: learning rate of the last step, and of the next step in a run of twice as many steps.
    is_early: whether the run has stopped before its last step.
    can_export: whether `convert` can write the model for Hugging Face.
    own_code: whether model or data are the user's code, which `infer` runs only if trusted.
  """
  where, trust = shlex.quote(shown), ' --trust_gin' if own_code else ''
  curves = f'  curves       tensorboard --logdir {where}/tensorboard\n'
  convert = (
    f'  convert      python -m t5x_gpu.convert --from={where} --to=FOLDER   (Hugging Face)\n'
  )
  return (
    f'Done at step {step}. In {shown}: {", ".join(files)}\n'
    'Next:\n'
    f'  report       python -m t5x_gpu.report {where}\n'
    f'{curves if "tensorboard/" in files else ""}'
    f'  infer        python -m t5x_gpu.infer --checkpoint={where}{trust} --prompts=prompts.txt\n'
    f'{convert if can_export else ""}'
    f'{_AFTER_EARLY_STOP if is_early else _how_to_continue(step, *rates)}'
    f'  who set it   grep BATCH_SIZE {where}/config_origins.txt'
  )


_AFTER_EARLY_STOP = '  continue     the same command with a larger --gin.EarlyStopping.patience\n'


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
