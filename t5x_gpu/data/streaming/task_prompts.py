"""Text <-> ids with a task's vocabularies, for prompts and for texts to classify.

`prompt_text` serves generative models (see `data_module.PromptText`), `class_text` classifiers: it
encodes with special tokens and truncation as in training.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Optional

import numpy as np

from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.data_module import RECORDS, EncodedRow, Prompt
from t5x_gpu.data.features import LABEL, SCORE_UNIT, TOKEN_TYPES
from t5x_gpu.data.sources.discovery import matching_files
from t5x_gpu.data.sources.readers import TFRECORD
from t5x_gpu.data.sources.rows import split_columns
from t5x_gpu.data.streaming import task_lookup
from t5x_gpu.data.tasks import chat, objectives
from t5x_gpu.data.tasks.classification import OWN_TASKS, PATTERN_TASKS, TAGS, features, pair_lengths
from t5x_gpu.data.tf_runtime import seqio
from t5x_gpu.data.vocabularies.chat_template import ChatTemplate
from t5x_gpu.data.vocabularies.huggingface import HuggingFaceVocabulary
from t5x_gpu.data.vocabularies.vocabularies import (
  TextVocabulary,
  check_fits,
  end_id,
  named_vocabulary,
  start_id,
  text_vocabulary,
  vocabulary_fingerprint,
  vocabulary_name,
)
from t5x_gpu.errors import ConfigError, DataError, task_error
from t5x_gpu.storage.json_schema import Json, JsonObject


@dataclasses.dataclass(frozen=True)
class TaskText:
  """Text <-> ids of a task, or of a vocabulary; see `data_module.PromptText`.

  Attributes:
    config: names a task, or only a vocabulary if `mixture_or_task_name` is empty.
    task: None if there is only a vocabulary.
    inputs: the feature for prompts; None if prompts are the beginning of the targets.
    targets: the feature that the model writes.
  """

  config: DatasetConfig
  task: Optional[task_lookup.TaskOrMixture]
  inputs: Optional[seqio.Feature]
  targets: seqio.Feature

  def _text(self, feature: seqio.Feature) -> TextVocabulary:
    return text_vocabulary(feature.vocabulary)

  @property
  def name(self) -> str:
    return self._text(self.targets).name

  @property
  def fingerprint(self) -> str:
    """Identifies the vocabulary of the targets, as in manifests."""
    return vocabulary_fingerprint(self.targets.vocabulary)

  @property
  def size(self) -> int:
    return max(self._text(f).size for f in (self.inputs, self.targets) if f is not None)

  @property
  def eos_id(self) -> Optional[int]:
    return self._text(self.targets).eos_id

  @property
  def start_id(self) -> Optional[int]:
    vocabulary = self.targets.vocabulary
    if isinstance(vocabulary, HuggingFaceVocabulary):
      return vocabulary.template_start
    if isinstance(vocabulary, seqio.SentencePieceVocabulary) and vocabulary.bos_id >= 0:
      return vocabulary.bos_id  # Llama 2 and Gemma put it first; T5 does not have one
    return None

  @property
  def zero_is_a_word(self) -> bool:
    return self._text(self.targets).zero_is_a_word

  @property
  def is_chat(self) -> bool:
    if self.task is None or not chat.templated(self.task):
      return False
    try:
      self._chat_template()
    except DataError:  # pairs of texts do not need a template
      return False
    return True

  @property
  def inputs_name(self) -> str:
    return self.name if self.inputs is None else self._text(self.inputs).name

  def encode_inputs(self, text: str) -> list[int]:
    if self.inputs is None:
      return self._text(self.targets).encode(text)
    return self._ids(self.inputs, text)

  def encode_chat(
    self, messages: Sequence[Json], *, tools: Optional[list] = None, where: str
  ) -> list[int]:
    template = self._chat_template()
    return template.prompt(messages, tools=tools, where=where)

  def chat_text(self, messages: Sequence[Json], *, continues: bool = False, where: str) -> str:
    return self._chat_template().text(messages, continues=continues, where=where)

  def chat_ends(self) -> list[int]:
    end = self._chat_template().turn_end()
    return [] if end is None else [end]

  def _chat_template(self) -> ChatTemplate:
    return ChatTemplate(self.targets.vocabulary, self.config.chat_template_variables)

  def encode_targets(self, text: str) -> list[int]:
    return self._ids(self.targets, text)

  def _ids(self, feature: seqio.Feature, text: str) -> list[int]:
    vocabulary = self._text(feature)
    ends = feature.add_eos and vocabulary.eos_id is not None
    return vocabulary.encode(text) + [vocabulary.eos_id] * ends

  def decode(self, ids: Sequence[int]) -> str:
    return self._text(self.targets).decode(list(ids))

  def examples(self) -> Iterator[Prompt]:
    """Yields the examples of the split in order; of a mixture, all of each task."""
    if self.task is None:
      raise DataError(
        'There is no task to read examples from: no gin file names one.',
        fix='Give prompts: --prompts=FILE, or - for standard input.',
      )
    for where, example in _examples(self.task, self.config):
      yield self._prompt(example, where)

  def records(self, files: str) -> Iterator[Prompt]:
    """Yields the prompts of 'tfrecord:PATTERN#inputs=FEATURE,targets=FEATURE'.

    Raises:
      DataError: there are no such files, or a record lacks a feature.
    """
    pattern, pairs = split_columns(files.removeprefix(RECORDS))
    columns = dict(pairs or {'inputs': 'inputs'})
    if not {'inputs'} <= columns.keys() <= {'inputs', 'targets'} or not all(columns.values()):
      raise DataError(
        f'--prompts={files} chooses other features than inputs and targets.',
        fix='Write tfrecord:PATTERN#inputs=FEATURE, and ,targets=FEATURE to score targets.',
        docs='infer.md',
      )
    number = 0
    for path in matching_files(pattern):
      for row in TFRECORD.rows(path, list(columns.values()), 0):
        if isinstance(row, DataError):
          raise row
        if row is not None:
          texts = dict(zip(columns, (text.decode() for text in row)))
          where = f'{path}, record {number}'
          yield Prompt(where, texts['inputs'], texts.get('targets'), number=number)
        number += 1

  def _prompt(self, example: JsonObject, where: str) -> Prompt:
    def ids(feature: str) -> tuple[int, ...]:
      return tuple(int(i) for i in np.asarray(example.get(feature, ())).reshape(-1))

    inputs, targets = ids('inputs'), ids('targets')
    return Prompt(
      where,
      feature_text(self.task, example, 'inputs', inputs) if inputs else '',
      feature_text(self.task, example, 'targets', targets),
      inputs,
      targets,
    )


def _examples(
  task: task_lookup.TaskOrMixture, config: DatasetConfig
) -> Iterator[tuple[str, task_lookup.Example]]:
  """Yields 'TASK, split SPLIT, example 0' and the example, in order; of a mixture, task by task.

  One pass over a mixture itself would end where the first task ends.
  """
  task_lookup.check_split(task, config)
  task_lookup.check_not_empty(task, config)
  for part in seqio.get_subtasks(task):
    name = config.mixture_or_task_name if part is task else task_lookup.own_name(part.name)
    if config.split in part.splits:
      for number, example in enumerate(task_lookup.numpy_examples(part, config)):
        yield f'{name}, split {config.split}, example {number}', example


def feature_text(task: seqio.Task, example: JsonObject, feature: str, ids: Sequence[int]) -> str:
  """Returns a feature's text before tokenization if the task keeps it, else the text of `ids`."""
  written = example.get(f'{feature}_pretokenized')
  if isinstance(written, bytes):
    return written.decode('utf-8', 'replace')
  vocabulary = task.output_features[feature].vocabulary
  kept = text_vocabulary(vocabulary).without_padding(ids)
  return vocabulary.decode([i for i in kept if i != vocabulary.eos_id])


