"""`open_data`: a run's training data at the position where it continues, and evaluation data."""

import dataclasses
import json
from typing import Any

from t5x_gpu.checkpoint.base_checkpointer import saved_data
from t5x_gpu.checkpoint.manifest import make_manifest, sealed
from t5x_gpu.checkpoint.start import open_sources, open_watch, resume_data
from t5x_gpu.checkpoint.storage.paths import as_path
from t5x_gpu.data.batches import BatchIterator, batch_hash
from t5x_gpu.data.data_module import module_of, open_vocabulary
from t5x_gpu.data.same_data import data_line
from t5x_gpu.data.sources.source_files import FileWatch, SourceFiles
from t5x_gpu.errors import ConfigError, DataError, UserError, first_line
from t5x_gpu.evaluation.evaluator import LOSS, batches_for
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
    batches: training batches, starting with the batch of the next step.
    source_files: the files that `batches` reads.
    watch: detects changes of these files.
    evaluations: the run's evaluations, with their data.
  """

  batches: BatchIterator
  source_files: SourceFiles
  watch: FileWatch
  evaluations: Evaluations

  def check_same_on_hosts(self) -> None:
    """Raises DataError, on all processes, if hosts read different data.

    All processes must call it, from the thread that runs their collectives.
    """
    self.evaluations.check_same_on_hosts(self.batches)


def open_data(plan: CheckedRun) -> RunData:
  """Returns the data of a run, checked against its model and its checkpoint.

  Raises:
    ConfigError, DataError: the data cannot be read, does not fit the model, or differs from the
      data that the checkpoint was trained on; a sample does not fit; unknown `best_metric`.
  """
  run, program, saved = plan.run, plan.program, plan.saved
  if run.sample_cfg is not None:  # fail now rather than after the last step
    check_writes_text(run.model)
    prompt = vocabulary_of(run).encode(run.sample_cfg.prompt)
    vocabulary_of(run).decode([int(i) for i in prompt])
    check_sample(len(prompt), num_tokens=run.sample_cfg.num_tokens, length=row_length(program))
  keep = run.checkpoint_cfg.kept
  needs_loss = bool(keep.best) and keep.metric.startswith(LOSS)
  batches = batches_for(run.model, run.train_dataset_cfg, repeat=True)
  log(data_line(batches.describe(), process_count=distributed.process_count()))
  watch = open_watch(batches)
  source_files = open_sources(batches, as_path(plan.source), resumed=plan.continues_data)
  if plan.continues_data:
    resume_data(batches, data_state=saved.data_state, manifest=saved.manifest)
  _rehearse_save(plan, batches)
  evaluations = open_evaluations(run, program, loss_required=needs_loss)
  evaluations.rehearse(keep)
  return RunData(batches, source_files, watch, evaluations)


def _rehearse_save(plan: CheckedRun, batches: BatchIterator) -> None:
  """Rehearses, in memory, how a save and a restart handle the data.

  Raises:
    DataError: the state or the description of the data cannot be saved, or restoring the state
      does not give the next batch.
  """
  next_hash = batch_hash(batches.peek())
  try:
    state = batches.get_state()
    data = saved_data(state)
    manifest = make_manifest(
      plan.program.abstract_saved,
      mesh_shape=plan.program.layout.mesh.shape,
      data=batches.describe(),
      next_batch_hash=next_hash,
    )
    json.dumps(sealed(manifest, data=data))
    if not plan.continues_data:  # otherwise the restart has already tested this
      batches.set_state(state)
      found = batch_hash(batches.peek())
      if found != next_hash:
        raise ValueError(f'after set_state(get_state()) the next batch is another one ({found})')
  except UserError:
    raise
  except Exception as e:  # a custom data module may raise anything
    raise DataError(
      f'The position in the data of {module_of(plan.run.train_dataset_cfg)} cannot be saved: '
      f'{type(e).__name__}: {first_line(e)}.',
      fix='get_state() must return bytes from which set_state() continues, and describe() facts '
      'that JSON can hold.',
      parameters=('DatasetConfig.module', 'DatasetConfig.mixture_or_task_name'),
      docs='add_a_data_source.md',
    ) from e


def vocabulary_of(run: Run) -> Any:
  """Returns the vocabulary of the training data."""
  dataset = run.train_dataset_cfg
  return open_vocabulary(
    dataset, feature_converter=run.model.feature_converter(dataset.task_feature_lengths)
  )


def text_vocabulary_of(run: Run) -> Any:
  """Returns the vocabulary of the training data; None if batches have no text."""
  try:
    return vocabulary_of(run)
  except ConfigError:
    return None


def row_length(program: Program) -> int:
  """Returns the number of positions in a row of a batch."""
  return next(iter(program.spec.shapes.values()))[1]
