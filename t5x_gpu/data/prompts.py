"""Prompts from text or JSON files, and what turns them into token ids. No TF."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional, Protocol

from t5x_gpu.data.sources.conversations import checked_messages, checked_tools, conversation_key
from t5x_gpu.data.sources.json_lines import json_fields, json_object
from t5x_gpu.errors import DataError


class Vocabulary(Protocol):
  """Text <-> token ids. `zero_is_padding` and `decode_all` have the defaults of what is optional.

  Optional:
    moved_zero_id: if it is not None, id 0 is a word, so samples may contain it.
    spelled(ids) -> str: as `decode`, of all ids, with special tokens.
  """

  def encode(self, text: str) -> list[int]: ...
  def decode(self, ids: list[int]) -> str: ...


def zero_is_padding(vocabulary: Vocabulary) -> bool:
  """Returns whether id 0 is padding, rather than a word."""
  return getattr(vocabulary, 'moved_zero_id', None) is None


def decode_all(vocabulary: Vocabulary, ids: list[int]) -> str:
  """Returns the text of `ids`, with special tokens if the vocabulary can spell them."""
  return getattr(vocabulary, 'spelled', vocabulary.decode)(ids)


@dataclasses.dataclass(frozen=True)
class EncodedRow:
  """A row of an encoder.

  Attributes:
    tokens: their ids, special ones included.
    num_second: how many at the end are of the second text of a pair.
    words: place of the first token of each word that gets a tag; -1 for a word without a token, or
      beyond the end of the row.
  """

  tokens: tuple[int, ...]
  num_second: int = 0
  words: tuple[int, ...] = ()

  def __len__(self) -> int:
    return len(self.tokens)

  def __iter__(self) -> Iterator[int]:
    return iter(self.tokens)


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A text to continue.

  Attributes:
    where: source of the prompt, 'file:line' or 'TASK, split SPLIT, example 3'.
    inputs: the text.
    targets: a continuation to score, or None.
    tokens, target_tokens: their ids if the source has them, else None.
    extra: other fields of a JSON line; they are copied to the result.
    number: line number in the file, from 0, blank lines counted; None for examples of a task, which
      are numbered in order.
    messages: a conversation to continue, checked; None if `inputs` is the prompt.
    tools: of the conversation, for the chat template.
    num_second: how many of `tokens`, at the end, are of the second text of a pair.
  """

  where: str
  inputs: str
  targets: Optional[str] = None
  tokens: Optional[tuple[int, ...]] = None
  target_tokens: Optional[tuple[int, ...]] = None
  extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  number: Optional[int] = None
  messages: Optional[Sequence[Mapping[str, Any]]] = None
  tools: Optional[Sequence[Any]] = None
  num_second: int = 0


class PromptText(Protocol):
  """Text <-> ids, the way a task does it.

  Attributes:
    name: of the vocabulary, for messages.
    size: number of ids that its texts may have.
    eos_id: ends what the model writes, or None.
    start_id: precedes a prompt in the tokenizer's own template (<bos>), or None.
    zero_is_a_word: id 0 is a word of the tokenizer and the model, not padding.
  """

  name: str
  size: int
  eos_id: Optional[int]
  start_id: Optional[int]
  zero_is_a_word: bool

  def encode_inputs(self, text: str) -> list[int]:
    """Returns the ids of a prompt, ended as the task ends its inputs."""

  def encode_targets(self, text: str) -> list[int]:
    """Returns the ids of a text to score, ended as the task ends its targets."""

  def encode_chat(
    self, messages: Sequence[Mapping[str, Any]], *, tools: Optional[list] = None, where: str
  ) -> list[int]:
    """Returns the ids of a conversation and of what begins the answer. Raises DataError."""

  def chat_ends(self) -> list[int]:
    """Returns the id that ends an answer in the chat template, if it is one token."""

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text that a model wrote, without its end mark."""

  def examples(self) -> Iterable[Prompt]:
    """Yields the task's split in order. Raises DataError if there is no task or no example."""


