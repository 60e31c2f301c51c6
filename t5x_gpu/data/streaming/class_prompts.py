"""Encodes texts to classify, with special tokens and truncation as in training."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

import numpy as np

from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.features import LABEL, SCORE_UNIT, TOKEN_TYPES
from t5x_gpu.data.prompts import EncodedRow, Prompt
from t5x_gpu.data.streaming import task_classes, task_lookup
from t5x_gpu.data.tasks import objectives
from t5x_gpu.data.tasks.classification import OWN_TASKS, PATTERN_TASKS, features
from t5x_gpu.data.tasks.framing import TAGS, pair_lengths
from t5x_gpu.data.tf_runtime import seqio
from t5x_gpu.data.vocabularies.vocabularies import (
  check_fits,
  end_id,
  named_vocabulary,
  start_id,
  vocabulary_fingerprint,
  vocabulary_name,
)
from t5x_gpu.errors import DataError

# Field of a prompt with the second text of a pair.
TEXT2 = 'text2'


@dataclasses.dataclass(frozen=True)
class ClassText:
  """Text -> ids for a classifier; `prompts.PromptText` is the equivalent for generative models.

  Attributes:
    config: dataset config of the task.
    length: tokens of a row in training; longer texts are cut.
    inputs: the feature with the text.
    of_words: whether each word is encoded alone, to get a tag.
  """

  config: DatasetConfig
  length: int
  inputs: seqio.Feature
  of_words: bool = False

  @property
  def name(self) -> str:
    return vocabulary_name(self.inputs.vocabulary)

  @property
  def fingerprint(self) -> str:
    """Identifies the vocabulary, as in manifests."""
    return vocabulary_fingerprint(self.inputs.vocabulary)

  @property
  def size(self) -> int:
    return self.inputs.vocabulary.vocab_size

  @property
  def end_id(self) -> int:
    return end_id(self.inputs.vocabulary)

  def encode(self, prompt: Prompt) -> EncodedRow:
    """Returns the row of a prompt's text, or pair of texts, as in training.

    Raises:
      DataError: the second text is not a string.
    """
    if self.of_words:
      return self._words(prompt.inputs)
    if prompt.tokens is not None:
      return EncodedRow(prompt.tokens, prompt.num_second)
    vocabulary = self.inputs.vocabulary
    first, second = vocabulary.encode(prompt.inputs), prompt.extra.get(TEXT2)
    start = [] if start_id(vocabulary) is None else [start_id(vocabulary)]
    room = self.length - objectives.frame_size(self.inputs)
    if second is None:
      return EncodedRow((*start, *first[:room], self.end_id))
    if not isinstance(second, str):
      raise DataError(
        f'{prompt.where} has {str(second)[:40]!r} under {TEXT2!r}, not a text.',
        fix='Give {"inputs": "a text", "text2": "its second text"}.',
      )
    second = vocabulary.encode(second)
    num_first, num_second = pair_lengths(len(first), len(second), room - 1)
    tokens = (*start, *first[:num_first], self.end_id, *second[:num_second], self.end_id)
    return EncodedRow(tokens, num_second + 1)

  def _words(self, text: str) -> EncodedRow:
    vocabulary, tokens, starts = self.inputs.vocabulary, [], []
    first = int(start_id(vocabulary) is not None)
    room = self.length - objectives.frame_size(self.inputs)
    for word in text.split():
      pieces = vocabulary.encode(word)
      starts.append(first + len(tokens) if pieces and len(tokens) < room else -1)
      tokens += pieces
    start = [start_id(vocabulary)] * first
    return EncodedRow((*start, *tokens[:room], self.end_id), words=tuple(starts))

  def examples(self) -> Iterator[Prompt]:
    """Yields the task's split in order, with the class name as `targets`."""
    task = task_lookup.lookup(self.config)
    task_lookup.check_split(task, self.config)
    task_lookup.check_not_empty(task, self.config)
    if 'segments' in task.output_features:
      raise DataError(
        f'{self.config.mixture_or_task_name!r} has sets of texts, and `infer` takes single texts.',
        fix='Give them with --prompts=FILE, one text per line.',
      )
    names = task_classes.class_names(task)
    where = f'{self.config.mixture_or_task_name}, split {self.config.split}'
    for number, example in enumerate(task_lookup.numpy_examples(task, self.config)):
      tokens = tuple(int(i) for i in example['inputs'])
      if self.of_words:
        text = example['words'].decode()
        tags = ' '.join(names[i - 1] if names else str(i - 1) for i in example[TAGS] if i)
        yield Prompt(f'{where}, example {number}', text, tags, tokens)
        continue
      special = {self.end_id, start_id(self.inputs.vocabulary)}
      text = self.inputs.vocabulary.decode([i for i in tokens if i not in special])
      yield Prompt(
        f'{where}, example {number}',
        text,
        _spelled(example, names),
        tokens,
        num_second=int(np.sum(example.get(TOKEN_TYPES, 0))),
      )


def _spelled(example: Mapping[str, Any], names: Optional[Sequence[str]]) -> Optional[str]:
  """Returns the true classes, separated by commas, or the true number; None if unknown."""
  if 'score' in example:
    return f'{example["score"] / SCORE_UNIT:.10g}'
  numbers = np.atleast_1d(example[LABEL if LABEL in example else 'labels'])
  if (numbers < 0).any():  # as in the test splits of GLUE
    return None
  return ','.join(names[i] if names else str(i) for i in numbers)


def class_text(
  config: DatasetConfig, *, model_vocab_size: int, of_words: bool = False
) -> ClassText:
  """Returns text -> ids for the classifier of `config`; built-in tasks do not need their files.

  Args:
    config: dataset config of the task.
    model_vocab_size: number of ids of the model.
    of_words: whether the model gives each word a tag.
  Raises:
    DataError: the vocabulary does not exist, or has more ids than the model.
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
  text = ClassText(config, config.task_feature_lengths['inputs'], inputs, of_words)
  check_fits(text.name, text.size, model_vocab_size=model_vocab_size)
  return text
