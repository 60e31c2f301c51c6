"""Reads prompts from files of text, JSON lines or tables. No TF."""

import dataclasses
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Optional

import pyarrow as pa

from t5x_gpu.data.data_module import Prompt
from t5x_gpu.data.sources.column_formats import PARQUET, parquet_records
from t5x_gpu.data.sources.conversations import checked_messages, checked_tools, conversation_key
from t5x_gpu.data.sources.json_lines import json_fields, json_object
from t5x_gpu.data.sources.line_formats import csv_records
from t5x_gpu.data.sources.rows import (
  COMPRESSED,
  limited_lines,
  open_text,
  require_columns,
  split_columns,
)
from t5x_gpu.errors import DataError, did_you_mean, first_line
from t5x_gpu.storage.files import is_missing, reason_of, remedy
from t5x_gpu.storage.json_schema import Json

_JSON, _TABLES = ('.jsonl', '.json'), ('.csv', '.tsv', '.parquet')
_NOT_READ = ('.arrow', '.tfrecord', '.arrayrecord')
# Fields of a prompt, for which columns can be chosen.
_CHOICES = ('text', 'inputs', 'targets', 'text2', 'messages', 'tools')


def read_prompts(path: str, *, chat: bool = False) -> list[Prompt]:
  """Returns the prompts of a file: rows of .csv, .tsv or .parquet, else one per line.

  A JSON object in .jsonl has text under 'inputs', else 'text', and optionally a continuation to
  score under 'targets'; with `chat` it may have 'messages' instead, and a text is a message of the
  user. Tables have columns of these names. 'FILE#text=COLUMN' chooses another column or key. Blank
  lines and rows are skipped, but they count in the numbers of the prompts.

  Raises:
    DataError: the file does not exist, has no prompt, or has a bad line (named file:line).
  """
  name, columns = _chosen(path)
  shown = os.path.expanduser(name)
  ending = shown.lower()
  for codec in COMPRESSED:
    ending = ending.removesuffix(codec)
  try:
    if ending.endswith(_NOT_READ):
      raise DataError(
        f'--prompts={path}: files of this form are not read as prompts.',
        fix='Give a .jsonl, .csv, .tsv, .parquet or .txt file. Files of tf.train.Examples are '
        'tfrecord:PATTERN#inputs=FEATURE.',
        docs='infer.md',
      )
    if ending.endswith(_TABLES):
      form = ending.rpartition('.')[2]
      prompts = list(_from_table(shown, form, columns, chat=chat))
      if not prompts:
        raise DataError(f'{name} has no prompts: no row with a text.', fix='Give one per row.')
      return [_with_messages(prompt, chat=chat) for prompt in prompts]
    with open_text(shown) as f:
      lines = list(limited_lines(f, name))
  except (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError) as e:
    if isinstance(e, OSError) and not is_missing(e):
      raise DataError(
        f'--prompts={path} cannot be read: {reason_of(e)}.', fix=remedy(e), docs='infer.md'
      ) from e
    reason = getattr(e, 'strerror', None) or first_line(e)
    raise DataError(
      f'--prompts={path} cannot be read: {reason} (working directory: {os.getcwd()}).',
      fix='Give a .jsonl, .csv, .tsv, .parquet or .txt file, or - for standard input.',
    ) from e
  is_json = ending.endswith(_JSON)
  if columns and not is_json:
    raise DataError(
      f'--prompts={path} chooses a column, and {name} has a text per line.',
      fix='Leave out what follows the #, or give a .jsonl, .csv, .tsv or .parquet file.',
    )
  return parse_prompts(lines, name=name, is_json=is_json, chat=chat, columns=columns)


def _chosen(path: str) -> tuple[str, dict[str, str]]:
  """Returns the file, and field of a prompt -> column for the columns that `path` chooses."""
  name, pairs = split_columns(path)
  columns = dict(pairs or ())
  for choice in columns:
    if choice not in _CHOICES or not columns[choice]:
      raise DataError(
        f'--prompts={path} chooses a column for {choice!r}.' + did_you_mean(choice, _CHOICES),
        fix='Write FILE#text=COLUMN, FILE#inputs=COLUMN,targets=COLUMN, for pairs of texts '
        'FILE#text=COLUMN,text2=COLUMN, or for conversations FILE#messages=COLUMN.',
      )
  if pairs and not {'text', 'inputs', 'messages'} & columns.keys():
    raise DataError(
      f'--prompts={path} chooses no column for the prompt.', fix='Write FILE#text=COLUMN.'
    )
  return name, {'inputs' if choice == 'text' else choice: c for choice, c in columns.items()}


def _from_table(path: str, form: str, chosen: Mapping[str, str], *, chat: bool) -> Iterator[Prompt]:
  """Yields a prompt per row that has one."""
  columns: dict[str, str] = {}

  def prompt(record: Json, where: str, number: int) -> Iterator[Prompt]:
    fields = {field: record.get(column) for field, column in columns.items()}
    fields = {field: x for field, x in fields.items() if x is not None and str(x).strip()}
    if fields:
      if 'messages' in fields:  # as in training, types that JSON lacks (dates) become text
        fields = json.loads(json.dumps(fields, default=str))
      yield dataclasses.replace(_of_fields(fields, columns, where), number=number)

  if form == 'parquet':
    columns.update(_table_columns(PARQUET.columns(path), chosen, path, chat=chat))
    for number, (record, where) in enumerate(parquet_records(path, list(columns.values()))):
      if isinstance(record, DataError):
        raise record
      yield from prompt(record, where, number)
    return
  names: list[str] = []
  number = 0
  for fields, where, _ in csv_records(path, form):
    if isinstance(fields, DataError):
      raise fields
    if names:
      yield from prompt(dict(zip(names, fields)), where, number)
      number += 1
    elif fields:
      names = fields
      columns.update(_table_columns(names, chosen, path, chat=chat))


