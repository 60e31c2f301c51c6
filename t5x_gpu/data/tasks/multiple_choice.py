"""Multiple choice as a task: the model answers with the choice that it finds most probable.

  multiple_choice:PATTERN   .jsonl (.gz, .zst) with 'inputs', 'choices' (texts) and 'answer' (a
                            choice, or its index from 0)

Each choice is an example, whose targets the model scores; nothing is generated. A space joins the
inputs and a choice, unless one of them has white space there, or the vocabulary puts a space before
each text by itself. The whole file is every split.
"""

import collections
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from t5x_gpu.data.sources import discovery
from t5x_gpu.data.sources.json_lines import json_object
from t5x_gpu.data.sources.rows import limited_lines, open_text
from t5x_gpu.data.tasks import builtin
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.errors import DataError, first_line
from t5x_gpu.storage.files import is_missing
from t5x_gpu.storage.json_schema import Json

NAME = 'multiple_choice'
_SPLITS = ('train', 'validation', 'test')
# Features of an example in addition to the texts: its question, the number of choices of the
# question, and whether it is the answer.
_FACTS = ('question', 'num_choices', 'is_answer')


def _rows(record: Json, number: int, where: str) -> list[dict[str, str | int]]:
  """Returns an example for each choice of a question."""
  inputs, choices, answer = (record.get(key) for key in ('inputs', 'choices', 'answer'))
  valid = isinstance(inputs, str) and isinstance(choices, list) and len(choices) > 1
  valid = valid and all(isinstance(choice, str) and choice for choice in choices)
  if valid and isinstance(answer, str) and choices.count(answer) == 1:
    answer = choices.index(answer)
  if not valid or type(answer) is not int or not 0 <= answer < len(choices):
    raise DataError(
      f"{where} is not a question: 'inputs' is a text, 'choices' lists two texts or more, and "
      "'answer' is one of them, or its index from 0.",
      fix='Correct or remove that line.',
      docs='eval.md#multiple-choice',
    )
  try:
    ''.join([inputs, *choices]).encode()
  except UnicodeEncodeError as e:
    raise DataError(
      f'{where} holds half of a surrogate pair, which is not a character: {e}.',
      fix='Correct or remove that line.',
      docs='eval.md#multiple-choice',
    ) from e
  has_space = inputs[-1:].isspace()
  return [
    {
      'inputs': inputs,
      'targets': choice if has_space or choice[0].isspace() else f' {choice}',
      'question': number,
      'num_choices': len(choices),
      'is_answer': int(i == answer),
    }
    for i, choice in enumerate(choices)
  ]


def _read(files: Sequence[str]) -> list[dict[str, str | int]]:
  """Returns the examples of all files, checked."""
  found, number = [], 0
  for path in files:
    try:
      with open_text(path) as f:
        for i, line in enumerate(limited_lines(f, path), 1):
          if line.strip():
            where = f'{path}:{i}'
            found += _rows(json_object(line, where=where), number, where)
            number += 1
    except (OSError, EOFError, zlib.error) as e:
      if isinstance(e, OSError) and not is_missing(e):
        raise discovery.unreadable(path, e) from e
      raise DataError(
        f'{path} cannot be read: {first_line(e)}.',
        fix='Get the file again, or leave it out of the pattern.',
        docs='eval.md#multiple-choice',
      ) from e
  return found


class _Questions(seqio.FunctionDataSource):
  """The examples of `files`, in memory."""

  def __init__(self, files: Sequence[str]):
    rows = _read(files)
    self.files_in_memory = tuple(files)
    super().__init__(functools.partial(_dataset, rows), splits=_SPLITS)


def _dataset(
  rows: Sequence[Mapping[str, str | int]], split: str, shuffle_files: bool, seed: int | None = None
) -> tf.data.Dataset:
  del split, shuffle_files, seed
  return tf.data.Dataset.from_tensor_slices(
    {name: [row[name] for row in rows] for name in ('inputs', 'targets', *_FACTS)}
  )


def _facts(text: str, *, example: Mapping[str, np.ndarray], is_target: bool) -> dict[str, int]:
  """Returns what `accuracies` needs to know of a choice: a postprocessor of SeqIO."""
  del is_target
  facts = {name: int(example[name]) for name in _FACTS}
  return facts | {'num_bytes': len(text.encode()), 'num_tokens': np.size(example['targets'])}


def accuracies(targets: Sequence[Mapping[str, int]], scores: Sequence[float]) -> dict[str, float]:
  """Returns the shares of questions whose answer has the highest log-probability of all choices.

  'accuracy' compares log-probabilities, 'accuracy_per_token' and 'accuracy_per_byte' divide them
  by the length of the choice. A question with missing choices does not count.

  Args:
    targets: the facts of each choice.
    scores: the log-probability of each choice.
  """
  questions = collections.defaultdict(list)
  for facts, score in zip(targets, scores, strict=True):
    questions[facts['question']].append((facts, float(score)))
  whole = [found for found in questions.values() if len(found) == found[0][0]['num_choices']]

  def accuracy(length: Callable[[Mapping[str, int]], int]) -> float:
    best = [max(found, key=lambda one: one[1] / length(one[0]))[0] for found in whole]
    return sum(facts['is_answer'] for facts in best) / max(len(whole), 1)

  return {
    'accuracy': accuracy(lambda facts: 1),
    'accuracy_per_token': accuracy(lambda facts: facts['num_tokens']),
    'accuracy_per_byte': accuracy(lambda facts: facts['num_bytes']),
    'questions': float(len(whole)),
  }


def _without_second_space(
  dataset: tf.data.Dataset, output_features: Mapping[str, seqio.Feature]
) -> tf.data.Dataset:
  """Removes the space between inputs and choice if the vocabulary puts one before each text.

  SentencePiece's dummy prefix does; with both, each choice would begin with a stray token.
  """
  encode = output_features['targets'].vocabulary.encode
  one, after_space = list(encode('a')), list(encode(' a'))
  if one == after_space or list(encode('a a')) != one + one:
    return dataset

  def changed(example: Mapping[str, tf.Tensor]) -> Mapping[str, tf.Tensor]:
    inputs = tf.strings.regex_replace(example['inputs'], ' $', '')
    targets = tf.strings.regex_replace(example['targets'], '^ (.)', r'\1')
    return {**example, 'inputs': inputs, 'targets': targets}

  return dataset.map(changed)


def multiple_choice(pattern: str) -> seqio.Task:
  """Returns the task of questions in .jsonl files; raises DataError for a line that is not one."""
  source = _Questions(discovery.matching_files(pattern))
  vocabulary = builtin.features('inputs')['inputs'].vocabulary
  feature = seqio.Feature(vocabulary, add_eos=False)
  return builtin.make_task(
    NAME,
    source=source,
    preprocessors=(
      _without_second_space,
      functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=True),
    ),
    output_features={'inputs': feature, 'targets': feature},
    postprocess_fn=_facts,
    metric_fns=[accuracies],
  )


PATTERN_TASKS: Mapping[str, Callable[[str], seqio.Task]] = {NAME: multiple_choice}
