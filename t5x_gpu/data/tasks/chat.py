"""Conversations as a task: the tokenizer's chat template determines the ids and the loss mask.

The template writes a conversation from its first token on, so that token is the first decoder input
(other texts begin with input 0, as in SeqIO). The model gets the same inputs and targets as in
transformers.
"""

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

import numpy as np

from t5x_gpu.data.features import DECODER_INPUTS, LOSS_MASK
from t5x_gpu.data.sources.readers import BlockReader
from t5x_gpu.data.sources.rows import FileForm
from t5x_gpu.data.sources.seqio_sources import file_source
from t5x_gpu.data.tasks import builtin
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies.chat_template import ChatTemplate
from t5x_gpu.data.vocabularies.vocabularies import named_vocabulary
from t5x_gpu.errors import DataError
from t5x_gpu.storage.json_schema import Json, JsonObject

_WHERE = 'where'  # feature of the source: file:line
_NAMED = 3  # number of conversations of a kind that the log names; it only counts further ones
log = logging.getLogger(__name__)


class LongExamples:
  """Logs examples that are longer than a row: the first few of each kind, then their number.

  Args:
    kind: the kind of examples, in the plural: 'conversations'.
    reason: why some are left out, continued by 'before the end of the row'.
  """

  def __init__(self, kind: str, reason: str):
    self._kind, self._reason = kind, reason
    self._seen: set[bytes] = set()
    self._cut: list[int] = []
    self._left_out: list[int] = []

  def log(self, where: bytes, size: int, length: int, *, left_out: bool) -> None:
    """Logs an example of `size` tokens, in a row of `length`, that is cut or left out."""
    if where in self._seen:  # logged in an earlier epoch
      return
    self._seen.add(where)
    found = self._left_out if left_out else self._cut
    found.append(size)
    what = f'left out: {self._reason} before the end of the row' if left_out else 'cut'
    if len(found) <= _NAMED:
      log.warning(
        '%s has %d tokens; a row holds %d (TASK_FEATURE_LENGTHS): %s',
        where.decode(),
        size,
        length,
        what,
      )
    elif len(str(len(found))) > len(str(len(found) - 1)):  # 10, 100, ...
      log.warning(
        '%d %s so far are longer than the %d tokens of a row (the longest has %d): %s',
        len(found),
        self._kind,
        length,
        max(found),
        what,
      )


