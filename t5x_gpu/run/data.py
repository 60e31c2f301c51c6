"""`open_data`: a run's training data at the position where it continues, and its evaluations.

`resume_data` moves the data to the position in a checkpoint. `Evaluations` holds the evaluations of
a run, each with its own period.
"""

import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Optional

import numpy as np

from t5x_gpu.checkpoint.checkpointer import saved_data
from t5x_gpu.checkpoint.manifest import Manifest, make_manifest, sealed
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.checkpoint.run_files import write_predictions
from t5x_gpu.data.batches import BatchIterator, DatasetConfig, batch_hash, optional_method
from t5x_gpu.data.data_module import (
  Vocabulary,
  batches_for,
  module_of,
  open_task_names,
  open_vocabulary,
)
from t5x_gpu.data.same_data import check_next_batch, data_line
from t5x_gpu.data.same_on_hosts import check_same_on_hosts
from t5x_gpu.data.sources.source_files import NAME, NOT_COMPARED, FileWatch, SourceFiles
from t5x_gpu.errors import ConfigError, DataError, NoExamplesError, UserError, first_line, listed
from t5x_gpu.evaluation.evaluator import (
  LOSS,
  Evaluator,
  TaskEvaluator,
  check_eval_batch,
  class_names_of,
  dummy_sums,
  open_task_evaluator,
  values_of,
)
from t5x_gpu.metrics.writers import check_names
from t5x_gpu.models.decoding import check_sample, check_writes_text
from t5x_gpu.run.check import PlannedRun
from t5x_gpu.run.config import Run
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.main_log import log
from t5x_gpu.storage.files import check_not_refused
from t5x_gpu.storage.json_schema import read_bytes
from t5x_gpu.storage.paths import AnyPath, as_path
from t5x_gpu.terminal.progress import Show, silent
from t5x_gpu.training.program import Program
from t5x_gpu.training.state import TrainState

_log = logging.getLogger(__name__)
_LISTED = 5


@dataclasses.dataclass(frozen=True)
class RunData:
  """The open data of a run.

  Attributes:
    batches: training batches, starting with the batch of the next step.
    source_files: the files that `batches` and `evaluations` read.
    watch: detects changes of the files that `batches` reads.
    evaluations: the run's evaluations, with their data.
  """

  batches: BatchIterator
  source_files: SourceFiles
  watch: FileWatch
  evaluations: 'Evaluations'

  def check_same_on_hosts(self) -> None:
    """Raises DataError, on all processes, if hosts read different data.

    All processes must call it, from the thread that runs their collectives.
    """
    self.evaluations.check_same_on_hosts(self.batches)


def open_data(plan: PlannedRun) -> RunData:
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
  ranked = [keep] if keep.best else []
  if run.early_stopping is not None:
    ranked.append(run.early_stopping.keep)
  needs_loss = any(k.metric.startswith(LOSS) for k in ranked)
  batches = batches_for(run.model, run.train_dataset_cfg, repeat=True)
  log(data_line(batches.describe(), process_count=distributed.process_count()))
  watch = open_watch(batches)
  source_files = open_sources(batches, as_path(plan.source), resumed=plan.continues_data)
  if plan.continues_data:
    resume_data(batches, data_state=saved.data_state, manifest=saved.manifest)
  if plan.saved is None or plan.saved.step < run.total_steps:
    _rehearse_save(plan, batches)
  evaluations = open_evaluations(run, program, loss_required=needs_loss)
  for rule in ranked or [keep]:  # without a ranking, this checks the names of the metrics
    evaluations.rehearse(rule)
  for files in evaluations.source_files():
    source_files.add_evaluation(files)
  if plan.continues_data:
    warn_of_other_evaluation(source_files, as_path(plan.source))
  return RunData(batches, source_files, watch, evaluations)


