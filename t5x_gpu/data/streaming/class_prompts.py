"""Texts to classify, with special tokens and cut as in training."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.features import LABEL
from t5x_gpu.data.prompts import Prompt
from t5x_gpu.data.streaming import task_lookup
from t5x_gpu.data.tasks import objectives
from t5x_gpu.data.tasks.classification import OWN_TASKS, PATTERN_TASKS, features, pair_lengths
from t5x_gpu.data.tf_runtime import seqio
from t5x_gpu.data.vocabularies.vocabularies import (
  check_fits,
  end_id,
  named_vocabulary,
  start_id,
  vocabulary_name,
)
from t5x_gpu.errors import DataError

# Field of a prompt that holds the second text of a pair.
TEXT2 = 'text2'


@dataclasses.dataclass(frozen=True)
class ClassText:
  """Text -> ids for a classifier; `prompts.PromptText` is the same for a model that writes text.

  Attributes:
    config: of the task.
    length: tokens of a row in training; longer texts are cut.
    inputs: the feature with the text.
  """

  config: DatasetConfig
  length: int
  inputs: seqio.Feature

  @property
  def name(self) -> str:
    return vocabulary_name(self.inputs.vocabulary)

  @property
  def size(self) -> int:
    return self.inputs.vocabulary.vocab_size

  @property
  def end_id(self) -> int:
    return end_id(self.inputs.vocabulary)

  def encode(self, prompt: Prompt) -> list[int]:
    """Returns the ids of a prompt's text, or pair of texts, as in training.

    Raises:
      DataError: the second text is not a string.
    """
    vocabulary = self.inputs.vocabulary
    first, second = vocabulary.encode(prompt.inputs), prompt.extra.get(TEXT2)
    start = [] if start_id(vocabulary) is None else [start_id(vocabulary)]
    room = self.length - objectives.frame_size(self.inputs)
    if second is None:
      return [*start, *first[:room], self.end_id]
    if not isinstance(second, str):
      raise DataError(
        f'{prompt.where} has {str(second)[:40]!r} under {TEXT2!r}, not a text.',
        fix='Give {"inputs": "a text", "text2": "its second text"}.',
      )
    second = vocabulary.encode(second)
    num_first, num_second = pair_lengths(len(first), len(second), room - 1)
    return [*start, *first[:num_first], self.end_id, *second[:num_second], self.end_id]

  def examples(self) -> Iterator[Prompt]:
    """Yields the task's split in order, with the class name as `targets`."""
    task = task_lookup.lookup(self.config)
    task_lookup.check_split(task, self.config)
    task_lookup.check_not_empty(task, self.config)
    names = task_lookup.class_names(task)
    where = f'{self.config.mixture_or_task_name}, split {self.config.split}'
    for number, example in enumerate(task_lookup.numpy_examples(task, self.config)):
      tokens = tuple(int(i) for i in example['inputs'])
      special = {self.end_id, start_id(self.inputs.vocabulary)}
      text = self.inputs.vocabulary.decode([i for i in tokens if i not in special])
      label = int(np.asarray(example[LABEL]))
      is_unknown = label < 0  # as in the test splits of GLUE
      yield Prompt(
        f'{where}, example {number}',
        text,
        None if is_unknown else names[label] if names else str(label),
        tokens,
      )


def class_text(config: DatasetConfig, *, model_vocab_size: int) -> ClassText:
  """Returns text -> ids for the classifier of `config`; built-in tasks do not need their files.

  Raises:
    DataError: no such vocabulary, or more ids than the model has.
  """
  kind = task_lookup.kind(config)
  if config.vocabulary is not None:
    inputs = dataclasses.replace(
      features(())['inputs'], vocabulary=named_vocabulary(config.vocabulary)
    )
  elif kind in (*OWN_TASKS, *PATTERN_TASKS):
    inputs = features(())['inputs']
  else:
    inputs = task_lookup.lookup(config).output_features['inputs']
  text = ClassText(config, config.task_feature_lengths['inputs'], inputs)
  check_fits(text.name, text.size, model_vocab_size=model_vocab_size)
  return text
