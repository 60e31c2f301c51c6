"""Evaluates on held-out data: loss, scores of classes, metrics of tasks."""

import dataclasses
import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Optional

import numpy as np

from t5x_gpu.data.batches import Batch, BatchIterator, DatasetConfig
from t5x_gpu.data.data_module import (
  EvaluatedTask,
  ModelOutputs,
  open_class_names,
  open_evaluated_tasks,
)
from t5x_gpu.errors import ConfigError, DataError
from t5x_gpu.metrics import reduce
from t5x_gpu.metrics.scores import class_scores, hit_scores, pair_scores
from t5x_gpu.models.decoding import DecodingConfig, reads_inputs
from t5x_gpu.models.inference.generation import Generator
from t5x_gpu.models.model import Model, Params, writes_text
from t5x_gpu.runtime import distributed
from t5x_gpu.terminal.progress import Show, Total, silent
from t5x_gpu.training.program import Program

_log = logging.getLogger(__name__)
LOSS, TASKS = 'eval/', 'infer_eval/'


class Evaluator:
  """The mean loss over the same batches each time.

  Args:
    program: program with the eval step.
    batches: batches opened without repeat. All processes have the same number; the last batch is
      padded with rows of weight 0.
    num_batches: maximum number of batches; None for all.
  Attributes:
    batches: as given.
    confusion: [true class, predicted class] of the last evaluation, if the model classifies.
    num_rows: number of rows of the last evaluation, without padding rows.
  """

  def __init__(self, program: Program, batches: BatchIterator, num_batches: Optional[int]):
    self._program = program
    self.batches = batches
    self._num_batches = num_batches
    self._start = batches.get_state()
    batches.set_state(self._start)  # so that errors appear now, not at the first evaluation
    self._is_at_start = True
    self.confusion: Optional[np.ndarray] = None
    self.num_rows = 0

  def sums(
    self, params: Params, *, title: str = 'eval', show: Show = silent, total: Total = None
  ) -> reduce.Sums:
    """Returns the sums over all batches.

    Args:
      params: parameters in the form of the run (`Program.params_in_run_form`).
      title: title of the progress bar.
      show: shows the progress.
      total: number of batches, for the bar; None for `num_batches`.
    """
    if not self._is_at_start:
      self.batches.set_state(self._start)
    self._is_at_start = False
    sums, number, batch = reduce.Accumulator(), 0, {}
    with show(title, total or self._num_batches) as advance:
      for batch in itertools.islice(self.batches, self._num_batches):
        sums.add(self._program.eval_step(params, self._program.layout.put_batch(batch)))
        number += 1
        advance(1)
      self.num_rows = _num_rows(number, last=batch)
      return sums.sums()

  def run(self, params: Params, *, task: str = '', show: Show = silent) -> dict[str, float]:
    """Returns eval/loss, eval/accuracy, ...; for a classifier also eval/macro_f1, ...

    With the name of a `task`, the metrics are eval/TASK/loss, ...
    """
    prefix = f'{LOSS}{task}/' if task else LOSS
    sums = self.sums(params, title=prefix.rstrip('/'), show=show)
    self.confusion = confusion_of(sums)
    return values_of(sums, prefix=prefix)


def _num_rows(num_batches: int, *, last: Batch) -> int:
  """Returns the number of rows in batches of equal size, without zero rows of the last batch."""
  if not num_batches:
    return 0
  arrays = [np.asarray(x) for x in last.values()]
  is_row = np.any([x.reshape(len(x), -1).any(1) for x in arrays], axis=0)
  return (num_batches - 1) * len(is_row) + int(is_row.sum())


def confusion_of(sums: reduce.Sums) -> Optional[np.ndarray]:
  """Returns [true class, predicted class] from the sums of an evaluation; None without classes."""
  return sums[reduce.COUNTS][0] if reduce.COUNTS in sums else None


def hits_of(sums: reduce.Sums) -> Optional[np.ndarray]:
  """Returns [class, (right, predicted, true)] of several labels or entities; None without them."""
  return sums[reduce.HITS][0] if reduce.HITS in sums else None


def class_names_of(model: Model, dataset: DatasetConfig) -> tuple[str, ...]:
  """Returns the class names of the model, or else of the data; () if neither has names."""
  return tuple(model.class_names) or open_class_names(dataset) or ()