def open_sources(data: BatchIterator, folder: AnyPath, *, resumed: bool) -> SourceFiles:
  """Returns the files that `data` reads; empty on all processes but 0, and for data without files.

  Args:
    data: data of the run.
    folder: MODEL_DIR, or the checkpoint of another run that this run continues.
    resumed: compare the files with the record in `folder`.
  Raises:
    DataError: a file has changed since the record was written, or cannot be read.
    AccessError: the record cannot be opened.
  """
  read_files = optional_method(data, 'source_files')
  if read_files is None or not distributed.is_main_process():
    return SourceFiles({})
  files = read_files()
  if resumed:
    check_sources(files, folder)
  return files


def warn_of_other_evaluation(files: SourceFiles, folder: AnyPath) -> None:
  """Warns if the text of evaluations has changed since the record in `folder` was written."""
  try:
    changed = files.changed_evaluation(read_bytes(_record_in(folder))) if files.files else []
  except (OSError, ValueError):  # `check_sources` reports it
    return
  if changed:
    _warn_of_changed_evaluation('since the last start of this run', changed)


def _warn_of_changed_evaluation(when: str, changed: list[str]) -> None:
  _log.warning(
    'The evaluation text has changed %s:%s\nMetrics before and after the change are of different '
    'texts; keep_best and EarlyStopping compare them anyway. For one curve, restore the '
    'original files and start again from a checkpoint before the change.',
    when,
    ''.join(f'\n  {line}' for line in listed(changed, _LISTED)),
  )


def open_watch(data: BatchIterator) -> FileWatch:
  """Returns a watch for changes of the files of `data`; it watches no file except on process 0."""
  files = optional_method(data, 'watched_files')
  return FileWatch(files() if files is not None and distributed.is_main_process() else ())


def check_sources(files: SourceFiles, folder: AnyPath) -> None:
  """Checks that `files` have not changed since the record in `folder`, if it has a good one.

  Raises:
    DataError: a file has changed.
    AccessError: the record cannot be opened.
  """
  if not files.files:
    return
  path = _record_in(folder)
  try:
    files.check(read_bytes(path), where=str(path))
  except FileNotFoundError:
    _log.warning('%s does not exist. %s This run writes a new one.', path, NOT_COMPARED)
  except (OSError, ValueError) as e:
    check_not_refused(e, path)
    reason = e.strerror if isinstance(e, OSError) else e
    _log.warning('%s cannot be read: %s. %s', path, reason, NOT_COMPARED)


def _record_in(folder: AnyPath) -> AnyPath:
  return (folder.parent if (folder / 'manifest').is_dir() else folder) / NAME


def resume_data(data: BatchIterator, *, data_state: bytes, manifest: Manifest) -> None:
  """Moves the data to the position in a checkpoint; raises DataError if the data differ."""
  data.set_state(data_state)
  if not manifest['next_batch_hash']:  # unknown: a source file had changed at the time of the save
    return
  check_next_batch(
    saved_hash=manifest['next_batch_hash'],
    hash_now=batch_hash(data.peek()),
    saved=manifest['data'],
    now=data.describe(),
  )


def _rehearse_save(plan: PlannedRun, batches: BatchIterator) -> None:
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


