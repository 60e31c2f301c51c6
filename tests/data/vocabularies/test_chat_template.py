"""Chat templates give what transformers gives, and show what the assistant writes."""

import json

import numpy as np
import pytest

from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.tf_runtime import seqio
from t5x_gpu.data.vocabularies.chat_template import ChatTemplate
from t5x_gpu.data.vocabularies.huggingface import HuggingFaceVocabulary
from t5x_gpu.errors import DataError
from tests import helpers_chat
from tests.helpers_chat import TALKS, talk, write_tokenizer
from tests.messages import raises

pytest.importorskip('tokenizers')
pytestmark = pytest.mark.tf


def opened(folder):
  vocabulary = HuggingFaceVocabulary(folder)
  return vocabulary, ChatTemplate(vocabulary)


def written(vocabulary, ids, mask):
  """Returns the texts of the runs of tokens with a loss."""
  changes = np.flatnonzero(np.diff(np.pad(mask, 1))).reshape(-1, 2)
  return [vocabulary.spelled(ids[a:b].tolist()) for a, b in changes]


STYLES = {
  'CHATML': '{}<|im_end|>',
  'GENERATION': '{}<|im_end|>',
  'LLAMA3': '{}<|eot_id|>',
  'GEMMA': '{}<end_of_turn>',
}


@pytest.mark.parametrize('style', STYLES)
@pytest.mark.parametrize('zero_is_a_word', [False, True])
def test_ids_are_those_of_transformers_and_the_mask_is_the_answers(tmp_path, style, zero_is_a_word):
  transformers = pytest.importorskip('transformers')
  template = getattr(helpers_chat, style)
  folder = write_tokenizer(tmp_path, template, zero_is_a_word=zero_is_a_word)
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
  vocabulary, ours = opened(folder)
  assert vocabulary.zero_is_a_word == zero_is_a_word
  for messages in TALKS:
    if style == 'GEMMA' and messages[0]['role'] == 'system':
      continue
    marked = style == 'GENERATION'
    expected = theirs.apply_chat_template(messages, return_assistant_tokens_mask=marked)
    ids, mask = ours.tokens(messages, where='a.jsonl:1')
    assert ids.tolist() == expected['input_ids']
    if marked:
      assert mask.tolist() == expected['assistant_masks']
    trims = style in ('LLAMA3', 'GEMMA')
    answers = [m['content'] for m in messages if m['role'] == 'assistant']
    answers = [text.strip() if trims else text for text in answers]
    assert written(vocabulary, ids, mask) == [STYLES[style].format(text) for text in answers]
    prompt = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True)['input_ids']
    assert list(ours.prompt(messages[:-1], where='a')) == prompt
  assert vocabulary.added_tokens[ours.turn_end()] == STYLES[style].format('')


def test_tools_and_other_fields_reach_the_template_as_in_transformers(tmp_path):
  transformers = pytest.importorskip('transformers')
  folder = write_tokenizer(tmp_path, helpers_chat.GENERATION)
  tools = [{'type': 'function', 'function': {'name': 'caf\u00e9 <b>', 'parameters': {}}}]
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
  expected = theirs.apply_chat_template(
    TALKS[0], tools=tools, return_assistant_tokens_mask=True, return_dict=True
  )
  ids, mask = opened(folder)[1].tokens(TALKS[0], tools=tools, where='a')
  assert (ids.tolist(), mask.tolist()) == (expected['input_ids'], expected['assistant_masks'])


@pytest.mark.parametrize('style', ['LLAMA3', 'GENERATION'])
def test_calls_of_tools_that_the_template_does_not_show_are_refused(tmp_path, style):
  calls = [{'type': 'function', 'function': {'name': 'weather', 'arguments': {}}}]
  asked, answer = talk('Rain?', 'No.')
  calling = {'role': 'assistant', 'content': '', 'tool_calls': calls}
  messages = [asked, calling, {'role': 'tool', 'content': 'sun'}, answer]
  _, template = opened(write_tokenizer(tmp_path / 'old', getattr(helpers_chat, style)))
  with raises(DataError):
    template.tokens(messages, where='a.jsonl:1')
  shows = helpers_chat.CHATML.replace(
    'message.content', '(message.tool_calls | string if message.tool_calls else message.content)'
  )
  vocabulary, template = opened(write_tokenizer(tmp_path / 'new', shows))
  first, last = written(vocabulary, *template.tokens(messages, where='a'))
  assert 'weather' in first and last == 'No.<|im_end|>'


def test_an_answer_that_is_longer_as_the_last_one_is_found(tmp_path):
  vocabulary, template = opened(write_tokenizer(tmp_path, helpers_chat.THINKING))
  found = written(vocabulary, *template.tokens(TALKS[1], where='a'))
  assert found == ['The Nile \U0001f600<|im_end|>', '<think>\n\n</think>\n\n  None is.\n<|im_end|>']


def test_an_end_of_the_whole_text_belongs_to_the_last_answer(tmp_path):
  vocabulary, template = opened(write_tokenizer(tmp_path, helpers_chat.TEXT_END))
  messages = talk('Hi', ' Yo. ', 'Yo.', 'Yo.', 'And?', 'No.')
  ids, mask = template.tokens(messages, where='a')
  answers = [' Yo. <|im_end|>', 'Yo.<|im_end|>', 'No.<|im_end|>\n<eos>']
  assert written(vocabulary, ids, mask) == answers