def values_of(sums: reduce.Sums, *, prefix: str) -> dict[str, float]:
  """Returns the metrics by name; leaves out metrics without target tokens, with a warning."""
  means = reduce.means(sums, prefix=prefix)
  if means.empty:
    _log.warning('The evaluation has no target tokens for %s.', ', '.join(means.empty))
  values, confusion = dict(means.values), confusion_of(sums)
  if confusion is not None:
    values |= class_scores(confusion, prefix=prefix)
  if (hits := hits_of(sums)) is not None:
    values |= hit_scores(hits, prefix=prefix)
  if reduce.PAIRS in sums:
    values |= pair_scores(sums[reduce.PAIRS][0], prefix=prefix)
  return values


def dummy_sums(program: Program) -> reduce.Sums:
  """Returns dummy values in the form of `Evaluator.sums`, without running the model."""
  sums = program.eval_step.lower(program.abstract_state.params, program.abstract_batch).out_info
  return {name: (_distinct(total.shape), 1.0) for name, (total, _) in sums.items()}


def _distinct(shape: tuple[int, ...]) -> np.ndarray:
  """Returns 1, 2, 3, ..., because correlations of equal numbers are undefined."""
  return np.arange(1.0, 1.0 + math.prod(shape)).reshape(shape)


# Maximum number of examples for the rehearsal of metrics before the first step.
_REHEARSED = 200


class TaskEvaluator:
  """The metrics of tasks, from generated texts and from scores of the targets.

  Every process computes its rows of each batch and gets all results.

  Args:
    program: program of the model to evaluate.
    tasks: tasks with metrics.
    config: how to decode predictions.
  Attributes:
    tasks: as given.
    outputs: the outputs of the last `run`, one per task.
  Raises:
    DataError: an example lacks inputs that predictions need, or does not fit the model.
  """

  def __init__(self, program: Program, tasks: Sequence[EvaluatedTask], config: DecodingConfig):
    model = program.config.model
    stops = sorted({*config.stop_tokens, *(t.eos_id for t in tasks if t.eos_id is not None)})
    zero_is_a_word = any(task.zero_is_a_word for task in tasks)
    self._generator = Generator(
      model,
      None,
      layout=program.layout,
      config=dataclasses.replace(
        config,
        stop_tokens=tuple(stops),
        zero_is_padding=config.zero_is_padding and not zero_is_a_word,
      ),
    )
    self.tasks = tasks
    self.outputs: list[ModelOutputs] = []
    for task in tasks:
      _check_inputs(task, reads_inputs(model))
      for number, (inputs, targets) in enumerate(zip(task.inputs, task.targets)):
        where = f'Example {number} of {task.name}'
        if task.needs_predictions:
          self._generator.check_prompt(len(inputs), where=where)
        if task.needs_scores:
          self._generator.check_prompt(len(inputs), where=where, targets=len(targets))

  def run(self, params: Params, *, show: Show = silent) -> dict[str, float]:
    """Returns infer_eval/TASK/METRIC of `params`, whose layers are in model order.

    Each process computes the metrics, and all return the values of process 0: a metric with
    randomness has other values on each process, which must not decide differently.

    Raises:
      DataError: a metric fails on any process; raised on all processes.
    """
    generator = self._generator.with_params(params)
    self.outputs = []

    def metrics(task: EvaluatedTask) -> dict[str, float]:
      self.outputs.append(_outputs(generator, task, show))
      with distributed.errors_together():
        found = task.metrics(self.outputs[-1])
        values = {name: float(value) for name, value in found.items()}  # NumPy's are not JSON
      return distributed.broadcast_json(values)

    return _named((task, metrics(task)) for task in self.tasks)

  def rehearse(self) -> dict[str, float]:
    """Returns the metrics of each task's first examples, with their targets as predictions.

    Raises:
      DataError: a metric or a postprocessor of a task fails on its own targets.
    """
    return _named((task, _metrics_of_targets(task)) for task in self.tasks)


def _named(found: Iterable[tuple[EvaluatedTask, Mapping[str, float]]]) -> dict[str, float]:
  return {
    f'{TASKS}{task.name}/{name}': value for task, values in found for name, value in values.items()
  }


def _metrics_of_targets(task: EvaluatedTask) -> dict[str, float]:
  first = getattr(task, 'first', None)
  if first is not None and len(task.targets) > _REHEARSED:
    try:
      return _metrics_of_targets(first(_REHEARSED))
    except DataError:
      pass  # the reason may be that there are only few examples
  zeros = [0.0] * len(task.targets)
  return task.metrics(ModelOutputs(task.targets, zeros, zeros))