def _table_columns(
  names: Sequence[str], chosen: Mapping[str, str], path: str, *, chat: bool
) -> dict[str, str]:
  """Returns field of a prompt -> column: the chosen columns, or columns with the usual names."""
  columns = dict(chosen)
  if not columns:
    messages = conversation_key(names) if chat else None
    text = next((name for name in ('inputs', 'text') if name in names), 'text')
    columns = {'inputs': text} if messages is None else {'messages': messages}
    more = ('targets', 'text2') if messages is None else ('tools',)
    columns |= {name: name for name in more if name in names}
  if missing := [column for column in columns.values() if column not in names]:
    raise DataError(
      f'{path} has no column {missing[0]!r}: it has {", ".join(map(repr, names)) or "none"}.'
      + did_you_mean(missing[0], names),
      fix='Choose the column with the prompts: --prompts=FILE#text=COLUMN.',
      docs='infer.md',
    )
  require_columns(names, list(columns.values()), path)
  return columns


def _of_fields(fields: Json, columns: Mapping[str, str], where: str) -> Prompt:
  """Returns the prompt with these `fields`; `columns` name the columns or keys for errors."""
  if 'messages' in columns:
    return _conversation(fields, key='messages', where=where, extra={})
  for field in ('inputs', 'targets', 'text2'):
    if field in columns and not isinstance(fields.get(field), str):
      if field in fields or field == 'inputs':
        found = json.dumps(fields[field], default=str)[:60] if field in fields else 'nothing'
        raise DataError(
          f'{where} has {found} in {columns[field]!r}, not a text.',
          fix='Correct or remove that row, or choose another column: --prompts=FILE#text=COLUMN.',
        )
  _check_encodes(fields, where)
  extra = {'text2': fields['text2']} if 'text2' in fields else {}
  return Prompt(where, fields['inputs'], fields.get('targets'), extra=extra)


def _check_encodes(value: object, where: str) -> None:
  try:
    json.dumps(value, ensure_ascii=False).encode()
  except UnicodeEncodeError as e:
    raise DataError(
      f'{where} holds half of a surrogate pair, which is not a character: {e}.',
      fix='Correct or remove that line.',
    ) from e


def parse_prompts(
  lines: Sequence[bytes],
  *,
  name: str,
  is_json: Optional[bool],
  chat: bool = False,
  columns: Optional[Mapping[str, str]] = None,
) -> list[Prompt]:
  """Returns the prompts of `lines`; see `read_prompts`.

  Args:
    lines: lines with their line ends.
    name: name of the file, for messages.
    is_json: None to decide by the first line that is not blank: JSON objects begin with {.
    chat: prompts are conversations.
    columns: field of a prompt -> key of a JSON object; None or empty for the usual keys.
  """
  numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
  if not numbered:
    raise DataError(
      f'{name} has no prompts: ' + (f'{len(lines)} blank lines.' if lines else 'it is empty.'),
      fix='Write one prompt per line: a text, or in .jsonl {"inputs": "a text"}.',
    )
  if is_json is None:
    is_json = numbered[0][1].lstrip().startswith(b'{')

  def parse(line: bytes, where: str) -> Prompt:
    if not is_json:
      return _from_text(line, where)
    if not columns:
      return _from_json(line, where)
    record = json_object(line, where=where, keys=[columns.get('inputs', 'messages')])
    fields = {field: record[key] for field, key in columns.items() if key in record}
    return _of_fields(fields, columns, where)

  prompts = [
    dataclasses.replace(parse(line, f'{name}:{number}'), number=number - 1)
    for number, line in numbered
  ]
  return [_with_messages(prompt, chat=chat) for prompt in prompts]


def _with_messages(prompt: Prompt, *, chat: bool) -> Prompt:
  """Returns `prompt` with messages if `chat`: its messages, or its text as a user message."""
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


def _conversation(record: Json, *, key: str, where: str, extra: Json) -> Prompt:
  messages = checked_messages(record.get(key), key=key, where=where)
  if messages[-1]['role'] == 'assistant':
    raise DataError(
      f'{where} ends with message {len(messages)} of the assistant, so there is nothing to answer.',
      fix='Let it end with a message of the user or a tool.',
    )
  tools, last = checked_tools(record, where=where), messages[-1].get('content', '')
  _check_encodes([messages, tools], where)
  return Prompt(where, last, extra=extra, messages=messages, tools=tools)


def _from_json(line: bytes, where: str) -> Prompt:
  extra = json_object(line, where=where, keys=['inputs'])
  key = conversation_key(list(extra))
  if key is not None and 'inputs' not in extra:
    return _conversation(extra, key=key, where=where, extra=extra)
  prompt = next((name for name in ('inputs', 'text') if name in extra), None)
  if prompt is None:
    raise DataError(
      f"{where} has no text under key 'inputs' or 'text': it has "
      f'{", ".join(sorted(extra)) or "no keys"}.',
      fix='Correct or remove that line, or choose the key: --prompts=FILE#text=KEY.',
    )
  keys = [prompt, *(['targets'] if extra.get('targets') is not None else [])]
  texts = [text.decode() for text in json_fields(line, keys=keys, where=where)]
  return Prompt(
    where, *texts, extra={k: v for k, v in extra.items() if k not in (prompt, 'targets')}
  )