class Evaluations:
  """The evaluations of a run: some are due after some steps, all after the last step.

  Args:
    run: the run's settings.
    program: the run's program.
    loss: evaluates the loss, every `run.eval_period` steps; None for no such evaluation.
    each_task: evaluators of the loss of each task, by its name, for `run.eval_each_task`.
    tasks: evaluates tasks, every `run.infer_eval_period` steps; None for no such evaluation.
  Attributes:
    evaluated: number of rows in the last evaluation, '18 rows'.
  """

  def __init__(
    self,
    run: Run,
    program: Program,
    *,
    loss: Optional[Evaluator],
    each_task: Mapping[str, Evaluator],
    tasks: Optional[TaskEvaluator],
  ):
    self._run, self._program = run, program
    self._loss, self._each_task, self._tasks = loss, each_task, tasks
    self._watch = open_watch(loss.batches) if loss else FileWatch()
    self.evaluated = ''

  @property
  def confusion(self) -> Optional[np.ndarray]:
    """The [true class, predicted class] counts of the last evaluation, if the model classifies."""
    return self._loss and self._loss.confusion

  def source_files(self) -> list[SourceFiles]:
    """Returns the files that the evaluations read; [] except on process 0."""
    found: list[SourceFiles] = []
    for reader in (self._loss and self._loss.batches, *(self._tasks.tasks if self._tasks else ())):
      if not distributed.is_main_process():
        break
      read_files = optional_method(reader, 'source_files')
      paths = optional_method(reader, 'watched_files')
      if read_files is not None:
        found.append(read_files())
      elif paths is not None:
        local = [path for path in map(os.fspath, paths()) if os.path.isfile(path)]
        found.append(SourceFiles({'rows': local}))
    return found

  def check_same_on_hosts(self, training: BatchIterator) -> None:
    """Raises DataError, on all processes, unless all read the same data, `training` included."""
    check_same_on_hosts(
      {
        'training': training,
        'evaluation': self._loss and self._loss.batches,
        **{f'evaluation of {name}': each.batches for name, each in self._each_task.items()},
      },
      self._tasks.tasks if self._tasks else (),
    )

  def rehearse(self, keep: Keep) -> None:
    """Rehearses, with dummy numbers, what evaluations and the end of the run do with their results.

    Args:
      keep: compares a metric.
    Raises:
      ConfigError, DataError: a metric fails; `keep` has an unknown metric.
    """
    values: dict[str, float] = {}
    model = self._run.model
    in_classes = model.classifies or model.tags
    if self._loss is not None and (in_classes or keep.best and keep.metric.startswith(LOSS)):
      sums = dummy_sums(self._program)
      for prefix in (LOSS, *(f'{LOSS}{name}/' for name in self._each_task)):
        values |= values_of(sums, prefix=prefix)
    if self._tasks is not None:
      values |= self._tasks.rehearse()
    check_names(values)
    keep.value_of(values)

  def class_names(self) -> tuple[str, ...]:
    """Returns the class names of the training data; () if it has none."""
    return class_names_of(self._run.model, self._run.train_dataset_cfg)

  def _loss_is_due(self, step: int) -> bool:
    return self._loss is not None and self._is_due(step, self._run.eval_period)

  def _tasks_are_due(self, step: int) -> bool:
    return self._tasks is not None and self._is_due(step, self._run.infer_eval_period)

  def _is_due(self, step: int, period: Optional[int]) -> bool:
    return step == self._run.total_steps or bool(period) and step % period == 0

  def due(self, step: int) -> bool:
    """Returns whether any evaluation follows `step`."""
    return self._loss_is_due(step) or self._tasks_are_due(step)

  def run(
    self,
    step: int,
    state: TrainState,
    *,
    folder: pathlib.Path,
    all_parts: bool = False,
    rest: bool = False,
    show: Show = silent,
  ) -> Mapping[str, float]:
    """Returns the metrics that are due after `step`; {} if none is.

    Args:
      step, state: number of steps done, and the state.
      folder: folder of the run's files, for `Run.num_predictions`.
      all_parts: run every evaluation, due or not.
      rest: run the evaluations that are not due instead, after the due ones: the run ends early.
      show: shows the progress.
    """
    loss = self._loss is not None and (all_parts or self._loss_is_due(step) != rest)
    tasks = self._tasks is not None and (all_parts or self._tasks_are_due(step) != rest)
    values: dict[str, float] = {}
    sizes = [self.evaluated] if rest else []
    if loss:
      values |= self._loss.run(state.params, show=show)
      sizes.append(f'{self._loss.num_rows:,} rows')
      for name, each in self._each_task.items():
        values |= each.run(state.params, task=name, show=show)
        sizes.append(f'{name} {each.num_rows:,} rows')
      self._report_changed_text(step)
    if tasks:
      sizes += [f'{task.name} {len(task.targets):,} examples' for task in self._tasks.tasks]
      values |= self._tasks.run(self._program.in_saved_form(state).params, show=show)
      self._write_predictions(folder, step)
    self.evaluated = ', '.join(sizes)
    return values

  def _report_changed_text(self, step: int) -> None:
    """Warns, once per change, if the text of the loss has changed since its last evaluation."""
    last = self._watch.unchanged_at
    if changed := self._watch.look(step, now=True):
      when = f'after the evaluation of step {last}' if last >= 0 else 'since this run started'
      _warn_of_changed_evaluation(
        f'{when}. From step {step} on, metrics are of the new text', changed
      )
      self._watch = open_watch(self._loss.batches)
      self._watch.unchanged_at = step

  def _write_predictions(self, folder: pathlib.Path, step: int) -> None:
    number = self._run.num_predictions
    if number == 0 or not distributed.is_main_process():
      return
    for task, outputs in zip(self._tasks.tasks, self._tasks.outputs, strict=True):
      texts = getattr(task, 'texts', None)  # optional
      if texts is None:
        _log.warning('%s: no predictions are written: the task has no `texts` method.', task.name)
        continue
      try:
        write_predictions(folder, step, task.name, texts(outputs, number))
      except Exception as e:  # a custom task may raise anything; the other processes would wait
        _log.warning('%s: the predictions cannot be written: %s', task.name, first_line(e))