def read_prompts(path: str, *, chat: bool = False) -> list[Prompt]:
  """Returns the prompts of a file: one JSON object per line in .jsonl, else one text per line.

  A JSON object has text under 'inputs', and under 'targets' a continuation to score; with `chat`
  it may have 'messages' instead, and a text is a message of the user. Blank lines are skipped, but
  they count in the numbers of the prompts.

  Raises:
    DataError: no such file, no prompt in it, or a bad line (named file:line).
  """
  shown = os.path.expanduser(path)
  try:
    with open(shown, 'rb') as f:
      lines = f.readlines()
  except OSError as e:
    raise DataError(
      f'--prompts={path} cannot be read: {e.strerror} (working directory: {os.getcwd()}).',
      fix='Give a .jsonl or .txt file, or - for standard input.',
    ) from e
  return parse_prompts(lines, name=path, is_json=shown.endswith(('.jsonl', '.json')), chat=chat)


def parse_prompts(
  lines: Sequence[bytes], *, name: str, is_json: Optional[bool], chat: bool = False
) -> list[Prompt]:
  """Returns the prompts of `lines`; see `read_prompts`.

  Args:
    lines: with their line ends.
    name: of the file, for messages.
    is_json: None to decide by the first line that is not blank: JSON objects begin with {.
    chat: prompts are conversations.
  """
  numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
  if not numbered:
    raise DataError(
      f'{name} has no prompts: ' + (f'{len(lines)} blank lines.' if lines else 'it is empty.'),
      fix='Write one prompt per line: a text, or in .jsonl {"inputs": "a text"}.',
    )
  if is_json is None:
    is_json = numbered[0][1].lstrip().startswith(b'{')
  parse = _from_json if is_json else _from_text
  prompts = [
    dataclasses.replace(parse(line, f'{name}:{number}'), number=number - 1)
    for number, line in numbered
  ]
  return [_with_messages(prompt, chat=chat) for prompt in prompts]


def _with_messages(prompt: Prompt, *, chat: bool) -> Prompt:
  """Returns `prompt` with messages if `chat`: its own, or one of the user with its text."""
  if chat and prompt.messages is None:
    return dataclasses.replace(prompt, messages=[{'role': 'user', 'content': prompt.inputs}])
  if not chat and prompt.messages is not None:
    raise DataError(
      f'{prompt.where} has messages, which need the chat template of the tokenizer.',
      fix='Add --chat, or give every line {"inputs": "a text"}.',
      docs='infer.md#chat',
    )
  return prompt


def _from_text(line: bytes, where: str) -> Prompt:
  try:
    return Prompt(where, line.decode('utf-8').rstrip('\r\n'))
  except UnicodeDecodeError as e:
    raise DataError(
      f'{where} is not UTF-8: {e.reason} at byte {e.start}.', fix='Save the file as UTF-8.'
    ) from e


def _from_json(line: bytes, where: str) -> Prompt:
  extra = json_object(line, where=where, keys=['inputs'])
  key = conversation_key(list(extra))
  if key is not None and 'inputs' not in extra:
    messages = checked_messages(extra[key], key=key, where=where)
    if messages[-1]['role'] == 'assistant':
      raise DataError(
        f'{where} ends with message {len(messages)} of the assistant, so there is nothing to '
        'answer.',
        fix='Let it end with a message of the user or a tool.',
      )
    tools, last = checked_tools(extra, where=where), messages[-1].get('content', '')
    return Prompt(where, last, extra=extra, messages=messages, tools=tools)
  keys = ['inputs', *(['targets'] if extra.get('targets') is not None else [])]
  texts = [text.decode() for text in json_fields(line, keys=keys, where=where)]
  return Prompt(
    where, *texts, extra={k: v for k, v in extra.items() if k not in ('inputs', 'targets')}
  )