def prompt_text(
  config: DatasetConfig, *, feature_converter: str, model_vocab_size: int, has_inputs: bool
) -> TaskText:
  """Returns text <-> ids of the task of `config`, or of its vocabulary if the task name is empty.

  Args:
    config, feature_converter, model_vocab_size, has_inputs: as for
      `data_module.DataModule.prompt_text`.
  Raises:
    ConfigError, DataError: the task or vocabulary does not exist, has more ids than the model, or
      the task has no 'targets'.
  """
  if config.mixture_or_task_name:
    task = task_lookup.lookup(config)
    features = task.output_features
    if 'targets' not in features:
      raise task_error(
        f"{config.mixture_or_task_name!r} has no feature 'targets' for the model to write; it has "
        f'{", ".join(map(repr, features))}.',
        fix='Use a task with targets, or give prompts: --prompts=FILE.',
      )
    inputs, targets = features.get('inputs') if has_inputs else None, features['targets']
  elif config.vocabulary is None:
    raise ConfigError(
      'Text cannot become token ids: there is neither a task nor a vocabulary.',
      fix='Give --vocabulary=huggingface:FOLDER, sentencepiece:FILE or byte.',
    )
  else:
    task, vocabulary = None, named_vocabulary(config.vocabulary)
    targets = seqio.Feature(vocabulary=vocabulary, add_eos=True)
    inputs = targets if has_inputs else None
  text = TaskText(config, task, inputs, targets)
  check_fits(text.name, text.size, model_vocab_size=model_vocab_size)
  return text


# Field of a prompt with the second text of a pair.
TEXT2 = 'text2'


@dataclasses.dataclass(frozen=True)
class ClassText:
  """Text -> ids for a classifier; `data_module.PromptText` is the equivalent for generative models.

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
    if 'segments' in task.output_features:
      raise DataError(
        f'{self.config.mixture_or_task_name!r} has sets of texts, and `infer` takes single texts.',
        fix='Give them with --prompts=FILE, one text per line.',
      )
    names = task_lookup.class_names(task)
    for where, example in _examples(task, self.config):
      tokens = tuple(int(i) for i in example['inputs'])
      if self.of_words:
        text = example['words'].decode()
        tags = ' '.join(names[i - 1] if names else str(i - 1) for i in example[TAGS] if i)
        yield Prompt(where, text, tags, tokens)
        continue
      special = {self.end_id, start_id(self.inputs.vocabulary)}
      text = self.inputs.vocabulary.decode([i for i in tokens if i not in special])
      yield Prompt(
        where,
        text,
        _spelled(example, names),
        tokens,
        num_second=int(np.sum(example.get(TOKEN_TYPES, 0))),
      )


def _spelled(example: Json, names: Optional[Sequence[str]]) -> Optional[str]:
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
