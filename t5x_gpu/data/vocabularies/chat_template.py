"""The chat template of a Hugging Face tokenizer: messages -> text, ids, and a loss mask.

A template is a Jinja program that comes with the tokenizer. As in transformers, it runs in Jinja's
sandbox: it sees the messages and the special tokens, and can neither import modules nor open files.
It may use the same functions and filters as in transformers, with one difference: the date is
always the same, so that the data of a run do not depend on the day.
"""

import datetime
import functools
import hashlib
import importlib
import json
import os
import pathlib
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np

from t5x_gpu.data.tf_runtime import seqio
from t5x_gpu.data.vocabularies.huggingface import HuggingFaceVocabulary
from t5x_gpu.errors import DataError, first_line
from t5x_gpu.storage.files import check_not_refused
from t5x_gpu.storage.json_schema import Json, JsonValue, read_json

TEMPLATE_FILE, CONFIG_FILE = 'chat_template.jinja', 'tokenizer_config.json'
# A folder of further templates, such as tool_use.jinja.
_MORE_TEMPLATES = 'additional_chat_templates'
# Result of `strftime_now`: the date that Llama 3.1's template uses without a clock.
DATE = datetime.datetime(2024, 7, 26)
# Marks that `{% generation %}` writes around its content: two noncharacters, which never occur in
# text.
_BEGIN, _END = '\ufdd0', '\ufdd1'
_CALLS = 'tool_calls'  # field of a message of the assistant
_OLDEST_JINJA = (3, 1, 6)  # templates can escape the sandbox of earlier versions
_SHOWN = 40
_PARAMETERS = ('DatasetConfig.vocabulary',)

Message = Json
Span = tuple[int, int]


