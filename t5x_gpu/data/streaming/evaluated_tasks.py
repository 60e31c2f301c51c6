"""Tasks with SeqIO's metrics: examples for a model, and the metrics of its outputs.

The metrics are SeqIO's objects, used as in `seqio.Evaluator`: targets are the text before
tokenization if the task keeps it (else decoded), predictions are decoded, both go through the
task's postprocessor, and each metric gets the whole split of one task.
"""

import copy
import dataclasses
import itertools
import logging
import numbers
from collections.abc import Mapping, Sequence
from typing import Optional

import numpy as np

from t5x_gpu.data import prepare_tfds
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.data_module import ModelOutputs
from t5x_gpu.data.sources import seqio_sources
from t5x_gpu.data.sources.source_files import SourceFiles
from t5x_gpu.data.streaming import task_lookup
from t5x_gpu.data.streaming.task_prompts import feature_text
from t5x_gpu.data.tasks import multiple_choice
from t5x_gpu.data.tf_runtime import seqio
from t5x_gpu.data.vocabularies.vocabularies import text_vocabulary
from t5x_gpu.errors import DataError, NoExamplesError, task_error

_log = logging.getLogger(__name__)
_TARGETS, _INPUTS = 'targets', 'inputs'
_Output = seqio.metrics.ModelOutputType


class SeqioEvaluatedTask:
  """A SeqIO task with metrics; see `data_module.EvaluatedTask`.

  Args:
    task: the task to evaluate.
    examples: the examples of its split, as numpy arrays.
    config: the config that the examples were opened with.
  """

  def __init__(
    self, task: seqio.Task, examples: Sequence[task_lookup.Example], config: DatasetConfig
  ):
    self.name = task_lookup.own_name(task.name)
    self._task, self._config = task, config
    self._examples = examples
    kinds = {metric.model_output_type for metric in task.metric_objs}
    self.needs_predictions = bool(kinds & {_Output.PREDICTION, _Output.PREDICTION_WITH_AUX})
    self.needs_scores = _Output.SCORE in kinds
    vocabulary = task.output_features[_TARGETS].vocabulary
    self._targets = text_vocabulary(vocabulary)
    self.eos_id: Optional[int] = self._targets.eos_id
    self.zero_is_a_word = self._targets.zero_is_a_word
    # SeqIO's metrics take texts of equal length; a vocabulary decodes up to the first end.
    has_end = self.zero_is_a_word and self.eos_id is not None
    self._after_text = self.eos_id if has_end else vocabulary.pad_id
    self.inputs = [_ids(example.get(_INPUTS, ())) for example in examples]
    self.targets = [_ids(example[_TARGETS]) for example in examples]
    self._left_out: set[str] = set()

  def first(self, number: int) -> 'SeqioEvaluatedTask':
    """Returns this task with its first examples."""
    found = copy.copy(self)
    found._examples = self._examples[:number]
    found.inputs, found.targets = self.inputs[:number], self.targets[:number]
    return found

  def source_files(self) -> SourceFiles:
    """Returns the current state of the files that the examples come from."""
    paths = task_lookup.source_paths(self._task, self._config, in_memory=True)
    return SourceFiles(paths, stat_remote=seqio_sources.remote_file)

  def metrics(self, outputs: ModelOutputs) -> dict[str, float]:
    """Returns metric -> value. Leaves out values that are not numbers, with one warning each.

    Raises:
      DataError: a metric or postprocessor of the task fails, or two metrics have the same name.
    """
    written = [self._targets.without_padding(ids) for ids in outputs.predictions]
    shape = len(written), max(map(len, written), default=0)
    predictions = np.full(shape, self._after_text, np.int32)
    for row, ids in zip(predictions, written):
      row[: len(ids)] = ids
    by_kind = {
      _Output.PREDICTION: predictions,
      _Output.SCORE: np.asarray(outputs.scores, np.float32),
      _Output.PREDICTION_WITH_AUX: (
        predictions,
        {'scores': np.asarray(outputs.prediction_scores, np.float32)},
      ),
    }
    values: dict[str, float] = {}
    for metric in self._task.metric_objs:
      for key, value in self._compute(metric, by_kind[metric.model_output_type]).items():
        if key in values:
          raise DataError(
            f'Two metrics of {self.name!r} return a value called {key!r}.',
            fix='Rename one in the dictionary that the metric function returns.',
          )
        number = value.value if isinstance(value, seqio.metrics.Scalar) else value
        if (
          isinstance(number, numbers.Number)
          or np.ndim(number) == 0
          and isinstance(number, (np.ndarray, np.generic))
        ):
          values[key] = float(number)
        elif key not in self._left_out:
          self._left_out.add(key)
          _log.warning(
            '%s: the metric %s is a %s, not a number; it is not written.',
            self.name,
            key,
            type(value).__name__,
          )
    return values

  def texts(self, outputs: ModelOutputs, number: Optional[int]) -> list[dict[str, str | float]]:
    """Returns the texts and scores of the first `number` examples; None for all."""
    found = []
    for i, example in enumerate(self._examples[:number]):
      record: dict[str, str | float] = {}
      if self.inputs[i]:
        record[_INPUTS] = feature_text(self._task, example, _INPUTS, self.inputs[i])
      record[_TARGETS] = feature_text(self._task, example, _TARGETS, self.targets[i])
      if outputs.predictions:
        record['prediction'] = self._targets.decode(list(outputs.predictions[i]))
        record['score'] = float(outputs.prediction_scores[i])
      if outputs.scores:
        record['target_score'] = float(outputs.scores[i])
      found.append(record)
    return found

  def _compute(self, metric: type[seqio.metrics.Metric], output: object) -> Mapping[str, object]:
    features = self._task.output_features
    try:
      computed = metric.from_model_output(self._examples, output, features, _TARGETS)
      if isinstance(computed, seqio.metrics.CollectingMetric):
        values = computed.actual_compute(self._examples, features, _TARGETS)[0]
      else:
        values = computed.compute()
      if not isinstance(values, Mapping):
        raise TypeError(f'it returned a {type(values).__name__}, not a dictionary')
      return values
    except Exception as e:  # a user's metric may raise anything
      raise DataError(
        f'A metric or the postprocessor of {self.name!r} failed on {len(self._examples)} '
        f'examples: {type(e).__name__}: {e}',
        fix='Correct the metric_fns or postprocess_fn of the task: they get the decoded text, '
        'postprocess_fn also example= and is_target=.',
      ) from e


