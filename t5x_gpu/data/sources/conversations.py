"""A conversation in a JSON object: its messages, checked. Errors name file and line. No TF.

Two forms are read: `messages`, a list of {"role": ..., "content": ...} (OpenAI, TRL), and
ShareGPT's `conversations`, a list of {"from": ..., "value": ...}.
"""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.data.sources.rows import Row
from t5x_gpu.errors import DataError, did_you_mean

MESSAGES, SHAREGPT, TOOLS = 'messages', 'conversations', 'tools'
ROLES = ('system', 'user', 'assistant', 'tool')
# ShareGPT's names of roles; its newer files also have those above.
_SPEAKERS = {'human': 'user', 'gpt': 'assistant', 'observation': 'tool'}
_FORM = (
  '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
)
_FIX = f'Correct or remove that line; a conversation is {_FORM}.'


def conversation_key(names: Sequence[str]) -> Optional[str]:
  """Returns which of the keys `names` holds a conversation; None if none does."""
  return next((name for name in (MESSAGES, SHAREGPT) if name in names), None)


def conversation_row(record: Mapping[str, Any], *, key: str, where: str) -> Row:
  """Returns (conversation as UTF-8 JSON: {'messages', 'tools'}, `where`), or what is wrong.

  Args:
    record: a JSON object, or a row of a table.
    key: of the messages.
    where: file and line, for errors.
  """
  try:
    return _conversation(record, key=key, where=where), os.fsencode(where)
  except DataError as e:
    return e


def _conversation(record: Mapping[str, Any], *, key: str, where: str) -> bytes:
  messages = checked_messages(record.get(key), key=key, where=where)
  if all(message['role'] != 'assistant' for message in messages):
    raise DataError(
      f'{where} has no message of the assistant among its {len(messages)}, so there is nothing to '
      'train on.',
      fix=_FIX,
    )
  try:
    tools = checked_tools(record, where=where)
    return json.dumps(
      {'messages': messages, 'tools': tools}, ensure_ascii=False, default=str
    ).encode()
  except UnicodeEncodeError as e:
    raise DataError(
      f'{where} holds half of a surrogate pair, which is not a character: {e}.', fix=_FIX
    ) from e


def checked_messages(messages: Any, *, key: str, where: str) -> list[dict[str, Any]]:
  """Returns messages with 'role' and 'content'; other fields stay, blank ones are left out.

  Raises:
    DataError: not a list of messages, an unknown role, or content that is not text.
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


def checked_tools(record: Mapping[str, Any], *, where: str) -> Optional[list[Any]]:
  """Returns the tools that the assistant may call, for the template, or None."""
  tools = record.get(TOOLS)
  if isinstance(tools, str):  # tables often hold their JSON
    with contextlib.suppress(ValueError):
      tools = json.loads(tools)
  if tools is not None and not isinstance(tools, list):
    raise DataError(
      f"{where} has {_shown(tools)} under key 'tools'; that must be a list of schemas.",
      fix='Write the list itself, or its JSON, or leave it out.',
    )
  return tools or None


def _message(message: Any, *, where: str) -> dict[str, Any]:
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


def _text(content: Any, *, where: str) -> str:
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


def _shown(value: Any) -> str:
  return json.dumps(value, default=str)[:60]