class ChatTemplate:
  """The chat template of a tokenizer.

  Args:
    vocabulary: the tokenizer.
    variables: name -> value, for the template; they replace special tokens of the same name.
    Raises:
    DataError: the vocabulary is not a Hugging Face tokenizer, its template is missing or broken, or
      Jinja is not installed.
    Attributes:
    file: file of the template.
  """

  def __init__(self, vocabulary: seqio.Vocabulary, variables: Optional[Json] = None):
    if not isinstance(vocabulary, HuggingFaceVocabulary):
      raise DataError(
        'Messages need a tokenizer with a chat template; the vocabulary is a '
        f'{type(vocabulary).__name__}, which has none.',
        fix="Set VOCABULARY = 'huggingface:FOLDER', the tokenizer of a chat model.",
        parameters=_PARAMETERS,
        docs='finetune.md#chat',
      )
    self._vocabulary = vocabulary
    self.file, self._sources = _sources(vocabulary.path.parent)
    self._templates = {name: _compiled(text) for name, text in self._sources.items()}
    self._variables = dict(variables or {})

  @property
  def fingerprint(self) -> str:
    """Digest of the template and its variables, 16 hex digits; the tokenizer has its own."""
    facts = [self._sources, self._variables] if self._variables else self._sources
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

  def prompt(
    self, messages: Sequence[Message], *, tools: Optional[list] = None, where: str
  ) -> list[int]:
    """Returns SeqIO's ids of `messages` and of the start of the assistant's answer."""
    return self._vocabulary.encode(self.text(messages, tools=tools, where=where))

  def text(
    self,
    messages: Sequence[Message],
    *,
    tools: Optional[list] = None,
    where: str,
    continues: bool = False,
  ) -> str:
    """Returns the text of `messages` and of the start of the assistant's answer.

    Args:
      messages, tools, where: as in `tokens`.
      continues: the last message is the start of the answer: the text ends with its content.
    Raises:
      DataError: the template refuses the messages, or does not show the last one's content.
    """
    if not continues:
      return _unmarked(self._render(messages, tools, where=where, add_generation_prompt=True))[0]
    text = _unmarked(self._render(messages, tools, where=where))[0]
    before, start, _ = text.rpartition(messages[-1]['content'].strip())
    if not start:
      raise DataError(
        f'{where}: the chat template {str(self.file)!r} does not show the last message, which '
        'begins the answer.',
        fix='Use a prompt that does not begin the answer, or another template.',
        parameters=_PARAMETERS,
        docs='finetune.md#chat',
      )
    return before + start

  def tokens(
    self, messages: Sequence[Message], *, tools: Optional[list] = None, where: str, first: int = 0
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns SeqIO's ids [n] of a conversation, int32, and 1 where the assistant writes, else 0.

    The template's `{% generation %}` encloses the assistant's text. Without `{% generation %}`, the
    assistant's text of a message is the difference between the text up to the message, and the text
    of the earlier messages with the generation prompt, up to the special token that ends the
    message. As in transformers, a token that is partly the assistant's counts as the assistant's.

    Args:
      messages: messages with 'role' and 'content'.
      tools: tools that the assistant may call, as JSON schemas.
      where: file and line, for errors.
      first: the first message to mark; earlier messages of the assistant count as prompts.
    Raises:
      DataError: the template refuses the messages, or does not show the assistant's text.
    """
    text, spans = self._text_and_spans(messages, tools, where=where, first=first)
    ids, offsets = self._vocabulary.encode_with_offsets(text)
    starts, ends = np.asarray(offsets, np.int64).reshape(-1, 2).T
    mask = np.zeros(len(ids), np.int32)
    for begin, end in spans:
      inside = np.flatnonzero((starts < end) & (ends > begin) & (ends > starts))
      if inside.size:
        mask[inside[0] : inside[-1] + 1] = 1
    return np.asarray(ids, np.int32), mask

  def turn_end(self) -> Optional[int]:
    """Returns SeqIO's id of the special token that ends the assistant's text, or None."""
    messages = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]
    ids, mask = self.tokens(messages, where=f'The chat template {str(self.file)!r}')
    last = int(ids[np.flatnonzero(mask)[-1]]) if mask.any() else None
    return last if last in self._vocabulary.added_tokens else None

  def _render(
    self,
    messages: Sequence[Message],
    tools: Optional[list],
    *,
    where: str,
    add_generation_prompt: bool = False,
  ) -> str:
    kind = 'tool_use' if tools and 'tool_use' in self._templates else 'default'
    try:
      return self._templates[kind].render(
        messages=messages,
        tools=tools,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **{**self._vocabulary.special_tokens, **self._variables},
      )
    except Exception as e:  # a template may raise anything
      roles = ', '.join(message['role'] for message in messages) or 'none'
      raise DataError(
        f'{where}: the chat template {str(self.file)!r} refuses these messages: {first_line(e)}. '
        f'Their roles: {roles}.',
        fix='Correct or remove that conversation, or use another template.',
        parameters=_PARAMETERS,
        docs='finetune.md#chat',
      ) from e

  def _text_and_spans(
    self, messages: Sequence[Message], tools: Optional[list], *, where: str, first: int
  ) -> tuple[str, list[Span]]:
    """Returns a conversation as text, and the assistant's character ranges from message `first`."""
    if any(mark in json.dumps(messages, ensure_ascii=False) for mark in (_BEGIN, _END)):
      raise DataError(
        f'{where} has U+FDD0 or U+FDD1, which are not Unicode characters.', fix='Remove them.'
      )
    text, spans = _unmarked(self._render(messages, tools, where=where))
    self._check_calls(text, messages, tools, where=where)
    if spans:
      before = _unmarked(self._render(messages[:first], tools, where=where))[1] if first else ()
      return text, spans[len(before) :]
    return text, [
      self._written(text, messages, i, tools, where=where)
      for i, message in enumerate(messages)
      if message['role'] == 'assistant' and i >= first
    ]

  def _check_calls(
    self, text: str, messages: Sequence[Message], tools: Optional[list], *, where: str
  ) -> None:
    """Raises DataError if `text`, of all messages, is the same without calls of tools.

    Templates from before tools ignore them, so the assistant would learn to answer nothing.
    """
    calling = [i for i, message in enumerate(messages, 1) if message.get(_CALLS)]
    if not calling:
      return
    silent = [{'content': '', **{k: v for k, v in m.items() if k != _CALLS}} for m in messages]
    try:
      same = _unmarked(self._render(silent, tools, where=where))[0] == text
    except DataError:  # the template needs the calls
      return
    if same:
      raise DataError(
        f'{where}: the chat template {str(self.file)!r} does not show the calls of tools in '
        f'message {calling[0]} ({_CALLS}): the text is the same without them.',
        fix='Use a template that writes them, or write them into the content of the message.',
        parameters=_PARAMETERS,
        docs='finetune.md#chat',
      )

  def _written(
    self, text: str, messages: Sequence[Message], i: int, tools: Optional[list], *, where: str
  ) -> Span:
    """Returns the range in `text`, the text of all messages, of the assistant's message `i`."""
    before = self._render(messages[:i], tools, where=where, add_generation_prompt=True)
    through = self._render(messages[: i + 1], tools, where=where)
    begin = len(before)
    if not (text.startswith(before) and through.startswith(before)):
      other = before if not text.startswith(before) else through
      raise self._unclear(text, other, i, where=where)
    end = len(through) if text.startswith(through) else self._end(text, through, begin, messages[i])
    if end is None:
      raise self._unclear(text, through, i, where=where)
    written = text[begin:end].rstrip()
    ends_itself = any(written.endswith(token) for token in self._vocabulary.added_tokens.values())
    return begin, begin + len(written) if ends_itself else end

  def _end(self, text: str, through: str, begin: int, message: Message) -> Optional[int]:
    """Returns where `message` ends in `text`, if its text there is shorter than as last message.

    Templates of Phi 3 write the end of the whole text after the last answer. Both texts of the
    answer begin alike, up to its end mark at least.

    Templates of Qwen 3 write empty thoughts only into the last answer. In both texts, the answer
    follows the generation prompt and has the same end mark.
    """
    content = message.get('content', '').strip()
    if not content or content not in through[begin:]:
      return None
    after = through.rindex(content) + len(content)
    alike = begin + len(os.path.commonprefix([text[begin:], through[begin:]]))
    tokens = self._vocabulary.added_tokens.values()
    marks = [(through.rfind(token, after, alike), len(token)) for token in tokens]
    if ends := [at + size for at, size in marks if at >= 0]:
      return max(ends)
    if not text.startswith(content, begin):
      return None
    ending = through[after:]
    end = begin + len(content) + len(ending)
    return end if ending.strip() and text[:end].endswith(content + ending) else None

  def _unclear(self, text: str, other: str, i: int, *, where: str) -> DataError:
    at = next(
      (k for k, (a, b) in enumerate(zip(text, other)) if a != b), min(len(text), len(other))
    )
    return DataError(
      f"{where}: the chat template {str(self.file)!r} does not show the assistant's text in "
      f'message {i + 1}: the text of the messages up to there is not the beginning of the whole '
      f'text. From character {at} on it has {other[at : at + _SHOWN]!r}, the whole text has '
      f'{text[at : at + _SHOWN]!r}.',
      fix=f'Put {{% generation %}} and {{% endgeneration %}} in {self.file.name} around the '
      "assistant's text.",
      parameters=_PARAMETERS,
      docs='finetune.md#chat',
    )


def _unmarked(text: str) -> tuple[str, list[Span]]:
  """Returns `text` without the marks of `{% generation %}`, and the ranges between them."""
  pieces, spans = text.split(_BEGIN), []
  plain, at = [pieces[0]], len(pieces[0])
  for piece in pieces[1:]:
    inside, _, after = piece.partition(_END)
    spans.append((at, at + len(inside)))
    plain += [inside, after]
    at += len(inside) + len(after)
  return ''.join(plain), spans


def _sources(folder: pathlib.Path) -> tuple[pathlib.Path, dict[str, str]]:
  """Returns the file with the chat template, and name -> template, including 'default'."""
  file, found = folder / TEMPLATE_FILE, None
  try:
    if file.is_file():
      more = {path.stem: path for path in (folder / _MORE_TEMPLATES).glob('*.jinja')}
      paths = {**more, 'default': file}
      return file, {name: path.read_text('utf-8') for name, path in paths.items()}
    file = folder / CONFIG_FILE
    found = read_json(file, dict).get('chat_template') if file.is_file() else None
    if isinstance(found, list):
      found = {part['name']: part['template'] for part in found}
    elif isinstance(found, str):
      found = {'default': found}
  except (ValueError, KeyError, TypeError, OSError) as e:
    check_not_refused(e, file)
    raise DataError(
      f'The chat template in {str(file)!r} cannot be read: {e!r}.',
      fix='Correct it, or copy it from the model again.',
      parameters=_PARAMETERS,
    ) from e
  if not isinstance(found, dict) or 'default' not in found:
    names = f'only {", ".join(map(repr, found))}, and no default' if found else 'none'
    raise DataError(
      f'The tokenizer in {str(folder)!r} has no chat template: {TEMPLATE_FILE} does not exist, and '
      f"'chat_template' in {CONFIG_FILE} has {names}.",
      fix='Use the tokenizer of a chat model (often called Instruct), or write '
      f'{TEMPLATE_FILE} into the folder.',
      parameters=_PARAMETERS,
      docs='finetune.md#chat',
    )
  return file, found


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
  """Returns a sandboxed Jinja template. Raises DataError if it cannot be parsed."""
  jinja2 = _jinja2()
  environment = _environment(jinja2)
  try:
    return environment.from_string(source)
  except jinja2.TemplateSyntaxError as e:
    raise DataError(
      f'Line {e.lineno} of the chat template cannot be read: {e.message}.',
      fix='Correct it, or copy it from the model again.',
      parameters=_PARAMETERS,
    ) from e


def _jinja2() -> types.ModuleType:
  try:
    jinja2 = importlib.import_module('jinja2')
    for part in ('ext', 'sandbox'):
      importlib.import_module(f'jinja2.{part}')
  except ModuleNotFoundError as e:
    raise DataError(
      'Chat templates need the package jinja2, which is not installed.',
      fix="Run: pip install 't5x_gpu[hf]', or: pip install 'jinja2>=3.1.6'",
    ) from e
  if tuple(map(int, re.findall(r'\d+', jinja2.__version__)[:3])) < _OLDEST_JINJA:
    raise DataError(
      f'jinja2 {jinja2.__version__} has known ways out of its sandbox; chat templates need 3.1.6.',
      fix="Run: pip install 'jinja2>=3.1.6'",
    )
  return jinja2


def _environment(jinja2: types.ModuleType) -> Any:
  """Returns the environment of transformers' templates: options, filters and functions."""

  class Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks the assistant's text."""

    tags = {'generation'}

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
      return jinja2.nodes.CallBlock(self.call_method('marked'), [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
      return f'{_BEGIN}{caller()}{_END}'

  class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, which are Python internals."""

    def __init__(*args: object, **kwargs: object):
      for name in dict(*args[1:], **kwargs):
        _check_name(name)
      jinja2.utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: object) -> None:
      _check_name(name)
      super().__setitem__(name, value)

  def _check_name(name: object) -> None:
    if str(name).startswith('_'):
      raise jinja2.exceptions.SecurityError(f'a namespace cannot have the name {name!r}')

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
  )
  environment.filters['tojson'] = _to_json
  environment.globals |= {
    'raise_exception': raise_exception,
    'strftime_now': DATE.strftime,
    'namespace': Namespace,
  }
  return environment


def _to_json(
  value: JsonValue,
  ensure_ascii: bool = False,
  indent: Optional[int | str] = None,
  separators: Optional[tuple[str, str]] = None,
  sort_keys: bool = False,
) -> str:
  """Replaces Jinja's filter, which escapes HTML."""
  return json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
  )