def _ids(x: np.typing.ArrayLike) -> list[int]:
  return [int(i) for i in np.asarray(x).reshape(-1)]


def task_names(config: DatasetConfig) -> tuple[str, ...]:
  """Returns the tasks of a mixture that have the split; for a task, its name.

  Raises:
    ConfigError, DataError: the task does not exist, or no task has the split.
  """
  found = task_lookup.lookup(config)
  if not isinstance(found, seqio.Mixture):
    return (config.mixture_or_task_name,)
  prepare_tfds.check_prepared(found, config)
  names = [
    task_lookup.own_name(task.name)
    for task in seqio.get_subtasks(found)
    if config.split in task.splits
  ]
  return tuple(names) or (config.mixture_or_task_name,)  # opening it lists the splits


def open_tasks(
  config: DatasetConfig, *, feature_converter: str, num_examples: Optional[int], required: bool
) -> list[SeqioEvaluatedTask]:
  """Returns the tasks of `config` that have metrics, with the examples of their split in memory.

  Args:
    config, feature_converter, num_examples, required: as for
      `data_module.DataModule.evaluated_tasks`.
  Raises:
    NoExamplesError: no task with metrics has an example; some without are left out, with a warning.
    DataError: no task has metrics or the split; or a metric needs intermediates.
  """
  found, empty = [], []
  names = task_names(config)
  for name in names:
    one = dataclasses.replace(config, mixture_or_task_name=name, shuffle=False)
    task = task_lookup.lookup(one)
    task_lookup.check_split(task, one)
    if task_lookup.kind(one) == multiple_choice.NAME:  # a question is never cut
      one = dataclasses.replace(one, task_feature_lengths=None)
    if task.metric_objs:
      _check(task, one)
      examples = list(itertools.islice(task_lookup.numpy_examples(task, one), num_examples))
      if examples:
        found.append(SeqioEvaluatedTask(task, examples, one))
      else:
        empty.append(name)
  if empty and (found or not required):
    _log.warning('No metrics of %s: no example in split %r.', ', '.join(empty), config.split)
  elif empty:
    raise NoExamplesError(
      f'{empty[0]!r} has no example in split {config.split!r}.',
      fix='Set DatasetConfig.split to one with data.',
      parameters=('DatasetConfig.split',),
    )
  elif not found and required:
    raise task_error(
      f'{config.mixture_or_task_name!r} has no metrics: none of its {len(names)} '
      f'task{"s" * (len(names) > 1)} was registered with metric_fns.',
      fix='Give seqio.TaskRegistry.add(..., metric_fns=[...]), or use only the loss: remove '
      'train.infer_eval_dataset_cfg, or run python -m t5x_gpu.eval with --metrics=loss.',
      docs='eval.md#metrics-of-tasks',
    )
  return found


def _check(task: seqio.Task, config: DatasetConfig) -> None:
  if _TARGETS not in task.output_features:
    raise task_error(
      f"{config.mixture_or_task_name!r} has metrics but no feature 'targets'; it has "
      f'{", ".join(map(repr, task.output_features))}.',
      fix="Call the feature that the model should write 'targets'.",
    )
  for metric in task.metric_objs:
    if metric.model_output_type == _Output.SCORE_WITH_INTERMEDIATES:
      raise DataError(
        f'A metric of {config.mixture_or_task_name!r} needs scores with intermediate values; the '
        'models here do not return them.',
        fix='Use metrics of (targets, predictions) or (targets, scores).',
      )
