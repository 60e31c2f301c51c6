"""Prompts of SeqIO tasks, and text <-> ids as a task has it: see `prompts.PromptText`."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import numpy as np

from t5x_gpu.data import task_lookup
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.huggingface_vocabulary import HuggingFaceVocabulary
from t5x_gpu.data.prompts import Prompt
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies import named_vocabulary, vocabulary_name
from t5x_gpu.errors import ConfigError, DataError, first_line


@dataclasses.dataclass(frozen=True)
class TaskText:
  """Text of a task, or of a vocabulary alone; see `prompts.PromptText`.

  Attributes:
    config: of the task; without a `mixture_or_task_name`, of a vocabulary alone.
    task: None of a vocabulary alone.
    inputs: the feature that prompts are like; None for the beginning of a text.
    targets: the feature that the model writes.
    zero_is_a_word: see `prompts.PromptText`.
  """
  config: DatasetConfig
  task: Optional[task_lookup.TaskOrMixture]
  inputs: Optional[seqio.Feature]
  targets: seqio.Feature
  zero_is_a_word: bool

  @property
  def name(self) -> str:
    return vocabulary_name(self.targets.vocabulary)

  @property
  def size(self) -> int:
    sizes = [f.vocabulary.vocab_size for f in (self.inputs, self.targets) if f is not None]
    return max(sizes) - self.zero_is_a_word  # the moved one is not used

  @property
  def eos_id(self) -> Optional[int]:
    eos_id = self.targets.vocabulary.eos_id
    return eos_id if eos_id is not None and eos_id > 0 else None

  @property
  def start_id(self) -> Optional[int]:
    vocabulary = self.targets.vocabulary
    return vocabulary.template_start if isinstance(vocabulary, HuggingFaceVocabulary) else None

  def encode_inputs(self, text: str) -> list[int]:
    if self.inputs is None:
      return self._ids(self.targets.vocabulary, text, ends=False)
    return self._ids(self.inputs.vocabulary, text, ends=self.inputs.add_eos)

  def encode_targets(self, text: str) -> list[int]:
    return self._ids(self.targets.vocabulary, text, ends=self.targets.add_eos)

  def _ids(self, vocabulary: seqio.Vocabulary, text: str, *, ends: bool) -> list[int]:
    ids = [int(i) for i in vocabulary.encode(text)]
    if self.zero_is_a_word:
      ids = [0 if i == vocabulary.moved_zero_id else i for i in ids]
    return [*ids, vocabulary.eos_id] if ends and self.eos_id is not None else ids

  def decode(self, ids: Sequence[int]) -> str:
    vocabulary, ids = self.targets.vocabulary, list(map(int, ids))
    if self.eos_id in ids:
      ids = ids[:ids.index(self.eos_id)]
    if self.zero_is_a_word:
      ids = [vocabulary.moved_zero_id if i == 0 else i for i in ids]
    return vocabulary.decode([i for i in ids if i != 0])

  def examples(self) -> Iterator[Prompt]:
    """Yields the examples of the split, one epoch in order."""
    if self.task is None:
      raise DataError('No gin file names a task, whose examples could be read.',
                      fix='Give prompts: --prompts=FILE, or - for standard input.')
    config, task = self.config, self.task
    task_lookup.check_split(task, config)
    task_lookup.check_not_empty(task, config, problem=lambda: None)
    name = f'{config.mixture_or_task_name}, split {config.split}'
    data = task_lookup.examples(task, config, shuffle=False, num_epochs=1).as_numpy_iterator()
    for number in range(1 << 62):
      try:
        example = next(data, None)
      except tf.errors.OpError as e:
        raise DataError(f'{name}: reading example {number} failed: {first_line(e)}',
                        fix='Check that the files of the task are complete and readable.') from e
      if example is None:
        return
      yield self._prompt(example, f'{name}, example {number}')

  def _prompt(self, example: dict[str, Any], where: str) -> Prompt:
    def ids(feature: str) -> tuple[int, ...]:
      return tuple(int(i) for i in np.asarray(example.get(feature, ())).reshape(-1))

    def text(feature: str, tokens: tuple[int, ...]) -> str:
      written = example.get(f'{feature}_pretokenized')
      if isinstance(written, bytes):
        return written.decode('utf-8', 'replace')
      vocabulary = self.task.output_features[feature].vocabulary
      return vocabulary.decode([i for i in tokens if i not in (0, vocabulary.eos_id)])
    inputs, targets = ids('inputs'), ids('targets')
    return Prompt(where, text('inputs', inputs) if inputs else '', text('targets', targets),
                  inputs, targets)


def prompt_text(config: DatasetConfig, *, model_vocab_size: int, has_inputs: bool) -> TaskText:
  """Returns how the task of `config` writes text, or a vocabulary if it names no task.

  Args:
    config: of the task.
    model_vocab_size: ids that the model knows.
    has_inputs: the model reads prompts in an encoder, or was trained on inputs before its targets.
  Raises:
    ConfigError, DataError: no such task or vocabulary, ids that the model does not know, or a task
      without 'targets'.
  """
  if config.mixture_or_task_name:
    task = task_lookup.lookup(config)
    features = task.output_features
    if 'targets' not in features:
      raise DataError(f"{config.mixture_or_task_name!r} has no feature 'targets', which a model "
                      f'could write; it has {", ".join(map(repr, features))}.',
                      fix='Take a task with one, or give prompts: --prompts=FILE.',
                      parameters=('DatasetConfig.mixture_or_task_name',))
    inputs, targets = features.get('inputs') if has_inputs else None, features['targets']
  elif config.vocabulary is None:
    raise ConfigError('Neither a task nor a vocabulary says how text becomes token ids.',
                      fix="Give --vocabulary=huggingface:FOLDER, sentencepiece:FILE or byte.")
  else:
    task, vocabulary = None, named_vocabulary(config.vocabulary)
    targets = seqio.Feature(vocabulary=vocabulary, add_eos=True)
    inputs = targets if has_inputs else None
  vocabulary = targets.vocabulary
  moved = isinstance(vocabulary, HuggingFaceVocabulary) and vocabulary.moved_zero_id
  # Trained here, a model has a row of its own for the word that was 0; converted, it has not.
  text = TaskText(config, task, inputs, targets, bool(moved) and moved >= model_vocab_size)
  if text.size > model_vocab_size:
    raise DataError(
        f'The vocabulary {text.name} has {text.size:,} ids, the model {model_vocab_size:,}: ids '
        f'{model_vocab_size:,} to {text.size - 1:,} would mean nothing to it.',
        fix='Take the vocabulary that the model was trained with (DatasetConfig.vocabulary, or '
            '--vocabulary), or the checkpoint that belongs to this one.',
        parameters=('DatasetConfig.vocabulary', 'TransformerConfig.vocab_size'))
  return text
