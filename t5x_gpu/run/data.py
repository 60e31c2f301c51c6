"""`open_data`: the training data of a run where it continues, and the data of its evaluations."""

import dataclasses
from typing import Any

from t5x_gpu.checkpoint.start import open_sources, resume_data
from t5x_gpu.checkpoint.storage.paths import as_path
from t5x_gpu.data.batches import BatchIterator
from t5x_gpu.data.data_module import open_vocabulary
from t5x_gpu.data.same_data import data_line
from t5x_gpu.data.sources.source_files import SourceFiles
from t5x_gpu.errors import ConfigError
from t5x_gpu.evaluation.evaluator import LOSS, batches_for, loss_metrics
from t5x_gpu.models.decoding import check_sample, check_writes_text
from t5x_gpu.run.check import CheckedRun
from t5x_gpu.run.config import Run
from t5x_gpu.run.evaluations import Evaluations, open_evaluations
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.main_log import log
from t5x_gpu.training.program import Program


@dataclasses.dataclass(frozen=True)
class RunData:
  """The open data of a run.

  Attributes:
    batches: for training; the next one is that of the next step.
    source_files: the files that `batches` reads.
    evaluations: with their data.
  """

  batches: BatchIterator
  source_files: SourceFiles
  evaluations: Evaluations

  def check_same_on_hosts(self) -> None:
    """Raises DataError, on all processes, if hosts read different data.

    All processes must call it, from the thread that runs their collectives.
    """
    self.evaluations.check_same_on_hosts(self.batches)


def open_data(plan: CheckedRun) -> RunData:
  """Returns the data of a run, checked against its model and its checkpoint.

  Raises:
    ConfigError, DataError: data that cannot be read, does not fit the model, or is not what the
      checkpoint was trained on; a sample that does not fit; an unknown `best_metric`.
  """
  run, program, saved = plan.run, plan.program, plan.saved
  if run.sample_cfg is not None:  # an error now rather than after the last step
    check_writes_text(run.model)
    prompt = vocabulary_of(run).encode(run.sample_cfg.prompt)
    check_sample(len(prompt), num_tokens=run.sample_cfg.num_tokens, length=row_length(program))
  keep = run.checkpoint_cfg.kept
  needs_loss = bool(keep.best) and keep.metric.startswith(LOSS)
  if needs_loss:
    keep.value_of(loss_metrics(program))  # raises for an unknown metric
  batches = batches_for(run.model, run.train_dataset_cfg, repeat=True)
  log(data_line(batches.describe(), process_count=distributed.process_count()))
  program.spec.check(batches.peek())
  source_files = open_sources(batches, as_path(plan.source), resumed=plan.continues_data)
  if plan.continues_data:
    resume_data(batches, data_state=saved.data_state, manifest=saved.manifest)
  return RunData(batches, source_files, open_evaluations(run, program, loss_required=needs_loss))


def vocabulary_of(run: Run) -> Any:
  """Returns the vocabulary of the training data."""
  dataset = run.train_dataset_cfg
  return open_vocabulary(
    dataset, feature_converter=run.model.feature_converter(dataset.task_feature_lengths)
  )


def text_vocabulary_of(run: Run) -> Any:
  """Returns the vocabulary of the training data; None for batches without text."""
  try:
    return vocabulary_of(run)
  except ConfigError:
    return None


def row_length(program: Program) -> int:
  """Returns the number of positions in a row of a batch."""
  return next(iter(program.spec.shapes.values()))[1]
