"""Conversations as a task: the tokenizer's chat template makes the ids, and says where the loss is.

The template writes a conversation from its first token on, so that token is the first decoder input
(other texts begin with input 0, as in SeqIO). The model reads and is trained on what it would be in
transformers.
"""

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

from t5x_gpu.data.features import DECODER_INPUTS, LOSS_MASK
from t5x_gpu.data.sources.block_reader import BlockReader
from t5x_gpu.data.sources.rows import FileForm
from t5x_gpu.data.sources.seqio_sources import file_source
from t5x_gpu.data.tasks import builtin
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies.chat_template import ChatTemplate
from t5x_gpu.data.vocabularies.vocabularies import named_vocabulary
from t5x_gpu.errors import DataError

_WHERE = 'where'  # feature of the source: file:line
_NAMED = 3  # conversations of a kind that the log names; then it counts them
log = logging.getLogger(__name__)


class Conversations:
  """A preprocessor: {'targets': messages as JSON, 'where'} -> tokens and loss mask.

  It gives 'decoder_inputs' and 'targets', the tokens without the last and without the first, and
  'loss_mask', 1 where the target is the assistant's. Conversations that are longer than a row are
  cut at its end; without a token of the assistant before it they are left out. The log names the
  first of both and counts them.

  Args:
    reader: of the files; the error of a conversation becomes its `problem`.
  """

  def __init__(self, reader: BlockReader):
    self._reader = reader
    self._seen: set[bytes] = set()
    self._cut: list[int] = []
    self._left_out: list[int] = []

  def __call__(
    self,
    dataset: tf.data.Dataset,
    sequence_length: Optional[Mapping[str, int]],
    output_features: Mapping[str, seqio.Feature],
  ) -> tf.data.Dataset:
    template = ChatTemplate(output_features['targets'].vocabulary)
    length = (sequence_length or {}).get('targets')
    names = ('targets', DECODER_INPUTS, LOSS_MASK)

    def tokens(example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
      found = tf.numpy_function(
        functools.partial(self._tokens, template, length),
        [example['targets'], example[_WHERE]],
        [tf.int32] * len(names),
        stateful=False,
      )
      return {name: tf.ensure_shape(x, [None]) for name, x in zip(names, found)}

    return dataset.map(tokens).filter(lambda x: tf.size(x['targets']) > 0)

  def _tokens(
    self, template: ChatTemplate, length: Optional[int], content: bytes, where: bytes
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    try:
      ids, mask = self._checked(template, content, where.decode('utf-8', 'surrogateescape'))
    except DataError as e:
      self._reader.problem = self._reader.problem or e
      raise
    inputs, targets, mask = ids[:-1], ids[1:], mask[1:]
    if length is not None and targets.size > length:
      left_out = not mask[:length].any()
      self._log_long(where, targets.size, length, left_out=left_out)
      inputs, targets, mask = (x[: 0 if left_out else length] for x in (inputs, targets, mask))
    return targets, inputs, mask

  def _checked(
    self, template: ChatTemplate, content: bytes, where: str
  ) -> tuple[np.ndarray, np.ndarray]:
    ids, mask = template.tokens(**json.loads(content), where=where)
    if not mask[1:].any():
      raise DataError(
        f'{where}: the messages of the assistant have no token in the text of the chat template '
        f'{str(template.file)!r}.',
        fix='Correct or remove that line, or the template.',
      )
    if not ids.all():
      raise DataError(
        f'{where} has token id 0, the padding of {str(template.file.parent)!r}, as token '
        f'{int(np.flatnonzero(ids == 0)[0]) + 1} of {ids.size}.',
        fix='Remove the name of the padding token from that line.',
      )
    return ids, mask

  def _log_long(self, where: bytes, size: int, length: int, *, left_out: bool) -> None:
    """Logs a conversation that is longer than a row: the first ones, then their number."""
    if where in self._seen:  # in another epoch
      return
    self._seen.add(where)
    found = self._left_out if left_out else self._cut
    found.append(size)
    what = 'left out: the assistant has no token before the end of the row' if left_out else 'cut'
    if len(found) <= _NAMED:
      log.warning(
        '%s has %d tokens, a row %d (TASK_FEATURE_LENGTHS): %s', where.decode(), size, length, what
      )
    elif len(str(len(found))) > len(str(len(found) - 1)):  # 10, 100, ...
      log.warning(
        '%d conversations so far are longer than the %d tokens of a row (the longest has %d): %s',
        len(found),
        length,
        max(found),
        what,
      )


def chat_task(
  name: str,
  files: Sequence[str],
  *,
  form: FileForm,
  key: str,
  by_split: Optional[Mapping[str, Sequence[str]]] = None,
  chosen: bool = False,
) -> seqio.Task:
  """Returns a language-model task over files with messages.

  Args:
    name: of the task.
    files: all of them.
    form: of the files, whose rows are conversations.
    key: of the messages.
    by_split: split -> files; without it a hash assigns conversations to splits.
    chosen: the user chose the key.
  """
  reader = BlockReader(
    form, columns={'targets': key, _WHERE: _WHERE}, num_files=len(files), chosen=chosen
  )
  text = seqio.Feature(named_vocabulary('byte'), add_eos=False)  # the template writes the end
  mask = seqio.Feature(seqio.PassThroughVocabulary(2), add_eos=False)
  return builtin.make_task(
    name,
    source=file_source(files, by_split, reader=reader),
    preprocessors=(Conversations(reader),),
    output_features={'targets': text, DECODER_INPUTS: text, LOSS_MASK: mask},
  )


def is_chat(task: seqio.Task | seqio.Mixture) -> bool:
  """Returns whether the examples of `task` are conversations."""
  return any(
    isinstance(preprocessor, Conversations)
    for part in seqio.get_subtasks(task)
    for preprocessor in part.preprocessors
  )


def template_facts(task: seqio.Task | seqio.Mixture) -> dict[str, Any]:
  """Returns what identifies the chat template of `task`; nothing for other tasks."""
  if not is_chat(task):
    return {}
  return {'chat_template': ChatTemplate(task.output_features['targets'].vocabulary).fingerprint}
