"""Texts to classify, framed as in training, and the names of the classes."""

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
  """What a classifier reads; see `prompts.PromptText` for that of a model that writes.

  Attributes:
    config: of the task.
    length: tokens of a row in training; longer texts are cut as there.
    inputs: the feature that holds the text.
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
    """Returns the ids of a prompt's text, or pair of texts, framed and cut as in training.

    Raises:
      DataError: a second text that is not a string.
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
    """Yields the task's split in order, with the name of its class as `targets`."""
    task = task_lookup.lookup(self.config)
    task_lookup.check_split(task, self.config)
    task_lookup.check_not_empty(task, self.config, problem=lambda: None)
    names = task_lookup.class_names(task)
    where = f'{self.config.mixture_or_task_name}, split {self.config.split}'
    data = task_lookup.examples(task, self.config, shuffle=False, num_epochs=1)
    for number, example in enumerate(data.as_numpy_iterator()):
      tokens = tuple(int(i) for i in example['inputs'])
      special = {self.end_id, start_id(self.inputs.vocabulary)}
      text = self.inputs.vocabulary.decode([i for i in tokens if i not in special])
      label = int(np.asarray(example[LABEL]))
      hidden = label < 0  # as in the test splits of GLUE
      yield Prompt(
        f'{where}, example {number}',
        text,
        None if hidden else names[label] if names else str(label),
        tokens,
      )


def class_text(config: DatasetConfig, *, model_vocab_size: int) -> ClassText:
  """Returns what the classifier of `config` reads; tasks of ours need no files for that.

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
  if text.size > model_vocab_size:
    raise DataError(
      f'The vocabulary {text.name} has {text.size:,} ids, the model {model_vocab_size:,}.',
      fix='Take the vocabulary that the model was trained with (DatasetConfig.vocabulary, or '
      '--vocabulary).',
      parameters=('DatasetConfig.vocabulary',),
    )
  return text