def open_evaluations(run: Run, program: Program, *, loss_required: bool = False) -> Evaluations:
  """Returns the evaluations of a training run; opens their data.

  Args:
    run: the run's settings.
    program: the run's program.
    loss_required: whether something needs the loss. Otherwise, and without `run.eval_period`, an
      empty split is not an error: the run trains without this evaluation.
  Raises:
    ConfigError, DataError: batches that the mesh cannot split; see also `open_batches` and
      `open_task_evaluator`.
  """
  loss, each_task, tasks = None, {}, None
  if run.train_eval_dataset_cfg is not None:
    check_eval_batch(run.train_eval_dataset_cfg.batch_size, program)
    required = run.eval_period is not None or loss_required
    loss = _open_loss(run, run.train_eval_dataset_cfg, program, required=required)
    if run.eval_each_task:
      each_task = _open_each_task(run, program)
  if run.infer_eval_dataset_cfg is not None:
    tasks = open_task_evaluator(
      program,
      run.infer_eval_dataset_cfg,
      train_lengths=run.train_dataset_cfg.task_feature_lengths,
      decoding=run.decoding_cfg,
    )
  return Evaluations(run, program, loss=loss, each_task=each_task, tasks=tasks)


def _open_each_task(run: Run, program: Program) -> dict[str, Evaluator]:
  """Returns an evaluator of the loss for each task of a mixture with examples; {} for one task."""
  dataset = run.train_eval_dataset_cfg
  names = open_task_names(dataset)
  found = {}
  for name in names if len(names) > 1 else ():
    one = dataclasses.replace(dataset, mixture_or_task_name=name)
    if (loss := _open_loss(run, one, program, required=False)) is not None:
      found[name] = loss
  return found


def _open_loss(
  run: Run, dataset: DatasetConfig, program: Program, *, required: bool
) -> Optional[Evaluator]:
  """Returns the evaluator of the loss; None, with a warning, if its data has no example."""
  try:
    batches = batches_for(run.model, dataset, repeat=False)
    return Evaluator(program, batches, run.eval_steps)
  except NoExamplesError as e:
    if required:
      raise
    _log.warning('Not evaluated: %s', e.what)
    return None


def vocabulary_of(run: Run) -> Vocabulary:
  """Returns the vocabulary of the training data."""
  dataset = run.train_dataset_cfg
  return open_vocabulary(
    dataset, feature_converter=run.model.feature_converter(dataset.task_feature_lengths)
  )


def text_vocabulary_of(run: Run) -> Optional[Vocabulary]:
  """Returns the vocabulary of the training data; None if batches have no text."""
  try:
    return vocabulary_of(run)
  except ConfigError:
    return None


def row_length(program: Program) -> int:
  """Returns the number of positions in a row of a batch."""
  return next(iter(program.spec.shapes.values()))[1]
