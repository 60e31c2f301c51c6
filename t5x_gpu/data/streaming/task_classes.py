"""The classes of a task: their names, and their numbers in the model."""

from collections.abc import Sequence
from typing import Optional, Union

from t5x_gpu.data.batches import BatchSpec, DatasetConfig
from t5x_gpu.data.features import LABELS, layout
from t5x_gpu.data.tf_runtime import seqio
from t5x_gpu.data.vocabularies.vocabularies import ClassVocabulary
from t5x_gpu.errors import DataError, did_you_mean, listed

TaskOrMixture = Union[seqio.Task, seqio.Mixture]
_NAME = 'DatasetConfig.mixture_or_task_name'


def class_names(task: TaskOrMixture, of_model: Sequence[str] = ()) -> Optional[tuple[str, ...]]:
  """Returns the names of the classes in batches; None without labels or without names.

  Args:
    task: a task with labels.
    of_model: names of the model's classes, which take precedence.
  """
  for feature in task.output_features.values():
    if isinstance(feature.vocabulary, ClassVocabulary):
      return tuple(of_model) or feature.vocabulary.names
  return None


def class_numbers(task: TaskOrMixture, of_model: Sequence[str]) -> Optional[list[int]]:
  """Returns class number in the task -> class number in the model; None if they are equal.

  Classes are matched by name, or, if all names in the task are whole numbers, by position.

  Raises:
    DataError: the model does not have a class of the task.
  """
  names = class_names(task)
  if names is None or not of_model or names == tuple(of_model):
    return None
  if not set(names) & set(of_model) and all(name.isdecimal() for name in names):
    if max(map(int, names)) < len(of_model):
      return list(map(int, names))
  if missing := [name for name in names if name not in of_model]:
    raise DataError(
      f'{task.name!r} has the class {missing[0]!r}, which is not in EncoderModel.class_names: '
      f'{", ".join(listed(of_model, 12))}.' + did_you_mean(missing[0], of_model),
      fix=f'Correct the labels, or set EncoderModel.class_names = {names}.',
      parameters=('EncoderModel.class_names', _NAME),
    )
  return [list(of_model).index(name) for name in names]


def check_classes(
  task: TaskOrMixture, config: DatasetConfig, *, spec: BatchSpec, feature_converter: str
) -> None:
  """Raises DataError if the model cannot have the classes of the task."""
  kind = layout(feature_converter)
  names, num_classes = class_names(task), spec.vocab_sizes.get(kind.classes)
  if not kind.label or not names or num_classes is None:
    return
  num_classes -= kind.classes == LABELS
  if len(names) > num_classes:
    raise DataError(
      f'{config.mixture_or_task_name!r} has {len(names)} classes ({", ".join(listed(names, 6))}); '
      f'the model has num_classes = {num_classes}.',
      fix=f"Set the model's num_classes to {len(names)}.",
      parameters=('EncoderModel.num_classes', _NAME),
    )
  class_numbers(task, spec.class_names)
