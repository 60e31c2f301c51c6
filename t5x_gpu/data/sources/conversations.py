"""Checks conversations and preferences in JSON objects. Errors name file and line. No TF.

Two forms of conversations are supported: `messages`, a list of {"role": ..., "content": ...}
(OpenAI, TRL), and ShareGPT's `conversations`, a list of {"from": ..., "value": ...}. A preference
is two answers, `chosen` and `rejected`, to a `prompt`: texts, or lists of messages (TRL). Without a
`prompt`, the common beginning of both answers is the prompt.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

from t5x_gpu.data.sources.json_lines import json_value
from t5x_gpu.data.sources.rows import Row
from t5x_gpu.errors import DataError, did_you_mean
from t5x_gpu.storage.json_schema import Json, JsonObject, JsonValue

MESSAGES, SHAREGPT, TOOLS = 'messages', 'conversations', 'tools'
CHOSEN, REJECTED, PROMPT = 'chosen', 'rejected', 'prompt'
ROLES = ('system', 'user', 'assistant', 'tool')
# ShareGPT's names of roles; newer files also use `ROLES`.
_SPEAKERS = {'human': 'user', 'gpt': 'assistant', 'observation': 'tool'}
_FORM = (
  '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
)
_FIX = f'Correct or remove that line; a conversation is {_FORM}.'
_PAIR_FIX = (
  'Correct or remove that line; a preference is {"prompt": "...", "chosen": "...", "rejected": '
  '"..."}, or the same with lists of messages.'
)


@dataclasses.dataclass(frozen=True)
class RecordForm:
  """How a JSON object, or a row of a table, becomes a row.

  Attributes:
    row: (record, key=, where=) -> the row, or an error.
    optional: columns of a table that are read, in addition to the key, if they exist.
  """

  row: Callable[..., Row]
  optional: tuple[str, ...]


def conversation_key(names: Sequence[str]) -> Optional[str]:
  """Returns the key among `names` that holds a conversation, or None."""
  return next((name for name in (MESSAGES, SHAREGPT) if name in names), None)


def conversation_row(record: Json, *, key: str, where: str) -> Row:
  """Returns (conversation as UTF-8 JSON: {'messages', 'tools'}, `where`), or a DataError.

  Args:
    record: a JSON object, or a row of a table.
    key: key of the messages.
    where: file and line, for errors.
  """
  return _row(_conversation, record, key=key, where=where)


def _row(make: Callable[..., JsonObject], record: Json, **options: str) -> Row:
  where = options['where']
  try:
    content = json.dumps(make(record, **options), ensure_ascii=False, default=str).encode()
  except UnicodeEncodeError as e:
    return DataError(
      f'{where} holds half of a surrogate pair, which is not a character: {e}.',
      fix='Correct or remove that line.',
    )
  except DataError as e:
    return e
  return content, os.fsencode(where)


def _conversation(record: Json, *, key: str, where: str) -> JsonObject:
  messages = checked_messages(record.get(key), key=key, where=where)
  if all(message['role'] != 'assistant' for message in messages):
    raise DataError(
      f'{where} has no message of the assistant among its {len(messages)}, so there is nothing to '
      'train on.',
      fix=_FIX,
    )
  return {'messages': messages, 'tools': checked_tools(record, where=where)}


def preference_row(
  record: Json, *, key: str, where: str, rejected: str = REJECTED, prompt: str = PROMPT
) -> Row:
  """Returns (preference as UTF-8 JSON: {'prompt', 'chosen', 'rejected', 'tools'}, `where`).

  The first three are texts, or lists of messages. Returns a DataError for an invalid record.

  Args:
    record: a JSON object, or a row of a table.
    key: key of the chosen answer.
    where: file and line, for errors.
    rejected, prompt: keys of the rejected answer and of the prompt.
  """
  return _row(_preference, record, key=key, where=where, rejected=rejected, prompt=prompt)


CONVERSATIONS = RecordForm(conversation_row, (TOOLS,))


def preferences(*, rejected: str = REJECTED, prompt: str = PROMPT) -> RecordForm:
  """Returns the RecordForm of preferences; arguments as in `preference_row`."""
  row = functools.partial(preference_row, rejected=rejected, prompt=prompt)
  return RecordForm(row, (rejected, prompt, TOOLS))


def _preference(record: Json, *, key: str, where: str, rejected: str, prompt: str) -> JsonObject:
  answers = {name: record.get(name) for name in (key, rejected)}
  asked = record.get(prompt)
  for name, answer in answers.items():
    if not answer:
      there = ', '.join(sorted(map(str, record))) or 'nothing'
      found = f'it has {there}' if name not in record else f'it is {_shown(answer)}'
      raise DataError(f'{where} has no answer under key {name!r}: {found}.', fix=_PAIR_FIX)
  if record[key] == record[rejected]:
    raise DataError(
      f'{where} has the same answer as {key!r} and as {rejected!r}: there is nothing to prefer.',
      fix='Remove that line.',
    )
  if all(isinstance(answer, str) for answer in answers.values()):
    asked, *both = _of_texts(asked, answers, where=where)
  elif all(isinstance(answer, list) for answer in answers.values()):
    asked, *both = _of_messages(asked, answers, prompt=prompt, where=where)
  else:
    kinds = ' and '.join(f'{_shown(a)} under key {name!r}' for name, a in answers.items())
    raise DataError(f'{where} has {kinds}: both must be texts, or lists.', fix=_PAIR_FIX)
  return {
    PROMPT: asked,
    CHOSEN: both[0],
    REJECTED: both[1],
    TOOLS: checked_tools(record, where=where),
  }


def _of_texts(asked: JsonValue, answers: Mapping[str, str], *, where: str) -> list[str]:
  """Returns prompt and answers; without a prompt, uses the common beginning of the answers."""
  if asked is None:
    asked = os.path.commonprefix(list(answers.values()))
    asked = asked.removesuffix(' ')  # tokens begin, rather than end, with a space
    answers = {name: answer.removeprefix(asked) for name, answer in answers.items()}
  if not isinstance(asked, str) or not asked:
    found = _shown(asked) if asked else 'nothing'
    raise DataError(
      f'{where} has answers that are texts, but {found} as their prompt.', fix=_PAIR_FIX
    )
  for name, answer in answers.items():
    if not answer:
      raise DataError(
        f"{where} has no key 'prompt', and the other answer begins with all of {name!r}: the text "
        f'that both share counts as the prompt, so {name!r} has no answer left.',
        fix="Add the key 'prompt', and remove the prompt from the answers.",
      )
  return [asked, *answers.values()]


def _of_messages(
  asked: JsonValue, answers: Mapping[str, list], *, prompt: str, where: str
) -> list[list[JsonObject]]:
  """Returns prompt and answers; without a prompt, uses the common first messages of the answers."""
  both = [checked_messages(answer, key=name, where=where) for name, answer in answers.items()]
  if isinstance(asked, list):
    asked = checked_messages(asked, key=prompt, where=where)
  else:
    shared = 0
    while shared < min(map(len, both)) and both[0][shared] == both[1][shared]:
      shared += 1
    question = [{'role': 'user', 'content': asked}] if isinstance(asked, str) else []
    asked = both[0][:shared] or question
    both = [messages[shared:] for messages in both]
  if not asked:
    raise DataError(
      f'{where} has no prompt: no key {prompt!r}, and the first messages differ.', fix=_PAIR_FIX
    )
  for name, messages in zip(answers, both):
    if all(message['role'] != 'assistant' for message in messages):
      raise DataError(
        f'{where} has no message of the assistant in {name!r} after the prompt of {len(asked)} '
        'messages.',
        fix=_PAIR_FIX,
      )
  return [asked, *both]


def checked_messages(messages: JsonValue, *, key: str, where: str) -> list[JsonObject]:
  """Returns messages with 'role' and 'content'; keeps other fields, drops blank messages.

  Raises:
    DataError: the value is not a list of messages, a role is unknown, or content is not text.
  """
  if not isinstance(messages, list) or not messages:
    found = 'nothing' if messages is None else _shown(messages)
    raise DataError(
      f'{where} should have a list of messages under key {key!r}; it has {found}.', fix=_FIX
    )
  return [
    _message(message, where=f'{where}, message {number} of {len(messages)},')
    for number, message in enumerate(messages, 1)
  ]


def checked_tools(record: Json, *, where: str) -> Optional[list[JsonObject]]:
  """Returns the tools that the assistant may call, for the template, or None."""
  tools, fix = record.get(TOOLS), 'Write the list itself, or its JSON, or leave it out.'
  if isinstance(tools, str):  # tables often hold tools as JSON text
    try:
      tools = json_value(tools)
    except ValueError as e:
      raise DataError(
        f"{where} has a text under key 'tools' that is not the JSON of a list of schemas: {e}.",
        fix=fix,
      ) from e
  if tools is not None and not isinstance(tools, list):
    raise DataError(
      f"{where} has {_shown(tools)} under key 'tools'; that must be a list of schemas.", fix=fix
    )
  return tools or None


def _message(message: JsonValue, *, where: str) -> JsonObject:
  if not isinstance(message, dict):
    raise DataError(f'{where} is {_shown(message)}, not an object.', fix=_FIX)
  fields = {name: value for name, value in message.items() if value is not None}
  role = fields.pop('role', None) or fields.pop('from', None)
  role = _SPEAKERS.get(role, role) if isinstance(role, str) else role
  if role not in ROLES:
    raise DataError(
      f'{where} has the role {role!r}; roles are {", ".join(ROLES)}.'
      + did_you_mean(str(role), [*ROLES, *_SPEAKERS]),
      fix=_FIX,
    )
  content = fields.pop('content', None)
  content = fields.pop('value', None) if content is None else content
  if content is None and fields.get('tool_calls'):
    return {'role': role, **fields}
  return {'role': role, 'content': _text(content, where=where), **fields}


def _text(content: JsonValue, *, where: str) -> str:
  """Returns the text of a message; a list of parts of text is joined."""
  if isinstance(content, str):
    return content
  found = 'no content' if content is None else f'the content {_shown(content)}'
  if isinstance(content, list) and content:
    kinds = [part.get('type') if isinstance(part, dict) else None for part in content]
    texts = [part.get('text') for part in content if isinstance(part, dict)]
    other = next((i for i, kind in enumerate(kinds) if kind != 'text'), None)
    if other is None and all(isinstance(text, str) for text in texts):
      return ''.join(texts)
    other = other or 0
    found = f'a part of type {kinds[other]!r} (part {other + 1} of {len(content)})'
  raise DataError(
    f'{where} has {found}; only text can be trained on, no images, audio or files.',
    fix='Correct or remove that line; content is a text, or a list of {"type": "text", "text": '
    '"..."}.',
  )


def _shown(value: JsonValue) -> str:
  return json.dumps(value, default=str)[:60]