def test_without_an_end_token_the_white_space_after_an_answer_ends_it(tmp_path):
  plain = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
  )
  vocabulary, template = opened(write_tokenizer(tmp_path, plain))
  ids, mask = template.tokens(TALKS[0], where='a')
  assert written(vocabulary, ids, mask) == [' It is five.\n'] or written(vocabulary, ids, mask) == [
    'It is five.\n'
  ]
  assert template.turn_end() is None


def test_a_template_that_does_not_show_the_answers_is_refused_with_the_way_out(tmp_path):
  counts = '{{ messages | length }}' + helpers_chat.CHATML
  _, template = opened(write_tokenizer(tmp_path, counts))
  with raises(DataError):
    template.tokens(TALKS[0], where='a.jsonl:7')


def test_what_a_template_raises_is_named_with_the_roles(tmp_path):
  _, template = opened(write_tokenizer(tmp_path, helpers_chat.GEMMA))
  with raises(DataError):
    template.tokens(TALKS[2], where='a.jsonl:3')


@pytest.mark.parametrize(
  'attack',
  [
    "{{ ''.__class__.__mro__ }}",
    '{{ messages.append(1) }}',
    '{{ namespace(_x=1) }}',
    '{% set ns = namespace() %}{% set ns.__init__ = 1 %}',
    '{{ strftime_now.__self__.year }}',
    "{% include 'tokenizer.json' %}",
  ],
)
def test_a_template_cannot_leave_its_sandbox(tmp_path, attack):
  _, template = opened(write_tokenizer(tmp_path, attack))
  with raises(DataError):
    template.prompt(TALKS[0], where='a')


def test_the_date_is_the_same_on_every_day(tmp_path):
  vocabulary, template = opened(write_tokenizer(tmp_path, "{{ strftime_now('%d %b %Y') }}"))
  assert vocabulary.spelled(template.prompt([], where='a')) == '26 Jul 2024'


def test_where_the_template_is_and_what_identifies_it(tmp_path):
  folder = write_tokenizer(tmp_path, [{'name': 'default', 'template': 'a'}, *_tool_use()])
  vocabulary, template = opened(folder)
  assert template.file.name == 'tokenizer_config.json'
  spelled = [vocabulary.spelled(template.prompt([], tools=t, where='a')) for t in (None, [{}])]
  assert spelled == ['a', 'with tools']
  before = template.fingerprint
  assert ChatTemplate(vocabulary).fingerprint == before
  (folder / 'chat_template.jinja').write_text('b')
  template = ChatTemplate(vocabulary)
  assert template.file.name == 'chat_template.jinja' and template.fingerprint != before
  assert HuggingFaceVocabulary(folder).fingerprint == vocabulary.fingerprint


def test_templates_in_files_are_found_as_in_transformers(tmp_path):
  folder = write_tokenizer(tmp_path, None)
  (folder / 'chat_template.jinja').write_text(helpers_chat.CHATML)
  vocabulary, template = opened(folder)
  before = template.fingerprint
  (folder / 'additional_chat_templates').mkdir()
  (folder / 'additional_chat_templates' / 'tool_use.jinja').write_text('{{ tools }} with tools')
  template = ChatTemplate(vocabulary)
  assert template.fingerprint != before
  transformers = pytest.importorskip('transformers')
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
  for tools in (None, [{'name': 'f'}]):
    expected = theirs.apply_chat_template(TALKS[0], tools=tools, tokenize=False)
    assert template.text(TALKS[0], tools=tools, where='a').startswith(expected)


def test_variables_reach_the_template_and_identify_it(tmp_path):
  vocabulary, plain = opened(write_tokenizer(tmp_path, '{{ mood }}'))
  template = ChatTemplate(vocabulary, {'mood': 'calm'})
  assert vocabulary.spelled(template.prompt([], where='a')) == 'calm'
  assert template.fingerprint != plain.fingerprint == ChatTemplate(vocabulary, {}).fingerprint
  for variables in ({'messages': []}, {'a b': 1}, {'mood': object()}):
    with raises(DataError):
      DatasetConfig('', {}, 'train', 1, chat_template_variables=variables)


def _tool_use():
  return [{'name': 'tool_use', 'template': 'with tools'}]


@pytest.mark.parametrize('template', [None, _tool_use(), [{'name': 'default'}], '{% if %}'])
def test_broken_templates_are_named(tmp_path, template):
  vocabulary = HuggingFaceVocabulary(write_tokenizer(tmp_path, template))
  with raises(DataError) as e:
    ChatTemplate(vocabulary)
  assert e.value.parameters


def test_other_vocabularies_have_no_template():
  with raises(DataError):
    ChatTemplate(seqio.ByteVocabulary())


def test_noncharacters_are_refused(tmp_path):
  _, template = opened(write_tokenizer(tmp_path, helpers_chat.CHATML))
  with raises(DataError):
    template.tokens(talk('a', 'b\ufdd0'), where='a.jsonl:2')
  assert json.dumps('\ufdd0') == '"\\ufdd0"'