class Templated:
  """A preprocessor for examples that a chat template may format.

  Attributes:
    MARKS: features in addition to 'targets' and 'decoder_inputs', an integer for each token.
    variables: variables of the template, DatasetConfig.chat_template_variables.
  """

  MARKS: tuple[str, ...] = (LOSS_MASK,)

  def __init__(self, reader: BlockReader):
    self.variables: Optional[Json] = None
    self._reader = reader

  def _map(
    self, dataset: tf.data.Dataset, tokens: Callable[[bytes, bytes], Sequence[np.ndarray]]
  ) -> tf.data.Dataset:
    """Maps `tokens` over (content, place); drops examples without a target."""
    names = ('targets', DECODER_INPUTS, *self.MARKS)

    def features(example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
      found = tf.numpy_function(
        tokens, [example['targets'], example[_WHERE]], [tf.int32] * len(names), stateful=False
      )
      return {name: tf.ensure_shape(x, [None]) for name, x in zip(names, found)}

    return dataset.map(features).filter(lambda x: tf.size(x['targets']) > 0)

  def _refuse(self, where: str, error: DataError) -> None:
    """Counts a damaged example; raises, also in the reader, once too many are damaged."""
    try:
      self._reader.damage.refuse(where, error)
    except DataError as too_many:
      self._reader.problem = self._reader.problem or too_many
      raise


class Conversations(Templated):
  """A preprocessor: {'targets': messages as JSON, 'where'} -> tokens and loss mask.

  Yields 'decoder_inputs' (the tokens without the last), 'targets' (the tokens without the first),
  and 'loss_mask', 1 where the target belongs to the assistant. Conversations that are longer than a
  row are cut at the end of the row, and left out if the assistant has no token before it. The log
  names the first cut and left out conversations, and counts all.

  Args:
    reader: reader of the files. An invalid conversation counts as damage; its error becomes the
      reader's `problem` once too many are damaged.
  """

  def __init__(self, reader: BlockReader):
    super().__init__(reader)
    self._long = LongExamples('conversations', 'the assistant has no token')

  def __call__(
    self,
    dataset: tf.data.Dataset,
    sequence_length: Optional[Mapping[str, int]],
    output_features: Mapping[str, seqio.Feature],
  ) -> tf.data.Dataset:
    template = ChatTemplate(output_features['targets'].vocabulary, self.variables)
    length = (sequence_length or {}).get('targets')
    return self._map(dataset, functools.partial(self._tokens, template, length))

  def _tokens(
    self, template: ChatTemplate, length: Optional[int], content: bytes, where: bytes
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shown = where.decode('utf-8', 'surrogateescape')
    try:
      ids, mask = self._checked(template, content, shown)
    except DataError as e:
      self._refuse(shown, e)
      return (np.zeros(0, np.int32),) * 3
    inputs, targets, mask = ids[:-1], ids[1:], mask[1:]
    if length is not None and targets.size > length:
      left_out = not mask[:length].any()
      self._long.log(where, targets.size, length, left_out=left_out)
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
    return ids, mask


def templated_task(
  name: str,
  files: Sequence[str],
  *,
  preprocessor: type[Templated],
  form: FileForm,
  key: str,
  by_split: Optional[Mapping[str, Sequence[str]]] = None,
  chosen: bool = False,
) -> seqio.Task:
  """Returns a task over files whose rows `preprocessor` tokenizes.

  Args:
    name: name of the task.
    files: all files.
    preprocessor: `Conversations`, or `Preferences` of t5x_gpu/data/tasks/preference.py.
    form: form of the files; `preprocessor` must support its rows.
    key: key of the messages, or of the chosen answer.
    by_split: split -> files; None if a hash assigns rows to splits.
    chosen: whether the user chose the key.
  """
  reader = BlockReader(
    form, columns={'targets': key, _WHERE: _WHERE}, num_files=len(files), chosen=chosen
  )
  text = seqio.Feature(named_vocabulary('byte'), add_eos=False)  # the template writes the end mark
  mark = seqio.Feature(seqio.PassThroughVocabulary(2), add_eos=False)
  return builtin.make_task(
    name,
    source=file_source(files, by_split, reader=reader),
    preprocessors=(preprocessor(reader),),
    output_features={
      'targets': text,
      DECODER_INPUTS: text,
      **dict.fromkeys(preprocessor.MARKS, mark),
    },
  )


def templated(task: seqio.Task | seqio.Mixture) -> list[Templated]:
  """Returns the preprocessors of `task` that use a chat template."""
  return [
    preprocessor
    for part in seqio.get_subtasks(task)
    for preprocessor in part.preprocessors
    if isinstance(preprocessor, Templated)
  ]


def is_chat(task: seqio.Task | seqio.Mixture) -> bool:
  """Returns whether the examples of `task` are conversations."""
  return any(isinstance(preprocessor, Conversations) for preprocessor in templated(task))


def set_variables(task: seqio.Task | seqio.Mixture, variables: Optional[Json]) -> None:
  """Sets the variables of the chat template; raises DataError if `task` has no chat template."""
  found = templated(task)
  for preprocessor in found:
    preprocessor.variables = variables
  if variables and not found:
    raise DataError(
      f'{task.name!r} has no conversations, so chat_template_variables = {dict(variables)} would '
      'do nothing.',
      fix='Remove it, or use a task with messages.',
      parameters=('DatasetConfig.chat_template_variables',),
      docs='finetune.md#chat',
    )


def template_facts(task: seqio.Task | seqio.Mixture) -> JsonObject:
  """Returns facts that identify the chat template of `task`; {} for other tasks."""
  if not is_chat(task):
    return {}
  found = templated(task)
  template = ChatTemplate(task.output_features['targets'].vocabulary, found[0].variables)
  return {'chat_template': template.fingerprint}