def _outputs(generator: Generator, task: EvaluatedTask, show: Show) -> ModelOutputs:
  best, scores = [], []
  if task.needs_predictions:
    with show(f'{TASKS}{task.name} predictions', len(task.inputs)) as advance:
      best = [texts[0] for texts in generator.generate(task.inputs, advance=advance)]
  if task.needs_scores:
    with show(f'{TASKS}{task.name} scores', len(task.inputs)) as advance:
      scores = generator.score(task.inputs, task.targets, advance=advance)
  return ModelOutputs([text.tokens for text in best], [text.score for text in best], scores)


def _check_inputs(task: EvaluatedTask, has_encoder: bool) -> None:
  if (task.needs_predictions or has_encoder) and not all(task.inputs):
    raise DataError(
      f"{task.name!r} needs generated predictions, but its examples have no 'inputs'.",
      fix="Use a task with the features 'inputs' and 'targets', or metrics of scores.",
      parameters=('train.infer_eval_dataset_cfg',),
    )


def open_task_evaluator(
  program: Program,
  dataset: DatasetConfig,
  *,
  train_lengths: Mapping[str, int],
  decoding: Optional[DecodingConfig] = None,
  num_examples: Optional[int] = None,
  required: bool = True,
) -> Optional[TaskEvaluator]:
  """Returns the evaluator of the metrics of a task, or of all tasks of a mixture.

  Args:
    program: program of the model to evaluate.
    dataset: task or mixture, its split, and the lengths that inputs and targets are cut to; None
      for whole examples.
    train_lengths: the lengths of the training data, whose features tell how the model reads
      examples if `dataset` has no lengths.
    decoding: how to decode predictions; None for greedy decoding up to the length of the targets,
      or of the longest target.
    num_examples: take only this many examples of each task; None for all.
    required: whether a task without metrics, or a model that cannot generate text, is an error;
      otherwise returns None for them.
  Raises:
    ConfigError: the model does not generate text.
    DataError: the task has no metrics, the split does not exist, or has no example.
  """
  model = program.config.model
  if not writes_text(model):
    if not required:
      return None
    raise ConfigError(
      f'A {type(model).__name__} does not write text, which task metrics need.',
      fix='Remove train.infer_eval_dataset_cfg (for python -m t5x_gpu.eval: --metrics=loss), or '
      'use a DecoderOnlyModel or an EncoderDecoderModel.',
      parameters=('train.model', 'train.infer_eval_dataset_cfg'),
    )
  lengths = dataset.task_feature_lengths
  tasks = open_evaluated_tasks(
    dataset,
    feature_converter=model.feature_converter(train_lengths if lengths is None else lengths),
    num_examples=num_examples,
    required=required,
  )
  if lengths is None:
    longest = max((len(ids) for task in tasks for ids in task.targets), default=1)
  else:
    longest = lengths.get('targets', 128)
  config = decoding or DecodingConfig(max_decode_length=None, batch_size=dataset.batch_size)
  if config.max_decode_length is None:
    config = dataclasses.replace(config, max_decode_length=longest)
  return TaskEvaluator(program, tasks, config) if tasks else None


def check_eval_batch(batch_size: int, program: Program) -> None:
  """Raises ConfigError if the mesh, or a pipeline, cannot split batches of this size."""
  layout = program.layout
  batch_size = layout.filled_rows(batch_size)
  parts, pipeline = layout.batch_parts, layout.pipeline
  if batch_size % parts:
    what = f'do not divide into the {parts} parts into which the mesh splits a batch.'
  elif pipeline is not None and batch_size // parts < pipeline.least_rows:
    who = (
      'the circular schedule' if pipeline.num_stacks == 1 else 'an encoder-decoder in a pipeline'
    )
    what = (
      f'are too small: {who} of {pipeline.num_stages} stages needs at least '
      f'{pipeline.least_rows} rows in each of the {parts} parts of a batch.'
    )
  else:
    return
  multiple = parts * (1 if pipeline is None else pipeline.least_rows)
  raise ConfigError(
    f'Evaluation batches of {batch_size} {what}',
    fix=f'Set train_eval/DatasetConfig.batch_size to a multiple of {multiple}.',
    parameters=('train_eval/DatasetConfig.batch_size',),
  )
