"""Preferences as a task: pairs of a chosen and a rejected answer to the same prompt, as tokens.

Both texts of a pair are in the same row, one after the other, each with the prompt. The tokens are
the same as in TRL's DPOTrainer: the chat template formats messages; for plain texts, prompt and
answer are tokenized separately, and the answer ends with the end-of-text id. As in conversations,
the first token is the first decoder input.
"""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Optional

import numpy as np

from t5x_gpu.data.features import LOSS_MASK, PAIR_PLACES
from t5x_gpu.data.sources.conversations import CHOSEN, PROMPT, REJECTED, TOOLS
from t5x_gpu.data.sources.readers import BlockReader
from t5x_gpu.data.tasks.chat import LongExamples, Templated, templated
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies.chat_template import ChatTemplate
from t5x_gpu.data.vocabularies.huggingface import HuggingFaceVocabulary
from t5x_gpu.data.vocabularies.vocabularies import end_id
from t5x_gpu.errors import DataError, task_error
from t5x_gpu.storage.json_schema import Json, JsonObject


class Preferences(Templated):
  """A preprocessor: {'targets': preference as JSON, 'where'} -> tokens of both texts, and marks.

  Yields 'decoder_inputs' (each text's tokens without the last), 'targets' (each text's tokens
  without the first), 'loss_mask' (1 where the target belongs to the answer) and 'pair_places' (1,
  2, ... in the chosen text and again in the rejected text). If a pair is longer than a row, the
  longer text is cut at its end until both fit, or both are cut to half a row. If no token of an
  answer remains, the pair is left out. The log names the first cut and left out pairs, and counts
  all.

  Args:
    reader: reader of the files. An invalid pair counts as damage; its error becomes the reader's
      `problem` once too many are damaged.
  """

  MARKS = (LOSS_MASK, PAIR_PLACES)

  def __init__(self, reader: BlockReader):
    super().__init__(reader)
    self._long = LongExamples('pairs', 'an answer has no token')

  def __call__(
    self,
    dataset: tf.data.Dataset,
    sequence_length: Optional[Mapping[str, int]],
    output_features: Mapping[str, seqio.Feature],
  ) -> tf.data.Dataset:
    vocabulary = output_features['targets'].vocabulary
    # Pairs of plain texts do not need a template.
    template = functools.cache(lambda: ChatTemplate(vocabulary, self.variables))
    length = (sequence_length or {}).get('targets')
    return self._map(dataset, functools.partial(self._tokens, vocabulary, template, length))

  def _tokens(
    self,
    vocabulary: seqio.Vocabulary,
    template: Callable[[], ChatTemplate],
    length: Optional[int],
    content: bytes,
    where: bytes,
  ) -> list[np.ndarray]:
    empty = [np.zeros(0, np.int32)] * (2 + len(self.MARKS))
    shown = where.decode('utf-8', 'surrogateescape')
    try:
      texts = _both(vocabulary, template, json.loads(content), where=shown)
    except DataError as e:
      self._refuse(shown, e)
      return empty
    chosen, rejected = (mask.size - 1 for _, mask in texts)
    room = chosen + rejected if length is None else length
    limits = max(room // 2, room - rejected), max(room - room // 2, room - chosen)
    parts = [
      (ids[1:][:limit], ids[:-1][:limit], mask[1:][:limit], np.arange(1, ids.size)[:limit])
      for (ids, mask), limit in zip(texts, limits)
    ]
    if chosen + rejected > room:
      left_out = not all(mask.any() for _, _, mask, _ in parts)
      self._long.log(where, chosen + rejected, room, left_out=left_out)
      parts = [] if left_out else parts
    return [np.concatenate(arrays).astype(np.int32) for arrays in zip(empty, *parts)]


def _both(
  vocabulary: seqio.Vocabulary, template: Callable[[], ChatTemplate], pair: Json, *, where: str
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Returns ids and loss mask of the chosen and of the rejected text."""
  texts = []
  for name in (CHOSEN, REJECTED):
    if isinstance(pair[PROMPT], str):
      ids, mask = _text_tokens(vocabulary, pair[PROMPT], pair[name])
    else:
      ids, mask = template().tokens(
        [*pair[PROMPT], *pair[name]], tools=pair[TOOLS], where=where, first=len(pair[PROMPT])
      )
    if not mask[1:].any():
      raise DataError(
        f'{where} has no token of the answer in {name!r}.', fix='Correct or remove that line.'
      )
    texts.append((ids, mask))
  if np.array_equal(texts[0][0], texts[1][0]):
    raise DataError(
      f'{where} has the same tokens in {CHOSEN!r} and {REJECTED!r}: there is nothing to prefer.',
      fix='Remove that line.',
    )
  return texts


def _text_tokens(
  vocabulary: seqio.Vocabulary, prompt: str, answer: str
) -> tuple[np.ndarray, np.ndarray]:
  asked = vocabulary.encode(prompt)
  answered = [*vocabulary.encode(answer), end_id(vocabulary)]
  mask = np.repeat(np.int32([0, 1]), [len(asked), len(answered)])
  return np.asarray([*asked, *answered], np.int32), mask


def has_pairs(task: seqio.Task | seqio.Mixture) -> bool:
  """Returns whether the examples of `task` are preference pairs."""
  return PAIR_PLACES in task.output_features


def check_pairs(task: seqio.Task | seqio.Mixture, *, name: str, feature_converter: str) -> None:
  """Raises DataError if only the task, or only the model, has pairs."""
  wanted = feature_converter == 'preference'
  if wanted == has_pairs(task):
    return
  if wanted:
    raise task_error(
      f'DpoModel learns from pairs of answers; {name!r} has none.',
      fix="Give JSON lines or a table with 'chosen' and 'rejected'. If the files also have other "
      'texts or messages, choose after the pattern: #chosen=chosen,rejected=rejected.',
      docs='finetune.md#preferences',
    )
  raise task_error(
    f'{name!r} has pairs of answers, and the model learns from single texts.',
    fix='Set train.model = @dpo.DpoModel() with DpoModel.model = %MODEL; or train on the chosen '
    'answers alone: #text=chosen, or #messages=chosen.',
    docs='finetune.md#preferences',
  )


def template_facts(task: seqio.Task | seqio.Mixture) -> JsonObject:
  """Returns facts that identify the chat template for pairs; {} for other tasks."""
  vocabulary = task.output_features['targets'].vocabulary if has_pairs(task) else None
  if not isinstance(vocabulary, HuggingFaceVocabulary):
    return {}
  try:
    return {'chat_template': ChatTemplate(vocabulary, templated(task)[0].variables).fingerprint}
  except DataError:  # pairs of plain texts do not need a template
    return {}
